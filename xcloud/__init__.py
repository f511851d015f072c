"""Train language models whose parts sit in different clouds joined by a slow link."""

import sys as _sys

if _sys.argv[:1] == ["-m"] and not _sys.flags.safe_path:  # python -m xcloud, while it is found
    # Python puts the current directory before all others. Where xcloud does not lie in it, it may
    # be a folder that came from elsewhere, with a psutil.py of its own.
    if _sys.path[0] != __file__.removesuffix("/xcloud/__init__.py"):
        del _sys.path[0]

__version__ = "0.1.0"

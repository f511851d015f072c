"""Whether the Hugging Face hub is reachable, checked once and quickly. Downloads nothing."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from functools import cache

TIMEOUT_S = 5.0


@cache
def go_offline_if_unreachable() -> bool:
    """True if the hub answers. Otherwise switch this process's hub libraries to their caches:
    by default they retry for 23 s before each error.

    They read HF_HUB_OFFLINE once, on import, hence the module attributes below.
    """
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT):
        return True
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:  # else it reads the variable on import
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return False


def _answers(url: str) -> bool:
    """urllib honours the same proxy settings as the hub libraries."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT_S):
            return True
    except urllib.error.HTTPError:
        return True  # an error status is an answer too
    except (OSError, ValueError):
        return False

"""Whether the Hugging Face hub can be reached, found out once and at once. Downloads nothing."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from functools import cache

TIMEOUT_S = 5.0


@cache
def go_offline_if_unreachable() -> bool:
    """True when the hub answers. Otherwise tells the hub libraries of this process to work from
    their cache alone: left to themselves they retry for 23 s before each error.

    They read HF_HUB_OFFLINE once, when imported, hence the module attributes below.
    """
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT):
        return True
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:  # else it reads the variable when it is imported
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return False


def _answers(url: str) -> bool:
    """urllib honours the proxy settings that the hub libraries honour too."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT_S):
            return True
    except urllib.error.HTTPError:
        return True  # it answered, if only to say no
    except (OSError, ValueError):
        return False

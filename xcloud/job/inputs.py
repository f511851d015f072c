"""Digests of what a job reads from this machine's disk.

Whoever takes the result of an earlier run for that of this one (a sweep's point, a trial) must
know that it read the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xcloud.base.walk import walk
from xcloud.pretrained import contents_of

# Settings whose names end so lead to files, in every task and model.
_READ = re.compile(r"(task|model)\.(.*\.)?(\w*_)?(path|paths|file|checkpoint)")


def inputs_of(settings: Mapping[str, Any], cache_dir: Path) -> dict[str, str]:
    """Return digests of the files and folders here that settings of task or model name.

    The keys are the names of the settings. The digests stay on this machine.

    settings: the settings of a job, nested or with dotted names.
    cache_dir: the folder that keeps the digests of large files.
    """
    digests = {}
    for node in walk(settings):
        # An index of a list is no part of a setting's name.
        if isinstance(node.value, str) and node.value and _READ.fullmatch(node.setting):
            # A name on the hub has no contents here.
            digest = contents_of(Path(node.value).expanduser(), cache_dir)
            if digest is not None:
                digests[node.setting] = digest
    return digests

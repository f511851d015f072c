"""What a profile depends on, and where it is kept by that."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from xcloud import __version__
from xcloud.cluster.layout import ClusterLayout
from xcloud.cluster.transport import num_cores
from xcloud.comm.compression import Compression, Phased
from xcloud.job.experiment import Experiment

PROFILES_DIR = "profiles"
METHOD = "7"  # another one where the same work is measured in another way
MOST_SIZES = 8
Candidates = Mapping[str, Compression | Phased]


def what_is_measured(
    job: Experiment, candidates: Candidates, sizes: Sequence[int]
) -> dict[str, str]:
    """Whatever a profile depends on, in words."""
    model = hashlib.sha256(repr(job.model).encode()).hexdigest()[:8]
    compressors = json.dumps({name: repr(found) for name, found in sorted(candidates.items())})
    return {
        "machine": f"{processor()}, {num_cores()} processors",
        "device": device_of(job).type,
        "threads": str(threads_of(job.cluster)),
        "torch": torch.__version__,
        "xcloud": __version__,
        "model": f"{job.model.describe()} ({model})",
        "task": f"{job.task.describe()}, at most {job.task.max_length} tokens",
        "stages": f"{job.cluster.num_stages}, weights' gradients apart",
        "micro-batches": f"{', '.join(map(str, sizes))} samples, {job.training.precision}",
        "method": METHOD,
        "compressors": hashlib.sha256(compressors.encode()).hexdigest()[:8],
    }


def profile_file(cache: Path, of: Mapping[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]
    return cache / PROFILES_DIR / f"{digest}.json"


def sizes_of(batch_size: int, counts: Sequence[int]) -> list[int]:
    """The sizes of micro-batches to measure: all that these counts have, or MOST_SIZES of them,
    evenly spread by their ratios. Time over size is no straight line: matrix products of few rows
    are slow, and caches end somewhere."""
    found = sorted({max(1, batch_size // count) for count in counts})
    if len(found) <= MOST_SIZES:
        return found
    ratio = (found[-1] / found[0]) ** (1 / (MOST_SIZES - 1))
    wanted = [found[0] * ratio**i for i in range(MOST_SIZES)]
    return sorted({min(found, key=lambda size: abs(math.log(size / w))) for w in wanted})


def device_of(job: Experiment) -> torch.device:
    asked = {cloud.device for cloud in job.cluster.clouds.values()}
    has_gpu = torch.cuda.is_available() and asked != {"cpu"}
    return torch.device("cuda" if has_gpu else "cpu")


def threads_of(layout: ClusterLayout) -> int:
    """Of a rank, as launch/processes.py sets them."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given):
        return int(given)
    return max(1, num_cores() // layout.num_ranks)


def processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

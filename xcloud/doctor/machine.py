"""Checks of this machine: processors, memory, disk, descriptors, and what the cloud must read."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from xcloud.base.errors import ConfigError
from xcloud.base.units import human_bytes
from xcloud.doctor.case import Case
from xcloud.doctor.finding import Finding, ok, red, warn
from xcloud.launch.processes import num_threads
from xcloud.layout import num_ranks_in_words
from xcloud.line.hello import MAX_CONNECTIONS
from xcloud.line.mailbox import Mailbox
from xcloud.net.transport import num_cores
from xcloud.security.places import is_place, leads_of

_GIGABYTE = 10**9
_LEAST_DISK = _GIGABYTE
_ENOUGH_DISK = 10 * _GIGABYTE
_PROGRAM_BYTES = _GIGABYTE // 2
"""What a rank takes before it has a model, about: Python, torch, buffers."""
_OWN_FILES = 256
"""File descriptors that a rank uses besides its lines, at most."""
_FILES_PER_PEER = 4 * 3 * MAX_CONNECTIONS
"""At most, for lines to one rank of another cloud: activations, gradients, control and averages,
and three descriptors a connection."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_SAFE_PYTHON = (3, 11, 4)


def check_processors(case: Case) -> Finding:
    """Look for GPUs, else for cores, and whether each rank has one."""
    ranks = num_ranks_in_words(case.num_ranks)
    wants = case.layout.clouds[case.cloud].device
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # A cloud that asks for the CPU may have a GPU all the same.
    if num_gpus and wants != "cpu":
        memory = ", ".join(
            f"{one.name} {human_bytes(one.total_memory)}"
            for one in map(torch.cuda.get_device_properties, range(num_gpus))
        )
        fact = f"{num_gpus} for {ranks}: {memory}"
        # Ranks can share a GPU; they are slow, and nothing fails.
        if num_gpus < case.num_ranks:
            return warn("GPU", fact=fact, advice="ranks share a GPU; give the cloud fewer ranks")
        return ok("GPU", fact=fact, num_gpus=num_gpus)
    if wants == "cuda":
        return red(
            "GPU",
            fact=f"cluster.clouds.{case.cloud}.device is cuda, and torch finds no GPU",
            advice="install a driver and a torch for CUDA, or write device: auto into the file",
        )
    fact = f"{num_cores()} for {ranks}; no GPU is used"
    if num_cores() < case.num_ranks:
        return warn("cores", fact=fact, advice="ranks share a core; give the cloud fewer ranks")
    return ok("cores", fact=fact, num_cores=num_cores())


def check_load(case: Case) -> Finding:
    """Look whether other programs keep the processors busy."""
    load, _, _ = os.getloadavg()
    num_processors = os.cpu_count() or 1
    # The load of the last minute, which the doctor itself adds little to.
    fact = f"{load:.1f} on {num_processors} processors, before the run"
    if load > num_processors:
        return warn(
            "load",
            fact=fact,
            advice="end other programs here, or each step takes as much longer",
            load=load,
        )
    return ok("load", fact=fact, load=load)


def check_memory(case: Case) -> Finding:
    """Look at the free memory. What the stages need is known only after a trial run."""
    free = psutil.virtual_memory().available
    # psutil sees the machine's memory, and a container may have less. "max" is no number: there is
    # no limit.
    with suppress(OSError, ValueError):
        free = min(free, int(_CGROUP_LIMIT.read_text()))
    needs = case.num_ranks * _PROGRAM_BYTES
    fact = (
        f"{human_bytes(free)} free; about {human_bytes(needs)} for "
        f"{num_ranks_in_words(case.num_ranks)} without the model, for which plan=show has figures"
    )
    if free < needs:
        return red(
            "memory", fact=fact, advice="end other programs, or take a larger machine", free=free
        )
    return ok("memory", fact=fact, free=free)


def check_disk(case: Case) -> Finding:
    """Look at the free disk where the run would be written."""
    folder = case.run_dir.absolute()
    # The run makes the folder; its nearest parent is on the disk that counts.
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    fact = f"{human_bytes(free)} free in {folder}"
    advice = "make room there, or name another folder with --run-dir"
    if not os.access(folder, os.W_OK):
        return red("disk", fact=f"{folder} may not be written", advice=advice)
    if free < _LEAST_DISK:
        return red("disk", fact=fact, advice=advice, free=free)
    if free < _ENOUGH_DISK:
        return warn("disk", fact=fact, advice=advice, free=free)
    return ok("disk", fact=fact, free=free)


def check_descriptors(case: Case) -> Finding:
    """Look whether a rank may open as many files as its lines to other clouds can need."""
    num_peers = 0
    if not isinstance(case.layout.wan, Mailbox):  # which needs none beside those of a rank's own
        num_peers = sum(len(case.layout.ranks_in(peer)) for peer in case.peers)
    # The most that could ever be open at once: a limit that is reached in the middle ends a run.
    needs = _OWN_FILES + _FILES_PER_PEER * num_peers
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return ok("open files", fact="no limit")
    fact = f"a rank may open {limit}, and needs up to {needs} with {num_peers} in other clouds"
    if limit < needs:
        return red("open files", fact=fact, advice=f"ulimit -n {needs}", limit=limit, needs=needs)
    return ok("open files", fact=fact, limit=limit, needs=needs)


def check_files(case: Case) -> Finding:
    """Look whether the files and folders that the experiment reads are here."""
    wanted = set()
    fetched = set()
    # The same list as the policy's: what the file leads to.
    for one in leads_of(case.settings.plain):
        # A name on the hub that means a folder here is a file to read.
        if one.to == "read" or (one.to == "hub" and is_place(one.value)):
            wanted.add(one.value)
        elif one.to == "hub":
            fetched.add(one.value)
    missing = sorted(path for path in wanted if not Path(path).expanduser().exists())
    if missing:
        return red(
            "files to read",
            fact=f"there is no {', '.join(missing)}",
            advice="copy it to where the file says, or change the path in all clouds",
        )
    fact = f"{', '.join(sorted(wanted)) or 'none is named'}"
    if fetched:
        fact += f"; fetched from the hub if they are not here: {', '.join(sorted(fetched))}"
    return ok("files to read", fact=fact)


def check_versions(case: Case) -> Finding:
    """Look at the versions of Python and torch."""
    fact = f"Python {platform.python_version()}, torch {torch.__version__}"
    if sys.version_info < _SAFE_PYTHON:
        return warn("versions", fact=fact, advice="install Python 3.11.4 or later")
    return ok("versions", fact=fact)


def check_threads(case: Case) -> Finding:
    """Look whether OMP_NUM_THREADS, if it is set, can be meant."""
    name = "threads"
    try:
        given = num_threads(case.num_ranks)
    except ConfigError as error:
        return red(name, fact=str(error), advice="unset OMP_NUM_THREADS")
    fact = f"{given} for each of {num_ranks_in_words(case.num_ranks)}"
    if "OMP_NUM_THREADS" in os.environ:
        fact += ", as OMP_NUM_THREADS says"
    # OMP_NUM_THREADS may name a number for each level.
    wanted = int(given.split(",")[0]) * case.num_ranks
    if wanted > num_cores() and "OMP_NUM_THREADS" in os.environ:
        return warn(
            name,
            fact=f"{fact}, {wanted} on {num_cores()} cores",
            advice="unset OMP_NUM_THREADS, and ranks share the cores",
        )
    return ok(name, fact=fact)


CHECKS = (
    check_processors,
    check_load,
    check_memory,
    check_disk,
    check_descriptors,
    check_files,
    check_versions,
    check_threads,
)

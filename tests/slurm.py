"""A Slurm of one node of two cores, as long as a test takes: munged, slurmctld and slurmd."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.runs import wait_for

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "squeue")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmdPort={slurmd}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobRequeue=1
KillWait=30
OverTimeLimit=0
{more}
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def is_installed() -> bool:
    return os.getuid() == 0 and all(shutil.which(name, path=PATH) for name in PROGRAMS)


@contextmanager
def slurm(folder: Path, *more: str) -> Iterator[dict[str, str]]:
    """Start it, and yield the environment of commands that use it. more: lines of slurm.conf."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    numbers = [port.getsockname()[1] for port in ports]
    for port in ports:
        port.close()
    host = socket.gethostname().split(".")[0]
    conf = CONF.format(
        host=host, ctld=numbers[0], slurmd=numbers[1], user=getpass.getuser(), folder=folder,
        more="\n".join(more),
    )  # fmt: skip
    (folder / "slurm.conf").write_text(conf)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
    key = folder / "munge.key"
    subprocess.run(["mungekey", "--create", f"--keyfile={key}"], check=True, env=environment)
    socket_file = folder / "munge.socket"
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        with open(folder / f"{command[0]}.out", "wb") as log:
            daemons.append(
                subprocess.Popen(
                    command, stdout=log, stderr=log, env=environment, start_new_session=True
                )
            )

    try:
        start(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket_file}",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munged.seed",
        )  # fmt: skip
        wait_for(socket_file.exists)
        start("slurmctld", "-D", "-c")
        start("slurmd", "-D", "-N", host)
        wait_for(lambda: "idle" in asked(["sinfo", "-h", "-o", "%T"], environment), 120)
        yield environment
    finally:
        asked(["scancel", "--full", "--signal=KILL", "--me"], environment)
        asked(["scancel", "--me"], environment)
        until_s = time.monotonic() + 30.0
        while asked(["squeue", "-h"], environment).strip() and time.monotonic() < until_s:
            time.sleep(0.5)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(20.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def asked(command: Sequence[str], environment: dict[str, str]) -> str:
    """Return what a command of Slurm prints."""
    found = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=60
    )
    return found.stdout + found.stderr

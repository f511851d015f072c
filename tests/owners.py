"""Clouds of two owners on this machine: a folder of keys and a policy each, and nothing in common
but the experiment file and the lines between them; and keys of three clouds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from benchmarks.namespaces import inside
from tests.runs import ROOT, command, free_port, read
from tests.toy import toy_config
from xcloud.line.keys import LineKeys, make_key, read_line_keys
from xcloud.security.places import leads_of


@cache
def folder_of_keys() -> Path:
    """Return a folder with the keys of all clouds."""
    folder = tempfile.TemporaryDirectory(prefix="xcloud-keys-")
    _FOLDERS.append(folder)
    for name in ("cloud_a", "cloud_b", "cloud_c", "cloud_d", "owner", "other"):
        make_key(name, Path(folder.name))
    return Path(folder.name)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def keys_of(me: str, peers: Sequence[str]) -> LineKeys:
    """Return the keys of a cloud that knows these peers."""
    folder = folder_of_keys()
    named = {peer: [f"{peer}.pem"] for peer in peers}
    return read_line_keys(me, named, policy_file=folder / "policy.yaml")


def copy_keys(folder: Path) -> Path:
    """Copy all keys into a folder, and return where its policy would lie."""
    shutil.copytree(folder_of_keys(), folder, dirs_exist_ok=True)
    return folder / "policy.yaml"


CLOUDS = ("cloud_a", "cloud_b")


class Owners:
    """A run of several clouds, each of another owner and started by a command of its own."""

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str] = (),
        changed: dict[str, Any] | None = None,
        mailbox: Path | str | None = None,
        cluster: str = "two_clouds",
        compose: Callable[[str, list[str]], Any] = toy_config,
        bucket: Path | None = None,
    ) -> None:
        """changed: settings of the config by dotted name, besides overrides of the toy's.

        mailbox: the folder between them; None: sealed lines.
        bucket: another folder that all may reach.
        compose: returns the config, as toy_config does.
        """
        self.folder = folder
        wan = ["cluster/wan=sealed"]
        if mailbox is not None:
            wan = ["cluster/wan=mailbox", f"cluster.wan.url={mailbox}"]
        config = OmegaConf.create(compose(cluster, [*wan, *overrides]))
        for name, value in (changed or {}).items():
            OmegaConf.update(config, name, value, force_add=True)
        self.clouds = tuple(str(name) for name in config.cluster.clouds)
        plain = OmegaConf.to_container(config, resolve=True)
        lines = [lead.value for lead in leads_of(plain) if lead.to == "line"]
        reached = yaml.safe_dump(
            [str(one) for one in (mailbox, bucket) if one is not None] + lines,
            default_flow_style=True,
        )
        self.file = folder / "experiment.yaml"
        self.file.write_text(OmegaConf.to_yaml(config))
        constructors = "".join(f"  - {name}\n" for name in _TOYS)
        for me in self.clouds:
            own = folder / f"owner_{me}"
            own.mkdir(exist_ok=True)
            peers = [name for name in self.clouds if name != me]
            for name in (f"{me}.key", f"{me}.pem", *(f"{peer}.pem" for peer in peers)):
                shutil.copy(folder_of_keys() / name, own)
            known = ", ".join(f"{peer}: [{peer}.pem]" for peer in peers)
            (own / "policy.yaml").write_text(
                f"me: {me}\npeers: {{{known}}}\nwrite: [{folder / 'cache'}, .cache, mlruns]\n"
                f"addresses: {reached.strip()}\n"
                f"constructors:\n{constructors}"
            )

    def run_dir(self, cloud: str, machine: int = 0) -> Path:
        return self.folder / (f"{cloud}.{machine}" if machine else cloud)

    def log(self, cloud: str, machine: int = 0) -> Path:
        return self.folder / f"{self.run_dir(cloud, machine).name}.log"

    def said(self, cloud: str, machine: int = 0) -> str:
        run_dir = self.run_dir(cloud, machine)
        logs = [self.log(cloud, machine), *sorted(run_dir.glob("rank*.log"))]
        return "".join(read(path) for path in logs if path.exists())

    def start(self, cloud: str, *words: str, machine: int = 0, host: str | None = None) -> Any:
        """Give the command of one owner. machine: of the cloud, which has a folder of its own.

        host: the network namespace in which the command is given.
        """
        log = self.log(cloud, machine)
        own = {"XCLOUD_POLICY": str(self.folder / f"owner_{cloud}/policy.yaml")}
        words = (
            "-m", "xcloud", "join", str(self.file), "--cloud", cloud,
            "--run-dir", str(self.run_dir(cloud, machine)), *words,
        )  # fmt: skip
        if host is None:
            return command(*words, log=log, **own)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **own}
        with log.open("w") as file:
            return subprocess.Popen(
                [*inside(host), sys.executable, *words],
                cwd=ROOT, env=environment, stdout=file, stderr=file,
            )  # fmt: skip

    def finish(self, within_s: float = 120.0, **words: Sequence[str]) -> None:
        """Run all clouds to their end, which must be a good one."""
        processes = [self.start(cloud, *words.get(cloud, ())) for cloud in self.clouds]
        codes = [process.wait(within_s) for process in processes]
        assert not any(codes), "".join(self.said(cloud) for cloud in self.clouds)


@contextmanager
def relay_at(host: str, address: str) -> Iterator[None]:
    """Run a relay in a network namespace."""
    command = [*inside(host), sys.executable, "-m", "xcloud", "relay", "--listen", address]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield
    finally:
        process.kill()
        process.wait()


TwoOwners = Owners  # of cloud_a and cloud_b

_TOYS = (
    "tests.combinations.PairModel", "tests.toy.ToyModel", "tests.toy.ToyModelThatPrepares",
    "tests.toy.ToyModelThatStops", "tests.toy.ToyTask", "tests.toy.ToyTaskThatDiffers",
    "tests.toy_text.ToyTextModel", "tests.toy_text.ToyTextTask",
)  # fmt: skip


def address(cloud: str, port: int | None = None) -> str:
    """Return the setting of a cloud's address on this machine."""
    return f"+cluster.clouds.{cloud}.address=127.0.0.1:{port or free_port()}"

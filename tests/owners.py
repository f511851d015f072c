"""Clouds of two owners on this machine: a folder of keys and a policy each, and nothing in common
but the experiment file and the lines between them; and keys of three clouds."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tests.runs import command, free_port, read
from tests.toy import toy_config
from xcloud.line.keys import LineKeys, make_key, read_line_keys


@cache
def folder_of_keys() -> Path:
    """Return a folder with the keys of cloud_a, cloud_b and cloud_c."""
    folder = tempfile.TemporaryDirectory(prefix="xcloud-keys-")
    _FOLDERS.append(folder)
    for name in ("cloud_a", "cloud_b", "cloud_c"):
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


class TwoOwners:
    """A run of two clouds, each started by a command of its own."""

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str] = (),
        changed: dict[str, Any] | None = None,
        mailbox: Path | None = None,
    ) -> None:
        """changed: settings of the config by dotted name, besides overrides of the toy's.

        mailbox: the folder between the two; None: sealed lines.
        """
        self.folder = folder
        wan = ["cluster/wan=sealed"]
        addresses = ""
        if mailbox is not None:
            wan = ["cluster/wan=mailbox", f"cluster.wan.url={mailbox}"]
            addresses = f"addresses: [{mailbox}]\n"
        config = OmegaConf.create(toy_config("two_clouds", [*wan, *overrides]))
        for name, value in (changed or {}).items():
            OmegaConf.update(config, name, value, force_add=True)
        self.file = folder / "experiment.yaml"
        self.file.write_text(OmegaConf.to_yaml(config))
        for me, peer in (CLOUDS, CLOUDS[::-1]):
            own = folder / f"owner_{me}"
            own.mkdir()
            for name in (f"{me}.key", f"{me}.pem", f"{peer}.pem"):
                shutil.copy(folder_of_keys() / name, own)
            constructors = "".join(f"  - tests.toy.{name}\n" for name in _TOYS)
            (own / "policy.yaml").write_text(
                f"me: {me}\npeers: {{{peer}: [{peer}.pem]}}\n{addresses}"
                f"constructors:\n{constructors}"
            )

    def run_dir(self, cloud: str) -> Path:
        return self.folder / cloud

    def log(self, cloud: str) -> Path:
        return self.folder / f"{cloud}.log"

    def said(self, cloud: str) -> str:
        logs = [self.log(cloud), *sorted(self.run_dir(cloud).glob("rank*.log"))]
        return "".join(read(path) for path in logs if path.exists())

    def start(self, cloud: str, *words: str) -> Any:
        """Give the command of one owner."""
        return command(
            "-m", "xcloud", "join", str(self.file), "--cloud", cloud,
            "--run-dir", str(self.run_dir(cloud)), *words,
            log=self.log(cloud), XCLOUD_POLICY=str(self.folder / f"owner_{cloud}/policy.yaml"),
        )  # fmt: skip

    def finish(self, within_s: float = 120.0, **words: Sequence[str]) -> None:
        """Run both clouds to their end, which must be a good one."""
        both = [self.start(cloud, *words.get(cloud, ())) for cloud in CLOUDS]
        codes = [process.wait(within_s) for process in both]
        assert codes == [0, 0], self.said("cloud_a") + self.said("cloud_b")


_TOYS = ("ToyModel", "ToyModelThatPrepares", "ToyModelThatStops", "ToyTask", "ToyTaskThatDiffers")


def address(cloud: str, port: int | None = None) -> str:
    """Return the setting of a cloud's address on this machine."""
    return f"+cluster.clouds.{cloud}.address=127.0.0.1:{port or free_port()}"

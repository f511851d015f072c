"""Clouds of two owners on this machine: a folder of keys and a policy each, and nothing in common
but the experiment file and the lines between them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tests.line_keys import folder_of_keys
from tests.runs import command, free_port, read
from tests.toy import toy_config

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

"""A run of two owners whose line is cut again and again: what of it changes, and for how long.

    python -m benchmarks.cuts [--cuts 200] [--seed 1] [--kinds reset silence address restart]
        [--mbit 20] [--json FILE]

Two network namespaces are the owners' machines: each starts its own cloud with `xcloud join`, and
between them is one sealed line. Needs root and iproute2; traffic stays on this machine. First a
run that nobody disturbs, then the same one cut at random moments, in random order:

    reset     all connections are reset, and may be made again at once
    silence   packets are lost for 0.1 to 60 s, most often for less than 2 s
    address   the cloud that dials has another address from one moment to the next
    restart   the rank of one cloud is killed; both clouds go on from their last checkpoint

Prints, for each kind, the seconds from when the line was back until a whole update had been made
since. A killed rank's line is back once ranks of both clouds, started again, have connected to
each other; the seconds until then stand under "lasted". Exits with 1 unless both runs end well
with the same weights, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import say_where
from benchmarks.namespaces import ADDRESSES, INTERFACE, available, cut, inside, join, two_hosts
from tests.owners import CLOUDS, TwoOwners
from tests.runs import weights
from xcloud.pipeline.hook import Hook, StepReport
from xcloud.record.files import CheckpointSteps

SHARES = {"reset": 0.5, "silence": 0.2, "address": 0.26, "restart": 0.04}
PORT = 7000
UPDATES_FILE = "updates.txt"
HOOK = "benchmarks.cuts.WriteUpdates"
UPDATES_A_CUT = 10
"""How many updates the run has for each cut: more than are made between two of them."""
WITHIN_S = 600.0


class WriteUpdates:
    """An own hook that writes when rank 0 finished which update, for who cuts its line."""

    def join(self, context: Any) -> Hook:
        if context.rank:
            return Hook()
        return _UpdateWriter(context.run_dir / UPDATES_FILE)


class _UpdateWriter(Hook):
    def __init__(self, file: Path) -> None:
        self._file = file.open("a", buffering=1)

    def after_update(self, step: int, report: StepReport) -> None:
        self._file.write(f"{step} {time.monotonic()}\n")


@dataclass
class Cut:
    """A cut, and what came of it.

    lasted_s: until the line was back; before the cut, how long a silence is to last.
    back_s: from then on until a whole update had been made.
    """

    kind: str
    lasted_s: float = 0.0
    back_s: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--mbit", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if (reason := available()) is not None:
        sys.exit(f"this benchmark cannot run here: {reason}")
    say_where()
    draw = random.Random(given.seed)
    cuts = draw_cuts(given.cuts, kinds=given.kinds, draw=draw)
    with tempfile.TemporaryDirectory() as folder, two_hosts(given.mbit * 1e6) as hosts:
        max_steps = UPDATES_A_CUT * len(cuts)
        undisturbed = Run(Path(folder) / "undisturbed", hosts, max_steps=max_steps)
        undisturbed.finish()
        disturbed = Run(Path(folder) / "disturbed", hosts, max_steps=max_steps)
        disturbed.start()
        try:
            disturbed.await_checkpoint()
            for number, planned in enumerate(cuts, 1):
                disturbed.suffer(planned, draw=draw)
                print(f"{number:4}  {planned.kind:8} {planned.lasted_s:7.2f} s, data after "
                      f"{planned.back_s:6.2f} s", flush=True)  # fmt: skip
        finally:
            disturbed.finish()
        is_same = same_weights(undisturbed, disturbed)
    print(table(cuts))
    equal = "equal to the bit" if is_same else "NOT those of the undisturbed run"
    print(f"{given.mbit:g} Mbit/s, {max_steps} updates, {len(cuts)} cuts: weights {equal}")
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in cuts]) + "\n")
    sys.exit(not is_same)


def draw_cuts(count: int, kinds: Sequence[str], draw: random.Random) -> list[Cut]:
    """Return so many cuts in random order, each kind by its share."""
    whole = sum(SHARES[kind] for kind in kinds)
    nums = {kind: round(count * SHARES[kind] / whole) for kind in kinds}
    nums[kinds[0]] += count - sum(nums.values())
    cuts = [Cut(kind) for kind in kinds for _ in range(nums[kind])]
    silences = [one for one in cuts if one.kind == "silence"]
    for place, one in enumerate(silences):
        one.lasted_s = silence_s(place / max(1, len(silences) - 1))
    draw.shuffle(cuts)
    return cuts


def silence_s(share: float) -> float:
    """Return how long a silence lasts that so large a share of all are shorter than: 0.1 to 60 s,
    half of them up to 1 s."""
    return float(0.1 * 600 ** (share**1.45))


def table(cuts: Sequence[Cut]) -> str:
    """Return the cuts by kind."""
    lines = [f"{'kind':9} {'number':>6} {'lasted s':>14} | data flows after, s: {'median':>7} "
             f"{'worst':>7} {'over 2 s':>8}"]  # fmt: skip
    for kind in SHARES:
        of_kind = [one for one in cuts if one.kind == kind]
        if not of_kind:
            continue
        lasted_s = [one.lasted_s for one in of_kind]
        back_s = [one.back_s for one in of_kind]
        late = sum(seconds > 2.0 for seconds in back_s)
        lines.append(f"{kind:9} {len(of_kind):6} {min(lasted_s):6.2f}-{max(lasted_s):7.2f} | "
                     f"{'':20} {statistics.median(back_s):7.2f} {max(back_s):7.2f} "
                     f"{late:8}")  # fmt: skip
    return "\n".join(lines)


def same_weights(first: Run, second: Run) -> bool:
    """Return whether two runs have exported the same weights, both clouds together."""
    one, other = first.weights(), second.weights()
    assert one, "a run exports weights"
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Run:
    """A run of two owners in two namespaces."""

    def __init__(self, folder: Path, hosts: Sequence[str], max_steps: int) -> None:
        folder.mkdir()
        self._hosts = hosts
        self._addresses = 1  # that the dialling host has had
        self._commands: dict[str, subprocess.Popen[bytes]] = {}
        self._owners = TwoOwners(
            folder,
            [f"+cluster.clouds.cloud_a.address={ADDRESSES[0]}:{PORT}",
             f"training.max_steps={max_steps}", "training.batch_size=64",
             "training.checkpoint.every_steps=20", "launch.max_restarts=100"],
            {"hooks.updates._target_": HOOK,
             "model.hidden": 48, "task.num_samples": 1000,
             "training.optimizer.learning_rate": 1e-4},  # so slow that it learns to the end
        )  # fmt: skip
        for cloud in CLOUDS:
            with (folder / f"owner_{cloud}" / "policy.yaml").open("a") as policy:
                policy.write(f"  - {HOOK}\n")

    def start(self) -> None:
        for cloud, host in zip(CLOUDS, self._hosts, strict=True):
            self._commands[cloud] = self._owners.start(cloud, host=host)

    def finish(self) -> None:
        """Wait for the end of the run, which must be a good one."""
        if not self._commands:
            self.start()
        try:
            codes = [command.wait(WITHIN_S) for command in self._commands.values()]
        finally:
            for command in self._commands.values():
                if command.poll() is None:
                    command.terminate()
                    command.wait()
        if any(codes):
            sys.exit("".join(self._owners.said(cloud) for cloud in CLOUDS))

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            name: value
            for cloud in CLOUDS
            for name, value in weights(self._owners.run_dir(cloud)).items()
        }

    def await_checkpoint(self) -> None:
        """Wait until a restart has something to go on from."""
        folders = [CheckpointSteps(self._owners.run_dir(cloud)) for cloud in CLOUDS]
        self._await(lambda: all(folder.agreed_steps() for folder in folders))

    def suffer(self, planned: Cut, draw: random.Random) -> None:
        """Cut the line some updates from now, and wait until updates are made again."""
        self._await_update(time.monotonic(), number=draw.randint(1, 4))
        time.sleep(draw.uniform(0.0, 0.1))
        begun_s = time.monotonic()
        if planned.kind == "silence":
            self._lose_packets(planned.lasted_s)
        else:
            {
                "reset": self._reset,
                "address": self._change_address,
                "restart": self._kill_rank,
            }[planned.kind](draw)
        back_at_s = time.monotonic()
        planned.lasted_s = back_at_s - begun_s
        # The first one after it may have been under way.
        planned.back_s = self._await_update(back_at_s, number=2) - back_at_s

    def _reset(self, draw: random.Random) -> None:
        host = draw.choice(self._hosts)
        _do(*inside(host), "ss", "-K", "-t", "state", "established", "dst", "10.213.0.0/24")

    def _lose_packets(self, seconds: float) -> None:
        cut(self._hosts)
        time.sleep(seconds)
        join(self._hosts)

    def _change_address(self, draw: random.Random) -> None:
        host = self._hosts[1]
        before, self._addresses = self._addresses, self._addresses % 200 + 1
        script = "; ".join(
            f"ip addr {verb} 10.213.0.{number + 1}/24 dev {INTERFACE}"
            for verb, number in (("del", before), ("add", self._addresses))
        )
        _do(*inside(host), "sh", "-ec", script)

    def _kill_rank(self, draw: random.Random) -> None:
        """Kill the rank of one cloud. Return once ranks of both have connected again."""
        before = {cloud: self._rank_of(cloud) for cloud in CLOUDS}
        killed = before[draw.choice(CLOUDS)]
        assert killed is not None, "updates are made"
        os.kill(killed, signal.SIGKILL)

        def have_connected() -> bool:
            now = {cloud: self._rank_of(cloud) for cloud in CLOUDS}
            if any(now[cloud] in (None, before[cloud]) for cloud in CLOUDS):
                return False
            return _is_connected(self._commands[CLOUDS[0]].pid)

        self._await(have_connected)

    def _rank_of(self, cloud: str) -> int | None:
        """Return the process of a cloud's rank, if it has been started."""
        launcher = self._commands[cloud].pid
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        for child in children:
            try:
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended
            if b"worker" in words:
                return int(child)
        return None

    def _await_update(self, since_s: float, number: int) -> float:
        """Wait for so many updates that end after this moment. Return when the last one ended."""
        ends_s: list[float] = []

        def have_been_made() -> bool:
            nonlocal ends_s
            ends_s = [at_s for at_s in self._update_ends() if at_s > since_s]
            return len(ends_s) >= number

        self._await(have_been_made)
        return ends_s[number - 1]

    def _update_ends(self) -> list[float]:
        """Return when the last updates ended."""
        file = self._owners.run_dir(CLOUDS[0]) / UPDATES_FILE
        if not file.exists():
            return []
        with file.open("rb") as found:
            found.seek(max(0, file.stat().st_size - 4096))
            lines = found.read().split(b"\n")[1:-1]
        return [float(line.split()[1]) for line in lines]

    def _await(self, condition: Callable[[], bool]) -> None:
        until_s = time.monotonic() + WITHIN_S
        while not condition():
            if any(command.poll() is not None for command in self._commands.values()):
                raise RuntimeError("the run ended before all its cuts")
            if time.monotonic() > until_s:
                raise RuntimeError("no update for minutes")
            time.sleep(0.01)


def _is_connected(process: int) -> bool:
    """Return whether the host of a process has a connection at the port of the line."""
    rows = Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]
    return any(
        row.split()[1].endswith(f":{PORT:04X}") and row.split()[3] == "01"  # established
        for row in rows
    )


def _do(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

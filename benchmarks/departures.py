"""How often the watch over messages from other clouds (features/sentinel) alarms without a cause,
and which faults it finds, over whole runs.

    python -m benchmarks.departures [--jobs abnet causal ...] [--out FOLDER]

Each job runs to its end, and its ranks keep what was measured of every message: as it came, and
every second step as it would have come had the sender's tensor been noise, had noise of its norm
been added, or had it been a constant; those went through the same compressor. Then, without any
run, the watch follows each stream: departures of what really came are false alarms. From every
50th step on, a copy of it is fed one of the faults for 20 steps: signs flipped, scaled by 10,
zeros, a constant, noise in place of the signal, noise of its norm added. Nothing is trained on
these, so what they would do to later messages is not in it.

Printed, and written to OUT/departures.json. Half an hour on two cores; a job whose measurements
are in OUT already is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.machine import ran_on
from xcloud.base.settings import settings
from xcloud.comm.channel import BoundaryField, ReceiveChannel, SendChannel
from xcloud.features.sentinel.baseline import LEARNS_FOR, Baseline, Departure
from xcloud.features.sentinel.measures import NUM_NUMBERS, NUM_ROWS, measure
from xcloud.net.frame import Kind, MessageKey, TensorSpec
from xcloud.pipeline.hook import Hook

COMMON = [
    "cluster.wan=free", "tracker=none", "task.data.num_dev=8", "task.data.num_test=8",
    "training.checkpoint.every_steps=0", "training.checkpoint.every_minutes=0",
    "+hooks.record._target_=benchmarks.departures.Record",
]  # fmt: skip
SMALL_BERT = ["data=glue_small", "recipe=lowrank_small", "model.backbone.pretraining.steps=200"]
JOBS: dict[str, list[str]] = {
    "abnet": ["+exp=abnet_iwslt"],
    "abnet_topk": [
        "+exp=abnet_iwslt", "compression=topk_ef", "schedule=one_forward_one_backward",
        "training.batch_size=16",
    ],
    "lora_clm": ["+exp=lora_clm", "training.max_steps=600"],
    "causal": [
        "+exp=lora_clm", "model.lora=null", "compression=int8", "schedule=zero_bubble",
        "training.max_steps=800", "training.batch_size=16",
    ],
    "sst2": ["+exp=bert_split_sst2", *SMALL_BERT, "training.max_steps=600"],
    "qnli": ["+exp=bert_split_qnli", *SMALL_BERT, "training.max_steps=600", "compression=int4"],
}  # fmt: skip
FAULTS = ("signs flipped", "scaled by 10", "zeros", "a constant", "noise instead", "noise added")
WITHIN = 20  # steps
EVERY = 50  # steps between two beginnings of faults
FOLDER = "XCLOUD_DEPARTURES"  # in a rank's environment: where it writes

Measured = dict[int, Tensor]  # mean of a step's messages, by step


class StreamName(NamedTuple):
    """A stream: its direction, its boundary, its sender, and the number of its codec."""

    direction: str
    boundary: int
    sender: int
    codec: str


_found: dict[tuple[str, StreamName], dict[int, list[Tensor]]] = defaultdict(
    lambda: defaultdict(list)
)


def _note(what: str, channel: Any, name: str, key: MessageKey, rows: Tensor) -> None:
    identity = channel.identity
    codecs = channel.codecs[name]
    in_force = codecs.at(key.step)
    number = next(n for n, codec in codecs.children().items() if codec is in_force)
    stream = StreamName(identity.direction, identity.boundary, identity.sender, number)
    _found[what, stream][key.step].append(measure(rows))


def _record_received(decode: Any) -> Any:
    def decoded(self: ReceiveChannel, key: MessageKey, *more: Any, **named: Any) -> Any:
        message = decode(self, key, *more, **named)
        for one in self.fields:
            if one.dtype.is_floating_point and key.kind is not Kind.EVALUATION:
                _note("as it came", self, one.name, key=key, rows=message[one.name])
        return message

    return decoded


def _record_faults(encode: Any) -> Any:
    generator = torch.Generator().manual_seed(0)

    def encoded(
        self: SendChannel, key: MessageKey, field: BoundaryField, tensor: Tensor, rows: Any
    ) -> Any:
        if key.kind is not Kind.EVALUATION and key.step % 2 == 0:
            codec = self.codecs[field.name].at(key.step)
            norm = tensor.float().square().mean().sqrt()
            noise = norm * torch.randn(tensor.shape, generator=generator)
            wrong = {
                "a constant": torch.full_like(tensor, float(norm)),
                "noise instead": noise,
                "noise added": tensor + noise,
            }
            for fault, value in wrong.items():
                parts = codec.compress_apart(value, stream=7)
                seen = codec.compressor.decompress(parts, TensorSpec.of(tensor))
                _note(fault, self, field.name, key=key, rows=seen)
        return encode(self, key, field, tensor=tensor, rows=rows)

    return encoded


class _Recording(Hook):
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def finish(self) -> None:
        means = {
            name: {step: torch.stack(each).mean(0).numpy() for step, each in by_step.items()}
            for name, by_step in _found.items()
        }
        path = Path(os.environ[FOLDER]) / f"rank{self._rank}.pickle"
        path.write_bytes(pickle.dumps(means))


@settings("hooks.record")
class Record:
    """The settings of a hook that keeps what was measured of each message."""

    def join(self, context: Any) -> Hook:
        for owner, name, wrap in (
            (ReceiveChannel, "_decoded", _record_received),
            (SendChannel, "_encoded", _record_faults),
        ):
            mock.patch.object(owner, name, wrap(getattr(owner, name))).start()
        return _Recording(context.rank)


def run(words: Sequence[str], folder: Path) -> None:
    """Run a job in processes of its own. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", "xcloud", "run", *words, *COMMON]
    command += [f"hydra.run.dir={folder / 'run'}"]
    environment = {**os.environ, FOLDER: str(folder)}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)


def read(folder: Path) -> dict[tuple[str, StreamName], Measured]:
    found: dict[tuple[str, StreamName], Measured] = {}
    for path in folder.glob("rank*.pickle"):  # of our own ranks
        for name, by_step in pickle.loads(path.read_bytes()).items():
            found[name] = {step: torch.from_numpy(v) for step, v in sorted(by_step.items())}
    return found


def damaged(fault: str, measured: Tensor) -> Tensor:
    """Return what would be measured of a tensor with a fault that no compressor changes."""
    value = measured.clone()
    numbers = value[:NUM_NUMBERS]
    mean, signed_squares = value[NUM_NUMBERS:].view(NUM_ROWS, -1)
    if fault == "signs flipped":
        mean *= -1
        signed_squares *= -1
    elif fault == "scaled by 10":
        numbers *= torch.tensor([100.0, 10.0, 10.0])
        mean *= 10
        signed_squares *= 100
    else:
        value.zero_()
    return value


def copy_of(baseline: Baseline, num_features: int) -> Baseline:
    copied = Baseline(num_features)
    copied.load_state_dict(baseline.state_dict())
    return copied


def _faulty(
    fault: str, steps: Sequence[int], came: Measured, wrong: Mapping[str, Measured]
) -> Iterator[Tensor]:
    for step in steps:
        if fault in wrong:
            near = step if step in wrong[fault] else step + 1
            if near not in wrong[fault]:
                return
            yield wrong[fault][near]
        else:
            yield damaged(fault, came[step])


def follow(
    name: StreamName, found: Mapping[tuple[str, StreamName], Measured]
) -> tuple[list[tuple[int, Departure]], dict[str, list[int | None]]]:
    """Return the false alarms of a stream, and of each fault the steps until it was found, from
    each beginning."""
    came = found["as it came", name]
    wrong = {fault: found[fault, name] for fault in FAULTS if (fault, name) in found}
    steps = sorted(came)
    num_features = (len(came[steps[0]]) - NUM_NUMBERS) // NUM_ROWS
    baseline = Baseline(num_features)
    alarms: list[tuple[int, Departure]] = []
    delays: dict[str, list[int | None]] = {fault: [] for fault in FAULTS}
    for index, step in enumerate(steps):
        ahead = steps[index : index + WITHIN]
        if step % EVERY == 0 and baseline.num_steps >= LEARNS_FOR and len(ahead) == WITHIN:
            for fault in FAULTS:
                watch = copy_of(baseline, num_features)
                verdicts = [watch.judge(one) for one in _faulty(fault, ahead, came, wrong)]
                first = (at for at, verdict in enumerate(verdicts, 1) if verdict is not None)
                if len(verdicts) == WITHIN:
                    delays[fault].append(next(first, None))
        departure = baseline.judge(came[step])
        if departure is not None:
            alarms.append((step, departure))
    return alarms, delays


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.departures", description=__doc__)
    parser.add_argument("--jobs", nargs="+", choices=[*JOBS], default=[*JOBS])
    parser.add_argument("--out", type=Path, default=Path("outputs/departures"))
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    num_alarms = num_steps = 0
    rows: list[dict[str, Any]] = []
    for job in given.jobs:
        folder = given.out / job
        if not any(folder.glob("rank*.pickle")):
            folder.mkdir(exist_ok=True)
            run(JOBS[job], folder=folder)
        found = read(folder)
        num_steps += max(map(len, found.values()))
        for (what, stream), _ in sorted(found.items()):
            if what != "as it came":
                continue
            alarms, delays = follow(stream, found)
            num_alarms += len(alarms)
            row = {"job": job, **stream._asdict(), "false_alarms": len(alarms), "found": {}}
            for step, departure in alarms:
                print(
                    f"{job} {stream.direction}: false alarm in step {step}, {departure.in_words}"
                )
            for fault, each in delays.items():
                hits = sorted(at for at in each if at is not None)
                middle = hits[len(hits) // 2] if hits else None
                row["found"][fault] = [len(hits), len(each), middle]
            words = ", ".join(f"{f} {h}/{n} ({m})" for f, (h, n, m) in row["found"].items())
            print(f"{job} {stream.direction} codec {stream.codec}: {words}", flush=True)
            rows.append(row)
    print(f"{num_alarms} false alarms in {num_steps} steps")
    sums: Counter[tuple[str, str, int]] = Counter()
    for row, fault in itertools.product(rows, FAULTS):
        for which in (0, 1):
            sums[row["direction"], fault, which] += row["found"][fault][which]
    for way, fault in itertools.product(("forward", "backward"), FAULTS):
        print(f"{way:<9} {fault:<14} {sums[way, fault, 0]} of {sums[way, fault, 1]}")
    record = {"steps": num_steps, "false_alarms": num_alarms, "streams": rows, "on": ran_on()}
    (given.out / "departures.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

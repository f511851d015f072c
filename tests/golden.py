"""The golden table: what runs that span the features come to. A change that should not alter
numbers leaves it as it is.

    python -m tests.golden write FILE      # losses, bytes by kind, digests of all states
    python -m tests.golden compare FILE    # bit for bit, on the machine that wrote FILE

test_golden.py holds it to golden.json on any machine. Not in it: a sharded stage, which torch
runs over processes only (test_sharding.py), and what is chosen by measured times.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.combinations import SAVED, STEPS, Row, experiment, interrupted, losses, run, state
from tests.event_lines import steps_done
from tests.feature_rows import feature_rows
from tests.one_way_toy import ToyFeed
from xcloud.features.one_way.job import OneWayExperiment, OneWayTraining
from xcloud.features.one_way.layout import OneWayCloud, OneWayLayout
from xcloud.job.job import Job
from xcloud.pipeline.settings import Checkpoints
from xcloud.record.events import EventReader
from xcloud.security.policy import Visibility
from xcloud.tracking.tracker import NullTracker

ROWS: dict[str, Row] = {
    "pipeline": {},
    "1f1b, lanes, int4": {"clouds": "lanes", "schedule": "1f1b", "compression": "int4"},
    "u-shape, zero bubble, delta, accumulated": {
        "clouds": "u", "schedule": "zero_bubble", "compression": "delta", "accumulate": "2",
    },
    "three clouds, per boundary, clipped, evaluated": {
        "clouds": "three", "compression": "per_boundary", "clip": "0.5", "evaluate_every": "2",
    },
    "2x2 ranks, phases": {"clouds": "both lanes", "compression": "phases"},
    "kept rows": {"clouds": "three", "frozen": "kept"},
    "tied ends, svd": {"ends": "tied", "compression": "svd", "clip": "0.5"},
    "data parallel, powersgd": {"strategy": "data_parallel", "compression": "powersgd"},
    "three replicas, unequal micro-batches, feedback, tied": {
        "clouds": "three", "strategy": "data_parallel", "compression": "feedback", "ends": "tied",
    },
    "late gradients, 2x2 ranks": {
        "clouds": "both lanes", "strategy": "late gradients", "compression": "int4",
    },
    "median": {"clouds": "three", "strategy": "median"},
    "hybrid, svd, max norm": {"clouds": "four", "strategy": "hybrid", "compression": "svd"},
    "local updates, int4": {"strategy": "local_updates", "compression": "int4"},
    "fedavg, lanes": {"clouds": "lanes", "strategy": "fedavg", "micro_batches": "3"},
    "streaming, feedback": {"strategy": "streaming", "compression": "feedback"},
    "elastic, lanes, int4": {
        "clouds": "both lanes", "strategy": "elastic", "compression": "int4",
    },
}  # fmt: skip


RESUMED = ("1f1b, lanes, int4", "streaming, feedback", "one way")
"""Those that are run again from their first checkpoint."""


def one_way(form: Any) -> OneWayExperiment:
    ranks = 1 if form == "local" else 2
    clouds = {"a": OneWayCloud(1, 1.0), "b": OneWayCloud(ranks, 2.0), "c": OneWayCloud()}
    return OneWayExperiment(
        name="golden",
        cluster=OneWayLayout(clouds, "free", form=form),
        tracker=NullTracker(),
        model=ToyFeed(),
        training=OneWayTraining(
            STEPS, 4, checkpoint=Checkpoints(every_steps=SAVED, every_minutes=0, keep=9)
        ),
    )


def jobs() -> dict[str, Job]:
    return {
        **{name: experiment(row) for name, row in ROWS.items()},
        "one way": one_way("clouds"),
        "one way, one process": one_way("local"),
        **{
            name: replace(experiment(row), security=Visibility(**security))
            for rows in feature_rows().values()
            for name, (security, row) in rows.golden.items()
        },
    }


def measured(
    folder: Path, patch: pytest.MonkeyPatch, names: Collection[str] | None = None
) -> dict[str, Any]:
    """Run the whole table, or these rows; those of RESUMED twice."""
    table = {}
    for name, job in jobs().items():
        if names is not None and name not in names:
            continue
        run_dir = folder / name
        run(job, run_dir, patch)
        table[name] = entry(run_dir)
        if name in RESUMED:
            again = folder / f"{name}, gone on"
            interrupted(run_dir, again)
            run(job, again, patch)
            table[again.name] = entry(again)
    return table


def entry(run_dir: Path) -> dict[str, Any]:
    sent: dict[str, float] = defaultdict(float)
    for event in steps_done(EventReader(run_dir / "events.jsonl")):
        for kind, num_bytes in event.get("sent", {}).items():
            sent[kind] += num_bytes
    sent.pop("other", None)  # reports, whose lengths follow from measured times
    digest = hashlib.sha256()
    for one in sorted(map(_digest, state(run_dir, STEPS).values())):
        digest.update(one)
    found = sorted(losses(run_dir).items())
    return {
        "losses": {f"step {step} rank {rank}": loss for (step, rank), loss in found},
        "bytes": dict(sorted(sent.items())),
        "digest": digest.hexdigest(),
    }


def _digest(value: torch.Tensor) -> bytes:
    """Of values alone: what they are called may change. Numbers by themselves count nothing."""
    if value.numel() < 2 or not value.is_floating_point():
        return b""
    return hashlib.sha256(
        value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    ).digest()


def main() -> None:
    what, file = sys.argv[1], Path(sys.argv[2])
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), patch)
    if what == "write":
        file.write_text(json.dumps(found, indent=1) + "\n")
        return
    kept = json.loads(file.read_text())
    wrong = [name for name in kept.keys() | found.keys() if kept.get(name) != found.get(name)]
    for name in sorted(wrong):
        print(f"{name}:\n  was {kept.get(name)}\n  is  {found.get(name)}")
    sys.exit(f"{len(wrong)} of {len(kept)} rows differ" if wrong else 0)


if __name__ == "__main__":
    main()

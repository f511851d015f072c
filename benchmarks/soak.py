"""A long run of a toy: python -m benchmarks.soak [--steps N] [--minutes M] [--out FILE]

Two ranks, INT4 with delta memories, checkpoints, MLflow; asked to stop after M minutes. Says of
the memory of each process whether it stays flat (the slope of a line through the samples after the
first fifth, with its standard error), and of the time of a step: by the processor's clock, which
hardly sees what else the machine does, and by the wall's. Also the size of what was written. Less
than 10,000 steps say nothing of memory: imports and caches are still filling. Linux.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.chaos_runs import Launched, prepare_to_fork
from benchmarks.machine import ran_on
from tests.event_lines import steps_done
from xcloud.launch.failures import EXIT_START_AGAIN
from xcloud.record.events import EVENTS_FILE, EventReader
from xcloud.record.summary import read_summary

RANKS = 2
WARM_UP = 0.2  # of the steps: imports, the first checkpoint, caches
PARTS = 10
MIN_STEPS = 10_000
MAX_MB = 8.0  # of growth in 100,000 steps that still counts as flat
MAX_SLOWER = 0.1  # second half over the first, in the processor's time
Sample = tuple[int, float, float]  # step, MB, seconds of the processor


def config_of(steps: int, store: Path) -> dict[str, Any]:
    from tests.toy import toy_config

    config: dict[str, Any] = toy_config("two_clouds", [
        "compression=delta_int4", "schedule.num_micro_batches=1", f"training.max_steps={steps}",
        f"training.evaluate_every={max(1, steps // PARTS)}",
        f"training.checkpoint.every_steps={max(1, steps // 50)}",
    ])  # fmt: skip
    config["tracker"] = {
        "_target_": "xcloud.tracking.tracker.MlflowTracker", "root": str(store),
        "experiment": "soak",
    }  # fmt: skip
    return config


def memory_mb(pid: int) -> float | None:
    """Resident memory of its own (what it shares with who forked it is not counted)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    found = (line.split() for line in lines if line.startswith("Private_"))
    return sum(int(words[1]) for words in found) / 1024


def cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def step_of(run_dir: Path) -> int | None:
    try:
        state = json.loads((run_dir / "rank0.state.json").read_text())
    except (OSError, ValueError):
        return None
    return state.get("step") if state["phase"] == "training" else None


def watch(run: Launched, every_s: float, until_s: float) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {}
    (launcher,) = run.processes
    while run.poll() is None:
        time.sleep(every_s)
        if time.monotonic() > until_s:
            run.send(signal.SIGTERM)
            until_s = math.inf
        pids = {f"rank {rank}": run.pid_of_rank(rank) for rank in range(RANKS)}
        for name, pid in {"launcher and monitor": launcher.pid, **pids}.items():
            step, mb = step_of(run.first), None if pid is None else memory_mb(pid)
            if step is not None and pid is not None and mb is not None:
                samples.setdefault(name, []).append((step, mb, cpu_s(pid)))
    return samples


def line_through(x: list[int], y: list[float]) -> tuple[float, float]:
    """Slope and its standard error."""
    slope, start = statistics.linear_regression(x, y)
    points = zip(x, y, strict=True)
    residual = sum((b - start - slope * a) ** 2 for a, b in points) / max(1, len(x) - 2)
    spread = sum((a - statistics.mean(x)) ** 2 for a in x)
    return slope, (residual / spread) ** 0.5


def growth(samples: list[Sample], steps: int) -> dict[str, Any]:
    late = [one for one in samples if one[0] > WARM_UP * steps]
    if steps < MIN_STEPS or len({one[0] for one in late}) < 3:
        return {"flat": None, "samples": len(late)}
    slope, error = line_through([one[0] for one in late], [one[1] for one in late])
    return {
        "mb_first": round(late[0][1], 1), "mb_last": round(late[-1][1], 1),
        "mb_per_100000_steps": round(1e5 * slope, 2), "standard_error": round(1e5 * error, 2),
        "samples": len(late), "flat": 1e5 * (slope - 2 * error) <= MAX_MB,
    }  # fmt: skip


def step_times(run_dir: Path, samples: list[Sample], steps: int) -> dict[str, Any]:
    """Of rank 0 in each part of the run: median by the wall's clock, mean by the processor's."""
    walls: list[list[float]] = [[] for _ in range(PARTS)]
    for event in steps_done(EventReader(run_dir / EVENTS_FILE)):
        if event["rank"] == 0:
            walls[(event["step"] - 1) * PARTS // steps].append(event["step_s"])
    parts: list[list[Sample]] = [[] for _ in range(PARTS)]
    for sample in samples:
        parts[min(PARTS - 1, sample[0] * PARTS // steps)].append(sample)
    cpu = [
        1e3 * (part[-1][2] - part[0][2]) / (part[-1][0] - part[0][0])
        for part in parts
        if part and part[-1][0] > part[0][0]
    ]
    half = len(cpu) // 2
    found: dict[str, Any] = {
        "wall_ms_by_tenth": [round(1e3 * statistics.median(part), 2) for part in walls],
        "cpu_ms_by_tenth": [round(value, 2) for value in cpu],
        "flat": None,
    }
    if half > 1:  # the first tenth has the start in it
        ratio = statistics.mean(cpu[half:]) / statistics.mean(cpu[1:half])
        found |= {"later_over_earlier": round(ratio, 3), "flat": ratio <= 1 + MAX_SLOWER}
    return found


def sizes(run_dir: Path, store: Path) -> dict[str, Any]:
    logs = sorted(run_dir.glob("events*.jsonl*"))
    with closing(sqlite3.connect(store / "mlflow.db")) as database:
        count = "SELECT count(*), max(n) FROM (SELECT count(*) n FROM metrics GROUP BY key)"
        curves, most = database.execute(count).fetchone()
        (rows,) = database.execute("SELECT count(*) FROM metrics").fetchone()
    return {
        "events_mb": round(sum(file.stat().st_size for file in logs) / 1e6, 2),
        "events_files": len(logs),
        "mlflow_rows": rows, "mlflow_curves": curves, "mlflow_most_points_of_a_curve": most,
        "mlflow_mb": round((store / "mlflow.db").stat().st_size / 1e6, 2),
    }  # fmt: skip


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between samples")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(words)
    prepare_to_fork()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    run_dir, store = folder / "run", folder / "store"
    run_dir.mkdir()
    started_s = time.monotonic()
    run = Launched([run_dir], config_of(asked.steps, store), RANKS)
    run.start()
    samples = watch(run, asked.every, started_s + 60 * asked.minutes)
    if run.poll() not in (0, EXIT_START_AGAIN):
        sys.exit(f"the run failed: {run.said()[-2000:]}")
    steps = read_summary(run_dir)["num_steps"]
    found = {
        **ran_on(),
        "steps": steps,
        "wall_s": round(time.monotonic() - started_s),
        "load": [round(value, 1) for value in os.getloadavg()],
        "memory": {name: growth(one, steps) for name, one in samples.items()},
        "step_time": step_times(run_dir, samples["rank 0"], steps),
        "written": sizes(run_dir, store),
    }
    print(json.dumps(found, indent=1))
    if asked.out is not None:
        asked.out.write_text(json.dumps({**found, "samples": samples}) + "\n")
    shutil.rmtree(folder)
    flat = [one["flat"] for one in (*found["memory"].values(), found["step_time"])]
    return 1 if False in flat else 0


if __name__ == "__main__":
    sys.exit(main())

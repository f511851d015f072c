"""A cloud killed and back ten times during local updates: what it costs in quality and in time.

    python -m benchmarks.churn --out churn.json                      half an hour on two cores
    python -m benchmarks.churn --seeds 1 --steps 400 --kills 3       a look

Runs `+exp=lora_clm strategy=local_updates` in two clouds: undisturbed with each seed, and beside
that with the first seed while the second cloud is killed (SIGKILL) again and again, each time
after a merge with it. The launcher starts it again; it takes the other's values. A slowdown of
both clouds in the disturbed run (they sleep; losses stay the same) leaves room for ten restarts.
The code must not change meanwhile: ranks of different code refuse each other.

Written down: final perplexities, the spread over the seeds, the first cloud's steps, and how long
any of its merges took in which the other cloud was missing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.machine import ran_on

ROOT = Path(__file__).resolve().parent.parent
WAIT_S = 5.0


def command(run_dir: Path, seed: int, steps: int, extra: Sequence[str]) -> list[str]:
    local = {"every": 10, "late.wait_s": WAIT_S, "late.restart_s": 0.0}
    return [
        sys.executable, "run.py", "+exp=lora_clm", "compression=int4",
        "strategy=local_updates", "+strategy/averaging/late=go_on",
        *(f"strategy.averaging.{name}={value}" for name, value in local.items()),
        "cluster/wan=free", "training.batch_size=8", f"training.max_steps={steps}",
        f"seed={seed}", "tracker=none", f"hydra.run.dir={run_dir}", *extra,
    ]  # fmt: skip


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "events.jsonl"
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def worker_of(run_dir: Path, rank: int) -> int | None:
    """The process of a rank on this machine."""
    wanted = f"worker {run_dir} --rank {rank} "
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, UnicodeDecodeError):
            continue
        if wanted in words and "-m xcloud" in words:
            return int(process.name)
    return None


def is_due(events: Sequence[dict[str, Any]]) -> bool:
    """The second cloud has been in a merge since it was last back, or since the start."""
    merges = 0
    for event in events:
        if event["event"] == "absence":
            merges = 0
        merges += event["event"] == "merge"
    return merges >= 1


def run(run_dir: Path, seed: int, steps: int, kills: int, extra: Sequence[str]) -> dict[str, Any]:
    started_s, num_kills = time.monotonic(), 0
    with open(run_dir.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            command(run_dir, seed, steps, extra), cwd=ROOT, stdout=log, stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    while process.poll() is None:
        time.sleep(0.5)
        if num_kills < kills and is_due(events_of(run_dir)):
            pid = worker_of(run_dir, 1)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                num_kills += 1
                seen = len([e for e in events_of(run_dir) if e["event"] == "absence"])
                while process.poll() is None and seen == len(
                    [e for e in events_of(run_dir) if e["event"] == "absence"]
                ):
                    time.sleep(0.2)
    if process.returncode:
        sys.exit(f"the run failed, see {run_dir.with_suffix('.log')}")
    return measured(run_dir, num_kills, time.monotonic() - started_s)


def measured(run_dir: Path, num_kills: int, wall_s: float) -> dict[str, Any]:
    summary, events = json.loads((run_dir / "summary.json").read_text()), events_of(run_dir)
    without = {e["step"] for e in events if e["event"] == "partial_merge"}
    own = [e for e in events if e["event"] == "step" and e["rank"] == 0]
    merging = {e["step"]: e["sync_s"] for e in own}
    return {
        "seed": summary["seed"],
        "commit": summary["commit"],
        "perplexity": summary["quality"]["perplexity"],
        "kills": num_kills,
        "merges": summary["merges"],
        "steps_of_the_first_cloud": sum(e["samples"] > 0 for e in own),
        "step_s_median": statistics.median(e["step_s"] for e in own),
        "longest_merge_without_the_other_s": max((merging[s] for s in without), default=0.0),
        "longest_merge_s": max(merging.values()),
        "wall_s": round(wall_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--slowdown", type=float, default=4.0, help="of the disturbed run")
    parser.add_argument("--out", type=Path, default=Path("churn.json"))
    parser.add_argument("--folder", type=Path, help="where the runs go (default: a temporary one)")
    parser.add_argument("extra", nargs="*", help="more settings of the runs")
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="churn-"))
    folder.mkdir(parents=True, exist_ok=True)

    found: dict[str, Any] = {**ran_on(), "wait_s": WAIT_S, "steps": asked.steps, "undisturbed": []}
    slow = [f"+cluster.clouds.cloud_{name}.slowdown={asked.slowdown}" for name in "ab"]
    with ThreadPoolExecutor(1) as beside:
        disturbed = beside.submit(
            run, folder / "disturbed", asked.seeds[0], asked.steps, asked.kills,
            [*asked.extra, *slow],
        )  # fmt: skip
        for seed in asked.seeds:
            quietly = run(folder / f"seed{seed}", seed, asked.steps, 0, asked.extra)
            found["undisturbed"].append(quietly)
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
        found["disturbed"] = {"slowdown": asked.slowdown, **disturbed.result()}
    quiet = [one["perplexity"] for one in found["undisturbed"]]
    found["perplexity_of_the_undisturbed"] = {
        "mean": statistics.mean(quiet), "lowest": min(quiet), "highest": max(quiet),
    }  # fmt: skip
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

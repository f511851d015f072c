"""Time and bytes to the same loss on one real line: torch's DDP with its own hooks, torchft's
DiLoCo, and xcloud's strategies, one after the other.

    python -m experiments.strategies.links BASE DATA OUT.jsonl [--mbit 100 30 10] [--rtt-ms 60]
        [--steps 300] [--batch-size 8] [--rounds 1] [--only NAME ...]

BASE: a folder that base_model.py made. DATA: one of train, dev and test texts. Two network
namespaces, a rank of one thread in each, joined by a delaying line (benchmarks/delay_line.c;
--mbit 0: a free one): root, iproute2, gcc and /dev/net/tun; torchft rows need `pip install
torchft`. All rows train the same model (this project's, whole in each rank or cut), from the same
weights, on the same samples in one order, with the same AdamW; peers.py is the loop of those that
are not xcloud's. A line of JSON for each row: seconds a step, bytes that left both hosts (the
kernel's counters, start and end of the run included), perplexity at the end, and the curve of
(seconds since the first step began, loss).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.namespaces import ADDRESSES, INTERFACE, delay_available, inside, two_hosts
from experiments.strategies.rows import ROWS, settings

ROOT = Path(__file__).resolve().parent.parent.parent
PEERS = ("torch DDP FP32", "torch DDP FP16 hook", "torch DDP PowerSGD 4", "torchft DiLoCo 15")
OWN = {f"xcloud {name}": row for name, row in ROWS.items() if name != "one process"}
USUAL = (
    *PEERS, "xcloud data parallel, INT4", "xcloud data parallel, PowerSGD 4",
    "xcloud pipeline, INT4", "xcloud FedAvg every 15, INT4",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("base", "data", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--mbit", type=float, nargs="+", default=[100.0, 30.0, 10.0])
    parser.add_argument("--rtt-ms", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=[*PEERS, *OWN], default=USUAL)
    given = parser.parse_args()
    if (reason := delay_available()) is not None:
        sys.exit(f"this study cannot run here: {reason}")
    for round_ in range(given.rounds):
        for mbit in given.mbit:
            rtt_ms = given.rtt_ms if mbit else 0.0
            for name in given.only:
                row = {"name": name, "mbit": mbit, "rtt_ms": rtt_ms, "round": round_,
                       "steps": given.steps, **measure(name, mbit, rtt_ms, given)}  # fmt: skip
                with given.out.open("a") as out:
                    print(json.dumps(row), file=out)
                shown = {key: value for key, value in row.items() if key != "curve"}
                print(json.dumps(shown), flush=True)


def measure(name: str, mbit: float, rtt_ms: float, given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        file = folder / "experiment.yaml"
        common = settings(
            given.base, given.data, given.steps, given.batch_size, given.learning_rate
        )
        command = [
            sys.executable, "run.py", *common, "tracker=none", "cluster.wan=real",
            *OWN.get(name, ["compression=none"]), "--cfg", "job", "--resolve",
        ]  # fmt: skip
        file.write_text(subprocess.run(command, cwd=ROOT, check=True, stdout=-1, text=True).stdout)
        allowed = {"read": [str(given.base), str(given.data)]}
        (folder / "policy.yaml").write_text(json.dumps(allowed))  # JSON is YAML
        tcp = {"tcp_slow_start_after_idle": "0"}
        with two_hosts(mbit * 1e6 or None, rtt_ms / 1e3 or None, tcp) as hosts:
            ranks = [
                start_rank(name, rank, host, file, folder / f"cloud_{'ab'[rank]}")
                for rank, host in enumerate(hosts)
            ]
            codes = [rank.wait() for rank in ranks]
            sent = sum(sent_bytes(host) for host in hosts)
        if any(codes):
            logs = [(folder / f"cloud_{c}" / "log").read_text()[-2000:] for c in "ab"]
            raise RuntimeError(f"{name} ended with {codes}:\n" + "\n".join(logs))
        found = own_result if name in OWN else peers_result
        return {"line_bytes": sent, **found(folder / "cloud_a")}


def start_rank(
    name: str, rank: int, host: str, file: Path, run_dir: Path
) -> subprocess.Popen[bytes]:
    run_dir.mkdir()
    if name in OWN:
        cloud = run_dir.name
        words = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank),
                 "--nproc-per-node", "1", "--master-addr", ADDRESSES[0], "--master-port", "29500",
                 "-m", "xcloud", "worker", str(file), "--cloud", cloud,
                 "--run-dir", str(run_dir)]  # fmt: skip
    else:
        words = ["-m", "experiments.strategies.peers", name, str(rank), str(file),
                 str(run_dir / "result.json")]  # fmt: skip
    environment = {
        **os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1",
        "XCLOUD_POLICY": str(file.with_name("policy.yaml")),
    }  # fmt: skip
    with open(run_dir / "log", "w") as log:
        return subprocess.Popen(
            [*inside(host), sys.executable, *words],
            cwd=ROOT, env=environment, stdout=log, stderr=log,
        )  # fmt: skip


def sent_bytes(host: str) -> int:
    path = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
    done = subprocess.run([*inside(host), "cat", path], check=True, stdout=-1, text=True)
    return int(done.stdout)


def peers_result(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "result.json").read_text()))


def own_result(run_dir: Path) -> dict[str, Any]:
    summary = json.loads((run_dir / "summary.json").read_text())
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    steps = [e for e in events if e["event"] == "step"]
    begun_s = min(e["t"] - e["step_s"] for e in steps)
    losses: dict[int, list[float]] = {}
    at_s: dict[int, float] = {}
    for e in steps:
        at_s[e["step"]] = max(at_s.get(e["step"], 0.0), e["t"] - begun_s)
        if e.get("loss") is not None:
            losses.setdefault(e["step"], []).append(e["loss"])
    return {
        "step_s": statistics.median(e["step_s"] for e in steps[6:]),
        "training_s": max(at_s.values()),
        "counted_bytes_per_step": sum(v or 0 for v in summary["wan_bytes_per_step"].values()),
        "perplexity": summary["quality"]["perplexity"],
        "curve": [(at_s[step], statistics.mean(told)) for step, told in sorted(losses.items())],
    }


if __name__ == "__main__":
    main()

"""Step time of the model whose BLEU the table shows (3 + 3 layers of 256), rows in alternation.

    python experiments/table2/same_model.py DATA [--mbit 10 100] [--rounds 3] [--updates 8]

DATA holds multi30k/. Rows: FP32 and BF16 on the wire without further compression, the paper's best
row, and ours; all compute in one precision, on this machine, one after the other within a round.
Prints median seconds a step and its share of the FP32 wire and of the BF16 wire, for each link.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS = {
    "FP32 wire": ["compression=none"],
    "BF16 wire": ["compression=bf16"],
    "FP16(SVD(0.6)) + INT8": ["compression=svd_fp16_int8", "compression.forward.svd.rate=0.6"],
    "INT4 + INT2": ["compression=int4", "compression.backward.int4.bits=2"],
}
SETTING = [
    "+exp=abnet_iwslt", "profile=files", "task.source=en", "task.target=de", "tracker=none",
    "task.test_file=test_2016_flickr.tsv.gz", "training.eval_samples=8",
    "model.encoder.pretraining.steps=20", "model.decoder.pretraining.steps=20",
    "training.batch_size=256", "schedule.num_micro_batches=4", "training.precision=fp32",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--mbit", type=float, nargs="+", default=[10.0, 100.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=8)
    given = parser.parse_args()
    path = f"task.path={(given.data / 'multi30k').resolve()}"
    for mbit in given.mbit:
        link = [f"cluster.wan.bandwidth_bits_per_s={mbit * 1e6:.0f}"]
        times: dict[str, list[float]] = {name: [] for name in ROWS}
        for _ in range(given.rounds):
            for name, row in ROWS.items():
                steps = [f"training.max_steps={given.updates}"]
                times[name].append(step_time([*SETTING, path, *link, *row, *steps]))
        median = {name: statistics.median(found) for name, found in times.items()}
        print(f"{mbit:g} Mbit/s, round trip of the experiment's link; rounds: {given.rounds}")
        for name, seconds in median.items():
            shares = [100 * seconds / median[wire] for wire in ("FP32 wire", "BF16 wire")]
            spread = f"{min(times[name]):.3f} to {max(times[name]):.3f}"
            print(f"  {name:<24} {seconds:.3f} s ({spread})   {shares[0]:3.0f} % of FP32, "
                  f"{shares[1]:3.0f} % of BF16", flush=True)  # fmt: skip


def step_time(overrides: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "run.py", *overrides, f"hydra.run.dir={folder}/run"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
        return float(summary["step_time_s"]["median"])


if __name__ == "__main__":
    main()

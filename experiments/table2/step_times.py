"""Step times of Table 2, of the model whose BLEU `one_model.py` measures, rows by turns.

    python -m experiments.table2.step_times DATA OUT [--mbit 1] [--rounds 3] [--updates 12]

DATA as for one_model.py; the pairs of Tatoeba. On an emulated line so slow that computing is a
small share of the uncompressed step, as in the paper (its two published shares fit a model of
bytes alone). One row after the other within a round, all in one sitting and one precision.
wire FP32 and wire BF16 send what was computed in FP32 as it is, and rounded. Backbones are
pretrained for 20 updates: their weights change no step's time.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

from experiments.claims.reproduce import StudyRows
from experiments.table2.one_model import ROWS, corpora, words_of

WIRES = {"wire FP32": "compression=none", "wire BF16": "compression=bf16"}
FIGURES = ("step_s", "bytes_forward", "bytes_backward", "bytes", "ratio", "wall_s")
SHORT = [
    "training.eval_samples=8", "training.evaluate_every=0", "seed=1",
    "schedule.num_micro_batches=2",
    *(f"model.{side}.pretraining.steps=20" for side in ("encoder", "decoder")),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mbit", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=12)
    given = parser.parse_args()
    rows = StudyRows(given.out, given.data)
    setting = corpora(given.data.resolve(), rows.work)["tatoeba"]
    line = [
        f"cluster.wan.bandwidth_bits_per_s={given.mbit * 1e6:.0f}",
        "cluster.wan.latency_s=0.01",
    ]
    across = {
        name: words
        for name, words in ROWS.items()
        if name != "bf16+bf16" and "cluster=two_clouds" in words
    }
    across = {name: [across["int8+int8"][0], word] for name, word in WIRES.items()} | across
    for number, (name, words) in product(range(1, given.rounds + 1), across.items()):
        own = [word for word in words if word != "cluster/wan=free"]
        base = words_of(setting, "int8+int8", rows.work)[: -len(ROWS["int8+int8"])]
        steps = [f"training.max_steps={given.updates}"]
        rows.add({"row": name, "round": number}, [*base, *own, *SHORT, *line, *steps], FIGURES)


if __name__ == "__main__":
    main()

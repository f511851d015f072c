"""Throughput across clouds and its scaling, by parts of fixed speed; and what pre-training is
worth in a language that was never seen with labels.

    python -m experiments.one_way.study OUT [--parts throughput scaling zero_shot] [--rounds 3]

throughput: two generators and a discriminator asleep instead of computing (a batch in 0.1 s, a
step in 0.15 s), one cloud and three over 1 Gbit/s, 100 and 10 Mbit/s with 100 ms round trip, in
turn. scaling: 1, 2, 4 and 8 ranks in each of three clouds, a step in 0.3 s. zero_shot: the demo's
encoder from drawn weights, from its public start, and pre-trained across clouds, each fine-tuned
on English pairs of the embedded grammar. Rows go to OUT/rows.jsonl; "seed" of the first two is a
round.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.bench_one_way import ONE_CLOUD, config_of, measure
from xcloud.claims.reproduce import Rows

LINES = {ONE_CLOUD: None, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8, "10 Mbit/s": 1e7}
RANKS = (1, 2, 4, 8)
CLOUDS = ("consumer", "one", "two")
DRAWN = (
    "{_target_: xcloud.models.backbone.SeededBackbone, hidden: 128, num_layers: 2, num_heads: 4, "
    "feed_forward: 512, dropout: 0.1}"
)
PRETRAINING = {
    "drawn weights": ["training.max_steps=1", "~model.discriminator.backbone",
                      f"+model.discriminator.backbone={DRAWN}"],
    "drawn weights, pre-trained": ["~model.discriminator.backbone",
                                   f"+model.discriminator.backbone={DRAWN}"],
    "start of public text": ["training.max_steps=1"],
    "start, pre-trained": [],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", nargs="+", default=["throughput", "scaling", "zero_shot"])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    rows = Rows(given.out)
    for part, number in product(given.parts, range(1, given.rounds + 1)):
        {"throughput": throughput, "scaling": scaling, "zero_shot": zero_shot}[part](rows, number)


def throughput(rows: Rows, number: int) -> None:
    for name, bits_per_s in LINES.items():
        asleep = ["model.step_s=0.15", "model.batch_s={one: 0.1, two: 0.1}"]
        timed(rows, {"row": name, "seed": number}, asleep, 100, bits_per_s)


def scaling(rows: Rows, number: int) -> None:
    for ranks in RANKS:
        asleep = ["model.step_s=0.3", "model.batch_s={one: 0.2, two: 0.2}",
                  *(f"cluster.clouds.{name}.num_ranks={ranks}" for name in CLOUDS),
                  f"training.batches_per_step={2 * ranks}"]  # fmt: skip
        row = f"{ranks} rank{'s' * (ranks > 1)} a cloud"
        timed(rows, {"row": row, "seed": number}, asleep, 40, 1e8)


def timed(
    rows: Rows, about: dict[str, Any], settings: list[str], steps: int, bits_per_s: float | None
) -> None:
    if not rows.has(about):
        words = ["model.work=0", "model.rows=700", *settings]
        rows.write({**about, **measure(config_of(None, words, steps, bits_per_s, 0.1))})


def zero_shot(rows: Rows, seed: int) -> None:
    for name, settings in PRETRAINING.items():
        encoder = rows.work / name.replace(" ", "_").replace(",", "")
        # The encoder of a row is made once; seeds are of the fine-tuning.
        words = ["+exp=electra_multilingual", "cluster=local", "follow_up=[]", *settings]
        rows.keep(words, encoder)
        tokenizer = f"task.tokenizer.name_or_path={encoder / 'model' / 'discriminator'}"
        rows.add({"row": name, "seed": seed}, ["+exp=xnli_zero_shot", tokenizer, f"seed={seed}"])


if __name__ == "__main__":
    main()

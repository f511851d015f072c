"""Throughput across clouds and its scaling, by parts of fixed speed and by networks; and what
pre-training is worth in a language that was never seen with labels.

    python -m experiments.one_way.study OUT [--parts throughput scaling networks zero_shot]
        [--rounds 3]
    python -m experiments.one_way.study OUT --parts real_text --data DATA

--updates: no more than so many of each run of the last three parts, and as many samples scored.

throughput: two generators and a discriminator asleep instead of computing (a batch in 0.1 s, a
step in 0.15 s), one cloud and three over 1 Gbit/s, 100 and 10 Mbit/s with 100 ms round trip, in
turn. scaling: 1, 2, 4 and 8 ranks in each of three clouds, a step in 0.3 s. networks: both with
ELECTRA's networks (4 x 256, 256 texts a batch), which compute: on the GPU, which all ranks share,
if there is one. zero_shot: the demo's encoder from drawn weights, and pre-trained across clouds
from them, each fine-tuned on English pairs of the embedded grammar. real_text: MiniLM (6 x 384,
English) before and after 500 steps across clouds on Spanish and English text (wiki_paragraphs,
tatoeba_es_en of DATA), each fine-tuned on the English dev pairs of XNLI (2,490) and PAWS-X (2,000)
and scored on 2,000 test pairs in both languages. Rows go to OUT/rows.jsonl.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.bench_one_way import ONE_CLOUD, config_of, measure
from experiments.claims.reproduce import StudyRows
from experiments.one_way.prepare_text import prepare

LINES = {ONE_CLOUD: None, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8, "10 Mbit/s": 1e7}
RANKS = (1, 2, 4, 8)
NETWORK = (
    "{_target_: xcloud.models.backbone.SeededBackbone, hidden: 256, num_layers: 4, num_heads: 4, "
    "feed_forward: 1024, dropout: 0.1}"
)
PARTS = ("discriminator", "generators.cloud_a", "generators.cloud_b")
NETWORKS = [
    *(word for part in PARTS
      for word in (f"~model.{part}.backbone", f"+model.{part}.backbone={NETWORK}")),
    *(f"model.{part}.batch_size=256" for part in PARTS[1:]),
]  # fmt: skip
CLOUDS = ("consumer", "one", "two")
DRAWN = (
    "{_target_: xcloud.models.backbone.SeededBackbone, hidden: 128, num_layers: 2, num_heads: 4, "
    "feed_forward: 512, dropout: 0.1}"
)
STEPS = "training.max_steps"
PRETRAINED = (STEPS, *(f"model.generators.cloud_{c}.backbone.pretraining.steps" for c in "ab"))
FINE_TUNED = (STEPS, "training.optimizer.warmup_steps", "training.eval_samples")
FROM_DRAWN = ["~model.discriminator.backbone", f"+model.discriminator.backbone={DRAWN}"]
PRETRAINING = {
    "drawn weights": [f"{STEPS}=1", *FROM_DRAWN],
    "drawn weights, pre-trained": FROM_DRAWN,
}
MINILM = [
    "~model.text.tokenizer", "~model.discriminator.backbone",
    "+model.text.tokenizer={_target_: xcloud.tasks.tokenizer.PretrainedTokenizer, "
    "name_or_path: minilm}",
    "+model.discriminator.backbone={_target_: xcloud.models.backbone.PretrainedBackbone, "
    "name_or_path: minilm, hidden: 384}",
    "model.generators.cloud_a.batch_size=32", "model.generators.cloud_b.batch_size=32",
    "model.generators.cloud_a.pairs=[en-es]", "model.generators.cloud_a.mask_share=0.2",
    "model.generators.cloud_b.mask_share=0.2", "model.text.max_length=64",
    "model.discriminator.optimizer.learning_rate=2e-4",
    "model.discriminator.optimizer.warmup_steps=50", "training.max_steps=500",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", nargs="+", default=["throughput", "scaling", "zero_shot"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="for real_text")
    parser.add_argument("--updates", type=int)
    given = parser.parse_args()
    rows = StudyRows(given.out, given.data)
    for part, number in product(given.parts, range(1, given.rounds + 1)):
        if part == "real_text":
            real_text(rows, number, given.data.resolve(), given.updates)
        elif part in ("networks", "zero_shot"):
            {"networks": networks, "zero_shot": zero_shot}[part](rows, number, given.updates)
        else:
            {"throughput": throughput, "scaling": scaling}[part](rows, number)


def throughput(rows: StudyRows, number: int) -> None:
    for name, bits_per_s in LINES.items():
        asleep = ["model.step_s=0.15", "model.batch_s={one: 0.1, two: 0.1}"]
        timed(rows, {"row": name, "round": number}, asleep, 100, bits_per_s)


def scaling(rows: StudyRows, number: int) -> None:
    for ranks in RANKS:
        asleep = ["model.step_s=0.3", "model.batch_s={one: 0.2, two: 0.2}",
                  *(f"cluster.clouds.{name}.num_ranks={ranks}" for name in CLOUDS),
                  f"training.batches_per_step={2 * ranks}"]  # fmt: skip
        row = f"{ranks} rank{'s' * (ranks > 1)} a cloud"
        timed(rows, {"row": row, "round": number}, asleep, 40, 1e8)


def networks(rows: StudyRows, number: int, most: int | None) -> None:
    exp, steps = "electra_multilingual", most or 100
    for name in (ONE_CLOUD, "100 Mbit/s", "10 Mbit/s"):
        timed(rows, {"row": name, "round": number}, NETWORKS, steps, LINES[name], exp)
    for ranks in RANKS[1:]:
        more = [*(f"cluster.clouds.{name}.num_ranks={ranks}"
                  for name in ("discriminator", "cloud_a", "cloud_b")),
                f"training.batches_per_step={2 * ranks}"]  # fmt: skip
        about = {"row": f"{ranks} ranks a cloud", "round": number}
        timed(rows, about, [*NETWORKS, *more], steps, 1e8, exp)


def timed(
    rows: StudyRows,
    about: dict[str, Any],
    settings: list[str],
    steps: int,
    bits_per_s: float | None,
    exp: str | None = None,
) -> None:
    """exp: an experiment of conf/exp; None: parts that are asleep."""
    if not rows.has(about):
        words = settings if exp else ["model.work=0", "model.rows=700", *settings]
        print(f"{about['row']}, round {about['round']}", flush=True)
        config = config_of(exp, words, steps, bits_per_s, 0.1)
        rows.write({**about, **measure(config, partial(rows.keep_files, about))})


def zero_shot(rows: StudyRows, seed: int, most: int | None) -> None:
    for name, settings in PRETRAINING.items():
        encoder = rows.work / name.replace(" ", "_").replace(",", "")
        # The encoder of a row is made once; seeds are of the fine-tuning.
        words = ["+exp=electra_multilingual", "cluster=local", "follow_up=[]", *settings]
        rows.keep([*fewer(most, *PRETRAINED), *words], encoder)
        tokenizer = f"task.tokenizer.name_or_path={encoder / 'model' / 'discriminator'}"
        words = ["+exp=xnli_zero_shot", tokenizer, *fewer(most, *FINE_TUNED), f"seed={seed}"]
        rows.add({"row": name, "seed": seed}, words)


def fewer(most: int | None, *keys: str) -> list[str]:
    return [f"{key}={most}" for key in keys] if most else []


def real_text(rows: StudyRows, seed: int, data: Path, most: int | None) -> None:
    text, encoder = rows.work / "text", rows.work / "minilm_500"
    prepare(data, text)
    words = ["+exp=electra_multilingual", "profile=files", "cluster=local", "follow_up=[]"]
    rows.keep([*words, f"model.text.source.path={text}", *MINILM, *fewer(most, STEPS)], encoder)
    encoders = {"MiniLM": "minilm", "MiniLM, pre-trained": encoder / "model" / "discriminator"}
    for task, (row, name) in product(("xnli", "pawsx"), encoders.items()):
        words = [
            "+exp=xnli_zero_shot", "profile=files", f"task.name={task}",
            f"task.data.path={data / task}", "task.languages=[en,es]", "task.max_length=64",
            f"task.tokenizer.name_or_path={name}", "training.max_steps=234",
            "training.optimizer.warmup_steps=25", "training.optimizer.learning_rate=1e-4",
            "training.eval_samples=2000", *fewer(most, *FINE_TUNED), f"seed={seed}",
        ]  # fmt: skip
        rows.add({"task": task, "row": row, "seed": seed}, words)


if __name__ == "__main__":
    main()

"""Table 2 with one model for every row: real pairs, quality through the compressed link.

    python -m experiments.table2.one_model DATA OUT [--seeds 1 2 3] [--corpora tatoeba multi30k_5k]
        [--rows ROW ...] [--own-backbones] [--updates N]

DATA holds tatoeba_es_en/ and multi30k/. AB-Net of 3 + 3 layers of 128 with word adapters, 1,200
updates of 64 pairs, rate falling to zero. Backbones are pretrained on their own side of the pairs
and on further sentences of the corpus that are no pairs of the run: of the pairs left out one half
lends its source, the other its target side.
tatoeba: 20,000 pairs and 46,000 further sentences a side, 4,800 updates of pretraining.
multi30k_5k: 5,000 pairs and 12,000 further captions a side, 2,400 updates; multi30k_2k: 2,500 and
13,250, as many updates. All seeds share the backbones, unless each shall have its own.
A Transformer of the same width and depth reads the pairs alone, for as many updates. Two clouds
stand on one machine with a line that is never full: step times come from elsewhere. A line of JSON
for each row goes to OUT/rows.jsonl; rows that it holds are not run again.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

from experiments.claims.reproduce import StudyRows
from experiments.real_text.word_adapters import columns, further_texts

UPDATES = 1200
DROPOUT, TWICE = "model.dropout=0.2", f"training.max_steps={2 * UPDATES}"
CLOUD = ["cluster=two_clouds", "cluster/wan=free"]
SVD = [*CLOUD, "compression=svd_fp16_int8"]
INT4_INT2 = ["compression=int4", "compression.backward.int4.bits=2"]
LOCAL = ["cluster=local", "compression=none"]
TRANSFORMER = ["model=transformer", "recipe=transformer_demo", *LOCAL]
ROWS = {
    "Transformer": TRANSFORMER,
    "ABNet-Local": LOCAL,
    "fp32+fp32": [*CLOUD, "compression=none"],
    "fp16(svd(0.6))+int8": [*SVD, "compression.forward.svd.rate=0.6"],
    "int4+int2": [*CLOUD, *INT4_INT2],
    "fp16(svd(0.2))+int8": [*SVD, "compression.forward.svd.rate=0.2"],
    "int8+int8": [*CLOUD, "compression=int8"],
    "bf16+bf16": [*CLOUD, "compression=bf16"],
    "int4+int8": [*CLOUD, "compression=int4_int8"],
    "fp16+int8": [*CLOUD, "compression=fp16_int8"],
    "fp16(svd(0.4))+int8": [*SVD, "compression.forward.svd.rate=0.4"],
    "fp16(svd(0.8))+int8": [*SVD, "compression.forward.svd.rate=0.8"],
    "transform 0.4 + 2.0": [
        *CLOUD, "compression=transform", "compression.forward.step=0.4",
        "compression.backward.step=2.0",
    ],
    "Transformer, dropout 0.2": [*TRANSFORMER, DROPOUT],
    "ABNet-Local, dropout 0.2": [*LOCAL, DROPOUT],
    "Transformer, dropout 0.2, twice the updates": [*TRANSFORMER, DROPOUT, TWICE],
    "ABNet-Local, dropout 0.2, twice the updates": [*LOCAL, DROPOUT, TWICE],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--corpora", nargs="+", default=["tatoeba", "multi30k_5k"])
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--own-backbones", action="store_true", help="for each seed")
    parser.add_argument("--updates", type=int, help="fewer of each run, and 100 test sentences")
    given = parser.parse_args()
    rows = StudyRows(given.out, given.data)
    settings = corpora(given.data.resolve(), rows.work)
    for seed, corpus, row in product(given.seeds, given.corpora, given.rows):
        about = {"corpus": corpus, "row": row, "seed": seed}
        words = [*words_of(settings[corpus], row, rows.work), f"seed={seed}"]
        if given.own_backbones and not row.startswith("Transformer"):
            words += [f"model.{side}.pretraining.seed={seed}" for side in ("encoder", "decoder")]
        if given.updates:
            words += [f"training.max_steps={given.updates}", "training.eval_samples=100"]
        rows.add(about, words)


def corpora(data: Path, out: Path) -> dict[str, tuple[list[str], list[str]]]:
    """By corpus: settings of the pairs, settings of the backbones."""
    return {
        name: corpus(data / folder, out / name, languages, num_pairs, steps)
        for name, folder, languages, num_pairs, steps in (
            ("tatoeba", "tatoeba_es_en", ("es", "en"), 20_000, 4800),
            ("multi30k_5k", "multi30k", ("en", "de"), 5_000, 2400),
            ("multi30k_2k", "multi30k", ("en", "de"), 2_500, 2400),
        )
    }


def corpus(
    folder: Path, out: Path, names: tuple[str, str], num_pairs: int, steps: int
) -> tuple[list[str], list[str]]:
    further = further_texts(out, *part(folder, out, names, num_pairs))
    pretraining = (f"model.{side}.pretraining.steps={steps}" for side in ("encoder", "decoder"))
    pairs = [f"task.data.path={out}", f"task.source={names[0]}", f"task.target={names[1]}"]
    return pairs, [*further, *pretraining]


def part(corpus: Path, out: Path, names: tuple[str, str], num: int) -> tuple[list[str], list[str]]:
    """Write the first pairs as a corpus; returns one half's source, the other's target side."""
    out.mkdir(parents=True, exist_ok=True)
    files = {"train": "train", "dev": "dev", "test": "test"}
    if (corpus / "val.tsv.gz").exists():
        files = {"train": "train", "dev": "val", "test": "test_2016_flickr"}
    rest = []
    for name, file in files.items():
        _, rows = columns(corpus / f"{file}.tsv.gz", names)
        if name == "train":
            rows, rest = rows[:num], rows[num:]
        (out / f"{name}.tsv").write_text(
            "\n".join("\t".join(row) for row in [names, *rows]) + "\n"
        )
    half = len(rest) // 2
    return [source for source, _ in rest[:half]], [target for _, target in rest[half:]]


def words_of(setting: tuple[list[str], list[str]], row: str, work: Path) -> list[str]:
    pairs, backbones = setting
    words = [
        "+exp=abnet_iwslt", "profile=files", *pairs, "training.eval_samples=1000",
        "task.source_tokenizer.vocab_size=4000", "task.target_tokenizer.vocab_size=4000",
        f"cache_dir={work / 'cache'}", f"training.max_steps={UPDATES}",
        "training.precision=fp32", "training.checkpoint.every_minutes=0",
    ]  # fmt: skip
    if not row.startswith("Transformer"):
        words += ["recipe=abnet_demo", *backbones]
    return [*words, *ROWS[row]]


if __name__ == "__main__":
    main()

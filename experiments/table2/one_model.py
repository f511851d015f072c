"""Table 2 with one model for every row: real pairs, quality through the compressed link.

    python -m experiments.table2.one_model DATA OUT [--seeds 1 2 3] [--corpora tatoeba multi30k]

DATA holds tatoeba_es_en/, tatoeba_de_en/, multi30k/ and wiki_paragraphs/. AB-Net of 3 + 3 layers
of 128 with word adapters, 1,200 updates of 64 pairs, rate falling to zero; backbones pretrained
4,800 updates on their own side of the pairs and on further sentences that are no pairs of the run.
tatoeba: 20,000 pairs; of the other 93,000 one half lends its Spanish, the other its English.
multi30k: all 29,000 pairs; further text is of tatoeba_de_en, halved likewise, and Wikipedia.
multi30k_10k: 10,000 pairs; the other captions, halved likewise, and the further text of multi30k.
A Transformer of the same width and depth reads the pairs alone. Two clouds stand on one machine
with a line that is never full: step times come from elsewhere. A line of JSON for each row goes to
OUT/rows.jsonl; rows that it holds are not run again.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

from experiments.real_text.word_adapters import columns, further_texts, wikipedia
from xcloud.claims.reproduce import Rows

UPDATES, LONG = 1200, 4800
CLOUD = ["cluster=two_clouds", "cluster/wan=free"]
SVD = [*CLOUD, "compression=svd_fp16_int8"]
INT4_INT2 = ["compression=int4", "compression.backward.int4.bits=2"]
ROWS = {
    "Transformer": [
        "model=transformer", "recipe=transformer_demo", "cluster=local", "compression=none",
    ],
    "ABNet-Local": ["cluster=local", "compression=none"],
    "fp16(svd(0.6))+int8": [*SVD, "compression.forward.svd.rate=0.6"],
    "int4+int2": [*CLOUD, *INT4_INT2],
    "fp16(svd(0.2))+int8": [*SVD, "compression.forward.svd.rate=0.2"],
    "int8+int8": [*CLOUD, "compression=int8"],
    "bf16+bf16": [*CLOUD, "compression=bf16"],
    "int4+int8": [*CLOUD, "compression=int4_int8"],
    "fp16+int8": [*CLOUD, "compression=fp16_int8"],
    "fp16(svd(0.4))+int8": [*SVD, "compression.forward.svd.rate=0.4"],
    "fp16(svd(0.8))+int8": [*SVD, "compression.forward.svd.rate=0.8"],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--corpora", nargs="+", default=["tatoeba", "multi30k", "multi30k_10k"])
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    given = parser.parse_args()
    rows = Rows(given.out, given.data)
    settings = corpora(given.data.resolve(), rows.work)
    for seed, corpus, row in product(given.seeds, given.corpora, given.rows):
        about = {"corpus": corpus, "row": row, "seed": seed}
        rows.add(about, [*words_of(settings[corpus], row, rows.work), f"seed={seed}"])


def corpora(data: Path, out: Path) -> dict[str, tuple[list[str], list[str]]]:
    """By corpus: settings of the pairs, settings of the further text."""
    tatoeba = part(data / "tatoeba_es_en", out / "tatoeba", ("es", "en"), 20_000)
    _, german = columns(data / "tatoeba_de_en" / "train.tsv.gz", ("en", "de"))
    half = len(german) // 2
    english = [en for en, _ in german[:half]] + wikipedia(data, "en")
    german_only = [de for _, de in german[half:]] + wikipedia(data, "de")
    captions = part(data / "multi30k", out / "multi30k_10k", ("en", "de"), 10_000)
    test = ["task.source=en", "task.target=de"]
    return {
        "tatoeba": (
            [f"task.path={out / 'tatoeba'}", "task.source=es", "task.target=en"],
            further_texts(out / "tatoeba", *tatoeba),
        ),
        "multi30k": (
            [*test, f"task.path={data / 'multi30k'}", "task.test_file=test_2016_flickr.tsv.gz"],
            further_texts(out / "multi30k", english, german_only),
        ),
        "multi30k_10k": (
            [*test, f"task.path={out / 'multi30k_10k'}"],
            further_texts(out / "multi30k_10k", captions[0] + english, captions[1] + german_only),
        ),
    }


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
    pairs, further = setting
    words = [
        "+exp=abnet_iwslt", "profile=files", *pairs, "training.eval_samples=1000",
        "task.source_tokenizer.vocab_size=4000", "task.target_tokenizer.vocab_size=4000",
        f"cache_dir={work / 'cache'}", f"training.max_steps={UPDATES}",
        "training.precision=fp32", "training.checkpoint.every_minutes=0",
    ]  # fmt: skip
    if row != "Transformer":
        sides = (f"model.{side}.pretraining.steps={LONG}" for side in ("encoder", "decoder"))
        words += ["recipe=abnet_demo", *further, *sides]
    return [*words, *ROWS[row]]


if __name__ == "__main__":
    main()

"""AB-Net with word adapters against a Transformer from scratch on real pairs, in one process.

    python -m experiments.real_text.word_adapters DATA OUT [--updates 1200] [--only tatoeba]

DATA holds tatoeba_es_en/, multi30k/ and europarl_es_en/ (TSV with a header) and wiki_paragraphs/
(JSON lines). Tatoeba: 20,000 pairs; of the others one half lends its Spanish, the other its
English as further texts. Multi30k: all pairs, and MiniLM as encoder too. Every row: the demo's
sizes (3 + 3 layers of 128), words of 4,000 a side, the same updates of 64 pairs; 1,000 test pairs.
Further text is read by backbones pretrained LONGER times as long, which one row does without any.
A line of JSON for each row goes to OUT/rows.jsonl; rows that it holds are not run again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_PAIRS = 20_000
ABNET, TRANSFORMER = ["recipe=abnet_demo"], ["model=transformer", "recipe=transformer_demo"]
WITHOUT = ["model.word_adapters=false"]
LONGER, USUAL = 4, 1200  # updates of a backbone's pretraining
LONG = [f"model.{side}.pretraining.steps={LONGER * USUAL}" for side in ("encoder", "decoder")]
MINILM = [
    *ABNET, "~model.encoder", "+model.encoder._target_=xcloud.models.backbone.PretrainedBackbone",
    "+model.encoder.name_or_path=minilm", "~task.source_tokenizer",
    "+task.source_tokenizer._target_=xcloud.tasks.tokenizer.PretrainedTokenizer",
    "+task.source_tokenizer.name_or_path=minilm",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--updates", type=int, default=1200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--only", default="", help="corpora whose name begins so")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    record = given.out / "rows.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    about = ("corpus", "row", "seed", "updates")
    done = {tuple(row[key] for key in about) for row in map(json.loads, lines)}
    for corpus, setting, rows in corpora(given.data.resolve(), given.out.resolve()):
        for seed, (name, row) in product(given.seeds, rows.items()):
            which = (corpus, name, seed, given.updates)
            if which in done or not corpus.startswith(given.only):
                continue
            more = [f"training.max_steps={given.updates}", f"seed={seed}"]
            found = run([*setting, *row, *more], given.out)
            line = dict(zip(about, which, strict=True)) | found
            with record.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)


def corpora(data: Path, out: Path) -> list[tuple[str, list[str], dict[str, list[str]]]]:
    pairs = out / "pairs"
    further = divide(data / "tatoeba_es_en", pairs)
    wiki = {language: wikipedia(data, language) for language in ("es", "en", "de")}
    europarl = columns(data / "europarl_es_en" / "train.tsv.gz", ("es", "en"))[1]
    half = len(europarl) // 2
    others = further_texts(
        out / "wiki_europarl", [*wiki["es"], *(row[0] for row in europarl[:half])],
        [*wiki["en"], *(row[1] for row in europarl[half:])],
    )  # fmt: skip
    captions = further_texts(out / "wiki", wiki["en"], wiki["de"])
    tatoeba = [f"task.data.path={pairs}", "task.source=es", "task.target=en"]
    multi30k = [f"task.data.path={data / 'multi30k'}", "task.source=en", "task.target=de",
                "task.data.test_file=test_2016_flickr.tsv.gz"]  # fmt: skip
    return [
        ("tatoeba", tatoeba, {
            "Transformer": TRANSFORMER, "AB-Net": ABNET, "AB-Net, without word adapters":
            [*ABNET, *WITHOUT], "AB-Net, longer": [*ABNET, *LONG], "AB-Net, further texts":
            [*ABNET, *LONG, *further], "AB-Net, Wikipedia and Europarl": [*ABNET, *LONG, *others],
        }),
        ("multi30k", multi30k, {
            "Transformer": TRANSFORMER, "AB-Net": ABNET, "AB-Net, without word adapters":
            [*ABNET, *WITHOUT], "AB-Net, MiniLM as encoder": MINILM,
            "AB-Net, Wikipedia": [*ABNET, *LONG, *captions],
        }),
    ]  # fmt: skip


def divide(corpus: Path, out: Path) -> list[str]:
    """Write the first pairs as a corpus, of the rest one side each; settings of the latter."""
    out.mkdir(exist_ok=True)
    for name in ("train", "dev", "test"):
        header, rows = columns(corpus / f"{name}.tsv.gz", ("es", "en"))
        kept = rows[:NUM_PAIRS] if name == "train" else rows
        (out / f"{name}.tsv").write_text("\n".join(map("\t".join, [header, *kept])) + "\n")
        if name == "train":
            rest = rows[NUM_PAIRS:]
    half = len(rest) // 2
    return further_texts(out.parent, [es for es, _ in rest[:half]], [en for _, en in rest[half:]])


def columns(path: Path, wanted: tuple[str, ...]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The names wanted and, row by row, what stands below them."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        header, *rows = (line.split("\t") for line in file.read().splitlines())
    places = [header.index(name) for name in wanted]
    return wanted, [tuple(row[place] for place in places) for row in rows]


def wikipedia(data: Path, language: str) -> list[str]:
    """Sentences of its paragraphs, without reference marks."""
    path = data / "wiki_paragraphs" / f"train.{language}.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        texts = [re.sub(r"\[\d+\]", "", json.loads(line)["text"]) for line in file]
    sentences = (part for text in texts for part in re.split(r"(?<=[.!?])\s+", text))
    return [" ".join(sentence.split()) for sentence in sentences if len(sentence) > 20]


def further_texts(folder: Path, source: list[str], target: list[str]) -> list[str]:
    """Write them, one in a line; the settings that name the files."""
    folder.mkdir(exist_ok=True)
    for side, texts in (("source", source), ("target", target)):
        (folder / f"{side}.txt").write_text("\n".join(texts) + "\n")
    return [f"task.{side}_monolingual_file={folder / side}.txt" for side in ("source", "target")]


def run(row: list[str], out: Path) -> dict[str, object]:
    number = sum(1 for _ in out.glob("run*"))
    folder = out.resolve() / f"run{number}"
    common = [
        "+exp=abnet_iwslt", "profile=files", "cluster=local", "compression=none", "tracker=none",
        "training.eval_samples=1000", "task.target_tokenizer.vocab_size=4000",
        f"cache_dir={out.resolve() / 'cache'}", f"hydra.run.dir={folder}",
    ]  # fmt: skip
    if not any("minilm" in word for word in row):
        common.append("task.source_tokenizer.vocab_size=4000")
    subprocess.run([sys.executable, "run.py", *common, *row], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "quality": summary["quality"], "loss": summary["final_loss"],
        "step_time_s": summary["step_time_s"]["median"], "commit": summary["commit"],
    }  # fmt: skip


if __name__ == "__main__":
    main()

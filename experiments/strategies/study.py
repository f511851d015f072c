"""Perplexity against bytes: every strategy fine-tunes the same model on the same tokens.

    python -m experiments.strategies.study DATA OUT [--seeds 1 2 3] [--only NAME ...]
        [--text FOLDER] [--steps 800] [--batch-size 8] [--learning-rate 5e-4]

DATA holds wiki_paragraphs/ and wikitext2/: a small Llama reads the paragraphs (base_model.py), and
every row fine-tunes all its weights on wikitext-2, two clouds of a rank each on a line that is
never full. --text: another folder of train, dev and test as .txt, a document a line, or chats as
.jsonl (prepare_texts.py makes some). Rows go to OUT/rows.jsonl. Times mean nothing here; for times
see links.py.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

from experiments.claims.reproduce import StudyRows
from experiments.strategies.rows import ROWS, settings

COMPARED = [
    "data parallel, FP32", "pipeline, INT4", "streaming, every 16, INT4", "FedAvg every 15, INT4",
    "FedAvg every 60, INT4", "FedAvg every 60, INT4, outer rate 1.5",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=COMPARED)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--base-steps", type=int, default=800, help="of the base model")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = StudyRows(given.out, given.data)
    base = base_model(given.data, rows.work, given.base_steps)
    text = given.text or wikitext(given.data, rows.work)
    common = settings(base, text, given.steps, given.batch_size, given.learning_rate)
    for seed, name in product(given.seeds, given.only):
        words = [*common, "cluster/wan=free", *ROWS[name], f"seed={seed}"]
        rows.add({"row": name, "seed": seed}, words)


def base_model(data: Path, work: Path, num_steps: int) -> Path:
    folder, text = work / "base", work / "paragraphs.txt"
    if not folder.exists():
        work.mkdir(parents=True, exist_ok=True)
        with gzip.open(data / "wiki_paragraphs" / "train.en.jsonl.gz", "rt", "utf-8") as file:
            paragraphs = [json.loads(line)["text"].replace("\n", " ") for line in file]
        text.write_text("\n".join(paragraphs) + "\n", encoding="utf-8")
        make = [sys.executable, "-m", "experiments.strategies.base_model", text, folder]
        subprocess.run([*make, "--steps", str(num_steps)], check=True)
    return folder


def wikitext(data: Path, work: Path) -> Path:
    """The validation part to train on, a quarter of the test part to score, the next to choose."""
    folder = work / "wikitext2"
    folder.mkdir(parents=True, exist_ok=True)
    parts = {}
    for part in ("valid", "test"):
        with gzip.open(data / "wikitext2" / f"{part}.txt.gz", "rt", "utf-8") as file:
            parts[part] = [line.strip() for line in file if line.strip()]
    quarter = len(parts["test"]) // 4
    found = {
        "train": parts["valid"], "test": parts["test"][:quarter],
        "dev": parts["test"][quarter : 2 * quarter],
    }  # fmt: skip
    for name, lines in found.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


if __name__ == "__main__":
    main()

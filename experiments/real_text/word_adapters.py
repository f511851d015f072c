"""AB-Net with word adapters against a Transformer from scratch on real pairs, in one process.

    python experiments/real_text/word_adapters.py DATA OUT [--updates 1200] [--only tatoeba]

DATA holds tatoeba_es_en/ and multi30k/ (TSV with a header). Tatoeba: 20,000 pairs; of the others
one half lends its Spanish, the other its English as further texts. Multi30k: all pairs, and MiniLM
as encoder too. Every row: the demo's sizes (3 + 3 layers of 128), words of 4,000 a side, the same
updates of 64 pairs; 1,000 test pairs. A line of JSON for each row goes to OUT/rows.jsonl.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_PAIRS = 20_000
ABNET, TRANSFORMER = ["recipe=abnet_demo"], ["model=transformer", "recipe=transformer_demo"]
WITHOUT = ["model.word_adapters=false"]
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
    for corpus, setting, rows in corpora(given.data.resolve(), given.out.resolve()):
        if corpus.startswith(given.only):
            for seed in given.seeds:
                for name, row in rows.items():
                    more = [f"training.max_steps={given.updates}", f"seed={seed}"]
                    found = run([*setting, *row, *more], given.out)
                    line = {"corpus": corpus, "row": name, "seed": seed,
                            "updates": given.updates, **found}  # fmt: skip
                    with (given.out / "rows.jsonl").open("a") as file:
                        file.write(json.dumps(line) + "\n")
                    print(line, flush=True)


def corpora(data: Path, out: Path) -> list[tuple[str, list[str], dict[str, list[str]]]]:
    pairs = out / "pairs"
    further = divide(data / "tatoeba_es_en", pairs)
    tatoeba = [f"task.path={pairs}", "task.source=es", "task.target=en"]
    multi30k = [f"task.path={data / 'multi30k'}", "task.source=en", "task.target=de",
                "task.test_file=test_2016_flickr.tsv.gz"]  # fmt: skip
    return [
        ("tatoeba", tatoeba, {
            "Transformer": TRANSFORMER, "AB-Net": ABNET, "AB-Net, without word adapters":
            [*ABNET, *WITHOUT], "AB-Net, further texts": [*ABNET, *further],
        }),
        ("multi30k", multi30k, {
            "Transformer": TRANSFORMER, "AB-Net": ABNET, "AB-Net, without word adapters":
            [*ABNET, *WITHOUT], "AB-Net, MiniLM as encoder": MINILM,
        }),
    ]  # fmt: skip


def divide(corpus: Path, out: Path) -> list[str]:
    """Write the first pairs as a corpus, of the rest one side each; settings of the latter."""
    out.mkdir(exist_ok=True)
    with gzip.open(corpus / "train.tsv.gz", "rt", encoding="utf-8") as file:
        header, *rows = file.read().splitlines()
    places = [header.split("\t").index(language) for language in ("es", "en")]
    (out / "train.tsv").write_text("\n".join([header, *rows[:NUM_PAIRS]]) + "\n")
    for name in ("dev", "test"):
        with gzip.open(corpus / f"{name}.tsv.gz", "rt", encoding="utf-8") as file:
            (out / f"{name}.tsv").write_text(file.read())
    rest = rows[NUM_PAIRS:]
    settings = []
    for side, place, part in (
        ("source", places[0], rest[: len(rest) // 2]),
        ("target", places[1], rest[len(rest) // 2 :]),
    ):
        path = out.parent / f"{side}.txt"
        path.write_text("\n".join(row.split("\t")[place] for row in part) + "\n")
        settings.append(f"task.{side}_monolingual_file={path}")
    return settings


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

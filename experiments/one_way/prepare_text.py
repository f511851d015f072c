"""Real text for this study: python -m experiments.one_way.prepare_text CORPORA_DIR OUT_DIR

train.en.txt, train.es.txt: sentences of Wikipedia paragraphs. train.tsv: pairs of Tatoeba.
"""

import gzip
import json
import re
import sys
from pathlib import Path


def prepare(corpora: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for language in ("en", "es"):
        paragraphs = corpora / "wiki_paragraphs" / f"train.{language}.jsonl.gz"
        with gzip.open(paragraphs, "rt", encoding="utf-8") as file:
            texts = [json.loads(line)["text"] for line in file]
        sentences = [s for text in texts for s in re.split(r"(?<=[.!?])\s+", text) if " " in s]
        (out / f"train.{language}.txt").write_text("\n".join(sentences) + "\n", encoding="utf-8")
    pairs = gzip.decompress((corpora / "tatoeba_es_en" / "train.tsv.gz").read_bytes())
    (out / "train.tsv").write_bytes(pairs)


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), Path(sys.argv[2]))

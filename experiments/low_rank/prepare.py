"""Cut the corpora of this study: python prepare.py CORPORA_DIR OUT_DIR [sst2] [qnli]

SST-2: 16,000 training phrases and 8,000 held out as test, drawn with one seed; the official dev
set stays dev. QNLI-style pairs: 16,000 and 4,000, dev likewise. A held-out set of this size tells
differences of 0.3 points better than 872 sentences do; every row of the study is scored on both.
"""

import gzip
import random
import sys
from pathlib import Path

NUM_TRAIN = 16_000
NUM_TEST = {"sst2": 8_000, "qnli": 4_000}


def main() -> None:
    corpora, out = Path(sys.argv[1]), Path(sys.argv[2])
    for name in sys.argv[3:]:
        num_test = NUM_TEST[name]
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        with gzip.open(corpora / name / "train.tsv.gz", "rt", encoding="utf-8") as file:
            header, *rows = file.read().splitlines()
        random.Random(0).shuffle(rows)
        splits = {"test": rows[:num_test], "train": rows[num_test : num_test + NUM_TRAIN]}
        for split, chosen in splits.items():
            with gzip.open(folder / f"{split}.tsv.gz", "wt", encoding="utf-8") as file:
                file.write("\n".join([header, *chosen]) + "\n")
        (folder / "dev.tsv.gz").write_bytes((corpora / name / "dev.tsv.gz").read_bytes())


if __name__ == "__main__":
    main()

"""What leaks across a cut: accuracy, and what the other cloud recovers of labels and text.

    python -m experiments.leaks.study DATA OUT [--seeds 1 2 3] [--only NAME ...]

DATA holds sst2/. SST-2, MiniLM cut in block 3, 80 updates; the meter's attacks see what crossed.
Rows go to OUT/rows.jsonl.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

from experiments.claims.reproduce import StudyRows
from xcloud.base.project import project_root

U_SHAPE = ["cluster=u_shape", "security=owner_keeps_text_and_labels"]
TWO_STAGES = ["cluster=bottom_only", "security=owner_keeps_text"]
SVD8 = ["model.split.rank=8"]
PCA96 = ["model.split.rank=96", "model.split.method=pca"]
FULL = ["model.split.rank=null"]
GAUSSIAN = ["security/defences/forward=gaussian_noise"]
MARVELL = ["security/defences/backward=marvell"]
MAX_NORM = ["security/defences/backward=max_norm"]

ROWS = {
    "two stages, svd r8, none": [*TWO_STAGES, *SVD8],
    "u-shape, svd r8, none": [*U_SHAPE, *SVD8],
    "two stages, svd r8, marvell": [*TWO_STAGES, *SVD8, *MARVELL],
    "u-shape, pca r96 few bits, none": [
        *U_SHAPE,
        *PCA96,
        "compression=low_rank_few_bits_u_shape",
    ],
    "u-shape, pca r96 few bits, gaussian 0.1 forward": [
        *U_SHAPE,
        *PCA96,
        "compression=low_rank_few_bits_u_shape",
        *GAUSSIAN,
    ],
    "u-shape, svd r8, gaussian 0.1 forward": [*U_SHAPE, *SVD8, *GAUSSIAN],
    "two stages, pca r96 few bits, none": [*TWO_STAGES, *PCA96, "compression=low_rank_few_bits"],
    "two stages, svd r8, max_norm": [*TWO_STAGES, *SVD8, *MAX_NORM],
    "u-shape, svd r8, marvell": [*U_SHAPE, *SVD8, *MARVELL],
    "u-shape, svd r8, gaussian 0.5 forward": [
        *U_SHAPE,
        *SVD8,
        *GAUSSIAN,
        "security.defences.forward.sigma=0.5",
    ],
    "u-shape, full width, none": [*U_SHAPE, *FULL],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("corpora", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = StudyRows(given.out, given.corpora)
    data = rows.work / "data"
    subprocess.run(
        [sys.executable, "experiments/low_rank/prepare.py", given.corpora.resolve(), data, "sst2"],
        cwd=project_root(), check=True,
    )  # fmt: skip
    common = [
        "+exp=bert_split_sst2", "profile=files", f"task.data.path={data / 'sst2'}",
        "task.max_length=64", "training.max_steps=80",
        "training.optimizer.learning_rate=2e-4", "training.optimizer.warmup_steps=20",
        "training.eval_samples=400", "schedule.num_micro_batches=1", "cluster/wan=free",
        "security/meter=attack",
    ]  # fmt: skip
    for seed, name in product(given.seeds, given.only):
        rows.add({"row": name, "seed": seed}, [*common, *ROWS[name], f"seed={seed}"])


if __name__ == "__main__":
    main()

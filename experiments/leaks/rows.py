"""The runs of this study as JSON for experiments/run_jobs.py: python rows.py DATA_DIR [SEED ...]

DATA_DIR holds sst2/ as experiments/low_rank/prepare.py makes it. Without seeds: 1.
"""

import json
import sys

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
    data, *seeds = sys.argv[1:]
    common = [
        "+exp=bert_split_sst2",
        "profile=files",
        f"task.path={data}/sst2",
        "task.max_length=64",
        "training.max_steps=80",
        "training.optimizer.learning_rate=2e-4",
        "training.optimizer.warmup_steps=20",
        "training.eval_samples=400",
        "schedule.num_micro_batches=1",
        "cluster/wan=free",
        "security/meter=attack",
    ]
    jobs = [
        {"name": f"{name}, seed {seed}", "args": [*common, *given, f"seed={seed}"]}
        for seed in seeds or ["1"]
        for name, given in ROWS.items()
    ]
    print(json.dumps(jobs))


if __name__ == "__main__":
    main()

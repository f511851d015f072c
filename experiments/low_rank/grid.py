"""Fig. 9 (SST-2 and QNLI, every block) and Table 3 (the other tasks, bottom and top block; those
two are in Fig. 9), r = 8, 16, 32, row by row.

    python -m experiments.low_rank.grid CORPORA OUT [--seeds 1 2 3] [--parts fig9 table3]
        [--tasks sst2 trec qnli mrpc cola stsb squad] [--updates N]

wide: every block of QNLI with 128 features in few bits.
bytes: 96 features through transform coding, 30 bytes a token, behind blocks 1, 3 and 5.
--updates: no more than so many of each row, and 500 samples scored, to see that it runs.

CORPORA holds the tasks' folders: sst2/, qnli/, mrpc/, cola/, stsb_multi/ and squad_v1/. MiniLM
(6 x 384), text and labels with one owner, two ranks on a line that is never full. bf16 where the
processor or the GPU multiplies it fast, else fp32, as each row's experiment.yaml says. A line of
JSON for each row goes to OUT/rows.jsonl; rows that it holds are not run again. Step times mean
nothing here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from experiments.claims.reproduce import StudyRows
from xcloud.base.project import project_root
from xcloud.pipeline.settings import resolve_precision

FEW = ["model.split.method=pca", "compression=low_rank_few_bits_u_shape",
       "compression.default.backward.toprows.rate=0.5"]  # fmt: skip
TRANSFORM = ["model.split.method=pca", "model.split.anchor=position", "model.split.head_rank=32",
             "compression=low_rank_transform"]  # fmt: skip
UPDATES = {"sst2": 250, "trec": 340, "qnli": 250, "mrpc": 345, "cola": 540, "stsb": 540}
TASKS = [*UPDATES, "squad"]
LENGTH = {"sst2": 40, "trec": 40, "qnli": 80, "mrpc": 96, "cola": 40, "stsb": 64}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("corpora", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--parts", nargs="+", default=["fig9", "table3"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--updates", type=int)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    corpora, rows = given.corpora.resolve(), StudyRows(given.out, given.corpora)
    data = rows.work / "data"
    drawn = [task for task in given.tasks if task in ("sst2", "qnli")]
    subprocess.run(
        [sys.executable, "experiments/low_rank/prepare.py", corpora, data, *drawn],
        cwd=project_root(), check=True,
    )  # fmt: skip
    cells = {"fig9": fig9, "table3": table3, "wide": wide, "quick": quick, "bytes": few_bytes}
    for part, seed in product(given.parts, given.seeds):
        for task, cut, layer in cells[part]():
            if task not in given.tasks:
                continue
            row = cut if layer is None else f"{cut}, block {layer}"
            words = words_of(task, cut, layer, corpora, data)
            if given.updates:
                words += [
                    f"training.max_steps={given.updates}", "training.evaluate_every=0",
                    "training.optimizer.warmup_steps=2", "training.eval_samples=500",
                ]  # fmt: skip
            cache = f"cache_dir={rows.work / 'cache'}"
            rows.add({"task": task, "row": row, "seed": seed}, [*words, cache, f"seed={seed}"])


def fig9() -> Iterator[tuple[str, str, int | None]]:
    for task in ("qnli", "sst2"):
        yield task, "unsplit", None
        for cut in ("svd r8", "pca r96, few bits", "svd r32", "svd r16"):
            for layer in range(6):
                yield task, cut, layer


def wide() -> Iterator[tuple[str, str, int | None]]:
    yield from (("qnli", "unsplit", None), ("qnli", "svd r8", 0))
    for layer in range(6):
        yield "qnli", "pca r128, few bits", layer


def few_bytes() -> Iterator[tuple[str, str, int | None]]:
    for task in ("sst2", "qnli", "mrpc", "trec"):
        yield task, "unsplit", None
        for layer in (1, 3, 5):
            yield task, "pca r96, transform", layer


def quick() -> Iterator[tuple[str, str, int | None]]:
    """The lowest block, where the cuts part."""
    for task in TASKS:
        yield from ((task, "unsplit", None), (task, "svd r8", 0), (task, "pca r96, few bits", 0))


def table3() -> Iterator[tuple[str, str, int | None]]:
    for task in ("mrpc", "cola", "stsb", "squad"):
        yield task, "unsplit", None
        for layer in (5, 0):
            for cut in ("svd r8", "svd r16", "svd r32", "pca r96, few bits"):
                yield task, cut, layer


def words_of(task: str, cut: str, layer: int | None, corpora: Path, data: Path) -> list[str]:
    precision = resolve_precision(
        "auto", torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )
    words = [
        "profile=files", f"training.precision={precision}", "schedule.num_micro_batches=1",
        "training.checkpoint.every_minutes=0", *of_task(task, corpora, data),
    ]  # fmt: skip
    if layer is None:
        return [*words, "cluster=local", "model.split.layer=null"]
    rank = cut.split(",")[0].split(" r")[1]
    words += ["cluster/wan=free", f"model.split.layer={layer}", f"model.split.rank={rank}"]
    if cut.startswith("svd"):
        return words
    if cut.endswith("transform"):
        return [*words, *TRANSFORM]
    return [*words, *FEW, *(["model.split.head_rank=32"] if task == "squad" else [])]


def of_task(task: str, corpora: Path, data: Path) -> list[str]:
    if task == "squad":
        return [
            "+exp=bert_split_squad", f"task.data.path={corpora / 'squad_v1'}",
            "task.max_length=192",
            "task.stride=64", "task.max_question=32", "task.max_eval_samples=600",
            "training.max_steps=300", "training.batch_size=16", "training.evaluate_every=0",
            "training.eval_batch_size=64", "training.optimizer.warmup_steps=30",
            "training.optimizer.learning_rate=2e-4",
        ]  # fmt: skip
    if task == "trec":
        steps = UPDATES[task]
        return [
            "+exp=bert_split_sst2", "task=classification", f"task.data.path={corpora / 'trec'}",
            f"task.max_length={LENGTH[task]}", f"training.max_steps={steps}",
            f"training.optimizer.warmup_steps={steps // 10}", "training.eval_batch_size=250",
            "training.evaluate_every=0",
        ]  # fmt: skip
    folder = data if task in ("sst2", "qnli") else corpora
    name = "stsb_multi" if task == "stsb" else task
    steps = UPDATES[task]
    pairs = task in ("qnli", "mrpc", "stsb")
    return [
        "+exp=bert_split_qnli" if pairs else "+exp=bert_split_sst2", f"task.name={task}",
        f"task.data.path={folder / name}",
        f"task.max_length={LENGTH[task]}", f"training.max_steps={steps}",
        f"training.evaluate_every={steps}", f"training.optimizer.warmup_steps={steps // 10}",
        "training.eval_batch_size=250",
        "training.eval_samples=4000" if task == "qnli" else "training.eval_samples=null",
    ]  # fmt: skip


if __name__ == "__main__":
    main()

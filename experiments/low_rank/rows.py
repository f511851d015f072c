"""The runs of this study as JSON for experiments/run_jobs.py: python rows.py DATA_DIR ENCODER KIND

ENCODER: folder of the checkpoint, or minilm. KIND: main (published and better cut, equal bytes),
ranks (the other lines of Fig. 9), high (few bytes at a high layer), first (the better cut
with the first token's row as the head's input), squad.
"""

import json
import sys

FIRST = "model.pooling=first"
FEW = ["model.split.method=pca", "compression=low_rank_few_bits_u_shape"]


def common(data: str, encoder: str, task: str) -> list[str]:
    return [
        f"+exp=bert_split_{task}",
        "profile=files",
        f"task.path={data}/{task}",
        f"task.tokenizer.name_or_path={encoder}",
        f"task.max_length={64 if task == 'sst2' else 96}",
        "training.max_steps=500",
        "training.evaluate_every=500",
        "training.optimizer.warmup_steps=50",
        "training.eval_batch_size=250",
        "schedule.num_micro_batches=1",
    ]


def cut(layer: int, rank: int, *more: str) -> list[str]:
    return [
        f"model.split.layer={layer}",
        f"model.split.rank={rank}",
        "cluster/wan=free",
        *more,
    ]


def better(layer: int, rank: int) -> list[str]:
    """INT4 with one scale for each row; 15 % of the gradient's rows in INT2."""
    return cut(layer, rank, *FEW)


def rows(kind: str, task: str) -> dict[str, list[str]]:
    if kind == "main":
        found = {"unsplit": ["cluster=local", "model.split.layer=null"]}
        for layer in (0, 2, 4, 5):
            found[f"svd r8 layer {layer}"] = cut(layer, 8)
            found[f"pca r112 int4+int2(toprows) layer {layer}"] = better(layer, 112)
        return found
    if kind == "first":
        found = {f"first pca r112 layer {layer}": [*better(layer, 112), FIRST]
                 for layer in (0, 2, 4, 5)}  # fmt: skip
        return {"first unsplit": ["cluster=local", "model.split.layer=null", FIRST], **found}
    if kind == "ranks":
        return {f"svd r{r} layer {layer}": cut(layer, r) for r in (16, 32) for layer in (0, 2, 4)}
    if kind == "high":
        return {"pca r16 int4+int2(toprows) layer 4": better(4, 16)}
    raise SystemExit(f"no kind {kind!r}")


def squad(data: str, encoder: str) -> list[dict]:
    args = [
        "+exp=bert_split_squad",
        "profile=files",
        f"task.path={data}/squad_v1",
        f"task.tokenizer.name_or_path={encoder}",
        "training.max_steps=800",
        "training.optimizer.warmup_steps=80",
        "schedule.num_micro_batches=1",
    ]
    given = {
        "unsplit": ["cluster=local", "model.split.layer=null"],
        "svd r8 layer 2": cut(2, 8),
        "svd r8 layer 4": cut(4, 8),
        "pca r112 int4+int2(toprows) layer 2": better(2, 112),
        "pca r112 int4+int2(toprows) layer 4": better(4, 112),
    }
    return [{"name": f"squad {name} s1", "args": [*args, *row]} for name, row in given.items()]


def main() -> None:
    data, encoder, *kinds = sys.argv[1:]
    jobs = []
    for kind in kinds:
        if kind == "squad":
            jobs += squad(data, encoder)
            continue
        for seed in (1, 2, 3):
            for task in ("sst2", "qnli"):
                for name, given in rows(kind, task).items():
                    args = [*common(data, encoder, task), *given, f"seed={seed}"]
                    jobs.append({"name": f"{task} {name} s{seed}", "args": args})
    print(json.dumps(jobs, indent=1))


if __name__ == "__main__":
    main()

# ruff: noqa: E501
"""The runs of this study as JSON for experiments/run_jobs.py: python rows.py DATA_DIR KIND > jobs.json

KIND: time (one step at the paper's model size, 100 Mbit/s), first (makes the shared backbones),
quality (every row and seed), understood (where the loss comes from).
"""

import json
import sys

INT = "{_target_:xcloud.comm.precision.BlockInt,bits:%d}"
ROWS = {
    "none": ["compression=none"],
    "fp16+int8": ["compression=fp16_int8"],
    "int8+int8": ["compression=int8"],
    "int4+int8": ["compression=int4_int8"],
    "int4+int4": ["compression=int4"],
    "int3+int3": ["compression=int4", "compression.forward.int4.bits=3", "compression.backward.int4.bits=3"],
    "int4+int2": ["compression=int4", "compression.backward.int4.bits=2"],
    "int4+ef(int2)": ["compression=int4", "compression.backward.int4.bits=2", "+compression.backward_memory={_target_:xcloud.comm.memory.ErrorFeedback}"],
    **{f"fp16(svd({rate}))+int8": ["compression=svd_fp16_int8", f"compression.forward.svd.rate={rate}"] for rate in (0.2, 0.4, 0.6, 0.8)},
    "topk": ["compression=topk"],
    "ef(topk)": ["compression=topk_ef"],
}  # fmt: skip
ONE_SIDED = {
    "int2+none": ["compression=none", f"+compression.forward.int2={INT % 2}"],
    "none+int2": ["compression=none", f"+compression.backward.int2={INT % 2}"],
    "topk+none": ["compression=topk", "~compression.backward.topk", "~compression.backward.fp16"],
    "none+topk": ["compression=topk", "~compression.forward.topk", "~compression.forward.fp16"],
}
CORPORA = {"multi30k": ("en", "de"), "tatoeba_es_en": ("es", "en")}


def corpus(data: str, name: str) -> list[str]:
    source, target = CORPORA[name]
    given = [f"task.path={data}/{name}", f"task.source={source}", f"task.target={target}"]
    return given + (["task.test_file=test_2016_flickr.tsv.gz"] if name == "multi30k" else [])


def quality(data: str, name: str) -> list[str]:
    """3 + 3 layers of 256, as in the files profile; the backbones are longer pretrained."""
    dropout = 0.2 if name == "multi30k" else 0.1
    sides = [f"model.{side}.pretraining.{key}" for side in ("encoder", "decoder")
             for key in ("steps=4000", "batch_tokens=8192")]  # fmt: skip
    return [
        "+exp=abnet_iwslt", "profile=files", *corpus(data, name), *sides, f"model.dropout={dropout}",
        "training.max_steps=600", "training.batch_size=1024", "training.eval_batch_size=500",
        "training.optimizer.learning_rate=2.5e-3", "training.optimizer.warmup_steps=60",
        "training.optimizer.decay=linear", "schedule.num_micro_batches=1", "cluster/wan=free",
    ]  # fmt: skip


def local(args: list[str]) -> list[str]:
    return [a for a in args if not a.startswith("cluster/wan")] + ["cluster=local"]


def transformer(data: str, name: str, search: str) -> list[str]:
    kept = [a for a in quality(data, name) if not a.startswith(("model.", "training.max_steps"))]
    return [*local(kept), "model=transformer", "model.dropout=0.3", "training.max_steps=1200",
            "training.optimizer.warmup_steps=200", f"model/decoding={search}"]  # fmt: skip


def time_rows(data: str) -> list[dict]:
    """12 + 12 layers of 768, adapters of 512: the paper's shapes with weights that mean nothing."""
    size = [f"model.{side}.{key}" for side in ("encoder", "decoder")
            for key in ("hidden=768", "num_layers=12", "num_heads=12", "feed_forward=3072",
                        "pretraining.steps=1")]  # fmt: skip
    args = [
        "+exp=abnet_iwslt", "profile=files", *corpus(data, "multi30k"), *size,
        "model.cross_attention_heads=12", "training.max_steps=12", "training.batch_size=1024",
        "schedule.num_micro_batches=2", "training.eval_batch_size=8", "training.eval_samples=8",
        "cluster/wan=office_100m",
    ]  # fmt: skip
    rows = [{"name": f"time {row}", "args": [*args, *given]} for row, given in ROWS.items()]
    rows[0]["args"].append("training.max_steps=7")
    return rows


def first(data: str) -> list[dict]:
    return [{"name": f"{name} none s1", "args": [*quality(data, name), "compression=none"]}
            for name in CORPORA]  # fmt: skip


def quality_rows(data: str) -> list[dict]:
    jobs = []
    for seed in (1, 2, 3):
        for name in CORPORA:
            at = [f"seed={seed}"]
            jobs.append(
                {
                    "name": f"{name} transformer s{seed}",
                    "args": transformer(data, name, "greedy") + at,
                }
            )
            jobs.append(
                {
                    "name": f"{name} local s{seed}",
                    "args": [*local(quality(data, name)), "compression=none", *at],
                }
            )
            for row, given in ROWS.items():
                if row != "none" or (seed > 1 and name == "multi30k"):
                    jobs.append(
                        {
                            "name": f"{name} {row} s{seed}",
                            "args": [*quality(data, name), *given, *at],
                        }
                    )
        minilm = [
            "~task.source_tokenizer", f"+task.source_tokenizer={{_target_:xcloud.tasks.tokenizer.PretrainedTokenizer,name_or_path:{data}/../minilm}}",
            "~model.encoder", f"+model.encoder={{_target_:xcloud.models.backbone.PretrainedBackbone,name_or_path:{data}/../minilm}}",
        ]  # fmt: skip
        kept = [a for a in quality(data, "multi30k") if not a.startswith("model.encoder.")]
        for row in ("none", "int4+int4"):
            jobs.append(
                {
                    "name": f"multi30k minilm {row} s{seed}",
                    "args": [*kept, *minilm, *ROWS[row], f"seed={seed}"],
                }
            )
        if seed == 1:
            jobs.append(
                {
                    "name": "multi30k transformer beam s1",
                    "args": [*transformer(data, "multi30k", "beam"), "seed=1"],
                }
            )
    return jobs


def understood_rows(data: str) -> list[dict]:
    return [{"name": f"multi30k {row} s{seed}", "args": [*quality(data, "multi30k"), *given, f"seed={seed}"]}
            for seed in (1, 2) for row, given in ONE_SIDED.items()]  # fmt: skip


if __name__ == "__main__":
    kinds = {
        "time": time_rows,
        "first": first,
        "quality": quality_rows,
        "understood": understood_rows,
    }
    print(json.dumps([job for kind in sys.argv[2:] for job in kinds[kind](sys.argv[1])], indent=1))

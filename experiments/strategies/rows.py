"""What study.py and links.py have in common: the strategies, and the settings of every run."""

from pathlib import Path

AVERAGING = "strategy.averaging"
INT2, INT4, SIGN = "compression=int2", "compression=int4", "compression=sign"


def data_parallel(compression: str) -> list[str]:
    return ["strategy=data_parallel", compression]


def transformed(forward: float, backward: float) -> list[str]:
    steps = {"forward": forward, "backward": backward}
    return [
        "compression=transform", *(f"compression.{way}.step={of}" for way, of in steps.items())
    ]  # fmt: skip


def merged(strategy: str, every: int, compression: str) -> list[str]:
    return [f"strategy={strategy}", f"{AVERAGING}.every={every}", compression]


def averaged(every: int, compression: str, outer_rate: float) -> list[str]:
    """FedAvg whose mean is taken so many times as far."""
    return [*merged("fedavg", every, compression), f"{AVERAGING}.outer.learning_rate={outer_rate}"]


ROWS = {
    "one process": ["cluster=local", "compression=none"],
    "data parallel, FP32": data_parallel("compression=none"),
    "data parallel, FP16": data_parallel("compression=fp16"),
    "data parallel, INT4": data_parallel(INT4),
    "data parallel, sign": data_parallel(SIGN),
    "data parallel, PowerSGD 4": data_parallel("compression=powersgd"),
    "data parallel, CocktailSGD": data_parallel("compression=cocktail"),
    "pipeline, FP32": ["compression=none"],
    "pipeline, INT4": [INT4],
    "pipeline, INT4+INT2": [INT4, "compression.backward.int4.bits=2"],
    "pipeline, token means 1.4 + 1.6": [
        "compression=transform_tokens", "model.text_everywhere=true",
    ],
    "pipeline, transform 0.7 + 3.0": transformed(0.7, 3.0),
    "pipeline, transform 1.0 + 3.0": transformed(1.0, 3.0),
    "local updates of 15, FP32": merged("local_updates", 15, "compression=none"),
    "local updates of 15, INT4": merged("local_updates", 15, INT4),
    "local updates of 50, INT4": merged("local_updates", 50, INT4),
    "local updates of 50, sign": merged("local_updates", 50, SIGN),
    "local updates of 15, CocktailSGD": merged("local_updates", 15, "compression=cocktail"),
    "FedAvg every 15, INT4": merged("fedavg", 15, INT4),
    "FedAvg every 15, sign": merged("fedavg", 15, SIGN),
    "FedAvg every 30, INT2": merged("fedavg", 30, INT2),
    "FedAvg every 60, INT4": merged("fedavg", 60, INT4),
    "FedAvg every 60 in 4 parts, INT4": [  # each is under way for 8 steps
        *merged("fedavg", 60, INT4), f"{AVERAGING}.fragments=4", f"{AVERAGING}.overlap=8",
        f"{AVERAGING}.mix=0.5",
    ],
    "FedAvg every 60, INT4, outer rate 1.5": averaged(60, INT4, 1.5),
    "FedAvg every 60, INT4, outer rate 2": averaged(60, INT4, 2),
    "FedAvg every 60, INT4, outer rate 2.5": averaged(60, INT4, 2.5),
    "FedAvg every 15, INT4, outer rate 1.4": averaged(15, INT4, 1.4),
    "FedAvg every 15, sign, outer rate 1.4": averaged(15, SIGN, 1.4),
    "FedAvg every 30, INT2, outer rate 1.4": averaged(30, INT2, 1.4),
    "FedAvg every 2, FP32, outer rate 1.4": averaged(2, "compression=none", 1.4),
    "FedAvg every 120, INT4": merged("fedavg", 120, INT4),
    "FedAvg every 240, INT4": merged("fedavg", 240, INT4),
    "streaming, every 16, INT4": merged("streaming", 16, INT4),
    "streaming, every 16, sign": merged("streaming", 16, SIGN),
    "streaming, every 30, INT2": merged("streaming", 30, INT2),
    "streaming, every 60, INT4": [
        *merged("streaming", 60, INT4), f"{AVERAGING}.overlap=8",
    ],
}  # fmt: skip


def settings(
    base: Path, data: Path, steps: int, batch_size: int, learning_rate: float
) -> list[str]:
    """Overrides of a run, without its strategy and its line."""
    return [
        "+exp=lora_clm", "profile=files", "model.lora=null",
        f"model.checkpoint={base.resolve()}", f"task.data.path={data.resolve()}",
        "task.data.document=line", "task.max_length=64", "training.precision=fp32",
        f"training.batch_size={batch_size}", "schedule.num_micro_batches=4",
        f"training.max_steps={steps}", "training.eval_batch_size=32",
        f"training.optimizer.learning_rate={learning_rate}",
    ]  # fmt: skip

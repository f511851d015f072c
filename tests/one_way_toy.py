"""Parts of a one-way job that train in milliseconds: each producer makes rows of numbers, changes
some as its own weights say, and the consumer learns to find the changed ones.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from xcloud.base.errors import ConfigError, DataError
from xcloud.comm.state import State
from xcloud.contracts.model import NumCut, Scores
from xcloud.contracts.one_way import Fed, OneWayContext
from xcloud.features.one_way.layout import OneWayCloud, OneWayLayout
from xcloud.pipeline.trainer import TrainedModule

ROWS, WIDTH = 8, 6


@dataclass(frozen=True)
class ToyFeed:
    """batch_s, step_s: how long a batch of each producer and a step of the consumer takes; of one
    producer `late_s` is how long it takes to load. fail_*: producer `fail_cloud` fails (kill,
    raise) or sleeps for pause_s (sleep) at its batch fail_at, or fails as it loads (load).
    frozen: producers learn nothing. nan_at: number of a batch whose gradient is not finite in
    every producer, and of a step whose loss is not in the consumer (0: none).
    evaluate_s, export_s: how long the consumer evaluates, and each producer exports.
    """

    batch_s: dict[str, float] = field(default_factory=dict)
    step_s: float = 0.0
    late_s: dict[str, float] = field(default_factory=dict)
    fail_cloud: str | None = None
    fail_at: int = 4
    fail_how: str = "kill"
    pause_s: float = 0.0
    frozen: bool = False
    nan_at: int = 0
    evaluate_s: float = 0.0
    fail_evaluation: bool = False
    export_s: dict[str, float] = field(default_factory=dict)
    rows: int = ROWS
    work: int = 0

    max_positions = None

    @property
    def data(self) -> str:
        return "toy batches"

    @property
    def max_payload_bytes(self) -> int:
        return self.rows * (WIDTH + 1)

    def describe(self) -> str:
        return "toy feed"

    def check(self, producers: Sequence[str]) -> None:
        if self.fail_cloud is not None and self.fail_cloud not in producers:
            raise ConfigError(f"model.fail_cloud must be one of {', '.join(producers)}")

    def producer(self, context: OneWayContext) -> ToyProducer:
        time.sleep(self.late_s.get(context.cloud, 0.0))
        if self.fail_how == "load" and self.fail_cloud == context.cloud:
            raise DataError("the toy producer finds no data")
        return ToyProducer(self, context)

    def consumer(self, context: OneWayContext) -> ToyConsumer:
        return ToyConsumer(self, context)

    def leaves(self, run_dir: Path) -> Mapping[str, str]:
        return {}

    def next_command(self, run_dir: Path) -> None:
        return None


@dataclass(frozen=True)
class ToyFeedThatNeverMeets(ToyFeed):
    """Rank 2 is killed while it starts."""

    def __post_init__(self) -> None:
        if os.environ.get("LOCAL_RANK") == "2":
            os.kill(os.getpid(), signal.SIGKILL)


class ToyProducer:
    def __init__(self, model: ToyFeed, context: OneWayContext) -> None:
        self.model, self.cloud, self.group_rank = model, context.cloud, context.group_rank
        self.seed = 1000 * context.seed + 100 * context.producers.index(context.cloud)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            self.net = nn.Linear(WIDTH, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.01)
        self.num_steps = context.num_steps

    @property
    def parameters_module(self) -> nn.Module | None:
        return None if self.model.frozen else self.net

    def own_digests(self) -> dict[str, str]:
        return {}

    @property
    def num_cut(self) -> NumCut:
        return {}

    def produce(self, number: int) -> Fed:
        self._fail_if_asked(number)
        time.sleep(self.model.batch_s.get(self.cloud, 0.0))
        busy(self.model.work)
        generator = torch.Generator().manual_seed(self.seed + 10 * number + self.group_rank)
        values = torch.randint(0, 50, (self.model.rows, WIDTH), generator=generator)
        loss = (self.net(values / 50) - values.float().mean(1, keepdim=True) / 50).pow(2).mean()
        if not self.model.frozen:
            (loss * (torch.nan if number == self.model.nan_at else 1)).backward()
        # What leaves depends on the producer's own weights, as a generator's samples do.
        changed = (self.net(values / 50) > 0).flatten() & (values[:, 0] > 25)
        values[changed, 0] += 100
        payload = torch.cat([values, changed[:, None]], 1).to(torch.uint8).flatten()
        return Fed(payload, self.model.rows, self.model.rows * WIDTH, float(loss.detach()))

    def replan(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def update(self, number: int) -> None:
        self.optimizer.step()

    def state_dict(self) -> State:
        return TrainedModule(self.net, self.optimizer).state_dict()

    def load_state_dict(self, state: State) -> None:
        TrainedModule(self.net, self.optimizer).load_state_dict(state)

    def finish(self, run_dir: Path) -> None:
        time.sleep(self.model.export_s.get(self.cloud, 0.0))
        (run_dir / "model").mkdir(exist_ok=True)
        save_file(self.net.state_dict(), run_dir / "model" / f"{self.cloud}.safetensors")

    def _fail_if_asked(self, number: int) -> None:
        model = self.model
        if model.fail_cloud != self.cloud or number != model.fail_at or self.group_rank:
            return
        if model.fail_how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if model.fail_how == "sleep":
            return time.sleep(model.pause_s)
        raise RuntimeError("the toy producer was asked to fail")


class ToyConsumer:
    def __init__(self, model: ToyFeed, context: OneWayContext) -> None:
        self.model = model
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(context.seed)
            self.module = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))
        self.optimizer = torch.optim.Adam(self.module.parameters(), 0.01)
        self.num_consumed = 0

    def own_digests(self) -> dict[str, str]:
        return {}

    def consume(self, payloads: Sequence[tuple[int, Tensor]]) -> dict[str, float]:
        time.sleep(self.model.step_s)
        busy(self.model.work)
        sums = dict.fromkeys(("loss_sum", "weight", "samples", "tokens"), 0.0)
        sums |= dict.fromkeys(("true_positives", "false_positives", "false_negatives"), 0.0)
        self.num_consumed += 1
        for _, payload in payloads:
            rows = payload.view(-1, WIDTH + 1).float()
            found = self.module(rows[:, :-1] / 50).flatten()
            target = rows[:, -1]
            loss = F.binary_cross_entropy_with_logits(found, target, reduction="sum")
            if self.num_consumed == self.model.nan_at:
                loss = loss * torch.nan
            loss.backward()
            called = found > 0
            sums["loss_sum"] += float(loss.detach())
            sums["weight"] += len(rows)
            sums["samples"] += len(rows)
            sums["tokens"] += len(rows) * WIDTH
            sums["true_positives"] += float((called & (target > 0)).sum())
            sums["false_positives"] += float((called & (target == 0)).sum())
            sums["false_negatives"] += float((~called & (target > 0)).sum())
        return sums

    def update(self, step: int, weight: float) -> None:
        for parameter in self.module.parameters():
            parameter.grad /= weight
        self.optimizer.step()

    def skip(self, step: int) -> None:
        pass

    def state_dict(self) -> State:
        return TrainedModule(self.module, self.optimizer).state_dict()

    def load_state_dict(self, state: State) -> None:
        TrainedModule(self.module, self.optimizer).load_state_dict(state)

    def export(self, run_dir: Path) -> None:
        (run_dir / "model").mkdir(exist_ok=True)
        save_file(self.module.state_dict(), run_dir / "model" / "consumer.safetensors")

    def evaluate(self) -> Scores:
        time.sleep(self.model.evaluate_s)
        if self.model.fail_evaluation:
            raise RuntimeError("the toy consumer was asked to fail")
        return Scores({"accuracy": 0.5})


def busy(work: int) -> None:
    """The time of a real network: `work` products of 256 x 256 matrices."""
    x = torch.ones(256, 256)
    for _ in range(work):
        x = x @ x / 256


def cloud(num_ranks: int = 1, share: float | None = None) -> dict[str, object]:
    return {
        "_target_": "xcloud.features.one_way.layout.OneWayCloud",
        "num_ranks": num_ranks, "share": share,
    }  # fmt: skip


def feeding(shares: Sequence[float], lanes: Sequence[int], consumers: int = 1) -> OneWayLayout:
    """Producers with these shares and numbers of ranks, and one consumer."""
    producers = map(OneWayCloud, lanes, shares)
    named = {f"p{number}": cloud for number, cloud in enumerate(producers)}
    return OneWayLayout({"d": OneWayCloud(consumers), **named}, "free")


def feed_config(
    clouds: dict[str, object], form: str = "clouds", wan: object = "free", **groups: dict
) -> dict[str, object]:
    """For xcloud.launch.local. groups: model, feed, training, and plain settings under `more`."""
    return {
        "_target_": "xcloud.features.one_way.job.OneWayExperiment",
        "name": "toy_one_way",
        "model": {"_target_": "tests.one_way_toy.ToyFeed", **groups.get("model", {})},
        "cluster": {
            "_target_": "xcloud.features.one_way.layout.OneWayLayout",
            "clouds": clouds, "form": form, "wan": wan,
        },
        "training": {
            "_target_": "xcloud.features.one_way.job.OneWayTraining",
            "max_steps": 12, "batches_per_step": 2, **groups.get("training", {}),
        },
        "feed": {"_target_": "xcloud.features.one_way.feed.Feed", **groups.get("feed", {})},
        "tracker": {"_target_": "xcloud.tracking.tracker.NullTracker"},
        **groups.get("more", {}),
    }  # fmt: skip

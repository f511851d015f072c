"""A task and a model that need no corpus and train in milliseconds, for runs of real processes.

Tokens of a sample follow from its id; the model learns to give each source token plus one.
"""

from __future__ import annotations

import marshal
import os
import resource
import signal
import threading
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcloud.comm.channel import Boundary, BoundaryField, Message
from xcloud.contracts.model import (
    Batch,
    BuildContext,
    Cut,
    DataSplit,
    Follow,
    Scores,
    Stage,
    StageOutput,
    TokenIds,
    no_text,
)
from xcloud.net.frame import TensorSpec

VOCABULARY = 16
LENGTH = 6

SEEDING = threading.Lock()  # ranks in threads share torch's generator


class ToyData:
    def __init__(self, task: ToyTask, fields: frozenset[str]) -> None:
        self.task, self.fields = task, fields

    def describe(self) -> str:
        return self.task.describe()

    def fingerprint(self) -> str:
        return f"toy {self.task.num_samples}"

    def own_digests(self) -> dict[str, str]:
        return {f"the {field} of all splits": self.fingerprint() for field in self.fields}

    def shared_digests(self) -> dict[str, str]:
        return {}

    def num_samples(self, split: str) -> int:
        return self.task.num_samples if split == "train" else 10

    @property
    def vocabularies(self) -> dict[str, TokenIds]:
        return dict.fromkeys(self.fields, TokenIds(VOCABULARY, 0, 1, 2, 3))

    @property
    def num_cut(self) -> dict[str, dict[DataSplit, Cut]]:
        return {}

    @property
    def head(self) -> None:
        return None

    def sentences(self, field: str) -> list[list[int]]:
        return []

    def _tokens(self, ids: Tensor) -> Tensor:
        return (ids[:, None] * 7 + torch.arange(LENGTH) * 3) % (VOCABULARY - 1)

    def batch(self, split: str, ids: Tensor) -> Batch:
        fields = {"source": self._tokens(ids), "target": self._tokens(ids) + 1}
        return {"ids": ids, **{k: v for k, v in fields.items() if k in self.fields}}

    def weight(self, ids: Tensor) -> float:
        assert "target" in self.fields
        return float(len(ids) * LENGTH)

    def score(self, split: str, predictions: dict[int, list[int]]) -> Scores:
        hits = [
            predictions[i] == (self._tokens(torch.tensor([i]))[0] + 1).tolist()
            for i in predictions
        ]
        samples = {i: {"correct": hit} for i, hit in zip(predictions, hits, strict=True)}
        return Scores({"bleu": 100.0 * sum(hits) / len(hits)}, {"bleu": 1.0}, samples)

    def signature(self) -> dict[str, str]:
        return {"bleu": "share of exact answers"}

    def sample_outputs(
        self, split: str, scores: Scores, count: int, follow: Follow = no_text
    ) -> str:
        return "\n".join(f"{i}: {sample}" for i, sample in list(scores.samples.items())[:count])

    def save_tokenizers(self, folder: Path) -> None:
        pass


@dataclass(frozen=True)
class ToyTask:
    num_samples: int = 40
    max_length: int = LENGTH

    def describe(self) -> str:
        return f"toy task of {self.num_samples} samples"

    def check(self) -> None:
        pass

    def load(self, fields: frozenset[str], seed: int) -> ToyData:
        return ToyData(self, fields)


@dataclass(frozen=True)
class ToyModel:
    """fail_stage, fail_step, fail_how: raise, kill (SIGKILL to itself), hang or nan (in that one
    forward), to test what happens then. predict_s: how long the last stage takes for a piece of an
    evaluation, of the first slow_predictions only if that is set; predict_how: what it does
    besides: nothing, raise, or stop (SIGSTOP to itself)."""

    hidden: int = 12
    dropout: float = 0.2
    fail_stage: int = -1
    fail_step: int = 3
    fail_how: str = "raise"
    step_s: float = 0.0
    predict_s: float = 0.0
    slow_predictions: int | None = None
    predict_how: str = ""

    def describe(self) -> str:
        return "toy model"

    def fields(self, stage: int, num_stages: int) -> frozenset[str]:
        first, last = stage == 0, stage == num_stages - 1
        return frozenset({"source"} if first else set()) | frozenset({"target"} if last else set())

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        counts = BoundaryField("counts", (), torch.int16)
        hidden = BoundaryField("hidden", (self.hidden,), torch.float32, "counted")
        return Boundary((counts, hidden), max_length)

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        with SEEDING, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(100 * context.seed + stage)
            return ToyStage(self, stage, num_stages)


class ToyStage(Stage):
    def __init__(self, model: ToyModel, stage: int, num_stages: int) -> None:
        super().__init__()
        self.model, self.stage = model, stage
        self.is_last = stage == num_stages - 1
        if stage == 0:
            self.words = nn.Embedding(VOCABULARY, model.hidden)
        self.layer = nn.Linear(model.hidden, VOCABULARY if self.is_last else model.hidden)
        self.num_forwards = self.num_predictions = 0

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        self._fail_if_asked()
        output = self._compute(received, batch)
        if not self.is_last:
            counts = (
                received["counts"]
                if received is not None
                else torch.full((len(batch["ids"]),), LENGTH, dtype=torch.int16)
            )
            return StageOutput(send={"counts": counts, "hidden": torch.tanh(output)})
        return StageOutput(
            loss=F.cross_entropy(output, batch["target"].flatten(), reduction="sum")
        )

    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        self.num_predictions += 1
        slow = self.model.slow_predictions
        if slow is None or self.num_predictions <= slow:
            time.sleep(self.model.predict_s)
        if self.model.predict_how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.model.predict_how == "raise":
            raise RuntimeError("the toy stage was asked to fail in an evaluation")
        return self._compute(received, batch).argmax(1).view(-1, LENGTH).tolist()

    def _compute(self, received: Message | None, batch: Batch) -> Tensor:
        rows = self.words(batch["source"].flatten()) if received is None else received["hidden"]
        if self.model.fail_how == "nan" and self.num_forwards == self.model.fail_step:
            rows = rows * (torch.nan if self.model.fail_stage == self.stage else 1)
        return self.layer(F.dropout(rows, self.model.dropout, self.training))

    def _fail_if_asked(self) -> None:
        self.num_forwards += 1
        time.sleep(self.model.step_s)
        if self.model.fail_stage != self.stage or self.num_forwards < self.model.fail_step:
            return
        if self.model.fail_how == "nan":
            return
        if self.model.fail_how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.model.fail_how == "hang":
            time.sleep(3600)
        raise RuntimeError("the toy stage was asked to fail")


@cache
def resolved(*overrides: str) -> bytes:
    """A config without references, which many tests take, each a copy of its own."""
    from omegaconf import OmegaConf

    from tests.configs import composed

    return marshal.dumps(OmegaConf.to_container(composed(*overrides), resolve=True))


def toy_config(
    cluster: str | dict[str, object], overrides: list[str] | None = None
) -> dict[str, object]:
    """For xcloud.launch.local: a config as Hydra would compose it, with the toy task and model."""
    arguments = ["name=toy", "tracker=none", "cluster/wan=free", "training.max_steps=8",
                 "training.batch_size=8", "training.precision=fp32", "model=abnet",
                 *(overrides or [])]  # fmt: skip
    if isinstance(cluster, str):
        arguments.append(f"cluster={cluster}")
    if cluster in ("local", "one_cloud"):
        arguments.remove("cluster/wan=free")
    plain: dict[str, Any] = marshal.loads(resolved(*arguments))
    plain["task"] = {"_target_": "tests.toy.ToyTask"}
    plain["model"] = {"_target_": "tests.toy.ToyModel"}
    plain["training"]["optimizer"].update(learning_rate=0.05, warmup_steps=1, clip_norm=1.0)
    if isinstance(cluster, dict):
        plain["cluster"] = cluster
    return plain


@dataclass(frozen=True)
class ToyTaskThatDiffers(ToyTask):
    """Each rank has another number of samples."""

    def load(self, fields: frozenset[str], seed: int) -> ToyData:
        return ToyData(ToyTask(40 + ("target" in fields)), fields)


@dataclass(frozen=True)
class ToyModelThatPrepares(ToyModel):
    """The first stage takes its time, then hands something over."""

    prepare_s: float = 5.0

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        boundary = super().boundary(stage, num_stages, max_length)
        return replace(boundary, start=(TensorSpec((2,), torch.float32),))

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        if stage == 0:
            time.sleep(self.prepare_s)
        with SEEDING, torch.random.fork_rng(devices=[]):
            return ToyStageWithStart(self, stage, num_stages)


@dataclass(frozen=True)
class ToyModelThatStops(ToyModel):
    """Before the first step the second rank of the last stage stops (SIGSTOP), and the first one
    waits for it in a collective."""

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        if stage == num_stages - 1:
            if context.group_rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            context.barrier()
        return super().build_stage(stage, num_stages, context)


@dataclass(frozen=True)
class ToyModelOnAFullDisk(ToyModel):
    """From its building on, this process can write no file beyond max_bytes."""

    max_bytes: int = 4000

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        limits = (self.max_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return super().build_stage(stage, num_stages, context)


class ToyStageWithStart(ToyStage):
    def __init__(self, model: ToyModel, stage: int, num_stages: int) -> None:
        super().__init__(model, stage, num_stages)
        self.handed_over = (torch.ones(2),)

    def take_over(self, tensors: tuple[Tensor, ...]) -> None:
        assert tensors[0].tolist() == [1.0, 1.0]

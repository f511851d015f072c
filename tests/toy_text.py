"""A text-classification task and a split model that need no corpus and train in milliseconds.

Texts are short rows of token ids from 20,011 on, so that their bytes can be told from others; the
first tokens of a sample say its class. Labels are label_offset + class.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.toy import toy_config
from xcloud.comm.channel import Boundary, BoundaryField, Message
from xcloud.contracts.model import (
    Batch,
    BuildContext,
    Cut,
    DataSplit,
    Follow,
    Head,
    Scores,
    Stage,
    StageOutput,
    TokenIds,
    no_text,
)

FIRST, NUM_WORDS, LONGEST = 20_011, 40, 10
PAD, BOS, EOS = 0, 19_001, 19_002
FIELDS = {"text", "types", "label"}


class ToyTextData:
    def __init__(self, task: ToyTextTask, fields: frozenset[str]) -> None:
        assert fields <= FIELDS
        self.task, self.fields = task, fields
        # Only what may be seen is made, as a task on files reads only that.
        self.texts = self._texts() if "text" in fields else None
        self.classes = self._classes() if "label" in fields else None

    def _classes(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.task.num_classes, (self.task.num_samples,), generator=generator)

    def _texts(self) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        size = (self.task.num_samples, LONGEST)
        words = torch.randint(2, NUM_WORDS, size, generator=generator)
        words[:, 1] = self._classes()  # words 0, 1 .. stand for the classes
        words[:, 2] = self._classes()
        texts = FIRST + words
        length = torch.randint(5, LONGEST + 1, size[:1], generator=generator)
        place = torch.arange(LONGEST)
        texts[:, 0] = BOS
        texts[place == length[:, None] - 1] = EOS
        texts[place >= length[:, None]] = PAD
        return texts

    def describe(self) -> str:
        return self.task.describe()

    def fingerprint(self) -> str:
        return f"toy text {self.task.num_samples}"

    def own_digests(self) -> dict[str, str]:
        return {f"the {field} of all splits": self.fingerprint() for field in self.fields}

    def shared_digests(self) -> dict[str, str]:
        return {}

    def num_samples(self, split: str) -> int:
        return self.task.num_samples if split == "train" else 16

    @property
    def vocabularies(self) -> dict[str, TokenIds]:
        return dict.fromkeys(self.fields & {"text"}, TokenIds(FIRST + NUM_WORDS, PAD, BOS, EOS, 1))

    @property
    def num_cut(self) -> dict[str, dict[DataSplit, Cut]]:
        return {}

    @property
    def head(self) -> Head | None:
        return Head("classes", self.task.num_classes) if "label" in self.fields else None

    def sentences(self, field: str) -> list[list[int]]:
        return []

    def batch(self, split: str, ids: Tensor) -> Batch:
        found = {"ids": ids}
        if self.texts is not None:
            found["text"] = self.texts[ids]
        if "types" in self.fields:
            found["types"] = torch.zeros(len(ids), LONGEST, dtype=torch.int64)
        if self.classes is not None:
            found["label"] = self.task.label_offset + self.classes[ids]
        return found

    def weight(self, ids: Tensor) -> float:
        return float(len(ids))

    def score(self, split: str, predictions: dict[int, list[int]]) -> Scores:
        assert self.classes is not None
        hits = [predictions[i] == [int(self.classes[i])] for i in predictions]
        samples = {i: {"prediction": "SECRET", "correct": hit}
                   for i, hit in zip(predictions, hits, strict=True)}  # fmt: skip
        return Scores({"accuracy": sum(hits) / len(hits)}, {}, samples)

    def signature(self) -> dict[str, str]:
        return {"accuracy": "share of right answers"}

    def sample_outputs(
        self, split: str, scores: Scores, count: int, follow: Follow = no_text
    ) -> str:
        return "\n".join(f"SECRET {i}: {s}" for i, s in list(scores.samples.items())[:count])

    def save_tokenizers(self, folder: Path) -> None:
        pass


@dataclass(frozen=True)
class ToyTextTask:
    num_samples: int = 128
    num_classes: int = 2
    label_offset: int = 0
    max_length: int = LONGEST

    def describe(self) -> str:
        return f"toy texts, {self.num_samples} samples"

    def check(self) -> None:
        pass

    def load(self, fields: frozenset[str], seed: int) -> ToyTextData:
        return ToyTextData(self, fields)


@dataclass(frozen=True)
class GreedyTextTask(ToyTextTask):
    """Reads the labels whether it may or not."""

    def load(self, fields: frozenset[str], seed: int) -> ToyTextData:
        return ToyTextData(self, fields | {"label"})


@dataclass(frozen=True)
class ToyTextModel:
    """2 stages: bottom | top. 3 stages: bottom | middle | head.

    tell: send the tokens along in plain, to see that a wiretap finds them.
    """

    hidden: int = 8
    label_offset: int = 0
    num_classes: int = 2
    tell: bool = False

    def describe(self) -> str:
        return "toy text model"

    def fields(self, stage: int, num_stages: int) -> frozenset[str]:
        first = {"text", "types"} if stage == 0 else set()
        return frozenset(first | ({"label"} if stage == num_stages - 1 else set()))

    def parts(self, stage: int, num_stages: int) -> frozenset[str]:
        found = {"layers"} if stage < max(1, num_stages - 1) or num_stages == 2 else set()
        found |= {"embeddings"} if stage == 0 else set()
        return frozenset(found | ({"head"} if stage == num_stages - 1 else set()))

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        fields = [
            BoundaryField("counts", (), torch.int16),
            BoundaryField("hidden", (self.hidden,), torch.float32, "counted"),
        ]
        if self.tell:
            fields.append(BoundaryField("tokens", (), torch.int32, "counted"))
        return Boundary(tuple(fields), max_length)

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(100 * context.seed + stage)
            return ToyTextStage(self, stage, num_stages)


class ToyTextStage(Stage):
    def __init__(self, model: ToyTextModel, stage: int, num_stages: int) -> None:
        super().__init__()
        self.model, self.stage = model, stage
        self.is_last = stage == num_stages - 1
        if stage == 0:
            self.words = nn.Embedding(NUM_WORDS + 2, model.hidden)
        self.layer = nn.Linear(model.hidden, model.hidden)
        if self.is_last:
            self.head = nn.Linear(model.hidden, model.num_classes)

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        if received is None:
            text = batch["text"]
            counts = (text != PAD).sum(1).to(torch.int16)
            tokens = text[text != PAD]
            word = torch.where(tokens >= FIRST, tokens - FIRST, NUM_WORDS + tokens - BOS)
            rows = self.words(word)
            tokens = tokens.to(torch.int32)
        else:
            counts, rows = received["counts"], received["hidden"]
            tokens = received.get("tokens", torch.zeros(0))
        hidden = rows + torch.tanh(self.layer(rows))
        if not self.is_last:
            send = {"counts": counts, "hidden": hidden}
            return StageOutput(send={**send, **({"tokens": tokens} if self.model.tell else {})})
        label = batch["label"] - self.model.label_offset
        return StageOutput(
            loss=F.cross_entropy(self._scores(hidden, counts), label, reduction="sum")
        )

    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        assert received is not None
        hidden = received["hidden"] + torch.tanh(self.layer(received["hidden"]))
        return [[int(i)] for i in self._scores(hidden, received["counts"]).argmax(1)]

    def _scores(self, hidden: Tensor, counts: Tensor) -> Tensor:
        wide = counts.long()
        owner = torch.repeat_interleave(torch.arange(len(wide)), wide)
        pooled = hidden.new_zeros(len(wide), hidden.shape[1]).index_add(0, owner, hidden)
        return self.head(pooled / wide[:, None])


def text_config(cluster: str, overrides: list[str] | None = None, **model: object) -> dict:
    """As tests.toy.toy_config, with the text task. model: settings of ToyTextModel."""
    config = toy_config(
        cluster, ["training.max_steps=16", "training.batch_size=16", *(overrides or [])]
    )
    config["task"] = {"_target_": "tests.toy_text.ToyTextTask"}
    config["model"] = {"_target_": "tests.toy_text.ToyTextModel", **model}
    return config

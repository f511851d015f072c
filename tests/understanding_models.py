"""What the tests of the cut encoder share: public text, a tiny backbone, a toy question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.translation_models import IDS, context, texts
from xcloud.comm.channel import Message
from xcloud.contracts.model import Batch, BuildContext, Head, Stage, TokenIds
from xcloud.models.backbone import PublicBackbone
from xcloud.models.low_rank_split import LowRankSplit
from xcloud.models.pretraining import MaskedLanguageModelling
from xcloud.models.split_point import Split

HIDDEN, LAYERS = 16, 3
CLASSES = Head("classes", 2)
VALUE = Head("value", 1)
SPAN = Head("span", 2)


@dataclass(frozen=True)
class RandomText:
    """Public text for tests."""

    seed: int = 3
    ids: TokenIds = IDS

    @property
    def label(self) -> str:
        return f"random text {self.seed}"

    def token_ids(self, cache_dir: Path) -> TokenIds:
        return self.ids

    def sentences(self, num: int, cache_dir: Path) -> Sequence[Sequence[int]]:
        return texts(num, seed=self.seed)


def backbone(num_layers: int = LAYERS) -> PublicBackbone:
    pretraining = MaskedLanguageModelling(steps=2, batch_tokens=64, warmup_steps=1)
    return PublicBackbone(
        HIDDEN, num_layers, 2, 32, 0.1, pretraining, 2, text=RandomText(), num_texts=40
    )


def model(output: str = "sample", pooling: str = "first", **split: Any) -> LowRankSplit:
    settings = {"layer": 1, "rank": 4, "calibration_texts": 30} | split
    dropout = settings.pop("dropout", 0.0)
    return LowRankSplit(
        backbone(),
        Split(**settings),
        output,
        RandomText(),
        pooling,
        dropout,  # type: ignore[arg-type]
    )


def where(cache_dir: Path, head: Head | None = CLASSES, **changes: Any) -> BuildContext:
    """What each cloud sees: all of it."""
    whole = {"samples": question} | changes
    return context(cache_dir, fields=["text"], head=head, **whole)


def build(
    split_model: LowRankSplit,
    num_stages: int,
    at: BuildContext,
    head: Head = CLASSES,
    handed_over: bool = True,
) -> list[Stage]:
    """As clouds do: only stage 0 knows the words, only the last the labels. handed_over: whether
    stage 1 has been told what stage 0 measured."""
    hidden = replace(at, vocabularies={}, head=None)
    places = [at if n == 0 else hidden for n in range(num_stages)]
    places[-1] = replace(places[-1], head=head)
    stages = [split_model.build_stage(n, num_stages, place) for n, place in enumerate(places)]
    if handed_over and (tensors := stages[0].handed_over):
        stages[1].take_over(tensors)
    return stages


def question(num: int, seed: int = 0, kind: str = "classes") -> Batch:
    """Pairs of texts. classes: is the word 5 in the second text? value: its share there. span:
    the first two words of the second text."""
    draw = torch.Generator().manual_seed(seed)
    firsts, seconds = texts(num, 4, seed), texts(num, 5, seed + 1)
    rows, types, labels = [], [], []
    for first, second in zip(firsts, seconds, strict=True):
        if float(torch.rand(1, generator=draw)) < 0.5:
            second[0] = 5
        head = [IDS.bos, *first, IDS.eos]
        rows.append(torch.tensor([*head, *second, IDS.eos]))
        types.append(torch.tensor([0] * len(head) + [1] * (len(second) + 1)))
        if kind == "classes":
            labels.append(torch.tensor(int(5 in second)))
        elif kind == "value":
            labels.append(torch.tensor(second.count(5) / len(second)))
        else:
            last = min(len(head) + 1, len(rows[-1]) - 2)
            labels.append(torch.tensor([len(head), last, len(head)]))
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "ids": torch.arange(num),
        "text": pad(rows, batch_first=True, padding_value=IDS.pad),
        "types": pad(types, batch_first=True),
        "label": torch.stack(labels),
    }


def forward(stages: Sequence[Stage], batch: Batch) -> Tensor:
    """All stages as one graph; the loss."""
    message: Message | None = None
    for stage in stages[:-1]:
        message = stage(message, batch).send
    loss = stages[-1](message, batch).loss
    assert loss is not None
    return loss


def predict(stages: Sequence[Stage], batch: Batch) -> list[list[int]]:
    message: Message | None = None
    with torch.no_grad():
        for stage in stages[:-1]:
            message = stage.eval()(message, batch).send
        return stages[-1].eval().predict(message, batch)


def train(stages: Sequence[Stage], batches: Sequence[Batch], rate: float = 3e-3) -> list[float]:
    """One Adam step a batch; the mean losses."""
    parameters = [p for stage in stages for p in stage.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=rate)
    losses = []
    for batch in batches:
        loss = forward(stages, batch) / len(batch["ids"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

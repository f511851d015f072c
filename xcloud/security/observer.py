"""Record what an honest-but-curious cloud sees of others at stage boundaries, for the leak meter.
Sends nothing: every rank writes a file in its own run folder. What other replicas give to an
averaging is for a meter of its own (`LeakMeter.averaged`).

Shapes: B samples of a message; R rows, sample after sample, counts [B] of them; D features.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from xcloud.security.defences import LABEL

OBSERVATIONS_DIR = "observations"
TRUTH = "truth"


@dataclass(frozen=True)
class ReadingStage:
    """What an attacker on averages knows of a stage that reads text.

    run: computes it on token ids [N, S]. words_N: ids that may stand in a text (not padding).
    covers: updates that one contribution sums up.
    """

    module: nn.Module
    run: Callable[[Tensor], object]
    words_N: Tensor
    max_length: int
    covers: int = 1


class AveragingWatch(Protocol):
    """Of one rank."""

    def batch(self, step: int, ids: Tensor) -> None:
        """Samples that this rank trains on."""

    def received(self, step: int, replica: int, tensors: Mapping[str, Tensor]) -> None:
        """See Terms.watch."""

    def finish(self, run_dir: Path) -> None:
        """After training: write what was seen below OBSERVATIONS_DIR."""


class Stream(NamedTuple):
    """One kind of message as one rank saw it. direction: forward or backward. boundary: number of
    the stage before it. how: "received" from another cloud, or computed here and "sent" to it."""

    direction: str
    boundary: int
    how: str
    field: str

    @property
    def name(self) -> str:
        return ".".join(map(str, self))

    @classmethod
    def parse(cls, name: str) -> Stream:
        direction, boundary, how, field = name.split(".", 3)
        return cls(direction, int(boundary), how, field)

    def __str__(self) -> str:
        kind = "activation" if self.direction == "forward" else "gradient"
        return f"{self.field} {kind} of boundary {self.boundary}, {self.how}"


class Rows(NamedTuple):
    """ids, counts [N], rows [sum(counts), ...]; a sample may come more than once."""

    ids: Tensor
    counts: Tensor
    rows: Tensor

    @classmethod
    def join(cls, parts: Iterable[Rows]) -> Rows:
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Each sample's id and rows, in the order of messages."""
        split = torch.split(self.rows, self.counts.tolist())
        return zip(self.ids.tolist(), split, strict=True)


@dataclass
class Observer:
    """One rank's observations, from update `first_step` on; of each kind of message the newest
    `max_rows` rows. token_fields: of the texts that it may see (padding id, special token ids).
    holds: all batch fields that its cloud may see. replica: of the pipeline, this rank's."""

    rank: int
    cloud: str
    num_ranks: int
    first_step: int
    max_rows: int
    token_fields: Mapping[str, tuple[int, tuple[int, ...]]]
    holds: Collection[str]
    replica: int = 0
    _streams: dict[str, deque[Rows]] = field(default_factory=dict, init=False)

    def wants(self, step: int) -> bool:
        return step >= self.first_step

    def message(self, stream: Stream, ids: Tensor, counts: Tensor | None, rows: Tensor) -> None:
        """One tensor of a training message, [R, D]; not what a cloud computes itself from text or
        labels that it holds."""
        if stream.how == "received" or not self.holds:
            flat = rows.detach().flatten(1).to("cpu", torch.float32, copy=True)
            self._add(stream.name, ids, counts, flat)

    def batch(self, step: int, batch: Mapping[str, Tensor]) -> None:
        """Text and labels of a training batch: the attacks' ground truth."""
        ids = batch["ids"]
        for name, value in batch.items() if self.wants(step) else ():
            if name in self.token_fields:
                is_token = value != self.token_fields[name][0]
                self._add(f"{TRUTH}.{name}", ids, is_token.sum(1), value[is_token].cpu())
            elif name == LABEL and value.dim() == 1:  # not spans, nor a label for each token
                self._add(f"{TRUTH}.{name}", ids, None, value.detach().cpu().clone())

    def write(self, run_dir: Path) -> Path:
        folder = run_dir / OBSERVATIONS_DIR
        folder.mkdir(exist_ok=True)
        path = folder / f"rank{self.rank}.safetensors"
        tensors = {
            f"{name}/{part}": value.contiguous()
            for name, messages in self._streams.items()
            for part, value in Rows.join(messages)._asdict().items()
        }
        special_ids = {name: ids for name, (_, ids) in self.token_fields.items()}
        about = {"rank": self.rank, "cloud": self.cloud, "num_ranks": self.num_ranks,
                 "holds": sorted(self.holds), "special_ids": special_ids}  # fmt: skip
        save_file(tensors, path, metadata={"about": json.dumps(about)})
        return path

    def _add(self, name: str, ids: Tensor, counts: Tensor | None, rows: Tensor) -> None:
        wide = torch.ones_like(ids) if counts is None else counts.to("cpu", torch.int64)
        messages = self._streams.setdefault(name, deque())
        messages.append(Rows(ids.clone(), wide, rows))
        while len(messages) > 1 and sum(len(m.rows) for m in messages) > self.max_rows:
            messages.popleft()

"""Record what an honest-but-curious cloud sees of others, for the leak meter: messages at stage
boundaries, and what other replicas give to an averaging, which a rank attacks itself after
training, as it has the weights. Sends nothing: every rank writes a file in its own run folder.

Shapes: B samples of a message; R rows, sample after sample, counts [B] of them; D features.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from xcloud.base.settings import Positive, settings
from xcloud.security.attacks import TEXTS
from xcloud.security.defences import LABEL
from xcloud.security.gradient_attacks import Victim, attack_layers, changed_rows, raised_words

OBSERVATIONS_DIR = "observations"
TRUTH, GUESS, STEPS = "truth", "guess", "steps"


@settings("security.meter")
class LeakMeter:
    """Settings of the leak meter.

    last_steps: keep the messages of this many updates, the last ones of training.
    max_rows: rows kept of each kind of message, the newest.
    averaging_steps: attack the gradients or weight changes that other replicas gave to so many
        averagings, the last ones. Each keeps a copy of the stage that reads the text.
    keep: leave the observations in the run folder. They hold plain text and labels, so each rank's
        file stays with that rank, and by default they are deleted once measured.
    """

    last_steps: Positive = 50
    max_rows: Annotated[int, Field(ge=100)] = 20_000
    averaging_steps: Positive = 3
    keep: bool = False


class Stream(NamedTuple):
    """One kind of message as one rank saw it.

    direction: forward or backward. boundary: number of the stage before it. how: "received" from
    another cloud, or computed here and "sent" to it.
    """

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


class Observer:
    """One rank's observations.

    token_fields: field -> (padding id, special token ids), for the text fields this rank may see.
    holds: all batch fields that this rank's cloud may see. replica: of the pipeline, this rank's.
    """

    def __init__(
        self,
        rank: int,
        cloud: str,
        num_ranks: int,
        meter: LeakMeter,
        last_step: int,
        token_fields: Mapping[str, tuple[int, tuple[int, ...]]],
        holds: Iterable[str],
        replica: int = 0,
    ) -> None:
        special_ids = {field: ids for field, (_, ids) in token_fields.items()}
        self._about = {
            "rank": rank,
            "cloud": cloud,
            "replica": replica,
            "num_ranks": num_ranks,
            "holds": sorted(holds),
            "special_ids": special_ids,
        }
        self._pads = {field: pad for field, (pad, _) in token_fields.items()}
        self._from_step = last_step - meter.last_steps + 1
        self._max_rows = meter.max_rows
        self.averaging_steps, self.covers = meter.averaging_steps, 1  # updates that one sums up
        self._streams: dict[str, deque[Rows]] = {}

    def wants(self, step: int) -> bool:
        return step >= self._from_step

    def message(self, stream: Stream, ids: Tensor, counts: Tensor | None, rows: Tensor) -> None:
        """Record one tensor of a training message, [R, D], as decoded or computed here.

        What a cloud computes itself from text or labels that it holds is not recorded.
        """
        if stream.how == "received" or not self._about["holds"]:
            flat = rows.detach().flatten(1).to("cpu", torch.float32, copy=True)
            self._add(stream.name, ids, counts, flat)

    def batch(self, step: int, batch: Mapping[str, Tensor]) -> None:
        """A training batch of this rank."""
        if self.wants(step):
            self.truth(batch)
            if self._pads:
                self._add(STEPS, batch["ids"], None, torch.full_like(batch["ids"], step))

    def guess(self, replica: int, attack: str, step: int, texts: Sequence[Sequence[int]]) -> None:
        """Tokens that an attack on what another replica gave to an averaging recovers."""
        texts = texts or [[]]
        counts = torch.tensor([len(text) for text in texts], dtype=torch.int64)
        tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
        self._add(f"{GUESS}.{replica}.{attack}", torch.full_like(counts, step), counts, tokens)

    def truth(self, batch: Mapping[str, Tensor]) -> None:
        """Record the text and labels that this rank may see: the attacks' ground truth."""
        ids = batch["ids"]
        for field, value in batch.items():
            if field in self._pads:
                is_token = value != self._pads[field]
                self._add(f"{TRUTH}.{field}", ids, is_token.sum(1), value[is_token].cpu())
            elif field == LABEL and value.dim() == 1:  # not spans, nor a label for each token
                self._add(f"{TRUTH}.{field}", ids, None, value.detach().cpu().clone())

    def write(self, run_dir: Path) -> Path:
        folder = run_dir / OBSERVATIONS_DIR
        folder.mkdir(exist_ok=True)
        path = folder / f"rank{self._about['rank']}.safetensors"
        tensors = {
            f"{name}/{part}": value.contiguous()
            for name, messages in self._streams.items()
            for part, value in Rows.join(messages)._asdict().items()
        }
        about = json.dumps(self._about | {"covers": self.covers})
        save_file(tensors, path, metadata={"about": about})
        return path

    def _add(self, name: str, ids: Tensor, counts: Tensor | None, rows: Tensor) -> None:
        wide = torch.ones_like(ids) if counts is None else counts.to("cpu", torch.int64)
        messages = self._streams.setdefault(name, deque())
        messages.append(Rows(ids.clone(), wide, rows))
        while len(messages) > 1 and sum(len(m.rows) for m in messages) > self._max_rows:
            messages.popleft()


@dataclass
class _Seen:
    step: int
    replica: int
    changes: dict[str, Tensor]
    weights: dict[str, Tensor]


class AveragingObserver:
    """Keeps the contributions of the last merges, and attacks them when training is over.

    One update or one merge at a time: what several of them show together is not tried.
    """

    def __init__(self, observer: Observer, victim: Victim, num_others: int) -> None:
        self._observer, self._victim = observer, victim
        observer.covers = victim.covers
        self._seen: deque[_Seen] = deque(maxlen=observer.averaging_steps * num_others)

    def received(self, step: int, replica: int, tensors: Mapping[str, Tensor]) -> None:
        """Another replica's gradient or weight change, as decoded, by "stage.name"; the victim is
        stage 0. A tensor of which only a part came (a share of its rows) is left out."""
        if not self._observer.wants(step - self._victim.covers + 1):
            return
        own = dict(self._victim.module.named_parameters())
        changes = {
            name: tensors[f"0.{name}"].detach().float().cpu().clone()
            for name, parameter in own.items()
            if f"0.{name}" in tensors and tensors[f"0.{name}"].shape == parameter.shape
        }
        known = [seen.weights for seen in self._seen if seen.step == step]
        weights = known[0] if known else {n: p.detach().clone() for n, p in own.items()}
        self._seen.append(_Seen(step, replica, changes, weights))

    def attack(self) -> None:
        """Note what the attacks guess."""
        for seen in self._seen:
            with _holding(self._victim.module, seen.weights):
                for name, guess in self._guesses(seen):
                    self._observer.guess(seen.replica, name, seen.step, guess)
        self._seen.clear()

    def _guesses(self, seen: _Seen) -> Iterator[tuple[str, list[list[int]]]]:
        victim = self._victim
        num_words = int(victim.words_N.max()) + 1
        for name, module in victim.module.named_modules():
            change = seen.changes.get(f"{name}.weight")
            if change is None or len(change) < num_words:
                continue
            if isinstance(module, nn.Embedding):
                before = seen.weights[f"{name}.weight"].cpu() if victim.covers > 1 else None
                yield "embedding_rows", [changed_rows(change, before).tolist()]
            elif isinstance(module, nn.Linear):
                yield "head_rows", [raised_words(change).tolist()]
        found = attack_layers(victim, seen.changes)
        yield "layer_inputs", [found.tokens.tolist()]
        yield TEXTS, found.texts


@contextmanager
def _holding(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The module with the weights of another step."""
    own = {name: (parameter, parameter.data) for name, parameter in module.named_parameters()}
    try:
        for name, (parameter, _) in own.items():
            parameter.data = weights[name]
        yield
    finally:
        for parameter, data in own.values():
            parameter.data = data

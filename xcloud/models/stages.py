"""What all cut networks have in common: a random stream for each part, what crosses after a stage,
the stage that ends in rows, and the one that answers an understanding task from them. Not for
seeding a run's data.

A part's initial weights depend on the seed and the part's name, never on what was built before
it, so they do not depend on how parts are spread over clouds.

Batch fields of an understanding task: "text", "types": int64 [B, S], padded on the right; "label":
see Head. Shapes: B samples, S positions of the longest sample, R rows (tokens that are not
padding), H features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcloud.base.errors import TrainingDiverged
from xcloud.comm.channel import Boundary, BoundaryField, Message
from xcloud.comm.devices import bring
from xcloud.contracts.model import Architecture, Batch, Head, Stage, StageOutput
from xcloud.models.encoder import Packing
from xcloud.net.frame import TensorSpec

TEXT = "text"
TYPES = "types"
LABEL = "label"
VALUE_SCALE = 1_000_000  # predictions are whole numbers: see contracts.model.Head
SCORE_SCALE = 10_000

Pooling = Literal["first", "mean"]


class RowsStage(Stage):
    """Embeddings, which only the first stage has, and layers: a text, or rows, in; rows out.

    layers: the modules of the stage, by name, each from (rows, packing) to rows.
    field: the field of the batch that holds the text.
    pad: the id that pads the text.
    has_types: the embeddings take the batch's "types".
    """

    def __init__(
        self,
        architecture: Architecture,
        embeddings: nn.Module | None,
        layers: Mapping[str, nn.Module],
        field: str,
        pad: int,
        has_types: bool = False,
        handed_over: tuple[Tensor, ...] = (),
        frozen: bool = False,
    ) -> None:
        super().__init__(architecture, handed_over, frozen)
        self.embeddings = embeddings
        self.layers = nn.ModuleDict(layers)
        self._field = field
        self._pad = pad
        self._has_types = has_types
        if frozen:
            self.requires_grad_(False)

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        return self._sent(*self._rows(received, batch=batch))

    @staticmethod
    def _sent(rows: Tensor, packing: Packing) -> StageOutput:
        return StageOutput({"counts": packing.counts.to(torch.int16), "hidden": rows.float()})

    def _rows(self, received: Message | None, batch: Batch) -> tuple[Tensor, Packing]:
        if received is not None:
            rows = received["hidden"]
            packing = Packing(received["counts"]).on(rows.device)
        else:
            assert self.embeddings is not None
            read = [self._field, TYPES] if self._has_types else [self._field]
            # Batches stay on the host, which packs them: the device would have to be asked for
            # sizes.
            on_host = Packing.of(batch[self._field], self._pad)
            ids_R, *types = (bring(on_host.pack(batch[name]), device=self.device) for name in read)
            packing = on_host.on(self.device)
            rows = self.embeddings(ids_R, packing, *types)
        for layer in self.layers.values():
            rows = layer(rows, packing)
        return rows, packing


class UpperStage(RowsStage):
    """Layers, pooling, the way to the head and the head. A separate head has the last two only,
    and the stage before it all but the head. pooling: None keeps all rows."""

    def __init__(
        self,
        architecture: Architecture,
        layers: Mapping[str, nn.Module],
        pooling: Pooling | None,
        way: nn.Module,
        answer: TextHead | None,
    ) -> None:
        super().__init__(architecture, None, layers, "", 0)
        self._pooling = pooling
        self.way = way
        self.answer = answer

    def take_over(self, tensors: tuple[Tensor, ...]) -> None:
        cast(Any, self.layers["cut"]).start(*tensors)

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        rows, packing = self._answerable(received, batch)
        if self.answer is not None:
            label = bring(batch[LABEL], device=rows.device)
            return StageOutput(loss=self.answer.loss(self.answer(rows), label, packing))
        if self._pooling is not None:
            return StageOutput({"pooled": rows.float()})
        assert packing is not None
        return self._sent(rows, packing)

    @torch.no_grad()
    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        assert self.answer is not None
        rows, packing = self._answerable(received, batch)
        label = bring(batch[LABEL], device=rows.device)
        return self.answer.predict(self.answer(rows), label, packing)

    def _answerable(self, received: Message | None, batch: Batch) -> tuple[Tensor, Packing | None]:
        """[B, H], or [R, H] without pooling, with the packing if it is known here."""
        # An upper stage reads no text: rows always come from below.
        assert received is not None
        # A separate head gets one row a sample, pooled by the stage before.
        if "counts" not in received:
            return self.way(received["pooled"]), None
        rows, packing = self._rows(received, batch=batch)
        if self._pooling is not None:
            rows = pool(rows, packing, how=self._pooling)
        return self.way(rows), packing


def pool(rows_RH: Tensor, packing: Packing, how: Pooling) -> Tensor:
    """One row per sample, [B, H]: the first token's, or the mean over tokens."""
    counts = packing.counts
    device = rows_RH.device
    if how == "first":
        return rows_RH.index_select(0, bring(counts.cumsum(0) - counts, device))
    samples_R = torch.arange(len(counts)).repeat_interleave(counts)
    empty = rows_RH.new_zeros(len(counts), rows_RH.shape[1])
    sums_BH = empty.index_add(0, bring(samples_R, device), rows_RH)
    return sums_BH / bring(counts, device)[:, None]


def fresh_linear(in_features: int, out_features: int, seed: int, name: str) -> nn.Linear:
    """BERT's initialisation: normal with std 0.02, bias zero."""
    with seeded(seed, name):
        linear = nn.Linear(in_features, out_features)
        nn.init.normal_(linear.weight, std=0.02)
    nn.init.zeros_(linear.bias)
    return linear


def check_finite(scores: Tensor) -> None:
    """Raise TrainingDiverged for scores that are no numbers: no prediction follows from them."""
    if not scores.isfinite().all():
        raise TrainingDiverged(
            "the model's answers are not finite, so it cannot be scored: it has diverged. Go on "
            "from an earlier checkpoint, or start again, with a lower "
            "training.optimizer.learning_rate, or with training.precision=fp32"
        )


class SampleHead(nn.Module):
    """linear(dropout(tanh(dense(x)))), x one row per sample [B, H] (BERT's pooler and
    classifier, Devlin et al., arXiv:1810.04805). pooler: the checkpoint's weights for `dense`."""

    def __init__(
        self,
        hidden: int,
        head: Head,
        dropout: float,
        seed: int,
        pooler: Mapping[str, Tensor] | None,
    ) -> None:
        super().__init__()
        self.is_value = head.kind == "value"
        self.dense = fresh_linear(hidden, out_features=hidden, seed=seed, name="pooler")
        self.classifier = fresh_linear(
            hidden, out_features=head.num_outputs, seed=seed, name="classifier"
        )
        if pooler is not None:
            self.dense.load_state_dict(dict(pooler))
        self.dropout = nn.Dropout(dropout)

    def forward(self, rows_BH: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.dropout(torch.tanh(self.dense(rows_BH))))
        return scores.float()

    def loss(self, scores: Tensor, label: Tensor, packing: Packing | None) -> Tensor:
        if self.is_value:
            # Sums over samples: the trainer divides by the weight of the whole update.
            return F.mse_loss(scores[:, 0], label, reduction="sum")
        return F.cross_entropy(scores, label, reduction="sum")

    def predict(self, scores: Tensor, label: Tensor, packing: Packing | None) -> list[list[int]]:
        check_finite(scores)
        if self.is_value:
            return [[round(VALUE_SCALE * value)] for value in scores[:, 0].tolist()]
        return [[best] for best in scores.argmax(1).tolist()]


class SpanHead(nn.Module):
    """Scores for the first and the last token of the answer, [R, 2].

    loss: mean of the two cross-entropies over the sample's tokens, summed over samples.
    predict: the span with the highest sum of both scores, of at most `max_answer_tokens`, within
    the half-open interval from label[:, 2] to the final eos.
    """

    def __init__(self, hidden: int, max_answer_tokens: int, seed: int) -> None:
        super().__init__()
        self.max_answer_tokens = max_answer_tokens
        self.classifier = fresh_linear(hidden, out_features=2, seed=seed, name="classifier")

    def forward(self, rows_RH: Tensor) -> Tensor:
        scores: Tensor = self.classifier(rows_RH)
        return scores.float()

    def loss(self, scores: Tensor, label: Tensor, packing: Packing | None) -> Tensor:
        assert packing is not None
        grid_BS2 = packing.unpack(scores)
        if packing.mask is not None:
            # Padding is no token that an answer could begin or end at.
            grid_BS2 = grid_BS2.masked_fill(~packing.mask[:, 0, 0, :, None], -torch.inf)
        first = F.cross_entropy(grid_BS2[..., 0], label[:, 0], reduction="sum")
        last = F.cross_entropy(grid_BS2[..., 1], label[:, 1], reduction="sum")
        return (first + last) / 2

    def predict(self, scores: Tensor, label: Tensor, packing: Packing | None) -> list[list[int]]:
        assert packing is not None
        check_finite(scores)
        grid_BS2 = packing.unpack(scores)
        places_S = torch.arange(packing.longest, device=scores.device)
        counts = bring(packing.counts, device=scores.device)
        # From where the context begins up to the final eos: an answer is never in the question.
        allowed_BS = (places_S >= label[:, 2:]) & (places_S < counts[:, None] - 1)
        assert allowed_BS.any(1).all(), "a sample has no token that could be an answer"
        grid_BS2 = grid_BS2.masked_fill(~allowed_BS[:, :, None], -torch.inf)
        length_SS = places_S[None, :] - places_S[:, None] + 1
        fits_SS = (length_SS >= 1) & (length_SS <= self.max_answer_tokens)
        answers = []
        for first_S, last_S in zip(*grid_BS2.unbind(2), strict=True):
            sums_SS = first_S[:, None] + last_S  # of one sample: of all it may not fit memory
            # Every pair of first and last token of the sample that an answer may have.
            best, cell = sums_SS.masked_fill(~fits_SS, -torch.inf).flatten().max(0)
            place = divmod(int(cell), packing.longest)
            answers.append([*place, round(SCORE_SCALE * float(best))])
        return answers


TextHead = SampleHead | SpanHead
"""Rows -> scores; `loss` sums over samples, `predict` is as contracts.model.Head says."""


class TextModel:
    """A SplitModel whose first stage reads a text, and whose last one reads labels."""

    def fields(self, stage: int, num_stages: int) -> frozenset[str]:
        read = frozenset({TEXT, TYPES}) if stage == 0 else frozenset[str]()
        return read | {LABEL} if stage == num_stages - 1 else read

    def parts(self, stage: int, num_stages: int) -> frozenset[str]:
        """Embeddings in the first stage, the head in the last, layers where they are."""
        ends = {"embeddings": stage == 0, "head": stage == num_stages - 1}
        return frozenset({"layers"} | {name for name, held in ends.items() if held})


def rows_boundary(
    width: int,
    max_length: int,
    *between: BoundaryField,
    whole: int | None = None,
    gradient_returns: bool = True,
    start: tuple[TensorSpec, ...] = (),
    is_constant: bool = False,
) -> Boundary:
    """Token counts and hidden rows [R, width]: 4 * R * width bytes each way.

    between: fields that stand between them. whole: features of the uncut model's rows.
    """
    counts = BoundaryField(name="counts", features=(), dtype=torch.int16)
    hidden = BoundaryField(
        name="hidden", features=(width,), dtype=torch.float32, rows="counted", replaces=whole
    )
    fields = (counts, *between, hidden)
    return Boundary(
        fields,
        max_rows_per_sample=max_length,
        gradient_returns=gradient_returns,
        start=start,
        is_constant=is_constant,
    )


def seed_of(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the named part, equal in every process and on every machine."""
    text = repr((seed, *names)).encode()
    # torch takes seeds below 2^63. A hash, as Python's own differs from process to process.
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


@contextmanager
def seeded_on(device: torch.device, seed: int) -> Iterator[None]:
    """Use a separate random stream on the CPU and this device, for dropout for example."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        # torch.manual_seed takes milliseconds while no GPU is in use.
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield


def seeded(seed: int, *names: str | int) -> AbstractContextManager[None]:
    """Use the part's own random stream on the CPU; restores the caller's afterwards."""
    return seeded_on(torch.device("cpu"), seed=seed_of(seed, *names))

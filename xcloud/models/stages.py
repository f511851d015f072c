"""What all cut networks have in common: fields and parts of a stage, what crosses after it, and a
random stream for each part. Not for seeding a run's data.

A part's initial weights depend on the seed and the part's name, never on what was built before
it, so they do not depend on how parts are spread over clouds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from xcloud.cluster.frame import TensorSpec
from xcloud.contracts.model import (
    Architecture,
    Batch,
    Boundary,
    BoundaryField,
    Message,
    Stage,
    StageOutput,
)
from xcloud.models.encoder import Packing

TEXT, TYPES, LABEL = "text", "types", "label"


class RowsStage(Stage):
    """Embeddings, which only the first stage has, and layers: a text, or rows, in; rows out.

    layers: modules of (rows, packing) -> rows. field: of the batch, with the text; pad: its id.
    has_types: whether the embeddings take the batch's "types".
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
        self._field, self._pad, self._has_types = field, pad, has_types
        if frozen:
            self.requires_grad_(False)

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        if received is not None:
            rows, packing = received["hidden"], Packing(received["counts"])
        else:
            assert self.embeddings is not None
            packing = Packing.of(batch[self._field], self._pad)
            types = [packing.pack(batch[TYPES])] if self._has_types else []
            rows = self.embeddings(packing.pack(batch[self._field]), packing, *types)
        for layer in self.layers.values():
            rows = layer(rows, packing)
        return StageOutput({"counts": packing.counts.to(torch.int16), "hidden": rows.float()})


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
    counts = BoundaryField("counts", (), torch.int16)
    hidden = BoundaryField("hidden", (width,), torch.float32, rows="counted", replaces=whole)
    fields = (counts, *between, hidden)
    return Boundary(fields, max_length, gradient_returns, start, is_constant)


def seed_of(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the named part, equal in every process and on every machine."""
    text = repr((seed, *names)).encode()
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
    return seeded_on(torch.device("cpu"), seed_of(seed, *names))

"""What crosses a boundary between two stages, by name, shape and dtype. Nothing is sent here.

Shapes: B samples in a micro-batch; R rows = tokens that are not padding, so padding never crosses
a boundary; D features of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from xcloud.cluster.frame import TensorSpec
from xcloud.comm.memory import SampleRows

Samples = Mapping[str, Tensor]
"""What a rank may see of a message's samples, axis 0 = sample: "ids", int64 [B], and fields of the
batch. Empty for a message without samples: all its fields have fixed rows."""

Message = dict[str, Tensor]
"""What crosses a boundary for one micro-batch, by the names of the boundary's fields."""


@dataclass(frozen=True)
class BoundaryField:
    """One tensor of a boundary message. Floating fields are compressed and their gradient returns;
    integer fields cross unchanged.

    rows "samples": the tensor is [B, *features]. rows "counted": it is [sum(counts), *features],
    where `counts` is the message's integer field of that name, [B], which must stand first.
    rows a number: so many, whatever the samples (a gradient, a factor of one).
    replaces: values of a row of the uncut model that this row stands for (H where K < H features
    of it cross); what the compression ratio is counted against. None: as many as cross.
    most: of an integer field whose values index something, the largest; the least is 0. None: any.
        `counts` are at most the boundary's max_rows_per_sample.
    """

    name: str
    features: tuple[int, ...]
    dtype: torch.dtype
    rows: Literal["samples", "counted"] | int = "samples"
    replaces: int | None = None
    most: int | None = None

    def raw_bytes(self, num_rows: int) -> int:
        """FP32 bytes of what the uncut model would hand on."""
        values = math.prod(self.features) if self.replaces is None else self.replaces
        return 4 * num_rows * values

    def spec(self, num_rows: int) -> TensorSpec:
        return TensorSpec((num_rows, *self.features), self.dtype)

    def num_rows(self, samples: Samples, counts: Tensor | None) -> int:
        if isinstance(self.rows, int):
            return self.rows
        if self.rows == "samples":
            return len(samples["ids"])
        assert counts is not None, f"boundary field {self.name!r} needs a 'counts' field before it"
        return int(counts.sum())

    def max_rows(self, max_samples: int, max_rows_per_sample: int) -> int:
        if isinstance(self.rows, int):
            return self.rows
        return max_samples * (max_rows_per_sample if self.rows == "counted" else 1)

    def counts(self, counts: Tensor | None) -> Tensor | None:
        """Rows of each sample in this field; None where every sample has one."""
        return counts if self.rows == "counted" else None

    def sample_rows(self, samples: Samples, counts: Tensor | None) -> SampleRows:
        """For memories; a tensor of fixed rows counts as one sample."""
        if isinstance(self.rows, int):
            return SampleRows((0,), (self.rows,))
        ids = samples["ids"].tolist()
        own = self.counts(counts)
        return SampleRows(tuple(ids), tuple([1] * len(ids) if own is None else own.tolist()))

    @property
    def in_words(self) -> str:
        """ "hidden float32 [R, 8]": R tokens, B samples."""
        rows = {"samples": "B", "counted": "R"}.get(str(self.rows), str(self.rows))
        axes = ", ".join([rows, *map(str, self.features)])
        return f"{self.name} {str(self.dtype).removeprefix('torch.')} [{axes}]"


@dataclass(frozen=True)
class Boundary:
    """All that crosses between stage s and stage s+1.

    start: tensors that stage s hands over once, before the first step, as they are.
    is_constant: nothing before the boundary is trained or drawn at random, so that a sample's rows
    are the same in every epoch, but for rounding that depends on the samples computed with it.
    """

    fields: tuple[BoundaryField, ...]
    max_rows_per_sample: int
    gradient_returns: bool = True
    start: tuple[TensorSpec, ...] = ()
    is_constant: bool = False

    @property
    def gradient_fields(self) -> tuple[BoundaryField, ...]:
        """What comes back: the gradients of the floating fields."""
        if not self.gradient_returns:
            return ()
        return tuple(field for field in self.fields if field.dtype.is_floating_point)

"""Named tensors of fixed shapes as one message, and back: what replicas send each other of their
gradients or weight changes. Compressors and residuals, no links.

A compressor sees a tensor as a matrix: [rows, rest] for two axes and more, [1, n] for a vector.
The parts of all tensors are joined by dtype, so that a message has a handful of parts, however
many tensors it carries.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xcloud.base.errors import ConfigError, FrameError
from xcloud.cluster.frame import TensorSpec
from xcloud.comm.compressor import Chain, Compressor, Parts, seed_from
from xcloud.comm.state import MEMORY, State, StatefulParts, StateTree, copy_of, fill

Choose = Callable[[str, torch.Size], Compressor]
"""The compressor of a tensor, by its name and shape."""


@dataclass
class _Coded(StatefulParts):
    """One tensor: its compressor (a copy of its own), and what messages have left out so far."""

    own_names = ("residual",)

    name: str
    shape: torch.Size
    spec: TensorSpec  # as a matrix
    compressor: Compressor
    residual: Tensor | None  # None: no feedback

    def encode(self, tensor: Tensor) -> tuple[Parts, Tensor]:
        matrix = tensor.detach().reshape(self.spec.shape)
        # One bad update is skipped by every replica; it must not spoil those after it.
        keeps = self.residual is not None and _is_bounded(matrix)
        # What was kept before stays as it is, for `undo`.
        meant = self.residual + matrix if self.residual is not None and keeps else matrix
        parts = self.compressor.compress(meant)
        if keeps:
            parts = tuple(_apart(part, meant) for part in parts)
        seen = _apart(self.compressor.decompress(parts, self.spec), meant)
        if keeps:
            self.residual = meant.sub_(seen)
        return parts, seen.view(self.shape)

    def parts(self) -> StateTree:
        return {"compressor": self.compressor}

    def own(self) -> State:
        return {} if self.residual is None else {"residual": copy_of(self.residual)}

    def take(self, own: State) -> None:
        fill({} if self.residual is None else {"residual": self.residual}, own, repr(self.name))


class TensorCodec(StatefulParts):
    """Encodes this replica's tensors and decodes those of any other with the same settings.

    shapes: every tensor by name, in the order in which they are handed over. choose: the
        compressor of each; the codec works on copies.
    identity: random stream of the messages, the same in all replicas. They draw the same
        positions, so that what one sends of a sum of others is what these have sent, and round
        independently, so that errors average out.
    feedback: add what a message lost to the next one, where that does good (Compressor.feedback).
        Without it, ConfigError for a compressor that needs it.
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], choose: Choose, identity: int, feedback: bool,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", replica: int = 0,
    ) -> None:  # fmt: skip
        self.device = torch.device(device)
        self._coded: list[_Coded] = []
        for name, shape in shapes.items():
            rows = shape[0] if len(shape) > 1 else 1
            spec = TensorSpec((rows, shape.numel() // rows if rows else 0), dtype)
            compressor = copy.deepcopy(choose(name, shape))
            if compressor.feedback == "needed" and not feedback:
                raise ConfigError(
                    f"{compressor.label}, chosen for {name!r}, leaves out the same part of an "
                    "average again and again without feedback: set feedback to true, or choose a "
                    "compressor that needs none (docs/averaging.md lists them)"
                )
            kept = feedback and compressor.feedback in ("useful", "needed")
            residual = torch.zeros(spec.shape, dtype=dtype, device=device) if kept else None
            self._coded.append(_Coded(name, shape, spec, compressor, residual))
            chain = compressor.members if isinstance(compressor, Chain) else {"": compressor}
            for member_name, member in chain.items():
                whose = "all" if member.family == "sparse" else replica
                member.use_stream(seed_from(identity, name, member_name, whose))
        self._parts = [part for c in self._coded for part in c.compressor.wire_specs(c.spec)]
        self._dtypes = list(dict.fromkeys(part.dtype for part in self._parts))

    @property
    def names(self) -> list[str]:
        """Of the tensors."""
        return [coded.name for coded in self._coded]

    @property
    def wire_specs(self) -> tuple[TensorSpec, ...]:
        """One part for each dtype, all of one axis."""
        return tuple(
            TensorSpec((sum(part.numel for part in self._parts if part.dtype == dtype),), dtype)
            for dtype in self._dtypes
        )

    @property
    def max_bytes(self) -> int:
        """Of every message, without its frame."""
        return sum(part.num_bytes for part in self.wire_specs)

    @property
    def raw_bytes(self) -> int:
        """FP32 bytes of what a message stands for."""
        return 4 * sum(coded.spec.numel for coded in self._coded)

    @property
    def carries(self) -> tuple[str, ...]:
        """What each part is, in words."""
        labels = dict.fromkeys(coded.compressor.label for coded in self._coded)
        what = f"{len(self._coded)} tensors as {', '.join(labels)}"
        return tuple(
            f"{what}: {str(spec.dtype).removeprefix('torch.')} [{spec.numel}]"
            for spec in self.wire_specs
        )

    def encode(self, tensors: Sequence[Tensor]) -> tuple[Parts, list[Tensor]]:
        """(the message, what every receiver decodes from it). Keeps what was lost, with feedback;
        after values that are not finite it keeps what it had."""
        made: list[Tensor] = []
        seen: list[Tensor] = []
        for coded, tensor in zip(self._coded, tensors, strict=True):
            assert tensor.shape == coded.shape, (coded.name, tensor.shape, coded.shape)
            parts, decoded = coded.encode(tensor)
            made += parts
            seen.append(decoded)
        joined = tuple(
            torch.cat([part.reshape(-1) for part in made if part.dtype == dtype])
            for dtype in self._dtypes
        )
        return joined, seen

    def decode(self, parts: Parts) -> list[Tensor]:
        """What `encode` of the sender returned, bit for bit. Raises FrameError for a message of
        other settings."""
        found = tuple(TensorSpec.of(part) for part in parts)
        if found != self.wire_specs:
            raise FrameError(
                f"tensors to average came as {found}, expected {self.wire_specs}; do all clouds "
                "run the same experiment file?"
            )
        rest = {
            dtype: iter(torch.split(part, [p.numel for p in self._parts if p.dtype == dtype]))
            for dtype, part in zip(self._dtypes, parts, strict=True)
        }
        decoded = []
        for coded in self._coded:
            specs = coded.compressor.wire_specs(coded.spec)
            own = tuple(next(rest[spec.dtype]).view(spec.shape) for spec in specs)
            decoded.append(coded.compressor.decompress(own, coded.spec).view(coded.shape))
        return decoded

    @property
    def residuals(self) -> list[Tensor | None]:
        """Of all tensors, as they are: `encode` makes new ones."""
        return [coded.residual for coded in self._coded]

    def undo(
        self, before: Sequence[Tensor | None], after: Sequence[Tensor | None] | None = None
    ) -> None:
        """As if a message had never been encoded. before, after: the residuals then; after: None
        where no other message was encoded since."""
        for i, (coded, old) in enumerate(zip(self._coded, before, strict=True)):
            new = None if after is None else after[i]
            if coded.residual is not None and old is not None:
                coded.residual = old if new is None else coded.residual + (old - new)

    def parts(self) -> StateTree:
        """Residuals and what compressors carry on, by the number of the tensor."""
        return {MEMORY: {str(number): coded for number, coded in enumerate(self._coded)}}


def _is_bounded(tensor: Tensor) -> bool:
    """No NaN, no inf, and nothing so large that a residual might overflow."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # one pass; NaN anywhere makes both NaN
    return max(-float(low), float(high)) < torch.finfo(tensor.dtype).max / 16


def _apart(made: Tensor, source: Tensor) -> Tensor:
    """`made`, or a copy if it shares memory with `source`, which will change."""
    same = made.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return made.clone() if same else made

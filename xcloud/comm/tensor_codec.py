"""Named tensors of fixed shapes as one message, and back: what replicas send each other of their
gradients or weight changes. Compressors and residuals, no links.

A compressor sees a tensor as a matrix: [rows, rest] for two axes and more, [1, n] for a vector.
The parts of all tensors are joined by dtype, so that a message has a handful of parts, however
many tensors it carries.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xcloud.base.errors import ConfigError, FrameError
from xcloud.comm.compressor import Chain, Compressor, seed_from, wide
from xcloud.comm.state import MEMORY, State, StatefulTree, StateTree, copy_of, fill
from xcloud.net.frame import Tensors, TensorSpec

Choose = Callable[[str, torch.Size], Compressor]
"""The compressor of a tensor, by its name and shape."""


@dataclass
class _Sent:
    """The residuals of a tensor around one message. They are kept until it is reported whether the
    message was used.

    before: the residual that the message carried; None if it carried none.
    after: the values that the message left out; None if there are none.
    """

    before: Tensor | None
    after: Tensor | None


class _Coded(StatefulTree):
    """One tensor with its compressor (a copy of its own), and the residual of used messages.

    residual: the values that used messages have left out, in float32 at least, so that small
        values are not rounded away. None while a message carries all of it, and always without
        feedback.
    """

    own_names = ("residual", "before", "after")
    child_names = ("compressor",)

    def __init__(
        self, name: str, shape: torch.Size, spec: TensorSpec, compressor: Compressor,
        feedback: float, device: torch.device,
    ) -> None:  # fmt: skip
        self.name = name
        self.shape = shape
        self.spec = spec  # as a matrix
        self.compressor = compressor
        self.residual: Tensor | None = None
        self._device = device
        self._feedback = feedback
        self._has_feedback = feedback > 0
        self._sent: deque[_Sent] = deque()  # not settled, the oldest first
        if self._has_feedback:
            self.residual = self._zeros()

    def encode(self, tensor: Tensor) -> tuple[Tensors, Tensor]:
        matrix = tensor.detach().reshape(self.spec.shape)
        if not self._has_feedback:
            parts = self.compressor.compress(matrix)
            seen = self.compressor.decompress(parts, spec=self.spec)
            return parts, _apart(seen, source=matrix).view(self.shape)
        # A tensor that is not finite is of an update that nobody makes, or of a replica that is
        # left out: no residual may meet it.
        if not _is_bounded(matrix, kept=wide(self.spec.dtype)):
            self._sent.append(_Sent(before=None, after=None))
            parts = self.compressor.compress(matrix)
            seen = self.compressor.decompress(parts, spec=self.spec)
            return parts, _apart(seen, source=matrix).view(self.shape)
        # The residual goes with this message. If its update is skipped, `settle` puts it back.
        before = self.residual
        self.residual = None
        meant = matrix.to(wide(self.spec.dtype), copy=before is None)
        if before is not None:
            meant = torch.add(meant, before, alpha=self._feedback)
        # What does not fit into float16 stays in the residual, which is wider.
        narrow = _narrowed(meant, dtype=self.spec.dtype)
        parts = tuple(_apart(part, source=meant) for part in self.compressor.compress(narrow))
        seen = _apart(self.compressor.decompress(parts, spec=self.spec), source=meant)
        self._sent.append(_Sent(before, after=meant.sub_(seen)))
        return parts, seen.view(self.shape)

    def settle(self, was_used: bool) -> None:
        if not self._sent:
            return
        sent = self._sent.popleft()
        kept = sent.after if was_used else sent.before
        if kept is not None:
            # Messages of several steps may be under way: each gives back its own, and they add up.
            self.residual = kept if self.residual is None else self.residual + kept

    def scale(self, factor: float) -> None:
        """Multiply what is kept, whose tensors come in another unit from now on."""
        assert not self._sent, f"a message of {self.name!r} is not settled"
        if self.residual is not None:
            self.residual.mul_(factor)

    def own(self) -> State:
        state: State = {}
        if self.residual is not None:
            state["residual"] = copy_of(self.residual)
        for number, sent in enumerate(self._sent):
            for name, tensor in (("before", sent.before), ("after", sent.after)):
                if tensor is not None:
                    state[f"{name}.{number}"] = copy_of(tensor)
        return state

    def take(self, own: State) -> None:
        # Messages under way are numbered in their keys.
        num_sent = 1 + max((int(key.partition(".")[2]) for key in own if "." in key), default=-1)
        places: dict[str, Tensor] = {}
        if self._has_feedback:
            places = {key: self._zeros() for key in own if "." in key}
            if "residual" in own or not num_sent:
                places["residual"] = self._zeros()
        fill(places, state=own, owner=repr(self.name))
        self.residual = places.get("residual")
        self._sent = deque(
            _Sent(before=places.get(f"before.{number}"), after=places.get(f"after.{number}"))
            for number in range(num_sent)
        )

    def _zeros(self) -> Tensor:
        return torch.zeros(self.spec.shape, dtype=wide(self.spec.dtype), device=self._device)


class TensorCodec(StatefulTree):
    """Encodes this replica's tensors and decodes those of any other with the same settings.

    shapes: every tensor by name, in the order in which they are handed over. choose: the
        compressor of each; the codec works on copies.
    identity: random stream of the messages, the same in all replicas. They draw the same
        positions, so that what one sends of a sum of others is what these have sent, and round
        independently, so that errors average out.
    feedback: the share of what a message lost that is added to the next one, where that does good
        (Compressor.feedback); False is 0, True is 1. Without it, ConfigError for a compressor that
        needs it. Below 1 old errors fade.

    If it is not known yet whether a message will be used, it is encoded with is_final=False, and
    `settle` is called later. Until then no other message carries what this one left out. So a
    skipped update leaves nothing behind.
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], choose: Choose, identity: int, feedback: float,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", replica: int = 0,
    ) -> None:  # fmt: skip
        self.device = torch.device(device)
        self._coded: list[_Coded] = []
        for name, shape in shapes.items():
            rows = shape[0] if len(shape) > 1 else 1
            spec = TensorSpec(shape=(rows, shape.numel() // rows if rows else 0), dtype=dtype)
            compressor = copy.deepcopy(choose(name, shape))
            if compressor.feedback == "needed" and not feedback:
                raise ConfigError(
                    f"{compressor.label}, chosen for {name!r}, loses the same part of every "
                    "average without feedback: set feedback to true, or choose a "
                    "compressor that needs none (docs/strategies.md lists them)"
                )
            if any(part.is_bound for part in compressor.wire_specs(spec)):
                raise ConfigError(
                    f"{compressor.label}, chosen for {name!r}, makes messages of several sizes, "
                    "which averages cannot carry: give compression.averaging another compressor, "
                    "such as xcloud.comm.precision.BlockInt"
                )
            is_kept = compressor.feedback in ("useful", "needed")
            self._coded.append(
                _Coded(
                    name,
                    shape,
                    spec,
                    compressor=compressor,
                    feedback=float(feedback) if is_kept else 0.0,
                    device=self.device,
                )
            )
            chain = compressor.members if isinstance(compressor, Chain) else {"": compressor}
            for member_name, member in chain.items():
                whose = "all" if member.family == "sparse" else replica
                member.use_stream(seed_from(identity, name, member_name, whose))
        self._parts = [part for c in self._coded for part in c.compressor.wire_specs(c.spec)]
        self._dtypes = list(dict.fromkeys(part.dtype for part in self._parts))

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return [coded.name for coded in self._coded]

    @property
    def wire_specs(self) -> tuple[TensorSpec, ...]:
        """One part for each dtype, all of one axis."""
        return tuple(
            TensorSpec(
                shape=(sum(part.numel for part in self._parts if part.dtype == dtype),),
                dtype=dtype,
            )
            for dtype in self._dtypes
        )

    @property
    def max_bytes(self) -> int:
        """The bytes of every message, without its frame."""
        return sum(part.num_bytes for part in self.wire_specs)

    @property
    def raw_bytes(self) -> int:
        """FP32 bytes of what a message stands for."""
        return 4 * sum(coded.spec.numel for coded in self._coded)

    @property
    def carries(self) -> tuple[str, ...]:
        """The description of each tensor of a message, in words."""
        labels = dict.fromkeys(coded.compressor.label for coded in self._coded)
        what = f"{len(self._coded)} tensors as {', '.join(labels)}"
        return tuple(
            f"{what}: {str(spec.dtype).removeprefix('torch.')} [{spec.numel}]"
            for spec in self.wire_specs
        )

    def encode(
        self, tensors: Sequence[Tensor], is_final: bool = True
    ) -> tuple[Tensors, list[Tensor]]:
        """Return the message, and what every receiver decodes from it. With feedback the message
        carries what settled ones have left out, unless the tensor is not finite.

        is_final: it is settled at once, as used.
        """
        made: list[Tensor] = []
        seen: list[Tensor] = []
        for coded, tensor in zip(self._coded, tensors, strict=True):
            assert tensor.shape == coded.shape, (coded.name, tensor.shape, coded.shape)
            parts, decoded = coded.encode(tensor)
            made += parts
            seen.append(decoded)
        if is_final:
            self.settle(was_used=True)
        # A message of hundreds of tensors has a part for each dtype: headers of parts would cost
        # more than many a bias.
        joined = tuple(
            torch.cat([part.reshape(-1) for part in made if part.dtype == dtype])
            for dtype in self._dtypes
        )
        return joined, seen

    def decode(self, parts: Tensors) -> list[Tensor]:
        """Return what `encode` of the sender returned, bit for bit. Raises FrameError for a
        message of other settings."""
        found = tuple(TensorSpec.of(part) for part in parts)
        if found != self.wire_specs:
            raise FrameError(
                f"tensors to average came as {found}, expected {self.wire_specs}; do all clouds "
                "run the same experiment file?"
            )
        # One iterator for each dtype: tensors take their pieces in the order in which they were
        # joined.
        rest = {
            dtype: iter(torch.split(part, [p.numel for p in self._parts if p.dtype == dtype]))
            for dtype, part in zip(self._dtypes, parts, strict=True)
        }
        decoded = []
        for coded in self._coded:
            specs = coded.compressor.wire_specs(coded.spec)
            own = tuple(next(rest[spec.dtype]).view(spec.shape) for spec in specs)
            decoded.append(coded.compressor.decompress(own, spec=coded.spec).view(coded.shape))
        return decoded

    def settle(self, was_used: bool) -> None:
        """Say of the oldest message that is not settled whether its values were used. If not, it
        is as if it had never been encoded; nothing happens where no message is open."""
        for coded in self._coded:
            coded.settle(was_used)

    def scale(self, factor: float) -> None:
        """Multiply what is kept of settled messages: from now on tensors come in another unit."""
        for coded in self._coded:
            coded.scale(factor)

    def children(self) -> StateTree:
        """Residuals and what compressors carry on, by the number of the tensor."""
        return {MEMORY: {str(number): coded for number, coded in enumerate(self._coded)}}


def _is_bounded(tensor: Tensor, kept: torch.dtype) -> bool:
    """Return whether nothing is NaN, inf, or so large that a residual, of dtype `kept`, might
    overflow."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # one pass; NaN anywhere makes both NaN
    return max(-float(low), float(high)) < torch.finfo(kept).max / 16


def _narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in `dtype`; what does not fit its range becomes the largest that does."""
    if tensor.dtype == dtype:
        return tensor
    largest = torch.finfo(dtype).max
    return tensor.clamp(-largest, largest).to(dtype)


def _apart(made: Tensor, source: Tensor) -> Tensor:
    """`made`, or a copy if it shares memory with `source`, which will change."""
    same = made.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return made.clone() if same else made

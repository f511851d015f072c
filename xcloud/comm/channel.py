"""What crosses a boundary between two stages, and the channel that carries it: the only place that
holds compressor, memory and link together, for one direction of one boundary.

A message's fields go in the boundary's order: integer fields as they are, floating fields through
memory and compressor. The receiver knows every size from the boundary and the counts, checks what
came against it, and so never trusts a shape from the wire.

Evaluation goes through the same compressors, begun at the state that training left, and leaves no
trace: it passes by the memories, and what a compressor learns or counts from it is dropped.

Shapes: B samples in a micro-batch; R rows = tokens that are not padding, so padding never crosses
a boundary; D features of a row.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.comm.compression import ChannelId
from xcloud.comm.compressor import Chain, Compressor, seed_from
from xcloud.comm.devices import bring
from xcloud.comm.memory import Memory, NoMemory, SampleRows
from xcloud.comm.state import StatefulTree, StateTree
from xcloud.comm.step_clock import StepClock
from xcloud.net.frame import Kind, MessageKey, Tensors, TensorSpec
from xcloud.net.link_end import ReceivingEnd, SendingEnd

Samples = Mapping[str, Tensor]
"""What a rank may see of a message's samples, axis 0 = sample: "ids", int64 [B], and fields of the
batch. Empty for a message without samples: all its fields have fixed rows."""

Message = dict[str, Tensor]
"""What crosses a boundary for one micro-batch, by the names of the boundary's fields. Integer
fields arrive on the host, where Python reads them; floating ones on the rank's device."""


@dataclass(frozen=True)
class BoundaryField:
    """One tensor of a boundary message. Floating fields are compressed, unless they are exact, and
    their gradient returns; integer fields cross unchanged.

    rows: "samples": the tensor is [B, *features]. "counted": it is [sum(counts), *features], where
        `counts` is the message's integer field of that name, [B], which must stand first. A
        number: it has that many rows, whatever the number of samples (a gradient, or a factor of
        one).
    replaces: number of values in a row of the full model that this row replaces (H, where K < H
        features of it cross). The compression ratio is counted against it. None: as many as cross.
    most: largest value of an integer field whose values index something; the least is 0. None:
        any value. `counts` are at most the boundary's max_rows_per_sample.
    is_exact: True for a floating field that crosses uncompressed, and so does its gradient.
    """

    name: str
    features: tuple[int, ...]
    dtype: torch.dtype
    rows: Literal["samples", "counted"] | int = "samples"
    replaces: int | None = None
    most: int | None = None
    is_exact: bool = False

    @property
    def is_compressed(self) -> bool:
        return self.dtype.is_floating_point and not self.is_exact

    def raw_bytes(self, num_rows: int) -> int:
        """FP32 bytes of what the uncut model would hand on."""
        values = math.prod(self.features) if self.replaces is None else self.replaces
        return 4 * num_rows * values

    def spec(self, num_rows: int) -> TensorSpec:
        return TensorSpec(shape=(num_rows, *self.features), dtype=self.dtype)

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
            return SampleRows(ids=(0,), counts=(self.rows,))
        ids = samples["ids"].tolist()
        own = self.counts(counts)
        tokens = None
        if own is not None and TEXT in samples:
            # Row i is of token i only if both ends read the same text, padding left out in the
            # same way.
            tokens = samples[TEXT][samples[TEXT] != NO_TOKEN].cpu()
            if len(tokens) != int(own.sum()):
                raise FrameError(
                    f"{int(own.sum())} rows for {len(tokens)} tokens of this cloud's own text; do "
                    "all clouds read the same files?"
                )
        return SampleRows(
            ids=tuple(ids),
            counts=tuple([1] * len(ids) if own is None else own.tolist()),
            tokens=tokens,
        )

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
        """The fields whose gradients come back: the floating ones."""
        if not self.gradient_returns:
            return ()
        return tuple(field for field in self.fields if field.dtype.is_floating_point)


NOTHING_KNOWN: Message = {}

TEXT = "text"
NO_TOKEN = -1  # of places behind a text (contracts/model.py)


@dataclass
class Codec(StatefulTree):
    """Compressor and memory of one direction. Every channel has its own copy: both have state."""

    compressor: Compressor
    memory: Memory

    child_names = ("compressor", "memory")

    def __post_init__(self) -> None:
        self.compressor = copy.deepcopy(self.compressor)
        self.memory = copy.deepcopy(self.memory)

    def encode(
        self,
        tensor: Tensor,
        rows_of: Callable[[], SampleRows],
        activations: Tensor | None = None,
    ) -> Tensors:
        """In training. rows_of: tells which rows are of which sample. activations: those that the
        tensor is the gradient of. None: it is no gradient."""
        compress = self.compressor.compress
        if activations is not None:
            compress = partial(self.compressor.compress_gradient, activations=activations.detach())
        # Decoding one's own message costs as much as at the receiver, and only a memory needs it.
        if isinstance(self.memory, NoMemory):
            return compress(tensor)
        rows = rows_of()
        meant = self.memory.before_send(tensor, rows)
        parts = compress(meant)
        # What the receiver will see, computed here once more: the memory keeps the difference.
        seen = self.compressor.decompress(parts, spec=TensorSpec.of(tensor))
        self.memory.after_send(meant, seen, rows)
        return parts

    def compress_apart(self, tensor: Tensor, stream: int) -> Tensors:
        """Return what the compressor would make of it now, with random numbers from `stream`; the
        compressor stays as it is."""
        compressor = copy.deepcopy(self.compressor)
        compressor.use_stream(stream)
        return compressor.compress(tensor)


PLAIN = Codec(compressor=Chain(), memory=NoMemory())


@dataclass(eq=False)
class Codecs(StatefulTree):
    """The codec of one direction over the phases of training: `at(step)` is the one in force.

    phases: (last step it serves, or None for ever; codec), in order.
    """

    phases: Sequence[tuple[int | None, Codec]]

    def at(self, step: int) -> Codec:
        return next(codec for until, codec in self.phases if until is None or step <= until)

    def max_bytes(self, spec: TensorSpec) -> int:
        """Wire bytes of a tensor of this spec in the most expensive phase."""
        return max(
            sum(part.num_bytes for part in codec.compressor.wire_specs(spec))
            for _, codec in self.phases
        )

    def use_stream(self, stream: int) -> None:
        """Every phase draws from a stream of its own."""
        for number, (_, codec) in enumerate(self.phases):
            codec.compressor.use_stream(seed_from(stream, number))

    def settle(self, was_used: bool) -> None:
        """Tell the memories of all phases: see Memory.settle."""
        for _, codec in self.phases:
            codec.memory.settle(was_used)

    def children(self) -> StateTree:
        """All phases, by their number. Which one is in force follows from the step."""
        return {str(number): codec for number, (_, codec) in enumerate(self.phases)}

    def learned(self) -> StateTree:
        """Return what texts that are not training samples meet: the compressors, and memories that
        know tokens instead of samples."""
        return {
            str(number): {
                "compressor": codec.compressor,
                "memory": codec.memory if codec.memory.reads_text else None,
            }
            for number, (_, codec) in enumerate(self.phases)
        }


@dataclass(eq=False)
class _Channel(StatefulTree):
    """One end, with a codec for each floating field: what they remember must not mix."""

    link: SendingEnd | ReceivingEnd
    fields: tuple[BoundaryField, ...]
    new_codecs: InitVar[Callable[[], Codecs]]
    clock: StepClock
    identity: ChannelId

    def __post_init__(self, new_codecs: Callable[[], Codecs]) -> None:
        self.codecs = {
            field.name: new_codecs() if field.is_compressed else Codecs([(None, PLAIN)])
            for field in self.fields
            if field.dtype.is_floating_point
        }
        for name, codecs in self.codecs.items():
            # A stream for each field of each channel: two that drew alike would make the same
            # errors, which then add up where their messages do.
            codecs.use_stream(self.identity.stream(name))

    def settle(self, was_used: bool) -> None:
        """Say whether the update that the last messages belong to was made: see Memory.settle."""
        for codecs in self.codecs.values():
            codecs.settle(was_used)

    def children(self) -> StateTree:
        """Compressors and memories, by field and phase. Bytes counted are no state."""
        return self.codecs

    def learned(self) -> StateTree:
        """Return what texts that are not training samples meet, by field: see Codecs."""
        return {name: codecs.learned() for name, codecs in self.codecs.items()}


class Sender(Protocol):
    """The sending end of a direction of a boundary, as the pipeline knows it."""

    def send(
        self, key: MessageKey, message: Message, samples: Samples, known: Message = NOTHING_KNOWN
    ) -> Message:
        """Returns before delivery. message: the boundary's fields, in the graph. known: what both
        ends know already: of a gradient, the message that it is the gradient of.

        Returns what left in place of `message`, in the graph: what comes back is its gradient.
        """

    def learn_from_gradients(self, step: int, gradients: Message) -> None:
        """Let the compressors learn from what came back of a message of this step."""

    def send_start(self, tensors: Tensors) -> None:
        """Send Boundary.start, once and uncompressed, before the first step."""


class Receiver(Protocol):
    """The receiving end."""

    def recv(self, key: MessageKey, samples: Samples, known: Message = NOTHING_KNOWN) -> Message:
        """known: what both ends know already. Returns it with the boundary's fields, detached."""

    def recv_start(self, specs: tuple[TensorSpec, ...]) -> Tensors:
        """Raises FrameError unless what was handed over is of these specs."""


@dataclass(eq=False)
class SendChannel(_Channel):
    """Compresses and sends. `raw_bytes` grows by the FP32 size of what the floating
    fields stand for (BoundaryField.replaces)."""

    link: SendingEnd
    raw_bytes: int = 0

    def send(
        self, key: MessageKey, message: Message, samples: Samples, known: Message = NOTHING_KNOWN
    ) -> Message:
        with self.clock.during("compress"):
            counts = (known | message).get("counts")
            parts: list[Tensor] = []
            carries: list[str] = []
            for field in self.fields:
                tensor = message[field.name].detach()
                spec = field.spec(field.num_rows(samples, counts))
                assert TensorSpec.of(tensor) == spec, (field.name, TensorSpec.of(tensor), spec)
                encoded: Tensors = (tensor,)
                if spec.is_floating:
                    rows = partial(field.sample_rows, samples, counts)
                    activations = known.get(field.name)
                    encoded = self._encoded(key, field, tensor, rows, activations=activations)
                parts.extend(encoded)
                carries.extend([field.in_words] * len(encoded))
            # The frame is made here, in the main thread, and counts as codec time; carrying it
            # does not.
            self.link.send(key, tuple(parts), carries)
        return message

    def _encoded(
        self,
        key: MessageKey,
        field: BoundaryField,
        tensor: Tensor,
        rows: Callable[[], SampleRows],
        activations: Tensor | None,
    ) -> Tensors:
        codec = self.codecs[field.name].at(key.step)
        if key.kind is Kind.EVALUATION:
            # A stream of its own, so that a run that is evaluated more often draws the same in
            # training.
            stream = self.identity.stream(field.name, "evaluation", key.step, key.micro_batch)
            meant = codec.memory.before_evaluation(tensor, rows)
            return codec.compress_apart(meant, stream)
        # Training alone: the ratio that a run reports is that of its steps.
        self.raw_bytes += field.raw_bytes(len(tensor))
        return codec.encode(tensor, rows_of=rows, activations=activations)

    def learn_from_gradients(self, step: int, gradients: Message) -> None:
        for name, codecs in self.codecs.items():
            compressor = codecs.at(step).compressor
            if compressor.learns_from_gradients:
                with self.clock.during("compress"):
                    compressor.learn_from_gradient(gradients[name])

    def send_start(self, tensors: Tensors) -> None:
        self.link.send(MessageKey(Kind.START), tensors, ("start",) * len(tensors))


@dataclass(eq=False)
class ReceiveChannel(_Channel):
    """Receives and decompresses."""

    link: ReceivingEnd
    device: torch.device
    overdue_s: float
    max_rows_per_sample: int

    def recv(self, key: MessageKey, samples: Samples, known: Message = NOTHING_KNOWN) -> Message:
        with self.clock.during("wait"):
            # Counted as waiting, not as codec time: how long the message takes is up to the line.
            parts = list(self.link.recv(key, overdue_s=self.overdue_s))
        try:
            return self._decoded(key, parts=parts, samples=samples, known=known)
        except FrameError as error:
            raise FrameError(f"{key} from rank {self.identity.sender}: {error}") from error

    def _decoded(
        self, key: MessageKey, parts: list[Tensor], samples: Samples, known: Message
    ) -> Message:
        with self.clock.during("decompress"):
            message = dict(known)
            for field in self.fields:
                counts = message.get("counts")
                spec = field.spec(field.num_rows(samples, counts))
                codec = self.codecs[field.name].at(key.step) if spec.is_floating else PLAIN
                # The receiver's own expectation, from its samples and the counts. What came is
                # held to it.
                wire = codec.compressor.wire_specs(spec)
                taken = parts[: len(wire)]
                parts = parts[len(wire) :]
                found = tuple(TensorSpec.of(part) for part in taken)
                if len(found) != len(wire) or not all(map(TensorSpec.admits, wire, found)):
                    raise FrameError(
                        f"field {field.name!r} came as {found}, promised was {wire}; do all "
                        "clouds run the same experiment file?"
                    )
                if not spec.is_floating:
                    self._check_range(field, values=taken[0])
                    message[field.name] = taken[0]
                    continue
                # Compressed as it came, so that fewer bytes cross to the device.
                on_device = tuple(bring(part, device=self.device) for part in taken)
                compressor = codec.compressor
                if key.kind is Kind.EVALUATION:  # leaves no trace, as at the sender
                    compressor = copy.deepcopy(compressor)
                value = compressor.decompress(on_device, spec)
                rows = partial(field.sample_rows, samples, counts)
                if key.kind is Kind.EVALUATION:
                    value = codec.memory.after_evaluation(value, rows)
                elif not isinstance(codec.memory, NoMemory):
                    value = codec.memory.after_receive(value, rows=rows())
                message[field.name] = value
            if parts:
                raise FrameError(f"it carries {len(parts)} tensors too many")
            return message

    def _check_range(self, field: BoundaryField, values: Tensor) -> None:
        """Raise FrameError for values out of range, before anything is allocated for so many rows,
        or read at such places."""
        most = self.max_rows_per_sample if field.name == "counts" else field.most
        if most is not None and values.numel():
            low, high = (int(end) for end in torch.aminmax(values))
            if low < 0 or high > most:
                raise FrameError(f"{field.name!r} from {low} to {high}, allowed are 0 to {most}")

    def recv_start(self, specs: tuple[TensorSpec, ...]) -> Tensors:
        key = MessageKey(Kind.START)
        parts = self.link.recv(key, overdue_s=self.overdue_s)
        if tuple(TensorSpec.of(part) for part in parts) != specs:
            raise FrameError(f"{key}: not what the boundary between the stages promises")
        return tuple(bring(part, device=self.device) for part in parts)

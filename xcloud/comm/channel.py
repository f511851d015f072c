"""The only place that holds compressor, memory and link together: one direction of one border.

A message's fields go in the border's order: integer fields as they are, floating fields through
memory and compressor. The receiver knows every size from the border and the counts, checks what
came against it, and so never trusts a shape from the wire.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from xcloud.cluster.frame import Kind, MessageKey
from xcloud.cluster.link import InLink, OutLink
from xcloud.cluster.tensor_spec import TensorSpec
from xcloud.comm.border import BorderField, Message
from xcloud.comm.chain import Chain
from xcloud.comm.compressor import Compressor
from xcloud.comm.memory import Memory, NoMemory, SampleRows
from xcloud.comm.step_clock import StepClock
from xcloud.errors import FrameError


@dataclass
class Codec:
    """Compressor and memory of one direction. Every channel has its own copy: both have state."""

    compressor: Compressor
    memory: Memory

    def __post_init__(self) -> None:
        self.compressor = copy.deepcopy(self.compressor)
        self.memory = copy.deepcopy(self.memory)


PLAIN = Codec(Chain(), NoMemory())


class Codecs:
    """The codec of one direction over the phases of training: `at(step)` is the one in force.

    phases: (last step it serves, or None for ever; codec), in order.
    """

    def __init__(self, phases: list[tuple[int | None, Codec]]) -> None:
        self._phases = phases

    def at(self, step: int) -> Codec:
        for until, codec in self._phases:
            if until is None or step <= until:
                return codec
        raise AssertionError("the last phase must be open")

    def max_bytes(self, spec: TensorSpec) -> int:
        """Wire bytes of a tensor of this spec in the most expensive phase."""
        return max(
            sum(part.num_bytes for part in codec.compressor.wire_specs(spec))
            for _, codec in self._phases
        )


def codecs_of(
    fields: tuple[BorderField, ...], new_codecs: Callable[[], Codecs]
) -> dict[str, Codecs]:
    """One for each floating field: what they remember must not mix."""
    return {field.name: new_codecs() for field in fields if field.dtype.is_floating_point}


def num_rows(field: BorderField, num_samples: int, counts: Tensor | None) -> int:
    if field.rows == "samples":
        return num_samples
    assert counts is not None, f"border field {field.name!r} needs a 'counts' field before it"
    return int(counts.sum())


class SendChannel:
    """Compresses and sends. `raw_bytes` grows by the FP32 size of what the floating
    fields stand for (BorderField.replaces)."""

    def __init__(
        self,
        link: OutLink,
        fields: tuple[BorderField, ...],
        new_codecs: Callable[[], Codecs],
        clock: StepClock,
    ) -> None:
        self.link, self.fields, self.clock = link, fields, clock
        self.codecs = codecs_of(fields, new_codecs)
        self.raw_bytes = 0

    def send(self, key: MessageKey, message: Message, ids: Tensor, counts: Tensor | None) -> None:
        """Returns before delivery. ids: the samples of the micro-batch, int64 [B]."""
        with self.clock.during("compress"):
            training = key.kind is not Kind.EVALUATION
            parts: list[Tensor] = []
            carries: list[str] = []
            for field in self.fields:
                tensor = message[field.name].detach()
                spec = field.spec(num_rows(field, len(ids), counts))
                assert TensorSpec.of(tensor) == spec, (field.name, TensorSpec.of(tensor), spec)
                if not spec.is_floating:
                    parts.append(tensor)
                    carries.append(field.in_words)
                    continue
                if training:
                    self.raw_bytes += field.raw_bytes(spec.shape[0])
                codec = self.codecs[field.name].at(key.step)
                encoded = self._encode(codec, tensor, spec, ids, counts, training)
                parts.extend(encoded)
                carries.extend([field.in_words] * len(encoded))
            self.link.send(key, tuple(parts), carries)

    def _encode(
        self,
        codec: Codec,
        tensor: Tensor,
        spec: TensorSpec,
        ids: Tensor,
        counts: Tensor | None,
        training: bool,
    ) -> tuple[Tensor, ...]:
        if not training or isinstance(codec.memory, NoMemory):
            return codec.compressor.compress(tensor)
        rows = sample_rows(ids, counts)
        meant = codec.memory.before_send(tensor, rows)
        parts = codec.compressor.compress(meant)
        if codec.memory.needs_seen:
            seen = codec.compressor.decompress(parts, spec)
            codec.memory.after_send(meant, seen, rows)
        return parts


class ReceiveChannel:
    """Receives and decompresses."""

    def __init__(
        self,
        link: InLink,
        fields: tuple[BorderField, ...],
        new_codecs: Callable[[], Codecs],
        clock: StepClock,
        device: torch.device,
        overdue_s: float,
    ) -> None:
        self.link, self.fields, self.clock = link, fields, clock
        self.codecs = codecs_of(fields, new_codecs)
        self.device, self.overdue_s = device, overdue_s

    def recv(self, key: MessageKey, ids: Tensor, counts: Tensor | None = None) -> Message:
        """counts: rows of each sample where the message itself does not carry them."""
        with self.clock.during("wait"):
            parts = list(self.link.recv(key, self.overdue_s))
        with self.clock.during("decompress"):
            message: Message = {}
            for field in self.fields:
                counts = message.get("counts", counts)
                spec = field.spec(num_rows(field, len(ids), counts))
                codec = self.codecs[field.name].at(key.step) if spec.is_floating else PLAIN
                wire = codec.compressor.wire_specs(spec) if spec.is_floating else (spec,)
                taken, parts = parts[: len(wire)], parts[len(wire) :]
                found = tuple(TensorSpec.of(part) for part in taken)
                if found != wire:
                    raise FrameError(
                        f"{key}: field {field.name!r} came as {found}, promised was {wire}; do "
                        "all clouds run the same experiment file?"
                    )
                taken = [part.to(self.device) for part in taken]
                if not spec.is_floating:
                    message[field.name] = taken[0]
                    continue
                value = codec.compressor.decompress(tuple(taken), spec)
                if key.kind is not Kind.EVALUATION and not isinstance(codec.memory, NoMemory):
                    value = codec.memory.after_receive(value, sample_rows(ids, counts))
                message[field.name] = value
            if parts:
                raise FrameError(f"{key} carries {len(parts)} tensors too many")
            return message


def sample_rows(ids: Tensor, counts: Tensor | None) -> SampleRows:
    rows = [1] * len(ids) if counts is None else counts.tolist()
    return SampleRows(tuple(ids.tolist()), tuple(rows))

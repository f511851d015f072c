"""Both ends of a channel in one process, and messages for it, for tests of what they carry from
message to message.

Shapes: B samples in a message, R = ROWS_PER_SAMPLE * B rows, D features.
"""

from __future__ import annotations

import copy
import json
import queue
from collections.abc import Sequence

import torch
from safetensors.torch import load, save
from torch import Tensor

from xcloud.base.errors import LinkTimeout
from xcloud.comm.channel import BoundaryField, Codec, Codecs, Message, ReceiveChannel, SendChannel
from xcloud.comm.compression import ChannelId
from xcloud.comm.compressor import Compressor
from xcloud.comm.memory import Memory
from xcloud.comm.state import State
from xcloud.comm.step_clock import StepClock
from xcloud.net.frame import Kind, MessageKey, Tensors, decode_frame, encode_frame, seal_frame
from xcloud.net.link import LinkRecord
from xcloud.net.link_end import expect


class InProcessLink:
    """Both ends in one process: the same frames and the same counting, no time."""

    def __init__(self, name: str = "this process") -> None:
        self.name = name
        self.record = LinkRecord()
        self._frames: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._sequence = 0

    def send(self, key: MessageKey, parts: Tensors, carries: Sequence[str] = ()) -> None:
        frame = encode_frame(key, parts, self._sequence)
        seal_frame(frame, 0.0)
        self._sequence += 1
        self.record.note(key.kind, parts, carries, frame.numel())
        self._frames.put(frame)

    def say_alive(self, parts: Tensors = (), carries: Sequence[str] = ()) -> None:
        """Both ends live and die together."""

    def recv(self, key: MessageKey, overdue_s: float) -> Tensors:
        try:
            frame = self._frames.get(timeout=overdue_s)
        except queue.Empty:
            raise LinkTimeout(f"no {key} from {self.name} after {overdue_s:.1f} s") from None
        return expect(decode_frame(frame, self.name), key, self.name).parts

    def close(self, timeout_s: float) -> None:
        """Nothing to end."""


D, NUM_SAMPLES, B, ROWS_PER_SAMPLE = 120, 20, 10, 15
FIELDS = (
    BoundaryField("counts", (), torch.int16),
    BoundaryField("hidden", (D,), torch.float32, "counted"),
    BoundaryField("pooled", (8,), torch.float32),
)
IDENTITY = ChannelId(7, 0, "forward", 0, 1)

Phases = Sequence[tuple[int | None, Compressor, Memory]]


class TapedLink(InProcessLink):
    """Keeps the parts of every message."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[list[Tensor]] = []

    def send(self, key: MessageKey, parts, carries=()) -> None:  # type: ignore[no-untyped-def]
        self.tape.append([part.clone() for part in parts])
        super().send(key, parts, carries)


class Pair:
    """A sender and its receiver, with codecs of their own."""

    def __init__(self, phases: Phases, identity: ChannelId = IDENTITY) -> None:
        def new_codecs() -> Codecs:
            return Codecs([(until, Codec(c, memory)) for until, c, memory in phases])

        self.link = TapedLink()
        self.sender = SendChannel(self.link, FIELDS, new_codecs, StepClock(), identity)
        self.receiver = ReceiveChannel(
            self.link, FIELDS, new_codecs, StepClock(), identity, torch.device("cpu"), 5.0,
            ROWS_PER_SAMPLE,
        )  # fmt: skip

    def pass_on(self, number: int, kind: Kind = Kind.ACTIVATION) -> list[Tensor]:
        """Message `number`, in step number; returns its parts on the wire, then what arrived."""
        ids, message = message_of(number)
        key = MessageKey(kind, number, number % 4)
        self.sender.send(key, message, {"ids": ids})
        arrived = self.receiver.recv(key, {"ids": ids})
        return [*self.link.tape[-1], *(arrived[field.name] for field in FIELDS)]

    def states(self) -> list[State]:
        return [self.sender.state_dict(), self.receiver.state_dict()]

    def load(self, states: list[State]) -> None:
        self.sender.load_state_dict(states[0])
        self.receiver.load_state_dict(states[1])


def message_of(number: int) -> tuple[Tensor, Message]:
    """Samples come again from time to time, a little changed."""
    draw = torch.Generator().manual_seed(number)
    ids = torch.randperm(NUM_SAMPLES, generator=draw)[:B]
    table = torch.randn(
        NUM_SAMPLES, ROWS_PER_SAMPLE, D, generator=torch.Generator().manual_seed(0)
    )
    rows = table[ids] + 0.1 * torch.randn(B, ROWS_PER_SAMPLE, D, generator=draw)
    counts = torch.full((B,), ROWS_PER_SAMPLE, dtype=torch.int16)
    return ids, {"counts": counts, "hidden": rows.reshape(-1, D), "pooled": rows[:, 0, :8]}


def stored(state: State) -> State:
    """Through the formats of a checkpoint: safetensors and JSON."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in state.items() if name not in tensors}
    return load(save(tensors)) | json.loads(json.dumps(numbers))


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit for bit, NaN included."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
        for a, b in zip(one, other, strict=True)
    )


def same_state(one: list[State], other: list[State]) -> bool:
    return all(
        a.keys() == b.keys()
        and all(torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.view(1)


def copies(states: list[State]) -> list[State]:
    return copy.deepcopy(states)

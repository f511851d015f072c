"""A link whose ends are in one process, for tests of what uses a link."""

from __future__ import annotations

import queue
from collections.abc import Sequence

from torch import Tensor

from xcloud.base.errors import LinkTimeout
from xcloud.net.frame import MessageKey, decode_frame, encode_frame, seal_frame
from xcloud.net.link import LinkRecord, Tensors
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

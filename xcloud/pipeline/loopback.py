"""A boundary between two stages that one rank holds."""

from __future__ import annotations

from xcloud.comm.channel import NOTHING_KNOWN, Message, Samples
from xcloud.net.frame import MessageKey, Tensors, TensorSpec


class Loopback:
    """Both ends of a boundary between two stages of one rank: hands over what it is given."""

    def __init__(self) -> None:
        self._messages: dict[MessageKey, Message] = {}
        self._start: Tensors = ()

    def send(self, key: MessageKey, message: Message, samples: Samples) -> Message:
        self._messages[key] = {name: value.detach() for name, value in message.items()}
        return message

    def send_start(self, tensors: Tensors) -> None:
        self._start = tensors

    def recv(self, key: MessageKey, samples: Samples, known: Message = NOTHING_KNOWN) -> Message:
        return self._messages.pop(key)

    def recv_start(self, specs: tuple[TensorSpec, ...]) -> Tensors:
        return self._start

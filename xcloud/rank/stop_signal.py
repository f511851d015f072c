"""How a process learns that it is to end early."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class StopSignal:
    """A note of whether this process was asked to end.

    SIGUSR1 asks, and in ranks that no launcher watches (torchrun) all signals to stop do. While
    nothing can be saved, and for the second time, the process ends at once.
    """

    _TWICE_WITHIN_S = 0.5  # a terminal and torchrun may both pass on one Ctrl+C

    is_armed: bool = False
    is_reported: bool = False  # to rank 0
    before_exit: Callable[[], object] = lambda: None  # where it ends at once
    asked_at_s: float | None = None

    @property
    def was_asked(self) -> bool:
        return self.asked_at_s is not None

    @contextmanager
    def armed(self, can_save: bool) -> Iterator[None]:
        """Note a request while the block lasts, if its work can be saved.

        A block that fails leaves it so: the report of the failure is written whole.
        """
        self.is_armed = can_save
        yield
        self.is_armed = False

    def install(self, *numbers: signal.Signals, exit_code: int) -> None:
        """Handle these signals from now on.

        exit_code: exit code of a process that ends at once, at the first signal.
        """

        def take(number: int, frame: object) -> None:
            now_s = time.monotonic()
            # A handler runs in the main thread between two bytecodes, so it only notes the
            # request: whoever asks `was_asked` next ends in order.
            again = now_s - (self.asked_at_s or now_s) > self._TWICE_WITHIN_S
            if again or not self.is_armed:
                self.before_exit()
                os._exit(128 + number if again else exit_code)
            self.asked_at_s = self.asked_at_s or now_s

        for number in numbers:
            signal.signal(number, take)

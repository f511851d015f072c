"""What is logged in a test. Pytest's plugin walks through the loggers of all libraries six times a
test, which took a fiftieth of the suite's time, so it is off (`-p no:logging`)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class Log(logging.Handler):
    """Keeps what reaches the root logger. A line whose arguments do not fit its text is an error
    of the test."""

    def __init__(self) -> None:
        super().__init__()
        self.records = list[logging.LogRecord]()

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()
        self.records.append(record)

    @property
    def text(self) -> str:
        return "".join(f"{record.levelname} {self.format(record)}\n" for record in self.records)

    def set_level(self, level: int) -> None:
        logging.root.setLevel(level)

    @contextlib.contextmanager
    def at_level(self, level: int) -> Iterator[None]:
        before = logging.root.level
        self.set_level(level)
        yield
        self.set_level(before)


LOG = Log()
logging.root.addHandler(LOG)

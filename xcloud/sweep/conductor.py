"""Says whose turn it is among points that are timed together. A point's ranks are processes whose
end is rank/interleaved.py; what the times mean is step_ratio.py.
"""

from __future__ import annotations

import json
import selectors
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from xcloud.record.events import update_s

_LOOK_S = 0.1  # how often to ask whether a run has ended


@dataclass(eq=False)
class _Rank:
    """A connected rank. made: of each step of its last turn when it ended, and
    its seconds."""

    connection: socket.socket
    unread: bytes = b""
    point: str = ""
    rank: int = -1
    num_ranks: int = 0
    waits: bool = False
    made: list[tuple[float, float]] = field(default_factory=list)


class InterleavingServer:
    """`with InterleavingServer() as conductor:`; ranks find it at `address`. When it closes, all
    go on.

    has_ended, below: of the point's run. Ranks of a run may go and others come in their place.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="xcloud-")
        self.address = str(Path(self._folder.name, "turns"))
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.address)
        self._server.listen(128)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._ranks: dict[int, _Rank] = {}  # by file descriptor

    def __enter__(self) -> InterleavingServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for rank in self._ranks.values():
            rank.connection.close()
        self._server.close()
        self._selector.close()
        self._folder.cleanup()

    def await_ready(self, run_dir: Path, has_ended: Callable[[], bool]) -> None:
        """Return when all ranks of the point wait for a turn, or its run has ended."""
        while not has_ended() and not self._waiting(run_dir):
            self._look()

    def turn(self, run_dir: Path, has_ended: Callable[[], bool]) -> float | None:
        """Let the point make its steps. Returns the seconds of all but the first, as a run counts
        them; None if the run has ended instead, or its ranks were started again."""
        self.await_ready(run_dir, has_ended)
        began = self._waiting(run_dir)
        for rank in began:
            rank.waits = False
            try:
                rank.connection.sendall(b"\n")
            except OSError:
                self._drop(rank)
        self.await_ready(run_dir, has_ended)
        if not began or self._waiting(run_dir) != began:
            return None
        by_step = list(zip(*(rank.made for rank in began), strict=True))
        return sum(map(update_s, by_step[1:]), 0.0)

    def _waiting(self, run_dir: Path) -> list[_Rank]:
        """The point's ranks if all are there and wait, else none."""
        point = str(run_dir.resolve())
        ranks = [rank for rank in self._ranks.values() if rank.point == point]
        is_whole = bool(ranks) and len({rank.rank for rank in ranks}) == ranks[0].num_ranks
        return ranks if is_whole and all(rank.waits for rank in ranks) else []

    def _look(self) -> None:
        for key, _ in self._selector.select(_LOOK_S):
            if key.fileobj is self._server:
                connection, _ = self._server.accept()
                self._ranks[connection.fileno()] = _Rank(connection)
                self._selector.register(connection, selectors.EVENT_READ)
            elif key.fd in self._ranks:
                self._hear(self._ranks[key.fd])

    def _hear(self, rank: _Rank) -> None:
        try:
            heard = rank.connection.recv(1 << 16)
        except OSError:
            heard = b""
        if not heard:
            return self._drop(rank)
        *lines, rank.unread = (rank.unread + heard).split(b"\n")
        for line in lines:
            said = json.loads(line)
            rank.point, rank.rank, rank.num_ranks = said["point"], said["rank"], said["num_ranks"]
            rank.made, rank.waits = said["made"], True

    def _drop(self, rank: _Rank) -> None:
        if self._ranks.pop(rank.connection.fileno(), None) is not None:
            self._selector.unregister(rank.connection)
            rank.connection.close()

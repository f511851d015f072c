"""Check other ranks' reports on their way into rank 0's event log. They may come from another
cloud: what does not fit is left out, counted and shown with its sender.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

import torch

from xcloud.base.errors import FrameError
from xcloud.cluster.frame import Frame
from xcloud.record.event_kinds import SCORED, misfit
from xcloud.record.events import is_too_deep
from xcloud.record.reporter import EventFile

BYTES_PER_S = 1 << 18  # of one rank
BURST_BYTES = 1 << 22  # a timeline at the end of a run comes at once
CLOCKS_DIFFER_S = 3600.0  # at most; a report whose time is further off gets that of its arrival


class Intake:
    """`take` is called in the links' threads. cloud_of: a rank's. max_steps: of the run.

    may_report: ranks other than 0 that may tell a kind of event, or a "loss", by that name; who is
    not named there may tell all that the table of event kinds allows.
    """

    def __init__(
        self,
        events: EventFile,
        cloud_of: Callable[[int], str],
        max_steps: int,
        may_report: Mapping[str, frozenset[int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._events, self._cloud_of, self._max_steps = events, cloud_of, max_steps
        self._may_report, self._clock = may_report, clock
        self._lock = threading.Lock()
        self._room: dict[int, tuple[float, float]] = {}  # bytes left of a rank, and when
        self.num_refused: Counter[int] = Counter()  # by sender

    def take(self, peer: int, frame: Frame) -> None:
        """Lines of rank `peer`, by whose link they came. Raises FrameError for what is no text."""
        if len(frame.parts) != 1 or frame.parts[0].dtype != torch.uint8:
            raise FrameError(f"a report of rank {peer} must be one vector of bytes")
        data = frame.parts[0].numpy().tobytes()
        if not self._has_room(peer, len(data)):
            return self._refuse(peer, f"more than {BYTES_PER_S:,} bytes a second")
        accepted = []
        for line in data.split(b"\n"):
            if line.strip():
                found = self._checked(peer, line)
                if isinstance(found, bytes):
                    accepted.append(found)
                else:
                    self._refuse(peer, found)
        if accepted:
            self._events.append(b"".join(accepted))

    def close(self) -> None:
        """Write how much was refused in all."""
        for peer, num in sorted(self.num_refused.items()):
            self._tell("refused_reports", sender=peer, num=num, reason="in all")

    def _has_room(self, peer: int, num_bytes: int) -> bool:
        now_s = self._clock()
        room, since_s = self._room.get(peer, (BURST_BYTES, now_s))
        room = min(BURST_BYTES, room + BYTES_PER_S * (now_s - since_s)) - num_bytes
        if room < 0:
            return False
        self._room[peer] = room, now_s
        return True

    def _checked(self, peer: int, line: bytes) -> bytes | str:
        """The line as it is written down, or why it is refused."""
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            return "no JSON"
        if not isinstance(event, dict) or "event" not in event or is_too_deep(event):
            return "no event"
        if why := misfit(event, self._max_steps) or self._not_theirs(peer, event):
            return why
        now_s, at_s = round(time.time(), 3), event.get("t")
        is_near = isinstance(at_s, float) and abs(at_s - now_s) < CLOCKS_DIFFER_S
        t = at_s if is_near else now_s
        event |= {"rank": peer, "cloud": self._cloud_of(peer), "t": t}
        return json.dumps(event, separators=(",", ":")).encode() + b"\n"

    def _not_theirs(self, peer: int, event: Mapping[str, object]) -> str:
        kind = str(event["event"])
        tells_loss = kind == "step" and (event.get("tokens") or event.keys() & {*SCORED})
        for name in [kind, *(["loss"] if tells_loss else [])]:
            if peer not in self._may_report.get(name, {peer}):
                return f"it is not for rank {peer} to tell the {name} of this run"
        return ""

    def _refuse(self, peer: int, why: str) -> None:
        with self._lock:
            self.num_refused[peer] += 1
            num = self.num_refused[peer]
        if num == 1:
            said = f"refused a report of rank {peer} (cloud {self._cloud_of(peer)}): {why}; "
            self._tell("note", text=f"{said}further ones are counted in summary.json")
        if not num & (num - 1):  # the more there are, the less often
            self._tell("refused_reports", sender=peer, num=num, reason=why)

    def _tell(self, event: str, **fields: object) -> None:
        head = {"event": event, "rank": 0, "cloud": self._cloud_of(0), "t": round(time.time(), 3)}
        self._events.append(json.dumps({**head, **fields}).encode() + b"\n")

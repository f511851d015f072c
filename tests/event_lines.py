"""Events for tests that read events.jsonl, without a rank to report them; rank 0's intake of
reports."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from xcloud.feature_list import FIGURES
from xcloud.net.frame import Frame, Kind, MessageKey
from xcloud.record.events import EVENTS_FILE, Event, EventReader
from xcloud.record.intake import ReportIntake
from xcloud.record.reporter import EventFile


def append_event(path: Path, event: str, *, rank: int, cloud: str, **fields: object) -> None:
    entry = {"event": event, "rank": rank, "cloud": cloud, "t": time.time(), **fields}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def append_step(run_dir: Path, number: int, loss: float | None, **more: object) -> None:
    """The event of a step of rank 0, of cloud "c"."""
    fields = {"step": number, "step_s": 0.1, "loss": loss, **more}
    append_event(run_dir / EVENTS_FILE, "step", rank=0, cloud="c", **fields)


def steps_done(events: Iterable[Event]) -> list[Event]:
    """The "step" events of a run, each as the step was done last."""
    done: list[Event] = []
    for event in events:
        if event["event"] == "resume":
            done = [earlier for earlier in done if earlier["step"] <= event["step"]]
        elif event["event"] == "step":
            done.append(event)
    return done


SCORERS = {"loss": frozenset({2}), "quality": frozenset({2})}
MAX_STEPS = 20
DEEP = b"[" * 120_000
STEP = {"event": "step", "step": 3, "step_s": 0.5, "sent": {"forward": 10}, "samples": 8}


class Desk:
    """Rank 0's intake of a job in which rank 2 scores, and what it wrote."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        self.path = folder / EVENTS_FILE
        self.file = EventFile(self.path)
        self.intake = ReportIntake(
            self.file,
            "aabb".__getitem__,
            MAX_STEPS,
            SCORERS,
            lambda: self.now_s,
            figures=FIGURES,
        )

    def take(self, peer: int, *lines: bytes | Mapping[str, object]) -> None:
        data = b"".join(
            (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"
            for line in lines
        )
        part = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.intake.take(peer, Frame(MessageKey(Kind.REPORT), (part,), 0, 0.0, len(data)))

    def written(self, *kinds: str) -> list[dict[str, Any]]:
        assert self.file.flush()
        return [e for e in EventReader(self.path) if not kinds or e["event"] in kinds]

    @property
    def num_refused(self) -> dict[int, int]:
        return dict(self.intake.num_refused)

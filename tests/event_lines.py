"""Events for tests that read events.jsonl, without a rank to report them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

from xcloud.record.events import EVENTS_FILE, Event


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

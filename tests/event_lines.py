"""Events for tests that read events.jsonl, without a rank to report them."""

from __future__ import annotations

import json
import time
from pathlib import Path


def append_event(path: Path, event: str, *, rank: int, cloud: str, **fields: object) -> None:
    entry = {"event": event, "rank": rank, "cloud": cloud, "t": time.time(), **fields}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, ensure_ascii=False) + "\n")

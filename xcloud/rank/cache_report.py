"""What a rank says of its activation cache (comm/activation_cache.py)."""

from __future__ import annotations

from collections.abc import Iterable

from xcloud.comm.activation_cache import CachingChannel, describe
from xcloud.parallel.part import Part
from xcloud.record.reporter import Reporter

UNSAVED = "the activation cache is not checkpointed; cached rows will be sent again"


class CacheReport(Part):
    def __init__(self, channels: Iterable[object], reporter: Reporter) -> None:
        self._caches = [c.kept for c in channels if isinstance(c, CachingChannel)]
        self._reporter = reporter

    def finish(self) -> None:
        if self._caches:
            self._reporter.note(describe(self._caches))

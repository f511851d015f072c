"""What a rank sent to other clouds in each step, by the counters of its links, which only grow."""

from __future__ import annotations

from collections import Counter
from typing import Any

from xcloud.net.frame import TRAFFIC_OF, Kind
from xcloud.pipeline.hook import Hook, StepReport
from xcloud.pipeline.wiring import Wiring
from xcloud.record.events import AVERAGING, TENSORS, TRAFFIC
from xcloud.record.reporter import Reporter


class WanMeter(Hook):
    """A rank's meter of what it sent to other clouds since it last looked.

    tells_skips: it reports the updates that were skipped; every rank that shares one knows.
    """

    def __init__(self, wiring: Wiring, reporter: Reporter, tells_skips: bool) -> None:
        self._wiring = wiring
        self._reporter = reporter
        self._tells_skips = tells_skips
        self._last = self._read()
        self._last_again = 0  # what was sent again before the first step counts with it
        self._reported_bytes = 0  # of steps and outside them, so far

    def after_update(self, step: int, report: StepReport) -> None:
        self._reporter.event("step", **self.describe(report))
        if report.skipped is not None and self._tells_skips:
            self._reporter.event("skipped_update", step=step)
            self._reporter.note(report.skipped)

    def forget(self) -> None:
        """Forget what crossed since the last step: it belongs to no step (what stages hand over
        before the first one, an evaluation). It is reported, as it costs what all bytes cost."""
        self._last = self._read()
        # Messages of every kind. What is written to a folder or bucket is no message.
        left_bytes = sum(
            num_bytes
            for record in self._wiring.ends.records
            for kind, num_bytes in [*record.num_bytes.items()]  # other threads may add a kind
            if kind is not Kind.STORED
        )
        if num_bytes := left_bytes - self._reported_bytes:
            self._reporter.event("sent_outside", num_bytes=num_bytes)
            self._reported_bytes = left_bytes

    def describe(self, report: StepReport) -> dict[str, Any]:
        """Return the step's event: seconds, bytes on the wire with headers, FP32 bytes meant."""
        now = self._read()
        sent, raw, line_s, boundaries = (
            {name: value - before[name] for name, value in after.items()}
            for before, after in zip(self._last, now, strict=True)
        )
        self._last = now
        self._reported_bytes += sum(sent.values())
        # Differences of counters that only grow, so that nothing is counted twice or lost,
        # whichever thread sends. The bytes of a message belong to the step in which it was handed
        # to its link.
        event: dict[str, Any] = {
            "step": report.step,
            "step_s": round(report.step_s, 6),
            **{name: round(seconds, 6) for name, seconds in report.clock.seconds.items()},
            "sent": sent,
            "raw": raw,
            "boundaries": boundaries,
            "samples": report.num_samples,
            "tokens": report.num_tokens,
            "learned": report.num_learned,
        }
        again = sum(record.sent_again_bytes for record in self._wiring.ends.records)
        if again > self._last_again:
            event["sent_again"] = again - self._last_again
            self._last_again = again
        if self._wiring.ends.is_emulated:
            event["line_busy_s"] = {
                name: {to: round(s, 6) for (kind, to), s in line_s.items() if kind == name and s}
                for name in raw
            }
        if report.loss is not None:
            event["loss"] = report.loss
            event["learning_rate"] = report.learning_rate
            if report.grad_norm is not None:
                event["grad_norm"] = report.grad_norm
        return event

    def _read(self) -> tuple[Counter[Any], Counter[Any], Counter[Any], Counter[Any]]:
        """Return what has been sent to other clouds since the run began.

        First come the bytes sent and the FP32 bytes of the tensors in them, by the name of the
        traffic, which for a boundary's tensors is the direction of their channel; then the seconds
        on the emulated line to each cloud, by (name, cloud); last the bytes of each boundary, by
        "NUMBER DIRECTION".
        """
        averaging = self._wiring.averaging
        more = (AVERAGING,) if averaging else ()
        sent = Counter(dict.fromkeys((*TRAFFIC, *more), 0))
        raw = Counter(dict.fromkeys((*TENSORS, *more), 0))
        line_s: Counter[tuple[str, str]] = Counter()
        boundaries: Counter[str] = Counter()
        for record in self._wiring.ends.records:
            for kind in Kind:  # other threads may add to what has been sent
                if (name := TRAFFIC_OF.get(kind)) is not None and name in sent:
                    sent[name] += record.num_bytes[kind]
                    line_s[name, str(record.to)] += record.line_s[kind]
                    if name in TENSORS and record.num_bytes[kind]:
                        boundaries[f"{record.link.boundary} {name}"] += record.num_bytes[kind]
        for channel in self._wiring.boundaries.wan_sends:
            raw[channel.identity.direction] += channel.raw_bytes
        for links in averaging:
            raw[AVERAGING] += links.raw_bytes
        return sent, raw, line_s, boundaries

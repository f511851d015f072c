"""Turns link counters, which only grow, into what one step sent between clouds."""

from __future__ import annotations

from typing import Any

from xcloud.cluster.frame import Kind
from xcloud.cluster.link import total_bytes
from xcloud.run.wiring import Wiring
from xcloud.training.trainer import StepReport

_OTHER = (Kind.NORM, Kind.REPORT, Kind.AGREEMENT, Kind.MEETING, Kind.ALIVE)


class WanMeter:
    """One rank's view: what it sent to other clouds since it last looked."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._last = self._read()

    def forget(self) -> None:
        """What crossed since the last step belongs to no step (an evaluation)."""
        self._last = self._read()

    def describe(self, report: StepReport) -> dict[str, Any]:
        """The step's event: times in seconds, bytes on the wire with headers, FP32 bytes meant."""
        now = self._read()
        delta = {name: value - self._last[name] for name, value in now.items()}
        self._last = now
        times = {f"{name}_s": round(getattr(report.clock, f"{name}_s"), 6)
                 for name in ("compute", "codec", "waiting", "sync")}  # fmt: skip
        event: dict[str, Any] = {
            "step": report.step,
            "step_s": round(report.step_s, 6),
            **times,
            "sent": {name: delta[name] for name in ("forward", "backward", "other")},
            "raw": {name: delta[f"raw_{name}"] for name in ("forward", "backward")},
            "samples": report.num_samples,
            "tokens": report.num_tokens,
        }
        if self._wiring.is_emulated:
            event["link_busy_s"] = {
                name: round(delta[f"line_{name}"], 6) for name in ("forward", "backward")
            }
        if report.loss is not None:
            event["loss"] = report.loss
            event["learning_rate"] = report.learning_rate
            if report.grad_norm is not None:
                event["grad_norm"] = report.grad_norm
        return event

    def _read(self) -> dict[str, float]:
        stats = self._wiring.wan_stats
        return {
            "forward": total_bytes(stats, [Kind.ACTIVATION]),
            "backward": total_bytes(stats, [Kind.GRADIENT]),
            "other": total_bytes(stats, _OTHER),
            "raw_forward": self._raw_bytes("forward"),
            "raw_backward": self._raw_bytes("backward"),
            "line_forward": sum(entry.line_s[Kind.ACTIVATION] for entry in stats),
            "line_backward": sum(entry.line_s[Kind.GRADIENT] for entry in stats),
        }

    def _raw_bytes(self, direction: str) -> int:
        sends = self._wiring.wan_sends
        return sum(c.raw_bytes for c in sends if c.identity.direction == direction)

"""Summarise a run: events in, one small dictionary out (`summary.json`).
No tracker, no printing, no torch.

How the figures are made:
- `step_time_s` is the wall time of an update, from the end of the one before to its own
  (events.update_s), without what lay between (an evaluation, the copy of a checkpoint); seconds by
  cloud are means per step and rank.
- The first steps (3, or a tenth of fewer than 30) are warm-up: excluded from everything measured
  in seconds, included in byte counts. `num_warmup_steps_left_out` says how many. Rates are over
  the time spent in steps, so evaluation does not slow them.
- `bubble_ratio` = sum of waiting / sum of computing, over ranks and steps. The paper ([N] 1.1)
  has idle time over *ideal* computing time m(t_f + t_b); here both are measured, so waiting for
  the link and for the other side's codec counts as idle, and computing includes its jitter.
  Waiting for what is averaged is in `sync_s` and not in here.
- `compression_ratio` = FP32 bytes of the tensors / bytes counted on the wire, headers included;
  null where nothing crossed. Where a cut passes on fewer features than the uncut model would, the
  FP32 bytes are those of the uncut model's tensor. `total` covers the kinds of traffic that carry
  tensors (those with an FP32 size); ids, lengths and the like would be the same uncompressed and
  are counted separately under `wan_bytes_per_step.other`.
- `num_skipped_updates`: steps whose loss or gradient was not finite (training.on_divergence=skip).
  They count as steps in every figure except those of the loss.
- `num_resumes`, `num_steps_done_twice`: how often the run went on from a checkpoint, and the
  steps that it lost by that. `goodput`: the share of the time from the first event to the last
  that was not lost so. `wall_s`: that time without what lay between two attempts. Figures are of
  each step as it was done last (events.one_timeline).
- `quality_before`: of the test set before the first step, where the model is a pretrained one.
- `num_cut`: by text field that rank 0 sees, texts of all splits that were cut to max_length.
- `num_lost_checkpoints`: that a rank could not write.
- `memory`: bytes of each rank at the end of training, see MemoryMeter; before the evaluation.
- `privacy`: what clipping with noise guarantees, see rank/privacy.py; null without it.
- `merges`: of local updates where a cloud may be late or lost; a partial merge was without one.
- `autopilot`: the switches of the compression, each with the step after which it was.
- `lost_event_lines`, `lost_files`: lost to a full disk; figures are of the remaining lines.
- `link_utilisation` = time that the busiest line between two clouds, each way one, carried such
  traffic / time in steps; null where no line is emulated.
- `refused_reports`: by sending rank, those that no rank of this run would send (intake.py).
"""

import json
import math
import os
import statistics
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xcloud import __version__
from xcloud.base.project import commit as project_commit
from xcloud.record.events import (
    MAX_TIME_S,
    MEMORY,
    TENSORS,
    TIMES,
    TRAFFIC,
    Event,
    Line,
    StepCollector,
    StepTotals,
    add_to,
)
from xcloud.record.scores import score_digits

Summary = dict[str, Any]

SUMMARY_FILE = "summary.json"  # in the run folder
MAX_WARMUP_STEPS = 3


class RunStatistics:
    """Feed it every event of a run; `summary()` works at any time, also after a failure."""

    def __init__(self, num_ranks: int) -> None:
        self.final_loss: float | None = None
        self.num_skipped_updates = self.num_resumes = self.num_steps_done_twice = 0
        self._lost_s = self._pause_s = 0.0
        self._num_cut: dict[str, int] = {}
        self._lost_checkpoints: set[int] = set()
        self.lost_files: list[str] = []
        self._merges: Counter[str] = Counter()
        self._switches: list[dict[str, Any]] = []
        self._collector = StepCollector(num_ranks)
        self._step_s = array("d")
        # The number of warm-up steps is known only at the end: keep the first three apart.
        self._first: list[_Sums] = []
        self._rest = _Sums()
        # The latest of each split: scores, and how they were made.
        self._quality: dict[str, tuple[dict[str, float | None], dict[str, str], int]] = {}
        self._privacy: dict[str, Any] | None = None
        self._memory: dict[int, dict[str, Any]] = {}  # by rank
        self._refused: dict[str, int] = {}  # by rank
        self._started_at_s: float | None = None
        self._last_event_at_s: float | None = None

    @property
    def num_steps(self) -> int:
        """Steps that all ranks have reported."""
        return len(self._step_s)

    def feed(self, event: Event) -> StepTotals | None:
        """Returns the totals of a step if this event completes it, else None."""
        if (at_s := event.get("t")) is not None and abs(at_s) < MAX_TIME_S:
            if event["event"] == "phase" and event.get("name") == "loading" and event["rank"] == 0:
                self._pause_s += at_s - (self._last_event_at_s or at_s)  # since another attempt
            self._started_at_s = at_s if self._started_at_s is None else self._started_at_s
            self._last_event_at_s = at_s
        if event["event"] == "skipped_update":
            self._count_skipped(event)
        if event["event"] == "privacy":
            known = ("unit", "clip", "noise", "delta", "epsilon", "epsilon_if_sampled",
                     "sampling_rate", "num_updates")  # fmt: skip
            self._privacy = {name: event.get(name) for name in known}
        if event["event"] in ("merge", "partial_merge"):
            self._merges[event["event"]] += 1
        if event["event"] == "autopilot":
            self._switches.append({name: event[name] for name in ("step", "choice", "before")})
        if event["event"] == "absence":
            self._merges[event["what"]] += 1
        if event["event"] == "cut":
            self._num_cut[str(event["field"])] = int(event["num"])
        if event["event"] == "lost_file":
            self.lost_files.append(str(event["name"]))
        if event["event"] == "lost_checkpoint":
            self._lost_checkpoints.add(int(event["step"]))
        if event["event"] == "resume":
            self.num_resumes += 1
            self.num_steps_done_twice += event.get("steps_again", 0)
            self._lost_s += event.get("lost_s", 0.0)
        if event["event"] == "refused_reports":
            self._refused[str(event["sender"])] = int(event["num"])
        if event["event"] == "quality":
            signature, step = dict(event.get("signature") or {}), int(event["step"])
            self._quality[event["split"] if step else "before"] = (
                _scores(event["values"]),
                signature,
                step,
            )
        if event["event"] == "memory":
            kept = {"rank", "cloud", *MEMORY} & event.keys()
            self._memory[event["rank"]] = {name: event[name] for name in sorted(kept)}
        totals = self._collector.feed(event)
        if totals is not None:
            self._count(totals)
        return totals

    def summary(
        self,
        *,
        name: str,
        status: str,
        seed: int | None = None,
        profile: str | None = None,
        commit: str | None = None,
        cause: str | None = None,
    ) -> Summary:
        """status: "finished", "failed" or "stopped"; commit: None asks git now."""
        num_left_out = num_warmup_steps(self.num_steps)
        none: tuple[dict[str, float | None], dict[str, str], int] = {}, {}, self.num_steps
        test, signatures, at_step = self._quality.get("test", none)
        timed = _Sums.of([*self._first[num_left_out:], self._rest])
        every = _Sums.of([*self._first[:num_left_out], timed])
        step_s = sorted(self._step_s[num_left_out:])
        # A loss counted in samples (classes, spans) says nothing about tokens.
        tokens = timed.tokens if timed.tokens != timed.samples else None

        summary: Summary = {
            "name": name,
            "status": status,
            "seed": seed,
            "commit": project_commit() if commit is None else commit,
            "profile": profile,
            "final_loss": _rounded(self.final_loss, 6),
            "quality": test,
            "step_time_s": {
                "median": _rounded(statistics.median(step_s), 6) if step_s else None,
                "p90": _rounded(_percentile(step_s, 0.9), 6),
            },
            **{kind: timed.mean_s(kind) for kind in ("compute_s", "codec_s", "waiting_s")},
            "bubble_ratio": _ratio(timed.total_s("waiting_s"), timed.total_s("compute_s")),
            "wan_bytes_per_step": every.bytes_per_step(),
            "compression_ratio": every.compression_ratio(),
            "samples_per_s": _ratio(timed.samples or None, timed.step_s),
            "tokens_per_s": _ratio(tokens or None, timed.step_s),
            "num_steps": self.num_steps,
            "num_skipped_updates": self.num_skipped_updates,
            "num_warmup_steps_left_out": num_left_out,
            "sync_s": timed.mean_s("sync_s"),
            "link_utilisation": timed.link_utilisation(),
            "memory": [self._memory[rank] for rank in sorted(self._memory)],
            "dev_quality": self._quality.get("dev", none)[0],
            "quality_before": self._quality.get("before", none)[0],
            "num_resumes": self.num_resumes,
            "num_steps_done_twice": self.num_steps_done_twice,
            "goodput": self._goodput(),
            "num_lost_checkpoints": len(self._lost_checkpoints),
            "privacy": self._privacy,
            "num_cut": dict(self._num_cut),
            "lost_files": list(self.lost_files),
            "signatures": signatures,
            "started_at": self._started_at(),
            "wall_s": self._wall_s(),
            "xcloud_version": __version__,
        }
        if self._merges:
            summary["merges"] = {
                "whole": self._merges["merge"],
                "partial": self._merges["partial_merge"],
                "clouds_late": self._merges["late"],
                "clouds_lost": self._merges["left"],
                "clouds_back": self._merges["back"],
            }
        if self._switches:
            summary["autopilot"] = list(self._switches)
        if self._refused:
            summary["refused_reports"] = dict(self._refused)
        if cause is not None:
            summary["cause"] = cause
        if at_step < self.num_steps:
            summary["quality_at_step"] = at_step
        return summary

    def _count_skipped(self, event: Event) -> None:
        self.num_skipped_updates += 1

    def _count(self, totals: StepTotals) -> None:
        if totals.loss is not None:
            self.final_loss = totals.loss
        if self.num_steps < MAX_WARMUP_STEPS:
            self._first.append(_Sums())
            self._first[-1].count(totals)
        else:
            self._rest.count(totals)
        self._step_s.append(totals.step_s)

    def _started_at(self) -> str | None:
        if self._started_at_s is None:
            return None
        return datetime.fromtimestamp(self._started_at_s, UTC).isoformat(timespec="seconds")

    def _elapsed_s(self) -> float:
        if self._started_at_s is None or self._last_event_at_s is None:
            return 0.0
        return self._last_event_at_s - self._started_at_s

    def _wall_s(self) -> float | None:
        return round(self._elapsed_s() - self._pause_s, 1) if self._last_event_at_s else None

    def _goodput(self) -> float | None:
        elapsed_s = self._elapsed_s()
        return round(1 - self._lost_s / elapsed_s, 4) if elapsed_s else None


def _scores(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {key: _rounded(value, score_digits(key)) for key, value in values.items()}


def num_warmup_steps(num_steps: int) -> int:
    """Number of first steps excluded from everything measured in seconds."""
    return min(MAX_WARMUP_STEPS, num_steps // 10)


def write_summary(path: str | Path, summary: Mapping[str, object]) -> None:
    """Write summary.json atomically: a reader sees the old file or the complete new one."""
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    # JSON has no NaN: a diverged run's loss becomes null.
    text = json.dumps(_finite(summary), indent=2, ensure_ascii=False)
    draft.write_text(text + "\n", encoding="utf-8")
    os.replace(draft, path)


def read_summary(run_dir: Path) -> dict[str, Any]:
    """summary.json of a run; empty if it was killed before writing one."""
    try:
        found = json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class _Sums:
    """Sums over steps and the figures derived from them."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.step_s = 0.0
        self.seconds: dict[str, dict[str, float]] = {kind: {} for kind in TIMES}
        self.num_reports: dict[str, float] = {}  # by cloud: ranks * steps
        self.sent: dict[str, float] = {}
        self.raw: dict[str, float] = {}
        self.line_busy_s: dict[str, dict[Line, float]] = {}
        self.samples = 0
        self.tokens = 0

    @classmethod
    def of(cls, parts: Sequence["_Sums"]) -> "_Sums":
        joined = cls()
        for part in parts:
            joined._add(part, num_steps=part.num_steps, num_reports=part.num_reports)
        return joined

    def count(self, totals: StepTotals) -> None:
        self._add(totals, num_steps=1, num_reports=totals.num_ranks)

    def _add(
        self, part: "_Sums | StepTotals", num_steps: int, num_reports: Mapping[str, float]
    ) -> None:
        self.num_steps += num_steps
        self.step_s += part.step_s
        self.samples += part.samples
        self.tokens += part.tokens
        for kind in TIMES:
            add_to(self.seconds[kind], part.seconds.get(kind, {}))
        add_to(self.num_reports, num_reports)
        add_to(self.sent, part.sent)
        add_to(self.raw, part.raw)
        for kind, busy_s in part.line_busy_s.items():
            add_to(self.line_busy_s.setdefault(kind, {}), busy_s)

    def total_s(self, kind: str) -> float:
        return sum(self.seconds[kind].values())

    def mean_s(self, kind: str) -> dict[str, float | None]:
        return {
            cloud: _rounded(value / self.num_reports[cloud], 6)
            for cloud, value in self.seconds[kind].items()
        }

    def bytes_per_step(self) -> dict[str, int | None]:
        kinds = dict.fromkeys([*TRAFFIC, *self.sent])
        if not self.num_steps:
            return kinds
        return {kind: round(self.sent.get(kind, 0) / self.num_steps) for kind in kinds}

    def compression_ratio(self) -> dict[str, float | None]:
        tensors = [kind for kind in self.raw if self.raw[kind]]
        raw_bytes = sum(self.raw[kind] for kind in tensors)
        sent_bytes = sum(self.sent.get(kind, 0) for kind in tensors)
        return {
            **{
                kind: _ratio(self.raw.get(kind) or None, self.sent.get(kind, 0))
                for kind in dict.fromkeys([*TENSORS, *self.raw])
            },
            "total": _ratio(raw_bytes or None, sent_bytes),
        }

    def link_utilisation(self) -> dict[str, float | None]:
        busy = {kind: max(lines.values(), default=0.0) for kind, lines in self.line_busy_s.items()}
        kinds = dict.fromkeys([*TENSORS, *self.raw])
        return {kind: _ratio(busy.get(kind), self.step_s) for kind in kinds}


def _ratio(above: float | None, below: float) -> float | None:
    """above / below to three decimals; None if either was not measured."""
    return round(above / below, 3) if above is not None and below else None


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _percentile(ordered: Sequence[float], fraction: float) -> float | None:
    """Nearest rank: the smallest value that `fraction` of the values do not exceed."""
    return ordered[math.ceil(fraction * len(ordered)) - 1] if ordered else None


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

"""One pass over a run's events, and what follows from it: `summary.json`, whose figures
docs/commands.md explains, and the curves that pictures show. No tracker, no printing, no torch.
What features add is in their folders."""

import contextlib
import json
import logging
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xcloud import __version__
from xcloud.base.project import commit as project_commit
from xcloud.base.units import LESS_IS_BETTER
from xcloud.layout import Price
from xcloud.record.events import (
    MALFORMED,
    MAX_TIME_S,
    MEMORY,
    NO_LOSS,
    OTHER_MEMORY,
    OWN,
    TENSORS,
    TIMES,
    TRAFFIC,
    Columns,
    Event,
    EventReader,
    StepCollector,
    StepTotals,
    body,
    moment,
)
from xcloud.record.feature_figures import FeatureFigure
from xcloud.record.files import has_events, read_json, replace_text
from xcloud.record.run_figures import OF_EVERY_RUN
from xcloud.record.run_record import RunRecord
from xcloud.record.usage import Usage

Summary = dict[str, Any]

SUMMARY_FILE = "summary.json"  # in the run folder
MAX_WARMUP_STEPS = 3
KEPT = {
    **dict.fromkeys(("quality", "skipped_update"), True),
    **dict.fromkeys(("timeline", "finish", "cut", "lost_file", "memory", "data"), False),
    "lost_checkpoint": False,
}
"""Events that the figures are made of; whether they no longer count once the run has resumed from
an earlier step."""
OF_AN_ATTEMPT = {"timeline", "finish"}  # of its end

log = logging.getLogger(__name__)


class RunStatistics:
    """The statistics of a run, collected from its events.

    Feed it every event of a run, in order and once. `summary()` works at any time, also after a
    failure. If the run resumes from a step, reports of later steps are dropped.

    steps: a collector that joins the ranks' reports, or the number of ranks.
    figures: the metrics that features add.
    prices: the prices of the clouds that have any, by name.
    """

    def __init__(
        self,
        steps: StepCollector | int,
        figures: Sequence[FeatureFigure] = (),
        prices: Mapping[str, Price] | None = None,
    ) -> None:
        self.collector = StepCollector(steps) if isinstance(steps, int) else steps
        # What every run has counts whatever the job says of its own.
        self._figures = (*figures, *(one for one in OF_EVERY_RUN if one not in figures))
        self._kept = dict(KEPT)
        for figure in self._figures:
            self._kept.update(dict.fromkeys(figure.kinds, figure.is_of_steps))
        self.steps = Columns()
        self._usage = Usage(prices or {})
        self.resumes: list[dict[str, Any]] = []  # step, steps_again, lost_s
        self._events: list[Event] = []
        self._pause_s = 0.0
        self._started_at_s: float | None = None
        self._last_event_at_s: float | None = None

    @property
    def num_steps(self) -> int:
        """Steps that all ranks have reported."""
        return len(self.steps.step)

    @property
    def clouds(self) -> list[str]:
        return self.steps.below(OWN)

    def feed(self, event: Event) -> StepTotals | None:
        """Take in an event. Return the totals of a step if this completes it, else None."""
        kind = event["event"]
        self._usage.feed(event)
        # A moment that no calendar has is no time at all.
        if event.get("t") is not None and abs(at_s := moment(event)) < MAX_TIME_S:
            # A report may have arrived after the moment that rank 0 gives what it notes next.
            at_s = max(at_s, self._last_event_at_s or at_s)
            # Another attempt begins with loading; what lies before it is no time of the run.
            if kind == "phase" and event.get("name") == "loading" and event["rank"] == 0:
                self._pause_s += at_s - (self._last_event_at_s or at_s)  # since another attempt
            if self._started_at_s is None:
                self._started_at_s = at_s
            self._last_event_at_s = at_s
        if kind == "resume":
            self._go_back(int(event["step"]))
        elif kind in self._kept:
            for key in ("values", "errors") if kind == "quality" else ():
                # A score may be null, and whatever is no number raises.
                scores = (event.get(key) or {}).items()
                event = {**event, key: {n: s if s is None else float(s) for n, s in scores}}
            # Only a step tells what a resume makes invalid.
            if self._kept[kind] and not isinstance(event["step"], int):
                raise TypeError(f"{kind} of step {event['step']!r:.60}")
            self._events.append(event)
        totals = self.collector.feed(event)
        if totals is not None:
            self.steps.append(totals)
        return totals

    def events(self, *kinds: str) -> list[Event]:
        return [event for event in self._events if event["event"] in kinds]

    def record(self, summary: Summary, figures: Sequence[FeatureFigure]) -> RunRecord:
        """Return all that is shown of the run. figures: the metrics that features add."""
        return RunRecord(summary, figures, steps=self.steps, events=self._events)

    def _go_back(self, step: int) -> None:
        # Steps that some ranks had reported are repeated as well.
        again = self.steps.drop_after(step) | {s for s in self.collector.reports if s > step}
        self._events = [
            event
            for event in self._events
            if event["event"] not in OF_AN_ATTEMPT
            and (not self._kept[event["event"]] or event["step"] <= step)
        ]
        # What was lost lies between the last step that counts and now.
        until_s = max(self.steps["ended_s"], default=self._started_at_s or 0.0)
        # Two resumes from the same step: the time between lies in the later one.
        for earlier in self.resumes:
            if earlier["step"] >= step:  # its lost time lies within that of this one
                earlier["lost_s"] = 0.0
        lost_s = (self._last_event_at_s or until_s) - until_s
        self.resumes.append({"step": step, "steps_again": len(again), "lost_s": lost_s})

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
        summary = {
            "name": name,
            "status": status,
            "seed": seed,
            "commit": project_commit() if commit is None else commit,
            "profile": profile,
            **self._of_steps(),
            **self._of_attempts(),
            **self._usage.summary(),
            **self._of_events(),
        }
        for figure in self._figures:
            found = self.events(*figure.kinds)
            # A feature that reported nothing says so, where it was used.
            summary |= figure.in_summary(found) if found else figure.otherwise
            summary |= figure.of_steps(self.steps, summary)
        summary["xcloud_version"] = __version__
        return summary if cause is None else {**summary, "cause": cause}

    def seconds(self, kind: str, first: int) -> dict[str, float]:
        """Return the seconds of all steps from the place `first`, by cloud."""
        return self.steps.sums(kind, first=first)

    def num_skipped(self) -> int:
        return len(self.events("skipped_update"))

    def _of_steps(self) -> Summary:
        steps = self.steps
        # The first steps are slower: memory is allocated, links find their rate.
        first = num_warmup_steps(self.num_steps)
        seconds = {kind: self.seconds(kind, first) for kind in TIMES}
        ranks = steps.sums("num_ranks", first=first)
        total_s = {kind: sum(parts.values()) for kind, parts in seconds.items()}
        means = {
            kind: {cloud: value / ranks[cloud] for cloud, value in parts.items()}
            for kind, parts in seconds.items()
        }
        # Sorted for the median and the 90th percentile.
        step_s = sorted(steps["step_s"][first:])
        samples, tokens, learned = (
            steps.sum(name, first=first) for name in ("samples", "tokens", "learned")
        )
        losses = [loss for loss in steps["loss"] if loss != NO_LOSS]
        return {
            "final_loss": losses[-1] if losses else None,
            "step_time_s": {
                "median": statistics.median(step_s) if step_s else None,
                # The smallest step that 90 % are not above.
                "p90": step_s[-(-9 * len(step_s) // 10) - 1] if step_s else None,
            },
            **means,
            # Waiting by computing, of all ranks together.
            "bubble_ratio": ratio(total_s["waiting_s"], below=total_s["compute_s"]),
            **self._traffic(sum(step_s), first=first),
            "samples_per_s": ratio(samples or None, below=sum(step_s)),
            "tokens_per_s": ratio(tokens or None, below=sum(step_s)),
            # A loss counted in samples (classes, spans) learns no tokens.
            "learned_tokens_per_s": ratio(
                learned if learned and learned != samples else None, below=sum(step_s)
            ),
            "highest_learning_rate": max(steps["learning_rate"], default=0.0) or None,
            "num_steps": self.num_steps,
            "num_skipped_updates": self.num_skipped(),
            "num_warmup_steps_left_out": first,
        }

    def _traffic(self, timed_s: float, first: int) -> Summary:
        """Bytes of all steps; use of links in those from the place `first`, which took timed_s."""
        sent = self.steps.sums("sent")
        raw = self.steps.sums("raw")
        per_step: dict[str, int | None] = dict.fromkeys([*TRAFFIC, *sent])
        # Before the first step nothing has crossed, which is not the same as 0 bytes.
        if self.num_steps:
            per_step = {kind: round(sent.get(kind, 0) / self.num_steps) for kind in per_step}
        kinds = list(dict.fromkeys([*TENSORS, *raw]))
        # A ratio counts only kinds that carry tensors: others have no FP32 to compare with.
        carried = [kind for kind in kinds if raw.get(kind)]
        total_raw, total_sent = (sum(b.get(k, 0) for k in carried) for b in (raw, sent))
        lines = {kind: self.steps.sums("line_busy_s", kind, first=first) for kind in kinds}
        tokens = self.steps.sum("tokens")
        per_token: dict[str, Any] = {
            kind: ratio(sent.get(kind) or None, below=tokens) for kind in kinds
        }
        per_token["total"] = ratio(sum(sent.get(kind, 0) for kind in kinds) or None, below=tokens)
        boundaries = self.steps.sums("boundaries")
        # One boundary alone is the total already.
        if len({name.partition(" ")[0] for name in boundaries}) > 1:
            per_token["boundaries"] = {
                name: ratio(boundaries[name], below=tokens)
                # By number, forward before backward.
                for name in sorted(
                    boundaries,
                    key=lambda b: (int(b.partition(" ")[0]), b.replace("forward", "")),
                )
            }
        return {
            "wan_bytes_per_step": per_step,
            "wan_sent_again_bytes": round(self.steps.sum("sent_again")),
            "bytes_per_token": per_token,
            "compression_ratio": {
                **{kind: ratio(raw.get(kind) or None, below=sent.get(kind, 0)) for kind in kinds},
                "total": ratio(total_raw or None, below=total_sent),
            },
            "link_utilisation": {
                # The busiest line bounds the step.
                kind: ratio(max(busy_s.values(), default=None), below=timed_s)
                for kind, busy_s in lines.items()
            },
        }

    def _of_attempts(self) -> Summary:
        since_s = self._started_at_s
        until_s = self._last_event_at_s
        elapsed_s = 0.0 if since_s is None or until_s is None else until_s - since_s
        lost_s = sum(one["lost_s"] for one in self.resumes)
        started = datetime.fromtimestamp(since_s, UTC) if since_s is not None else None
        return {
            "num_resumes": len(self.resumes),
            "num_steps_done_twice": sum(one["steps_again"] for one in self.resumes),
            # The share of the time that led to steps that count.
            "goodput": 1 - lost_s / elapsed_s if elapsed_s else None,
            "started_at": started and started.isoformat(timespec="seconds"),
            "wall_s": elapsed_s - self._pause_s if until_s else None,
        }

    def _of_events(self) -> Summary:
        lost = {int(event["step"]) for event in self.events("lost_checkpoint")}
        memory = {event["rank"]: event for event in self.events("memory")}
        kept = ["cloud", "rank", *MEMORY]
        # What did not fit, by what became of it and by split.
        num_cut: dict[str, dict[str, int]] = {}
        for event in self.events("cut"):
            num_cut.setdefault(str(event["field"]), {})[str(event["split"])] = int(event["num"])
        summary = {
            **self._quality(),
            # A rank that restarted has reported twice: the last one counts.
            "memory": [
                {name: memory[rank][name] for name in sorted(kept) if name in memory[rank]}
                | other_memory(memory[rank])
                for rank in sorted(memory)
            ],
            "num_lost_checkpoints": len(lost),
            "num_cut": num_cut,
            "lost_files": [str(event["name"]) for event in self.events("lost_file")],
        }
        # The last attempt's data.
        for event in self.events("data")[-1:]:
            summary["data"] = body(event)
        return summary

    def _quality(self) -> Summary:
        # Step 0 is scored before training.
        latest = {event["split"] if event["step"] else "before": event
                  for event in self.events("quality")}  # fmt: skip
        scores, errors = ({split: event[key] for split, event in latest.items()}
                          for key in ("values", "errors"))  # fmt: skip
        # A run that was stopped is scored at its last step, which is no news.
        test = latest.get("test", {"step": self.num_steps})
        at_step = {"quality_at_step": test["step"]} if test["step"] < self.num_steps else {}
        return {
            "quality": scores.get("test", {}),
            "quality_error": errors.get("test", {}),
            "dev_quality": scores.get("dev", {}),
            "dev_quality_error": errors.get("dev", {}),
            "quality_before": scores.get("before", {}),
            "signatures": dict(test.get("signature") or {}),
            **at_step,
        }


def feed_log(run: RunStatistics, events: Iterable[Event]) -> int:
    """Feed all events of a log to a run's statistics. Return how many were malformed."""
    num_malformed = 0
    for event in events:
        try:
            run.feed(event)
        except MALFORMED:
            num_malformed += 1
    return num_malformed


def read_run(path: Path) -> RunStatistics:
    """Return the statistics of the event log of a run that has ended; of a missing log what a run
    has before its first event. Producers of one-way jobs report no steps and are not waited for.
    """
    steps = (event for event in EventReader(path=path, warn=False) if event["event"] == "step")
    # No collector is needed to count the ranks: their steps have numbers.
    num_ranks = 1 + max((event["rank"] for event in steps), default=0)
    run = RunStatistics(num_ranks)
    feed_log(run, events=EventReader(path=path, warn=False))
    return run


def other_memory(rank: Event) -> dict[str, int]:
    """Return what of a rank's peak its other figures do not explain, on the GPU if it has one; not
    negative, as they need not all be at their most at once. Empty without a peak."""
    on_gpu = "gpu_peak" in rank
    peak = rank.get("gpu_peak" if on_gpu else "peak")
    if peak is None:
        return {}
    # On a GPU the program's own memory lies elsewhere.
    elsewhere = {"peak", "gpu_peak", *(["program", "checkpoint"] if on_gpu else [])}
    explained = sum(rank.get(name, 0) for name in MEMORY if name not in elsewhere)
    return {OTHER_MEMORY: max(0, peak - explained)}


def num_warmup_steps(num_steps: int) -> int:
    # A tenth at most, so that short runs keep most of their steps.
    return min(MAX_WARMUP_STEPS, num_steps // 10)


@contextlib.contextmanager
def may_be_lost(run_dir: Path, summary: Summary, drawn: str) -> Iterator[None]:
    """If the block fails, warn, and write summary.json once more, which then names among the lost
    files what the block would have `drawn`."""
    try:
        yield
    except Exception as error:
        log.warning("%s is without its %s: %s", run_dir, drawn, error)
        summary["lost_files"].append(drawn)
        keep_summary(run_dir, summary)


def keep_summary(run_dir: Path, summary: Summary) -> None:
    """Write summary.json, if the disk takes it."""
    try:
        write_summary(run_dir / SUMMARY_FILE, summary)
    except OSError as error:
        log.error("%s could not be written: %s", run_dir / SUMMARY_FILE, error)


def write_summary(path: str | Path, summary: Mapping[str, object]) -> None:
    """Write a summary as JSON, which has no NaN: a diverged run's loss becomes null."""
    text = json.dumps(_finite(summary), indent=2, ensure_ascii=False)
    replace_text(Path(path), text=text + "\n")


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return the summary of a run; empty if the run was killed before writing one."""
    return read_json(run_dir / SUMMARY_FILE)


def drop_unfinished(run_dir: Path) -> None:
    """Remove the summary of an earlier attempt, but for that of a run here that has finished."""
    # A folder without events holds the record of another machine.
    if not (has_events(run_dir) and read_summary(run_dir).get("status") == "finished"):
        (run_dir / SUMMARY_FILE).unlink(missing_ok=True)


def ratio(above: float | None, below: float) -> float | None:
    """Return above / below; None if either was not measured."""
    return above / below if above is not None and below else None


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def main_score(summary: Mapping[str, Any]) -> float | None:
    """Return the main score of a run so that less is better, as sweepers minimise: a score of
    which more is better is negative. None: the run has no score."""
    for name, value in summary.get("quality", {}).items():
        if value is not None:
            # The first score that has a number: a diverged run may have null.
            return float(value) if name in LESS_IS_BETTER else -float(value)
    return None

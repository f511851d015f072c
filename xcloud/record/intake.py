"""Check other ranks' reports on their way into rank 0's event log. They may come from another
cloud: what does not fit is left out, counted and shown with its sender. _TABLE and the features'
figures say what a rank may report: the fields that each kind of event must have, those that it may
have, and what they hold."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    create_model,
)

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import FrameError
from xcloud.net.frame import Frame, Kind
from xcloud.record.events import (
    AVERAGING,
    HEAD,
    MEMORY,
    TENSORS,
    TIMES,
    TRAFFIC,
    Event,
    now_s,
)
from xcloud.record.feature_figures import FeatureFigure
from xcloud.record.reporter import EventFile
from xcloud.record.run_figures import OF_EVERY_RUN
from xcloud.record.timeline import SPANS

SCORED = ("loss", "learning_rate", "grad_norm", "values")
"""Fields of a step that only the rank reports that knows the loss. Elsewhere "learned" is 0."""


def _printable(text: str) -> str:
    """One line without control characters, which a terminal would obey."""
    if not text.isprintable():
        raise ValueError("it cannot be printed")
    return text


# Finite, and below what sums of a long run could overflow with.
Number = Annotated[float, Field(ge=0, lt=1e18)]  # seconds, bytes: finite
Figure = Annotated[float, Field(gt=-1e18, lt=1e18)]
Whole = Annotated[int, Field(ge=0, lt=1 << 53)]
Index = Annotated[int, Field(ge=-1, lt=1 << 53)]  # -1: of no stage, boundary or micro-batch
Clock = Annotated[int, Field(gt=-(1 << 53), lt=1 << 53)]  # microseconds
Moment = Annotated[int, Field(gt=-(10**13), lt=10**13)]  # microseconds of a step: 115 days
Text = Annotated[str, Field(max_length=4000), AfterValidator(_printable)]


def _by_name(values: Any) -> Any:
    return Annotated[dict[Text, values], Field(max_length=256)]


def _rows(*columns: Any) -> Any:
    """JSON has lists for tuples."""
    # JSON has lists for tuples, which strict checks would refuse.
    return list[Annotated[tuple[columns], Strict(False)]]  # type: ignore[valid-type]


# What a picture has no colour or name for would cost the run the picture.
_DONE = Literal[SPANS]  # type: ignore[valid-type]
_WAY = Literal["", "forward", "backward", "weights"]
_KIND = Literal[tuple(kind.name.lower() for kind in Kind)]  # type: ignore[valid-type]
_TYPES: dict[str, Any] = {
    "number": Number, "figure": Figure, "whole": Whole, "moment": Moment, "text": Text,
    "clock": Clock,
    "numbers": _by_name(Number), "figures": _by_name(Figure), "texts": _by_name(Text),
    "scores": _by_name(float | None),  # a model that has diverged scores NaN, or nothing
    "lines": _by_name(_by_name(Number)), "split": Literal["dev", "test"],
    "spans": _rows(_DONE, _WAY, Index, Index, Moment, Moment),
    "received": _rows(Index, Whole, Whole, Moment),
    "flights": _rows(
        Index, Whole, Whole, _KIND, Index, Whole, Moment, Moment, Moment | None
    ),
}  # fmt: skip
_TIMES = " ".join(f"{name}:number" for name in TIMES)
_TABLE = {
    "note": "text:text",
    "phase": "name:text",
    "cut": "field:text split:text num:whole of:whole",
    "step": f"step:whole step_s:number | {_TIMES} samples:whole tokens:whole learned:number "
    "sent:numbers sent_again:whole raw:numbers boundaries:numbers line_busy_s:lines loss:figure "
    "learning_rate:number grad_norm:number values:figures taken:numbers skipped:numbers "
    "fed_bytes:numbers line_s:numbers",
    "sent_outside": "num_bytes:whole",
    "skipped_update": "step:whole",
    "lost_file": "name:text",
    "memory": "| " + " ".join(f"{name}:whole" for name in MEMORY),
    "timeline": "step:whole machine:text started_us:clock unix_us:clock step_us:moment "
    "spans:spans sent:flights received:received",
    "quality": "step:whole split:split values:scores errors:scores signature:texts "
    "evaluation_s:number",
    "checkpoint": "step:whole num_bytes:whole pause_s:number write_s:number",
    "lost_checkpoint": "step:whole reason:text",
    "finish": "| num_steps:whole",
    "stop": "| step:whole",
}


@cache
def _kind(name: str, line: str) -> type[BaseModel]:
    """line: "needed:type … | optional:type …". What every event has is set by the receiver, and
    not looked at."""
    needs, _, may = line.partition("|")
    # Set by the receiver, whatever the sender says.
    fields: dict[str, Any] = {field: (Any, None) for field in HEAD}
    for part, default in ((needs, ...), (may, None)):
        for field, kind in (each.split(":") for each in part.split()):
            fields[field] = _TYPES[kind], default
    # strict: "1" is no number. forbid: a field that nobody reads fills the log.
    return create_model(name, __config__=ConfigDict(strict=True, extra="forbid"), **fields)


Kinds = Mapping[str, type[BaseModel]]


def kinds_of(figures: Iterable[FeatureFigure]) -> Kinds:
    """Return what other ranks may report in a run with these figures, by the name of the event."""
    table = dict(_TABLE)
    for figure in (*OF_EVERY_RUN, *figures):
        # Features add kinds of their own, as they report what the core does not know.
        table |= figure.reported
    return {name: _kind(name, line) for name, line in table.items()}


class Refused(ValueError):
    """Why another rank's report is not accepted."""


def check(event: Event, max_steps: int, kinds: Kinds) -> None:
    """Raise Refused unless another rank of a run of max_steps may report the event."""
    name = event["event"]
    if type(name) is not str or name not in kinds:
        raise Refused(f"{name!r:.60} is no event that another rank reports")
    try:
        kinds[name].model_validate(event)
    except ValidationError as error:
        # Only the first thing that is wrong, cut to a length that fits into a log.
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{where!r:.60} = {first['input']!r:.60}"
        raise Refused(f"{name} with {what}: {first['msg']}") from None
    # An update that was skipped may lie beyond the last one.
    if name != "skipped_update" and event.get("step", 0) > max_steps:
        raise Refused(f"{name} of step {event['step']}, beyond the last one ({max_steps})")


BYTES_PER_S = 1 << 18  # of one rank
BURST_BYTES = 1 << 22  # a timeline at the end of a run comes at once
BYTES_IN_ALL = 1 << 26  # of one rank, in a run without steps
BYTES_A_STEP = 1 << 12  # that come to them; an honest step takes less than 1 kB a cloud
MAX_NAMES = 64  # figures of a step by names that the task chooses, in all
MAX_SCORES = 256  # scores by names that the task chooses, in all
_BY_NAME_OF_JOB = ("sent", "raw", "taken", "skipped", "fed_bytes", "line_s")
CLOCKS_DIFFER_S = 3600.0  # at most; a report whose time is further off gets that of its arrival


class ReportIntake:
    """The check of other ranks' reports before they are recorded. `take` is called in the links'
    threads.

    cloud_of: returns the cloud of a rank.
    max_steps: number of updates of the run.
    may_report: ranks other than 0 that may report a kind of event, or a "loss", by the name of the
        kind. Any rank may report the kinds that are not named there.
    clouds: names of clouds for which a step may have metrics, beside the names of traffic. Each
        name is a column in the memory of every process that follows the run.
    num_boundaries: maximum number of boundaries for which a step may have metrics.
    figures: the metrics of the job's features, which say what else ranks report.
    """

    def __init__(
        self,
        events: EventFile,
        cloud_of: Callable[[int], str],
        max_steps: int,
        may_report: Mapping[str, frozenset[int]],
        clock: Callable[[], float] = time.monotonic,
        clouds: Collection[str] = (),
        num_boundaries: int = 0,
        figures: Iterable[FeatureFigure] = (),
    ) -> None:
        self._events = events
        self._cloud_of = cloud_of
        self._max_steps = max_steps
        self._kinds = kinds_of(figures)
        self._may_report = may_report
        self._clock = clock
        self._names = {*TRAFFIC, AVERAGING, *clouds}
        self._boundaries = {f"{n} {kind}" for n in range(num_boundaries) for kind in TENSORS}
        # Names in "values", by the kind of event.
        self._chosen: dict[str, set[str]] = {"step": set(), "quality": set()}
        self._lock = threading.Lock()
        self._room: dict[int, tuple[float, float]] = {}  # bytes left of a rank, and when
        self._num_bytes: Counter[int] = Counter()  # taken, by sender
        self.num_refused: Counter[int] = Counter()  # by sender

    def take(self, peer: int, frame: Frame) -> None:
        """Lines of rank `peer`, by whose link they came. Raises FrameError for what is no text."""
        if len(frame.parts) != 1 or frame.parts[0].dtype != torch.uint8:
            raise FrameError(f"a report of rank {peer} must be one vector of bytes")
        data = frame.parts[0].numpy().tobytes()
        accepted = b""
        # First the rate, then the sum: a burst is no reason to refuse all that follows.
        if not self._has_room(peer, num_bytes=len(data)):
            return self._refuse(peer, why=f"more than {BYTES_PER_S:,} bytes a second")
        most = BYTES_IN_ALL + BYTES_A_STEP * self._max_steps
        if self._num_bytes[peer] + len(data) > most:
            return self._refuse(peer, why=f"more than {most:,} bytes in all")
        self._num_bytes[peer] += len(data)
        # Several lines may come in one frame.
        for line in filter(bytes.strip, data.split(b"\n")):
            try:
                accepted += self._checked(peer, line=line)
            except Refused as why:
                self._refuse(peer, why=str(why))
            # Deep nesting ends in a RecursionError.
            except (ValueError, RecursionError):  # of what it quotes, too
                self._refuse(peer, why="no JSON")
        if accepted:
            self._events.append_later(accepted)

    def close(self) -> None:
        for peer, num in sorted(self.num_refused.items()):
            self._report("refused_reports", sender=peer, num=num, reason="in all")

    def _has_room(self, peer: int, num_bytes: int) -> bool:
        now_s = self._clock()
        # A bucket that fills with time and holds BURST_BYTES.
        room, since_s = self._room.get(peer, (BURST_BYTES, now_s))
        room = min(BURST_BYTES, room + BYTES_PER_S * (now_s - since_s)) - num_bytes
        if room < 0:
            return False
        self._room[peer] = room, now_s
        return True

    def _checked(self, peer: int, line: bytes) -> bytes:
        """The line as it is written down. Raises Refused."""
        event = parsed_json(line)
        if not isinstance(event, dict) or "event" not in event:
            raise Refused("no event")
        check(event, max_steps=self._max_steps, kinds=self._kinds)
        kind = event["event"]
        arrived_s = round(now_s(), 3)
        at_s = event.get("t")
        # The loss is what all clouds go by, so only ranks that know it may say it.
        has_loss = kind == "step" and (event.get("learned") or event.keys() & {*SCORED})
        for name in (kind, "loss") if has_loss else (kind,):
            if peer not in self._may_report.get(name, {peer}):
                raise Refused(f"rank {peer} may not report the {name} of this run")
        if kind == "step":
            self._check_names(event)
        if kind in self._chosen:
            self._check_chosen(kind, event.get("values") or {})
        # A clock that is far off would move the whole run in every picture.
        is_near = isinstance(at_s, float) and abs(at_s - arrived_s) < CLOCKS_DIFFER_S
        # Whose report it is follows from the link, not from what it says.
        event |= {"rank": peer, "cloud": self._cloud_of(peer), "t": at_s if is_near else arrived_s}
        event["arrived"] = arrived_s
        return json.dumps(event, separators=(",", ":")).encode() + b"\n"

    def _check_names(self, step: Event) -> None:
        """Raises Refused for a figure of a step whose name is none of the job's."""
        busy = step.get("line_busy_s") or {}
        fields: list[tuple[str, Iterable[str]]] = [("line_busy_s", busy)]
        fields += [("line_busy_s", of_kind) for of_kind in busy.values()]
        fields += [(field, step.get(field) or ()) for field in _BY_NAME_OF_JOB]
        # Each name is a column in every process that follows the run.
        fields.append(("boundaries", step.get("boundaries") or ()))
        for field, names in fields:
            allowed = self._boundaries if field == "boundaries" else self._names
            for name in names:
                if name not in allowed:
                    raise Refused(f"step with {field}.{name!r:.60}, which is no name of this job")

    def _check_chosen(self, kind: str, names: Iterable[str]) -> None:
        """Raise Refused for more names of figures than a run has, whoever reports them."""
        most = {"step": MAX_NAMES, "quality": MAX_SCORES}[kind]
        with self._lock:
            # Counted over all ranks: together they may fill the memory, too.
            chosen = self._chosen[kind].union(names)
            if len(chosen) > most:
                raise Refused(f"{kind} events with values of more than {most} names")
            self._chosen[kind] = chosen

    def _refuse(self, peer: int, why: str) -> None:
        with self._lock:
            self.num_refused[peer] += 1
            num = self.num_refused[peer]
        if num == 1:
            text = f"refused a report of rank {peer} (cloud {self._cloud_of(peer)}): {why}; "
            self._report("note", text=f"{text}further ones are counted in summary.json")
        # 1, 2, 4, 8, …: a rank that floods reports does not flood the log.
        if not num & (num - 1):  # the more there are, the less often
            self._report("refused_reports", sender=peer, num=num, reason=why)

    def _report(self, event: str, **fields: object) -> None:
        head = {"event": event, "rank": 0, "cloud": self._cloud_of(0), "t": round(now_s(), 3)}
        self._events.append_later(json.dumps({**head, **fields}).encode() + b"\n")

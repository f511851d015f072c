"""What a rank may report, by kind of event: the fields that it must have, those that it may have,
and what each may hold. Another cloud's reports are checked against this table (intake.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from xcloud.record.events import MEMORY, TIMES, Event

Check = Callable[[Any], bool]

SCORED = ("loss", "learning_rate", "grad_norm", "values", "counts")
"""Fields of a step that only the rank tells that knows the loss. Elsewhere "tokens" is 0."""


def _number(value: Any) -> bool:
    """Seconds, bytes: finite."""
    return type(value) in (int, float) and 0 <= value < 1e18


def _figure(value: Any) -> bool:
    return type(value) in (int, float) and -1e18 < value < 1e18


def _score(value: Any) -> bool:
    """A model that has diverged scores NaN, or nothing."""
    return value is None or type(value) is float or _figure(value)


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _moment(value: Any) -> bool:
    return value is None or (type(value) is int and abs(value) < 1 << 63)


def _text(value: Any) -> bool:
    """One line without control characters, which a terminal would obey."""
    return type(value) is str and len(value) <= 4000 and value.isprintable()


def _each(check: Check) -> Check:
    """By name."""
    return lambda value: (
        type(value) is dict
        and len(value) <= 256
        and all(_text(name) and check(one) for name, one in value.items())
    )


def _rows(*columns: Check) -> Check:
    return lambda value: (
        type(value) is list
        and all(
            type(row) is list
            and len(row) == len(columns)
            and all(check(one) for check, one in zip(columns, row, strict=True))
            for row in value
        )
    )


_I, _T = _moment, _text
_CHECKS: dict[str, Check] = {
    "number": _number, "figure": _figure, "whole": _whole, "moment": _moment, "text": _text,
    "numbers": _each(_number), "figures": _each(_figure), "scores": _each(_score),
    "lines": _each(_each(_number)), "texts": _each(_text),
    "split": lambda value: value in ("dev", "test"),
    "spans": _rows(_T, _T, _I, _I, _I, _I), "received": _rows(_I, _I, _I, _I),
    "flights": _rows(_I, _I, _I, _T, _I, _I, _I, _I, _I),
}  # fmt: skip

_TIMES = " ".join(f"{name}:number" for name in TIMES)
_TABLE = {
    "note": "text:text",
    "phase": "name:text",
    "cut": "field:text num:whole",
    "step": f"step:whole step_s:number | {_TIMES} samples:whole tokens:number sent:numbers "
    "raw:numbers line_busy_s:lines loss:figure learning_rate:number grad_norm:number "
    "values:figures counts:numbers taken:numbers skipped:numbers fed_bytes:numbers line_s:numbers",
    "skipped_update": "step:whole",
    "lost_file": "name:text",
    "memory": "| " + " ".join(f"{name}:whole" for name in MEMORY),
    "timeline": "step:whole machine:text started_us:moment unix_us:moment step_us:moment "
    "spans:spans sent:flights received:received",
    "quality": "step:whole split:split values:scores signature:texts evaluation_s:number",
    "fed": f"num_batches:whole samples:whole tokens:whole {_TIMES} | loss:figure",
    "checkpoint": "step:whole num_bytes:whole pause_s:number write_s:number",
    "lost_checkpoint": "step:whole reason:text",
    "finish": "| num_steps:whole",
    "stop": "| step:whole",
}
OF_RANK_0 = {
    "resume": "step changed",
    "autopilot": "step choice before reason predicted_s",
    "privacy": "unit clip noise delta epsilon epsilon_if_sampled sampling_rate num_updates",
    "producer": "producer state step",
    "merge": "step weights",
    "partial_merge": "step weights",
    "absence": "absent ranks what step",
    "refused_reports": "sender num reason",
}
"""Fields of what nobody but rank 0 tells, of all."""


class EventKind(NamedTuple):
    needs: dict[str, Check]
    may: dict[str, Check]

    @classmethod
    def of(cls, line: str) -> EventKind:
        """line: "needed:check … | optional:check …"."""
        both = [dict(each.split(":") for each in part.split()) for part in f"{line} |".split("|")]
        return cls(*({name: _CHECKS[of] for name, of in part.items()} for part in both[:2]))


EVENT_KINDS = {name: EventKind.of(line) for name, line in _TABLE.items()}


def misfit(event: Event, max_steps: int) -> str:
    """Why another rank's event is not accepted, "" if it is. Its rank, cloud and time are not
    looked at. max_steps: of the run."""
    name = event["event"]
    if type(name) is not str or name not in EVENT_KINDS:
        return f"{name!r:.60} is no event that another rank reports"
    needs, may = EVENT_KINDS[name]
    for field in needs.keys() - event.keys():
        return f"{name} without {field!r}"
    for field, value in event.items():
        if field in ("event", "rank", "cloud", "t"):
            continue
        check = needs.get(field) or may.get(field)
        if check is None or not check(value):
            return f"{name} with {field!r:.60} = {value!r:.60}"
    if name != "skipped_update" and event.get("step", 0) > max_steps:
        return f"{name} of step {event['step']}, beyond the last one ({max_steps})"
    return ""

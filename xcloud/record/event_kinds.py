"""What a rank may report, by kind of event: the fields that it must have, those that it may have,
and what each may hold. Another cloud's reports are checked against this table (intake.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from xcloud.record.events import MEMORY, TIMES, Event

Check = Callable[[Any], bool]

SCORED = ("loss", "learning_rate", "grad_norm", "values", "counts")
"""Fields of a step that only the rank tells that knows the loss. Elsewhere "tokens" is 0."""


class EventKind(NamedTuple):
    """of_rank_0: only rank 0 tells it, of all."""

    needs: Mapping[str, Check]
    may: Mapping[str, Check] = {}
    of_rank_0: bool = False


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
    return type(value) is int and abs(value) < 1 << 63


def _text(value: Any) -> bool:
    """One line without control characters, which a terminal would obey."""
    return type(value) is str and len(value) <= 4000 and value.isprintable()


def _each(check: Check, most: int = 256) -> Check:
    """By name."""
    return lambda value: (
        type(value) is dict
        and len(value) <= most
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


def _or_none(value: Any) -> bool:
    return value is None or _moment(value)


_STEP = {"step": _whole}
_TIMES = dict.fromkeys(TIMES, _number)
_I = _moment

EVENT_KINDS: dict[str, EventKind] = {
    "note": EventKind({"text": _text}),
    "phase": EventKind({"name": _text}),
    "step": EventKind(
        {**_STEP, "step_s": _number},
        {
            **_TIMES, "loss": _figure, "learning_rate": _number, "grad_norm": _number,
            "samples": _whole, "tokens": _number, "sent": _each(_number), "raw": _each(_number),
            "link_busy_s": _each(_number), "values": _each(_figure), "counts": _each(_number),
            "taken": _each(_whole), "skipped": _each(_whole), "fed_bytes": _each(_whole),
            "line_s": _each(_number),
        },
    ),
    "skipped_update": EventKind(_STEP),
    "lost_file": EventKind({"name": _text}),
    "memory": EventKind({}, dict.fromkeys(MEMORY, _whole)),
    "timeline": EventKind({
        **_STEP, "machine": _text, "started_us": _I, "unix_us": _I, "step_us": _I,
        "spans": _rows(_text, _text, _I, _I, _I, _I),
        "sent": _rows(_I, _I, _I, _text, _I, _I, _I, _I, _or_none),
        "received": _rows(_I, _I, _I, _I),
    }),
    "quality": EventKind(
        {
            **_STEP, "split": lambda value: value in ("dev", "test"),
            "values": _each(_score), "signature": _each(_text), "evaluation_s": _number,
        }
    ),
    "fed": EventKind(
        {"num_batches": _whole, "samples": _whole, "tokens": _whole, **_TIMES}, {"loss": _figure}
    ),
    "checkpoint": EventKind(
        {**_STEP, "num_bytes": _whole, "pause_s": _number, "write_s": _number}
    ),
    "lost_checkpoint": EventKind({**_STEP, "reason": _text}),
    "finish": EventKind({}, {"num_steps": _whole}),
    "stop": EventKind({}, _STEP),
    **{
        name: EventKind(dict.fromkeys(fields.split(), lambda value: True), of_rank_0=True)
        for name, fields in {
            "resume": "step changed",
            "autopilot": "step choice before reason predicted_s",
            "privacy": "unit clip noise delta epsilon epsilon_if_sampled sampling_rate "
            "num_updates",
            "producer": "producer state step",
            "merge": "step weights",
            "partial_merge": "step weights",
            "absence": "absent ranks what step",
            "refused_reports": "sender num reason",
        }.items()
    },
}  # fmt: skip


def misfit(event: Event, max_steps: int) -> str:
    """Why another rank's event is not accepted, "" if it is. Its rank, cloud and time are not
    looked at. max_steps: of the run."""
    kind = EVENT_KINDS.get(event["event"]) if type(event["event"]) is str else None
    if kind is None or kind.of_rank_0:
        return f"{event['event']!r:.60} is no event that another rank reports"
    for name in kind.needs.keys() - event.keys():
        return f"{event['event']} without {name!r}"
    checks = {**kind.may, **kind.needs}
    for name, value in event.items():
        if name in ("event", "rank", "cloud", "t"):
            continue
        if name not in checks or not checks[name](value):
            return f"{event['event']} with {name!r:.60} = {value!r:.60}"
    if event["event"] != "skipped_update" and event.get("step", 0) > max_steps:
        return f"{event['event']} of step {event['step']}, beyond the last one ({max_steps})"
    return ""

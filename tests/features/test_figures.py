"""What summary, closing table and MLflow say of a run is what its events do. Real runs are looked
at in the same way where tests make them (test_run.py, test_one_way.py)."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.feature_rows import Shown, Told, feature_rows
from tests.figures import check_figures, figures_of
from xcloud.feature_list import FIGURES
from xcloud.features.one_way.job import OneWayStatistics
from xcloud.features.one_way.layout import OneWayCloud, OneWayLayout
from xcloud.record.feature_figures import FeatureFigure
from xcloud.record.run_figures import OF_EVERY_RUN
from xcloud.record.run_record import RunRecord
from xcloud.record.summary import RunStatistics
from xcloud.record.usage import USAGE

NUM_STEPS = 47


@dataclass(frozen=True)
class Shape:
    """clouds: of each rank. sends: by rank, (kind, cloud that it goes to). losses: ranks that tell
    one. counts: ranks that tell samples."""

    clouds: Sequence[str]
    sends: Mapping[int, Sequence[tuple[str, str]]]
    losses: Sequence[int]
    counts: Sequence[int] = (0,)
    kinds: Sequence[str] = ("forward", "backward")
    step_s: Mapping[int, float] = field(default_factory=dict)


SHAPES = {
    "two clouds": Shape("ab", {0: [("forward", "b")], 1: [("backward", "a")]}, [1]),
    "three clouds": Shape(
        "abbc",
        {0: [("forward", "b")], 1: [("forward", "c"), ("backward", "a")],
         2: [("forward", "c"), ("backward", "a")], 3: [("backward", "b")]},
        [3],
    ),
    "U-shape": Shape(
        "ab", {0: [("forward", "b"), ("backward", "b")], 1: [("forward", "a"), ("backward", "a")]},
        [0],
    ),
    "replicas": Shape(
        "abc", {r: [("averaging", c) for c in "abc" if c != "abc"[r]] for r in range(3)}, [0],
        (0, 1, 2), ("forward", "backward", "averaging"),
    ),
    "replicas apart": Shape(
        "ab", {0: [("averaging", "b")], 1: [("averaging", "a")]}, [0, 1], (0, 1),
        ("forward", "backward", "averaging"),
    ),
    "one rank": Shape("a", {}, [0]),
}  # fmt: skip


def events_of(shape: Shape, is_emulated: bool) -> list[dict[str, Any]]:
    """A log of uneven steps, in which ranks are ahead of each other in turns."""
    draw = random.Random(5)
    ended_s = [1.7e9 + draw.uniform(0, 0.1) for _ in shape.clouds]
    events: list[dict[str, Any]] = []
    for step in range(1, NUM_STEPS + 1):
        slow = 9.0 if step < 4 else 1.0  # warm-up
        told = []
        for rank, cloud in enumerate(shape.clouds):
            own_s = round(slow * draw.uniform(0.1, 0.4), 6)
            ended_s[rank] += own_s
            sent = dict.fromkeys((*shape.kinds, "other"), 0)
            raw = dict.fromkeys(shape.kinds, 0)
            busy: dict[str, dict[str, float]] = {kind: {} for kind in shape.kinds}
            for kind, to in shape.sends.get(rank, ()):
                num_bytes = draw.randint(1000, 90_000)
                sent[kind] += num_bytes
                raw[kind] += draw.randint(2, 9) * num_bytes
                busy[kind][to] = busy[kind].get(to, 0.0) + round(draw.uniform(0.01, 0.06), 6)
            sent["other"] = draw.randint(10, 500) if shape.sends else 0
            event: dict[str, Any] = {
                "event": "step", "rank": rank, "cloud": cloud, "t": round(ended_s[rank], 6),
                "step": step, "step_s": own_s, "sent": sent, "raw": raw,
                **{f"{kind}_s": round(draw.uniform(0, own_s / 4), 6)
                   for kind in ("compute", "codec", "waiting", "sync")},
                "samples": 8 if rank in shape.counts else 0,
                "tokens": draw.randint(100, 190) if rank in shape.counts else 0,
                "learned": draw.randint(50, 90) if rank in shape.losses else 0,
            }  # fmt: skip
            if is_emulated:
                event["line_busy_s"] = busy
            if rank in shape.losses:
                event["loss"] = draw.uniform(1, 9)
            told.append(event)
        draw.shuffle(told)
        events += told
        if step == 20:
            events.append(quality("dev", step, {"perplexity": 90.5, "loss": 4.5054}, ended_s[0]))
    events.append(quality("test", NUM_STEPS, {"perplexity": 90.25, "loss": 4.5026}, ended_s[0]))
    return events


def quality(split: str, step: int, values: dict[str, float], at_s: float) -> dict[str, Any]:
    return {"event": "quality", "rank": 0, "cloud": "a", "t": at_s, "split": split, "step": step,
            "values": values}  # fmt: skip


@pytest.mark.parametrize("is_emulated", [True, False], ids=["emulated", "real line"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_figure_is_that_of_the_events(shape: Shape, is_emulated: bool) -> None:
    events = events_of(shape, is_emulated)
    statistics = RunStatistics(len(shape.clouds))
    for event in events:
        statistics.feed(event)
    summary = statistics.summary(name="x", status="finished", commit="c")

    check_figures(events, summary)
    if is_emulated and shape.sends:
        busy = [use for use in summary["link_utilisation"].values() if use]
        assert busy and max(busy) < 1


def test_a_one_way_jobs_figures_are_those_of_its_events() -> None:
    """Two ranks of a consumer, two producers of two ranks and one, each over a line of its own."""
    draw, num_steps, shares, lanes = (
        random.Random(7),
        8,
        {"en": 0.5, "de": 0.5},
        {"en": 2, "de": 1},
    )
    events: list[dict[str, Any]] = []
    ended_s = [50.0, 50.1]
    for step in range(1, num_steps + 1):
        for name, count in lanes.items():
            for _ in range(count):
                times = {f"{k}_s": draw.uniform(0, 0.2) for k in ("compute", "codec", "waiting")}
                events.append({"event": "fed", "rank": 9, "cloud": name, "t": 50.0 + step,
                               "num_batches": 2, "loss": draw.uniform(1, 5), **times})  # fmt: skip
        for rank in (0, 1):
            own_s = draw.uniform(0.5, 1.0)
            ended_s[rank] += own_s
            fed = {name: draw.randint(500, 900) for name in shares}
            events.append({
                "event": "step", "rank": rank, "cloud": "d", "t": ended_s[rank], "step": step,
                "step_s": own_s, "compute_s": own_s / 2, "codec_s": 0.0, "waiting_s": own_s / 4,
                "sync_s": 0.0, "sent": {"forward": sum(fed.values()), "other": 60},
                "taken": {"en": 2, "de": 1}, "skipped": {"de": int(step == 3)}, "fed_bytes": fed,
                "line_s": {name: size / 1e4 for name, size in fed.items()},
                **({"samples": 12, "tokens": 300, "loss": draw.uniform(0.1, 0.6)}
                   if rank == 0 else {}),
            })  # fmt: skip
    events.append(quality("test", num_steps, {"replaced_loss": 0.352846}, 60.0))
    clouds = {name: OneWayCloud(lanes[name], share) for name, share in shares.items()}
    statistics = OneWayStatistics(OneWayLayout({"d": OneWayCloud(2), **clouds}, "free"))
    for event in events:
        statistics.feed(event)
    summary = statistics.summary(name="x", status="finished", commit="c")
    steps = [event for event in events if event["event"] == "step"]
    wanted = figures_of(steps)
    wall_s = max(ended_s) - 50.1

    for name in ("step_time_s.median", "wan_bytes_per_step.forward", "samples_per_s"):
        head, _, part = name.partition(".")
        found = summary[head][part] if part else summary[head]
        assert found == pytest.approx(wanted[name], rel=2e-3), name
    assert summary["samples_per_s"] == pytest.approx(12 * num_steps / wall_s, rel=1e-3)
    assert summary["quality"] == {"replaced_loss": 0.352846}
    feed, use = summary["feed"], {}
    for name in shares:
        fed = [event for event in events if event["event"] == "fed" and event["cloud"] == name]
        use[name] = sum(event["line_s"][name] for event in steps) / wall_s
        own = feed["producers"][name]
        assert own["num_made"] == 2 * len(fed) and own["loss"] == fed[-1]["loss"]
        for kind in ("compute_s", "waiting_s"):
            seconds = sum(event[kind] for event in fed)
            assert own[f"{kind}_per_batch"] == pytest.approx(seconds / own["num_made"], abs=2e-6)
            each_s = seconds / (lanes[name] * num_steps)
            assert summary[kind][name] == pytest.approx(each_s, abs=2e-6)
        assert own["link_utilisation"] == pytest.approx(use[name], abs=1e-3)
        assert own["num_batches"] == (4 if name == "en" else 2) * num_steps
    assert feed["producers"]["en"]["share_taken"] == pytest.approx(2 / 3, abs=1e-4)
    assert summary["link_utilisation"]["forward"] == pytest.approx(max(use.values()), abs=1e-3)
    assert feed["num_batches"] == 6 * num_steps and feed["num_skipped"] == 2
    carried = sum(sum(event["fed_bytes"].values()) for event in steps)
    assert feed["bytes_per_token"] == pytest.approx(carried / (300 * num_steps), abs=1e-4)


def test_what_is_told_of_a_step_counts_no_longer_once_a_run_has_gone_back_before_it() -> None:
    kinds = [kind for figure in FIGURES for kind in figure.kinds]
    statistics = RunStatistics(1, FIGURES)
    for kind in kinds:
        of_kind = {"event": kind, "ranks": []}
        statistics.feed({**of_kind, "rank": 0, "cloud": "a", "t": 1.0, "step": 5})
    assert {event["event"] for event in statistics.events(*kinds)} == {*kinds}
    statistics.feed({"event": "resume", "rank": 0, "cloud": "a", "t": 2.0, "step": 4})
    left = {event["event"] for event in statistics.events(*kinds)}
    of_features = [rows.figure for rows in feature_rows().values() if rows.whole_run]
    kept = {kind for figure in of_features if figure for kind in figure.kinds}
    assert left == {"line", "refused_reports", *kept}, "they are of the whole run"


FIGURES_OF = {n: rows.figure for n, rows in feature_rows().items() if rows.figure is not None}
USED = Shown(
    {"egress_bytes": {"a": 2000, "b": 500}, "rank_hours": {"a": 0.5, "b": 0.25},
     "cost": {"total": 1.25, "compute": {"a": 1.0}, "egress": {"a": 0.25}}},
    [("left a", "2.00 kB", "in all attempts; its ranks ran 30 min together"),
     ("left b", "500 B", "in all attempts; its ranks ran 15 min together"),
     ("cost", "1.25", "a 1 for ranks and 0.25 for bytes")],
    {"egress_bytes": 2500, "rank_hours": 0.75, "cost": 1.25},
)  # fmt: skip


def test_every_figure_of_a_feature_has_rows() -> None:
    """So that none is left out below."""
    of_any_run = [*map(id, (*OF_EVERY_RUN, USAGE))]
    of_features = [one for one in FIGURES if id(one) not in of_any_run]
    assert {*map(id, FIGURES_OF.values())} == {*map(id, of_features)}


@pytest.mark.parametrize(
    ("figure", "shown"),
    [
        pytest.param(USAGE, USED, id="usage"),
        *(pytest.param(figure, one, id=name)
          for name, figure in FIGURES_OF.items() for one in feature_rows()[name].shown),
    ],
)  # fmt: skip
def test_a_features_figures_are_rows_and_metrics_to_the_letter(
    figure: FeatureFigure, shown: Shown
) -> None:
    assert [*figure.rows(shown.summary)] == [*shown.rows]
    assert dict(figure.metrics(shown.summary)) == shown.metrics


@pytest.mark.parametrize(
    ("figure", "told"),
    [pytest.param(figure, one, id=name)
     for name, figure in FIGURES_OF.items() for one in feature_rows()[name].told],
)  # fmt: skip
def test_a_feature_sums_its_events_and_says_what_a_user_is_to_see_at_once(
    figure: FeatureFigure, told: Told
) -> None:
    events = [dict(event) for event in told.events]
    assert {event["event"] for event in events} <= {*figure.kinds}
    assert figure.in_summary(events) == told.summed
    assert [figure.notice(event) for event in events if figure.notice] == [*told.notices]
    assert RunRecord({}, FIGURES, events=events).marks == [*told.marks]

"""Pictures are looked at by people; here: that they are drawn, from the right numbers, and that
nothing of them reaches a worker or stops a run."""

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from omegaconf import OmegaConf

from tests import as_written
from tests.import_walk import MODULES, imports, own_imports
from tests.logged import Log
from tests.nightly import first_daily
from tests.timelines import timeline, two_ranks
from tests.toy import toy_config
from xcloud.job import config as configs
from xcloud.record.events import Event
from xcloud.record.run_record import RunRecord
from xcloud.record.summary import RunStatistics
from xcloud.record.timeline import SPANS, Box, Flight, Lane, Timeline, rows_of
from xcloud.show import pictures
from xcloud.show.canvas import COLOURS, canvas, column, ink_on, running_mean, wrapped
from xcloud.show.monitor import Monitor
from xcloud.show.pictures import (
    KINDS,
    Bar,
    bars_of_link,
    draw_bars,
    draw_times,
    legend_of,
    short,
    write_loss,
    write_pictures,
    write_step_time,
    write_timeline,
)

pytestmark = pytest.mark.usefixtures("pictures")

PACKAGE = Path(__file__).parents[2] / "xcloud"
TITLE = "toy, gpipe m=4, link: emulated 2 Mbit/s, compression: int8"


def step_events(num_steps: int, loss: float | None = 2.0) -> list[Event]:
    """Cloud b computes twice as long as a and reports first."""
    events = []
    for step in range(1, num_steps + 1):
        for rank, cloud in ((1, "b"), (0, "a")):
            report = {
                "event": "step", "rank": rank, "cloud": cloud, "t": float(step), "step": step,
                "step_s": 1.0, "compute_s": 0.3 * (1 + rank), "codec_s": 0.1, "waiting_s": 0.2,
                "sync_s": 0.0,
            }  # fmt: skip
            if rank and loss is not None:
                report["loss"] = loss + 1 / step
            events.append(report)
    return events


def run_of(events: list[Event]) -> RunStatistics:
    run = RunStatistics(2)
    for event in events:
        run.feed(event)
    return run


def record_of(events: list[Event]) -> RunRecord:
    return run_of(events).record({}, ())


def num_pixels(path: Path, colour: str) -> int:
    pixels = np.round(255 * imread(path)[:, :, :3]).astype(int)
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((pixels == wanted).all(axis=2).sum())


def test_curves_hold_one_number_a_step_and_clouds_in_the_order_of_their_ranks() -> None:
    run = run_of(step_events(5))

    assert list(run.steps.step) == [1, 2, 3, 4, 5]
    assert run.steps["loss"][1] == 2.5
    assert run.clouds == ["a", "b"]
    assert run.steps.sum("compute_s", "b") == pytest.approx(0.6 * 5)
    assert run.steps.sum("step_s", "a", first=2) == 1.0 * 3


@pytest.mark.parametrize("num_steps", first_daily([5000, 1], count=1))
def test_a_run_of_any_length_has_its_pictures(num_steps: int, tmp_path: Path) -> None:
    run = run_of(step_events(num_steps))
    quality = {"event": "quality", "rank": 1, "cloud": "b", "split": "dev", "step": 1}
    run.feed({**quality, "values": {"bleu": 12.0, "chrf": 30.0}})
    for event in two_ranks():
        run.feed(event)

    written = write_pictures(tmp_path, run.record({}, ()), TITLE)

    assert [path.name for path in written] == ["timeline.png", "loss.png", "step_time.png"]
    assert all(imread(path).shape[2] == 4 for path in written)


def test_what_was_never_measured_is_not_drawn(tmp_path: Path) -> None:
    assert write_pictures(tmp_path, RunRecord({}), TITLE) == []
    assert not write_loss(tmp_path / "loss.png", record_of(step_events(3, loss=None)), TITLE)
    assert not write_loss(tmp_path / "loss.png", record_of(step_events(3, loss=math.nan)), TITLE)
    assert list(tmp_path.iterdir()) == []


def test_waiting_takes_the_room_in_the_timeline_that_it_took_in_time(tmp_path: Path) -> None:
    boxes = (
        Box("forward", "forward", 0, 0, 0, 20_000),
        Box("wait", "backward", 0, 0, 20_000, 80_000),
        Box("backward", "backward", 0, 0, 80_000, 100_000),
    )
    lane = Lane(0, "a", 0, 100_000, boxes)

    write_timeline(tmp_path / "t.png", Timeline(1, (lane,), {}, "one clock"), TITLE)

    light = num_pixels(tmp_path / "t.png", COLOURS["waiting"])
    forward = num_pixels(tmp_path / "t.png", COLOURS["forward"])
    assert light / forward == pytest.approx(3, rel=0.1)


def test_a_predicted_step_stands_above_the_measured_one_at_the_same_scale(tmp_path: Path) -> None:
    measured, predicted = (
        Timeline(1, (Lane(0, "a", 0, us, (Box("forward", "forward", 0, 0, 0, us),)),), {}, "clock")
        for us in (2_000_000, 1_000_000)
    )

    write_timeline(tmp_path / "both.png", measured, TITLE, predicted)

    pixels = np.round(255 * imread(tmp_path / "both.png")[:, :, :3]).astype(int)
    wide = (pixels == [0, 0x72, 0xB2]).all(axis=2).sum(axis=1)
    (above,), (below,) = np.unique(wide[wide > 100][:5]), np.unique(wide[wide > 100][-5:])
    assert COLOURS["forward"] == "#0072B2"
    assert below / above == pytest.approx(2, rel=0.02)


def test_the_step_time_bars_are_as_long_as_the_times(tmp_path: Path) -> None:
    write_step_time(tmp_path / "s.png", record_of(step_events(40)), TITLE)

    computing = num_pixels(tmp_path / "s.png", COLOURS["forward"])
    waiting = num_pixels(tmp_path / "s.png", COLOURS["waiting"])
    assert computing / waiting == pytest.approx((0.3 + 0.6) / (0.2 + 0.2), rel=0.1)
    assert num_pixels(tmp_path / "s.png", COLOURS["averaging"]) < 0.02 * computing


def test_a_very_long_step_is_drawn_in_seconds_and_an_empty_rank_as_it_is(tmp_path: Path) -> None:
    lanes = (Lane(0, "a", 0, 50_000_000, ()), Lane(1, "b", 0, 0, ()))

    write_timeline(tmp_path / "t.png", Timeline(1, lanes, {}, "one clock"), TITLE)

    assert (tmp_path / "t.png").exists()


def test_times_are_told_as_a_person_says_them() -> None:
    lanes = (Lane(0, "a", 0, 16_570_000, ()),)
    assert pictures.heading_of(Timeline(58, lanes, {}, "one clock"), False).startswith(
        "step 58: 16.6 s"
    )


def test_running_mean_shifts_nothing_and_keeps_constants() -> None:
    ramp = np.arange(20, dtype=float)

    assert running_mean(ramp, 5)[2:-2] == pytest.approx(ramp[2:-2])
    assert running_mean(np.full(7, 3.0), 4) == pytest.approx(np.full(7, 3.0))
    assert running_mean(ramp, 1) == pytest.approx(ramp)


def test_numbers_and_titles_are_readable() -> None:
    assert [short(x) for x in (1052.4, 149.2, 42.31, 0.5)] == ["1052", "149", "42.3", "0.5"]
    assert ink_on("#0072B2") == "#FFFFFF" and ink_on("#E3E3E3") != "#FFFFFF"
    assert all(len(line) <= 92 for line in wrapped("word " * 60, 8).splitlines())


def test_every_kind_of_span_has_a_colour() -> None:
    from xcloud.comm.step_clock import SUM_OF

    assert KINDS.keys() == SUM_OF.keys() == {*SPANS}


def monitor(run_dir: Path) -> Monitor:
    config = OmegaConf.create(toy_config("two_clouds"))
    configs.Settings.of(config).write(run_dir / configs.EXPERIMENT_FILE)
    return Monitor(configs.Settings.of(config), run_dir)


def follow(run_dir: Path, events: list[Event], cause: str | None) -> None:
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    following = monitor(run_dir)
    following.start()
    following.finish(cause)


def test_the_monitor_leaves_trace_and_pictures_in_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []
    tracker = "xcloud.tracking.tracker.Recording.artifact"
    monkeypatch.setattr(tracker, lambda self, path: kept.append(path.name))

    follow(tmp_path, [*step_events(12), *two_ranks()], None)

    files = ["timeline.json", "timeline.png", "loss.png", "step_time.png"]
    assert all((tmp_path / name).exists() for name in files)
    assert kept == ["summary.json", *files]
    facts = json.loads((tmp_path / "timeline.json").read_text())["otherData"]
    assert facts["schedule"] == "gpipe m=4"


def test_pictures_that_cannot_be_drawn_are_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Log
) -> None:
    def fail(*_: object, **named: object) -> None:
        raise OSError("no font at all")

    monkeypatch.setattr("xcloud.show.pictures.write_loss", fail)
    with caplog.at_level(logging.WARNING):
        follow(tmp_path, [*step_events(12), *two_ranks()], None)

    assert ["no font at all" in record.getMessage() for record in caplog.records] == [True]
    # Each picture by itself: the one before, and the one behind.
    assert (tmp_path / "timeline.png").exists() and (tmp_path / "step_time.png").exists()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["lost_files"]) == ("finished", ["loss.png"])


def test_whatever_scores_another_owner_reports_the_loss_is_drawn(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    odd = (None, nan, inf, -inf, 1e308, -1e308, -1.0)
    scores = [(one, 0.1) for one in odd] + [(0.5, one) for one in odd]
    names = [r"$\frac{$", "_", "", *(f"score {number}" for number in range(len(scores) - 3))]
    quality = {
        "event": "quality", "rank": 1, "cloud": "b", "t": 1.0, "step": 3, "split": "dev",
        "values": {name: value for name, (value, _) in zip(names, scores, strict=True)},
        "errors": {name: error for name, (_, error) in zip(names, scores, strict=True)},
        "signature": {}, "evaluation_s": 1.0,
    }  # fmt: skip
    run = RunStatistics(2)
    for event in [*step_events(4), quality]:
        run.feed(event)
    assert write_loss(tmp_path / "loss.png", run.record({}, ()), TITLE) is not None


def test_a_run_that_failed_before_its_first_step_has_no_pictures_and_no_warning(
    tmp_path: Path, caplog: Log
) -> None:
    follow(tmp_path, [], "it broke")

    assert not caplog.records
    assert not list(tmp_path.glob("*.png"))


def test_no_worker_imports_what_draws() -> None:
    """Half a second and 50 MB that no rank should pay for."""
    reached, to_read = set(), ["launch.worker"]
    while to_read:
        name = to_read.pop()
        if name not in reached:
            reached.add(name)
            libraries = {imported.split(".")[0] for imported in imports(MODULES[name])}
            assert "matplotlib" not in libraries, name
            to_read += own_imports(MODULES[name])
    assert {"comm.step_clock", "train.stage_rank", "record.reporter"} <= reached
    drawing = {"show.pictures", "show.canvas", "show.monitor"}
    assert not reached & drawing


def test_a_second_monitor_knows_who_had_finished_before_the_first_was_lost(
    tmp_path: Path,
) -> None:
    told = [
        *step_events(12),
        *({"event": "finish", "rank": rank, "cloud": "a"} for rank in (0, 1)),
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
    (tmp_path / "rank0.wire.json").write_text("{}")

    second = monitor(tmp_path)
    second.start(is_again=True)
    assert second.attempt.finished_ranks == {0, 1} and (tmp_path / "rank0.wire.json").exists()


def test_the_band_of_the_step_times_ends_at_a_tenth_and_nine_tenths_of_them() -> None:
    axes = canvas("", width_in=4, height_in=4).subplots()
    draw_times(axes, step=np.arange(101), taken=np.arange(101.0), unit="ms")
    said = [text.get_text() for text in axes.get_legend().get_texts()]
    assert said == ["median 50 ms", "10 % to 90 %: 10 to 90 ms"]


def test_the_legend_names_what_is_drawn_and_nothing_else() -> None:
    everything = timeline()
    told = [patch.get_label() for patch in legend_of(everything)]
    assert told == [
        "forward", "backward", "compress, decompress", "waiting", "optimizer, clipping, data",
        "none of these", "activation on the link", "gradient on the link",
    ]  # fmt: skip
    report = Flight(-1, 3, "report", 0, 90, 0, 0, 1, 2)
    few = Timeline(1, (), {("a", "b"): [report]}, "one clock")
    assert [patch.get_label() for patch in legend_of(few)] == ["none of these", "report"]


def test_a_box_that_is_too_narrow_for_an_edge_or_its_text_has_none() -> None:
    figure = canvas("", width_in=10, height_in=1)
    (axes,) = column(figure, heights=[1])
    bars = [
        Bar(0, 0.7, from_us=0, until_us=wide, colour="#000000", edge="white", text="12")
        for wide in (2, 4, 100)
    ]
    draw_bars(axes, bars=bars, per_us=1.0, inches_per_unit=0.01)
    (drawn,) = axes.collections
    assert [edge[-1] for edge in drawn.get_edgecolors()] == [0.0, 1.0, 1.0]
    assert [text.get_position()[0] for text in axes.texts] == [50.0]


def flight(from_us: int, micro_batch: int) -> Flight:
    return Flight(0, 1, "activation", micro_batch, 9, from_us, from_us, from_us + 10, from_us + 12)


@pytest.mark.parametrize(("at_once", "texts"), [(1, ["0", "1"]), (2, ["0", "1"]), (3, [])])
def test_messages_share_the_height_of_a_line_and_are_numbered_in_two_rows_at_most(
    at_once: int, texts: list[str]
) -> None:
    flights = [flight(number // at_once * 10, number) for number in range(max(2, at_once))]
    bars = list(bars_of_link(0, rows_of(flights)))
    assert [bar.text for bar in bars if bar.text] == texts
    assert {bar.height for bar in bars if bar.edge == "white"} == {0.6 / at_once}


def test_losses_stand_in_one_panel_and_scores_in_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[str, list[str]]] = []

    def noted(figure: Any, path: Path) -> None:
        for axes in figure.axes:
            drawn.append((axes.get_ylabel(), axes.get_legend_handles_labels()[1]))

    monkeypatch.setattr(pictures, "save", noted)
    run = run_of(step_events(100))
    quality = {"event": "quality", "rank": 1, "cloud": "b", "split": "dev", "step": 1}
    run.feed({**quality, "values": {"bleu": 12.0}})
    write_loss(tmp_path / "loss.png", run.record({}, ()), TITLE)
    assert drawn == [
        ("training loss", ["each step", "mean of 2 steps"]),
        ("dev quality", ["bleu"]),
    ]


def test_lines_stand_below_the_upper_of_their_clouds_and_those_of_control_messages_last() -> None:
    def flights(*kinds: str) -> list[Any]:
        return [SimpleNamespace(kind=kind) for kind in kinds]

    box = [SimpleNamespace(stage=stage, direction="forward") for stage in (0, 1)]
    lanes = [SimpleNamespace(cloud=c, rank=r, boxes=box[: 2 - r]) for r, c in enumerate("abc")]
    rows: dict[tuple[str, str], list[Any]] = {
        ("a", "b"): [flights("norm", "activation")], ("b", "a"): [flights("norm")],
        ("a", "c"): [flights("norm"), flights("report")], ("c", "b"): [flights("averaging")],
        ("b", "c"): [],
    }  # fmt: skip
    shown: Any = SimpleNamespace(clouds=[*"abc"], lanes=lanes, rows=rows)
    assert [name for name, _ in pictures.lanes_of(shown)] == [
        "a  rank 0\n(small: stage)", "a → b", "b  rank 1", "c → b", "c  rank 2", "b → a", "a → c",
    ]  # fmt: skip


def test_all_that_is_drawn_of_a_run_is_as_it_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long and in milliseconds, with marks and with one step that is far too slow; short and in
    seconds, beside a predicted step."""
    kept = as_written.keep_figures(monkeypatch)
    run = run_of([{**e, "step_s": 0.2 + 0.001 * e["step"]} for e in step_events(120)])
    run.feed({**step_events(1)[1], "step": 121, "t": 121.0, "step_s": 9.0})
    run.feed({**step_events(1)[0], "step": 121, "t": 121.0, "step_s": 9.0})
    scores = {"event": "quality", "rank": 1, "cloud": "b", "split": "dev", "t": 130.0}
    for step in (60, 120):
        values = {"bleu": step / 4, "chrf": step / 3}
        run.feed({**scores, "step": step, "values": values, "errors": {"bleu": 0.5}})
    mark = SimpleNamespace(mark=lambda event: "cut", kinds={"quality"})
    for event in two_ranks():
        run.feed(event)
    write_pictures(tmp_path, run.record({}, [mark]), TITLE)
    as_written.check("pictures of a long run", kept)

    kept.clear()
    boxes = [
        Box(what, "forward", stage, 3, 10 * n, 10 * n + 9 * (n % 4))
        for n, what in enumerate(KINDS)
        for stage in (0, 1)
    ]
    lanes = [Lane(rank, "ab"[rank], 5 * rank, 130 - rank, tuple(boxes[rank:])) for rank in (0, 1)]
    kinds = ["activation", "gradient", "averaging", "report"]
    flights = [
        Flight(0, 1, kind, n, 9, 10 * n, 10 * n, 10 * n + 25, 10 * n + 40)
        for n, kind in enumerate(kinds)
    ]
    links = {("a", "b"): flights, ("b", "a"): flights[-1:]}
    shown = Timeline(4, tuple(lanes), links, "one clock")
    write_timeline(tmp_path / "both.png", shown, TITLE, predicted=timeline())
    write_timeline(tmp_path / "alone.png", shown, TITLE)
    short_run = record_of(step_events(6))
    assert write_loss(tmp_path / "loss.png", short_run, TITLE)
    assert write_step_time(tmp_path / "step_time.png", short_run, TITLE)
    as_written.check("pictures of a short run", kept)


@pytest.mark.parametrize(
    ("value", "error", "point"),
    [
        (1.5, 0.5, (7, 1.5, 0.5)),
        (-1.5, None, (7, -1.5, 0.0)),
        (0.99e100, 0.99e100, (7, 0.99e100, 0.99e100)),
        (-1e100, -1.0, (7, math.nan, 0.0)),
        (1e100, 1e100, (7, math.nan, 0.0)),
        (None, math.nan, (7, math.nan, 0.0)),
    ],
)
def test_a_score_that_no_axis_has_room_for_is_no_point(
    value: float | None, error: float | None, point: tuple[int, float, float]
) -> None:
    about = {"event": "quality", "step": 7, "values": {"loss": value}, "errors": {"loss": error}}
    events: list[Any] = [about | {"split": split} for split in ("dev", "test")]
    curve = RunRecord({}, events=events).dev_quality["loss"]
    assert [*curve[0]] == pytest.approx([*point], nan_ok=True) and len(curve) == 1

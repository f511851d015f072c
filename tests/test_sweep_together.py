"""Sweeps whose points make their steps in turns: threads stand in for ranks."""

import io
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from tests.sweep_runs import FakeRuns, compose, points, run_sweep, write_run
from xcloud.base.errors import ConfigError
from xcloud.parallel.part import Part
from xcloud.rank.interleaved import (
    ADDRESS,
    STEPS_PER_TURN,
    InterleavedClient,
    check_takes_turns,
    join_turns,
)
from xcloud.record.summary import read_summary
from xcloud.record.tracking import NullTracker, final_metrics
from xcloud.sweep.interleaving import InterleavingServer, StepRatio, record, reference_of
from xcloud.sweep.points import Point
from xcloud.sweep.results import Results, from_folder
from xcloud.sweep.runner import LauncherSettings
from xcloud.sweep.table import print_sweep

NUM_STEPS = 32
LONG = f"training.max_steps={NUM_STEPS}"


def test_noise_that_hits_a_whole_round_leaves_the_ratio_alone() -> None:
    noise = {number: 1.0 + 3 * (number % 3 == 0) for number in range(1, 21)}
    reference = {number: 0.2 * noise[number] for number in noise}
    own = {number: (0.1 + 0.001 * number) * noise[number] for number in noise}

    found = StepRatio.of(own, reference, "none")

    assert found is not None and (found.rounds, found.to) == (20, "none")
    assert found.ratio == pytest.approx((0.1 + 0.0105) / 0.2)
    # Of 20 values the 6th and the 15th bound the median with 95.9 %, the 7th and 14th with 88 %.
    assert (found.low, found.high) == (pytest.approx(0.106 / 0.2), pytest.approx(0.115 / 0.2))


def test_six_rounds_in_common_are_the_fewest() -> None:
    six = {number: 1.0 + number for number in range(6)}
    assert StepRatio.of(six, {**six, 9: 1.0}, "none") == StepRatio(1.0, 1.0, 1.0, 6, "none")
    assert StepRatio.of(six, {number: 1.0 for number in range(1, 9)}, "none") is None


def test_seeds_make_the_interval_narrower() -> None:
    one = StepRatio(0.5, 0.4, 0.625, 10, "none")
    both = StepRatio.over_seeds([one, one])
    assert (both.ratio, both.rounds, both.to) == (pytest.approx(0.5), 20, "none")
    assert 0.4 < both.low < 0.5 < both.high < 0.625


def test_the_reference_is_the_uncompressed_point_of_the_seed_or_else_the_first() -> None:
    int8, none, other, slow = points(
        "compression=int8 seed=2", "compression=none seed=1", "compression=none seed=2",
        "compression=int8 seed=2 cluster/wan=line_8m",
    )  # fmt: skip
    asked = [int8, none, other, slow]
    assert reference_of(int8, asked) is other and reference_of(none, asked) is none
    assert reference_of(slow, asked) is int8, "no uncompressed one has its link"


def steps(turns: Part, step_s: float, log: list[tuple[str, int]], who: str) -> None:
    for step in range(NUM_STEPS):
        turns.before_update(step)
        log.append((who, step))
        time.sleep(0.0005)
        log.append((who, step))
        own_s = step_s * (100 if step % STEPS_PER_TURN == 0 else 1)
        if isinstance(turns, InterleavedClient):
            turns.note(own_s, own_s)  # all ranks begin at once
    turns.finish()
    turns.close(is_finished=True)


def test_one_point_at_a_time_makes_its_steps_and_the_first_of_a_turn_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[tuple[str, int]] = []
    with InterleavingServer() as server, ThreadPoolExecutor(4) as pool:
        monkeypatch.setenv(ADDRESS, server.address)
        ranks = {
            name: [
                pool.submit(steps, join_turns(tmp_path / name, rank, 2, None), step_s, log, name)
                for rank, step_s in enumerate(both)
            ]
            for name, both in {"a": (0.1, 0.3), "b": (0.2, 0.1)}.items()
        }
        made: dict[str, list[float | None]] = {"a": [], "b": []}
        for _ in range(NUM_STEPS // STEPS_PER_TURN):
            for name, seconds in made.items():
                over = lambda name=name: all(rank.done() for rank in ranks[name])  # noqa: E731
                seconds.append(server.turn(tmp_path / name, over))
        server.close()  # ends need no turn

    assert made["a"] == pytest.approx([3 * 0.3] * 8) and made["b"] == pytest.approx([3 * 0.2] * 8)
    # Two entries for a step of each of its two ranks, and then the other's.
    turns = [log[i : i + 4 * STEPS_PER_TURN] for i in range(0, len(log), 4 * STEPS_PER_TURN)]
    assert all(len({who for who, _ in turn}) == 1 for turn in turns)
    assert len(log) == 2 * 2 * 2 * NUM_STEPS


def test_a_turn_in_which_ranks_were_started_again_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with InterleavingServer() as server, ThreadPoolExecutor(1) as pool:
        monkeypatch.setenv(ADDRESS, server.address)

        def lose_one() -> None:
            lost = join_turns(tmp_path, 0, 1, None)
            lost.before_update(0)
            lost.close(is_finished=False)
            steps(join_turns(tmp_path, 0, 1, None), 0.1, [], "again")

        lone = pool.submit(lose_one)
        assert server.turn(tmp_path, lone.done) is None
        assert server.turn(tmp_path, lone.done) == pytest.approx(0.3)
        server.close()


def test_without_a_sweep_that_times_together_no_rank_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    steps(join_turns(tmp_path, 0, 2, None), 0.1, [], "alone")


class TimedRuns:
    """Stands in for Children: a thread a point makes its steps; compressed ones in half the
    time. On a machine on which every turn takes another time than the one before."""

    moment = 1.0
    has_ended = False

    def __init__(self, parallel: int, say: object, environment: Mapping[str, str]) -> None:
        assert parallel == 1, "each point has the threads that it would have alone"
        self.lock = threading.Lock()

    def run(self, point: Point, run_dir: Path) -> str | None:
        step_s = 0.2 if point.experiment.compression_in_force == "none" else 0.1
        turns = join_turns(run_dir, 0, 1, None)
        for step in range(NUM_STEPS):
            turns.before_update(step)
            assert self.lock.acquire(blocking=False), "two points make steps at once"
            TimedRuns.moment = 1.0 + (TimedRuns.moment * 7.3) % 0.01
            assert isinstance(turns, InterleavedClient)
            turns.note(0.0, step_s * TimedRuns.moment)
            self.lock.release()
            if point.experiment.seed == 2 and step == 9:
                turns.close(is_finished=False)
                return "asked to fail"
        turns.finish()
        turns.close(is_finished=True)
        write_run(run_dir, point.config)
        return None

    def end(self) -> None:
        TimedRuns.has_ended = True


def use_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def children(parallel: int, say: object, environment: Mapping[str, str]) -> TimedRuns:
        monkeypatch.setenv(ADDRESS, environment[ADDRESS])
        return TimedRuns(parallel, say, environment)

    monkeypatch.setattr("xcloud.sweep.runner.Children", children)
    monkeypatch.setattr("xcloud.sweep.report.close_sweep", lambda folder, tracker: None)


def test_a_sweep_reports_ratios_with_intervals_of_the_points_that_came_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_threads(monkeypatch)
    folder = tmp_path / "s"
    grid = [f"{one} {LONG}" for one in ("compression=int8 seed=1", "compression=int8 seed=2",
                                        "compression=none seed=1")]  # fmt: skip

    assert run_sweep(folder, grid, FakeRuns(), timing="together") == 1

    summaries = {path.name: read_summary(path) for path in folder.iterdir() if path.is_dir()}
    found = StepRatio(**summaries["int8+int8_s1"]["step_time_ratio"])
    assert 0.49 < found.low <= found.ratio <= found.high < 0.51
    assert (found.rounds, found.to) == (NUM_STEPS // STEPS_PER_TURN - 1, "none")
    assert final_metrics(summaries["int8+int8_s1"])["step_time_ratio_low"] == found.low
    assert "step_time_ratio" not in summaries["int8+int8_s2"]
    assert "asked to fail; the others continue" in capsys.readouterr().out
    text = table(folder)
    assert "in brackets the 95 % interval" in text and f"{found.ratio:.3f} (" in text
    assert "one after another" not in text and not TimedRuns.has_ended


def test_an_interrupted_sweep_lets_all_points_go_and_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    def wait(self: TimedRuns, point: Point, run_dir: Path) -> str:
        turns = join_turns(run_dir, 0, 1, None)
        turns.before_update(0)  # for ever, if nobody lets it go
        turns.close(is_finished=False)
        return "interrupted"

    use_threads(monkeypatch)
    monkeypatch.setattr(TimedRuns, "has_ended", False)
    monkeypatch.setattr(TimedRuns, "run", wait)
    monkeypatch.setattr(InterleavingServer, "turn", interrupt)
    grid = [f"compression={one} {LONG}" for one in ("int8", "none")]

    assert run_sweep(tmp_path / "s", grid, FakeRuns(), timing="together") == 130
    assert TimedRuns.has_ended and "2 of 2 points are left" in capsys.readouterr().out


def test_a_share_measured_one_after_another_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "a", compose(["compression=none"]), step_s=1.0)
    write_run(tmp_path / "b", compose(["compression=int8"]), step_s=0.4)
    assert "share, one after another" in table(tmp_path) and "timing=together" in table(tmp_path)


def table(folder: Path) -> str:
    text = io.StringIO()
    print_sweep(Results(from_folder(folder)), Console(file=text, width=200))
    return " ".join(text.getvalue().split())


def test_mlflow_that_refuses_a_ratio_is_a_line_and_the_summary_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tracker: object) -> object:
        raise RuntimeError("the store is down")

    monkeypatch.setattr(NullTracker, "store", property(refuse))
    (point,) = points("compression=none")
    write_run(tmp_path, point.config)

    said = record([(point, tmp_path, {number: 0.1 for number in range(6)})])
    assert len(said) == 1 and "the store is down" in said[0]
    assert read_summary(tmp_path)["step_time_ratio"]["rounds"] == 6


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"timing": "turns"}, "timing must be one of alone, together"),
        ({"timing": "together", "parallel": 2}, "parallel=2"),
        ({"timing": "together", "stop_on_failure": True}, "stop_on_failure=true"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    settings: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        LauncherSettings(**settings)  # type: ignore[arg-type]


def test_runs_whose_steps_have_no_turns_are_refused(tmp_path: Path) -> None:
    too_short, apart = points("", "training.max_steps=40 strategy=local_updates")
    with pytest.raises(ConfigError, match=r"max_steps of at least 28, .* got 8"):
        check_takes_turns(too_short.experiment)
    with pytest.raises(ConfigError, match="strategy=local_updates averages between some steps"):
        check_takes_turns(apart.experiment)

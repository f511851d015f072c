"""A search over settings: what is asked for, told, refused and known from before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.search_against_grid import area
from tests.sweep_runs import compose
from xcloud.base.errors import ConfigError
from xcloud.job.config import looked_up
from xcloud.record.summary import main_score, write_summary
from xcloud.study.points import STATE_FILE, Overrides
from xcloud.study.search import Search, SearchSettings, SearchSpace, Tried, _all_of, objectives_of

pytest.importorskip("optuna")
RANKS = ["1", "2", "4", "8", "16", "32", "64", "128"]


def outcome(rank: float, rate: float) -> dict[str, Any]:
    """A made-up run: more rank is better and dearer, and one rate is best."""
    bleu = 40 * (1 - np.exp(-rank / 16)) - 30 * (np.log10(rate) + 3) ** 2
    return {"quality": {"bleu": float(bleu)}, "bytes_per_token": {"total": 2.0 * rank}}


class Runs:
    """Runs points of a search by the function above, and keeps them as a sweep does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[Overrides] = []
        self.entries: dict[str, Any] = {}

    def __call__(self, given: Sequence[Overrides]) -> list[Mapping[str, Any] | str]:
        return [self.run(words) for words in given]

    def run(self, words: Overrides) -> Mapping[str, Any] | str:
        self.asked.append(words)
        values = dict(word.partition("=")[::2] for word in words)
        rank = float(values["model.rank"])
        found = outcome(rank, float(values.get("rate", 1e-3)))
        if rank == 128:
            return "out of memory"
        name = f"p{len(self.entries)}"
        (self.folder / name).mkdir(parents=True)
        write_summary(self.folder / name / "summary.json", {"status": "finished", **found})
        self.entries[name] = {"overrides": list(words)}
        write_summary(self.folder / STATE_FILE, {"name": "s", "points": self.entries})
        return found


def search(folder: Path, *words: str, **settings: Any) -> tuple[Search, Runs]:
    runs = Runs(folder)
    space = SearchSpace.of(["+exp=x", *words])
    return Search(space, SearchSettings(**settings), run=runs, compose=compose), runs


def test_a_small_space_is_tried_whole_each_setting_once(tmp_path: Path) -> None:
    one, runs = search(tmp_path, f"model.rank={','.join(RANKS)}", runs=50)
    assert one.go_on(tmp_path) == len(RANKS)
    tried = [dict(w.partition("=")[::2] for w in words)["model.rank"] for words in runs.asked]
    assert sorted(tried) == sorted(RANKS)
    assert {values["model.rank"] for values in one.front} == {*RANKS} - {"128"}  # which failed


def test_the_same_command_goes_on_with_what_its_folder_has(tmp_path: Path) -> None:
    words = [f"model.rank={','.join(RANKS[:-1])}", "rate=tag(log, interval(1e-5,1e-1))"]
    one, runs = search(tmp_path, *words, runs=4, seeds=2)
    assert one.go_on(tmp_path) == 4 and len(runs.asked) == 8
    assert [words[-1] for words in runs.asked[:2]] == ["seed=1", "seed=2"]

    other, more = search(tmp_path, *words, runs=6, seeds=2)
    more.entries = runs.entries
    assert other.go_on(tmp_path) == 6 and len(more.asked) == 4

    third, later = search(tmp_path, *words, "seed=7", runs=1, seeds=2)  # knows nothing of these
    later.entries = more.entries
    assert third.go_on(tmp_path) == 1
    assert [words[-1] for words in later.asked] == ["seed=7", "seed=8"]


def test_a_search_begins_with_each_choice_in_the_middle_of_all_numbers(tmp_path: Path) -> None:
    words = ["model.rank=1,2,4", "rate=tag(log, interval(1e-5,1e-1))", "task=b,c", "n=range(2,9)"]
    one, _ = search(tmp_path, *words, runs=12)
    middle = {"rate": pytest.approx(1e-3), "n": 5}
    assert one.first_params() == [
        {"model.rank": rank, "task": task, **middle}
        for rank, task in (("1", "b"), ("2", "c"), ("4", "b"))
    ]
    few, _ = search(tmp_path, "model.rank=1,2,4,8", "scale=interval(1,3)", runs=4)
    assert few.first_params() == [{"model.rank": rank, "scale": 2.0} for rank in ("1", "2")]


@pytest.mark.slow
@pytest.mark.nightly  # Gaussian processes of 12 runs, as below
def test_the_neighbours_of_a_setting_that_failed_are_not_asked_for_again_and_again(
    tmp_path: Path,
) -> None:
    one, _ = search(tmp_path, "rate=tag(log, interval(1e-6,1))", runs=12, objectives=["quality"])
    rates = []

    def run(given: Sequence[Overrides]) -> list[Mapping[str, Any] | str]:
        (words,) = given
        rates.append(float(dict(word.partition("=")[::2] for word in words)["rate"]))
        return ["diverged"] if rates[-1] > 1e-3 else [outcome(8, rates[-1] / 1e3)]

    one.run = run
    one.go_on(tmp_path)
    assert sum(rate > 1e-3 for rate in rates) <= 6 and one.front


def test_values_lie_in_the_space(tmp_path: Path) -> None:
    words = ["model.rank=range(1,9)", "rate=tag(log, interval(1e-5,1e-1))"]
    _, runs = one = search(tmp_path, *words, runs=5)  # the fifth is chosen by a model
    one[0].go_on(tmp_path)
    for asked in runs.asked:
        values = dict(word.partition("=")[::2] for word in asked)
        assert 1 <= int(values["model.rank"]) <= 8 and 1e-5 <= float(values["rate"]) <= 1e-1
        assert asked[0] == "+exp=x"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=1,2", "model.rank=1,2"], "hydra.sweeper.seeds"),
        (["seed=a", "model.rank=1,2"], "the first seed"),
        (["model.rank=1"], "no setting varies"),
        (["rate=range(0.1,0.9,0.1)"], "whole numbers"),
    ],
)
def test_what_cannot_be_searched_is_said(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SearchSpace.of(words)


def test_objectives_are_of_the_run_and_less_is_better() -> None:
    summary = {
        "quality": {"bleu": 30.0},
        "step_time_s": {"median": 0.5},
        "wan_bytes_per_step": {"forward": 100, "backward": 20, "control": None},
    }
    assert objectives_of(summary, ["quality", "bytes", "step_time"]) == [-30.0, 120.0, 0.5]
    assert main_score({"quality": {"perplexity": 8.5}}) == 8.5
    assert main_score({"quality": {}}) is None
    assert objectives_of({**summary, "bytes_per_token": {"total": 7.0}}, ["bytes"]) == [7.0]


@pytest.mark.parametrize(
    ("bounds", "step_s", "said"),
    [
        ({"max_step_s": 2.0}, 2.0, None),
        ({"max_step_s": 2.0}, 3.0, "planned step 3.00 s, allowed 2.00 s (max_step_s)"),
        ({"max_memory_mb": 3.0}, 9.0, None),
        ({"max_memory_mb": 2.5}, 9.0, "planned memory 3.00 MB in cloud_b, allowed 2.50 MB"),
        ({}, 9.0, None),
    ],
)
def test_a_setting_that_breaks_a_bound_by_its_plan_is_refused_before_it_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    bounds: dict[str, float],
    step_s: float,
    said: str | None,
) -> None:
    own = SimpleNamespace(step_s=step_s, memory={"cloud_a": 1e6, "cloud_b": 3e6})
    planned: list[Any] = []

    class Planner:
        def __init__(self, settings: Any) -> None:
            planned.append(settings.job.plan)

        def profile(self) -> tuple[str, str]:
            return "profile", "of whom"

        def report(self, *profile: str) -> Any:
            assert profile == ("profile", "of whom")
            return SimpleNamespace(ranked=SimpleNamespace(own=own))

    monkeypatch.setattr("xcloud.planner.planning.Planner", Planner)
    one, runs = search(tmp_path, "model.rank=1,2", runs=2, **bounds)
    one.compose = lambda words: looked_up(compose([]))
    assert one.go_on(tmp_path) == 2 and len(runs.asked) == (2 if said is None else 0)
    assert len(planned) == 2 * bool(bounds) and not any(plan.search for plan in planned)
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("refused")]
    expected = [] if said is None else [
        f"refused before it runs: model.rank={rank}: {said}" for rank in (1, 2)
    ]  # fmt: skip
    assert sorted(shown) == expected


def test_what_was_tried_and_what_is_in_front_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of five settings one diverged and one gave no score; one is worse than another in all."""
    found: dict[str, Mapping[str, Any] | str] = {
        "1": {"quality": {"bleu": 10.0}, "wan_bytes_per_step": {"forward": 2, "backward": None}},
        "2": {"quality": {"bleu": 20.0}, "bytes_per_token": {"total": 12345.0}},
        "4": {"quality": {"bleu": 20.0}, "bytes_per_token": {"total": 12346.0}},
        "8": "diverged",
        "16": {"quality": {}, "bytes_per_token": {"total": 1.0}},
    }
    one, _ = search(tmp_path, f"model.rank={','.join(found)}", runs=9)
    one.batch = 5
    calls: list[int] = []

    def run(given: Sequence[Overrides]) -> list[Mapping[str, Any] | str]:
        calls.append(len(given))
        return [found[words[1].removeprefix("model.rank=")] for words in given]

    one.run = run
    assert one.go_on(tmp_path) == 5 and calls == [5]
    assert one.front == [{"model.rank": "1"}, {"model.rank": "2"}]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5:] == [
        "counts as failed: model.rank=16: the run has no quality",
        "search: 5 of 9 settings tried; in front:",
        "  model.rank=2: quality 20, 1.234e+04 bytes",
        "  model.rank=1: quality 10, 2 bytes",
        "search: every setting of the space has been tried",
    ]
    assert lines[-6] == "counts as failed: model.rank=8: diverged"


@pytest.mark.parametrize(("batch", "calls"), [(1, [2, 2, 2]), (2, [4, 2]), (8, [6])])
def test_a_batch_runs_at_once_with_all_its_seeds_and_no_more_than_was_asked_for(
    tmp_path: Path, batch: int, calls: list[int]
) -> None:
    one, runs = search(tmp_path, "model.rank=1,2,4,8", runs=3, seeds=2)
    seen: list[int] = []

    def run(given: Sequence[Overrides]) -> list[Mapping[str, Any] | str]:
        seen.append(len(given))
        return runs(given)

    one.run, one.batch = run, batch
    assert one.go_on(tmp_path) == 3 and seen == calls
    assert len({words[1] for words in runs.asked}) == 3


def test_seeds_of_a_setting_count_by_their_mean(tmp_path: Path) -> None:
    one, _ = search(tmp_path, "model.rank=1,2", runs=2, seeds=2, objectives=["step_time"])
    seconds = {"1": {1: 1.0, 2: 9.0}, "2": {1: 4.0, 2: 4.0}}

    def run(given: Sequence[Overrides]) -> list[Mapping[str, Any] | str]:
        return [
            {"step_time_s": {"median": seconds[rank.partition("=")[2]][int(seed[-1])]}}
            for _, rank, seed in given
        ]

    one.run = run
    one.go_on(tmp_path)
    assert one.front == [{"model.rank": "2"}], "4 s and 4 s are less than 1 s and 9 s"


def test_the_sampler_is_told_factors_and_nothing_that_hides_the_rest(tmp_path: Path) -> None:
    """A diverged run's loss counts as six times as far from the middle as the best, and what
    failed as the worst; of bytes and seconds logarithms count."""
    names = ["quality", "bytes", "step_time"]
    one, _ = search(tmp_path, "model.rank=1,2,4,8", objectives=names)
    results = [[-30.0, 10.0, 0.1], [-20.0, 1000.0, 1.0], [1e6, 0.0, 1e9], None]
    told = one.as_sampled([Tried({}, each) for each in results])
    log = math.log
    assert told == [
        [-30.0, log(10), log(0.1)],
        [-20.0, log(1000), 0.0],
        [40.0, log(1e-9), pytest.approx(6 * log(10))],
        [40.0, log(1000), pytest.approx(6 * log(10))],
    ]
    assert one.as_sampled([Tried({}, None)]) == [[0.0, log(1e-9), log(1e-9)]]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_at_equal_runs_a_search_finds_a_front_as_good_as_the_grids(
    tmp_path: Path, seed: int
) -> None:
    ranks = ["4", "16", "64"]
    words = [f"model.rank={','.join(ranks)}", "rate=tag(log, interval(1e-5,1e-1))"]
    one, runs = search(tmp_path, *words, runs=12, sampler_seed=seed)
    one.go_on(tmp_path)

    def values(rank: float, rate: float) -> tuple[float, float]:
        quality, num_bytes = objectives_of(outcome(rank, rate), ["quality", "bytes"])
        return num_bytes, quality

    asked = [dict(word.partition("=")[::2] for word in point) for point in runs.asked]
    mine = [values(float(point["model.rank"]), float(point["rate"])) for point in asked]
    grid = [values(float(r), rate) for r in ranks for rate in (1e-5, 10**-3.67, 10**-2.33, 1e-1)]
    corner = (140.0, 0.0)
    assert area(mine, corner) >= area(grid, corner)


def test_a_point_of_another_search_is_not_told(tmp_path: Path) -> None:
    space = SearchSpace.of(["+exp=x", "model.rank=1,2"])
    assert space.read(["+exp=x", "model.rank=2", "seed=3"]) == {"model.rank": "2"}
    assert space.read(["+exp=x", "model.rank=3", "seed=3"]) is None
    assert space.read(["+exp=y", "model.rank=2", "seed=3"]) is None
    assert space.read(["+exp=x", "seed=3"]) is None
    assert space.read(["+exp=x", "+model.rank=2", "seed=3", "sweep=s"]) == {"model.rank": "2"}
    numbers = ["+exp=x", "n=range(2,9,3)", "rate=tag(log, interval(1e-5,1e-1))", "seed=4"]
    space = SearchSpace.of([*numbers, "sweep=s"])
    assert space.first_seed == 4 and space.shared == ("+exp=x", "sweep=s")
    assert space.words({"n": "5", "rate": "0.1"}, seed=6) == (
        "+exp=x", "sweep=s", "n=5", "rate=0.1", "seed=6",
    )  # fmt: skip
    for n, rate, found in (
        ("8", "0.1", {"n": 8, "rate": 0.1}),
        ("2", "1e-05", {"n": 2, "rate": 1e-5}),
        ("1", "0.1", None),
        ("9", "0.1", None),
        ("x", "0.1", None),
        ("5", "0.2", None),
    ):
        assert space.read(["+exp=x", f"n={n}", f"rate={rate}"]) == found
    steps = SearchSpace.of(["n=range(2,9,3)", "m=tag(log, range(1,9,3))"]).varied
    assert (steps["n"].low, steps["n"].high, steps["n"].step, steps["n"].log) == (2, 8, 3, False)
    assert (steps["m"].low, steps["m"].high, steps["m"].step, steps["m"].log) == (1, 8, 1, True)


def test_a_space_of_choices_and_whole_numbers_is_listed_whole() -> None:
    varied = SearchSpace.of(["n=range(2,9,3)", "x=a,b"]).varied
    assert [*_all_of(varied)] == [{"n": n, "x": x} for n in (2, 5, 8) for x in ("a", "b")]
    assert _all_of(SearchSpace.of(["n=range(1,10001)"]).varied)[-1] == {"n": 10_000}
    for words in (["n=range(1,10002)"], ["x=a,b", "n=range(1,5002)"], ["x=interval(0,1)"]):
        assert _all_of(SearchSpace.of(words).varied) == []


@pytest.mark.parametrize("word", ["n=range(0.5,3,1)", "n=range(0,3.5,1)", "n=range(0,3,0.5)"])
def test_each_number_of_a_range_is_whole(word: str) -> None:
    with pytest.raises(ConfigError, match="whole numbers"):
        SearchSpace.of([word])

"""A search over settings: what is asked for, told, refused and known from before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.search_against_grid import area
from tests.sweep_runs import compose
from xcloud.base.errors import ConfigError
from xcloud.record.summary import main_score, write_summary
from xcloud.study.points import STATE_FILE, Overrides
from xcloud.study.search import Search, SearchSettings, SearchSpace, objectives_of

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
    assert one._first() == [
        {"model.rank": rank, "task": task, **middle}
        for rank, task in (("1", "b"), ("2", "c"), ("4", "b"))
    ]
    few, _ = search(tmp_path, "model.rank=1,2,4,8", "scale=interval(1,3)", runs=4)
    assert few._first() == [{"model.rank": rank, "scale": 2.0} for rank in ("1", "2")]


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
    _, runs = one = search(tmp_path, *words, runs=6)
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


def test_a_setting_that_breaks_a_bound_by_its_plan_is_refused_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, runs = search(tmp_path, "model.rank=1,2,4,8", runs=4)

    def refusal(words: Overrides) -> str | None:
        return "planned step 3 s" if "model.rank=8" in words else None

    monkeypatch.setattr(one, "_refusal", refusal)
    one.go_on(tmp_path)
    assert len(runs.asked) == 3
    assert "refused before it runs: model.rank=8: planned step 3 s" in capsys.readouterr().out


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

"""Hydra's door to a sweep: what it hands on to the sweep, and what becomes of each point."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra_plugins.xcloud_launcher as door
import pytest
from hydra.core.utils import JobStatus
from hydra_plugins.xcloud_launcher import SearchSweeper, SweepLauncher, sweep_name
from omegaconf import OmegaConf

from xcloud.base.errors import RunFailed
from xcloud.study import report, search
from xcloud.study.runner import INTERRUPTED, REFUSED, SOME_FAILED, LauncherSettings, Sweep

POINTS = [("seed=1",), ("seed=2",)]


def summary_of(words: tuple[str, ...]) -> dict[str, Any]:
    if words == ("seed=2",):
        raise RunFailed("p2 died")
    return {"quality": {"perplexity": 8.5}}


def launcher_of(folder: Path, sweeper: str = "x.Y", **given: Any) -> SweepLauncher:
    launcher = door.SweepLauncher(**given)  # Hydra may have executed the module again
    hydra = {"sweep": {"dir": str(folder)}, "sweeper": {"_target_": sweeper},
             "hydra_logging": {}, "verbose": False}  # fmt: skip
    launcher.config = OmegaConf.create({"sweep": None, "hydra": hydra})
    launcher.settings = LauncherSettings(**launcher.given)
    return launcher


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("code", [0, SOME_FAILED, INTERRUPTED])
def test_our_sweeper_ends_with_the_sweep_s_code_and_another_is_told_of_each_point(
    is_ours: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "setup_globals", lambda: None)
    monkeypatch.setattr(door, "configure_log", lambda *given: None)
    asked: list[Any] = []
    launcher = launcher_of(tmp_path, f"{door.__name__}.SweepSweeper" if is_ours else "x.Y")

    def run_points(given: Any, drops_invalid: bool) -> tuple[Any, int]:
        asked.append((given, drops_invalid))
        return SimpleNamespace(summary_of=summary_of), code

    monkeypatch.setattr(launcher, "run_points", run_points)
    words = [["++seed=1"], ["seed=2"]]
    if is_ours and code:
        with pytest.raises(SystemExit) as ended:
            launcher.launch(words, 0)
        assert ended.value.code == code
    elif code == INTERRUPTED:
        with pytest.raises(KeyboardInterrupt):
            launcher.launch(words, 0)
    else:
        first, second = launcher.launch(words, 0)
        assert (first.status, first.return_value) == (JobStatus.COMPLETED, 8.5)
        assert second.status is JobStatus.FAILED and second.overrides == ("seed=2",)
        assert str(second._return_value) == "p2 died"
    assert asked == [(POINTS, not is_ours)]


def test_a_search_gets_the_figures_of_each_point_or_why_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    codes = [0, INTERRUPTED]

    def run(sweep: Sweep, points: Any, composer: object) -> int:
        ran.append((sweep, points))
        return codes.pop(0)

    monkeypatch.setattr(Sweep, "run", run)
    monkeypatch.setattr(Sweep, "summary_of", lambda sweep, words: summary_of(words))
    monkeypatch.setattr(door.SweepLauncher, "composer", None)
    also = {"compression": "none"}
    launcher = launcher_of(tmp_path / "mine", also=also, parallel=2)
    assert launcher.outcomes([]) == [] and ran == []
    assert launcher.outcomes(POINTS) == [{"quality": {"perplexity": 8.5}}, "p2 died"]
    [(sweep, points)] = ran
    assert (sweep.name, sweep.folder) == ("mine", tmp_path / "mine")
    assert sweep.drops_invalid and not sweep.closes and sweep.settings is launcher.settings
    assert points == [*POINTS, *((*words, "compression=none") for words in POINTS)]
    with pytest.raises(KeyboardInterrupt):
        launcher.outcomes(POINTS)


def test_the_table_of_a_search_is_printed_once_something_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(
        report, "close_sweep", lambda folder, tracker: closed.append((folder, tracker))
    )
    launcher = launcher_of(tmp_path)
    launcher.close()
    launcher.last = SimpleNamespace(tracker=None)  # type: ignore[assignment]
    launcher.close()
    assert closed == []
    launcher.last = SimpleNamespace(tracker="it")  # type: ignore[assignment]
    launcher.close()
    assert closed == [(tmp_path, "it")]


def test_a_sweep_without_a_name_is_named_by_its_time() -> None:
    assert sweep_name("mine") == "mine"
    made = sweep_name(None)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-\d{3}", made)


def test_a_search_is_told_its_settings_as_they_stand_in_the_config() -> None:
    search = SearchSweeper(params={"a": "1"}, objectives=("bytes",), runs=3)
    assert search.params == {"a": "1"} and search.given == {"objectives": ["bytes"], "runs": 3}


@pytest.mark.parametrize("ends", [None, KeyboardInterrupt(), RunFailed("p1 died")])
def test_a_search_runs_by_our_launcher_alone_and_ends_as_a_sweep_does(
    ends: BaseException | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(search.SearchSpace, "of", lambda words: asked.append(words))

    class Found:
        def __init__(self, **given: Any) -> None:
            asked.append(given)

        def go_on(self, folder: Path) -> None:
            asked.append(folder)
            if ends is not None:
                raise ends

    monkeypatch.setattr(search, "Search", Found)
    launcher = launcher_of(tmp_path, parallel=5)
    launcher.composer = "composer"  # type: ignore[assignment]
    monkeypatch.setattr(launcher, "close", lambda: asked.append("closed"))
    made = SimpleNamespace(instantiate_launcher=lambda **given: launcher)
    monkeypatch.setattr(door, "Plugins", SimpleNamespace(instance=lambda: made))
    sweeper = door.SearchSweeper(params={"a": "1,2"}, runs=3, seeds=2, objectives=["bytes"])
    sweeper.setup(hydra_context=None, task_function=None, config=OmegaConf.create())  # type: ignore[arg-type]
    if ends is None:
        sweeper.sweep(["++b=3", "c=4"])
    else:
        with pytest.raises(SystemExit) as ended:
            sweeper.sweep(["++b=3", "c=4"])
        assert ended.value.code == (
            INTERRUPTED if isinstance(ends, KeyboardInterrupt) else REFUSED
        )
    words, given, *rest = asked
    assert words == ["a=1,2", "b=3", "c=4"]
    assert given["settings"] == search.SearchSettings(runs=3, objectives=["bytes"], seeds=2)
    assert given["batch"] == 2 and given["run"] == launcher.outcomes
    assert given["compose"] == "composer"
    assert rest == [tmp_path] + ["closed"] * (ends is None)

    sweeper.launcher = object()  # type: ignore[assignment]
    with pytest.raises(SystemExit):
        sweeper.sweep([])
    assert "runs with hydra/launcher=xcloud only" in capsys.readouterr().err


def test_a_sweep_that_cannot_be_is_refused_before_hydra_makes_its_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, given in (("a/b", {}), (None, {"parallel": 0})):
        with pytest.raises(SystemExit) as ended:
            launcher = door.SweepLauncher(**given)
            launcher.setup(
                hydra_context=None, task_function=None, config=OmegaConf.create({"sweep": name})
            )  # type: ignore[arg-type]
        assert ended.value.code == REFUSED
    first, second = capsys.readouterr().err.splitlines()
    assert "a/b" in first and "parallel" in second


@pytest.mark.parametrize("is_ours", [True, False])
def test_points_that_do_not_belong_together_are_checked_by_our_launcher_alone(
    is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeper = door.SweepSweeper()
    checked: list[Any] = []
    monkeypatch.setattr(
        door.BasicSweeper, "validate_batch_is_legal", lambda self, batch: checked.append(batch)
    )
    sweeper.launcher = door.SweepLauncher() if is_ours else object()  # type: ignore[assignment]
    sweeper.validate_batch_is_legal([["a=1"]])
    assert checked == ([] if is_ours else [[["a=1"]]]) and sweeper.max_batch_size is None

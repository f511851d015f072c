"""The factor by which work takes longer in a run: given, found by a trial, kept, or not known."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.plan_pieces import COMPRESSORS, EIGHT, codec
from tests.toy import toy_config
from xcloud.base.errors import ConfigError, RunFailed
from xcloud.cluster.layout import Cloud
from xcloud.job import config as configs
from xcloud.launch.processes import RunStopped
from xcloud.plan.plans import NO_COMPRESSION, Arranged, Plan
from xcloud.plan.pricing import Pricer
from xcloud.plan.profile import (
    AveragingCodec,
    CompressorCosts,
    Profile,
    WorkFactor,
    profile_from,
    read_profile,
    stretched,
    write_profile,
)
from xcloud.plan.report import PLAN_FILE
from xcloud.plan.settings import Planning
from xcloud.planner import planning, profiling
from xcloud.planner import trial as plan_trial
from xcloud.planner.planning import planned

MEASURED_S = 0.4


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of each trial that is asked for; none runs, and each says that a step took
    MEASURED_S. Profiles are of two pieces of EIGHT, and the machine's speed never changes."""
    made: list[int] = []

    def measured_s(config: Any, job: Any, num_steps: int) -> float:
        made.append(num_steps)
        return MEASURED_S

    def measure(job: Any, candidates: Any, *_: Any) -> Profile:
        pieces = [replace(EIGHT.pieces[0], blocks=0), replace(EIGHT.pieces[7], blocks=0)]
        return Profile(pieces, {name: COMPRESSORS[NO_COMPRESSION] for name in candidates})

    monkeypatch.setattr(plan_trial, "measured_s", measured_s)
    monkeypatch.setattr(profiling, "measure", measure)
    monkeypatch.setattr(planning, "reference_s", lambda device, threads: 0.0)
    monkeypatch.setattr(planning, "write_plan_picture", lambda *_: False)
    return made


def toy(tmp_path: Path, *overrides: str) -> Any:
    config = OmegaConf.create(toy_config("two_clouds", ["plan=show", *overrides]))
    config.cache_dir = str(tmp_path / "cache")
    return config


def table_of(run_dir: Path) -> Any:
    return json.loads((run_dir / PLAN_FILE).read_text())


def test_a_trial_finds_the_factor_with_which_the_measured_step_is_foreseen_and_it_is_kept(
    tmp_path: Path, trials: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    config = toy(tmp_path)

    planned(config, tmp_path / "run")

    said, table = capsys.readouterr().out, table_of(tmp_path / "run")
    factor = table["work_factor"]
    assert trials == [10] and factor["source"] == "trial" and factor["num_ranks"] == 2
    assert table["own"]["predicted_step_time_s"] == pytest.approx(MEASURED_S)  # on a free line
    assert f"a step took 400 ms, {1000 * MEASURED_S / factor['value']:.0f} ms predicted" in said
    (file,) = (tmp_path / "cache" / "profiles").iterdir()
    assert read_profile(file).work_factor == WorkFactor(**factor)

    config.plan.trial_steps = 20
    planned(config, tmp_path / "again")
    assert trials == [10] and table_of(tmp_path / "again")["work_factor"] == factor
    assert factor["trial"] in capsys.readouterr().out

    config.cluster.clouds.cloud_a.num_ranks = 2  # more ranks share the machine
    planned(config, tmp_path / "wider")
    assert trials == [10, 20]


def test_a_profile_kept_before_there_were_trials_gets_one(
    tmp_path: Path, trials: list[int]
) -> None:
    config = toy(tmp_path)
    planned(config, tmp_path / "run")
    (file,) = (tmp_path / "cache" / "profiles").iterdir()
    table = json.loads(file.read_text())
    del table["work_factor"]
    file.write_text(json.dumps(table))

    planned(config, tmp_path / "again")

    assert trials == [10, 10]
    assert read_profile(file).work_factor is not None


def test_a_given_factor_wins_and_without_any_it_is_1(
    tmp_path: Path, trials: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    config = toy(tmp_path, "plan.trial_steps=0")
    planned(config, tmp_path / "none")
    said, none = capsys.readouterr().out, table_of(tmp_path / "none")
    assert "no trial: plan.trial_steps is 0" in said and none["work_factor"]["source"] == "none"
    config.plan.work_factor, config.plan.trial_steps = 1.5, 10
    planned(config, tmp_path / "given")

    given = table_of(tmp_path / "given")
    assert trials == [] and given["work_factor"]["value"] == 1.5
    assert "work factor 1.5 (plan.work_factor)" in capsys.readouterr().out
    before_s, after_s = (t["own"]["predicted_step_time_s"] for t in (none, given))
    assert after_s == pytest.approx(1.5 * before_s)


def test_a_file_tells_its_own_factor_and_makes_no_trial(
    tmp_path: Path, trials: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    config = toy(tmp_path, "plan.work_factor=1")
    planned(config, tmp_path / "run")
    (file,) = (tmp_path / "cache" / "profiles").iterdir()
    config.plan.profile, config.plan.work_factor = str(tmp_path / "mine.json"), None
    for kept, source in ((None, "none"), (WorkFactor(1.3, "trial", "elsewhere", 8), "file")):
        write_profile(tmp_path / "mine.json", replace(read_profile(file), work_factor=kept))
        planned(config, tmp_path / source)
        assert table_of(tmp_path / source)["work_factor"]["source"] == source
    assert trials == [] and table_of(tmp_path / "file")["work_factor"]["value"] == 1.3
    assert "no trial: plan.profile is a file" in capsys.readouterr().out


def test_what_no_trial_can_tell_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toy(tmp_path)
    job = configs.job_from_config(config)
    assert plan_trial.why_none(job, job.plan) == ""  # type: ignore[arg-type]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    clouds = {**job.cluster.clouds, "cloud_b": Cloud(device="cuda")}
    far = replace(job, cluster=replace(job.cluster, clouds=clouds))  # type: ignore[type-var]
    assert "no GPU" in plan_trial.why_none(far, job.plan)  # type: ignore[arg-type]

    assert plan_trial.unusual_because(WorkFactor(1.2, "trial")) == []
    assert plan_trial.unusual_because(WorkFactor(9.0, "given")) == []
    for value in (0.4, 3.2):
        (said,) = plan_trial.unusual_because(WorkFactor(value, "trial"))
        assert f"{value:g} times" in said and "more ranks than processors" in said


def test_the_prediction_of_a_trial_grows_with_the_factor_and_holds_no_line_or_merge(
    tmp_path: Path,
) -> None:
    costs = CompressorCosts("int4", [codec(1e6, 0.002)], AveragingCodec(10**6, 0.3, 0.2))
    profile = replace(EIGHT, compressors={"int4": costs}, around_changes_s=5.0)
    for strategy, ends in (("pipeline", (4, 8)), ("data_parallel", (8,)), ("local_updates", (8,))):
        config = toy(tmp_path, f"strategy={strategy}", "cluster/wan=line_8m")
        job, plan = configs.job_from_config(config), Plan(strategy, ends, 4, None, "int4")
        once_s = plan_trial.predicted_s(job, plan, profile)  # type: ignore[arg-type]
        twice_s = plan_trial.predicted_s(job, plan, stretched(profile, 2.0))  # type: ignore[arg-type]

        assert twice_s == pytest.approx(2 * once_s, rel=1e-6)
        arranged = {strategy: Arranged(job.strategy, job.cluster)}  # type: ignore[attr-defined]
        assert once_s < Pricer(profile, arranged, job.training.batch_size).step_s(plan)  # type: ignore[attr-defined]


def test_a_trial_is_the_job_without_lines_merges_and_first_phases(tmp_path: Path) -> None:
    config = toy(tmp_path, "strategy=streaming", "cluster/wan=line_8m", "training.batch_size=16")
    config.strategy.averaging.most_s = 3.0
    job = configs.job_from_config(config)

    found = configs.job_from_config(plan_trial.trial_config(config, job, 10))  # type: ignore[arg-type]

    local = found.strategy.averaging  # type: ignore[attr-defined]
    assert (local.every, local.fragments, local.overlap, local.most_s) == (10, 1, 0, None)
    assert found.plan is None and found.cluster.wan == "free" and found.max_steps == 10
    assert not found.checkpoint.are_made and found.training.batch_size == 16  # type: ignore[attr-defined]

    phased = toy(tmp_path, "compression=phased_example")
    whole = configs.job_from_config(phased)
    last = configs.job_from_config(plan_trial.trial_config(phased, whole, 10))  # type: ignore[arg-type]
    assert last.compression.label == "int4+int8"  # type: ignore[attr-defined]


def test_wrong_factors_and_trials_are_named() -> None:
    for steps in (-1, 3, 2.5):
        with pytest.raises(ConfigError, match=r"plan\.trial_steps"):
            Planning(trial_steps=steps)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"plan\.work_factor"):
        Planning(work_factor=0)
    piece = {"name": "a", "forward_s": [[1, 1]], "backward_s": [[1, 1]]}
    plain = {"pieces": [piece], "compressors": {"none": {"label": "none", "boundaries": []}}}
    assert profile_from(plain | {"work_factor": 1.2}).work_factor == WorkFactor(1.2, "file")
    for wrong in (0, {"value": 1, "found": 2}, "x"):
        with pytest.raises(ConfigError, match="work_factor"):
            profile_from(plain | {"work_factor": wrong})


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_a_trial_that_fails_leaves_its_logs_and_one_that_is_stopped_nothing(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy(tmp_path)
    job = configs.job_from_config(config)
    ends: list[BaseException] = [RunStopped("saved"), KeyboardInterrupt(), RunFailed("rank 0: no")]

    def run(config: Any, run_dir: Path, more_follows: bool) -> None:
        print("a progress line")
        (run_dir / "rank0.log").write_text("why")
        raise ends[0]

    monkeypatch.setattr(plan_trial, "run", run)
    while ends:
        with pytest.raises(type(ends[0])) as raised:
            plan_trial.measured_s(config, job, 10)  # type: ignore[arg-type]
        assert bool(list(temporary.glob("*/rank0.log"))) == isinstance(ends.pop(0), RunFailed)
    assert "rank 0: no; that was the trial run" in str(raised.value)


@pytest.mark.slow
def test_a_real_trial_says_what_a_step_took_and_leaves_nothing(
    tmp_path: Path, temporary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = toy(tmp_path, "cluster/wan=line_8m", "strategy=local_updates")
    config.model.step_s = 0.01

    took_s = plan_trial.measured_s(config, configs.job_from_config(config), 5)  # type: ignore[arg-type]

    assert took_s > 2 * 0.01  # each rank computes both stages
    assert not list(temporary.iterdir()) and capfd.readouterr().out == ""

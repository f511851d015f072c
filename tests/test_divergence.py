"""An update whose loss or gradient is not finite is made nowhere: the run stops or skips it."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.local_replicas import (
    DILOCO,
    MEAN,
    furthest,
    reference,
    replicas,
    run_together,
)
from tests.local_replicas import equal as equal_values
from tests.one_way_toy import cloud, feed_config
from tests.toy import toy_config
from tests.trainers import LAYOUTS, SKIP, Rank, ranks, spoil, update
from xcloud.base.errors import ConfigError, RunFailed, TrainingDiverged
from xcloud.contracts.model import StageOutput
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.features.replicas.merging import by_tensor
from xcloud.features.replicas.outer_optimizer import OuterParameters
from xcloud.job.config import Settings
from xcloud.launch.local import run
from xcloud.layout import ClusterLayout
from xcloud.pipeline.exchange import RankGroup
from xcloud.pipeline.hook import StepReport
from xcloud.pipeline.settings import Optimizer, Training


def state(job: list[Rank]) -> list[Any]:
    """Parameters and moments of all ranks."""
    found: list[Any] = []
    for rank in job:
        for stage, module in rank.trainer.pipeline.stages.items():
            optimizer = rank.trainer.stages[stage].trained.optimizer
            assert optimizer is not None
            moments = optimizer.state_dict()["state"]
            found.append(copy.deepcopy((module.state_dict(), moments)))
    return found


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_a_bad_gradient_of_one_stage_leaves_every_rank_as_it_was(
    layout: ClusterLayout, stage: int, clip_norm: float, value: float
) -> None:
    training = replace(SKIP, optimizer=Optimizer(0.1, 1, clip_norm=clip_norm))
    job = ranks(layout, training)
    update(job, 1)
    before = state(job)
    hook = spoil(job, stage, value)
    reports = update(job, 2)

    assert equal(state(job), before)
    assert all(isinstance(r, StepReport) and r.skipped and r.loss is None for r in reports)
    hook.remove()
    reports = update(job, 3)
    assert not equal(state(job), before)
    assert all(isinstance(r, StepReport) and r.skipped is None for r in reports)
    assert [r.loss for r in reports if isinstance(r, StepReport) and r.loss is not None]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_by_default_every_rank_stops_with_the_parameters_it_had(layout: ClusterLayout) -> None:
    job = ranks(layout, replace(SKIP, on_divergence="stop"))
    update(job, 1)
    before = state(job)
    spoil(job, 0, math.nan)
    errors = update(job, 2)

    assert equal(state(job), before)
    for error in errors:
        assert isinstance(error, str)
        assert error.startswith("the loss or gradient of step 2 is not finite")
        assert "training.on_divergence=skip" in error


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_a_bad_loss_with_good_gradients_is_no_update_either(clip_norm: float) -> None:
    training = replace(SKIP, optimizer=Optimizer(0.1, 1, clip_norm=clip_norm))
    job = ranks(LAYOUTS["three clouds"], training)
    last = job[2].trainer.pipeline.stages[2]
    forward = last.forward

    def spoilt(*arguments: Any) -> Any:
        output = forward(*arguments)
        return StageOutput(loss=output.loss + torch.nan)

    last.forward = spoilt  # type: ignore[method-assign]
    before = state(job)
    update(job, 1)

    assert equal(state(job), before)


@pytest.mark.parametrize("value", [1e20, -1e25])
def test_a_gradient_whose_square_overflows_is_no_update_unless_it_is_clipped(value: float) -> None:
    """Its second moment would be inf, and its value never move again."""
    for clip_norm, is_skipped in ((0.0, True), (1e20, True), (1.0, False)):
        training = replace(SKIP, optimizer=Optimizer(0.1, 1, clip_norm=clip_norm))
        job = ranks(LAYOUTS["lanes"], training)
        hook = spoil(job, 1, value)
        reports = update(job, 1)
        hook.remove()
        assert [bool(r.skipped) for r in reports if isinstance(r, StepReport)] == [is_skipped] * 5
        update(job, 2)
        moments = [m for _, some in state(job) for kept in some.values() for m in kept.values()]
        assert all(bool(moment.isfinite().all()) for moment in moments)


def test_skips_in_a_row_have_a_bound_and_a_good_update_starts_anew() -> None:
    training = replace(SKIP, max_skips_in_a_row=2)
    (rank,) = job = ranks(LAYOUTS["one process"], training)
    for step, is_bad in enumerate((True, True, False, True, True), 1):
        hook = spoil(job, 0, math.nan) if is_bad else None
        (report,) = update(job, step)
        assert isinstance(report, StepReport) and bool(report.skipped) == is_bad
        if hook is not None:
            hook.remove()
    assert report.skipped is not None and "2 in a row, at most 2" in report.skipped
    with pytest.raises(TrainingDiverged, match="max_skips_in_a_row is 2"):
        rank.trainer.guard.skip_update(6, "the loss")


@pytest.mark.parametrize(
    ("name", "value"), [("on_divergence", "ignore"), ("max_skips_in_a_row", 0)]
)
def test_nonsense_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"training.{name}"):
        Training(9, **{name: value})  # type: ignore[arg-type]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def bad_toy(*overrides: str) -> dict[str, Any]:
    """Two ranks a stage; in one of them one forward of the last stage is not finite."""
    two = {"_target_": "xcloud.layout.Cloud", "num_ranks": 2}
    clouds = {"_target_": "xcloud.layout.ClusterLayout", "clouds": {"a": two, "b": two}}
    config: dict[str, Any] = toy_config({**clouds, "wan": "free"}, list(overrides))
    config["model"].update(fail_stage=1, fail_step=5, fail_how="nan")
    config["training"]["optimizer"].update(clip_norm=0.0)
    return config


def test_a_replica_whose_parameters_are_not_finite_is_left_out_and_heals() -> None:
    """The others' merge is as if it had done nothing, and it takes that."""
    notes = list[str]()
    job = replicas(LocalUpdates(3, MEAN), 6)
    job[1].exchange._replicas.reporter.note = notes.append  # type: ignore[method-assign]
    run_together(job, 2)
    with torch.no_grad():
        next(job[1].module.parameters()).view(-1)[0] = math.nan
    run_together(job, 3, 3)

    expected = reference(1, [range(1, 4)], (1.0, 0.0, False), [1.0])
    assert furthest(job[0].values, expected) < 1e-6
    assert equal_values(job[0].values, job[1].values)
    assert notes == [
        "parameters were not finite at the merge of step 3: this replica goes back to the values "
        "of the merge before and counts for nothing in this one"
    ]


def test_a_merged_change_that_is_not_finite_moves_nothing() -> None:
    """Of a sum that overflowed, or of a peer that sends nonsense."""
    parameter = nn.Parameter(torch.ones(2))
    shares = by_tensor({"w": parameter.shape}, 1)
    values = OuterParameters({"w": parameter}, shares, RankGroup.alone(), DILOCO)
    values.move([torch.tensor([1.0, math.inf])])
    values.take()

    assert parameter.tolist() == [1.0, 1.0]
    assert values.velocity[0].tolist() == [0.0, 0.0]


@pytest.mark.slow
def test_a_skipped_update_is_told_counted_and_no_end(tmp_path: Path) -> None:
    summary = run(Settings.of(bad_toy("training.on_divergence=skip")), tmp_path)

    assert summary["status"] == "finished" and summary["num_steps"] == 8
    (skipped,) = events(tmp_path, "skipped_update")
    assert summary["num_skipped_updates"] == 1
    told = {e["step"] for e in events(tmp_path, "step") if "loss" in e}
    assert told == set(range(1, 9)) - {skipped["step"]}
    assert any("update skipped" in note["text"] for note in events(tmp_path, "note"))
    for file in (tmp_path / "model").glob("*.safetensors"):
        assert all(value.isfinite().all() for value in load_file(file).values())


@pytest.mark.slow
def test_a_run_that_stops_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"loss or gradient of step \d is not finite"):
        run(Settings.of(bad_toy()), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["clouds", "local"])
def test_one_way_jobs_skip_as_well(form: str, tmp_path: Path) -> None:
    config = feed_config(
        {
            "a": cloud(share=0.5),
            "b": cloud(share=0.5),
            "consumer": cloud(2 if form == "clouds" else 1),
        },
        form,
        model={"nan_at": 3},
        training={"on_divergence": "skip"},
    )
    summary = run(Settings.of(config), tmp_path)

    assert summary["status"] == "finished" and summary["num_skipped_updates"] == 1
    producers = summary["feed"]["producers"]
    assert [found["num_skipped_updates"] for found in producers.values()] == [1, 1]
    assert len({e["step"] for e in events(tmp_path, "step") if "loss" in e}) == 11
    for file in (tmp_path / "model").glob("*.safetensors"):
        assert all(value.isfinite().all() for value in load_file(file).values())


@pytest.mark.slow
def test_a_one_way_job_stops_by_default(tmp_path: Path) -> None:
    config = feed_config(
        {"a": cloud(share=1.0), "consumer": cloud()}, "local", model={"nan_at": 3}
    )
    with pytest.raises(RunFailed, match="batch 3 of producer 'a' is not finite"):
        run(Settings.of(config), tmp_path)

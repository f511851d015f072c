"""An update that is not finite is made nowhere, and leaves nothing in compression."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.local_replicas import (
    DILOCO,
    MEAN,
    furthest,
    reference,
    replicas,
    run_together,
)
from tests.local_replicas import equal as equal_values
from tests.nightly import each_once, first_daily
from tests.one_way_toy import cloud, feed_config
from tests.pipelines import TiedToy
from tests.toy import toy_config
from tests.trainers import LAYOUTS, SKIP, Rank, clouds, ranks, spoil, update
from xcloud.base.errors import ConfigError, RunFailed, TrainingDiverged
from xcloud.comm.compression import Compression
from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.low_rank import PowerSgd
from xcloud.comm.memory import DeltaCache, ErrorFeedback
from xcloud.comm.precision import BlockInt, Cast
from xcloud.comm.sparsify import TopK
from xcloud.contracts.model import StageOutput
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.features.replicas.merging import Median, by_tensor
from xcloud.features.replicas.outer_optimizer import OuterParameters
from xcloud.job.config import Settings
from xcloud.job.strategy import Strategy
from xcloud.launch.local import run
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline.exchange import RankGroup
from xcloud.pipeline.hook import StepReport
from xcloud.pipeline.schedule import GPipe
from xcloud.pipeline.settings import Optimizer, Training
from xcloud.pipeline.trainer import DivergenceGuard


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


@pytest.mark.parametrize(
    ("value", "clip_norm", "stage", "layout"),
    each_once([math.nan, math.inf], [0.0, 1.0], [0, 1, 2], [*LAYOUTS]),
)
def test_a_bad_gradient_of_one_stage_leaves_every_rank_as_it_was(
    layout: str, stage: int, clip_norm: float, value: float
) -> None:
    training = replace(SKIP, optimizer=Optimizer(0.1, 1, clip_norm=clip_norm))
    job = ranks(LAYOUTS[layout], training)
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


@pytest.mark.parametrize(
    ("skipped", "step", "advice"),
    [([], 1, False), ([1, 2], 3, False), ([], 2, True), ([1, 3], 4, True), ([2], 3, True)],
)
def test_no_lower_rate_is_advised_before_an_update_has_been_made(
    skipped: list[int], step: int, advice: bool
) -> None:
    """A checkpoint that holds a NaN diverges in the first step, whatever the rate."""
    guard = DivergenceGuard("skip", max_skips_in_a_row=len(skipped))
    for earlier in skipped:
        guard.skip_update(earlier, "the loss")
    guard.max_skips_in_a_row = 0 if step != guard.last_step + 1 else guard.num_in_a_row
    with pytest.raises(TrainingDiverged) as caught:
        guard.skip_update(step, "the loss")
    assert ("A lower learning_rate" in str(caught.value)) == advice
    assert ("it is not the learning rate" in str(caught.value)) == (not advice)


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
        assert "A lower learning_rate" in error


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


@pytest.mark.parametrize("value", first_daily([1e20, -1e25], count=1))
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
    values.move([torch.tensor([1.0, math.inf])], round_number=1)
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


@pytest.mark.nightly
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


SKIPPING = Training(
    40, batch_size=12, optimizer=Optimizer(0.01, 1, clip_norm=1.0), on_divergence="skip"
)
COMPRESSORS: list[Compressor] = [
    TopK(0.1), BlockInt(8), Chain(powersgd=PowerSgd(2), fp16=Cast("bfloat16"))
]  # fmt: skip
PIPELINE = ClusterLayout({"a": Cloud(), "b": Cloud(), "c": Cloud()})


def averaged(delay: Any = 0, merge: Any = None) -> tuple[ClusterLayout, dict[str, Any]]:
    strategy = Strategy("hybrid", 3, GradientAveraging(delay=delay, merge=merge))
    return clouds(6), {"strategy": strategy}


JOBS: dict[str, tuple[ClusterLayout, dict[str, Any]]] = {
    "two stages, three replicas": averaged(),
    "two stages, three replicas, robust": averaged(merge=Median()),
    "tied ends": (PIPELINE, {"toy": TiedToy}),
}


def job_of(name: str, compression: Compression) -> list[Rank]:
    layout, options = JOBS[name]
    return ranks(layout, SKIPPING, compression, GPipe(3), **options)


def explode(job: list[Rank], step: int) -> list[StepReport]:
    """An update whose last stage has an infinite gradient in every replica, and whose first an
    enormous one in one of them."""
    last = max(stage for rank in job for stage in rank.trainer.pipeline.stages)
    first = next(r.trainer.pipeline.stages[0] for r in job if 0 in r.trainer.pipeline.stages)
    holders = [rank for rank in job if last in rank.trainer.pipeline.stages]
    hooks = [spoil([rank], last, math.inf) for rank in holders]
    for parameter in first.parameters():
        hooks.append(parameter.register_hook(lambda gradient: gradient * 1e20))
    reports = update(job, step)
    for hook in hooks:
        hook.remove()
    assert all(isinstance(report, StepReport) for report in reports), reports
    return [report for report in reports if isinstance(report, StepReport)]


def remembered(job: list[Rank]) -> dict[tuple[int, str], Tensor]:
    """Of all ranks, residuals and what memories keep of samples."""
    wanted = ("residual", "before", "after", "ids", "counts", "rows")
    return {
        (rank.number, key): value.clone()
        for rank in job
        for key, value in rank.state_dict().items()
        if isinstance(value, Tensor) and any(part in key.split(".") for part in wanted)
    }


@pytest.mark.parametrize(("name", "compressor"), each_once([*JOBS], COMPRESSORS, count=2))
def test_a_skipped_update_leaves_all_residuals_as_they_were(
    name: str, compressor: Compressor
) -> None:
    """Of the stage that is not finite, of the others, and of tied ends."""
    job = job_of(name, Compression(averaging=compressor))
    for step in (1, 2):
        update(job, step)
    before = remembered(job)
    assert before and all(report.skipped for report in explode(job, 3))
    after = remembered(job)

    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], kept) for key, kept in before.items())
    update(job, 4)
    assert any(not torch.equal(kept, before[key]) for key, kept in remembered(job).items())


@pytest.mark.parametrize(
    ("merge", "compressor"), each_once([None, Median()], COMPRESSORS, count=1)
)
def test_no_later_message_carries_what_a_skipped_late_gradient_left_out(
    merge: Any, compressor: Compressor
) -> None:
    """The next gradient has been sent before all know that this one is skipped."""
    layout, options = averaged(delay=1, merge=merge)
    job = ranks(layout, SKIPPING, Compression(averaging=compressor), GPipe(3), **options)
    norms = []
    for step in range(1, 13):
        reports = explode(job, step) if step == 5 else update(job, step)
        (report, *_) = (r for r in reports if isinstance(r, StepReport))
        norms.append(math.inf if report.skipped else report.grad_norm or 0.0)

    assert [number for number, norm in enumerate(norms, 1) if norm == math.inf] == [6]
    assert max(norms[6:]) < 10 * max(norms[1:5])


@pytest.mark.slow
@pytest.mark.nightly
def test_late_gradients_lose_nothing_on_their_way() -> None:
    """What was meant is what arrived and what is kept, though feedback comes an update later."""
    layout, options = averaged(delay=1)
    still = Training(20, batch_size=12, optimizer=Optimizer(1e-12, 1))
    lossy = ranks(layout, still, Compression(averaging=TopK(0.1)), GPipe(3), **options)
    exact = ranks(layout, still, schedule=GPipe(3), **options)

    def gradients(job: list[Rank]) -> Tensor:
        (rank, *_) = job
        return torch.cat([buffer.gradients for buffer in rank.trainer.buffers.values()]).double()

    arrived = meant = torch.zeros(1, dtype=torch.float64)
    for step in range(1, 21):
        update(lossy, step)
        update(exact, step)
        arrived = arrived + gradients(lossy)
        meant = meant + gradients(exact)
    assert float((arrived - meant).norm()) < 0.5 * float(meant.norm())


@pytest.mark.parametrize(
    ("direction", "memory"),
    each_once(["forward", "backward"], [ErrorFeedback, DeltaCache], count=2),
)
def test_a_skipped_update_leaves_the_memories_of_boundaries_as_they_were(
    direction: str, memory: Any
) -> None:
    """At both ends: a sample's exploding gradient would be in its next message else."""
    lossy: dict[str, Any] = {direction: BlockInt(4), f"{direction}_memory": memory()}
    job = ranks(PIPELINE, SKIPPING, Compression(**lossy, averaging=Chain()))
    for step in range(1, 5):
        update(job, step)
    before = remembered(job)
    assert before and all(report.skipped for report in explode(job, 5))
    after = remembered(job)

    assert before.keys() == after.keys()
    by_sample = [_by_sample(found) for found in (before, after)]
    assert by_sample[0].keys() == by_sample[1].keys()
    assert all(torch.equal(by_sample[1][key], kept) for key, kept in by_sample[0].items())


def _by_sample(found: dict[tuple[int, str], Tensor]) -> dict[tuple[int, str, int], Tensor]:
    """Samples may stand in another order."""
    rows = {}
    for (rank, key), ids in found.items():
        if key.endswith(".ids"):
            place = key.removesuffix(".ids")
            pieces = found[rank, f"{place}.rows"].split(found[rank, f"{place}.counts"].tolist())
            for sample, piece in zip(ids.tolist(), pieces, strict=True):
                rows[rank, place, sample] = piece
    return rows

"""A trial run: what it tries, and that the costs of a job come back from its recorded steps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from benchmarks.paper_step import simulate
from tests import runs
from tests.feature_rows import feature_rows
from tests.plan_pieces import EIGHT
from tests.toy import ToyModel, ToyStage, toy_config
from xcloud.base.errors import ConfigError, RunFailed
from xcloud.comm.compression import Compression
from xcloud.feature_list import all_features
from xcloud.job import config as configs
from xcloud.job.strategy import Strategy
from xcloud.launch.processes import RunStopped
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.pipeline.schedule import GPipe
from xcloud.planner import trial as trials
from xcloud.planner.planning import Planner
from xcloud.planner.tour import StageMeter, Tour
from xcloud.planner.trial import TrialProgress, TrialRun
from xcloud.rank.reports import SavedTensors
from xcloud.record.events import StepTotals
from xcloud.record.timeline import Lane, Timeline
from xcloud.show.display import ProgressLine
from xcloud.simulator.costs import read_profile
from xcloud.simulator.measured import measured_costs
from xcloud.simulator.plan import NO_COMPRESSION

BLOCKS = 5


@dataclass(frozen=True)
class BlockModel(ToyModel):
    """May be cut after any of its blocks, of which nothing is computed."""

    blocks_per_stage: Sequence[int] | None = None

    def num_blocks(self, max_length: int) -> int:
        return BLOCKS

    def block_counts(self, num_stages: int, max_length: int) -> list[int]:
        given = self.blocks_per_stage
        if given is None:
            return [BLOCKS // num_stages] * (num_stages - 1) + [
                BLOCKS - BLOCKS // num_stages * (num_stages - 1)
            ]
        return [*given, BLOCKS - sum(given)]

    def with_block_counts(self, counts: Sequence[int]) -> BlockModel:
        return replace(self, blocks_per_stage=tuple(counts[:-1]))


def test_a_trial_says_how_far_it_is_and_nothing_else_of_its_run() -> None:
    shown = StringIO()
    display = ProgressLine(62, stream=TrialProgress(shown))
    display.note("cloud_a: step 3/9 left alone")
    for step in (1, 20):
        display._printed_at_s = -math.inf  # half a minute later
        display.update(StepTotals(step=step, step_s=4.5))
    display.close()
    lines = shown.getvalue().splitlines()
    assert lines == [
        "trial: 1 of 62 updates, 5 min left",
        "trial: 20 of 62 updates, 3 min left",
    ]


def toy(tmp_path: Path, *overrides: str, cluster: str = "two_clouds", few: bool = False) -> Any:
    config = OmegaConf.create(toy_config(cluster, ["plan=show", *overrides]))
    config.cache_dir = str(tmp_path / "cache")
    config.plan.trial_steps = 1
    if few:
        for name in ("eden2", "transform"):
            del config.plan.compressors[name]
    return config


def trial_of(config: Any) -> TrialRun:
    return Planner(configs.Settings.of(config)).trial


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs of the trials that ran."""
    return runs.trials_in_threads(monkeypatch)


# What is tried.


def test_a_trial_goes_through_sizes_zero_bubble_and_compressors(tmp_path: Path) -> None:
    trial = trial_of(toy(tmp_path, "schedule=gpipe", "cluster/wan=line_8m"))

    own = [shape for shape, name in trial.legs if name == NO_COMPRESSION]
    assert own == [
        *(GPipe(m) for m in (4, 1, 2, 3, 6, 8)), *(ZeroBubble(m) for m in (1, 4, 8)),
    ]  # fmt: skip
    others = [leg for leg in trial.legs if leg[1] != NO_COMPRESSION]
    names = {"int8", "int4", "eden2", "transform"}
    assert set(others) == {(GPipe(m), name) for m in (1, 8) for name in names}

    job: Any = trial.trial_settings.job
    tour = job.hooks["tour"]
    assert isinstance(tour, Tour) and job.schedules == trial.shapes
    choices = [*job.compression.choices]
    assert choices[0] == NO_COMPRESSION and len(choices) == 5
    for step, (shape, name) in enumerate(trial.legs, 1):
        chosen, compression = divmod(tour.leg(step), 5)
        assert (job.schedules[chosen], choices[compression]) == (shape, name)
    assert tour.leg(1 + len(trial.legs)) == tour.leg(1)
    assert job.max_steps == 3 * len(trial.legs) + 1, "the first turn warms up"


def test_a_trial_of_one_size_adds_others_that_one_pass_has_samples_for(tmp_path: Path) -> None:
    """Of 8 samples a step in two passes each pass has 4, so no pass is cut in eight."""
    for passes, sizes in ((1, [4, 2, 8]), (2, [4, 2])):
        more = ["schedule=gpipe", "plan.micro_batches=[4]", f"training.accumulate_steps={passes}"]
        config = toy(tmp_path, *more, few=True)
        trial = trial_of(config)
        own = [shape.num_micro_batches for shape in trial.shapes if isinstance(shape, GPipe)]
        assert (passes, own) == (passes, sizes)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_trial_is_the_job_without_lines_merges_and_first_phases(tmp_path: Path) -> None:
    config = toy(tmp_path, "strategy=streaming", "cluster/wan=line_8m", "training.batch_size=16")
    config.cluster.clouds.cloud_b.slowdown = 3.0

    found: Any = trial_of(config).trial_settings.job

    assert found.strategy == Strategy() and found.plan is None
    assert found.cluster.wan == ClusterLayout({"a": Cloud()}, "free").wan
    assert {cloud.slowdown for cloud in found.cluster.clouds.values()} == {1.0}
    assert not found.checkpoint.are_made and found.training.batch_size == 16
    phased = trial_of(toy(tmp_path, "compression=phased_example"))
    own = next(iter(phased.trial_settings.job.compression.choices.values()))  # type: ignore[attr-defined]
    assert own.label == "int4+int4" or own.label == "int4+int8"


def test_a_trial_on_a_machine_without_a_gpu_takes_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy(tmp_path)
    config.cluster.clouds.cloud_a.device = "cuda"
    config.cluster.clouds.cloud_b.device = "cpu"
    trial = trial_of(config)
    for has_gpu, device in ((False, "auto"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=has_gpu: there)
        clouds = replace(trial).layout.clouds
        assert [cloud.device for cloud in clouds.values()] == [device, "cpu"]


def test_weights_wait_in_no_trial_whose_job_forbids_it(tmp_path: Path) -> None:
    config = toy(tmp_path, "cluster.clouds.cloud_b.num_ranks=2")
    config.cluster.clouds.cloud_b.shard = True
    shapes = trial_of(config).shapes
    assert not any(isinstance(shape, ZeroBubble) for shape in shapes)
    assert min(shape.num_micro_batches for shape in shapes) == 2, "each rank has work"
    split = trial_of(toy(tmp_path, "schedule=zero_bubble"))
    assert split.shapes[0] == OneForwardOneBackward(4), "whole backwards are seen, too"


@pytest.mark.parametrize(
    ("clouds", "own", "cut"),
    [
        ({"a": Cloud(), "b": Cloud()}, [2, 3], [[3], [1, 1]]),
        ({"a": Cloud()}, [5], [[1, 4]]),
        ({"a": Cloud(2, [0, 1], one_stage_per_rank=True)}, [2, 3], None),
        ({n: Cloud() for n in "abcde"}, [1] * 5, None),
        ({"a": Cloud(1, [0, 2]), "b": Cloud(1, [1])}, [1, 1, 3], [[2], [1], [1, 1]]),
        ({n: Cloud() for n in "abcd"}, [1, 1, 1, 2], [[1], [1], [1], [1, 1]]),
    ],
)  # fmt: skip
def test_a_second_run_cuts_the_model_so_that_blocks_ends_and_calls_tell_apart(
    tmp_path: Path, clouds: dict[str, Cloud], own: list[int], cut: Any
) -> None:
    config = toy(tmp_path)
    job: Any = configs.Settings.of(config).job
    job = replace(job, plan=None, model=BlockModel())
    candidates = {"none": Compression(), "int4": Compression()}
    trial = TrialRun(config, job, ClusterLayout(clouds, "free"), candidates, [4], 80)

    assert trial.blocks == own and trial.layout.num_stages == len(own)
    assert len(trial.crossed()) == BLOCKS - 1, "a cut after each block but the last has costs"
    assert [found.parts for found in trial.others] == ([] if cut is None else [cut])
    for other in trial.others:
        assert sum(other.blocks) == BLOCKS == sum(own) and [*other.candidates] == ["none"]
        held = [len(cloud.stages or ()) for cloud in other.layout.clouds.values()]
        assert sum(held) == len(other.blocks) == len(own) + 1 and other.num_steps == 40


# What comes of it.


@pytest.mark.slow
@pytest.mark.nightly
def test_a_trial_of_blocks_makes_two_runs_and_reads_both(
    tmp_path: Path, in_threads: list[Any]
) -> None:
    config = toy(tmp_path, "plan.micro_batches=[2,4]", few=True)
    config.model = {"_target_": f"{__name__}.BlockModel", "blocks_per_stage": None}

    found = trial_of(config).measured()

    job, other = in_threads
    assert job.model.blocks_per_stage == [2] and other.model.blocks_per_stage == [3, 1]
    assert other.cluster.num_stages == 3 and len(other.compression.choices) == 1
    assert [piece.name for piece in found.pieces] == [f"block {i}" for i in range(BLOCKS)]
    assert all(p.forward_s.at(4.0) >= 0 <= p.backward_s.at(4.0) for p in found.pieces)
    first, last = found.pieces[0], found.pieces[-1]
    assert first.parameter_bytes == 4 * (16 * 12 + 12 * 12 + 12) == first.trained_bytes
    assert first.activation_bytes.at(8) > 0 < last.deferred_bytes.at(8)
    assert found.train_samples == 40 and found.other_bytes > 1e7
    assert 6.0 < found.tokens_per_sample <= 12.0, "of both sides, six each, some of them padding"
    none, int4 = (found.compressors[name].boundaries[0] for name in ("none", "int4"))
    assert none.forward.at(4).num_bytes > 3 * int4.forward.at(4).num_bytes > 0
    assert int4.backward is not None and int4.backward.at(4).compress_s > 0
    averaging = found.compressors["int8"].averaging
    assert averaging is not None
    # A toy stage's weights are not those of its blocks, so these are a fit.
    trained_bytes = sum(piece.trained_bytes for piece in found.pieces)
    assert averaging.num_bytes == pytest.approx(trained_bytes / 4, 0.1)


def test_a_profile_is_kept_for_whoever_would_try_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[TrialRun] = []
    monkeypatch.setattr(TrialRun, "measured", lambda trial: made.append(trial) or EIGHT)
    config = toy(tmp_path)

    first, again = (trial_of(config).profile() for _ in range(2))

    assert json.dumps(asdict(first)) == json.dumps(asdict(again)) and len(made) == 1
    assert "updates of the job over a free line" in capsys.readouterr().out
    config.plan.rows, config.cluster.wan = 3, "real"
    trial_of(config).profile()
    assert len(made) == 1, "what no trial holds makes no other"
    for key, value in (("training.batch_size", 16), ("seed", 7), ("model.dropout", 0.5)):
        number = len(made)
        OmegaConf.update(config, key, value)
        trial_of(config).profile()
        assert len(made) == number + 1, f"another {key} is another trial"


@pytest.mark.slow
@pytest.mark.nightly
def test_ranks_that_share_a_stage_are_read_together(tmp_path: Path, in_threads: list[Any]) -> None:
    config = toy(tmp_path, "plan.micro_batches=[2,4]", cluster="two_clouds_dp", few=True)

    first, last = trial_of(config).profile().pieces

    assert first.forward_s.at(2.0) > 0 and last.backward_s.at(4.0) > 0
    assert not any(config.cluster.clouds[name].get("replica", 0) for name in config.cluster.clouds)


def test_a_trial_leaves_the_job_of_one_cloud_with_a_price(
    tmp_path: Path, in_threads: list[Any]
) -> None:
    found = trial_of(
        toy(tmp_path, "plan.micro_batches=[2,4]", cluster="one_cloud", few=True)
    ).profile()

    assert found.pieces[0].backward_s.at(4.0) > 0
    (boundary,) = found.compressors["none"].boundaries or [None]
    assert boundary is None or boundary.forward.at(8.0).num_bytes == 0, "nothing crosses"


def test_a_trial_that_fails_leaves_its_logs_and_one_that_is_stopped_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    trial = trial_of(toy(tmp_path))
    ends: list[BaseException] = [RunStopped("saved"), KeyboardInterrupt(), RunFailed("rank 0: no")]

    def run(settings: configs.Settings, run_dir: Path, more_follows: bool) -> None:
        print("a progress line")
        (run_dir / "rank0.log").write_text("why")
        raise ends[0]

    monkeypatch.setattr(trials, "run", run)
    while ends:
        with pytest.raises(type(ends[0])) as raised:
            trial.measured()
        logs = list((tmp_path / "temporary").glob("*/rank0.log"))
        assert bool(logs) == isinstance(ends.pop(0), RunFailed)
    assert "rank 0: no; that was the trial run" in str(raised.value)
    assert "plan.profile=FILE" in str(raised.value)


def test_a_profile_of_another_release_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text(json.dumps(asdict(EIGHT) | {"work_factor": 1.2}))
    with pytest.raises(ConfigError, match=r"old.json: unknown setting 'profile.work_factor'"):
        read_profile(file)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_real_trial_of_processes_is_as_it_is_simulated_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    config = toy(tmp_path, "cluster/wan=line_8m", "plan.micro_batches=[2,4]", few=True)
    config.training.accumulate_steps = 2
    trial = trial_of(config)

    ranks = trial.recorded()

    assert not list((tmp_path / "temporary").iterdir())
    assert all(line.startswith("trial: ") for line in capfd.readouterr().out.splitlines())
    assert all(piece.backward_s.at(2.0) > 0 for piece in trial.read(ranks, []).pieces)
    seen = set()
    for leg, step in trial.timelines(ranks):
        schedule, _ = trial.legs[leg]
        seen.add(leg)
        found = simulate(
            schedule, trial.layout, measured_costs(step), agrees=True, num_passes=2, num_steps=3
        ).timeline
        for lane, predicted in zip(step.lanes, found.lanes, strict=True):
            assert names_of(lane) == names_of(predicted)
        assert messages(found) == messages(step)
    assert seen == {*range(len(trial.legs))}, "every leg is recorded"


def names_of(lane: Lane) -> list[str]:
    return [b.name for b in lane.boxes if b.what in ("forward", "backward", "weights")]


def messages(step: Timeline) -> list[tuple[object, ...]]:
    return sorted(
        (f.kind, f.sender, f.receiver, f.micro_batch, f.num_bytes)
        for some in step.flights.values()
        for f in some
        if f.kind in ("activation", "gradient")
    )


def test_stage_facts_count_what_layers_keep_for_weights_that_wait() -> None:
    stage = ToyStage(ToyModel(dropout=0.0), 1, 2)
    meter = StageMeter(stage)
    received = {"counts": torch.ones(4), "hidden": torch.randn(24, 12, requires_grad=True)}
    batch = {"ids": torch.arange(4), "target": torch.zeros(4, 6, dtype=torch.long)}
    with torch.no_grad():
        stage(received, batch)
    assert meter.facts["activation_bytes"] == 0, "an evaluation before training keeps nothing"
    stage(received, batch)

    assert meter.facts["deferred_bytes"] == 4 * 24 * (12 + 16) / 4, "input and output of a layer"
    saved_bytes = SavedTensors()
    with saved_bytes:
        kept = stage(received, batch)
    assert meter.facts["activation_bytes"] == saved_bytes.num_bytes / 4 > 0, kept
    before = dict(meter.facts)
    stage(received, {"ids": torch.arange(2), "target": torch.zeros(4, 6, dtype=torch.long)})
    assert meter.facts == before, "the first forward in training alone is counted"


def test_a_trial_runs_without_features_by_the_values_that_mean_none() -> None:
    found: dict[str, object] = {}
    for one in all_features():
        found |= one.left_out_of_trials
    rows = (rows.left_out_of_trials for rows in feature_rows().values())
    assert found == {key: value for own in rows for key, value in own.items()} != {}

"""Planning a job: from its settings to a profile, a table and the settings that are run."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests import as_written, runs
from tests.configs import composed
from tests.plan_pieces import COMPRESSORS, piece
from tests.toy import toy_config
from xcloud.base.errors import ConfigError
from xcloud.comm.compression import Compression
from xcloud.comm.compressor import Chain
from xcloud.comm.low_rank import Svd
from xcloud.job import config as configs
from xcloud.job import given
from xcloud.launch.local import run
from xcloud.net.frame import TensorSpec, encode_frame
from xcloud.net.link_profile import LinkProfile
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.pipeline.schedule import Action, GPipe, Schedule
from xcloud.planner import averaging_timer
from xcloud.planner.planning import Planner, planned
from xcloud.record.summary import read_summary
from xcloud.record.timeline import PLAN_FILE, read_predicted
from xcloud.simulator import codec_timer
from xcloud.simulator.costs import AveragingCodec, Direction, Profile, read_profile, write_profile
from xcloud.simulator.plan import Plan
from xcloud.simulator.pricing import Pricer


@pytest.fixture(autouse=True)
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs of the trials that ran."""
    return runs.trials_in_threads(monkeypatch)


def toy(tmp_path: Path, *overrides: str):  # type: ignore[no-untyped-def]
    """A job of two clouds, of which the profile is kept in tmp_path; with a short trial."""
    config = OmegaConf.create(toy_config("two_clouds", [*overrides]))
    config.plan.trial_steps, config.plan.micro_batches = 1, [2, 4]
    for name in ("eden2", "transform"):
        del config.plan.compressors[name]
    config.cache_dir = str(tmp_path / "cache")
    return config


@pytest.mark.usefixtures("pictures")
def test_show_makes_one_trial_prints_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tried: list[Any]
) -> None:
    config = toy(tmp_path, "plan=show", "cluster/wan=line_8m")
    config.cluster.wan.bandwidth_bits_per_s = 1e5

    assert planned(configs.Settings.of(config), tmp_path / "run") is None

    said = capsys.readouterr().out
    assert "updates of the job over a free line" in said and len(tried) == 1
    assert "int4         any bandwidth" in said or "bit/s" in said
    assert "best m = " in said and "by (2" not in said
    found = json.loads((tmp_path / "run" / PLAN_FILE).read_text())
    assert found["predicted_step_time_s"] is None and found["own"]["compression"] == "none"
    # Each cloud has a side of the texts, and a whole model reads both.
    assert {plan["strategy"] for plan in found["plans"]} == {"pipeline"}
    assert found["plans"][0]["touches_quality"] == ["compression"]
    assert set(found["not_planned"]) == {"data_parallel", "local_updates"}
    assert "texts that the other has not" in found["not_planned"]["local_updates"]
    assert (tmp_path / "run" / "plan.png").stat().st_size > 10_000

    assert planned(configs.Settings.of(config), tmp_path / "again") is None
    said = capsys.readouterr().out
    assert "trial of before" in said and "profile may not hold" not in said and len(tried) == 1


@pytest.mark.slow
@pytest.mark.nightly
def test_a_profile_of_something_else_is_named_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = toy(tmp_path, "plan=show")
    planned(configs.Settings.of(config), tmp_path / "run")
    (file,) = (tmp_path / "cache" / "profiles").iterdir()
    other = json.loads(file.read_text())
    other["of"]["torch"] = "0.1"
    other["pieces"][1]["forward_s"] = {"points": [[1, 100.0], [8, 800.0]]}
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(other))
    config.plan.profile = str(mine)
    capsys.readouterr()

    planned(configs.Settings.of(config), tmp_path / "run")

    assert "the profile may not hold: torch was '0.1'" in capsys.readouterr().out
    table = json.loads((tmp_path / "run" / PLAN_FILE).read_text())
    assert table["own"]["predicted_step_time_s"] > 800
    assert table["profile"]["stale"]
    (_, last) = read_profile(file).pieces
    assert 0 < last.weights_s.at(4) and last.deferred_bytes.at(4) > 0


@pytest.mark.slow
@pytest.mark.nightly
def test_apply_keeps_what_touches_quality_and_changes_the_rest(tmp_path: Path) -> None:
    config = toy(tmp_path, "plan=apply", "cluster/wan=line_8m", "compression=int8")

    chosen = planned(configs.Settings.of(config), tmp_path / "run").job

    table = json.loads((tmp_path / "run" / PLAN_FILE).read_text())
    foreseen = read_predicted(tmp_path / "run")
    assert foreseen is not None
    # A rank ends its step while the other one's last message is under way.
    assert foreseen.clocks == "predicted"
    assert 1e-6 * foreseen.until_us >= table["predicted_step_time_s"] - 1e-5
    assert chosen.plan is None
    assert chosen.compression.label == "int8+int8" and chosen.strategy.name == "pipeline"
    assert chosen.schedule.num_micro_batches == table["chosen"]["micro_batches"]
    assert table["predicted_step_time_s"] == table["plans"][0]["predicted_step_time_s"]


@pytest.mark.slow
@pytest.mark.nightly
def test_apply_takes_a_compressor_where_the_search_names_it(tmp_path: Path) -> None:
    config = toy(tmp_path, "plan=apply", "cluster/wan=line_8m")
    config.cluster.wan.bandwidth_bits_per_s = 1e4
    config.plan.search = ["compression"]

    chosen = planned(configs.Settings.of(config), tmp_path / "run").job

    assert chosen.compression.label == "int4+int4"
    assert chosen.schedule == configs.Settings.of(config).job.schedule


@pytest.mark.slow
@pytest.mark.nightly
def test_a_model_of_blocks_is_cut_where_both_clouds_work_equally(tmp_path: Path) -> None:
    """Without measuring: the costs come from a file."""
    config = composed("+exp=lora_clm", "plan=apply", "cluster/wan=free", "compression=none")
    model, length = configs.Settings.of(config).job.model, 16  # type: ignore[attr-defined]
    assert model.num_blocks(length) == 4 and model.block_counts(2, length) == [2, 2]
    assert model.with_block_counts([1, 3]).block_counts(2, length) == [1, 3]
    pieces = [piece(f"block {i}", forward_s=0.01) for i in range(3)]
    pieces.append(piece("block 3", forward_s=0.03, boundary=None))
    names = ("none", "int8", "int4", "eden2", "transform")
    costs = dict.fromkeys(names, COMPRESSORS["none"])
    write_profile(tmp_path / "mine.json", Profile(pieces, costs))
    config.plan.profile = str(tmp_path / "mine.json")

    chosen = planned(configs.Settings.of(config), tmp_path / "run")

    assert list(chosen.plain["model"]["blocks_per_stage"]) == [3]
    assert chosen.job.model.block_counts(2, length) == [3, 1]  # type: ignore[attr-defined]

    for profile, said in (
        (Profile([*pieces, piece("block 4", boundary=None)], costs), "pieces end at blocks"),
        (Profile(pieces, costs, lines={"cloud_a-cloud_c": LinkProfile(1e6)}), "cloud_c joins no"),
    ):
        write_profile(tmp_path / "mine.json", profile)
        with pytest.raises(ConfigError, match=said):
            planned(configs.Settings.of(config), tmp_path / "run")


STAGES = [replace(piece("front"), blocks=0), replace(piece("head", boundary=None), blocks=0)]


def planned_by_hand(*overrides: str) -> list[Plan]:
    """Those found for a toy job of two stages, with a profile that was written by hand."""
    given = ["plan=show", "cluster/wan=line_8m", *overrides]
    config = OmegaConf.create(toy_config("two_clouds", given))
    config.plan.search, config.plan.rows = ["micro_batches", "schedule"], 50
    profile = Profile(STAGES, dict.fromkeys(COMPRESSORS, COMPRESSORS["none"]))
    return [one.plan for one in Planner(configs.Settings.of(config)).report(profile).ranked.best]


def test_a_plan_of_a_written_profile_is_said_drawn_and_put_into_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = as_written.keep_figures(monkeypatch)
    config = OmegaConf.create(toy_config("two_clouds", ["plan=apply", "cluster/wan=line_8m"]))
    config.cluster.wan.bandwidth_bits_per_s = 1e6
    config.plan.rows, config.plan.search = 3, ["micro_batches", "schedule", "compression"]
    costs = {**dict.fromkeys(["none", "int8"], COMPRESSORS["none"]), "int4": COMPRESSORS["int4"]}
    config.plan.profile = str(tmp_path / "mine.json")
    write_profile(tmp_path / "mine.json", Profile(STAGES, costs))

    chosen = planned(configs.Settings.of(config), tmp_path / "run")
    assert chosen is not None and chosen.job.plan is None
    assert chosen.job.compression.label == "int4+int4" and chosen.job.strategy.name == "pipeline"
    said = capsys.readouterr().out.replace(str(tmp_path), "")
    said = re.sub(r"in \d+\.\d s;", "in 0 s;", said)
    said = re.sub(r"the profile may not hold: (?!the profile has)[^\n]*\n", "", said)
    table = json.loads((tmp_path / "run" / PLAN_FILE).read_text())
    table["profile"] = table["search_s"] = None
    foreseen = read_predicted(tmp_path / "run")
    assert foreseen is not None and foreseen.clocks == "predicted"
    found = {"said": said, "plan.json": table, "schedule": chosen.plain["schedule"], **kept}
    as_written.check("plan of a written profile", found)

    for pieces, lines, why in (
        (STAGES[:1] + STAGES, {}, "cannot be joined to 2 stages"),
        (STAGES, {"cloud_a-cloud_c": LinkProfile(1e6)}, "cloud_c joins no clouds"),
    ):
        write_profile(tmp_path / "mine.json", Profile(pieces, costs, lines=lines))
        with pytest.raises(ConfigError, match=why):
            planned(configs.Settings.of(config), tmp_path / "run")


def test_only_what_the_job_may_run_is_planned() -> None:
    sharded = ["cluster.clouds.cloud_b.num_ranks=2", "+cluster.clouds.cloud_b.shard=true"]
    assert {plan.micro_batches % 2 for plan in planned_by_hand(*sharded)} == {0}


def test_weights_are_not_put_off_where_the_job_forbids_it(tmp_path: Path) -> None:
    allowed = toy(tmp_path, "plan=show", "cluster.clouds.cloud_b.num_ranks=2")
    forbidden = allowed.copy()
    forbidden.cluster.clouds.cloud_b.shard = True

    kinds = [type(s) for s in Planner(configs.Settings.of(allowed)).schedules]
    assert kinds == [GPipe, OneForwardOneBackward, ZeroBubble]
    found = Planner(configs.Settings.of(forbidden))
    assert [type(s) for s in found.schedules] == kinds[:2]
    assert "puts off" in found.not_planned["schedule=zero_bubble"]


def test_an_average_is_measured_with_its_frame_as_the_links_make_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames = list[torch.Tensor]()

    def framed(*given: Any, **named: Any) -> torch.Tensor:
        frames.append(encode_frame(*given, **named))
        return frames[-1]

    monkeypatch.setattr(averaging_timer, "encode_frame", framed)
    trained = {"weight": torch.nn.Parameter(torch.zeros(4, 8))}

    found = averaging_timer.time_averaging(trained, Compression())

    assert found is not None and {len(frame) for frame in frames} == {found.num_bytes}


def test_an_average_of_nothing_costs_nothing_and_can_be_planned() -> None:
    """None would say that this compressor cannot average."""
    assert averaging_timer.time_averaging({}, Compression()) == AveragingCodec(0)


def test_a_codec_is_timed_on_a_whole_message_with_its_frame() -> None:
    few, many = (
        codec_timer.time_codec(
            Chain(svd=Svd(0.6)), [TensorSpec((rows, 8), torch.float32)], torch.device("cpu")
        )
        for rows in (6, 12)
    )
    assert few.compress_s > 0 and many.decompress_s > 0
    # Of 12 rows of 8 the factors have rank 5: 5 x (12 + 8) values in FP32.
    assert many.num_bytes - few.num_bytes == 4 * (5 * (12 + 8) - 4 * (6 + 8))
    assert many.times(0.5) == Direction(
        round(many.num_bytes / 2), many.compress_s / 2, many.decompress_s / 2
    )


def test_what_is_timed_beside_a_model_leaves_weights_threads_and_random_numbers_alone() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    trained = {"weight": torch.nn.Parameter(torch.full((4, 8), 0.3)),
               "bias": torch.nn.Parameter(torch.full((8,), -0.7))}  # fmt: skip

    found = averaging_timer.time_around_averaging(trained)

    assert min(found) > 0 and averaging_timer.time_around_averaging({}) == (0, 0)
    assert torch.equal(trained["weight"], torch.full((4, 8), 0.3))
    assert torch.equal(trained["bias"], torch.full((8,), -0.7))
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)


def test_without_a_plan_the_config_stays() -> None:
    config = composed("+exp=abnet_iwslt")

    settings = configs.Settings.of(config)
    assert settings.job.plan is None, "by which run.py asks no planner"
    assert "plan" not in settings.kept


@dataclass(frozen=True)
class InPairs(Schedule):
    """A schedule of one's own: two forwards, two backwards. A class and its settings are all."""

    num_micro_batches: int = 4

    @property
    def label(self) -> str:
        return f"in pairs m={self.num_micro_batches}"

    def actions(self, stage: int, num_stages: int) -> list[Action]:
        found: list[Action] = []
        for first in range(0, self.num_micro_batches, 2):
            pair = range(first, min(first + 2, self.num_micro_batches))
            found += [Action("forward", stage, i) for i in pair]
            found += [Action("backward", stage, i) for i in pair]
        return found


OWN = {"_target_": f"{InPairs.__module__}.InPairs", "num_micro_batches": 4}


@pytest.mark.slow
@pytest.mark.nightly
def test_a_schedule_of_ones_own_is_planned(tmp_path: Path, tried: list[Any]) -> None:
    config = toy(tmp_path, "plan=apply", "cluster/wan=line_8m")
    config.plan.schedules, config.plan.search = {"mine": OWN}, ["schedule"]
    config.schedule.num_micro_batches = 2

    chosen = planned(configs.Settings.of(config), tmp_path / "run").job

    assert tried[0].schedules[0] == GPipe(2)
    table = json.loads((tmp_path / "run" / PLAN_FILE).read_text())
    assert table["num_plans"] == 2, "GPipe, and the one that conf does not know"
    pricer = Pricer(read_profile(kept(tmp_path)), Planner(configs.Settings.of(config)).arranged, 8)
    steps = {s: pricer.step_s(Plan("pipeline", (1, 2), s, "none")) for s in (GPipe(2), InPairs(2))}
    best = min(steps.values())
    assert steps[chosen.schedule] == pytest.approx(best, rel=1e-9)
    assert table["predicted_step_time_s"] == pytest.approx(best)

    config.schedule = OWN  # and as the job's own it is in the trial
    config.plan.mode = "show"
    planned(configs.Settings.of(config), tmp_path / "again")
    assert tried[1].schedules[0] == InPairs(4)
    table = json.loads((tmp_path / "again" / PLAN_FILE).read_text())
    assert table["own"]["schedule"] == "in pairs"


def kept(tmp_path: Path) -> Path:
    """The profile of the one trial that was made."""
    (file,) = (tmp_path / "cache" / "profiles").iterdir()
    return file


def test_what_cannot_be_planned_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="split into stages"):
        planned(configs.Settings.of(composed("+exp=electra_multilingual", "plan=show")), tmp_path)
    with pytest.raises(ConfigError, match="leave -m out"):
        run(configs.Settings.of(toy(tmp_path, "plan=show")), tmp_path / "run")
    config = toy(tmp_path, "plan=show", "cluster/wan=real")
    with pytest.raises(ConfigError, match="real network from 'cloud_a' to 'cloud_b'"):
        planned(configs.Settings.of(config), tmp_path / "run")


@pytest.mark.nightly
@pytest.mark.slow
def test_the_plan_that_is_applied_is_the_one_that_runs(tmp_path: Path) -> None:
    config = toy(tmp_path, "plan=apply", "cluster/wan=line_8m")

    run(planned(configs.Settings.of(config), tmp_path / "run"), tmp_path / "run")

    summary, table = (
        read_summary(tmp_path / "run"), json.loads((tmp_path / "run" / PLAN_FILE).read_text())
    )  # fmt: skip
    assert summary["status"] == "finished"
    assert summary["predicted_step_time_s"] == pytest.approx(
        table["predicted_step_time_s"], abs=1e-6
    )
    job = given.read_settings(tmp_path / "run" / configs.EXPERIMENT_FILE).job
    assert job.schedule.num_micro_batches == table["chosen"]["micro_batches"]  # type: ignore[attr-defined]

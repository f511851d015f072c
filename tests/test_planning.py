"""Planning a job: from its settings to a profile, a table and the settings that are run."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.configs import composed
from tests.plan_pieces import COMPRESSORS, piece
from tests.toy import ToyStage, toy_config
from xcloud.base.errors import ConfigError
from xcloud.cluster.frame import encode_frame
from xcloud.comm.boundary import Boundary, BoundaryField, Message
from xcloud.comm.chain import Chain
from xcloud.comm.compression import Compression
from xcloud.comm.low_rank import Svd
from xcloud.comm.precision import BlockInt
from xcloud.contracts.model import Batch, StageOutput
from xcloud.job import config as configs
from xcloud.launch.local import run
from xcloud.parallel.schedule import GPipe
from xcloud.plan.profile import Profile, read_profile, write_profile
from xcloud.plan.recorded import PREDICTED_FILE, read_timeline
from xcloud.plan.report import PLAN_FILE
from xcloud.plan.stopwatch import MOST_TIMES, Stopwatch
from xcloud.planner import codec_profiling, planning, profiling, reference
from xcloud.planner.planning import Planner, planned
from xcloud.planner.profiling import BUDGET_S
from xcloud.record.summary import read_summary


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What the machine's reference takes, in place of measuring it."""
    now = {"reference_s": 0.01}
    for module in (planning, profiling):
        monkeypatch.setattr(module, "reference_s", lambda device, threads: now["reference_s"])
    return now


def toy(tmp_path: Path, *overrides: str):  # type: ignore[no-untyped-def]
    """A job of two clouds, of which the profile is kept in tmp_path; without a trial."""
    config = OmegaConf.create(toy_config("two_clouds", [*overrides]))
    config.plan.trial_steps = 0
    config.cache_dir = str(tmp_path / "cache")
    return config


def test_show_measures_once_tells_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steady: dict[str, float]
) -> None:
    config = toy(tmp_path, "plan=show", "cluster/wan=line_8m")
    config.cluster.wan.bandwidth_bits_per_s = 1e5

    assert planned(config, tmp_path / "run") is None

    said = capsys.readouterr().out
    assert "measuring 2 stages of toy model" in said
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

    assert planned(config, tmp_path / "again") is None
    said = capsys.readouterr().out
    assert "measuring" not in said and "profile may not hold" not in said

    steady["reference_s"] = 0.0125
    assert planned(config, tmp_path / "later") is None
    assert "this machine now takes 1.25 times as long" in capsys.readouterr().out
    table = json.loads((tmp_path / "later" / PLAN_FILE).read_text())
    assert len(table["profile"]["stale"]) == 1 and "max_age_days=0" in table["profile"]["stale"][0]


def test_a_profile_of_something_else_is_named_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = toy(tmp_path, "plan=show")
    planned(config, tmp_path / "run")
    (file,) = (tmp_path / "cache" / "profiles").iterdir()
    other = json.loads(file.read_text())
    other["of"]["torch"] = "0.1"
    other["pieces"][1]["forward_s"] = {"points": [[1, 100.0], [8, 800.0]]}
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(other))
    config.plan.profile = str(mine)
    capsys.readouterr()

    planned(config, tmp_path / "run")

    assert "the profile may not hold: torch was '0.1'" in capsys.readouterr().out
    table = json.loads((tmp_path / "run" / PLAN_FILE).read_text())
    assert table["own"]["predicted_step_time_s"] > 800
    assert table["profile"]["stale"]
    (_, last) = read_profile(file).pieces
    assert 0 < last.weights_s.at(4) < last.backward_s.at(4) and last.put_off_bytes.at(4) > 0


def test_apply_keeps_what_touches_quality_and_changes_the_rest(tmp_path: Path) -> None:
    config = toy(tmp_path, "plan=apply", "cluster/wan=line_8m", "compression=int8")

    chosen = configs.job_from_config(planned(config, tmp_path / "run"))

    table = json.loads((tmp_path / "run" / PLAN_FILE).read_text())
    foreseen = read_timeline(tmp_path / "run" / PREDICTED_FILE)
    # A rank ends its step while the other one's last message is under way.
    assert foreseen.clocks == "predicted"
    assert 1e-6 * foreseen.until_us >= table["predicted_step_time_s"] - 1e-5
    assert chosen.plan is None
    assert chosen.compression.label == "int8+int8" and chosen.strategy.name == "pipeline"
    assert chosen.schedule.num_micro_batches == table["chosen"]["micro_batches"]
    assert table["predicted_step_time_s"] == table["plans"][0]["predicted_step_time_s"]


def test_apply_takes_a_compressor_where_the_search_names_it(tmp_path: Path) -> None:
    config = toy(tmp_path, "plan=apply", "cluster/wan=line_8m")
    config.cluster.wan.bandwidth_bits_per_s = 1e4
    config.plan.search = ["compression"]

    chosen = configs.job_from_config(planned(config, tmp_path / "run"))

    assert chosen.compression.label == "int4+int4"
    assert chosen.schedule == configs.job_from_config(config).schedule


def test_a_model_of_blocks_is_cut_where_both_clouds_work_equally(tmp_path: Path) -> None:
    """Without measuring: the costs come from a file."""
    config = composed("+exp=lora_clm", "plan=apply", "cluster/wan=free", "compression=none")
    model, length = configs.job_from_config(config).model, 16  # type: ignore[attr-defined]
    assert model.num_blocks(length) == 4 and model.block_counts(2, length) == [2, 2]
    assert model.with_block_counts([1, 3]).block_counts(2, length) == [1, 3]
    pieces = [piece(f"block {i}", forward_s=0.01) for i in range(3)]
    pieces.append(piece("block 3", forward_s=0.03, boundary=None))
    names = ("none", "fp16_int8", "int8", "int4_int8", "int4")
    costs = dict.fromkeys(names, COMPRESSORS["none"])
    write_profile(tmp_path / "mine.json", Profile(pieces, costs))
    config.plan.profile = str(tmp_path / "mine.json")

    chosen = planned(config, tmp_path / "run")

    assert list(chosen.model.blocks_per_stage) == [3]
    assert configs.job_from_config(chosen).model.block_counts(2, length) == [3, 1]  # type: ignore[attr-defined]


def test_a_slow_first_run_leaves_as_many_to_take_the_median_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling and first allocations take longer than all the rest of a small model."""
    forward, turns = ToyStage.forward, list[int]()

    def slow_at_first(stage: ToyStage, received: Message | None, batch: Batch) -> StageOutput:
        if stage.stage == 0:
            turns.append(len(batch["ids"]))
            if len(turns) == 1:
                time.sleep(2 * BUDGET_S)
        return forward(stage, received, batch)

    monkeypatch.setattr(ToyStage, "forward", slow_at_first)

    planned(toy(tmp_path, "plan=show"), tmp_path / "run")

    assert turns.count(min(turns)) == 2 + MOST_TIMES + 1 + MOST_TIMES // 2  # whole and split


def test_weights_are_not_put_off_where_the_job_forbids_it(tmp_path: Path) -> None:
    config = toy(tmp_path, "plan=show", "cluster.clouds.cloud_b.num_ranks=2")
    allowed, config.cluster.clouds.cloud_b.shard = configs.job_from_config(config), True
    forbidden = configs.job_from_config(config)

    assert Planner(allowed, allowed.plan, allowed.cluster, float).splits_backward
    found = Planner(forbidden, forbidden.plan, forbidden.cluster, float)
    assert not found.splits_backward
    assert "puts off" in found.not_planned["schedule=zero_bubble"]


def test_an_average_is_measured_with_its_frame_as_the_links_make_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames = list[torch.Tensor]()

    def framed(*given: Any) -> torch.Tensor:
        frames.append(encode_frame(*given))
        return frames[-1]

    monkeypatch.setattr(codec_profiling, "encode_frame", framed)
    trained = {"weight": torch.nn.Parameter(torch.zeros(4, 8))}

    found = codec_profiling.averaging_codec(trained, Compression(), Stopwatch(torch.device("cpu")))

    assert found is not None and {len(frame) for frame in frames} == {found.num_bytes}


def test_codecs_are_timed_on_all_rows_of_samples_of_unequal_length() -> None:
    fields = (
        BoundaryField("counts", (), torch.int64),
        BoundaryField("hidden", (8,), torch.float32, rows="counted"),
    )
    boundary = Boundary(fields, max_rows_per_sample=4)
    messages = {
        b: {"counts": torch.full((b,), 3), "hidden": torch.randn(3 * b, 8)} for b in (2, 4)
    }
    compression = Compression(Chain(svd=Svd(0.6)), Chain(int8=BlockInt(8)))

    found = codec_profiling.boundary_codec(
        boundary, compression, messages, messages, Stopwatch(torch.device("cpu"))
    )

    assert found.forward.decompress_s.at(4.0) > 0
    # Of 12 rows of 8 the factors have rank 5: 5 x (12 + 8) values in FP32, and 4 counts.
    more = found.forward.num_bytes.at(4.0) - found.forward.num_bytes.at(2.0)
    assert more >= 4 * (5 * (12 + 8) - 4 * (6 + 8)) + 2 * 8


def test_what_is_timed_beside_a_model_leaves_weights_threads_and_random_numbers_alone() -> None:
    device, threads, state = torch.device("cpu"), torch.get_num_threads(), torch.get_rng_state()
    trained = {"weight": torch.nn.Parameter(torch.full((4, 8), 0.3)),
               "bias": torch.nn.Parameter(torch.full((8,), -0.7))}  # fmt: skip

    found = codec_profiling.around_averaging_s(trained, Stopwatch(device))

    assert min(found) > 0 and codec_profiling.around_averaging_s({}, Stopwatch(device)) == (0, 0)
    assert all(parameter.grad is None for parameter in trained.values())
    assert torch.equal(trained["weight"], torch.full((4, 8), 0.3))
    assert torch.equal(trained["bias"], torch.full((8,), -0.7))
    assert reference.reference_s(device, threads + 1, lasting_s=0.0) > 0
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)


def test_without_a_plan_the_config_stays() -> None:
    config = composed("+exp=abnet_iwslt")

    assert planned(config, Path("nowhere")) is config
    assert "plan" not in configs.plain_settings(config)  # as in runs of earlier releases


class BackwardFirst(GPipe):
    pass


def test_a_schedule_of_ones_own_is_not_priced_as_the_one_it_derives_from(tmp_path: Path) -> None:
    config = toy(tmp_path, "plan=show")
    config.schedule._target_ = f"{BackwardFirst.__module__}.BackwardFirst"
    with pytest.raises(ConfigError, match=r"schedules like BackwardFirst.* are not priced yet"):
        planned(config, tmp_path / "run")


def test_what_cannot_be_planned_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cut into stages"):
        planned(composed("+exp=electra_multilingual", "plan=show"), tmp_path)
    with pytest.raises(ConfigError, match="leave -m out"):
        run(toy(tmp_path, "plan=show"), tmp_path / "run")
    config = toy(tmp_path, "plan=show", "cluster/wan=real")
    with pytest.raises(ConfigError, match="real network from 'cloud_a' to 'cloud_b'"):
        planned(config, tmp_path / "run")


@pytest.mark.slow
def test_the_plan_that_is_applied_is_the_one_that_runs(tmp_path: Path) -> None:
    config = toy(tmp_path, "plan=apply", "cluster/wan=line_8m")

    run(planned(config, tmp_path / "run"), tmp_path / "run")

    summary, table = (
        read_summary(tmp_path / "run"), json.loads((tmp_path / "run" / PLAN_FILE).read_text())
    )  # fmt: skip
    assert summary["status"] == "finished"
    assert summary["predicted_step_time_s"] == pytest.approx(
        table["predicted_step_time_s"], abs=1e-6
    )
    job = configs.read_job(tmp_path / "run" / configs.EXPERIMENT_FILE)
    assert job.schedule.num_micro_batches == table["chosen"]["micro_batches"]  # type: ignore[attr-defined]

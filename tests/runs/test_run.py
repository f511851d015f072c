"""Whole runs with the toy task: real processes that end, fail or are cut short, and threads."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.figures import check_figures, read_events
from tests.nightly import NIGHTLY, first_daily
from tests.one_way_toy import cloud as feed_cloud
from tests.one_way_toy import feed_config
from tests.runs import (
    cloud,
    command,
    free_port,
    in_threads,
    layout,
    losses,
    no_workers,
    rank_pid,
    read,
    start,
    started,
    wait_for,
    weights,
)
from tests.toy import toy_config
from xcloud.base.errors import ConfigError, RunFailed
from xcloud.launch import failures, processes
from xcloud.launch import processes as launch
from xcloud.launch.failures import EXIT_PEER_LOST
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.files import failure_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    start(folder, toy_config("local"))
    return folder


@pytest.mark.parametrize("cluster", first_daily(["two_clouds", "one_cloud"], count=1))
def test_losses_and_weights_are_bit_equal_to_one_process(
    cluster: str, local: Path, tmp_path: Path
) -> None:
    """FP32, no compression, dropout on, gradients clipped over both clouds."""
    summary = start(tmp_path, toy_config(cluster))

    assert losses(tmp_path) == losses(local)
    ours, theirs = weights(tmp_path), weights(local)
    assert ours.keys() == theirs.keys() and len(ours) == 5
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    crosses = cluster == "two_clouds"
    assert (summary["wan_bytes_per_step"]["forward"] > 0) == crosses
    assert (summary["compression_ratio"]["total"] is not None) == crosses


@pytest.mark.parametrize(
    "clusters",
    [
        layout(a=cloud(2), b=cloud(1)),
        pytest.param(layout(a=cloud(1), b=cloud(2)), marks=NIGHTLY),
        pytest.param(layout(a=cloud(2), b=cloud(2)), marks=NIGHTLY),
    ],
    ids=["2 feeding 1", "1 feeding 2", "2x2"],
)
def test_ranks_of_unequal_clouds_train_the_same_model(
    clusters: dict[str, object], local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not bit-equal: lanes add their gradients in another order than one process does."""
    in_threads(tmp_path, toy_config(clusters), monkeypatch)

    assert losses(tmp_path) == pytest.approx(losses(local), rel=1e-5)
    ours, theirs = weights(tmp_path), weights(local)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


def test_one_owner_holds_both_ends_and_a_third_cloud_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = {**layout(a=cloud(1, [0, 1, 2]))}
    in_threads(tmp_path / "one", toy_config(three), monkeypatch)
    two = toy_config(layout(owner=cloud(1, [0, 2]), other=cloud(1, [1])))
    summary = in_threads(tmp_path / "two", two, monkeypatch)

    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    check_figures(read_events(tmp_path / "two"), summary)


@pytest.mark.slow
@pytest.mark.nightly
def test_accumulation_equals_the_large_batch(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["training.accumulate_steps=2", "schedule.num_micro_batches=2"]
    in_threads(tmp_path, toy_config("two_clouds", more), monkeypatch)

    ours, theirs = weights(tmp_path), weights(local)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    # The reported loss is summed by passes, so its last bit may differ.
    assert losses(tmp_path) == pytest.approx(losses(local), rel=1e-5)


def test_a_schedule_changes_the_order_and_not_the_result(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["schedule=one_forward_one_backward", "schedule.num_in_flight=3"]
    in_threads(tmp_path, toy_config("two_clouds", more), monkeypatch)

    assert losses(tmp_path) == losses(local)


def test_summary_counts_what_crossed(tmp_path: Path) -> None:
    summary = start(tmp_path, toy_config("two_clouds", ["compression=int8"]))

    assert summary["status"] == "finished"
    on_disk = json.loads((tmp_path / "summary.json").read_text())
    assert on_disk == summary
    check_figures(read_events(tmp_path), summary)
    rows, hidden, frames = 8 * 6, 12, 4
    codes, scales = rows * hidden, frames * 3  # 2 samples a frame: 144 values, 3 blocks of 64
    floats = 2 * codes * 4
    assert summary["wan_bytes_per_step"]["forward"] > codes + 2 * scales
    measured = summary["compression_ratio"]["total"] * (
        summary["wan_bytes_per_step"]["forward"] + summary["wan_bytes_per_step"]["backward"]
    )
    assert measured == pytest.approx(floats, rel=1e-2)
    forward = summary["bytes_per_token"]["forward"]
    steps = [event for event in read_events(tmp_path) if event["event"] == "step"]
    tokens = sum(event["tokens"] for event in steps)
    sent = sum(event["boundaries"].get("0 forward", 0) for event in steps)
    assert forward == pytest.approx(sent / tokens, abs=0.006)
    assert set(summary["compute_s"]) == {"cloud_a", "cloud_b"}
    assert summary["quality"].keys() == {"bleu"}


def test_evaluation_during_training_leaves_the_result_alone(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy_config("two_clouds", ["training.evaluate_every=3"])
    summary = in_threads(tmp_path, config, monkeypatch)

    assert losses(tmp_path) == losses(local)
    assert "bleu" in summary["dev_quality"] and "bleu" in summary["dev_quality_error"]
    scored = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [line["id"] for line in scored] == list(range(10))
    hits = [line["correct"] for line in scored]
    assert 100 * sum(hits) / len(hits) == pytest.approx(summary["quality"]["bleu"])
    check_figures(read_events(tmp_path), summary)


RAISED = "RuntimeError: the toy stage was asked to fail"


@pytest.mark.parametrize(
    ("stage", "how", "said"),
    [
        (0, "kill", "SIGKILL"),
        (1, "raise", RAISED),
        pytest.param(1, "kill", "SIGKILL", marks=pytest.mark.nightly),
        pytest.param(0, "raise", RAISED, marks=pytest.mark.nightly),
    ],
)
def test_a_failing_rank_ends_the_run_and_is_named_first(
    stage: int, how: str, said: str, tmp_path: Path
) -> None:
    config = toy_config("two_clouds")
    # 1.6 s at least where it is killed: rank 0 has told its steps once a second.
    fail_step = 80 if how == "kill" else 10
    config["model"] |= {"fail_stage": stage, "fail_how": how, "fail_step": fail_step}
    config["model"]["step_s"] = 0.02
    config["training"]["max_steps"] = 100
    started = time.monotonic()

    with pytest.raises(RunFailed, match=f"rank {stage} of cloud.*{said}"):
        start(tmp_path, config)

    assert time.monotonic() - started < 200  # not the 300 s a message may take
    assert no_workers(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert said in summary["cause"]
    assert summary["num_steps"] > 0


def test_a_rank_that_hangs_is_a_timeout_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_FINAL_REPORTS_S", 0.5)  # it has none
    monkeypatch.setattr(failures, "_SETTLE_S", 0.3)  # nor a cause of its own
    config = toy_config(
        "two_clouds", ["cluster/wan=line_1g", "cluster.liveness.overdue_after_s=4"]
    )
    config["model"] |= {"fail_stage": 1, "fail_how": "hang", "fail_step": 10}

    with pytest.raises(RunFailed, match="rank 1 of cloud 'cloud_b' after 4"):
        start(tmp_path, config)

    assert no_workers(tmp_path)


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly), signal.SIGKILL],
)
def test_ending_the_command_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    config = toy_config("two_clouds")
    config["training"]["max_steps"] = 100_000
    running = started(tmp_path, config)
    wait_for(lambda: "step" in read(tmp_path / "events.jsonl"))
    assert not no_workers(tmp_path)

    running.send_signal(number)

    assert running.wait(120) != 0
    wait_for(lambda: no_workers(tmp_path), 60)
    if number != signal.SIGKILL:  # nobody is left to write a summary then
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["status"] == "stopped"
        step = CheckpointFolder(tmp_path).agreed_steps()[0]
        assert f"to resume from step {step}: python run.py resume=" in summary["cause"]


def test_clouds_with_different_data_are_told_so(tmp_path: Path) -> None:
    """Every rank reads the same file here, so one rank's own copy is changed between."""
    config = toy_config("two_clouds")
    config["task"] = {"_target_": "tests.toy.ToyTaskThatDiffers"}

    # Whichever rank speaks first.
    said = r"disagree about samples of train: (40 here, 41|41 here, 40) there"
    with pytest.raises(RunFailed, match=said):
        start(tmp_path, config)


@pytest.mark.nightly
def test_a_cloud_may_prepare_longer_than_a_message_may_take(tmp_path: Path) -> None:
    config = toy_config(
        "two_clouds",
        ["cluster/wan=free", "training.max_steps=2", "cluster.liveness.overdue_after_s=4"],
    )
    config["model"] = {"_target_": "tests.toy.ToyModelThatPrepares", "prepare_s": 6.5}
    config["cluster"]["wan"] = {
        "_target_": "xcloud.net.link_profile.LinkProfile",
        "bandwidth_bits_per_s": 1e9,
    }

    assert start(tmp_path, config)["num_steps"] == 2


def test_a_folder_with_a_run_in_it_takes_no_second_one(local: Path) -> None:
    before = (local / "summary.json").read_bytes()
    with pytest.raises(ConfigError, match=r"holds an earlier run; give another hydra\.run\.dir"):
        start(local, toy_config("local"))
    assert (local / "summary.json").read_bytes() == before


def test_nothing_starts_when_a_setting_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_micro_batches is 1"):
        start(
            tmp_path / "run",
            toy_config("two_clouds_dp", ["schedule.num_micro_batches=1"]),
        )

    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_nothing_starts_where_a_gpu_is_asked_for_and_none_is_there(tmp_path: Path) -> None:
    config = toy_config("two_clouds", ["cluster.clouds.cloud_b.device=cuda"])
    with pytest.raises(ConfigError, match=r"cluster\.clouds\.cloud_b\.device is cuda, but torch"):
        start(tmp_path / "run", config)

    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_three_hundred_micro_batches_in_flight_do_not_deadlock(tmp_path: Path) -> None:
    schedule = ["schedule=one_forward_one_backward", "schedule.num_micro_batches=300",
                "schedule.num_in_flight=300"]  # fmt: skip
    overrides = [*schedule, "training.batch_size=300", "training.max_steps=1"]

    summary = start(tmp_path, toy_config("two_clouds", overrides))

    assert summary["status"] == "finished"


def test_copies_of_the_model_in_two_clouds_average_in_eight_bits(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy_config("two_clouds", ["strategy=data_parallel", *INT8])
    summary = in_threads(tmp_path, config, monkeypatch)

    assert losses(tmp_path) == pytest.approx(losses(local), rel=0.05)
    assert weights(tmp_path).keys() == weights(local).keys()
    sent, ratio = summary["wan_bytes_per_step"], summary["compression_ratio"]
    assert sent["forward"] == sent["backward"] == 0 and ratio["averaging"] > 2
    assert ratio["total"] == ratio["averaging"]
    assert summary["strategy"] == "data_parallel" and summary["compression"] == "averaging int8"
    assert summary["quality"] and summary["tokens_per_s"]
    check_figures(read_events(tmp_path), summary)
    left = [m for m in json.loads((tmp_path / "wire_audit.json").read_text())["messages"]
            if m["from"] == "cloud_b"]  # fmt: skip
    gradients, digests = 8, 3
    averaged = sorted(m["num_messages"] for m in left if m["kind"] == "averaging")
    assert averaged == [digests, gradients]
    assert {m["kind"] for m in left} <= {
        "averaging",
        "report",
        "barrier",
        "alive",
        "close",
        "checkpoint",
    }


INT8 = ["compression=int8", "strategy.averaging.check_every=4"]


LIVENESS = {
    "_target_": "xcloud.net.link_profile.Liveness", "interval_s": 0.4, "lost_after_s": 2.5,
    "overdue_after_s": 4.0,
}  # fmt: skip
LINE = {
    "_target_": "xcloud.net.link_profile.LinkProfile",
    "bandwidth_bits_per_s": 1e9,
}
# Where the last step is saved, a run would start again.
ONCE = {"_target_": "xcloud.job.job.Launch", "max_restarts": 0}
TWO_CLOUDS = layout(a=cloud(1), b=cloud(1))
CHAIN = layout(a=cloud(1), b=cloud(1), c=cloud(2))
U_SHAPE = layout(owner=cloud(2, [0, 2]), other=cloud(1, [1]))


def config_of(clusters: dict, max_steps: int, evaluate_every: int = 0, **model: object) -> dict:
    """One piece in each evaluation."""
    config = toy_config({**clusters, "wan": LINE, "liveness": LIVENESS})
    config["training"] |= {
        "max_steps": max_steps, "evaluate_every": evaluate_every, "eval_batch_size": 10,
    }  # fmt: skip
    config["model"] |= model
    config["launch"] = ONCE
    return config


def audit(run_dir: Path) -> list[dict]:
    return json.loads((run_dir / "wire_audit.json").read_text())["messages"]


def steps(run_dir: Path) -> list[dict]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "step"]


@pytest.mark.parametrize(
    ("clusters", "slow_predictions"),
    [
        pytest.param(TWO_CLOUDS, None, id="dev and test", marks=pytest.mark.nightly),
        pytest.param(CHAIN, 1, id="dev in a chain of three", marks=pytest.mark.nightly),
        pytest.param(U_SHAPE, 1, id="dev in a U", marks=pytest.mark.nightly),
    ],
)
def test_an_evaluation_may_take_longer_than_a_message_and_is_part_of_no_step(
    clusters: dict, slow_predictions: int | None, tmp_path: Path
) -> None:
    config = config_of(
        clusters, 4, evaluate_every=3, predict_s=5.5, slow_predictions=slow_predictions
    )
    summary = start(tmp_path, config)

    assert summary["status"] == "finished" and len(losses(tmp_path)) == 4
    assert "bleu" in summary["quality"] and "bleu" in summary["dev_quality"]
    assert max(event["step_s"] for event in steps(tmp_path)) < 5.0
    assert {message["kind"] for message in audit(tmp_path)} >= {"alive", "barrier"}
    assert len(weights(tmp_path)) >= 5


def test_a_test_evaluation_that_fails_loses_no_trained_stage(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"rank 1 of cloud 'b'.*asked to fail in an evaluation"):
        start(tmp_path, config_of(TWO_CLOUDS, 2, predict_how="raise"))

    assert len(weights(tmp_path)) == 5
    assert no_workers(tmp_path)


def test_a_rank_that_is_stopped_in_an_evaluation_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rank 0, which waits for it, or by the launcher, which sees that it is stopped."""
    monkeypatch.setattr(failures, "_SETTLE_S", 0.3)
    started_s = time.monotonic()
    with pytest.raises(RunFailed, match=r"rank 1 (has not come .*no heartbeat|.*SIGSTOP)"):
        start(tmp_path, config_of(TWO_CLOUDS, 2, predict_how="stop"))

    assert time.monotonic() - started_s < 60
    assert no_workers(tmp_path)


def feed(clouds: dict, **model: object) -> dict:
    config = feed_config(clouds, wan=LINE, model=model, feed={"slow_after_s": 3.0})
    config["cluster"]["liveness"] = LIVENESS
    config["training"]["max_steps"] = 4
    config["launch"] = ONCE
    return config


FEEDING = {"disc": feed_cloud(1), "one": feed_cloud(1, 1.0)}


@pytest.mark.nightly
def test_a_producer_is_heard_out_while_it_exports_for_long(tmp_path: Path) -> None:
    summary = start(tmp_path, feed(FEEDING, export_s={"one": 5.5}))

    assert summary["feed"]["producers"]["one"]["finished"]
    assert (tmp_path / "model" / "one.safetensors").is_file()


def test_a_consumer_whose_evaluation_fails_loses_nobodys_model(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="the toy consumer was asked to fail"):
        start(tmp_path, feed(FEEDING, export_s={"one": 3.0}, fail_evaluation=True))

    assert {path.stem for path in (tmp_path / "model").iterdir()} == {"one", "consumer"}


def test_a_rank_that_is_stopped_before_the_first_step_is_named_on_every_machine(
    tmp_path: Path,
) -> None:
    """No launcher sees all ranks, and one waits in a collective, which nothing interrupts."""
    config = config_of(layout(a=cloud(1, [0]), b=cloud(2, [1])), 2)
    config["model"] = {"_target_": "tests.toy.ToyModelThatStops"}
    file = tmp_path / "experiment.yaml"
    OmegaConf.save(OmegaConf.create(config), file)
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3",
               "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, "-m", "xcloud", "worker", str(file), "--run-dir"]
    folders = [tmp_path / str(rank) for rank in range(3)]  # of three machines
    ranks = [
        launch.start_process(
            [*command, str(folder)],
            {**os.environ, **rendezvous, "RANK": str(rank)},
            tmp_path / f"{rank}.log",
        )
        for rank, folder in enumerate(folders)
    ]
    try:
        codes = [rank.wait(60) for rank in ranks[:2]]
        said = [(tmp_path / f"{rank}.log").read_text() for rank in range(3)]
        assert codes == [EXIT_PEER_LOST] * 2, said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, waits in ((0, ""), (1, " while this rank waited for the barrier of 2 ranks")):
        failure = failure_of(folders[rank], rank)
        assert failure is not None
        assert f"rank 2 (cloud b) sent no heartbeat for 2.5 s{waits}" in failure["message"]
    wait_for(lambda: no_workers(tmp_path), 60)  # the monitor writes what the run was


def config() -> dict[str, object]:
    made = toy_config(
        "two_clouds",
        ["training.max_steps=40", "training.checkpoint.every_steps=5", "compression=delta_int4"],
    )
    made["model"] |= {"step_s": 0.01}  # type: ignore[operator]
    return made


@pytest.mark.nightly
def test_a_run_whose_rank_and_then_launcher_is_killed_ends_as_if_they_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher starts the ranks again; after its own end the run is gone on with by hand."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    in_threads(whole, config(), monkeypatch)
    run_dir.mkdir()
    (run_dir / "experiment.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config())))
    (run_dir / "events.jsonl").touch()  # of an attempt that told nothing
    folder = CheckpointFolder(run_dir)

    def agreed(step: int) -> bool:
        return any(found >= step for found in folder.agreed_steps())

    log = tmp_path / "log"
    first = command("run.py", f"resume={run_dir}", "resume_anew=true", log=log)
    wait_for(lambda: agreed(5))
    os.kill(rank_pid(run_dir, 1), signal.SIGKILL)
    wait_for(lambda: agreed(15))
    first.kill()
    first.wait()
    assert "restart 1 of at most 3" in log.read_text()
    wait_for(lambda: no_workers(run_dir), 60)
    assert (run_dir / "rendezvous").exists()  # nobody was left to remove it

    second = command("run.py", f"resume={run_dir}", log=log)
    assert second.wait(180) == 0, log.read_text()
    ours, theirs = weights(run_dir), weights(whole)
    assert ours.keys() == theirs.keys() and ours
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert losses(run_dir) == losses(whole)
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    assert summary["num_resumes"] == 3 and summary["num_steps"] == 40  # first from step 0
    assert 0 < summary["goodput"] < 1
    assert folder.agreed_steps() == [40]

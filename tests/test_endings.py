"""Real runs whose evaluation takes longer than a silent rank is waited for, or fails, or stops."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.one_way_toy import cloud as feed_cloud
from tests.one_way_toy import feed_config
from tests.runs import (
    cloud,
    free_port,
    layout,
    losses,
    no_workers,
    start,
    wait_for,
    weights,
)
from tests.toy import toy_config
from xcloud.base.errors import RunFailed
from xcloud.launch import processes as launch
from xcloud.launch.failures import EXIT_PEER_LOST
from xcloud.record.files import failure_of

pytestmark = pytest.mark.slow

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
        pytest.param(TWO_CLOUDS, None, id="dev and test"),
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


def test_a_rank_that_is_stopped_in_an_evaluation_is_named(tmp_path: Path) -> None:
    """By rank 0, which waits for it, or by the launcher, which sees that it is stopped."""
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

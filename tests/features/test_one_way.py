"""Whole one-way jobs of real processes with toy parts: equality, unequal clouds, lost ones."""

import json
import os
import signal
from pathlib import Path
from threading import Thread

import pytest
import torch
from omegaconf import OmegaConf

from tests import runs
from tests.nightly import NIGHTLY
from tests.one_way_toy import cloud, feed_config
from tests.runs import losses, no_workers, read, started, wait_for, weights
from xcloud.base.errors import ConfigError, RunFailed
from xcloud.features.checkpoints.resume import check_can_go_on
from xcloud.features.one_way.ranks import OneWayRank
from xcloud.job.config import Settings
from xcloud.launch.local import run
from xcloud.launch.processes import RunStopped
from xcloud.security.audit import compact

pytestmark = pytest.mark.slow
ONE = {"disc": cloud(1), "one": cloud(1, 1.0)}
TWO = {"disc": cloud(1), "one": cloud(1, 2.0), "two": cloud(1, 1.0)}
WIDE = {"disc": cloud(2), "one": cloud(2, 1.0), "two": cloud(1, 1.0)}


def start(run_dir: Path, clouds: dict[str, object], *form: str, **groups: dict) -> dict:
    summary = run(Settings.of(feed_config(clouds, *form, **groups)), run_dir)
    assert "refused_reports" not in summary, read(run_dir / "events.jsonl")
    return summary


def in_threads(
    run_dir: Path, patch: pytest.MonkeyPatch, clouds: dict[str, object], **groups: dict
) -> dict:
    """As `start`, with the ranks in threads of this process, over links in memory. They take no
    turns, so that one can be slow."""
    patch.setattr(OneWayRank, "computing_in", lambda rank, clock, what: clock.during(what))
    return runs.in_threads(run_dir, feed_config(clouds, "clouds", **groups), patch)


def events(run_dir: Path, kind: str) -> list[dict]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == kind]


def states(run_dir: Path) -> list[tuple[str, str]]:
    return [(e["producer"], e["state"]) for e in events(run_dir, "producer")]


def notes(run_dir: Path) -> str:
    return "\n".join(e["text"] for e in events(run_dir, "note"))


def made_up(audit: dict) -> set[tuple[str, str, str, tuple[str, ...]]]:
    """Every kind of message: from, to, kind, dtype and number of axes of its parts."""
    return {
        (m["from"], m["to"], m["kind"],
         tuple(f"{part['dtype']} {len(part['shape'])}" for part in m["parts"]))
        for m in audit["messages"]
    }  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    start(folder, TWO)
    return folder


@pytest.mark.parametrize(
    ("clouds", "other"),
    [(TWO, "local"), pytest.param(WIDE, "one_cloud", marks=NIGHTLY)],
    ids=["1+1 to 1", "2+1 to 2"],
)
def test_clouds_train_the_same_bits_as_one(
    clouds: dict[str, object],
    other: str,
    two: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All parts learn; order fixed by shares, whatever arrives first."""
    folder = two
    if clouds is not TWO:
        folder = tmp_path / "clouds"
        config = feed_config(clouds, "clouds", model={"late_s": {"one": 0.5}})
        runs.in_threads(folder, config, monkeypatch)
    summary = json.loads((folder / "summary.json").read_text())
    alone = runs.in_threads(tmp_path / "other", feed_config(clouds, other), monkeypatch)

    assert losses(folder) == losses(tmp_path / "other")
    assert len(losses(folder)) == 12
    ours, theirs = weights(folder), weights(tmp_path / "other")
    # A producer runs ahead as far as the timing of the end lets it: only the consumer's weights
    # and the losses, which follow from the producers' weights, must be equal.
    for name in (name for name in theirs if name.startswith("consumer")):
        assert torch.equal(ours[name], theirs[name]), name
    assert summary["feed"]["num_batches"] == 24 and summary["feed"]["num_skipped"] == 0
    assert summary["wan_bytes_per_step"]["forward"] > 0
    assert alone["wan_bytes_per_step"]["forward"] == 0
    assert alone["wire"] == {}


def test_only_bytes_go_forth_and_only_small_integers_come_back(two: Path) -> None:
    summary = json.loads((two / "summary.json").read_text())
    feed = summary["feed"]
    audit = json.loads((two / "wire_audit.json").read_text())
    kinds = made_up(audit)

    forth = {(n, "disc", kind, parts) for n in ("one", "two")
             for kind, parts in (("batch", ("uint8 1",)), ("ready", ()),
                                 ("close", ()))}  # fmt: skip
    back = {("disc", n, kind, parts) for n in ("one", "two")
            for kind, parts in (("order", ("int32 2",)), ("stop", ()),
                                ("close", ()))}  # fmt: skip
    reports = {(n, "disc", "report", ("uint8 1",)) for n in ("one", "two")}
    saves = {(*ends, "checkpoint", ("uint8 1",)) for n in ("one", "two")
             for ends in ((n, "disc"), ("disc", n))}  # fmt: skip
    assert kinds == forth | back | reports | saves
    assert audit["missing_ranks"] == [] and summary["wire"] == compact(audit)
    assert all(p["carries"] != "unnamed" for m in audit["messages"] for p in m["parts"])
    # 16 of 24 batches by share, each of 8 x 7 bytes, with a frame's header of 40 + 6.
    assert feed["producers"]["one"]["num_batches"] == 16
    assert feed["producers"]["one"]["share_taken"] == pytest.approx(2 / 3, abs=1e-3)
    assert feed["bytes_per_token"] == pytest.approx((8 * 7 + 46) / (8 * 6), abs=1e-3)
    assert summary["wan_bytes_per_step"]["forward"] == 2 * (8 * 7 + 46)
    back = [summary["wire"][f"disc -> {name}"]["order"] for name in ("one", "two")]
    assert sum(order["bytes"] for order in back) < 24 * 100
    forth = [summary["wire"][f"{name} -> disc"]["batch"] for name in ("one", "two")]
    # What is on its way when the last step ends crosses, but is not used: up to run_ahead a rank.
    assert 24 <= sum(batch["messages"] for batch in forth) <= 24 + 2 * 8
    assert all(batch["bytes"] == batch["messages"] * (8 * 7 + 46) for batch in forth)
    assert summary["quality"] == {"accuracy": 0.5}
    made = {name: found["num_made"] for name, found in feed["producers"].items()}
    assert all(made[n] >= feed["producers"][n]["num_batches"] for n in made)
    assert all(made[n] <= feed["producers"][n]["num_batches"] + 8 for n in made)  # run_ahead


def test_the_others_take_over_from_a_dead_producer(tmp_path: Path) -> None:
    clouds = {"disc": cloud(2), "one": cloud(1, 1.0), "two": cloud(2, 1.0)}
    summary = start(
        tmp_path, clouds, training={"max_steps": 40}, feed={"run_ahead": 4},
        model={"fail_cloud": "two", "batch_s": {"two": 0.01}, "step_s": 0.01},
    )  # fmt: skip
    feed = summary["feed"]

    assert summary["status"] == "finished" and summary["num_steps"] == 40
    assert feed["producers"]["two"]["num_dead"] == 1
    assert feed["producers"]["two"]["state"] == "dead"
    assert feed["num_batches"] + feed["num_skipped"] >= 80
    assert ("two", "dead") in states(tmp_path)
    assert "producer two is gone" in notes(tmp_path)
    assert "one take over its share" in notes(tmp_path)
    audit = json.loads((tmp_path / "wire_audit.json").read_text())
    assert audit["missing_ranks"]  # killed: what it sent is known from who got it
    assert ("two", "disc", "batch", ("uint8 1",)) in made_up(audit)
    assert no_workers(tmp_path)


def test_a_dead_producer_stops_the_run_where_it_must(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"of cloud 'two'.*SIGKILL"):
        start(
            tmp_path, TWO, training={"max_steps": 10_000}, feed={"on_dead": "stop"},
            model={"fail_cloud": "two", "step_s": 0.01},
        )  # fmt: skip

    assert no_workers(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_a_producer_that_dies_before_all_have_met_ends_the_run(tmp_path: Path) -> None:
    model = {"_target_": "tests.one_way_toy.ToyFeedThatNeverMeets"}
    with pytest.raises(RunFailed, match=r"rank 2 of cloud 'two': was ended by signal 9"):
        start(tmp_path, TWO, model=model)
    assert no_workers(tmp_path)


def test_a_producer_that_fails_while_it_loads_ends_the_run_with_its_own_words(
    tmp_path: Path,
) -> None:
    """Long after rank 0 has begun, though on_dead lets the others go on without it."""
    model = {"fail_cloud": "two", "fail_how": "load", "late_s": {"two": 1.0}}
    with pytest.raises(RunFailed, match=r"rank 2 of cloud 'two': the toy producer finds no data"):
        start(tmp_path, TWO, model=model)
    assert no_workers(tmp_path)


def test_the_run_fails_when_nobody_is_left_to_feed(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"SIGKILL|no producer is left"):
        start(
            tmp_path, ONE, training={"max_steps": 10_000},
            model={"fail_cloud": "one", "step_s": 0.01},
        )  # fmt: skip

    assert no_workers(tmp_path)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_slow_producer_is_waited_for_and_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"fail_cloud": "two", "fail_how": "sleep", "pause_s": 2.0}
    feed = {"slow_after_s": 1.0}
    summary = in_threads(tmp_path / "slow", monkeypatch, TWO, model=model, feed=feed)
    in_threads(tmp_path / "undisturbed", monkeypatch, TWO)

    assert losses(tmp_path / "slow") == losses(tmp_path / "undisturbed")
    assert summary["feed"]["producers"]["two"]["num_slow"] == 1
    assert "(feed.slow_after_s); waiting for it" in notes(tmp_path / "slow")
    assert "sends again" in notes(tmp_path / "slow")


@pytest.mark.nightly
def test_nobody_waits_for_a_link_that_only_takes_long(tmp_path: Path) -> None:
    """300 ms round trip, steps of 50 ms: run-ahead covers what the link takes; the same bits."""
    link = {"_target_": "xcloud.net.link_profile.LinkProfile",
            "bandwidth_bits_per_s": 1e7, "latency_s": 0.15}  # fmt: skip
    training = {"max_steps": 40, "batches_per_step": 1}
    summary = start(
        tmp_path / "far", ONE, "clouds", link, training=training, feed={"run_ahead": 16},
        model={"step_s": 0.05},
    )  # fmt: skip
    start(tmp_path / "near", ONE, "local", training=training)

    assert losses(tmp_path / "far") == losses(tmp_path / "near")

    # Were the link waited for, every step would wait for its round trip, less what is computed.
    assert summary["waiting_s"]["disc"] < 2 * 0.15 - 0.05
    assert 0 < summary["link_utilisation"]["forward"] < 0.1


@pytest.mark.nightly
def test_a_job_that_was_asked_to_end_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a producer has two ranks, of which one may have been ordered more."""
    saves = {"_target_": "xcloud.pipeline.settings.Checkpoints", "every_steps": 20}
    groups: dict = {"training": {"max_steps": 60, "checkpoint": saves}, "model": {"step_s": 0.02}}
    runs.in_threads(tmp_path / "whole", feed_config(WIDE, **groups), monkeypatch)

    def ask() -> None:
        wait_for(lambda: read(tmp_path / "cut/events.jsonl").count('"step"') > 40)
        os.kill(os.getpid(), signal.SIGUSR1)

    asking = Thread(target=ask)
    asking.start()
    with pytest.raises(RunStopped, match="to resume from step"):
        start(tmp_path / "cut", WIDE, **groups)
    asking.join()
    config = OmegaConf.create(feed_config(WIDE, **groups))
    summary = run(Settings.of(config), tmp_path / "cut", resumes=check_can_go_on)

    assert summary["num_resumes"] == 1 and summary["num_steps"] == 60
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_ending_the_command_leaves_no_process(tmp_path: Path) -> None:
    config = feed_config(TWO, training={"max_steps": 100_000}, model={"step_s": 0.01})
    running = started(tmp_path, config)
    wait_for(lambda: '"step"' in read(tmp_path / "events.jsonl"))

    running.send_signal(signal.SIGINT)
    running.wait(120)

    wait_for(lambda: no_workers(tmp_path), 60)


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ({"training": {"batches_per_step": 3}}, "make it a multiple of 2"),
        ({"feed": {"run_ahead": 1}}, "feed.run_ahead is 1"),
        ({"feed": {"on_dead": "pause"}}, "feed.on_dead must be one of redistribute, stop"),
        ({"feed": {"on_ded": "stop"}}, "did you mean 'on_dead'"),
        ({"model": {"fail_cloud": "x"}}, "model.fail_cloud must be one of one, two"),
        (
            {"model": {"_target_": "tests.toy.ToyModel"}},
            "must be an OneWayModel, got ToyModel",
        ),
    ],
)
def test_a_wrong_setting_is_named_before_anything_starts(
    groups: dict[str, dict], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        start(tmp_path / "run", WIDE, **groups)

    assert not (tmp_path / "run").exists()

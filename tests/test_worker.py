"""The shell around every role: what it reports, closes and leaves behind. One rank, no network."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.one_way_toy import cloud, feed_config
from xcloud.errors import ConfigError, LinkClosed
from xcloud.job.config import job_from_config
from xcloud.job.job import Job
from xcloud.run import worker
from xcloud.run.agreement import Agreed, Verdict
from xcloud.run.checkpointing import StopSignal
from xcloud.run.resume import Holder
from xcloud.run.role import Role

CONFIG = OmegaConf.create(feed_config({"d": cloud(1), "a": cloud(1, 1.0)}, "local"))


class Noting(Role[Any]):
    """Notes what the shell calls; fails where it is told to."""

    called: list[str]
    fails_in = ""

    def run(self) -> None:
        self._call("run")

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str) -> None:
        self.called.append(name)
        self.reporter.event(name)
        if self.fails_in == name:
            raise LinkClosed(f"broke in {name}")


def live(job: Job, run_dir: Path, agreed: Agreed) -> None:
    worker.live(job, 0, run_dir, agreed, Holder.of(job, 0, run_dir, {}), StopSignal())


@pytest.mark.parametrize("fails_in", ["", "run", "close"])
def test_what_was_said_and_sent_is_kept_however_a_rank_ends(
    fails_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    role = type("Told", (Noting,), {"called": called, "fails_in": fails_in})
    monkeypatch.setattr(worker, "role_of", lambda job, rank: role)
    job = job_from_config(CONFIG)

    if fails_in:
        with pytest.raises(LinkClosed, match=f"broke in {fails_in}"):
            live(job, tmp_path, Agreed())
    else:
        live(job, tmp_path, Agreed())
    assert called == (["run"] if fails_in == "run" else ["run", "close"])
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events] == (called if fails_in else ["run"])
    assert json.loads((tmp_path / "rank0.wire.json").read_text())["rank"] == 0


def test_a_rank_that_is_refused_joins_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = type("Told", (Noting,), {"called": (called := [])})
    monkeypatch.setattr(worker, "role_of", lambda job, rank: role)
    refused = Agreed(Verdict("refused", (0,), "seed is 1 here, 2 there"))

    with pytest.raises(ConfigError, match="seed is 1 here, 2 there"):
        live(job_from_config(CONFIG), tmp_path, refused)
    assert not called

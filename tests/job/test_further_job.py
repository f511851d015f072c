"""What a further kind of job must say: the shell, the links, the records and the summary are those
of every kind. Here each cloud trains a number of its own, and a ring averages them."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.pipelines import in_threads
from xcloud.comm.step_clock import StepClock
from xcloud.job.config import Settings
from xcloud.job.job import Job, Labels
from xcloud.job.leaving import Outbound
from xcloud.launch import one_rank
from xcloud.layout import Layout
from xcloud.net.frame import Kind, MessageKey
from xcloud.net.memory_transport import MemoryWorld
from xcloud.pipeline.control import send_report
from xcloud.pipeline.ends import FRAME_SLACK_BYTES, Ends
from xcloud.rank.agreement import Verdict
from xcloud.rank.role import RankContext, Role
from xcloud.rank.stop_signal import StopSignal
from xcloud.security.audit import join_audit
from xcloud.show.monitor import Monitor
from xcloud.tracking.tracker import NullTracker


@dataclass(frozen=True)
class Place:
    num_ranks: int = 1
    device: str = "cpu"


@dataclass(frozen=True)
class Standing:
    rank: int
    cloud: str


@dataclass(frozen=True)
class Ring(Layout):
    def __post_init__(self) -> None:
        self._check_clouds()
        self._check_links((a, b) for a in self.clouds for b in self.clouds if a < b)

    def placement(self, rank: int) -> Standing:
        return Standing(rank, self.cloud_of(rank))

    @property
    def _described(self) -> str:
        return " to ".join(self.clouds)


@dataclass(frozen=True)
class Rounds:
    max_steps: int = 4


@dataclass(frozen=True, kw_only=True)
class RingJob(Job):
    cluster: Ring
    training: Rounds

    @property
    def labels(self) -> Labels:
        return Labels("ring", "none", "all at once", ("numbers", self.cluster.describe()))

    def check(self) -> None:
        """Nothing to check."""

    def leaving(self) -> list[Outbound]:
        names = list(self.cluster.clouds)
        after = zip(names, [*names[1:], names[0]], strict=True)
        return [Outbound(a, b, "norm", "the number float32 [1]", "once a step") for a, b in after]


class RingRank(Role[RingJob]):
    def __init__(self, context: RankContext[RingJob]) -> None:
        super().__init__(context)
        ranks, size = range(self.job.cluster.num_ranks), FRAME_SLACK_BYTES
        self.ends = ends = Ends(context.transport, self.job.cluster, context.run_dir)
        self.records, window = ends.records, ends.window(1, size)
        self.after = ends.out("ring", ranks[self.rank - len(ranks) + 1], size, window)
        self.before = ends.incoming("ring", ranks[self.rank - 1], size, window)
        if self.rank == 0:
            for peer in ranks[1:]:
                ends.incoming(
                    "reports", peer, size, window, {Kind.REPORT: partial(context.on_report, peer)}
                )
        else:
            self.to_recorder = ends.out("reports", 0, size, window)
        self.value = torch.tensor([float(self.rank)])

    def report(self, lines: bytes) -> None:
        send_report(self.to_recorder, lines)

    def run(self) -> None:
        clock, sent = StepClock(), self.after.record.num_bytes
        for step in range(1, self.job.max_steps + 1):
            clock.begin_step(step)
            key = MessageKey(Kind.NORM, step)
            self.after.send(key, (self.value,), ("the number float32 [1]",))
            with clock.during("wait"):
                (other,) = self.before.recv(key, 10.0)
            self.value = (self.value + other) / 2
            self.reporter.event(
                "step", step=step, step_s=clock.end_step(), loss=float(self.value),
                sent={"other": sent[Kind.NORM] / step},
            )  # fmt: skip
        self.reporter.event("finish")

    def close(self) -> None:
        self.ends.close()


def test_a_further_kind_of_job_needs_a_layout_a_job_and_a_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clouds = {"a": Place(), "b": Place()}
    job = RingJob(name="toy", cluster=Ring(clouds), training=Rounds(), tracker=NullTracker())
    monkeypatch.setattr(one_rank, "role_of", lambda job, rank: RingRank)
    settings = Settings(job, {})
    monitor, world = Monitor(settings, tmp_path), MemoryWorld()

    in_threads(
        [
            partial(
                one_rank.run_rank, settings, tmp_path, Verdict(),
                one_rank.Process(StopSignal()), world.transport(rank),
            )
            for rank in range(2)
        ]
    )  # fmt: skip
    monitor.poll()
    summary = monitor.finish(None)

    assert job.headline == ("toy [demo]: numbers; 2 clouds (a to b), link: the network as it is")
    assert summary["num_steps"] == 4 and summary["final_loss"] == 0.5
    assert summary["num_resumes"] == 0
    assert monitor.attempt.finished_ranks == {0, 1}
    assert summary["wan_bytes_per_step"]["other"] > 0
    assert "the number float32 [1]" in str(join_audit(tmp_path))

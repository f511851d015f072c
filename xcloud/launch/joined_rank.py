"""One rank of a run whose clouds have several owners: it finds ranks of other clouds over sealed
lines alone, and only the ranks of its own cloud over torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from torch._C._distributed_c10d import HashStore, Store

from xcloud.base.errors import ConfigError, LinkError
from xcloud.base.terminal import say
from xcloud.job.config import Settings, this_clouds_keys
from xcloud.job.job import Job
from xcloud.launch.failures import failed
from xcloud.launch.own_progress import OwnProgress
from xcloud.launch.rank_process import RankProcess
from xcloud.layout import ClusterLayout, host_and_port
from xcloud.line.hello import RUN_BYTES
from xcloud.line.line_state import LineState
from xcloud.line.mailbox import Mailbox
from xcloud.line.mailbox_lines import MailboxLines
from xcloud.line.transport import (
    OwnersLines,
    SealedLines,
    SealedPlace,
    SealedRendezvous,
    SealedTransport,
)
from xcloud.net.failure_detector import FailureDetector
from xcloud.net.transport import Rendezvous, Transport, rendezvous_store
from xcloud.rank.agreement import Verdict, rank_name
from xcloud.rank.restarts import store_of_machines
from xcloud.rank.role import Role

_ATTEMPT = "attempt of the line"


class JoinedProcess(RankProcess):
    """A rank that `xcloud join` has started in one cloud.

    attempt: number of this start of the cloud, given by the first rank's machine.
    listen: HOST:PORT where the first rank of this machine listens, if that is not its address.
    meet_at: HOST:PORT of the cloud's first machine, if the cloud has several.
    is_first_here: True for the first rank of its machine. That rank prints its progress.
    """

    crosses_owners = True

    def __init__(
        self,
        file: Path,
        run_dir: Path,
        rank: int,
        attempt: int,
        listen: str | None,
        meet_at: str | None,
    ) -> None:
        self.is_first_here = os.environ["LOCAL_RANK"] == "0"
        super().__init__(file, run_dir, rank, says=self.is_first_here and rank != 0)
        self.attempt = attempt
        self._listen = listen
        self._meet_at = meet_at
        self.detector: FailureDetector | None = None
        self.lines: OwnersLines | None = None

    def rendezvous(self, job: Job) -> Rendezvous:
        layout = job.cluster
        assert isinstance(layout, ClusterLayout), "other layouts refuse cluster/wan=sealed"
        mates = layout.ranks_in(layout.cloud_of(self.rank))
        detector = FailureDetector(
            rank=mates.index(self.rank),
            num_ranks=len(mates),
            liveness=job.cluster.liveness,
            name_of=lambda mate: rank_name(job, mates[mate]),
            on_lost=self._end_alone,
        )
        self.detector = detector
        # Ranks of one cloud trust each other: they share a store, on one machine through a file.
        store: Store
        if len(mates) == 1:
            store = HashStore()
        elif self._meet_at is None:
            store = rendezvous_store(self.run_dir)
        else:
            store = self.meet(job, self._meet_at, mates, detector)
        place = place_of(layout, rank=self.rank, attempt=self.attempt, listen=self._listen)
        keys = this_clouds_keys()
        lines: OwnersLines
        # A line that has ended for good ends this rank, whatever it waits for: it may sit in torch
        # waiting for a mate that dials a machine which is gone (for 121 s, until reconnect_s).
        if isinstance(layout.wan, Mailbox):
            lines = MailboxLines(
                url=layout.wan.url, place=place, keys=keys, say=self._say, on_lost=detector.end
            )
        else:
            lines = SealedLines(place, keys, say=self._say, on_lost=detector.end)
        self.lines = lines
        self.state.lines = lambda: lines.texts
        self.asked.before_exit = lines.abandon
        return SealedRendezvous(
            rank=self.rank,
            num_ranks=layout.num_ranks,
            store=store,
            within_s=place.first_within_s,
            lines=lines,
        )

    def meet(
        self, job: Job, meet_at: str, mates: Sequence[int], detector: FailureDetector
    ) -> Store:
        """Meet this cloud's ranks on other machines. Return their store."""
        host, port = host_and_port(meet_at)
        place = mates.index(self.rank)
        store = store_of_machines(
            host,
            port,
            rank=place,
            num_ranks=len(mates),
            serves=place == 0,
            detector=detector,
            within_s=job.cluster.liveness.join_within_s,
            name_of=lambda mate: rank_name(job, mates[mate]),
            say=self._say,
        )
        # All machines take the attempt of the first, by which other clouds tell a restart.
        if place == 0:
            store.set(_ATTEMPT, str(self.attempt))
        self.attempt = int(store.get(_ATTEMPT))
        return store

    def _end_alone(self, error: LinkError) -> None:
        """End the process from another thread: the main one may wait in torch for a lost rank."""
        self.state.close(failed(error))
        os._exit(self.fail(error))

    def _say(self, text: str) -> None:
        say(text if self.is_first_here else f"rank {self.rank}: {text}")

    def transport(self, job: Job, rendezvous: Rendezvous) -> Transport:
        assert isinstance(rendezvous, SealedRendezvous)
        return SealedTransport(rendezvous)

    def play(self, settings: Settings, rendezvous: Rendezvous, verdict: Verdict) -> bool:
        """Run what all ranks have agreed on."""
        if self.is_first_here and self.rank:
            if verdict.from_step:
                say(f"resumes from step {verdict.from_step}")
            job = settings.job
            cloud = job.cluster.cloud_of(self.rank)
            seen = OwnProgress(job.max_steps, say, cloud=cloud, next_merge=job.next_merge)
            self.state.listener = seen.on_event
        return super().play(settings, rendezvous, verdict)

    @contextmanager
    def taking_part(self, role: Role[Any], final_report: Callable[[], None]) -> Iterator[None]:
        lines = self.lines
        detector = self.detector
        assert lines is not None and detector is not None, "they are there from the rendezvous on"
        detector.connected(bool, final_report)
        with super().taking_part(role, final_report):
            yield
        if self.rank == 0 and isinstance(lines, SealedLines):  # its events need no link
            for state in list(lines.states.values()):
                role.reporter.event("line", **_measured(state))
            role.reporter.flush()
        detector.leave()  # what is left to close ends no run
        lines.close()

    def fail(self, error: BaseException) -> int:
        if self.detector is not None:
            self.detector.close()
        code = super().fail(error)
        if self.lines is not None:
            self.lines.abandon()
        return code


def _measured(state: LineState) -> dict[str, Any]:
    """Return what has been measured of a line, as an event's fields."""
    bandwidth_bits_per_s = 8.0 * state.bytes_per_s if state.bytes_per_s is not None else None
    return {
        "to": state.peer_name,
        "round_trip_s": state.round_trip_s,
        "bandwidth_bits_per_s": bandwidth_bits_per_s,
        "num_cuts": state.num_cuts,
        "num_outages": state.num_outages,
        "outage_s": round(state.outage_s, 3),
        "sent_again_bytes": state.sent_again_bytes,
    }


def place_of(layout: ClusterLayout, rank: int, attempt: int, listen: str | None) -> SealedPlace:
    """Return where a rank stands among the clouds of several owners. attempt, listen: see
    JoinedProcess."""
    listens_at = layout.address_of(rank)
    if listen is not None:
        host, port = host_and_port(listen)
        listens_at = host, port + int(os.environ.get("LOCAL_RANK", "0"))
    clouds = {name: [cloud.num_ranks, cloud.address] for name, cloud in layout.clouds.items()}
    relay = None if layout.relay is None else host_and_port(layout.relay)
    return SealedPlace(
        rank,
        num_ranks=layout.num_ranks,
        run=hashlib.sha256(json.dumps(clouds).encode()).digest()[:RUN_BYTES],
        attempt=attempt,
        cloud_of=layout.cloud_of,
        address_of=layout.address_of,
        listener_of=layout.listener_of,
        listens_at=listens_at,
        first_within_s=layout.liveness.join_within_s,
        reconnect_s=layout.reconnect_s,
        relay=relay,
    )


def check_peers(layout: ClusterLayout, cloud: str) -> None:
    """Raise ConfigError unless this cloud has its key, and a certificate of each cloud to which it
    has a line."""
    keys = this_clouds_keys()
    for there in layout.lines_of(cloud):
        if there not in keys.peers:
            raise ConfigError(
                f"there is a line to cloud {there!r}, and this cloud's policy names no "
                f"certificate of it: get {there}.pem from its owner, put it beside "
                f"{keys.pem_file}, and into policy.yaml: peers: {{{there}: [{there}.pem]}}"
            )


def join_rank(
    file: Path,
    run_dir: Path,
    rank: int,
    attempt: int,
    listen: str | None,
    meet_at: str | None,
    roll_back: bool,
) -> NoReturn:
    """Run one rank of this cloud, then end the process."""
    process = JoinedProcess(file, run_dir, rank, attempt=attempt, listen=listen, meet_at=meet_at)
    process.roll_back = roll_back
    process.main()

"""`python -m xcloud join`: start the ranks of one cloud of a run whose other clouds have other
owners: all of them, or those of one of the cloud's machines."""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from xcloud.base.errors import ConfigError
from xcloud.base.project import MODEL_DIR
from xcloud.base.run_folder import owned
from xcloud.base.terminal import say
from xcloud.job import given
from xcloud.job.config import EXPERIMENT_FILE, Settings, this_clouds_keys, this_clouds_policy
from xcloud.job.job import Job
from xcloud.job.misfits import announce
from xcloud.launch.failures import EXIT_START_AGAIN, check_gpu
from xcloud.launch.joined_rank import check_peers, place_of
from xcloud.launch.local import StopSignals, run_in_owned, stopped_in_words, train
from xcloud.launch.own_progress import what_left
from xcloud.launch.processes import LocalRanks, RunStopped
from xcloud.launch.several_machines import check_unfinished, cloud_meant, stopped_by
from xcloud.layout import ClusterLayout, check_machines, host_and_port
from xcloud.line.mailbox import Mailbox, ObjectStore, local_folder
from xcloud.line.transport import SealedLines
from xcloud.net.link_end import ignore
from xcloud.record.files import forget_launcher, has_events

AGAIN = "give the same command in every cloud"
BEGIN_AGAIN = f"nothing is saved yet; to restart {AGAIN}"


class Machine(NamedTuple):
    """A machine among those of its cloud.

    number: counted from 0.
    meet_at: HOST:PORT of the first of them, where their ranks find each other; None for a cloud
        on one machine.
    """

    number: int = 0
    num_machines: int = 1
    meet_at: str | None = None

    def ranks_of(self, layout: ClusterLayout, cloud: str) -> tuple[int, ...]:
        """Return the cloud's ranks on this machine. Raises ConfigError unless each machine gets
        as many, and has an address where the cloud gives several."""
        ranks = layout.ranks_in(cloud)
        addresses = layout.clouds[cloud].addresses
        if len(addresses) > 1 and len(addresses) != self.num_machines:
            raise ConfigError(
                f"cluster.clouds.{cloud}.address names {len(addresses)} machines, and --nnodes "
                f"is {self.num_machines}"
            )
        check_machines(len(ranks), num_machines=self.num_machines, where="--nnodes")
        count = len(ranks) // self.num_machines
        return ranks[self.number * count : (self.number + 1) * count]


ALONE = Machine()


class CloudRanks(LocalRanks):
    """The worker processes of one cloud of a run, on one machine.

    listen: see JoinedProcess.
    more_words: further words for the command of each rank.
    """

    def __init__(
        self,
        job: Job,
        run_dir: Path,
        file: Path,
        cloud: str,
        machine: Machine,
        listen: str | None,
        more_words: Sequence[str],
    ) -> None:
        layout = job.cluster
        assert isinstance(layout, ClusterLayout), "other layouts refuse cluster/wan=sealed"
        ranks = machine.ranks_of(layout, cloud)
        super().__init__(
            run_dir,
            [cloud] * len(ranks),
            liveness=layout.liveness,
            experiment_file=file,
            first_rank=ranks[0],
            max_restarts=job.launch.max_restarts,
        )
        self.speaker = ranks[0]
        if machine.meet_at is not None:
            self.interface = {}  # the one that faces the first machine, or what the shell has set
        self.layout = layout
        self._machine = machine
        self._listen = listen
        self._more_words = more_words
        self.attempt = 0

    def start(self) -> None:
        is_restart = self.attempt > 0
        # The others tell attempts of this cloud apart by it.
        self.attempt = max(self.attempt + 1, int(time.time()))
        super().start()
        has_first = self._machine.number == 0  # which alone speaks for the cloud
        # At once: the new rank imports torch before it could say so, and the other cloud would
        # start 8 s after a kill instead of 0.5 s. In a mailbox ranks hear of it by themselves.
        if is_restart and has_first and not isinstance(self.layout.wan, Mailbox):
            threading.Thread(target=self.tell_other_clouds, daemon=True).start()

    def tell_other_clouds(self) -> None:
        """Report to other clouds that this one restarts. The first cloud reports it to all. Others
        report it to the first, which restarts too and then reports it to the rest."""
        first, *others = (self.layout.ranks_in(cloud)[0] for cloud in self.layout.clouds)
        place = place_of(
            self.layout, rank=self.ranks[0], attempt=self.attempt, listen=self._listen
        )
        with contextlib.suppress(ConfigError):  # the port is taken: the new rank will say so
            lines = SealedLines(place, keys=this_clouds_keys(), say=ignore)
            lines.tell_of_restart(others if place.rank == first else [first])

    def words_of(self, rank: int) -> list[str]:
        own = ["--attempt", str(self.attempt), "--run-dir", str(self.run_dir)]
        if self._listen is not None:
            own += ["--listen", self._listen]
        if self._machine.meet_at is not None:
            own += ["--meet-at", self._machine.meet_at]
        return [*super().words_of(rank), *own, *self._more_words]

    def who_stopped(self, asked: int | None) -> str:
        own = self.layout.cloud_of(self.ranks[0])
        if asked is not None and not self.is_asked_to_stop:
            return f"stopped by {self.layout.cloud_of(asked)}"
        clouds = [*self.layout.clouds] if self._machine.num_machines == 1 else []
        return stopped_by(clouds, own, was_asked=self.is_asked_to_stop)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m xcloud join", description=__doc__)
    parser.add_argument("experiment", type=Path, help="experiment file, the same in all clouds")
    parser.add_argument("--cloud", help="this cloud (default: `me` of its policy)")
    parser.add_argument(
        "--run-dir", type=Path, help="where to write (default: runs/EXPERIMENT-CLOUD)"
    )
    parser.add_argument(
        "--roll-back", action="store_true",
        help="delete agreed checkpoints that are later than the one all ranks resume from",
    )  # fmt: skip
    parser.add_argument(
        "--listen", metavar="HOST:PORT",
        help="where the first rank here listens, if not at the address of this cloud that the "
        "others dial: behind an ingress or a translation of addresses",
    )  # fmt: skip
    several = parser.add_argument_group("a cloud of several machines, in torchrun's words")
    several.add_argument("--nnodes", type=int, default=1, help="how many machines it has")
    several.add_argument("--node-rank", type=int, default=0, help="which of them this is, from 0")
    several.add_argument("--master-addr", help="address of the first one, for the others")
    several.add_argument("--master-port", type=int, default=29500, help="a free port there")
    arguments = parser.parse_args(words)
    file: Path = arguments.experiment
    cloud = cloud_meant(arguments.cloud, me=this_clouds_policy().me)
    if cloud is None:
        raise ConfigError("give --cloud, or say in the policy of this cloud which it is (me)")
    more = ["--roll-back"] if arguments.roll_back else []
    if arguments.listen is not None:
        try:
            host_and_port(arguments.listen)
        except ValueError:
            raise ConfigError(f"--listen must be HOST:PORT, got {arguments.listen}") from None
    machine = ALONE
    if arguments.nnodes != 1:
        if arguments.master_addr is None or not 0 <= arguments.node_rank < arguments.nnodes:
            raise ConfigError(
                "a cloud of several machines needs --nnodes, --master-addr with the address of "
                "the first one, and on each another --node-rank, from 0"
            )
        host = arguments.master_addr
        host = f"[{host}]" if ":" in host else host
        machine = Machine(
            arguments.node_rank, arguments.nnodes, meet_at=f"{host}:{arguments.master_port}"
        )
    run_dir = arguments.run_dir or Path("runs") / f"{file.stem}-{cloud}"
    try:
        join(
            file,
            run_dir.resolve(),
            cloud=cloud,
            machine=machine,
            listen=arguments.listen,
            more_words=more,
        )
    except RunStopped as stopped:
        say(f"xcloud: {stopped}", error=True)
        return EXIT_START_AGAIN
    return 0


def join(
    file: Path,
    run_dir: Path,
    cloud: str,
    machine: Machine = ALONE,
    listen: str | None = None,
    more_words: Sequence[str] = (),
) -> None:
    """Run the ranks of one cloud, those on this machine, to the end of the run.

    listen, more_words: see CloudRanks.

    Raises ConfigError before anything starts, RunFailed and RunStopped as `run` does.
    """
    settings = given.read_shared(file, run_dir)
    job = settings.job
    layout = job.cluster
    if not layout.between_owners:
        raise ConfigError(
            f"{file} has another cluster.wan than those that join the clouds of several owners: "
            "write it with cluster/wan=sealed, or with cluster/wan=mailbox"
        )
    assert isinstance(layout, ClusterLayout), "other layouts refuse cluster/wan=sealed"
    ranks = machine.ranks_of(layout, cloud)
    # Said once and before anything is loaded, where each rank would fail by itself.
    check_peers(layout, cloud)
    if listen is not None and not layout.clouds[cloud].addresses:
        raise ConfigError(
            f"--listen is for a cloud that others dial, and cluster.clouds.{cloud} has no address"
        )
    if isinstance(layout.wan, Mailbox) and local_folder(layout.wan.url):
        # Said here, it is said once, before anything is loaded. A bucket's library would start
        # threads in this process, and is left to the ranks.
        ObjectStore(layout.wan.url)
    if layout.clouds[cloud].device == "cuda":
        check_gpu(cloud)
    ranks_of = partial(
        CloudRanks, cloud=cloud, machine=machine, listen=listen, more_words=more_words
    )
    with owned(run_dir):
        check_unfinished(job, run_dir)
        say(lines_in_words(layout, cloud, ranks))
        # An ingress sees of a line only the name in its TLS hello, and must choose the rank by it.
        if listen is not None:
            say(labels_in_words(layout, cloud))
        if ranks[0] == 0:
            run_in_owned(
                settings,
                run_dir,
                resumes=has_events(run_dir),
                more_follows=False,
                ranks_of=ranks_of,
                again=AGAIN,
                unsaved=BEGIN_AGAIN,
            )
        else:
            _run_part(settings, run_dir, ranks=ranks_of(job, run_dir, run_dir / EXPERIMENT_FILE))


def _run_part(settings: Settings, run_dir: Path, ranks: LocalRanks) -> None:
    """Run ranks without the first one of the run, whose machine keeps the record of the run."""
    job = settings.job
    settings.write(run_dir / EXPERIMENT_FILE)
    announce(job)
    signals = StopSignals(ranks.ask_to_stop)
    with signals.handled():
        try:
            train(ranks, next_attempt=lambda: None, follow=lambda: True)
        except RunStopped:
            by = ranks.who_stopped(asked=None)
            raise RunStopped(
                stopped_in_words(run_dir, by, again=AGAIN, unsaved=BEGIN_AGAIN)
            ) from None
        finally:
            signals.writes_record = True
            ranks.end()
            forget_launcher(run_dir)
            if table := what_left(run_dir):
                say(table)
    if (run_dir / MODEL_DIR).is_dir():
        say(f"this cloud's part of the model: {run_dir / MODEL_DIR}")


def labels_in_words(layout: ClusterLayout, cloud: str) -> str:
    """Say by which name in the clear an ingress finds each rank of this cloud."""
    places = [place_of(layout, rank=r, attempt=0, listen=None) for r in layout.ranks_in(cloud)]
    names = ", ".join(f"rank {one.rank} {one.label_of(one.rank)}" for one in places)
    return f"names in the TLS hello, for an ingress: {names}"


def lines_in_words(layout: ClusterLayout, cloud: str, ranks: Sequence[int]) -> str:
    """Say to which clouds this one has a line, and which end of it dials. ranks: of this
    machine."""
    if isinstance(layout.wan, Mailbox):
        return f"cloud {cloud}: the mailbox {layout.wan.url}"
    texts = []
    for there in layout.lines_of(cloud):
        if layout.is_relayed(cloud, there):
            texts.append(f"it meets {there} at the relay {layout.relay}")
        elif layout.listener_of(cloud, there) == cloud:
            ports = [address[1] for r in ranks if (address := layout.address_of(r))]
            where = f"port {ports[0]}" if len(ports) == 1 else f"ports {ports[0]} to {ports[-1]}"
            texts.append(f"{there} dials {where} here")
        else:
            texts.append(
                f"this cloud dials {there} at {', '.join(layout.clouds[there].addresses)}"
            )
    return f"cloud {cloud}: {'; '.join(texts)}"

"""All ranks of a job in one process, over links in memory: one-way jobs on one machine."""

from pathlib import Path

from xcloud.job.config import Settings
from xcloud.launch.one_rank import DONE, STOPPED, Process, join, run_rank
from xcloud.net.memory_transport import MemoryTransport, in_threads
from xcloud.rank.agreement import table_of
from xcloud.rank.stop_signal import StopSignal
from xcloud.record.reporter import RankState


def run_in_threads(settings: Settings, run_dir: Path, asked: StopSignal, state: RankState) -> bool:
    """Run each rank in a thread of its own. Return whether the run has ended early.

    state: the state of rank 0.
    """
    job = settings.job
    table = table_of(settings.compared)

    def work(transport: MemoryTransport) -> bool:
        rank = transport.rank
        own = RankState(run_dir, rank) if rank else state
        _, verdict = join(
            job, table, rank=rank, run_dir=run_dir, find_others=lambda: transport.rendezvous
        )
        is_stopped = run_rank(
            settings, run_dir, verdict, process=Process(asked, state=own), transport=transport
        )
        if rank:
            own.close(STOPPED if is_stopped else DONE)
        return is_stopped

    return in_threads(job.cluster.num_ranks, work)[-1]

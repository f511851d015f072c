"""All ranks of a job in one process, over links in memory: one-way jobs on one machine."""

from pathlib import Path

from xcloud.job.job import Job
from xcloud.launch.one_rank import DONE, STOPPED, Process, join, run_rank
from xcloud.net.memory_transport import MemoryTransport, in_threads
from xcloud.rank.agreement import Table
from xcloud.rank.stop_signal import StopSignal
from xcloud.record.reporter import RankState


def run_in_threads(
    job: Job, table: Table, run_dir: Path, asked: StopSignal, state: RankState
) -> bool:
    """Run each rank in a thread of its own. Return whether the run has ended early.

    state: of rank 0.
    """

    def work(transport: MemoryTransport) -> bool:
        rank = transport.rank
        own = RankState(run_dir=run_dir, rank=rank) if rank else state
        _, verdict = join(
            job, table, rank=rank, run_dir=run_dir, find_others=lambda: transport.rendezvous
        )
        is_stopped = run_rank(
            job,
            run_dir=run_dir,
            settings=table["setting"],
            verdict=verdict,
            process=Process(asked=asked, state=own),
            transport=transport,
        )
        if rank:
            own.close(STOPPED if is_stopped else DONE)
        return is_stopped

    return in_threads(job.cluster.num_ranks, work=work)[-1]

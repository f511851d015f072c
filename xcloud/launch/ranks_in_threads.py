"""All ranks of a job in one process, over links in memory: one-way jobs on one machine."""

from pathlib import Path

from xcloud.features.checkpoints.saving import StopSignal
from xcloud.job.job import Job
from xcloud.launch import rank_process
from xcloud.launch.rank_process import DONE, STOPPED, Process, join
from xcloud.net.memory_transport import MemoryTransport, in_threads
from xcloud.rank.agreement import Table
from xcloud.record.reporter import RankState


def live(job: Job, table: Table, run_dir: Path, asked: StopSignal, state: RankState) -> bool:
    """Each rank in a thread, as rank_process.live. state: of rank 0."""

    def work(transport: MemoryTransport) -> bool:
        rank = transport.rank
        own = RankState(run_dir, rank) if rank else state
        _, verdict = join(job, table, rank, run_dir, lambda: transport.meeting)
        process = Process(asked, own)
        is_stopped = rank_process.live(job, run_dir, table["setting"], verdict, process, transport)
        if rank:
            own.close(STOPPED if is_stopped else DONE)
        return is_stopped

    return in_threads(job.cluster.num_ranks, work)[-1]

"""What the ranks of producers and of the consumer share in a one-way job. Batches go from every
rank of a producer to every rank of the consumer, orders from the consumer's first rank to every
producer. Reports, checkpoints and signs of life go through the same star around rank 0 as in any
job.

The consumer must outlive any producer: there is no collective over both, only over the ranks of
one cloud, and each point-to-point link ends alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from xcloud.base.errors import LinkError
from xcloud.cluster.frame import Frame, Kind
from xcloud.cluster.link_end import SendingEnd
from xcloud.cluster.link_profile import LinkWindow
from xcloud.comm.state import Stateful
from xcloud.comm.step_clock import StepClock, What
from xcloud.contracts.one_way_parts import OneWayContext
from xcloud.job.one_way import OneWayExperiment
from xcloud.parallel.control import CHECKPOINT_CARRIES, REPORT_CARRIES, Control
from xcloud.rank.memory import MemoryMeter, bytes_of
from xcloud.rank.role import RankContext, Role
from xcloud.survive.checkpointing import Checkpointer
from xcloud.training.divergence import DivergenceGuard
from xcloud.wire.ends import FRAME_SLACK_BYTES
from xcloud.wire.one_way_ends import OneWayEnds
from xcloud.wire.wiring import join_control

_ORDER_BYTES = 12  # a number, a rank of the consumer, batches in all, int32 each
_MORE_AHEAD = 8  # messages on a link beside batches or orders for them

CARRIES = {
    Kind.BATCH: ("packed token ids and flags uint8 [N]",),
    Kind.READY: (),
    Kind.REPORT: REPORT_CARRIES,
    Kind.ORDER: ("number and receiver of each ordered batch, plan in all int32 [N, 3]",),
    Kind.STOP: (),
    Kind.ALIVE: (),
    Kind.CHECKPOINT: CHECKPOINT_CARRIES,
}


class OneWayRank(Role[OneWayExperiment]):
    """computing: held by the one rank that computes where all are in one process. most_waiting:
    batches ordered or waiting at one source, late ones too, which lost their slot."""

    def __init__(self, context: RankContext[OneWayExperiment]) -> None:
        super().__init__(context)
        layout, most_ahead = self.job.cluster, self.job.feed.most_ahead
        self.place = layout.placement(self.rank)
        # The consumer notes what it gets: a producer that is lost leaves no record of its own.
        self.ends = OneWayEnds(
            context.transport, layout, context.run_dir,
            carries=CARRIES if self.place.producer is None else None,
        )  # fmt: skip
        self.computing = context.transport.computing
        groups = [
            self.ends.group(layout.ranks_in(cloud), context.device) for cloud in layout.clouds
        ]
        (self.group,) = (group for group in groups if group is not None)
        self.most_waiting = 4 * most_ahead + 64
        self._capacity = {
            "batches": self.job.model.max_payload_bytes + FRAME_SLACK_BYTES,
            "orders": 2 * _ORDER_BYTES * most_ahead + FRAME_SLACK_BYTES,
        }
        self.control: Control = join_control(self.ends, context.on_report)
        self.lives, self.records = self.ends.lives, self.ends.records
        self.received = self.ends.received
        self.memory = MemoryMeter(context.device)

    def out(self, line: str, peer: int) -> SendingEnd:
        return self.ends.out(line, peer, self._capacity[line], self._window(line))

    def incoming(
        self, line: str, peer: int, handlers: Mapping[Kind, Callable[[Frame], None]],
        on_end: Callable[[LinkError], None],
    ) -> None:  # fmt: skip
        window = self._window(line)
        self.ends.incoming(line, peer, self._capacity[line], window, handlers, on_end=on_end)

    def _window(self, line: str) -> LinkWindow:
        under_way = self.job.feed.most_ahead + _MORE_AHEAD
        return self.ends.window(under_way, self._capacity[line])

    def divergence_guard(self) -> DivergenceGuard:
        training = self.job.training
        return DivergenceGuard(training.on_divergence, training.max_skips_in_a_row)

    def building(self, num_steps: int) -> OneWayContext:
        place = self.place
        return OneWayContext(
            seed=self.job.seed,
            device=self.context.device,
            cache_dir=self.job.cache_path,
            report=self.reporter.note,
            group_rank=place.group_rank,
            barrier=self.group.barrier,
            num_steps=num_steps,
            producers=self.job.cluster.producers,
            cloud=place.cloud,
            group_size=place.group_size,
        )

    @contextmanager
    def computing_in(self, clock: StepClock, what: What) -> Iterator[None]:
        """Once it is this rank's turn, which it waits for."""
        with ExitStack() as stack:
            with clock.during("wait"):
                stack.enter_context(self.computing)
            with clock.during(what):
                yield

    def report_memory(self, module: nn.Module | None, part: Stateful) -> None:
        moments = [
            value
            for name, value in part.state_dict().items()
            if "moments." in name and isinstance(value, Tensor)
        ]
        modules = [] if module is None else [module]
        self.reporter.event("memory", **self.memory.describe(modules, bytes_of(moments)))

    def leave(self, checkpoints: Checkpointer) -> None:
        """Once this rank has nothing more to do. What counts as a checkpoint rank 0 says before
        its goodbye."""
        if self.rank != 0:
            self.ends.await_goodbye(0)
        checkpoints.close(is_finished=not self.is_stopped)
        self.reporter.flush()
        self.ends.close()

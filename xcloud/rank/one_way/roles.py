"""The roles in a one-way job: a rank of a producer, one of the consumer, and one that is all of
them in turn. Their loops are in producer.py and consumer.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn

from xcloud.cluster.liveness import Heartbeat
from xcloud.cluster.transport import GlooTransport
from xcloud.comm.state import Stateful
from xcloud.contracts.one_way_parts import Consumer, OneWayContext
from xcloud.job.one_way import OneWayExperiment
from xcloud.parallel.rank_group import RankGroup
from xcloud.rank.export import exporting
from xcloud.rank.one_way.consumer import ConsumerRun
from xcloud.rank.one_way.feeding import Feeding, LocalFeeding
from xcloud.rank.one_way.producer import ProducerRun, feed
from xcloud.rank.one_way.wiring import OneWayWirer
from xcloud.rank.role import RankContext, Role
from xcloud.record.rank_state import ready_file
from xcloud.survive.checkpointing import Post
from xcloud.training.memory_meter import MemoryMeter, bytes_of
from xcloud.training.trainer import DivergenceGuard


class OneWayRank(Role[OneWayExperiment]):
    """What all three have in common."""

    lane = 0

    def __init__(self, context: RankContext[OneWayExperiment]) -> None:
        super().__init__(context)
        self._memory = MemoryMeter(context.device)

    def _wirer(self) -> OneWayWirer:
        job = self.job
        return OneWayWirer(
            GlooTransport(self.rank, self.context.device), job.cluster,
            job.model.max_payload_bytes, job.feed.most_ahead, self.context.run_dir,
            2 * job.max_steps * job.training.batches_per_step + 4096,  # late ones are made twice
        )  # fmt: skip

    def _building(self, cloud: RankGroup, num_steps: int) -> OneWayContext:
        return OneWayContext(
            self.job.seed, self.context.device, self.job.cache_path, cloud.barrier,
            self.reporter.note, num_steps, self.job.cluster.producers,
        )  # fmt: skip

    def _producer(self, index: int, lane: int, num_lanes: int, cloud: RankGroup) -> ProducerRun:
        """One rank of producer `index`, of which `cloud` holds `num_lanes`."""
        job, name = self.job, self.job.cluster.producers[index]
        # Batches that each rank will make if every cloud keeps to its share.
        wanted = job.max_steps * job.training.batches_per_step * job.cluster.shares[index]
        building = self._building(cloud, max(1, math.ceil(wanted / num_lanes)))
        part = job.model.producer(index, name, lane, num_lanes, building)
        guard = DivergenceGuard(job.training.on_divergence, job.training.max_skips_in_a_row)
        return ProducerRun(part, cloud, num_lanes, name, self.reporter, guard, self._memory)

    def _consume(
        self,
        feeding: Feeding,
        num_lanes: int,
        post: Post | None = None,
        producers: Sequence[ProducerRun] = (),
    ) -> Consumer:
        """Up to the export of what this rank has trained; lets the producers go. producers: those
        in this process, which are saved with it."""
        self._phase("loading")
        building = self._building(feeding.cloud, self.job.max_steps)
        part = self.job.model.consumer(self.lane, num_lanes, building)
        run_dir = self.context.run_dir
        run = ConsumerRun(self.job, feeding, part, num_lanes, self.reporter, run_dir, self._memory)
        parts: dict[str, Stateful] = {"consumer": run}
        parts |= {f"producer {number}": producer for number, producer in enumerate(producers)}
        checkpoints = self.checkpoints(parts, post, {})
        run.save_with(checkpoints)
        feeding.cloud.barrier()
        self._phase("training")
        self.context.asked.is_armed = self.job.checkpoint.are_made
        self.is_stopped = run.train()
        self.context.asked.is_armed = False
        checkpoints.close()
        run.stop_producers()
        if not self.is_stopped:
            checkpoints.keep_newest()
            with exporting(run_dir):
                part.export(run_dir, self.lane)
        return part

    def _evaluate(self, part: Consumer) -> None:
        if self.is_stopped:
            self.reporter.event("stop")
            return
        self._phase("evaluation")
        started = time.perf_counter()
        quality = dict(part.evaluate(self.lane))
        if self.lane == 0 and quality:
            self.reporter.event(
                "quality",
                now=True,
                split="test",
                step=self.job.max_steps,
                values=quality,
                signature={},
                evaluation_s=round(time.perf_counter() - started, 3),
                samples_text="",
            )
        self.reporter.event("finish", num_steps=self.job.max_steps)

    def _tell_memory(self, *trained: tuple[nn.Module | None, Stateful]) -> None:
        """trained: of each part of this rank its module and its state."""
        moments = [
            value
            for _, part in trained
            for name, value in part.state_dict().items()
            if "moments." in name and isinstance(value, Tensor)
        ]
        modules = [module for module, _ in trained if module is not None]
        self.reporter.event("memory", **self._memory.describe(modules, bytes_of(moments)))

    def _phase(self, name: str) -> None:
        if self.lane == 0:
            self.reporter.event("phase", now=True, name=name)


class ProducerRank(OneWayRank):
    """One rank of a cloud that feeds."""

    def __init__(self, context: RankContext[OneWayExperiment]) -> None:
        super().__init__(context)
        wirer = self._wirer()
        self.wiring, self.lives = wirer.producer(), wirer.lives
        self.records = self.wiring.records

    def report(self, lines: bytes) -> None:
        self.wiring.report(lines)

    def run(self) -> None:
        place, run_dir = self.job.cluster.placement(self.rank), self.context.run_dir
        assert place.producer is not None
        run = self._producer(place.producer, place.lane, place.num_lanes, self.wiring.cloud)
        checkpoints = self.checkpoints({"producer": run}, self.wiring, {})
        ready_file(run_dir, self.rank).touch()
        self.wiring.say_ready()
        self.context.asked.is_armed = self.job.checkpoint.are_made
        self.is_stopped = feed(run, self.wiring, checkpoints)
        self.context.asked.is_armed = False
        checkpoints.close()
        self._tell_memory((run.part.parameters_module, run.part))
        self.reporter.flush()
        if self.is_stopped:
            self.reporter.event("stop")
            return
        checkpoints.keep_newest()
        with exporting(run_dir):
            run.part.finish(run_dir, place.lane)
        self.reporter.event("finish")

    def alive(self) -> AbstractContextManager[object]:
        return Heartbeat(self.job.cluster.liveness.interval_s, self.wiring.say_alive)

    def close(self) -> None:
        self.wiring.close(self.job.cluster.liveness.lost_after_s)


class ConsumerRank(OneWayRank):
    """One rank of the cloud that is fed."""

    def __init__(self, context: RankContext[OneWayExperiment]) -> None:
        super().__init__(context)
        wirer = self._wirer()
        self.wiring, self.lives = wirer.consumer(context.on_report), wirer.lives
        self.records, self.received = self.wiring.records, self.wiring.received
        self.lane = self.job.cluster.placement(self.rank).lane
        for rank in context.verdict.refused:
            producer = self.job.cluster.placement(rank).producer
            assert producer is not None
            why = f"refused before the start: {context.verdict.text}"
            self.wiring.inbox.refuse(producer, why)

    def report(self, lines: bytes) -> None:
        self.wiring.report(lines)

    def needs(self, lost: frozenset[int]) -> bool:
        """One of those that feed it, too; of those that have ended the plan knows what to do."""
        if super().needs(lost):
            return True
        if self.rank != 0 or not self.wiring.is_fed:
            return False
        layout, inbox = self.job.cluster, self.wiring.inbox
        silent = [
            not lost.isdisjoint(layout.ranks_in(cloud))
            for producer, cloud in enumerate(layout.producers)
            if not inbox.ended(producer)
        ]
        return any(silent) if self.job.feed.on_slow == "wait" else bool(silent) and all(silent)

    def run(self) -> None:
        part = self._consume(self.wiring, self.job.cluster.num_consumers, self.wiring)
        self._tell_memory((part.module, part))
        # The producers export and go before the evaluation, which may take long, or fail.
        lost_after_s = self.job.cluster.liveness.lost_after_s
        patience_s = max(lost_after_s, self.job.feed.slow_after_s)
        for producer, reason in self.wiring.close_producers(patience_s).items():
            if self.rank == 0:
                name = self.job.cluster.producers[producer]
                self.reporter.note(
                    f"producer {name} did not come to its end; if it learns, its model is not "
                    f"exported ({reason})"
                )
        self._evaluate(part)

    def close(self) -> None:
        self.wiring.close(self.job.cluster.liveness.lost_after_s)


class LocalRank(OneWayRank):
    """Producers and consumer in turn, in this one process."""

    def run(self) -> None:
        alone, run_dir = RankGroup.alone(), self.context.run_dir
        numbers = range(len(self.job.cluster.producers))
        producers = [self._producer(number, 0, 1, alone) for number in numbers]
        feeding = LocalFeeding(producers, self.job.model.max_payload_bytes)
        consumer = self._consume(feeding, 1, None, producers)
        fed = ((producer.part.parameters_module, producer.part) for producer in producers)
        self._tell_memory((consumer.module, consumer), *fed)
        for producer in producers if not self.is_stopped else ():
            producer.tell()
            with exporting(run_dir):
                producer.part.finish(run_dir, 0)
            self.reporter.event("finish", cloud=producer.name)
        self._evaluate(consumer)

"""What one rank of a one-way job does, from an empty process that is joined to the others to an
exported part. worker.py starts it; feed_producer.py and feed_consumer.py are the two loops.
"""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path

import torch

from xcloud.cluster.liveness import Heartbeat
from xcloud.cluster.one_way_layout import OneWayPlacement
from xcloud.cluster.transport import GlooTransport
from xcloud.errors import ConfigError, LinkError
from xcloud.job.one_way import OneWayExperiment
from xcloud.parallel.one_way.parts import Consumer, OneWayContext
from xcloud.parallel.rank_group import RankGroup
from xcloud.project import project_root
from xcloud.record.events import EVENTS_FILE
from xcloud.record.reporter import EventFile, Reporter
from xcloud.run.agreement import Agreed
from xcloud.run.export import exporting
from xcloud.run.launch import error_file, ready_file
from xcloud.run.one_way.consumer import ConsumerRun, LocalFeeding
from xcloud.run.one_way.producer import ProducerRun, feed
from xcloud.run.one_way.wiring import ConsumerWiring, OneWayWirer, ProducerWiring
from xcloud.security.wire_audit import write_rank_audit
from xcloud.training.divergence import DivergenceGuard

LAST_WORDS_S = 0.3


def run_one_way(
    experiment: OneWayExperiment, rank: int, run_dir: Path, device: torch.device, agreed: Agreed
) -> None:
    """One rank's whole life, once its process group is there (a lone rank needs none) and the
    ranks have compared what they run."""
    placement = experiment.cluster.placement(rank)
    if experiment.cluster.form == "local":
        _local(experiment, run_dir, device)
    elif placement.producer is None:
        _consume(experiment, placement, run_dir, device, agreed)
    else:
        _produce(experiment, placement, run_dir, device, agreed)


def _produce(
    experiment: OneWayExperiment,
    placement: OneWayPlacement,
    run_dir: Path,
    device: torch.device,
    agreed: Agreed,
) -> None:
    rank, layout = placement.rank, experiment.cluster
    error_file(run_dir, rank).unlink(missing_ok=True)  # of an earlier run in this folder
    wiring = _wirer(experiment, rank, run_dir).producer()
    wiring.records.extend(agreed.records)
    reporter = Reporter(rank, placement.cloud, wiring.report)
    with Heartbeat(layout.liveness.interval_s, wiring.say_alive):
        _feed(experiment, placement, wiring, reporter, run_dir, device, agreed)
        reporter.flush()
        wiring.close(layout.liveness.lost_after_s)
    write_rank_audit(run_dir, rank, layout, wiring.records, reporter.contents)


def _feed(
    experiment: OneWayExperiment,
    placement: OneWayPlacement,
    wiring: ProducerWiring,
    reporter: Reporter,
    run_dir: Path,
    device: torch.device,
    agreed: Agreed,
) -> None:
    rank = placement.rank
    try:
        assert placement.producer is not None
        if agreed.verdict.kind == "refused":
            raise ConfigError(agreed.verdict.text)
        batches = _batches_of(experiment, placement.producer)
        part = experiment.model.producer(
            placement.producer, placement.cloud, placement.lane, placement.num_lanes,
            _context(experiment, device, wiring.cloud, reporter, batches),
        )  # fmt: skip
        run = ProducerRun(
            part, wiring.cloud, placement.num_lanes, placement.cloud, reporter, _guard(experiment)
        )
        ready_file(run_dir, rank).touch()
        wiring.say_ready()
        feed(run, wiring)
        reporter.flush()
        with exporting(run_dir):
            part.finish(run_dir, placement.lane)
        reporter.event("finish")
    except BaseException:
        _last_words(reporter)
        write_rank_audit(run_dir, rank, experiment.cluster, wiring.records, reporter.contents)
        raise


def _consume(
    experiment: OneWayExperiment,
    placement: OneWayPlacement,
    run_dir: Path,
    device: torch.device,
    agreed: Agreed,
) -> None:
    rank, liveness = placement.rank, experiment.cluster.liveness
    events = EventFile(run_dir / EVENTS_FILE) if rank == 0 else None
    wiring = _wirer(experiment, rank, run_dir).consumer(
        events.append_frame if events is not None else lambda frame: None
    )
    wiring.records.extend(agreed.records)
    for refused in agreed.verdict.refused:
        producer = experiment.cluster.placement(refused).producer
        assert producer is not None
        wiring.inbox.refuse(producer, f"refused before the start: {agreed.verdict.text}")
    sink = events.append if events is not None else wiring.report
    reporter = Reporter(rank, placement.cloud, sink)
    if rank == 0 and agreed.verdict.text and not agreed.verdict.refused:
        reporter.note(agreed.verdict.text)
    try:
        part = _train(experiment, wiring, placement, run_dir, device, reporter)
        # The producers export and go before the evaluation, which may take long, or fail.
        patience_s = max(liveness.lost_after_s, experiment.feed.slow_after_s)
        for producer, reason in wiring.close_producers(patience_s).items():
            if rank == 0:
                name = experiment.cluster.producers[producer]
                reporter.note(
                    f"producer {name} did not come to its end; if it learns, its model is not "
                    f"exported ({reason})"
                )
        _evaluate(experiment, part, placement, reporter)
    except BaseException:
        _last_words(reporter)
        if events is not None:
            events.close()
        _write_consumer_audit(experiment, rank, run_dir, wiring, reporter)
        raise
    reporter.flush()
    wiring.close(liveness.lost_after_s)
    if events is not None:
        events.close()
    _write_consumer_audit(experiment, rank, run_dir, wiring, reporter)


def _write_consumer_audit(
    experiment: OneWayExperiment,
    rank: int,
    run_dir: Path,
    wiring: ConsumerWiring,
    reporter: Reporter,
) -> None:
    """With what came, for producers that are lost or on another machine."""
    write_rank_audit(
        run_dir, rank, experiment.cluster, wiring.records, reporter.contents, wiring.received
    )


def _train(
    experiment: OneWayExperiment,
    wiring: ConsumerWiring | LocalFeeding,
    placement: OneWayPlacement,
    run_dir: Path,
    device: torch.device,
    reporter: Reporter,
) -> Consumer:
    """Up to the export of what this rank has trained; lets the producers go."""
    lane, num_lanes = placement.lane, placement.num_lanes
    leads = lane == 0
    if leads:
        reporter.event("phase", now=True, name="loading")
    context = _context(experiment, device, wiring.cloud, reporter, experiment.training.max_steps)
    part = experiment.model.consumer(lane, num_lanes, context)
    run = ConsumerRun(experiment, wiring, part, num_lanes, reporter, run_dir)
    wiring.cloud.barrier()
    if leads:
        reporter.event("phase", now=True, name="training")
    run.train()
    run.stop_producers()
    with exporting(run_dir):
        part.export(run_dir, lane)
    return part


def _evaluate(
    experiment: OneWayExperiment, part: Consumer, placement: OneWayPlacement, reporter: Reporter
) -> None:
    leads = placement.lane == 0
    if leads:
        reporter.event("phase", now=True, name="evaluation")
    started = time.perf_counter()
    quality = dict(part.evaluate(placement.lane))
    if leads and quality:
        reporter.event(
            "quality",
            now=True,
            split="test",
            step=experiment.training.max_steps,
            values=quality,
            signature={},
            evaluation_s=round(time.perf_counter() - started, 3),
            samples_text="",
        )
    reporter.event("finish", num_steps=experiment.training.max_steps)


def _local(experiment: OneWayExperiment, run_dir: Path, device: torch.device) -> None:
    """Producers and consumer in turn, in this one process."""
    layout, model = experiment.cluster, experiment.model
    events = EventFile(run_dir / EVENTS_FILE)
    reporter = Reporter(0, layout.consumer, events.append)
    alone = RankGroup.alone()
    try:
        parts, producers = [], []
        for index, name in enumerate(layout.producers):
            batches = _batches_of(experiment, index)
            context = _context(experiment, device, alone, reporter, batches)
            parts.append(model.producer(index, name, 0, 1, context))
            producers.append(ProducerRun(parts[-1], alone, 1, name, reporter, _guard(experiment)))
        feeding = LocalFeeding(producers, model.max_payload_bytes)
        place = OneWayPlacement(0, layout.consumer, None, 0, 1)
        consumer = _train(experiment, feeding, place, run_dir, device, reporter)
        for part, producer in zip(parts, producers, strict=True):
            producer.tell()
            with exporting(run_dir):
                part.finish(run_dir, 0)
            reporter.event("finish", cloud=producer.name)
        _evaluate(experiment, consumer, place, reporter)
    finally:
        reporter.flush()
        events.close()
        write_rank_audit(run_dir, 0, layout, [], reporter.contents)


def _guard(experiment: OneWayExperiment) -> DivergenceGuard:
    training = experiment.training
    return DivergenceGuard(training.on_divergence, training.max_skips_in_a_row)


def _wirer(experiment: OneWayExperiment, rank: int, run_dir: Path) -> OneWayWirer:
    return OneWayWirer(
        GlooTransport(rank), experiment.cluster, experiment.model.max_payload_bytes,
        experiment.feed.most_ahead, run_dir,
    )  # fmt: skip


def _context(
    experiment: OneWayExperiment,
    device: torch.device,
    cloud: RankGroup,
    reporter: Reporter,
    num_steps: int,
) -> OneWayContext:
    cache_dir = Path(experiment.cache_dir)
    cache_dir = cache_dir if cache_dir.is_absolute() else project_root() / cache_dir
    return OneWayContext(
        experiment.seed, device, cache_dir, cloud.barrier, reporter.note, num_steps,
        experiment.cluster.producers,
    )  # fmt: skip


def _batches_of(experiment: OneWayExperiment, producer: int) -> int:
    """Batches that each rank of a producer will make if every cloud keeps to its share."""
    layout, training = experiment.cluster, experiment.training
    batches = training.max_steps * training.batches_per_step * layout.shares[producer]
    return max(1, math.ceil(batches / layout.num_lanes[producer]))


def _last_words(reporter: Reporter) -> None:
    """Say what was not said yet, if rank 0 still listens; the threads end with this process."""
    with contextlib.suppress(LinkError):
        reporter.flush()
        time.sleep(LAST_WORDS_S)

"""How the stages of one rank exchange gradients, from the strategy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from xcloud.comm.compressor import seed_from
from xcloud.comm.precision import Nothing
from xcloud.comm.tensor_codec import Choose, TensorCodec
from xcloud.contracts.model import Stage
from xcloud.parallel.across import LOSS, AcrossClouds
from xcloud.parallel.averaging import AllToAll, Averager, averager_for
from xcloud.parallel.averaging_guard import AveragingGuard
from xcloud.parallel.exchange import AllReduce, GradientExchange
from xcloud.parallel.local_updates import LocalUpdates
from xcloud.parallel.mailbox import Mailbox
from xcloud.parallel.merging import weighted_sum
from xcloud.parallel.rank_group import RankGroup
from xcloud.parallel.replica_check import ReplicaCheck
from xcloud.parallel.sharding import Sharded, ShardedAcross, is_sharded
from xcloud.parallel.strategy import GradientAveraging, Strategy
from xcloud.parallel.tied import TiedGradients
from xcloud.rank.local_exchanges import LocalTraining, join_local_updates
from xcloud.wire.replicas import ReplicaEnds
from xcloud.wire.wiring import Wiring

TIED = "embeddings.weight"
"""What choices of a compressor know a tied matrix by; its two ends have two names for it."""
_OPEN = AveragingGuard()  # no noise, no notes


def join_exchanges(
    wiring: Wiring,
    stages: Mapping[int, nn.Module],
    strategy: Strategy,
    choose: Choose,
    seed: int,
    training: LocalTraining,
    guard: AveragingGuard = _OPEN,
) -> dict[int, GradientExchange]:
    """One for each stage of this rank. Every rank calls it at the same time: it opens the links to
    other replicas and checks that all of them begin with the same parameters (ReplicasDiffer).

    choose: the compressor of each tensor that replicas average. guard: of what crosses to them.
    """
    stages, replicas = dict(sorted(stages.items())), wiring.replicas
    lanes = wiring.lanes[min(stages)]  # the same ranks hold all stages of this one
    settings = strategy.averaging
    if replicas is None or settings is None:
        return {
            stage: (Sharded if is_sharded(module) else AllReduce)(wiring.lanes[stage])
            for stage, module in stages.items()
        }
    if isinstance(settings, LocalUpdates):
        return join_local_updates(replicas, lanes, stages, settings, choose, seed, training, guard)
    return _join_averaging(replicas, lanes, stages, settings, choose, seed, training, guard)


def _join_averaging(
    replicas: ReplicaEnds,
    lanes: RankGroup,
    stages: Mapping[int, nn.Module],
    settings: GradientAveraging,
    choose: Choose,
    seed: int,
    training: LocalTraining,
    guard: AveragingGuard,
) -> dict[int, GradientExchange]:
    trained = {
        stage: {name: p for name, p in module.named_parameters() if p.requires_grad}
        for stage, module in stages.items()
    }
    held = (p for module in stages.values() for p in module.parameters())
    some = next(held, torch.zeros(0))
    stream = seed_from(seed, "averaging", min(stages), lanes.lane)
    mail = Mailbox(replicas) if replicas.peers else None
    is_dealt = any(map(is_sharded, stages.values()))
    alike = RankGroup.alone(lanes.rank) if is_dealt else lanes  # who holds the same values here
    check = ReplicaCheck(
        mail, alike, stages, replicas.name_of, settings.check_every, training.last_step
    )

    def codec(shapes: Mapping[str, torch.Size]) -> TensorCodec:
        return TensorCodec(
            shapes, lambda name, shape: Nothing() if name == LOSS else choose(name, shape),
            stream, settings.feedback, some.dtype, some.device,
        )  # fmt: skip

    def averager(shapes: Mapping[str, torch.Size]) -> Averager:
        assert mail is not None, "a rank that carries nothing across averages nothing"
        made = averager_for(mail, shapes, codec, settings.merge or weighted_sum)
        return guard.around(made, shapes, replicas.num_parts, silent={LOSS})

    others = replicas.num_replicas, averager, settings.merge is not None, settings.delay, check
    across = (
        ShardedAcross(trained, lanes, *others)
        if is_dealt
        else AcrossClouds(trained, lanes, replicas.num_shares, *others)
    )
    replicas.open(across.max_bytes, under_way=1 + settings.delay)
    check.compare(0)
    training.compare = check.compare
    return across.exchanges


def join_tied(
    wiring: Wiring, stages: Mapping[int, Stage], choose: Choose, seed: int
) -> TiedGradients | None:
    """For ranks that hold an end of a tied matrix; opens the link to the other end."""
    held = {stage: tied for stage, module in stages.items() if (tied := module.tied()) is not None}
    if not held:
        return None
    averager, links = None, wiring.tied
    if links is not None:
        (parameter,) = held.values()
        within = len(set(map(wiring.ends.layout.cloud_of, links.peers))) == 1
        codec = TensorCodec(
            {TIED: parameter.shape},
            lambda name, shape: Nothing() if within else choose(name, shape),
            seed_from(seed, "tied"),
            True,
            parameter.dtype,
            parameter.device,
        )
        averager = AllToAll(links, codec)
        links.open(averager.max_bytes)
    return TiedGradients(held, {stage: wiring.lanes[stage] for stage in held}, averager)

"""How the stages of one rank exchange gradients, from the strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from xcloud.comm.cast import Nothing
from xcloud.comm.compressor import Compressor
from xcloud.comm.draws import seed_from
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.contracts.stage import Stage
from xcloud.parallel.across import LOSS, AcrossClouds
from xcloud.parallel.averaging import Aggregators, AllToAll, Averager
from xcloud.parallel.exchange import AllReduce, GradientExchange
from xcloud.parallel.local_updates import LocalUpdates
from xcloud.parallel.mailbox import Mailbox
from xcloud.parallel.replica_check import ReplicaCheck
from xcloud.parallel.sharding import Sharded, is_sharded
from xcloud.parallel.strategy import GradientAveraging, Strategy
from xcloud.parallel.tied import TiedGradients
from xcloud.run.local_exchanges import LocalTraining, join_local_updates
from xcloud.run.wiring import Wiring

Choose = Callable[[str, torch.Size], Compressor]


def join_exchanges(
    wiring: Wiring,
    stages: Mapping[int, nn.Module],
    strategy: Strategy,
    choose: Choose,
    seed: int,
    training: LocalTraining | None = None,
) -> dict[int, GradientExchange]:
    """One for each stage of this rank. Every rank calls it at the same time: it opens the links to
    other replicas and checks that all of them begin with the same parameters (ReplicasDiffer).

    choose: the compressor of each tensor that replicas average. training: for local updates.
    """
    replicas = wiring.replicas
    if replicas is None:
        return {
            stage: (Sharded if is_sharded(module) else AllReduce)(wiring.lanes[stage])
            for stage, module in stages.items()
        }
    settings, first = strategy.averaging, min(stages)
    lanes = wiring.lanes[first]
    if isinstance(settings, LocalUpdates):
        assert training is not None
        return join_local_updates(replicas, lanes, stages, settings, choose, seed, training)
    assert isinstance(settings, GradientAveraging)
    trained = {stage: _trained(module) for stage, module in sorted(stages.items())}
    averagers: list[Averager] = []
    mail = Mailbox(replicas) if replicas.peers else None

    def new_codec(shapes: Mapping[str, torch.Size]) -> TensorCodec:
        own = next((p for named in trained.values() for p in named.values()), torch.zeros(0))
        return TensorCodec(
            shapes,
            lambda name, shape: Nothing() if name == LOSS else choose(name, shape),
            seed_from(seed, "averaging", first, lanes.lane),
            settings.feedback,
            own.dtype,
            own.device,
        )

    def make(shapes: Mapping[str, torch.Size]) -> Averager:
        assert mail is not None, "a rank that carries nothing across averages nothing"
        if replicas.num_replicas == 2:
            averagers.append(AllToAll(mail, new_codec(shapes)))
        else:
            averagers.append(Aggregators(mail, shapes, new_codec))
        return averagers[-1]

    check = ReplicaCheck(
        mail, lanes, dict(sorted(stages.items())), replicas.name_of, settings.check_every
    )
    across = AcrossClouds(
        trained, lanes, replicas.num_shares, replicas.num_replicas, make, settings.delay, check
    )
    if averagers:
        replicas.open(sum(averager.max_bytes for averager in averagers))
    check.compare(0)
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
            {"tied": parameter.shape},
            lambda name, shape: Nothing() if within else choose(name, shape),
            seed_from(seed, "tied"),
            True,
            parameter.dtype,
            parameter.device,
        )
        averager = AllToAll(links, codec)
        links.open(averager.max_bytes)
    return TiedGradients(held, {stage: wiring.lanes[stage] for stage in held}, averager)


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}

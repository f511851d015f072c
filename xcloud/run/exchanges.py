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
from xcloud.parallel.averaging import AllToAll, Averager
from xcloud.parallel.exchange import AllReduce, GradientExchange
from xcloud.parallel.replica_check import ReplicaCheck
from xcloud.parallel.sharding import Sharded, is_sharded
from xcloud.parallel.strategy import GradientAveraging, Strategy
from xcloud.parallel.tied import TiedGradients
from xcloud.run.wiring import Wiring

Choose = Callable[[str, torch.Size], Compressor]


def join_exchanges(
    wiring: Wiring,
    stages: Mapping[int, nn.Module],
    strategy: Strategy,
    choose: Choose,
    seed: int,
) -> dict[int, GradientExchange]:
    """One for each stage of this rank. Every rank calls it at the same time: it opens the links to
    other replicas and checks that all of them begin with the same parameters (ReplicasDiffer).

    choose: the compressor of each tensor that replicas average.
    """
    replicas = wiring.replicas
    if replicas is None:
        return {
            stage: (Sharded if is_sharded(module) else AllReduce)(wiring.lanes[stage])
            for stage, module in stages.items()
        }
    assert isinstance(strategy.averaging, GradientAveraging)
    settings, first = strategy.averaging, min(stages)
    lanes = wiring.lanes[first]
    trained = {stage: _trained(module) for stage, module in sorted(stages.items())}
    averagers: list[Averager] = []

    def make(shapes: Mapping[str, torch.Size]) -> Averager:
        own = next((p for named in trained.values() for p in named.values()), torch.zeros(0))
        codec = TensorCodec(
            shapes,
            lambda name, shape: Nothing() if name == LOSS else choose(name, shape),
            seed_from(seed, "averaging", first, lanes.lane),
            settings.feedback,
            own.dtype,
            own.device,
        )
        averagers.append(AllToAll(replicas, codec))
        return averagers[-1]

    links = replicas if replicas.peers else None
    check = ReplicaCheck(links, lanes, dict(sorted(stages.items())), replicas.name_of,
                         settings.check_every)  # fmt: skip
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

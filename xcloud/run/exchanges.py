"""How the stages of one rank exchange gradients, from the strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from xcloud.comm.cast import Nothing
from xcloud.comm.compressor import Compressor
from xcloud.comm.draws import seed_from
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.parallel.across import LOSS, AcrossClouds
from xcloud.parallel.averaging import AllToAll, Averager
from xcloud.parallel.exchange import AllReduce, GradientExchange
from xcloud.parallel.private_averager import PrivateAverager
from xcloud.parallel.replica_check import ReplicaCheck
from xcloud.parallel.strategy import GradientAveraging, Strategy
from xcloud.run.wiring import Wiring
from xcloud.security.privacy import CloudPrivacy

Watch = Callable[[int, int, Mapping[str, Tensor]], None]
"""Told of every contribution of another replica: step, replica, tensors as "stage.name"."""
Choose = Callable[[str, torch.Size], Compressor]


def join_exchanges(
    wiring: Wiring,
    stages: Mapping[int, nn.Module],
    strategy: Strategy,
    choose: Choose,
    seed: int,
    watch: Watch | None = None,
    privacy: CloudPrivacy | None = None,
) -> dict[int, GradientExchange]:
    """One for each stage of this rank. Every rank calls it at the same time: it opens the links to
    other replicas and checks that all of them begin with the same parameters (ReplicasDiffer).

    choose: the compressor of each tensor that replicas average. privacy: noise on what leaves.
    """
    replicas = wiring.replicas
    if replicas is None:
        return {stage: AllReduce(wiring.lanes[stage]) for stage in stages}
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
        made = AllToAll(replicas, codec)
        made.watch = watch
        averagers.append(made)
        if privacy is not None:
            averagers[-1] = PrivateAverager(
                made, list(shapes), privacy, replicas.num_parts, silent={LOSS}
            )
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


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}

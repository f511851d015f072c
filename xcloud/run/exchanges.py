"""How the stages of one rank exchange gradients or weight changes, from the strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from xcloud.comm.cast import Nothing
from xcloud.comm.compressor import Compressor
from xcloud.comm.draws import seed_from
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.parallel.across import LOSS, AcrossClouds
from xcloud.parallel.averaging import Aggregators, AllToAll, Averager
from xcloud.parallel.exchange import AllReduce, GradientExchange
from xcloud.parallel.local_rounds import LocalRounds, local_exchanges
from xcloud.parallel.local_updates import LocalUpdates
from xcloud.parallel.mailbox import Mailbox
from xcloud.parallel.merging import Merge, weighted_mean, weighted_sum
from xcloud.parallel.pace import Pace
from xcloud.parallel.replica_check import ReplicaCheck
from xcloud.parallel.strategy import GradientAveraging, Strategy
from xcloud.run.replica_wiring import ReplicaEnds
from xcloud.run.wiring import Wiring

Choose = Callable[[str, torch.Size], Compressor]


@dataclass(frozen=True)
class Work:
    """Of one replica. last_step: of training. samples, tokens: that it trains on in a step; tokens
    only in ranks that hold the last stage."""

    last_step: int
    samples: Callable[[int], float]
    tokens: Callable[[int], float]


@dataclass(frozen=True)
class Exchanges:
    """by_stage: what the trainer calls. is_idle: whether this replica leaves out a step.
    check: None where there is one replica."""

    by_stage: Mapping[int, GradientExchange]
    is_idle: Callable[[int], bool] = field(default=lambda step: False)
    check: ReplicaCheck | None = None


def join_exchanges(
    wiring: Wiring,
    stages: Mapping[int, nn.Module],
    strategy: Strategy,
    choose: Choose,
    work: Work,
    seed: int,
) -> Exchanges:
    """Every rank calls it at the same time: it opens the links to other replicas and checks that
    all of them begin with the same parameters (ReplicasDiffer).

    choose: the compressor of each tensor that replicas average.
    """
    inside = {stage: AllReduce(wiring.lanes[stage]) for stage in sorted(stages)}
    if wiring.replicas is None or strategy.averaging is None:
        return Exchanges(inside)
    return _Joining(wiring, wiring.replicas, dict(sorted(stages.items())), choose, seed).join(
        strategy.averaging, inside, work
    )


class _Joining:
    """What the kinds of averaging share."""

    def __init__(
        self,
        wiring: Wiring,
        replicas: ReplicaEnds,
        stages: Mapping[int, nn.Module],
        choose: Choose,
        seed: int,
    ) -> None:
        self._replicas, self._stages, self._choose = replicas, stages, choose
        self._first = min(stages)
        self._lanes = wiring.lanes[self._first]
        self._stream = seed_from(seed, "averaging", self._first, self._lanes.lane)
        self._mail = Mailbox(replicas) if replicas.peers else None
        self._num_bytes = 0
        self._trained = {
            stage: {name: p for name, p in module.named_parameters() if p.requires_grad}
            for stage, module in stages.items()
        }

    def join(
        self,
        settings: GradientAveraging | LocalUpdates,
        inside: Mapping[int, GradientExchange],
        work: Work,
    ) -> Exchanges:
        every = 0 if isinstance(settings, LocalUpdates) else settings.check_every
        check = ReplicaCheck(self._mail, self._lanes, self._stages, self._replicas.name_of, every)
        if isinstance(settings, LocalUpdates):
            rounds = self._rounds(settings, work)
            found = Exchanges(local_exchanges(inside, rounds), rounds.is_idle, check)
        else:
            across = AcrossClouds(
                self._trained, self._lanes, self._replicas.num_shares,
                self._replicas.num_replicas,
                lambda shapes: self._averager(shapes, weighted_sum, settings.feedback, 0),
                settings.delay, check,
            )  # fmt: skip
            found = Exchanges(across.exchanges, check=check)
        wait_s = settings.wait_s if isinstance(settings, LocalUpdates) else 0.0
        self._replicas.open(self._num_bytes, wait_s)
        check.compare(0)
        return found

    def _rounds(self, settings: LocalUpdates, work: Work) -> LocalRounds:
        named = {f"{s}.{name}": p for s, own in self._trained.items() for name, p in own.items()}
        pace = Pace(
            settings.every, self._lanes, settings.most_s, settings.most_tokens, work.tokens
        )
        return LocalRounds(
            settings, named, self._lanes, self._replicas.num_shares,
            lambda shapes, number: self._averager(shapes, weighted_mean, True, number),
            work.last_step, work.tokens if settings.weigh == "tokens" else work.samples, pace,
        )  # fmt: skip

    def _averager(
        self, shapes: Mapping[str, torch.Size], merge: Merge, feedback: bool, channel: int
    ) -> Averager:
        some = next((p for named in self._trained.values() for p in named.values()), None)
        dtype = torch.float32 if some is None else some.dtype
        device = torch.device("cpu") if some is None else some.device

        def new_codec(shapes: Mapping[str, torch.Size]) -> TensorCodec:
            return TensorCodec(
                shapes,
                lambda name, shape: Nothing() if name == LOSS else self._choose(name, shape),
                seed_from(self._stream, channel), feedback, dtype, device,
            )  # fmt: skip

        assert self._mail is not None, "a rank that carries nothing across averages nothing"
        averager: Averager
        if self._replicas.num_replicas == 2:
            averager = AllToAll(self._mail, new_codec(shapes), merge, channel)
        else:
            averager = Aggregators(self._mail, shapes, new_codec, merge, channel)
        self._num_bytes = max(self._num_bytes, averager.max_bytes)
        return averager

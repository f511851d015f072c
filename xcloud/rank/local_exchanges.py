"""Local updates of one rank, from the settings: which parameters go over which links."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from xcloud.comm.compressor import seed_from
from xcloud.comm.tensor_codec import Choose, TensorCodec
from xcloud.join.elastic import Teller, make_end
from xcloud.parallel.averaging import Averager, averager_for
from xcloud.parallel.averaging_guard import AveragingGuard
from xcloud.parallel.elastic_rounds import ElasticRounds
from xcloud.parallel.exchange import AllReduce, GradientExchange
from xcloud.parallel.local_rounds import LocalRounds, local_exchanges
from xcloud.parallel.local_updates import LocalUpdates
from xcloud.parallel.mailbox import Mailbox
from xcloud.parallel.merging import weighted_mean
from xcloud.parallel.rank_group import RankGroup
from xcloud.parallel.replica_check import ReplicaCheck
from xcloud.parallel.step_budget import StepBudget
from xcloud.record.reporter import Reporter
from xcloud.training.trainer import Work
from xcloud.wire.replicas import ReplicaEnds


@dataclass
class LocalTraining:
    """What local updates and the rank's trainer, which is built after them, know of each other.

    cloud_of: the cloud of each replica, for events; ranks_in: the ranks of a cloud. most_work: of
        any update of a replica. work: of the update that was made last. is_idle: whether this
        rank's replica leaves out a step.
    rejoin: in a cloud that begins in a run that goes on, takes the values of the first one and
        returns the step at which that is. welcome: in the first one, after that step, gives them.
    compare: raises ReplicasDiffer, after a step that leaves all replicas equal.
    """

    last_step: int
    cloud_of: Callable[[int], str]
    ranks_in: Callable[[str], Sequence[int]]
    reporter: Reporter
    most_work: Work
    work: Callable[[], Work] = lambda: Work(0, 0.0)
    is_idle: Callable[[int], bool] = lambda step: False
    rejoin: Callable[[], int] = lambda: 0
    welcome: Callable[[int], None] = lambda step: None
    compare: Callable[[int], None] = lambda step: None


def join_local_updates(
    replicas: ReplicaEnds,
    lanes: RankGroup,
    stages: Mapping[int, nn.Module],
    settings: LocalUpdates,
    choose: Choose,
    seed: int,
    training: LocalTraining,
    guard: AveragingGuard,
) -> dict[int, GradientExchange]:
    """The exchanges of a rank's stages. Every rank calls it at the same time.

    lanes: the ranks of this replica that hold the same stages.
    """
    trained = {
        f"{stage}.{name}": p
        for stage, module in sorted(stages.items())
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    first = next(iter(trained.values()), torch.zeros(0))

    def codec(shapes: Mapping[str, torch.Size], *names: str | int) -> TensorCodec:
        stream = seed_from(seed, "local updates", min(stages), lanes.lane, *names)
        return TensorCodec(shapes, choose, stream, settings.feedback, first.dtype, first.device)

    def counted(work: Work) -> float:
        return float(work.num_samples) if settings.weigh == "samples" else work.weight

    def samples(step: int) -> float:
        return counted(training.work())

    def most_weight(num_steps: int) -> float:
        return settings.weight_of(counted(training.most_work) * num_steps)

    pace = StepBudget(
        settings.every, lanes, settings.most_s, settings.most_tokens,
        lambda step: training.work().weight,
    )  # fmt: skip
    last_step, merge, longest = training.last_step, settings.merge or weighted_mean, 0
    rounds: ElasticRounds | LocalRounds
    if settings.is_elastic:
        end = None
        if lanes.leads:
            tell = Teller(training.reporter, training.cloud_of, training.ranks_in)
            end, longest = make_end(
                settings, trained, codec, replicas, tell, guard.watch, most_weight
            )
            replicas.open(longest)
        rounds = ElasticRounds(settings, [*trained.values()], lanes, end, last_step, samples, pace)
        training.rejoin, training.welcome = rounds.join, rounds.welcome
    else:
        mail = Mailbox(replicas) if replicas.peers else None
        check = ReplicaCheck(mail, lanes, stages, replicas.name_of, 0, last_step)
        averagers: list[Averager] = []

        def averager(shapes: Mapping[str, torch.Size], number: int) -> Averager:
            assert mail is not None, "a rank that carries nothing across averages nothing"
            made = averager_for(mail, shapes, lambda s: codec(s, number), merge, number)
            made.most_weight = most_weight
            num_parts = replicas.num_parts * settings.fragments
            averagers.append(guard.around(made, shapes, num_parts))
            return averagers[-1]

        rounds = LocalRounds(
            settings, trained, lanes, replicas.num_shares, averager, last_step, samples, pace,
            check.compare, training.reporter.note,
        )  # fmt: skip
        longest = max((averager.max_bytes for averager in averagers), default=0)
        replicas.open(longest, settings.wait_s, settings.most_under_way)
        check.compare(0)
        training.compare = check.compare
    inside = {stage: AllReduce(lanes) for stage in stages}
    training.is_idle = rounds.is_idle
    return local_exchanges(inside, rounds)

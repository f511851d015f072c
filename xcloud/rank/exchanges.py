"""How the stages of one rank exchange gradients, from the strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from xcloud.comm.compressor import seed_from
from xcloud.comm.precision import Nothing
from xcloud.comm.tensor_codec import Choose, TensorCodec
from xcloud.contracts.model import Stage
from xcloud.parallel.averaging import AllToAll
from xcloud.parallel.exchange import AllReduce, Exchange, FlatBuffer, Work
from xcloud.parallel.replica_links import Mailbox
from xcloud.parallel.strategy import Replicas, Strategy
from xcloud.parallel.tied import TiedGradients
from xcloud.record.reporter import Reporter
from xcloud.security.privacy import CloudPrivacy, Privacy
from xcloud.wire.wiring import Wiring

TIED = "embeddings.weight"
"""What choices of a compressor know a tied matrix by; its two ends have two names for it."""


def join_exchange(
    wiring: Wiring,
    stages: Mapping[int, nn.Module],
    strategy: Strategy,
    choose: Choose,
    seed: int,
    last_step: int,
    most_work: Work,
    reporter: Reporter,
    privacy: Privacy | None = None,
    watch: Callable[[int, int, Mapping[str, Tensor]], None] | None = None,
) -> Exchange:
    """Of this rank's stages. Every rank calls it at the same time: it opens the links to other
    replicas and checks that all of them begin with the same parameters (ReplicasDiffer). See
    Replicas for the arguments."""
    stages, links = dict(sorted(stages.items())), wiring.replicas
    if links is None or strategy.averaging is None:
        return AllReduce({stage: wiring.lanes[stage] for stage in stages})
    group = wiring.lanes[min(stages)]  # the same ranks hold all stages of this one
    of_cloud = privacy if isinstance(privacy, CloudPrivacy) else None
    return strategy.averaging.join(
        Replicas(
            links, group, stages, choose, seed, last_step, most_work, reporter, of_cloud, watch
        )
    )


def join_tied(
    wiring: Wiring,
    stages: Mapping[int, Stage],
    choose: Choose,
    seed: int,
    buffers: Mapping[int, FlatBuffer],
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
        averager = AllToAll(Mailbox(links), codec)
        links.open(averager.max_bytes)
    return TiedGradients(held, {stage: wiring.lanes[stage] for stage in held}, averager, buffers)

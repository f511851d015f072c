"""What one rank averages with ranks of other clouds: gradients or parameters of its stages with
the other replicas, and the gradient of a tied matrix with the pipeline's other end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from xcloud.comm.tensor_codec import TensorCodec
from xcloud.experiment import Experiment
from xcloud.features.replicas.averaging import AllToAll, ReplicaLinks
from xcloud.features.replicas.links import links_between
from xcloud.features.replicas.outer_optimizer import Replicas
from xcloud.features.tied.gradients import Join
from xcloud.layout import ClusterLayout
from xcloud.pipeline.batch_plan import replica_samples
from xcloud.pipeline.exchange import Exchange, RankGroup, Work
from xcloud.pipeline.wiring import Wiring
from xcloud.record.reporter import Reporter


def replicas_exchange(
    job: Experiment,
    links: ReplicaLinks,
    group: RankGroup,
    stages: Mapping[int, nn.Module],
    reporter: Reporter,
    watch: Callable[[int, int, Mapping[str, Tensor]], None] | None,
) -> Exchange:
    """Build the exchange of a rank with its counterparts in the other replicas.

    group: the ranks of this replica that hold the same stages.
    watch: see Terms.
    """
    assert job.strategy.averaging is not None
    numbers = replica_samples(
        job.training.batch_size,
        num_micro_batches=job.schedule.num_micro_batches,
        num_passes=job.training.accumulate_steps,
        num_replicas=job.cluster.num_replicas,
    )
    replicas = Replicas(
        links,
        group,
        stages=stages,
        choose=job.compression.for_tensor,
        seed=job.seed,
        last_step=job.max_steps,
        max_work=[Work(number, float(number * job.task.max_length)) for number in numbers],
        reporter=reporter,
        privacy=job.security.privacy,
        watch=watch,
    )
    return job.strategy.averaging.join(replicas)


def averager_of_ends(wiring: Wiring, layout: ClusterLayout, device: torch.device) -> Join:
    """Return what joins this rank to the pipeline's other end, to sum what both hold."""

    def join(pair: tuple[int, int], stage: int, codec: TensorCodec) -> AllToAll:
        ends = wiring.ends
        links = links_between(ends, layout, pair=pair, device=device, line="tied", stage=stage)
        wiring.averaging.append(links)
        averager = AllToAll(links, codec)
        links.open(averager.max_bytes)
        return averager

    return join

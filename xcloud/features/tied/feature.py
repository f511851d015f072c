"""Tied ends as a feature: the first and the last stage train one matrix together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations

import torch

from xcloud.features.tied.gradients import Join, TiedGradients, tied_gradients
from xcloud.job.job import PipelineJob
from xcloud.job.leaving import Outbound
from xcloud.job.needs import Conflict, FeatureUse, every_update_together, no_noise, ties_ends
from xcloud.layout import ClusterLayout
from xcloud.pipeline.trainer import Trainer
from xcloud.pipeline.wiring import Wiring
from xcloud.rank.feature import BuiltRank, Feature, FeatureAtRank
from xcloud.security.defences import LABEL


def words_may_be_at_both_ends(job: PipelineJob) -> Conflict | None:
    """Return a lack where gradients would show words in a cloud where these may not be.

    The gradient of the embeddings shows which words are in a batch, and that of the head which are
    to be predicted.
    """
    layout = job.cluster
    for replica in range(layout.num_replicas):
        first, last = (layout.stage_cloud(s, replica) for s in (0, layout.num_stages - 1))
        for name, cloud in (("text", last), (LABEL, first)):
            holders = job.security.holders.get(name)
            if first != last and holders is not None and cloud not in holders:
                return Conflict(
                    setting=f"cloud {cloud!r} would get gradients that show which words are in "
                    f"{name!r}, and security.holders.{name} keeps these in {', '.join(holders)}",
                    remedy="put both ends of the model into one cloud (cluster=u_shape)",
                )
    return None


JoinEnds = Callable[[Wiring, ClusterLayout, torch.device, str], Join]
"""Returns what joins a rank to the other end of the pipeline, over lines of a name."""


class TiedEndsAtRank(FeatureAtRank):
    """The tied ends of one rank, which may hold an end or none."""

    feature: TiedEnds

    def hook(self, built: BuiltRank, trainer: Trainer) -> TiedGradients | None:
        job = built.context.job
        return tied_gradients(
            trainer,
            groups=built.wiring.groups,
            layout=job.cluster,
            choose=job.compression.for_tensor,
            seed=job.seed,
            join=self.feature.join_ends(built.wiring, job.cluster, built.context.device, "tied"),
        )


@dataclass(eq=False)
class TiedEnds(Feature):
    """A sum of the gradients of one matrix over both ends of a pipeline.

    join_ends: the function that connects the two ends. Averaging is a feature too
        (features/replicas/links.py).
    """

    join_ends: JoinEnds
    at_work = TiedEndsAtRank

    uses = (
        FeatureUse(
            setting="model.embeddings=tie",
            asked=ties_ends,
            why={
                no_noise: "hands the other end gradients as they are",
                every_update_together: "needs both ends in every update",
                words_may_be_at_both_ends: "sends gradients to the other end",
            },
            without="take model.embeddings=untie or freeze",
        ),
    )

    def leaving(self, job: PipelineJob) -> Iterator[Outbound]:
        layout = job.cluster
        ends = [layout.stage_cloud(stage) for stage in (0, layout.num_stages - 1)]
        for here, there in permutations(ends, 2):
            if here != there:
                words = "gradient of the embeddings that both ends train"
                yield Outbound(
                    sender=here, to=there, kind="averaging", what=words, how_often="once a step"
                )

"""Weights for followers as a feature: a run writes them while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from xcloud.base.errors import ConfigError
from xcloud.features.weight_patches.store import PatchStore, Protect, plain, sealing
from xcloud.features.weight_patches.writer import PatchWriter, WriteTiming, WrittenStage
from xcloud.job.config import this_clouds_keys
from xcloud.job.job import PipelineJob
from xcloud.job.leaving import Outbound
from xcloud.job.needs import (
    Conflict,
    FeatureUse,
    known_last_step,
    no_noise,
    one_pipeline,
    whole_stages,
)
from xcloud.job.needs import plain as need
from xcloud.line.mailbox import ObjectStore
from xcloud.net.link import CONTROL, LinkName, LinkRecord
from xcloud.pipeline.trainer import Trainer
from xcloud.rank.feature import BuiltRank, Feature, FeatureAtRank

URL = "training.patches.url"
FOLLOWERS = "followers"  # who has the weights, where no cloud is named


def joined_by_transformers(job: PipelineJob) -> Conflict | None:
    model = job.model
    if not hasattr(model, "join"):
        return Conflict(f"{model.describe()} is no causal language model", remedy="")
    split = getattr(model, "split", None)
    if split is not None and split.rank is not None:
        return Conflict(
            "transformers has no place for the projections of model.split.rank",
            remedy="leave model.split out",
        )
    return None


weights_may_leave = need(
    lambda job: bool(job.security.weights),
    "security.weights keeps parts of the model in named clouds",
    remedy="leave that rule out",
)
one_place = need(
    lambda job: job.training.patches.url is None and not job.cluster.is_on_one_machine,
    f"{URL} is not set, and run folders on several machines are several places",
    remedy=f"give a folder or bucket that all clouds and followers reach ({URL}=s3://bucket/run)",
)


class WritingAtRank(FeatureAtRank):
    """The writer of one rank; a stage of several ranks is written by the first of them."""

    def observer(self, built: BuiltRank, trainer: Trainer) -> PatchWriter | None:
        context = built.context
        job = context.job
        patches = job.training.patches
        stages = [
            WrittenStage(number, module)
            for number, module in built.stages.items()
            # The other ranks of a stage have the same weights.
            if built.wiring.groups[number].leads
        ]
        if not stages:
            return None
        url = patches.url
        if url is None:
            # One machine plays all clouds: their run folders are one (see `one_place`).
            url = str(context.run_dir)
        rank = context.rank
        record = LinkRecord(LinkName(CONTROL, rank, receiver=rank), to=patches.reader or FOLLOWERS)
        # Objects go over no link of the pipeline, but they leave the cloud: the audit counts them.
        built.wiring.ends.records.append(record)
        return PatchWriter(
            stages,
            plan=WriteTiming(patches.every, patches.whole_every, last_step=job.max_steps),
            store=PatchStore(ObjectStore(url, setting=URL), protect=protection(job, rank)),
            about={"run": name_of(job), "attempt": context.verdict.attempt},
            data=built.data,
            reporter=context.reporter,
            record=record,
        )


class WeightPatches(Feature):
    """Weights that a run writes for workers elsewhere."""

    at_work = WritingAtRank

    uses = (
        FeatureUse(
            setting="training.patches.every={}",
            asked=lambda job: job.training.patches.every,
            why={
                joined_by_transformers: "writes weights for a folder of transformers",
                one_pipeline: "writes the weights of one pipeline",
                whole_stages: "compares whole weights",
                weights_may_leave: "lets whoever follows have all weights",
                no_noise: "gives whole weights away again and again",
                known_last_step: "writes weights after the last update, which it must know",
                one_place: "writes all stages to one place",
            },
            without="set it to 0",
        ),
    )

    left_out_of_trials = MappingProxyType({"training.patches.every": 0})

    def describe(self, job: PipelineJob) -> str:
        every = job.training.patches.every
        updates = "update" if every == 1 else f"{every} updates"
        return f"writes weights for followers after every {updates}"

    def leaving(self, job: PipelineJob) -> Iterator[Outbound]:
        patches = job.training.patches
        layout = job.cluster
        for stage in range(layout.num_stages):
            yield Outbound(
                layout.stage_cloud(stage),
                patches.reader or FOLLOWERS,
                "weights",
                what=f"stage {stage}: what training changes, in BF16, whole at first and after "
                f"{patches.whole_every} patches, else changed values",
                how_often=f"every {patches.every} updates",
            )


def name_of(job: PipelineJob) -> str:
    """Return what a run is called in its objects, whatever a resume may change."""
    return f"{job.name} s{job.seed}"


def protection(job: PipelineJob, rank: int) -> Protect:
    """Return what seals the objects of a rank, if they are for one reader.

    Raises ConfigError where this cloud's policy has no key of its own, or no certificate of it.
    """
    reader = job.training.patches.reader
    if reader is None:
        return plain
    keys = this_clouds_keys()
    cloud = job.cluster.cloud_of(rank)
    setting = f"training.patches.reader={reader}"
    if keys.own.cloud != cloud:
        raise ConfigError(
            f"{setting} has rank {rank} seal its weights as cloud {cloud}, and the policy of this "
            f"machine has the key of {keys.own.cloud}: leave it out where one machine plays "
            "several clouds"
        )
    if reader != cloud and reader not in keys.peers:
        raise ConfigError(
            f"{setting}: this cloud's policy names no certificate of it; get {reader}.pem from "
            f"its owner, put it beside {keys.pem_file}, and into policy.yaml: "
            f"peers: {{{reader}: [{reader}.pem]}}"
        )
    return sealing(keys, reader=reader)

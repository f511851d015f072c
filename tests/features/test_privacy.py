"""Clipping with noise: exact against a loop over samples, and what it is said to guarantee."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from tests.causal_models import SMALL
from tests.configs import build
from tests.nightly import first_daily
from tests.pipelines import D, ToyStage, in_threads, samples
from tests.plan_pieces import COMPRESSORS, piece
from tests.replicas import connected
from tests.toy import toy_config
from tests.trainers import Guarded, Rank, ranks, update
from xcloud.base.errors import ConfigError
from xcloud.comm.compressor import Chain
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.features.privacy.account import account
from xcloud.features.privacy.gradients import PrivateGradients
from xcloud.features.privacy.noise import (
    gaussian_epsilon,
    max_squared_uses,
    private_contribution,
    sampled_epsilon,
)
from xcloud.features.privacy.settings import Privacy
from xcloud.features.replicas.averaging import AllToAll, ReplicaLinks, Terms
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.job.config import Settings
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.pipeline.settings import Optimizer, Training
from xcloud.planner.planning import Planner
from xcloud.simulator.costs import Profile

LOCAL = ClusterLayout({"local": Cloud(1, [0, 1])}, "free")
LANES = ClusterLayout({"local": Cloud(2, [0, 1], one_stage_per_rank=False)}, "free")
CLOUDS = ClusterLayout({"a": Cloud(), "b": Cloud()}, "free")
AVERAGED = Strategy("data_parallel", None, GradientAveraging(check_every=1))
EVERYTHING = {"one rank": (LOCAL, Strategy()), "two ranks": (LANES, Strategy()),
              "two clouds": (CLOUDS, AVERAGED)}  # fmt: skip
BATCH = 8
SINGLES = Training(9, batch_size=BATCH, accumulate_steps=4, optimizer=Optimizer(0.05, 1))


def guarded(privacy: Privacy | None) -> Guarded | None:
    """Return what a rank of a toy job does for privacy, as features/privacy/feature.py does it."""
    if privacy is None:
        return None
    if privacy.unit == "cloud":
        return Guarded(guard=partial(private_contribution, privacy=privacy))
    return Guarded(hook=partial(PrivateGradients, privacy))


def job(name: str, privacy: Privacy | None) -> list[Rank]:
    layout, strategy = EVERYTHING[name]
    return ranks(layout, SINGLES, strategy=strategy, guarded=guarded(privacy))


def gradients(job: Sequence[Rank]) -> list[Tensor]:
    """By stage, that of the first update, the same in every rank."""
    update(job, 1)
    found = [
        torch.cat([p.grad.reshape(-1) for p in stage.parameters() if p.grad is not None])
        for rank in job
        for _, stage in sorted(rank.trainer.pipeline.stages.items())
    ]
    for other in range(2, len(found)):
        assert torch.equal(found[other], found[other % 2])
    return found[:2]


def by_hand(clip: float) -> list[Tensor]:
    """The update of `job` by a plain loop: each sample alone, each stage clipped by itself."""
    stages = [ToyStage(0, 2), ToyStage(1, 2)]
    sums = [torch.zeros(D * D + D) for _ in stages]
    for sample in BatchPlan(40, BATCH, 1).ids(1):
        batch = samples(sample.reshape(1))
        for stage in stages:
            stage.zero_grad()
        loss = stages[1](stages[0](None, batch).send, batch).loss
        assert loss is not None
        loss.backward()
        for total, stage in zip(sums, stages, strict=True):
            own = torch.cat([p.grad.reshape(-1) for p in stage.parameters()])
            total.add_(own * min(1.0, clip / math.sqrt(2) / float(own.norm())))
    return [total / BATCH for total in sums]


def test_each_samples_gradient_is_clipped_as_a_loop_over_samples_does() -> None:
    loose, tight = by_hand(1e9), by_hand(2.0)
    assert all((a - b).abs().max() > 0.01 for a, b in zip(loose, tight, strict=True))
    for name in EVERYTHING:
        for clip, expected in ((1e9, loose), (2.0, tight)):
            found = gradients(job(name, Privacy("sample", clip, 0.0)))
            for own, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(own, wanted, atol=1e-5, rtol=1e-5)


def test_without_noise_and_bound_a_run_is_the_unprivate_one() -> None:
    for name in EVERYTHING:
        for privacy in (Privacy("sample", 1e9, 0.0), Privacy("cloud", 1e9, 0.0)):
            if name != "two clouds" and privacy.unit == "cloud":
                continue
            private, plain = job(name, privacy), job(name, None)
            for step in range(1, 4):
                for job_ in (private, plain):
                    update(job_, step)
            for one, other in zip(private, plain, strict=True):
                for stage, module in one.trainer.pipeline.stages.items():
                    pairs = zip(
                        module.parameters(),
                        other.trainer.pipeline.stages[stage].parameters(),
                        strict=True,
                    )
                    for own, wanted in pairs:
                        torch.testing.assert_close(own, wanted, atol=1e-5, rtol=1e-5)


def test_one_rank_of_each_replica_adds_noise_of_the_promised_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each generator of noise has a seed of its own here, so that the test ends alike always."""
    seeds, drawn_by = count(1), np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda: drawn_by(next(seeds)))
    clip, noise = 0.5, 4.0
    for name, num_noises in (("one rank", 1), ("two ranks", 1), ("two clouds", 2)):
        exact = torch.cat(gradients(job(name, Privacy("sample", clip, 0.0))))
        drawn = [
            torch.cat(gradients(job(name, Privacy("sample", clip, noise)))) - exact
            for _ in range(8)
        ]
        found = torch.stack(drawn)
        expected = math.sqrt(num_noises) * noise * clip / BATCH

        assert float(found.std()) == pytest.approx(expected, rel=0.1)  # of 1152 values
        assert abs(float(found.mean())) < 0.15 * expected
        assert abs(float(torch.corrcoef(found)[0, 1])) < 0.3  # not the same noise again


def test_replicas_tell_no_losses_of_private_samples() -> None:
    for privacy in (Privacy("sample", 1.0, 1.0), Privacy("cloud", 1.0, 1.0)):
        private, plain = job("two clouds", privacy), job("two clouds", None)
        told = [update(job_, 1) for job_ in (private, plain)]
        losses = [[report.loss for report in reports] for reports in told]

        assert losses[0][1] is losses[1][1] is None
        assert losses[0][0] != losses[1][0]
        assert losses[0][0] == pytest.approx(losses[1][0], rel=0.5)  # from half of the samples


def test_what_a_cloud_gives_is_clipped_as_a_whole_and_noised_before_it_is_sent() -> None:
    names = {"(loss)": torch.Size([1]), "a": torch.Size([3, 400]), "b": torch.Size([50])}
    given = [torch.tensor([7.0]), torch.randn(3, 400), torch.randn(50)]
    norm = float(torch.cat([g.reshape(-1) for g in given[1:]]).norm())
    seen: dict[str, Tensor] = {}

    def take(links: ReplicaLinks, privacy: Privacy, tensors: list[Tensor]) -> None:
        codec = TensorCodec(names, lambda name, shape: Chain(), 1, False)
        averager = AllToAll(
            links,
            codec,
            Terms(
                protect=private_contribution(names, privacy, 4, silent={"(loss)"}),
                watch=(lambda s, r, tensors: seen.update(tensors)) if links.replica else None,
            ),
        )
        averager.start(1, tensors)
        averager.finish(1)

    for clip, noise in ((1.0, 0.0), (1.0, 3.0), (1e9, 0.0)):
        privacy = Privacy("cloud", clip, noise)
        in_threads([lambda own=own, p=privacy: take(own, p, given) for own in connected(2)])
        factor = min(1.0, clip / 2 / norm)  # the whole contribution has four such parts

        assert float(seen["(loss)"]) == 0.0
        left = torch.cat(
            [(seen[n] - factor * g).reshape(-1) for n, g in zip("ab", given[1:], strict=True)]
        )
        assert float(left.std()) == pytest.approx(
            noise * clip if noise else 0.0, rel=0.1, abs=1e-6
        )

    spoilt = [torch.tensor([math.nan]), *(torch.zeros_like(g) for g in given[1:])]
    in_threads(
        [lambda own=own: take(own, Privacy("cloud", 1.0, 1.0), spoilt) for own in connected(2)]
    )
    assert math.isnan(float(seen["(loss)"]))  # others must see that the update failed


def test_epsilon_is_that_of_the_literature_and_the_library() -> None:
    # Balle and Wang, arXiv:1805.06530: sigma for epsilon = 1, delta = 1e-5 at sensitivity 1.
    assert gaussian_epsilon(3.730631634, 1, 1e-5) == pytest.approx(1.0, abs=1e-4)
    # n releases of noise s are one of noise s / sqrt(n).
    assert gaussian_epsilon(6.0, 9, 1e-5) == pytest.approx(gaussian_epsilon(2.0, 1, 1e-5))
    assert gaussian_epsilon(0.0, 1, 1e-5) == math.inf and gaussian_epsilon(1.0, 0, 1e-5) == 0.0
    assert gaussian_epsilon(1000.0, 1, 0.1) == 0.0
    # An epsilon below 1 is one too: delta = Phi(1/2s - es) - exp(e) Phi(-1/2s - es).
    normal = NormalDist()
    small = gaussian_epsilon(10.0, 1, 1e-5)
    assert 0.2 < small < 0.5
    delta = normal.cdf(0.05 - 10 * small) - math.exp(small) * normal.cdf(-0.05 - 10 * small)
    assert delta == pytest.approx(1e-5, rel=1e-3)
    assert 1000 < gaussian_epsilon(0.01, 1, 1e-5) < 10_000  # no overflow
    assert 4e7 < gaussian_epsilon(1.1e-4, 1, 1e-5) < 5e7
    assert gaussian_epsilon(1e-30, 1, 1e-5) == math.inf

    opacus = pytest.importorskip("opacus.accountants")
    assert sampled_epsilon(1.1, 0.01, 1000, 1e-5) == pytest.approx(1.5255, abs=1e-3)
    assert 100 < sampled_epsilon(0.05, 0.2, 100, 1e-5) < 1e6  # exactly, more than 10 minutes
    assert sampled_epsilon(1e-30, 0.2, 100, 1e-5) > 1e6
    accountant = opacus.RDPAccountant()
    accountant.history = [(2.0, 1.0, 4)]
    bound = accountant.get_epsilon(1e-5)  # a looser one of the same thing
    assert 0.85 * bound < gaussian_epsilon(2.0, 4, 1e-5) < bound


def test_the_account_is_of_the_sample_that_is_used_most() -> None:
    assert max_squared_uses([torch.tensor([1, 2, 3]), torch.tensor([3, 3, 4])]) == 1 + 4
    assert max_squared_uses([]) == 0

    told = account(Privacy("sample", 1.0, 2.0), BatchPlan(40, 8, 1), 5, 5)  # one epoch
    assert told["epsilon"] == gaussian_epsilon(2.0, 1, 1e-5)
    assert told["sampling_rate"] == 0.2 and told["unit"] == "sample"
    # The sixth update is the first that takes samples once more, and it counts.
    told = account(Privacy("sample", 1.0, 2.0), BatchPlan(40, 8, 1), 6, 6)
    assert told["epsilon"] == gaussian_epsilon(2.0, 2, 1e-5)
    told = account(Privacy("cloud", 1.0, 2.0), BatchPlan(40, 8, 1), 100, 5)
    assert told["epsilon"] == gaussian_epsilon(2.0, 5, 1e-5)
    assert told["epsilon_if_sampled"] is None


def test_contributions_of_a_cloud_are_counted() -> None:
    def count(steps: int, **settings: int) -> int:
        return LocalUpdates(**settings).traits.max_contributions(steps)

    assert GradientAveraging().traits.max_contributions(7) == 7
    assert count(100, every=25) == 4 and count(101, every=25) == 5
    assert count(100, every=25, fragments=2) == 5  # one is merged in between, and at the end


def test_privacy_that_would_not_hold_is_refused() -> None:
    exp = ("+exp=lora_clm", "cluster/wan=free")
    with pytest.raises(ConfigError, match="splits the model between clouds"):
        build(*exp, "security/privacy=sample")
    with pytest.raises(ConfigError, match=r"training\.batch_size is 16 and there are 4 micro"):
        build(*exp, "strategy=data_parallel", "security/privacy=sample")
    late = ("strategy=local_updates", "+strategy/averaging/late=skip")
    with pytest.raises(ConfigError, match="gives no bound if"):
        build(*exp, *late, "security/privacy=cloud")
    with pytest.raises(ConfigError, match="here is one replica"):
        build(*exp, "security/privacy=cloud")
    with pytest.raises(ConfigError, match=r"privacy\.clip"):
        build(*exp, "security/privacy=sample", "security.privacy.clip=0")

    with pytest.raises(ConfigError, match=r"zero bubble .* puts off .* choose schedule="):
        build(*exp, "strategy=data_parallel", "security/privacy=sample", "schedule=zero_bubble")

    singles = "training.batch_size=16 schedule.num_micro_batches=4 training.accumulate_steps=4"
    made = build(*exp, "strategy=data_parallel", "security/privacy=sample", *singles.split())
    assert "private by sample (clip 1, noise 1.1)" in made.headline


PATCHES = "training.patches.every=2"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["+exp=lora_clm", "cluster=two_clouds_dp", "+cluster.clouds.cloud_a.shard=true"],
            "bounds gradients of full stages",
        ),
        (
            ["+exp=lora_clm", "model.lora=null", "model.embeddings=tie", "model.own.tied=true"],
            r"security\.privacy adds noise to each of them",
        ),
        (
            [*SMALL, PATCHES, "cluster=local", "training.accumulate_steps=2"],
            f"{PATCHES}.*set security/privacy=none",
        ),
    ],
)
def test_what_needs_gradients_of_full_batches_refuses_it(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        build(*overrides, "security/privacy=sample").check()


def test_only_passes_of_single_samples_are_planned() -> None:
    words = ["strategy=data_parallel", "security/privacy=sample", "training.batch_size=4"]
    given = ["plan=show", "cluster/wan=line_8m", *words]
    config = OmegaConf.create(toy_config("two_clouds", given))
    config.plan.search, config.plan.rows = ["micro_batches", "schedule"], 50
    pieces = [replace(piece("front"), blocks=0), replace(piece("head", boundary=None), blocks=0)]
    profile = Profile(pieces, dict.fromkeys(COMPRESSORS, COMPRESSORS["none"]))
    best = Planner(Settings.of(config)).report(profile).ranked.best
    assert {one.plan.micro_batches for one in best} == {4}


@pytest.mark.parametrize("unit", first_daily(["cloud", "sample"], count=1))
def test_a_trial_adds_no_noise_which_a_pipeline_could_not(tmp_path: Path, unit: str) -> None:
    given = ["plan=show", "strategy=local_updates", f"security/privacy={unit}"]
    config = OmegaConf.create(toy_config("two_clouds", given))
    config.cache_dir, config.plan.trial_steps = str(tmp_path / "cache"), 1
    config.schedule.num_micro_batches = config.training.batch_size = 16

    trial = Planner(Settings.of(config)).trial

    found: Any = trial.trial_settings.job
    assert found.security.privacy is None and found.strategy == Strategy()
    assert len(trial.shapes) > 4, "several numbers of micro-batches, and zero bubble"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_seen_to_be_after_clipping_and_noise(value: float) -> None:
    """Every cloud then skips the update; zero would be taken for a gradient."""
    protect = private_contribution(["a", "loss"], Privacy("cloud", 0.5, 1.0), 1, silent=["loss"])
    tensors = [torch.tensor([1.0, value]), torch.tensor([value])]
    assert not any(found.isfinite().all() for found in protect(tensors))
    finite = protect([torch.ones(2), torch.ones(1)])
    assert finite[0].isfinite().all() and finite[1].item() == 0

"""Rows of frozen parts cross once and are kept: same losses, fewer bytes, wrong uses refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.configs import build
from tests.nightly import first_daily
from tests.pipelines import BORDER, D, ToyStage, in_threads, samples
from tests.trainers import LAYOUTS, Rank, ranks, update
from xcloud.base.errors import ConfigError
from xcloud.comm.channel import Message
from xcloud.comm.compression import Compression
from xcloud.comm.compressor import Chain, Compressor, decodes_rows_alone
from xcloud.comm.low_rank import Svd
from xcloud.comm.precision import BlockInt, Cast
from xcloud.comm.sparsify import TopK
from xcloud.contracts.model import Batch, StageOutput
from xcloud.features.activation_cache import feature
from xcloud.features.activation_cache.cache import (
    CachingChannel,
    describe,
)
from xcloud.net.frame import Kind
from xcloud.pipeline.batch_plan import cut
from xcloud.pipeline.one_forward_one_backward import ZeroBubble
from xcloud.pipeline.pinned_batches import PinnedBatchPlan
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.pipeline.settings import Optimizer, Training

NUM_SAMPLES, STEPS, SIZE = 40, 9, 16  # 3.6 epochs
TRAINING = Training(STEPS, batch_size=SIZE, accumulate_steps=2, optimizer=Optimizer(0.1, 1))
SCHEDULE = GPipe(4)
LANES = [0, 1] * 4
CONSTANT = replace(BORDER, gradient_returns=False, is_constant=True)
PLENTY = 10**6


class Frozen(ToyStage):
    """Computes value by value, so that a row is the same bits whatever rows are computed with it;
    matrix products do not promise that."""

    def __init__(self, stage: int, num_stages: int, computed: list[int]) -> None:
        super().__init__(stage, num_stages)
        self.requires_grad_(False)
        self.computed = computed

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        self.computed += batch["ids"].tolist()
        counts = (batch["ids"] % 4 + 1).to(torch.int16)
        rows = batch["x"].repeat_interleave(counts.long(), 0)
        if received is not None:
            assert torch.equal(counts, received["counts"])
            rows = received["hidden"]
        return StageOutput({"counts": counts, "hidden": torch.tanh(rows * self.layer.bias)})


def job(
    num_frozen: int,
    kept_bytes: int,
    forward: Compressor = Chain(),  # noqa: B008
    schedule: Schedule = SCHEDULE,
) -> tuple[list[Rank], list[int]]:
    """Of 2, 1 and 2 ranks in three clouds; and the samples that frozen stages compute."""
    computed: list[int] = []

    def toy(stage: int, num_stages: int) -> ToyStage:
        if stage < num_frozen:
            return Frozen(stage, num_stages, computed)
        return ToyStage(stage, num_stages)

    boundaries = {stage: CONSTANT if stage < num_frozen else BORDER for stage in range(2)}
    found = ranks(
        LAYOUTS["lanes"],
        TRAINING,
        Compression(forward, Cast()),
        schedule,
        PinnedBatchPlan(NUM_SAMPLES, SIZE, 1, LANES),
        toy=toy,
        boundaries=boundaries,
        kept_bytes=kept_bytes,
    )
    return found, computed


def trained(of: list[Rank], first: int, last: int) -> list[float | None]:
    """Losses of these steps."""
    losses = []
    for step in range(first, last + 1):
        reports: list[Any] = update(of, step)
        losses += [report.loss for report in reports if report.loss is not None]
    return losses


def sent(of: list[Rank], kind: Kind = Kind.ACTIVATION, boundary: int = 0) -> int:
    """Bytes of all lanes over a boundary."""
    stats = [rank.wiring.ends.records for rank in of if boundary in rank.trainer.pipeline.stages]
    return sum(link.num_bytes[kind] for links in stats for link in links)


def kept_of(rank: Rank) -> list[CachingChannel]:
    return [c for c in rank.wiring.boundaries.channels.values() if isinstance(c, CachingChannel)]


def crossings(kept_bytes: int) -> list[int]:
    """Rows that cross the first boundary in each step, counted apart from the code: each of the
    two lanes keeps the samples that come first and fit into half of kept_bytes."""
    plan = PinnedBatchPlan(NUM_SAMPLES, SIZE, 1, LANES)
    kept: list[dict[int, int]] = [{}, {}]
    steps = []
    for step in range(1, STEPS + 1):
        rows = 0
        for ids, lane in zip(cut(plan.ids(step), len(LANES)), LANES, strict=True):
            for sample in [i for i in ids.tolist() if i not in kept[lane]]:
                rows += sample % 4 + 1
                num_bytes = (sample % 4 + 1) * 4 * D + 2
                if sum(kept[lane].values()) + num_bytes <= kept_bytes // 2:
                    kept[lane][sample] = num_bytes
        steps.append(rows)
    return steps


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("num_frozen", first_daily([2, 1], count=1))
def test_kept_rows_change_no_bit_of_a_loss_and_cross_no_more(num_frozen: int) -> None:
    """In lanes, with accumulation, schedules that split the backward, and compression."""
    ways: list[tuple[Compressor, Schedule]] = [
        (Chain(), SCHEDULE),
        (BlockInt(4, block=D), ZeroBubble(4)),
    ]
    for forward, schedule in ways:
        plain, computed_plain = job(num_frozen, 0, forward, schedule)
        keeping, computed = job(num_frozen, PLENTY, forward, schedule)

        assert trained(keeping, 1, 4) == trained(plain, 1, 4)
        after_an_epoch = [sent(keeping, boundary=boundary) for boundary in range(num_frozen)]
        assert trained(keeping, 5, STEPS) == trained(plain, 5, STEPS)
        assert [sent(keeping, boundary=b) for b in range(num_frozen)] == after_an_epoch
        assert sorted(computed) == sorted([*range(NUM_SAMPLES)] * num_frozen)
        assert len(computed_plain) == STEPS * SIZE * num_frozen


def test_both_ends_keep_what_comes_first_and_fits() -> None:
    kept_bytes = 2000
    found, _ = job(1, kept_bytes)
    bottoms = [rank for rank in found if 0 in rank.trainer.pipeline.stages]
    raw = []
    for step in range(1, STEPS + 1):
        trained(found, step, step)
        raw.append(sum(c.raw_bytes for rank in bottoms for c in rank.wiring.boundaries.wan_sends))
    rows = [(b - a) // (4 * D) for a, b in zip([0, *raw[:-1]], raw, strict=True)]

    assert rows == crossings(kept_bytes)
    middle = next(rank for rank in found if 1 in rank.trainer.pipeline.stages)
    at_receiver = [channel.kept for channel in kept_of(middle)]
    assert len(at_receiver) == 2
    for kept in at_receiver:
        assert kept.num_bytes <= kept_bytes // 2
    assert "did not fit" in describe(at_receiver)
    pipelines: list[Any] = [rank.trainer.pipeline for rank in bottoms]
    at_senders = [kept for pipeline in pipelines for kept in pipeline.caches.values()]
    assert [vars(kept) for kept in at_senders] == [vars(kept) for kept in at_receiver]


def test_an_evaluation_crosses_whole_and_is_not_kept() -> None:
    """Its samples have numbers of their own."""
    told = {}
    in_training = {}
    for kept_bytes in (0, PLENTY):
        found, _ = job(1, kept_bytes)
        trained(found, 1, 4)
        pieces = list(torch.arange(NUM_SAMPLES).split(4))

        def one(rank: Rank, pieces: list[Tensor] = pieces) -> Any:
            return rank.trainer.pipeline.predict(pieces, samples, 4)

        answers = in_threads([lambda r=rank: one(r) for rank in found])
        told[kept_bytes] = (sent(found, Kind.EVALUATION), answers, trained(found, 5, 6))
        in_training[kept_bytes] = sent(found)

    assert told[0] == told[PLENTY]
    assert in_training[PLENTY] < in_training[0], "samples are kept, and used"


def test_a_resumed_run_keeps_anew_and_loses_no_bit() -> None:
    whole, _ = job(1, PLENTY)
    losses = trained(whole, 1, STEPS)
    first, _ = job(1, PLENTY)
    before = trained(first, 1, 5)
    resumed, computed = job(1, PLENTY)
    for old, new in zip(first, resumed, strict=True):
        new.load_state_dict(old.state_dict())

    assert before + trained(resumed, 6, STEPS) == losses
    assert len(computed) == len(set(computed)) > NUM_SAMPLES / 2  # they crossed again, once


def test_a_compressor_that_makes_other_rows_in_other_company_is_told() -> None:
    alone: list[Compressor] = [Chain(), Cast(), Cast("bfloat16"), BlockInt(8, 4), BlockInt(1, 8)]
    apart: list[Compressor] = [
        BlockInt(8, 64), BlockInt(8, 3), BlockInt(8, 8, stochastic=True), TopK(0.2), Svd(0.5),
    ]  # fmt: skip

    assert [decodes_rows_alone(one, 8) for one in alone] == [True] * 5
    assert [decodes_rows_alone(one, 8) for one in apart] == [False] * 5


FROZEN = ("+exp=bert_split_sst2", "data=glue_small", "recipe=lowrank_small",
          "model.split.freeze_bottom=true", "training.activation_cache_mb=10")  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.split.freeze_bottom=false"], "at boundary 0 something before it is trained"),
        (["cluster=local"], "none leaves its cloud"),
        (["security.may_keep_rows=false"], "security.may_keep_rows=false forbids"),
        (["security/defences/forward=gaussian_noise"], "adds new noise in every epoch"),
        (["compression=svd_fp16_int8"], "changes the same row differently"),
        (["compression=int4"], "integers whose block divides 8"),
        (["compression=delta_int4"], "compression.forward_memory"),
        (["compression=phased_example"], "changes during the run"),
    ],
)
def test_what_would_be_wrong_is_refused(overrides: list[str], said: str) -> None:
    found = build(*FROZEN, *overrides)
    with pytest.raises(ConfigError, match=said) as raised:
        found.check()

    assert "training.activation_cache_mb=10 keeps" in str(raised.value)


def test_the_room_of_the_setting_is_what_later_epochs_are_priced_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    priced: list[dict[str, Any]] = []
    monkeypatch.setattr(feature, "over_epochs", lambda pricer, **given: priced.append(given))
    job: Any = SimpleNamespace(training=SimpleNamespace(activation_cache_mb=10, max_steps=7))
    for num_samples in (0, 200):
        pricer: Any = SimpleNamespace(profile=SimpleNamespace(train_samples=num_samples))
        feature.ActivationCaching().over_epochs(job, pricer=pricer, plan=cast(Any, "plan"))
    assert priced == [
        {"plan": "plan", "max_bytes": 10_000_000, "num_samples": 200, "num_steps": 7}
    ]


def test_a_model_without_a_bottom_to_freeze_is_not_told_to_freeze_it() -> None:
    with pytest.raises(ConfigError, match="no setting of this model freezes") as raised:
        build("+exp=abnet_iwslt", "training.activation_cache_mb=10").check()

    assert str(raised.value).endswith("set it to 0") and "model.split" not in str(raised.value)


def test_a_frozen_bottom_may_be_kept() -> None:
    found = build(*FROZEN)
    found.check()

    assert found.cached_boundaries == [0]  # type: ignore[attr-defined]
    assert "keeps up to 10 MB of frozen rows" in found.headline

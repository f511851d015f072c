from functools import partial

import pytest
import torch

from tests.nightly import NIGHTLY
from tests.pipelines import in_threads, pipelines, samples
from tests.toy import toy_config
from xcloud.base.errors import ConfigError
from xcloud.comm.channel import ReceiveChannel, SendChannel
from xcloud.comm.memory import DeltaCache
from xcloud.experiment import Experiment
from xcloud.job.config import Settings
from xcloud.pipeline.batch_plan import BatchPlan, cut
from xcloud.pipeline.pinned_batches import PinnedBatchPlan, _shares


def test_every_sample_comes_once_in_each_epoch() -> None:
    plan = BatchPlan(num_samples=10, batch_size=4, seed=3)
    stream = torch.cat([plan.ids(step) for step in range(1, 6)])

    assert sorted(stream[:10].tolist()) == list(range(10))
    assert sorted(stream[10:].tolist()) == list(range(10))
    assert stream[:10].tolist() != stream[10:].tolist()


def test_clouds_agree_without_talking_and_seeds_differ() -> None:
    one, two = BatchPlan(100, 8, 1), BatchPlan(100, 8, 1)
    two.ids(40)  # asked in another order

    assert torch.equal(one.ids(7), two.ids(7))
    assert not torch.equal(one.ids(7), BatchPlan(100, 8, 2).ids(7))


def test_a_batch_may_be_longer_than_an_epoch() -> None:
    ids = BatchPlan(3, 8, 1).ids(1)

    assert sorted(ids[:3].tolist()) == [0, 1, 2]
    assert len(ids) == 8


def test_pieces_differ_by_at_most_one_sample_and_lose_none() -> None:
    pieces = cut(torch.arange(10), 4)

    assert [len(piece) for piece in pieces] == [3, 3, 2, 2]
    assert torch.cat(pieces).tolist() == list(range(10))


def pinned(num_samples: int = 97, batch_size: int = 10, seed: int = 1) -> PinnedBatchPlan:
    return PinnedBatchPlan(num_samples, batch_size, seed, [0, 1, 2, 0])


def groups_of_places(plan: PinnedBatchPlan, group_of_piece: list[int]) -> list[int]:
    pieces = cut(torch.arange(plan.batch_size), len(group_of_piece))
    return [lane for lane, piece in zip(group_of_piece, pieces, strict=True) for _ in piece]


def test_a_pinned_sample_never_changes_its_lanes_and_comes_once_in_each_epoch_of_them() -> None:
    plan, lanes = pinned(), [0, 1, 2, 0]
    places = groups_of_places(plan, lanes)
    streams: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step in range(1, 101):
        ids = plan.ids(step).tolist()
        assert len(ids) == 10
        for group, sample in zip(places, ids, strict=True):
            streams[group].append(sample)
    samples = {group: set(stream) for group, stream in streams.items()}

    assert sorted(s for group in samples.values() for s in group) == list(range(97))
    for group, stream in streams.items():
        size = len(samples[group])
        assert abs(size - 97 * places.count(group) / 10) < 1
        epochs = [stream[i : i + size] for i in range(0, len(stream) - size + 1, size)]
        assert all(set(epoch) == samples[group] for epoch in epochs)
        assert epochs[0] != epochs[1]
    # No one-sided deal: every group has samples from all over the file.
    assert all(min(s) < 15 and max(s) > 80 for s in samples.values())


def test_pinned_samples_of_two_groups_meet_others_in_every_epoch() -> None:
    plan = PinnedBatchPlan(20, 2, 1, [0, 1])
    epochs = [{tuple(plan.ids(step).tolist()) for step in range(e, e + 10)} for e in (1, 11)]

    assert len(epochs[0] & epochs[1]) < 5


def test_pinned_batches_agree_without_talking_and_seeds_differ() -> None:
    one, two = pinned(), pinned()
    two.ids(40)

    assert torch.equal(one.ids(7), two.ids(7))
    assert not torch.equal(one.ids(7), pinned(seed=2).ids(7))


@pytest.mark.parametrize("num_samples", [3, 4, 5, 7])
def test_few_samples_are_dealt_to_all_groups(num_samples: int) -> None:
    plan = PinnedBatchPlan(num_samples, 40, 1, [0] * 38 + [1, 2])
    seen = torch.cat([plan.ids(step) for step in (1, 2)])

    assert set(seen.tolist()) == set(range(num_samples))


def test_fewer_samples_than_lanes_cannot_be_pinned() -> None:
    with pytest.raises(ConfigError, match=r"2 training samples are too few.*3 groups of ranks"):
        pinned(num_samples=2)


MEMORY = ["compression=delta_int4"]
SHAPES = {"2x2": (2, 2, 4), "2 feeding 1": (2, 1, 4), "2 feeding 3": (2, 3, 6)}


def experiment(num_before: int, num_after: int, num_micro_batches: int, *more: str) -> Experiment:
    target = "xcloud.layout"
    clouds = {
        name: {"_target_": f"{target}.Cloud", "num_ranks": num_ranks}
        for name, num_ranks in (("a", num_before), ("b", num_after))
    }
    cluster = {"_target_": f"{target}.ClusterLayout", "clouds": clouds, "wan": "free"}
    overrides = [
        f"schedule.num_micro_batches={num_micro_batches}",
        "training.batch_size=24",
        *more,
    ]
    return Settings.of(toy_config(cluster, overrides)).job


@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_memory_batches_are_those_of_the_plain_plan(shape: str) -> None:
    plan = experiment(*SHAPES[shape]).batch_plan(96)

    assert type(plan) is BatchPlan
    assert torch.equal(plan.ids(5), BatchPlan(96, 24, 1).ids(5))


def test_with_a_memory_and_one_rank_on_each_side_they_are_too() -> None:
    assert type(experiment(1, 1, 4, *MEMORY).batch_plan(96)) is BatchPlan


@pytest.mark.parametrize(
    ("shape", "accumulate"),
    [
        ("2x2", 2),
        ("2 feeding 1", 1),
        pytest.param("2x2", 1, marks=NIGHTLY),
        pytest.param("2 feeding 3", 1, marks=NIGHTLY),
    ],
)
def test_where_a_memory_is_kept_every_sample_is_known_from_the_second_epoch_on(
    shape: str, accumulate: int
) -> None:
    num_samples, m = 96, SHAPES[shape][2]
    found = experiment(*SHAPES[shape], *MEMORY, f"training.accumulate_steps={accumulate}")

    assert share_of_hits(found, found.batch_plan(num_samples), m, accumulate) == 1.0


def test_a_plain_plan_would_miss_the_memory_of_another_lane() -> None:
    found = experiment(*SHAPES["2x2"], *MEMORY)

    assert share_of_hits(found, BatchPlan(96, 24, 1), 4, 1) < 0.75


def share_of_hits(found: Experiment, plan: BatchPlan, m: int, accumulate: int) -> float:
    """Of the visits of epochs 2 and 3 of 96 samples, how many were a change against an earlier
    one: at both ends, which must agree."""
    ranks = pipelines(found.cluster, memory=DeltaCache())
    ends = [
        [end for rank in ranks for end in rank.ports[0].forward_out.values()],
        [end for rank in ranks for end in rank.ports[0].forward_in.values()],
    ]
    held = []
    for step in range(1, 13):
        pieces = cut(plan.ids(step), accumulate * m)
        for first in range(0, accumulate * m, m):
            batches = {i: samples(pieces[first + i]) for i in range(m)}
            arguments = (found.schedule, batches, step, 24.0, first)
            in_threads([partial(rank.step, *arguments) for rank in ranks])
        sent, received = (sum(map(samples_held, side)) for side in ends)
        assert sent == received
        held.append(sent)
    return 1 - (held[11] - held[3]) / (8 * 24)


def samples_held(end: SendChannel | ReceiveChannel) -> int:
    ids = end.state_dict().get("hidden.0.memory.ids", torch.zeros(0))
    assert isinstance(ids, torch.Tensor)
    return len(ids)


@pytest.mark.parametrize(
    ("total", "weights", "shares"),
    [
        (10, [36, 36, 28], [4, 3, 3]),  # two too few: one for each of those that lack most
        (10, [1, 1, 1], [4, 3, 3]),
        (6, [1, 1, 1, 50, 50], [1, 1, 1, 1, 2]),  # three were raised to 1: a large one gives
        (3, [1, 1, 98], [1, 1, 1]),
    ],
)
def test_samples_are_shared_among_groups_as_near_to_their_weights_as_whole_numbers_are(
    total: int, weights: list[int], shares: list[int]
) -> None:
    assert _shares(total, weights) == shares


def test_the_samples_of_an_update_are_the_same_in_every_release() -> None:
    """Clouds draw them apart, and a run goes on after an upgrade."""
    assert [BatchPlan(9, 3, seed=2).ids(step).tolist() for step in (1, 4)] == [
        [1, 6, 8],
        [8, 5, 2],
    ]

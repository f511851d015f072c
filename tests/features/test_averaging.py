"""Replicas that tell each other of their tensors: the right value, and the same in all."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nightly import each_once, first_daily
from tests.replicas import averagers, connected, exchange, finished, same_bits
from xcloud.base.errors import ConfigError, FrameError, LinkTimeout
from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.low_rank import PowerSgd, Svd
from xcloud.comm.precision import BlockInt, Cast
from xcloud.comm.sparsify import RandomK, RandomTopK, TopK
from xcloud.comm.tensor_codec import TensorCodec, _is_bounded
from xcloud.features.replicas.averaging import (
    Aggregators,
    AllToAll,
    Averager,
    ReplicaLinks,
    Terms,
    first_part,
)
from xcloud.features.replicas.merging import weighted_mean
from xcloud.features.replicas.replicas import Replicas
from xcloud.net.frame import TensorSpec

SHAPES = {
    "weight": torch.Size((12, 10)),
    "bias": torch.Size((12,)),
    "convolution": torch.Size((4, 3, 2)),
    "scale": torch.Size(()),
    "empty": torch.Size((0, 5)),
}
LOSSY = [
    Cast("float16"),
    BlockInt(4, stochastic=True),
    Chain(topk=TopK(0.2), int4=BlockInt(4)),
    RandomK(0.3),
    RandomK(0.3, unbiased=True),
    Chain(cocktail=RandomTopK(0.5, 0.5), int4=BlockInt(4)),
    BlockInt(1, block=1024),
    Svd(0.2),
    Chain(powersgd=PowerSgd(2), fp16=Cast()),
]

BIASED = [compressor for compressor in LOSSY if compressor.feedback != "harmful"]


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def codec(compressor: Compressor, feedback: float = True, replica: int = 0) -> TensorCodec:
    return TensorCodec(SHAPES, lambda name, shape: compressor, 7, feedback, replica=replica)


def all_to_all(
    compressor: Compressor, feedback: bool = True
) -> Callable[[ReplicaLinks], AllToAll]:
    return lambda mail: AllToAll(mail, codec(compressor, feedback, mail.replica))


def aggregators(compressor: Compressor) -> Callable[[ReplicaLinks], Aggregators]:
    def make(mail: ReplicaLinks) -> Aggregators:
        def new_codec(shapes: Mapping[str, torch.Size]) -> TensorCodec:
            choose = lambda name, shape: compressor  # noqa: E731
            return TensorCodec(shapes, choose, 7, True, replica=mail.replica)

        return Aggregators(mail, SHAPES, new_codec)

    return make


KINDS = (all_to_all, aggregators)


def run(replicas: list[Averager], steps: range) -> list[list[Tensor]]:
    """The last step's result, with other tensors in every replica and step."""
    found: list[list[Tensor]] = []
    for step in steps:
        found = exchange(replicas, step, [drawn(100 * step + r) for r in range(len(replicas))])
    return found


@pytest.mark.parametrize("num_replicas", [2, 3, 5])
def test_uncompressed_averages_are_the_sum_and_the_weighted_mean(num_replicas: int) -> None:
    tensors = [drawn(r) for r in range(num_replicas)]
    weights = [float(r + 1) for r in range(num_replicas)]
    summed = exchange(averagers(num_replicas, all_to_all(Chain())), 1, tensors)
    in_parts = exchange(averagers(num_replicas, aggregators(Chain())), 1, tensors)
    mean = exchange(
        averagers(
            num_replicas,
            lambda mail: AllToAll(
                mail, codec(Chain()), Terms(weighted_mean, max_weight=lambda replica: 9.0)
            ),
        ),
        1, tensors, weights,
    )  # fmt: skip

    for i in range(len(SHAPES)):
        stacked = torch.stack([own[i] for own in tensors]).double()
        scale = torch.tensor(weights).double().view(-1, *[1] * (stacked.dim() - 1))
        torch.testing.assert_close(summed[0][i].double(), stacked.sum(0), rtol=1e-5, atol=1e-5)
        expected = (stacked * scale).sum(0) / sum(weights)
        torch.testing.assert_close(mean[0][i].double(), expected, rtol=1e-5, atol=1e-5)
    assert same_bits(summed + in_parts) and same_bits(mean)


@pytest.mark.parametrize("compressor", first_daily(LOSSY, count=2), ids=repr)
def test_replicas_are_equal_bit_for_bit_after_every_exchange(compressor: Compressor) -> None:
    for make in KINDS:
        for num_replicas in (2, 3, 5):
            replicas = averagers(num_replicas, make(compressor))
            for step in range(1, 4):
                assert same_bits(run(replicas, range(step, step + 1)))


@pytest.mark.parametrize("compressor", BIASED, ids=repr)
def test_what_was_meant_is_what_arrived_and_what_is_kept_back(compressor: Compressor) -> None:
    sender = codec(compressor)
    meant, arrived = [torch.zeros(s) for s in SHAPES.values()], [0.0] * len(SHAPES)
    for step in range(4):
        tensors = drawn(step)
        parts, seen = sender.encode(tensors)
        assert same_bits([seen, codec(compressor).decode(parts)])
        meant = [m + t for m, t in zip(meant, tensors, strict=True)]
        arrived = [a + s for a, s in zip(arrived, seen, strict=True)]
    kept = [v for k, v in sender.state_dict().items() if k.endswith("residual")]

    assert any(k.any() for k in kept if isinstance(k, Tensor))
    for m, a, k in zip(meant, arrived, kept, strict=True):
        assert isinstance(k, Tensor)
        torch.testing.assert_close(m, a + k.view(m.shape), rtol=1e-4, atol=1e-5)


def test_a_message_has_the_bytes_it_promises_and_few_parts() -> None:
    one = codec(Chain(topk=TopK(0.2), int4=BlockInt(4)))
    parts, _ = one.encode(drawn(1))
    links = connected(2)
    averager = AllToAll(links[0], one)
    averager.start(1, drawn(1))

    assert len(parts) == 2 and sum(part.nbytes for part in parts) == one.max_bytes
    assert links[0].num_bytes == one.max_bytes + 8 < averager.max_bytes
    assert links[0].raw_bytes == one.raw_bytes == 4 * (120 + 12 + 24 + 1)


def test_what_is_under_way_does_not_follow_the_callers_tensors() -> None:
    replicas = averagers(2, all_to_all(Chain()))
    each = [drawn(1), drawn(2)]
    for averager, tensors in zip(replicas, each, strict=True):
        averager.start(1, tensors)
    expected = [one + other for one, other in zip(*each, strict=True)]
    for tensor in (*each[0], *each[1]):
        tensor.zero_()
    assert same_bits([expected, *(averager.finish(1).changes[0] for averager in replicas)])


@pytest.mark.parametrize("compressor", first_daily([Chain(), *LOSSY], count=3), ids=repr)
def test_a_gradient_that_is_not_finite_reaches_all_and_spoils_no_later_one(
    compressor: Compressor,
) -> None:
    for make in KINDS:
        replicas = averagers(3, make(compressor))
        run(replicas, range(1, 3))
        bad = [drawn(r) for r in range(3)]
        bad[1][0][3, 3] = math.nan
        assert not any(found[0].isfinite().all() for found in exchange(replicas, 3, bad))

        later = run(replicas, range(4, 6))
        assert all(tensor.isfinite().all() for found in later for tensor in found)


@pytest.mark.parametrize("compressor", first_daily(LOSSY, count=2), ids=repr)
def test_what_nobody_uses_leaves_residuals_as_they_were(compressor: Compressor) -> None:
    for make in KINDS:
        replicas = averagers(3, make(compressor))
        run(replicas, range(1, 3))
        before = [kept(averager) for averager in replicas]
        bad = [drawn(r) for r in range(3)]
        bad[1] = [torch.zeros_like(tensor) for tensor in bad[1]]
        bad[1][1].fill_(math.nan)
        exchange(replicas, 3, bad)
        for old, averager in zip(before, replicas, strict=True):
            assert same_bits([old, kept(averager)])


def test_what_nobody_uses_leaves_the_residual_of_a_message_that_was_sent_meanwhile() -> None:
    replicas = averagers(2, all_to_all(Chain(int4=BlockInt(4))))
    run(replicas, range(1, 3))
    before = [kept(averager) for averager in replicas]
    for step, scale in ((3, math.inf), (4, 1.0)):
        for r, averager in enumerate(replicas):
            averager.start(step, [drawn(r)[0], drawn(r)[1] * scale, *drawn(r)[2:]])
    finished(replicas, 3)
    (merged, _) = finished(replicas, 4)

    for i, told in enumerate(merged):
        meant = sum(drawn(r)[i].flatten() + before[r][i].flatten() for r in range(2))
        arrived = told.flatten() + sum(kept(averager)[i].flatten() for averager in replicas)
        torch.testing.assert_close(arrived, meant)


def kept(averager: Averager) -> list[Tensor]:
    """All residuals."""
    return [v for name, v in averager.state_dict().items() if name.endswith("residual")]


@pytest.mark.parametrize("compressor", first_daily(LOSSY, count=2), ids=repr)
def test_restored_averagers_go_on_as_if_nothing_had_happened(compressor: Compressor) -> None:
    for kind in KINDS:
        make = kind(compressor)
        original, restored = averagers(3, make), averagers(3, make)
        run(original, range(1, 3))
        for r, averager in enumerate(original):  # under way while the state is saved
            averager.start(3, drawn(r))
        for averager, other in zip(original, restored, strict=True):
            other.load_state_dict(copy.deepcopy(averager.state_dict()))
        late = [finished(group, 3) for group in (original, restored)]

        assert same_bits(late[0] + late[1])
        assert same_bits(run(original, range(4, 6)) + run(restored, range(4, 6)))


def test_a_share_without_tensors_goes_on_as_if_nothing_had_happened() -> None:
    """A rank of a cloud has one where the others carry all of a fragment across."""

    def plain(shapes: Mapping[str, torch.Size]) -> TensorCodec:
        return TensorCodec(shapes, lambda n, s: Chain(), 7, True)

    def empty(links: ReplicaLinks) -> AllToAll:
        return AllToAll(links, plain({}))

    def few(links: ReplicaLinks) -> Aggregators:
        return Aggregators(links, {"one row": torch.Size((1, 5))}, plain)

    for make, tensors in ((empty, []), (few, [torch.ones(1, 5)])):
        original, restored = averagers(3, make), averagers(3, make)
        for averager, other in zip(original, restored, strict=True):
            averager.start(1, tensors)
            other.load_state_dict(copy.deepcopy(averager.state_dict()))
        expected = [[3 * tensor for tensor in tensors]] * 3
        assert same_bits(finished(original, 1) + finished(restored, 1) + expected)


def test_a_state_of_other_settings_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'weight' does not fit it: residual missing"):
        codec(Cast()).load_state_dict({})
    with pytest.raises(ValueError, match=r"'weight' does not fit it: residual missing, unknown"):
        codec(Chain()).load_state_dict(codec(Cast()).state_dict())
    with pytest.raises(ValueError, match=r"'num_calls', which belongs to none"):
        codec(Chain()).load_state_dict({"(memory).0.num_calls": 3})


def test_a_message_does_not_change_with_the_residual_and_a_state_not_with_later_messages() -> None:
    shapes = {"w": torch.Size((6, 4))}
    tensor = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    for compressor in (Cast("bfloat16"), Cast("float16"), Chain(bf16=Cast("bfloat16"))):
        sender = TensorCodec(shapes, lambda n, s, c=compressor: c, 1, True, torch.bfloat16)
        for _ in range(2):
            parts, seen = sender.encode([tensor])
            assert same_bits([sender.decode(parts), seen])
        if compressor.label == "bf16":
            assert torch.equal(seen[0], tensor)
    sender = codec(TopK(0.1))
    sender.encode(drawn(1))
    state = sender.state_dict()
    kept = copy.deepcopy(state)
    sender.load_state_dict(state)
    sender.encode(drawn(2))
    assert all(torch.equal(state[k], kept[k]) for k in kept if isinstance(kept[k], Tensor))


def test_feedback_is_kept_where_it_does_good_and_demanded_where_it_must_be() -> None:
    for compressor in (TopK(0.1), RandomK(0.1), Svd(0.1), PowerSgd(), BlockInt(1), BlockInt(2)):
        assert "(memory).0.residual" in codec(compressor).state_dict()
        with pytest.raises(ConfigError, match=r"chosen for 'weight', loses the same part"):
            codec(compressor, feedback=False)
    for compressor in (Cast(), BlockInt(4), BlockInt(8, stochastic=True)):
        assert "(memory).0.residual" in codec(compressor).state_dict()
        assert "(memory).0.residual" not in codec(compressor, feedback=False).state_dict()
    for compressor in (Chain(), RandomK(0.1, unbiased=True), BlockInt(1, stochastic=True)):
        assert "(memory).0.residual" not in codec(compressor).state_dict()
    unbiased = Chain(randomk=RandomK(0.1, unbiased=True), fp16=Cast())
    assert "(memory).0.residual" not in codec(unbiased).state_dict()


def test_feedback_of_a_share_lets_old_errors_fade_and_gives_back_what_was_not_used() -> None:
    sender = codec(TopK(0.1), feedback=0.5)
    lost = [torch.zeros(shape) for shape in SHAPES.values()]
    for number in range(1, 5):
        meant = [0.5 * kept + new for kept, new in zip(lost, drawn(number), strict=True)]
        sender.encode(drawn(9), is_final=False)
        sender.settle(was_used=False)  # as if it had never been
        _, seen = sender.encode(drawn(number))
        lost = [tensor - sent for tensor, sent in zip(meant, seen, strict=True)]
        kept = sender.state_dict()
        for place, tensor in enumerate(lost):
            found = torch.as_tensor(kept[f"(memory).{place}.residual"])
            assert torch.allclose(found.view_as(tensor), tensor, atol=1e-6), (number, place)


def test_replicas_draw_the_same_positions_and_round_independently() -> None:
    one, other = (codec(RandomK(0.3), replica=r) for r in range(2))
    positions = [c.encode([torch.ones(s) for s in SHAPES.values()])[1][0] for c in (one, other)]
    assert same_bits([[p] for p in positions])

    one, other = (codec(BlockInt(4, stochastic=True), replica=r) for r in range(2))
    assert not torch.equal(one.encode(drawn(1))[1][0], other.encode(drawn(1))[1][0])


def test_a_message_of_other_settings_is_refused() -> None:
    parts, _ = codec(BlockInt(8)).encode(drawn(1))
    with pytest.raises(FrameError, match="run the same experiment file"):
        codec(BlockInt(4)).decode(parts)
    links = connected(2)
    receiver = AllToAll(links[1], codec(Chain()))
    receiver.start(1, drawn(0))
    AllToAll(links[0], codec(Chain())).start(1, drawn(1), weight=math.nan)
    with pytest.raises(FrameError, match="replica 0 sent a weight of nan"):
        receiver.finish(1)
    one, other = torch.zeros(2), torch.zeros(3)
    for wrong in ([], [other], [one.double()], [other, one]):
        with pytest.raises(FrameError, match=r"a message of cloud_b begins with \[.*\], expected"):
            first_part(wrong, TensorSpec.of(one), sender="cloud_b")
    first, rest = first_part([one, other], TensorSpec.of(one), sender="cloud_b")
    assert first is one and rest == [other]


def test_a_replica_that_does_not_come_is_waited_for_and_named() -> None:
    links = replace(connected(2)[0], patience_s=0.01)
    alone = AllToAll(links, codec(Chain()))
    alone.start(1, drawn(1))
    with pytest.raises(LinkTimeout, match="from replica 1"):
        alone.finish(1)


@pytest.mark.parametrize(
    "compressor",
    first_daily([Chain(topk=TopK(0.2), int4=BlockInt(4)), PowerSgd(1)], count=1),
    ids=repr,
)
def test_both_sides_of_an_aggregator_keep_what_they_lost(compressor: Compressor) -> None:
    replicas = averagers(3, aggregators(compressor))
    told, merged = drawn(7), [torch.zeros(shape) for shape in SHAPES.values()]
    for step in range(1, 16):
        # The same in every step: a sum without feedback would miss the same values for ever.
        found = exchange(replicas, step, [told, told, told])
        merged = [m + f for m, f in zip(merged, found[0], strict=True)]

    for total, tensor in zip(merged, told, strict=True):
        wanted = 3 * 15 * tensor
        assert float((total - wanted).norm()) <= 0.3 * float(wanted.norm())


def test_aggregators_send_less_than_all_to_all_from_three_replicas_on() -> None:
    sent = {}
    for num_replicas in (2, 5):
        for make in KINDS:
            links = connected(num_replicas)
            exchange([make(Chain())(own) for own in links], 1, [drawn(1)] * num_replicas)
            values = [own.num_bytes / (4 * 157) for own in links]
            sent[num_replicas, make] = sum(values) / num_replicas
    weights = 8 / (4 * 157)  # a message
    assert sent[2, all_to_all] == pytest.approx(1 + weights)
    assert sent[2, aggregators] == pytest.approx(1 + 2 * weights)
    assert sent[5, all_to_all] == pytest.approx(4 + 4 * weights)
    assert sent[5, aggregators] == pytest.approx(8 / 5 + 8 * weights)


def test_what_was_under_way_is_restored_to_the_device_of_the_tensors() -> None:
    """As of a GPU; what others send is moved there, and the two are merged."""
    sender, _ = averagers(2, all_to_all(Chain()))
    sender.start(1, drawn(0))

    def on_meta(links: ReplicaLinks) -> AllToAll:
        return AllToAll(links, TensorCodec(SHAPES, lambda n, s: Chain(), 7, True, device="meta"))

    restored, _ = averagers(2, on_meta)
    restored.load_state_dict(sender.state_dict())
    under_way = {n: v for n, v in restored.state_dict().items() if "under_way.1.all" in n}
    assert under_way and all(isinstance(v, Tensor) and v.is_meta for v in under_way.values())


def test_averagers_of_one_pair_of_links_may_be_under_way_at_once() -> None:
    for make in KINDS:
        fragments = []
        for links in connected(3):
            fragments.append([make(Chain())(links), make(Chain())(links)])
            fragments[-1][1]._terms = Terms(channel=1)
        for r, (first, second) in enumerate(fragments):
            first.start(1, drawn(r))
            second.start(1, drawn(10 + r))
        second = finished([own[1] for own in fragments], 1)
        first = finished([own[0] for own in fragments], 1)

        assert same_bits(first) and same_bits(second)
        torch.testing.assert_close(first[0][0], sum(drawn(r)[0] for r in range(3)))
        torch.testing.assert_close(second[0][0], sum(drawn(10 + r)[0] for r in range(3)))


@pytest.mark.parametrize(
    ("dtype", "compressor"),
    each_once(
        [torch.bfloat16, torch.float16, torch.float32],
        [TopK(0.01), BlockInt(1, block=1024), BlockInt(4)],
        count=2,
    ),
)
def test_what_is_small_beside_a_residual_is_not_lost(
    compressor: Compressor, dtype: torch.dtype
) -> None:
    """Of many messages of one gradient, whose values differ by four orders of magnitude; in FP16
    the largest are beyond 4094."""
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(64, 64, generator=generator).exp() ** 2
    if dtype == torch.float16:
        tensor *= 8000 / tensor.max()
    tensor = tensor.to(dtype)
    sender = TensorCodec({"w": tensor.shape}, lambda *_: compressor, 5, True, dtype)
    arrived = torch.zeros(tensor.shape, dtype=torch.float64)
    for _ in range(400):
        (seen,) = sender.encode([tensor])[1]
        assert seen.dtype == dtype
        arrived += seen.double()
    (kept,) = (v for k, v in sender.state_dict().items() if k.endswith("residual"))

    assert isinstance(kept, Tensor) and kept.dtype == torch.float32
    meant = 400 * tensor.double()
    missing = meant - arrived - kept.double().view(tensor.shape)
    assert float(missing.norm()) < 1e-4 * float(meant.norm())


def test_a_residual_never_makes_a_message_of_half_precision_overflow() -> None:
    """What is beyond the largest value stays for the next message."""
    tensor = torch.tensor([[60000.0, 40000.0, 1.0, 1.0]], dtype=torch.float16)
    shapes = {"w": tensor.shape}
    sender = TensorCodec(shapes, lambda *_: TopK(0.25), 5, True, torch.float16)
    arrived = torch.zeros(1, 4, dtype=torch.float64)
    for _ in range(8):
        (seen,) = sender.encode([tensor])[1]
        assert seen.isfinite().all()
        arrived += seen.double()
    (kept,) = (v for k, v in sender.state_dict().items() if k.endswith("residual"))
    assert isinstance(kept, Tensor)
    torch.testing.assert_close(arrived + kept.double(), 8 * tensor.double())


def test_what_weighs_nothing_is_kept_for_the_next_message() -> None:
    """A replica that is left out of a merge, whose rest is used: what its message carried of
    earlier ones has not arrived."""
    for make in KINDS:
        replicas = averagers(3, make(BlockInt(4)))
        run(replicas, range(1, 3))
        before = kept(replicas[1])
        nothing = [torch.zeros_like(tensor) for tensor in drawn(1)]
        exchange(replicas, 3, [drawn(0), nothing, drawn(2)], [1.0, 0.0, 1.0])
        after = kept(replicas[1])
        result = [k for k in replicas[1].state_dict() if "handed_back" in k]
        assert same_bits([before[: len(before) - len(result)], after[: len(after) - len(result)]])


def test_links_have_room_for_the_longest_message_of_all_that_share_them() -> None:
    opened: list[Any] = []
    made = Replicas.__new__(Replicas)
    vars(made)["links"] = SimpleNamespace(open=lambda *given: opened.append(given))
    averagers: Any = [SimpleNamespace(max_bytes=size) for size in (300, 900, 100)]
    made.open(averagers, 2.5, 3)
    made.open([])
    assert opened == [(900, 2.5, 3), (0, 0.0, 1)]


LARGEST = torch.finfo(torch.float32).max / 16


@pytest.mark.parametrize(
    ("values", "is_bounded"),
    [
        ([], True),
        ([0.0, -1.0, 1.0], True),
        ([LARGEST, 0.0], False),
        ([-LARGEST, 0.0], False),
        ([0.99 * LARGEST, -0.99 * LARGEST], True),
        ([math.nan, 0.0], False),
        ([-math.inf, 0.0], False),
    ],
)
def test_a_residual_is_kept_of_values_that_leave_it_room(
    values: list[float], is_bounded: bool
) -> None:
    assert _is_bounded(torch.tensor(values), torch.float32) is is_bounded


def test_a_codec_names_its_tensors_in_their_order() -> None:
    assert codec(Chain(), feedback=False).names == list(SHAPES)

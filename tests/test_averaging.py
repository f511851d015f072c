"""Replicas that tell each other of their tensors: the right value, and the same in all."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.replicas import MemoryLinks, averagers, connected, exchange, same_bits
from xcloud.comm.cast import Cast, Nothing
from xcloud.comm.chain import Chain
from xcloud.comm.compressor import Compressor
from xcloud.comm.low_rank import Svd
from xcloud.comm.quantize import BlockInt
from xcloud.comm.sparsify import RandomK, TopK
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.errors import FrameError, LinkTimeout
from xcloud.parallel.averaging import AllToAll, Averager
from xcloud.parallel.merging import weighted_mean

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
    Svd(0.2),
]


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def codec(compressor: Compressor, feedback: bool = False) -> TensorCodec:
    return TensorCodec(SHAPES, lambda name, shape: compressor, 7, feedback)


def all_to_all(
    compressor: Compressor, feedback: bool = False
) -> Callable[[MemoryLinks], AllToAll]:
    return lambda links: AllToAll(links, codec(compressor, feedback))


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
    summed = exchange(averagers(num_replicas, all_to_all(Nothing())), 1, tensors)
    mean = exchange(
        averagers(num_replicas, lambda links: AllToAll(links, codec(Nothing()), weighted_mean)),
        1, tensors, weights,
    )  # fmt: skip

    for i in range(len(SHAPES)):
        stacked = torch.stack([own[i] for own in tensors]).double()
        scale = torch.tensor(weights).double().view(-1, *[1] * (stacked.dim() - 1))
        torch.testing.assert_close(summed[0][i].double(), stacked.sum(0), rtol=1e-6, atol=1e-6)
        expected = (stacked * scale).sum(0) / sum(weights)
        torch.testing.assert_close(mean[0][i].double(), expected, rtol=1e-6, atol=1e-6)
    assert same_bits(summed) and same_bits(mean)


@pytest.mark.parametrize("compressor", LOSSY, ids=repr)
def test_replicas_are_equal_bit_for_bit_after_every_exchange(compressor: Compressor) -> None:
    for num_replicas in (2, 3, 5):
        replicas = averagers(num_replicas, all_to_all(compressor, feedback=True))
        for step in range(1, 4):
            assert same_bits(run(replicas, range(step, step + 1)))


@pytest.mark.parametrize("compressor", LOSSY, ids=repr)
def test_what_was_meant_is_what_arrived_and_what_is_kept_back(compressor: Compressor) -> None:
    sender = codec(compressor, feedback=True)
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
    for compressor in (Nothing(), Chain()):
        replicas = averagers(2, all_to_all(compressor))
        tensors = drawn(1)
        for averager in replicas:
            averager.start(1, tensors)
        expected = [2 * tensor for tensor in tensors]
        for tensor in tensors:
            tensor.zero_()
        assert same_bits([expected, *(averager.finish(1) for averager in replicas)])


@pytest.mark.parametrize("compressor", [Nothing(), *LOSSY], ids=repr)
def test_a_gradient_that_is_not_finite_reaches_all_and_spoils_no_later_one(
    compressor: Compressor,
) -> None:
    replicas = averagers(3, all_to_all(compressor, feedback=True))
    run(replicas, range(1, 3))
    bad = [drawn(r) for r in range(3)]
    bad[1][0][3, 3] = math.nan
    assert not any(found[0].isfinite().all() for found in exchange(replicas, 3, bad))

    assert all(tensor.isfinite().all() for found in run(replicas, range(4, 6)) for tensor in found)


@pytest.mark.parametrize("compressor", LOSSY, ids=repr)
def test_restored_averagers_go_on_as_if_nothing_had_happened(compressor: Compressor) -> None:
    make = all_to_all(compressor, feedback=True)
    original, restored = averagers(3, make), averagers(3, make)
    run(original, range(1, 3))
    for r, averager in enumerate(original):  # under way while the state is saved
        averager.start(3, drawn(r))
    for averager, other in zip(original, restored, strict=True):
        other.load_state_dict(copy.deepcopy(averager.state_dict()))
    late = [[averager.finish(3) for averager in group] for group in (original, restored)]

    assert same_bits(late[0] + late[1])
    assert same_bits(run(original, range(4, 6)) + run(restored, range(4, 6)))


def test_a_state_of_other_settings_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'weight' has none for a residual, expected a tensor"):
        codec(Nothing(), True).load_state_dict({})
    with pytest.raises(ValueError, match=r"'weight' has a tensor \[12, 10\].*expected none"):
        codec(Nothing()).load_state_dict(codec(Nothing(), True).state_dict())
    with pytest.raises(ValueError, match=r"'num_calls', which belongs to none"):
        codec(TopK(0.1)).load_state_dict({"0.num_calls": 3})


def test_a_message_of_other_settings_is_refused() -> None:
    parts, _ = codec(BlockInt(8)).encode(drawn(1))
    with pytest.raises(FrameError, match="run the same experiment file"):
        codec(BlockInt(4)).decode(parts)
    links = connected(2)
    receiver = AllToAll(links[1], codec(Nothing()))
    receiver.start(1, drawn(0))
    AllToAll(links[0], codec(Nothing())).start(1, drawn(1), weight=math.nan)
    with pytest.raises(FrameError, match="replica 0 sent a weight of nan"):
        receiver.finish(1)


def test_a_merge_without_a_late_replica_has_the_others_and_loses_nothing() -> None:
    links = connected(3)
    replicas = [AllToAll(own, codec(Cast("float16"), feedback=True)) for own in links]
    tensors = [drawn(r) for r in range(3)]
    for averager, own in zip(replicas[:2], tensors[:2], strict=True):
        averager.start(1, own)
    with pytest.raises(LinkTimeout, match="from replica 2"):
        replicas[0].finish(1)
    assert replicas[0].arrived(1, wait_s=0.0) == (0, 1)
    replicas[2].start(1, tensors[2])
    assert replicas[0].arrived(1, wait_s=0.0) == (0, 1, 2)
    found = [averager.finish(1, [1, 2]) for averager in replicas]  # 0 is left out
    assert same_bits(found)
    torch.testing.assert_close(found[0][0], tensors[1][0] + tensors[2][0], rtol=1e-2, atol=1e-2)

    residual = replicas[0].state_dict()["codec.0.residual"]
    assert isinstance(residual, Tensor)
    torch.testing.assert_close(residual, tensors[0][0], rtol=1e-6, atol=1e-6)

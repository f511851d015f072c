"""What holds for every compressor, and for a chain of them."""

import copy
import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.codecs import COMPRESSORS, ERRORS, admitted, relative_error, rounding
from xcloud.base.errors import ConfigError
from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.low_rank import Svd, outer_sum
from xcloud.comm.precision import BlockInt, Cast
from xcloud.comm.sparsify import RandomK, TopK
from xcloud.net.frame import TensorSpec

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SHAPES = [(24, 64), (7, 5), (1, 1), (1,), (130,), (), (3, 5, 7), (3, 200), (200, 3)]

every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)


def gaussian(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def arrives(compressor: Compressor, tensor: Tensor) -> Tensor:
    """What a receiver with a compressor of its own decodes."""
    sender, receiver = copy.deepcopy(compressor), copy.deepcopy(compressor)
    return receiver.decompress(sender.compress(tensor), TensorSpec.of(tensor))


@every_compressor
def test_round_trip_keeps_shape_and_dtype(compressor: Compressor) -> None:
    for dtype, shape in product(DTYPES, SHAPES):
        tensor = gaussian(*shape, dtype=dtype)

        assert TensorSpec.of(arrives(compressor, tensor)) == TensorSpec.of(tensor)


@every_compressor
def test_sends_the_bytes_it_promises_or_fewer_where_they_vary(compressor: Compressor) -> None:
    for dtype, shape in product(DTYPES, SHAPES):
        tensor = gaussian(*shape, dtype=dtype)
        parts = copy.deepcopy(compressor).compress(tensor)

        assert admitted(compressor, TensorSpec.of(tensor), parts)
        assert all(part.is_contiguous() for part in parts)


@settings(max_examples=60, deadline=None)
@given(
    compressor=st.sampled_from(COMPRESSORS),
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    seed=st.integers(0, 9),
)
def test_any_shape_survives_even_without_values(
    compressor: Compressor, shape: list[int], seed: int
) -> None:
    tensor = gaussian(*shape, seed=seed)
    parts = copy.deepcopy(compressor).compress(tensor)
    seen = copy.deepcopy(compressor).decompress(parts, TensorSpec.of(tensor))

    assert admitted(compressor, TensorSpec.of(tensor), parts)
    assert seen.shape == tensor.shape
    assert seen.isfinite().all()


@pytest.mark.parametrize(("compressor", "bound"), ERRORS, ids=[repr(c) for c, _ in ERRORS])
def test_error_on_gaussian_values_is_as_small_as_the_method_allows(
    compressor: Compressor, bound: float
) -> None:
    for dtype in DTYPES:
        tensor = gaussian(96, 40, dtype=dtype)
        # The result is rounded to the tensor's dtype, and so are factors and values on the way.
        slack = {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(dtype, 1e-6) if bound else 0.0

        assert relative_error(tensor, arrives(compressor, tensor)) <= bound + slack, dtype


@every_compressor
def test_error_is_the_same_for_tiny_and_huge_values(compressor: Compressor) -> None:
    tensor = gaussian(48, 64)
    expected = relative_error(tensor, arrives(compressor, tensor))
    for power in (-100, -30, 30, 100):
        scaled = relative_error(tensor * 2.0**power, arrives(compressor, tensor * 2.0**power))

        assert scaled == pytest.approx(expected, rel=0.02, abs=1e-6), power


@pytest.mark.parametrize(  # unbiased multiplies what it sends, so it needs the range
    "compressor", [c for c in COMPRESSORS if "unbiased" not in c.label], ids=repr
)
def test_the_ends_of_float16_are_reached_without_overflow(compressor: Compressor) -> None:
    for scale in (6e4, 1e-5):
        tensor = torch.full((40, 24), scale, dtype=torch.float16)
        seen = arrives(compressor, tensor)
        kept = seen[seen != 0]

        assert seen.isfinite().all(), scale
        if "stochastic" not in compressor.label:
            assert relative_error(tensor.flatten()[: len(kept)], kept) < rounding(compressor), (
                scale
            )


@every_compressor
def test_zeros_arrive_as_zeros(compressor: Compressor) -> None:
    for dtype in DTYPES:
        assert not arrives(compressor, torch.zeros(9, 33, dtype=dtype)).any()


@every_compressor
def test_a_tensor_after_zeros_arrives_as_without_them(compressor: Compressor) -> None:
    # A warm start from zeros, or from another subspace, must not blind the next call.
    tensor = gaussian(200, 5) @ gaussian(5, 120, seed=1)
    compressor = copy.deepcopy(compressor)
    expected = relative_error(tensor, arrives(compressor, tensor))
    compressor.compress(torch.zeros(200, 120))

    assert relative_error(tensor, arrives(compressor, tensor)) <= 1.05 * expected + 1e-4


@every_compressor
def test_one_element_arrives(compressor: Compressor) -> None:
    seen = arrives(compressor, torch.tensor([[-3.0]]))

    # Unbiased: one of one value is sent, so nothing is scaled. Stochastic: on average.
    assert seen.item() == pytest.approx(-3.0, rel=0.01)


@every_compressor
def test_receiver_needs_nothing_but_the_parts(compressor: Compressor) -> None:
    sender, receiver = copy.deepcopy(compressor), copy.deepcopy(compressor)
    for seed, num_rows in enumerate((150, 200, 130)):
        tensor = gaussian(num_rows, 120, seed=seed)
        parts = sender.compress(tensor)

        assert torch.equal(
            sender.decompress(parts, TensorSpec.of(tensor)),
            receiver.decompress(parts, TensorSpec.of(tensor)),
        )


@every_compressor
def test_two_senders_with_the_same_past_send_the_same(compressor: Compressor) -> None:
    first, second = copy.deepcopy(compressor), copy.deepcopy(compressor)
    for seed in range(3):
        tensor = gaussian(150, 120, seed=seed)
        for one, other in zip(first.compress(tensor), second.compress(tensor), strict=True):
            assert torch.equal(one, other)


@every_compressor
def test_restored_state_continues_as_if_nothing_had_happened(compressor: Compressor) -> None:
    original, restored = copy.deepcopy(compressor), copy.deepcopy(compressor)
    for seed in range(2):
        original.compress(gaussian(150, 120, seed=seed))
    restored.load_state_dict(original.state_dict())
    tensor = gaussian(140, 120, seed=7)

    for one, other in zip(original.compress(tensor), restored.compress(tensor), strict=True):
        assert torch.equal(one, other)


@every_compressor
def test_global_random_state_is_left_alone(compressor: Compressor) -> None:
    before = torch.get_rng_state()
    arrives(compressor, gaussian(40, 24))

    assert torch.equal(torch.get_rng_state(), before)


@every_compressor
def test_neither_the_tensor_nor_the_parts_are_changed(compressor: Compressor) -> None:
    tensor = gaussian(40, 24)
    original = tensor.clone()
    compressor = copy.deepcopy(compressor)
    parts = compressor.compress(tensor)
    sent = [part.clone() for part in parts]
    compressor.decompress(parts, TensorSpec.of(tensor))

    assert torch.equal(tensor, original)
    assert all(torch.equal(part, was) for part, was in zip(parts, sent, strict=True))


@every_compressor
def test_layout_in_memory_and_autograd_make_no_difference(compressor: Compressor) -> None:
    tensor = gaussian(24, 40)
    transposed = tensor.T.contiguous().T.requires_grad_()
    seen = arrives(compressor, transposed)

    assert not seen.requires_grad
    torch.testing.assert_close(seen, arrives(compressor, tensor), rtol=1e-3, atol=1e-4)


@every_compressor
def test_a_value_that_is_not_finite_stays_visible_wherever_it_stands(
    compressor: Compressor,
) -> None:
    cases = [
        *((torch.float32, bad) for bad in (math.nan, math.inf, -math.inf)),
        *((torch.float16, bad) for bad in (math.nan, math.inf)),
        (torch.bfloat16, math.nan),
        (torch.float64, -math.inf),
    ]
    for dtype, bad in cases:
        for at in (0, 11, 64, 493, 949, 959):
            tensor = gaussian(40, 24, dtype=dtype)
            tensor.view(-1)[at] = bad

            assert not arrives(compressor, tensor).isfinite().all(), (dtype, bad, at)
        everywhere = torch.full((40, 24), bad, dtype=dtype)
        assert not arrives(compressor, everywhere).isfinite().all(), (dtype, bad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_compressor
def test_error_on_a_gpu_is_that_on_a_cpu(compressor: Compressor) -> None:
    tensor = gaussian(150, 120)
    parts = copy.deepcopy(compressor).compress(tensor.cuda())
    on_gpu = copy.deepcopy(compressor).decompress(parts, TensorSpec.of(tensor))
    expected = relative_error(tensor, arrives(compressor, tensor))

    assert admitted(compressor, TensorSpec.of(tensor), parts)
    assert all(part.is_cuda for part in parts) and on_gpu.is_cuda
    # Stochastic rounding draws other numbers there.
    assert relative_error(tensor, on_gpu.cpu()) == pytest.approx(expected, rel=0.1, abs=1e-5)


@every_compressor
def test_integers_are_refused(compressor: Compressor) -> None:
    with pytest.raises(ValueError, match=r"floating tensors.*int64"):
        copy.deepcopy(compressor).compress(torch.arange(8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cast("fp16"), r"Cast.dtype must be one of float16, bfloat16, got 'fp16'"),
        (lambda: BlockInt("8"), r"BlockInt.bits must be 1..8, got '8'"),  # type: ignore[arg-type]
        (lambda: BlockInt(9), r"BlockInt.bits must be 1..8, got 9"),
        (lambda: BlockInt(True), r"BlockInt.bits must be 1..8, got True"),
        (lambda: BlockInt(8, block=0), r"BlockInt.block must be a whole number >= 1, got 0"),
        (lambda: BlockInt(8, stochastic="no"), r"BlockInt.stochastic"),  # type: ignore[arg-type]
        (lambda: BlockInt(8, seed=-1), r"BlockInt.seed"),
        (lambda: TopK(0), r"TopK.rate must be a number in \(0, 1\], got 0"),
        (lambda: TopK(1.5), r"TopK.rate must be a number in \(0, 1\], got 1.5"),
        (lambda: TopK("0.1"), r"TopK.rate must be .* got '0.1'"),  # type: ignore[arg-type]
        (lambda: RandomK(0.0), r"RandomK.rate"),
        (lambda: RandomK(0.1, seed=0.5), r"RandomK.seed"),  # type: ignore[arg-type]
        (lambda: RandomK(0.1, unbiased="yes"), r"RandomK.unbiased"),  # type: ignore[arg-type]
        (lambda: Svd(float("nan")), r"Svd.rate must be a number in \(0, 1\], got nan"),
        (lambda: Svd(0.5, method="qr"), r"Svd.method must be one of subspace, exact, got 'qr'"),
        (lambda: Svd(0.5, iterations=0), r"Svd.iterations"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused_in_words(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


class Calls(TorchDispatchMode):
    """Counts the operations that a device would be given."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num += 1
        return func(*args, **(kwargs or {}))


def test_a_device_other_than_a_processor_gets_no_more_operations_for_more_values() -> None:
    """Pieces that fit into a processor's cache would be launches of a microsecond each on a GPU.
    Tensors without values stand for it; what looks at values is left out."""

    def num_calls(work: Callable[[Tensor], object], rows: int) -> int:
        tensor = torch.empty(rows, 768, device="meta")
        with Calls() as calls:
            work(tensor)
        return calls.num

    works: dict[str, Callable[[Tensor], object]] = {
        "outer_sum": lambda tensor: outer_sum(tensor[:, :9], torch.empty(9, 768, device="meta")),
    }
    for compressor in COMPRESSORS:
        used = copy.deepcopy(compressor)
        works[repr(compressor)] = lambda tensor, used=used: arrives(used, tensor)  # type: ignore[misc]
    compared = set()
    for name, work in works.items():
        try:
            found = [num_calls(work, rows) for rows in (64, 8192)]
        except (NotImplementedError, RuntimeError):
            continue
        compared.add(name)
        assert found[0] == found[1], name

    assert {repr(BlockInt(bits)) for bits in (2, 4, 8)} | {"outer_sum"} <= compared


SPEC = TensorSpec((64, 32), torch.float32)


@pytest.mark.parametrize(
    ("members", "label"),
    [
        ({}, "none"),
        ({"int8": BlockInt(8)}, "int8"),
        ({"svd": Svd(0.6), "fp16": Cast("float16")}, "fp16(svd(0.6))"),
        ({"top": TopK(0.1), "quant": BlockInt(8)}, "int8(topk(0.1))"),
        (
            {"a": Svd(0.5), "b": RandomK(0.2), "c": Cast("bfloat16")},
            "bf16(randomk(0.2)(svd(0.5)))",
        ),
    ],
)
def test_label_is_the_papers_notation(members: dict[str, Compressor], label: str) -> None:
    assert Chain(**members).label == label


def test_a_chain_of_one_sends_what_its_member_sends() -> None:
    tensor = torch.randn(64, 32)

    for one, other in zip(
        Chain(int4=BlockInt(4)).compress(tensor), BlockInt(4).compress(tensor), strict=True
    ):
        assert torch.equal(one, other)
    assert torch.equal(Chain().compress(tensor)[0], tensor)


def test_each_floating_part_is_compressed_and_integer_parts_pass() -> None:
    specs = Chain(topk=TopK(0.25), int8=BlockInt(8)).wire_specs(SPEC)
    values, positions = TopK(0.25).wire_specs(SPEC)

    assert specs == (*BlockInt(8).wire_specs(values), positions)


def test_both_factors_are_compressed() -> None:
    specs = Chain(svd=Svd(0.5), fp16=Cast("float16")).wire_specs(SPEC)

    assert [spec.shape for spec in specs] == [(64, 16), (1,), (16, 32), (1,)]
    assert all(spec.dtype in (torch.float16, torch.int16) for spec in specs)


def test_three_members_arrive_like_one_after_the_other() -> None:
    tensor = torch.randn(64, 32)
    svd, topk, fp16 = Svd(0.5), TopK(0.9), Cast("float16")
    left, right = (arrives(fp16, arrives(topk, part)) for part in Svd(0.5).compress(tensor))
    seen = arrives(Chain(svd=svd, topk=topk, fp16=fp16), tensor)

    torch.testing.assert_close(seen, left @ right)


def test_exactly_representable_input_survives_the_whole_chain() -> None:
    tensor = torch.zeros(64, 32)
    tensor[::8] = torch.randint(-8, 8, (8, 32))
    tensor[0, 0] = -8.0

    chain = Chain(topk=TopK(0.125), int4=BlockInt(4, block=256))

    assert torch.equal(arrives(chain, tensor), tensor)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            {"fp16": Cast("float16"), "svd": Svd(0.5)},
            r"svd\(0.5\) cannot come after fp16: members have the order low_rank, ",
        ),
        (
            {"int8": BlockInt(8), "topk": TopK(0.1)},
            r"topk\(0.1\) cannot come after int8: ",
        ),
        (
            {"topk": TopK(0.1), "svd": Svd(0.5)},
            r"svd\(0.5\) cannot come after topk\(0.1\): ",
        ),
        (
            {"int8": BlockInt(8), "fp16": Cast("float16")},
            r"fp16 cannot come after int8: .* one",
        ),
        (
            {"int8": BlockInt(8), "int4": BlockInt(4)},
            r"int4 cannot come after int8: .* one",
        ),
        ({"a": Svd(0.5), "b": Svd(0.2)}, "at most one of each"),
        ({"a": TopK(0.5), "b": RandomK(0.2)}, "at most one of each"),
        ({"a": Chain(int8=BlockInt(8))}, r"'a' is itself a chain \(int8\); name its members"),
        ({"svd": {"rate": 0.6}}, r"'svd' must be a compressor, got .*_target_"),
        ({"svd": 0.6}, r"'svd' must be a compressor, got 0.6"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_way_out(members, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Chain(**members)


def test_family_is_that_of_the_last_member() -> None:
    assert Chain().family == "none"
    assert Chain(svd=Svd(0.5)).family == "low_rank"
    assert Chain(topk=TopK(0.5), int8=BlockInt(8)).family == "precision"


def test_state_is_kept_under_the_names_of_the_members() -> None:
    chain = Chain(svd=Svd(0.05), int8=BlockInt(8, stochastic=True))
    chain.compress(torch.randn(300, 100))
    state = chain.state_dict()

    assert set(state) == {"svd.basis", "int8.num_calls"}
    assert state["int8.num_calls"] == 2  # two factors

"""Factors of a matrix: by SVD, and by one step of power iteration a call."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.codecs import arrives, relative_error
from xcloud.comm import low_rank as power_sgd
from xcloud.comm.compressor import Chain
from xcloud.comm.low_rank import PowerSgd, Svd, outer_sum
from xcloud.comm.precision import BlockInt, Cast
from xcloud.net.frame import TensorSpec

METHODS = ("exact", "subspace")


def smallest_error(tensor: Tensor, rank: int) -> float:
    """Of any matrix of this rank (Eckart and Young)."""
    values = torch.linalg.svdvals(tensor)
    return float(values[rank:].norm() / values.norm())


def micro_batches(decay: str, num_features: int = 256, num: int = 4) -> list[Tensor]:
    """Of different rows, in one basis, with singular values that decay as hidden states' do."""
    generator = torch.Generator().manual_seed(1)
    i = torch.arange(1.0, num_features + 1)
    sizes = {"1/i": 1 / i, "exp": torch.exp(-i / 20) + 1e-3, "1/sqrt(i)": i**-0.5}[decay]
    basis = torch.linalg.qr(torch.randn(num_features, num_features, generator=generator)).Q
    rows = [600 - 70 * index for index in range(num)]
    return [(torch.randn(r, num_features, generator=generator) * sizes) @ basis for r in rows]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("rows", "features", "rate"),
    [(300, 200, 0.05), (300, 200, 0.5), (40, 200, 0.5), (200, 40, 0.5), (60, 60, 1.0)],
)
def test_exactly_low_rank_input_comes_back_exactly(
    method: str, rows: int, features: int, rate: float
) -> None:
    compressor = Svd(rate, method=method)
    rank = round(rate * min(rows, features))
    for _ in range(3):  # each of another basis: the warm start is of no use and must do no harm
        tensor = torch.randn(rows, rank) @ torch.randn(rank, features)

        assert relative_error(tensor, arrives(compressor, tensor)) < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_a_single_row_of_its_own_direction_is_found(method: str) -> None:
    compressor, tensor = Svd(0.05, method=method), torch.zeros(400, 200)
    compressor.compress(torch.randn(400, 3) @ torch.randn(3, 200))
    tensor[123, 45] = 7.0

    assert relative_error(tensor, arrives(compressor, tensor)) < 1e-5


def test_features_that_were_all_zero_in_the_last_tensor_are_found() -> None:
    compressor, first, second = Svd(0.05), torch.zeros(400, 200), torch.zeros(400, 200)
    first[:, :10] = torch.randn(400, 10)
    second[:, 150:160] = torch.randn(400, 10)
    compressor.compress(first)

    assert relative_error(second, arrives(compressor, second)) < 1e-5


def test_exact_makes_the_smallest_possible_error() -> None:
    tensor = torch.randn(90, 50)

    for rate, rank in ((0.1, 5), (0.6, 30)):
        error = relative_error(tensor, arrives(Svd(rate, method="exact"), tensor))
        assert error == pytest.approx(smallest_error(tensor, rank), rel=1e-4)


@pytest.mark.parametrize("decay", ["1/i", "exp", "1/sqrt(i)"])
@pytest.mark.parametrize("rate", [0.05, 0.1, 0.2, 0.6])
def test_subspace_errs_at_most_one_percent_more_than_exact(decay: str, rate: float) -> None:
    compressor = Svd(rate)
    for index, tensor in enumerate(micro_batches(decay)):
        error = relative_error(tensor, arrives(compressor, tensor))
        allowed = 1.02 if index == 0 else 1.01  # the first has no warm start

        assert error <= allowed * smallest_error(tensor, round(rate * 256))


def test_a_warm_start_helps() -> None:
    first, *others, last = micro_batches("1/i")
    warm, cold = Svd(0.05), Svd(0.05)
    for tensor in (first, *others):
        warm.compress(tensor)
    cold.iterations = -1  # the two extra rounds of a first call leave one
    excess = [
        relative_error(last, arrives(svd, last)) / smallest_error(last, 13) - 1
        for svd in (warm, cold)
    ]

    assert excess[0] < 0.3 * excess[1]


def test_more_iterations_come_closer() -> None:
    errors = []
    for iterations in (1, 3):
        compressor = Svd(0.05, iterations=iterations)
        tensor = micro_batches("1/sqrt(i)")[0]
        errors.append(relative_error(tensor, arrives(compressor, tensor)))

    assert smallest_error(tensor, 13) < errors[1] < errors[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-25, 1e-6, 1e4, 1e25])
@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_casting_the_factors_adds_little_error_at_any_scale(
    method: str, scale: float, rate: float
) -> None:
    tensor = micro_batches("1/i")[0] * scale
    plain = relative_error(tensor, arrives(Svd(rate, method=method), tensor))
    fp16 = Chain(svd=Svd(rate, method=method), fp16=Cast("float16"))
    int8 = Chain(svd=Svd(rate, method=method), int8=BlockInt(8))

    assert relative_error(tensor, arrives(fp16, tensor)) < plain + 2e-4
    assert relative_error(tensor, arrives(int8, tensor)) < (plain**2 + 0.011**2) ** 0.5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rate", [0.05, 0.6])
def test_the_factors_have_the_same_mean_square(method: str, rate: float) -> None:
    left, right = Svd(rate, method=method).compress(1e-6 * micro_batches("1/i")[0])

    assert left.square().mean() == pytest.approx(right.square().mean().item(), rel=1e-3)


def test_rate_is_the_share_of_the_rank_that_is_kept() -> None:
    left, right = Svd(0.6).wire_specs(TensorSpec((2048, 768), torch.float32))

    assert (left.shape, right.shape) == ((2048, 461), (461, 768))


def test_features_of_any_shape_are_one_axis() -> None:
    tensor = torch.randn(20, 6, 4)
    left, right = Svd(0.5).compress(tensor)

    assert (left.shape, right.shape) == ((20, 10), (10, 24))
    torch.testing.assert_close(arrives(Svd(1.0), tensor), tensor, rtol=1e-4, atol=1e-5)


def test_a_square_matrix_at_a_high_rate_costs_more_than_it_saves_and_says_so() -> None:
    specs = Svd(0.6).wire_specs(TensorSpec((100, 100), torch.float32))

    assert sum(spec.num_bytes for spec in specs) == 1.2 * 4 * 100 * 100


def test_a_nan_does_not_spoil_the_warm_start() -> None:
    first, second, *_ = micro_batches("1/i")
    compressor = Svd(0.05)
    compressor.compress(first)
    broken = first.clone()
    broken[3, 3] = float("nan")

    assert arrives(compressor, broken).isnan().all()
    assert relative_error(second, arrives(compressor, second)) < 1.01 * smallest_error(second, 13)


class Decompositions(TorchDispatchMode):
    """Notes the name and the shape of every matrix decomposition computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.__name__.partition(".")[0].removeprefix("_").removeprefix("linalg_")
        if name in ("svd", "qr", "eigh"):
            self.seen.append((name, tuple(args[0].shape)))
        return operation(*args, **(kwargs or {}))


def test_subspace_decomposes_nothing_wider_than_its_rank_with_some_margin() -> None:
    """What makes it fast; how fast is measured by benchmarks/bench_codecs.py."""
    tensor = torch.randn(256, 192)
    warm, exact = Svd(1 / 24), Svd(1 / 24, method="exact")
    warm.compress(tensor)
    with Decompositions() as of_warm:
        warm.compress(tensor)
    with Decompositions() as of_exact:
        exact.compress(tensor)

    assert of_warm.seen and all(shape[1] == 24 for _, shape in of_warm.seen)
    assert of_exact.seen == [("svd", (256, 192))]


def gradients(num: int) -> list[Tensor]:
    """Of one matrix with slowly decaying singular values, with a little noise in each."""
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(120, 80, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(80, 80, generator=generator)).Q
    mean = left @ torch.diag(1 / torch.arange(1.0, 81)) @ right
    return [mean + 1e-3 * torch.randn(120, 80, generator=generator) for _ in range(num)]


def error(tensor: Tensor, compressor: PowerSgd) -> float:
    seen = compressor.decompress(compressor.compress(tensor), TensorSpec.of(tensor))
    return float((tensor - seen).norm() / tensor.norm())


def test_the_warm_start_comes_near_to_the_best_matrix_of_that_rank() -> None:
    compressor, tensors = PowerSgd(4), gradients(8)
    errors = [error(tensor, compressor) for tensor in tensors]
    values = torch.linalg.svdvals(tensors[-1])
    best = float(values[4:].norm() / values.norm())

    assert errors[0] > 1.15 * best
    assert errors[-1] < 1.01 * best


def test_exactly_low_rank_input_comes_back_exactly_at_once() -> None:
    torch.manual_seed(0)
    compressor = PowerSgd(5)
    for _ in range(3):  # each of another basis
        assert error(torch.randn(90, 5) @ torch.randn(5, 60), compressor) < 1e-5


def test_bytes_are_those_of_two_thin_factors() -> None:
    def num_bytes(rank: int, *shape: int) -> int:
        specs = PowerSgd(rank).wire_specs(TensorSpec(shape, torch.float32))
        return sum(spec.num_bytes for spec in specs)

    assert num_bytes(4, 512, 2048) == 4 * 4 * (512 + 2048)  # 1/102 of the matrix
    assert num_bytes(4, 3, 50) == 4 * 3 * (3 + 50)  # no more columns than rows
    assert num_bytes(4, 1, 50) == 4 * (1 + 50)


def test_decoding_gives_the_same_bits_whatever_the_passes_and_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(700, 8), torch.randn(8, 500)
    expected = sum(left[:, i, None] * right[i] for i in range(8))
    threads = torch.get_num_threads()
    try:
        for num_threads, chunk in ((1, 1 << 16), (2, 1 << 16), (1, 1 << 10), (2, 1 << 20)):
            torch.set_num_threads(num_threads)
            monkeypatch.setattr(power_sgd, "_CHUNK", chunk)
            assert torch.equal(outer_sum(left, right), expected)
    finally:
        torch.set_num_threads(threads)
    assert not outer_sum(torch.zeros(3, 0), torch.zeros(0, 5)).any()


def test_a_state_of_another_compressor_is_refused() -> None:
    with pytest.raises(ValueError, match="a PowerSgd contains 'num_calls'"):
        PowerSgd().load_state_dict({"num_calls": 3})

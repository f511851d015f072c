import pytest
import torch

from tests.codecs import arrives
from xcloud.base.errors import ConfigError
from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.low_rank import Svd
from xcloud.comm.precision import BlockInt, Cast
from xcloud.comm.sparsify import RandomK, TopK
from xcloud.net.frame import TensorSpec

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
            r"svd\(0.5\) cannot come after fp16: members stand in the order low_rank, ",
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

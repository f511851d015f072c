"""Plans of compression: by direction, boundary and phase, and what they are called."""

import copy
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from xcloud.base.errors import ConfigError
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import PerBoundary, PerTensor, Phase, Phased
from xcloud.comm.compressor import Chain
from xcloud.comm.low_rank import Svd
from xcloud.comm.memory import DeltaCache, ErrorFeedback, SampleRows
from xcloud.comm.precision import BlockInt, Cast
from xcloud.comm.sparsify import TopK
from xcloud.job.config import build, resolved

CONF = Path(__file__).parents[2] / "conf" / "compression"
PAPER = Compression(
    forward=Chain(svd=Svd(0.6), fp16=Cast("float16")), backward=Chain(int8=BlockInt(8))
)
LABELS = {
    "none": "none+none",
    "fp16": "fp16+fp16",
    "bf16": "bf16+bf16",
    "fp16_int8": "fp16+int8",
    "int8": "int8+int8",
    "int4": "int4+int4",
    "int4_int8": "int4+int8",
    "int2": "int2+int2",
    "topk": "fp16(topk(0.1))+fp16(topk(0.1))",
    "topk_ef": "ef(fp16(topk(0.1)))+ef(fp16(topk(0.1)))",
    "randomk": "fp16(randomk(0.1))+fp16(randomk(0.1))",
    "svd_fp16_int8": "fp16(svd(0.6))+int8",
    "low_rank_few_bits": "int4+int2(toprows(0.5))",
    "delta_int4": "delta(int4)+int8",
    "powersgd": "fp16+fp16, averaging fp16(powersgd(4)), vectors: fp16",
    "sign": "fp16+fp16, averaging int1, vectors: fp16",
    "cocktail": "fp16+fp16, averaging int4(topk(0.1 of random 0.1)), vectors: fp16",
    "sparseloco": "fp16+fp16, averaging int1(topk(0.015625)), vectors: fp16",
    "eden2": "eden2+eden2",
    "transform": "transform(1)+transform(3.2), averaging int4",
    "low_rank_transform": "transform(0.8)+transform(3), averaging int4",
    "phased_example": "int8+int8 to step 200, int4+int8",
}


COMPOSED = {
    "low_rank_few_bits_u_shape",
    "transform_tokens",
}  # has defaults: built by tests/job/test_conf.py


def test_label_joins_forward_and_backward_with_their_memories() -> None:
    assert PAPER.label == "fp16(svd(0.6))+int8"
    assert Compression(TopK(0.05), BlockInt(8), ErrorFeedback()).label == "ef(topk(0.05))+int8"
    assert Compression(backward_memory=DeltaCache()).label == "none+delta(none)"
    # The label says what is done: each part is where the label has it.
    with_memory = Compression(TopK(0.05), BlockInt(8), ErrorFeedback())
    assert isinstance(with_memory.forward_memory, ErrorFeedback)
    assert with_memory.backward_memory != with_memory.forward_memory
    assert (with_memory.forward, with_memory.backward) == (TopK(0.05), BlockInt(8))


def test_replicas_average_with_the_compressor_of_gradients_unless_there_is_another() -> None:
    int4, int8 = BlockInt(4), BlockInt(8)
    assert PAPER.for_tensor("w", (3, 3)) is PAPER.backward
    assert Compression(backward=int8, averaging=int4).for_tensor("w", (3, 3)) is int4
    per_tensor = PerTensor(int4, int8, Cast(), {r"lora_B\.weight$": Chain(), r"0\.": TopK(0.1)})
    compression = Compression(averaging=per_tensor)
    found = {
        name: compression.for_tensor(name, shape).label
        for name, shape in (
            ("1.layers.3.attention.q.weight", (8, 8)),
            ("1.layers.3.norm.weight", (8,)),
            ("1.embed_tokens.weight", (50, 8)),
            ("1.bottom.words.weight", (50, 8)),
            ("1.layers.3.q.lora_B.weight[4:8]", (4, 2)),  # rows that one of several ranks carries
            ("0.layers.3.bias", (8,)),
        )
    }
    assert list(found.values()) == ["int4", "int8", "fp16", "fp16", "none", "topk(0.1)"]
    assert compression.label == (
        "none+none, averaging int4, vectors: int8, embeddings: fp16, lora_B\\.weight$: none, "
        "0\\.: topk(0.1)"
    )
    assert not compression.is_identity and not Compression(averaging=int4).is_identity
    assert Compression(averaging=PerTensor(Chain(), Chain())).is_identity
    assert PerBoundary(PAPER, boundary_1=compression).for_tensor("w", ()) is PAPER.backward

    one, other = Phase(3, PAPER), Phase(None, Compression(backward=PAPER.backward))
    assert Phased(one=one, other=other).for_tensor("w", (3, 3)) is PAPER.backward
    with pytest.raises(ConfigError, match=r"int8.*, .*bits=4.*the same `averaging`"):
        Phased(one=one, other=Phase(None, compression)).for_tensor("w", (3, 3))


def test_compression_is_the_same_at_every_step() -> None:
    assert PAPER.at(0) is PAPER.at(10**6) is PAPER


def test_identity_is_nothing_both_ways_without_memory() -> None:
    assert Compression().is_identity
    assert not Compression(forward=Cast("float16")).is_identity
    assert not Compression(backward=Cast("float16")).is_identity
    assert not Compression(forward_memory=DeltaCache()).is_identity
    assert not Compression(backward_memory=ErrorFeedback()).is_identity


def test_copies_share_no_state() -> None:
    compression = Compression(Chain(svd=Svd(0.05)), BlockInt(4, stochastic=True), DeltaCache())
    one, other = copy.deepcopy(compression), copy.deepcopy(compression)
    rows = SampleRows((1, 2), (100, 100))
    for tensor in (torch.randn(200, 80), torch.randn(200, 80)):
        one.forward.compress(tensor)
        one.backward.compress(tensor)
        one.forward_memory.after_receive(tensor, rows)
    fresh = copy.deepcopy(compression)

    assert one.forward_memory.state_dict() and not other.forward_memory.state_dict()
    for direction in ("forward", "backward"):
        sent = [getattr(copy_, direction).compress(tensor)[0] for copy_ in (one, other, fresh)]
        assert torch.equal(sent[1], sent[2])
        assert not torch.equal(sent[0], sent[1])


def test_a_phase_lasts_until_its_step_and_the_last_one_for_ever() -> None:
    first, second, third = Compression(), PAPER, Compression(BlockInt(2), BlockInt(8))
    phased = Phased(warm_up=Phase(10, first), middle=Phase(25, second), rest=Phase(None, third))
    expected = {0: first, 10: first, 11: second, 25: second, 26: third, 10**9: third}

    assert {step: phased.at(step) for step in expected} == expected


def test_phased_says_what_it_does() -> None:
    phased = Phased(a=Phase(200, Compression()), b=Phase(None, PAPER))

    assert phased.label == "none+none to step 200, fp16(svd(0.6))+int8"
    assert not phased.is_identity
    assert Phased(only=Phase(None, Compression())).is_identity


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Phased(), r"the last one never \(null\); got until_step \[0\]"),
        (
            lambda: Phased(a=Phase(5, PAPER)),
            r"never .*got until_step \[5\] for \['a'\]",
        ),
        (
            lambda: Phased(a=Phase(None, PAPER), b=Phase(None, PAPER)),
            r"must end .* after the one before.*got until_step \[None, None\]",
        ),
        (
            lambda: Phased(a=Phase(9, PAPER), b=Phase(9, PAPER), c=Phase(None, PAPER)),
            r"must end .* after the one before.*got until_step \[9, 9, None\]",
        ),
        (lambda: Phased(a=PAPER), r"Phased.a must be a Phase, got Compression"),  # type: ignore[arg-type]
        (lambda: Phase("9", PAPER), r"Phase.until_step .* got '9'"),  # type: ignore[arg-type]
        (
            lambda: Phase(-1, PAPER),
            r"Phase.until_step must be a whole number >= 0 or null, got -1",
        ),
        (
            lambda: Phase(None, Phased(a=Phase(None, PAPER))),  # type: ignore[arg-type]
            r"Phase.compression must be a Compression, got Phased",
        ),
        (
            lambda: Compression(forward="int8"),
            r"forward must be a Compressor, got 'int8'.*_target_",
        ),  # type: ignore[arg-type]
        (
            lambda: Compression(averaging="int8"),
            r"averaging must be a .*TensorChoice or null, got 'int8'",
        ),  # type: ignore[arg-type]
        (lambda: PerTensor("int8"), r"averaging.default must be a Compressor, got 'int8'"),  # type: ignore[arg-type]
        (lambda: PerTensor(Cast(), names={"(": Cast()}), r"'\(' is no regular expression"),
        (lambda: Compression(backward_memory="ef"), r"backward_memory must be a Memory"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_refused_in_words(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_every_compression_file_is_listed_here() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == set(LABELS) | COMPOSED


@pytest.mark.parametrize("name", LABELS)
def test_every_compression_file_builds_what_its_name_says(name: str) -> None:
    path = CONF / f"{name}.yaml"
    whole = {"compression": OmegaConf.load(path), "model": {"split": {"rank": 112}}}
    built = build(resolved(whole)["compression"])

    assert path.read_text().startswith("# ")
    assert built.label == LABELS[name]
    assert built.is_identity == (name == "none")


def test_a_rate_can_be_swept_by_name() -> None:
    config = OmegaConf.load(CONF / "svd_fp16_int8.yaml")
    OmegaConf.update(config, "forward.svd.rate", 0.2)

    assert build(OmegaConf.to_container(config)).label == "fp16(svd(0.2))+int8"


INT4, FP16 = Compression(BlockInt(4), BlockInt(4)), Compression(Cast("float16"), Cast("float16"))


def test_a_named_boundary_has_its_own_compression_and_the_others_the_default() -> None:
    compression = PerBoundary(INT4, boundary_1=FP16)

    assert compression.at_boundary(0) is INT4
    assert compression.at_boundary(1) is FP16
    assert compression.at_boundary(2) is INT4
    assert compression.label == "int4+int4, boundary 1: fp16+fp16"
    assert not compression.is_identity
    assert PerBoundary(Compression(), boundary_0=Compression()).is_identity


def test_a_compression_for_all_boundaries_serves_each() -> None:
    assert INT4.at_boundary(3) is INT4


def test_what_is_no_boundary_or_no_compression_is_refused() -> None:
    with pytest.raises(ConfigError, match="name a boundary boundary_N"):
        PerBoundary(INT4, head=FP16)
    with pytest.raises(ConfigError, match=r"PerBoundary\.boundary_0 must be a Compression"):
        PerBoundary(INT4, boundary_0="int8")  # type: ignore[arg-type]


def test_a_plan_by_boundary_has_the_entries_of_all_its_plans() -> None:
    plan = PerBoundary(INT4, boundary_1=FP16)
    assert list(plan.by_step) == [*INT4.by_step, *FP16.by_step]
    assert repr(plan) == f"PerBoundary(default={INT4}, boundary_1={FP16})"

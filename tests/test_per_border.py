import pytest

from xcloud.base.errors import ConfigError
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import PerBoundary
from xcloud.comm.precision import BlockInt, Cast

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

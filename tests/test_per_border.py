import pytest

from xcloud.comm.cast import Cast
from xcloud.comm.per_border import PerBorder
from xcloud.comm.phases import Compression
from xcloud.comm.quantize import BlockInt
from xcloud.errors import ConfigError

INT4, FP16 = Compression(BlockInt(4), BlockInt(4)), Compression(Cast("float16"), Cast("float16"))


def test_a_named_border_has_its_own_compression_and_the_others_the_default() -> None:
    compression = PerBorder(INT4, border_1=FP16)

    assert compression.at_border(0) is INT4
    assert compression.at_border(1) is FP16
    assert compression.at_border(2) is INT4
    assert compression.label == "int4+int4, border 1: fp16+fp16"
    assert not compression.is_identity
    assert PerBorder(Compression(), border_0=Compression()).is_identity


def test_a_compression_for_all_borders_serves_each() -> None:
    assert INT4.at_border(3) is INT4


def test_what_is_no_border_or_no_compression_is_refused() -> None:
    with pytest.raises(ConfigError, match="name a border border_N"):
        PerBorder(INT4, head=FP16)
    with pytest.raises(ConfigError, match=r"PerBorder\.border_0 must be a Compression"):
        PerBorder(INT4, border_0="int8")  # type: ignore[arg-type]

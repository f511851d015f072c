"""Regular expressions of settings: those that could take long are refused before any is tried."""

from __future__ import annotations

import time

import pytest

from xcloud.base.errors import ConfigError
from xcloud.base.patterns import MAX_LENGTH, check_pattern
from xcloud.comm.compression_plans import PerTensor
from xcloud.comm.precision import Cast


@pytest.mark.parametrize(
    "pattern",
    [
        r"^([a-z_]+\.?)+([0-9]+\.?([a-z_]+\.?)+)*!",
        "(a+)+$",
        "(a*)*b",
        "(a|a)*b",
        "(a|aa)+$",
        "(.*)(.*)(.*)x",
        "a*a*a*b",
        "(?:a?){30}a{30}",
        "(?=a+)b",
        "(?<=a)b",
        r"(a)\1",
        "(?>a+)+b",
        "(a|ab)" * 30 + "!",
        "(a|b(c|d(e|f)))" * 4,
        "(?(1)a|b)",
        "x" * (MAX_LENGTH + 1),
        "(" * 150,
        "(",
        "a{99999999999999999999}",
    ],
)
def test_a_pattern_that_may_take_long_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="names: "):
        PerTensor(Cast(), names={pattern: Cast()})


@pytest.mark.parametrize(
    "pattern",
    ["lora_B", r"layers\.0\.", r"lora_B\.weight$", "^2", r"layers\.\d+\.mlp", "[ab]c",
     r"layers\.(0|1|11)\.(mlp|attn)", r"\.bias$|norm", "^.*attn.*$", "(?i)LORA", r"\d{1,2}\."],
)  # fmt: skip
def test_patterns_for_names_of_parameters_are_taken_and_found_at_once(pattern: str) -> None:
    chosen = PerTensor(Cast(), names={pattern: Cast()})
    started_s = time.process_time()
    chosen.for_tensor("model.layers.11.attention.self.query_key_value." * 5, (4, 4))
    assert time.process_time() - started_s < 0.5


def test_many_patterns_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 100"):
        PerTensor(Cast(), names={f"a{n}": Cast() for n in range(101)})
    check_pattern("x", "a")

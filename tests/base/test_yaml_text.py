"""`yaml_text` reads what Hydra reads as equal, and reads its own texts back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from xcloud.base.yaml_text import from_yaml, to_yaml

WORDS = """
1 -1 +1 0 007 0o17 0x1f 0b11 1_000 1:30 1e3 1e-3 -1E+3 1.5e3 1.5e-3 1. .5 1._5 1.5 1e 1e+ e3 1e3x
1e-3.5 .inf -.inf .nan .NaN inf nan true false True yes no on off Yes y n null ~ None 2026-11-28
2026-11-28T10:00:00 12:30:45 abc 1.2.3 "1e3" '1' "true" 1e999 --1 1,000
""".split()


@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_read_as_hydra_reads_it(word: str) -> None:
    expected = OmegaConf.to_container(OmegaConf.create(f"key: {word}\nlist: [{word}]"))
    found = from_yaml(f"key: {word}\nlist: [{word}]")
    assert repr(found) == repr(expected)


def test_an_empty_text_is_an_empty_mapping() -> None:
    assert from_yaml("# nothing") == {}


@pytest.mark.parametrize(
    "text", ["a: 1\na: 2", "b: {a: 1, a: 2}", "1: a\n1: b", "{[]: 1}", "a: !x"]
)
def test_a_key_that_comes_twice_and_what_is_no_plain_value_are_errors(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        from_yaml(text)


VALUES: list[Any] = [word.strip("\"'") for word in WORDS]
VALUES += ["", " a ", "a\nb", "é: #", "- x", "x" * 200, "x y " * 60, 1e-05, 1e22, -0.0, math.inf]
VALUES += [10**30, True, None, [], {}, [[]], {"a": {1: [None]}}]


@pytest.mark.parametrize("value", VALUES)
def test_what_is_written_is_read_back(value: Any) -> None:
    shared = [value]
    plain = {"z": value, "a": shared, "b": shared}
    text = to_yaml(plain)
    assert from_yaml(text) == plain
    assert list(from_yaml(text)) == ["z", "a", "b"]
    assert OmegaConf.to_container(OmegaConf.create(text)) == plain

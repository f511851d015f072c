"""Functions for the config that take their settings from the constructors that they fill."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
from omegaconf import OmegaConf

from xcloud.base.errors import ConfigError
from xcloud.job.config import check_keys
from xcloud.tasks.settings import Group, settings_of
from xcloud.tasks.tokenizer import TrainedTokenizer


@dataclass(frozen=True)
class Rows:
    path: str = ""
    seed: int = 0
    hidden: bool = False


@dataclass(frozen=True)
class Made:
    rows: Rows
    name: str
    path: str = ""
    length: int | None = 128
    tokenizer: TrainedTokenizer = field(default_factory=TrainedTokenizer)


ROWS = Group(Rows, ("hidden",), seed="split_seed")
MADE = Group(Made, ("rows", "name"))


@settings_of(ROWS, MADE, length=64)
def made(name: str = "own", **settings: Any) -> Made:
    return MADE.make(settings, rows=ROWS.make(settings, hidden=True), name=name)


def test_the_signature_names_each_setting_once_with_its_default() -> None:
    parameters = inspect.signature(made).parameters
    assert list(parameters) == ["name", "path", "split_seed", "length", "tokenizer"]
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert (defaults["name"], defaults["split_seed"], defaults["length"]) == ("own", 0, 64)


def test_each_constructor_gets_its_own_and_a_shared_name_goes_to_both() -> None:
    assert made("b", "here", split_seed=3) == Made(Rows("here", 3, True), "b", "here", 64)
    assert made() == Made(Rows("", 0, True), "own", "", 64)


def test_null_is_the_default_of_an_object_and_a_value_elsewhere() -> None:
    assert made(tokenizer=None).tokenizer == TrainedTokenizer()
    assert made(tokenizer=TrainedTokenizer(300)).tokenizer.vocab_size == 300
    assert made(length=None).length is None


def test_what_no_constructor_knows_is_refused() -> None:
    for wrong in ("seed", "hidden", "rows", "lenght"):
        with pytest.raises(TypeError, match=wrong):
            made(**{wrong: 1})


def test_the_config_is_checked_against_it() -> None:
    target = "xcloud.tasks.glue.glue_from_files"
    config = OmegaConf.create({"_target_": target, "max_train_sample": 3})
    with pytest.raises(
        ConfigError, match=r"'task.max_train_sample'; did you mean 'max_train_samples'\?"
    ):
        check_keys(OmegaConf.to_container(config), "task")

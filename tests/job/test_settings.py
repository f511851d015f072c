"""Settings as checked dataclasses: what is refused, and in which words; and what
`python -m xcloud settings` reads from the classes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

import pytest
import yaml
from omegaconf import OmegaConf
from pydantic import Field

from tests.configs import composed
from tests.feature_rows import feature_rows
from tests.nightly import first_daily
from xcloud.base.errors import ConfigError
from xcloud.base.project import conf_dir
from xcloud.base.settings import NotNegative, Positive, settings
from xcloud.job.catalogue import NOT_SHOWN, main, settings_of
from xcloud.tasks.tokenizer import PretrainedTokenizer


@settings("outer.inner")
class Inner:
    bits: Annotated[int, Field(ge=2, le=8)] = 8

    def __post_init__(self) -> None:
        if self.bits == 7:
            raise ConfigError("outer.inner.bits: 7 is not packed")


@settings("outer")
class Outer:
    steps: Positive
    rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    inner: Inner = dataclasses.field(default_factory=Inner)
    limit: NotNegative | None = None
    mode: Literal["show", "apply"] = "show"
    is_on: bool = True
    counts: Sequence[Positive] = ()
    by_name: Mapping[str, Inner] = dataclasses.field(default_factory=dict)


@settings("outer", kw_only=True)
class Below(Outer):
    more: NotNegative = 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "outer.steps must be a whole number >= 1, got 0"),
        ({"steps": "8"}, "outer.steps must be a whole number >= 1, got '8'"),
        ({"steps": True}, "outer.steps must be a whole number >= 1, got True"),
        ({"rate": 0.0}, "outer.rate must be a number in (0, 1], got 0.0"),
        ({"rate": float("nan")}, "outer.rate must be a number in (0, 1], got nan"),
        ({"inner": 3}, "outer.inner must be an Inner, got 3"),
        ({"limit": -1}, "outer.limit must be a whole number >= 0 or null, got -1"),
        ({"mode": "run"}, "outer.mode must be one of show, apply, got 'run'"),
        ({"is_on": 1}, "outer.is_on must be one of True, False, got 1"),
        ({"counts": [1, 0]}, "outer.counts[1] must be a whole number >= 1, got 0"),
        (
            {"counts": "12"},
            "outer.counts must be a list of which each is a whole number >= 1, got '12'",
        ),
        ({"by_name": {"a": 1}}, "outer.by_name.a must be an Inner, got 1"),
    ],
)
def test_a_bad_value_is_refused_with_its_key(changed: dict[str, Any], message: str) -> None:
    for kind in (Outer, Below):
        with pytest.raises(ConfigError) as refused:
            kind(**({"steps": 1} | changed))
        assert str(refused.value) == message


def test_a_path_of_another_locale_is_told_as_such() -> None:
    with pytest.raises(ConfigError, match="no UTF-8: set LANG or PYTHONUTF8=1"):
        PretrainedTokenizer("mod\udcc3")


def test_what_several_fields_must_meet_keeps_its_words() -> None:
    with pytest.raises(ConfigError, match=r"outer\.inner\.bits: 7 is not packed"):
        Inner(7)
    with pytest.raises(ConfigError, match=r"outer\.inner\.bits must be 2\.\.8, got 9"):
        dataclasses.replace(Inner(), bits=9)


def test_settings_are_dataclasses_that_compare_and_hash() -> None:
    assert Outer(2, rate=1) == Outer(2, rate=1.0) != Outer(3)
    assert hash(Inner(4)) == hash(Inner(4))
    assert list(inspect.signature(Outer).parameters)[:2] == ["steps", "rate"]
    assert dataclasses.is_dataclass(Outer)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Inner().bits = 3  # type: ignore[misc]


def test_what_is_missing_or_unknown_is_named() -> None:
    with pytest.raises(TypeError, match="Outer: setting 'steps' is missing"):
        Outer()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Inner: setting 'bit' is unknown"):
        Inner(bit=3)  # type: ignore[call-arg]


def test_a_setting_has_its_type_its_default_its_value_and_what_it_means() -> None:
    found = {s.key: s for s in settings_of(composed("+exp=abnet_iwslt"), "training")}

    batch = found["training.batch_size"]
    assert batch.takes == "a whole number >= 1"
    assert batch.default == "64"
    assert batch.means.startswith("number of samples of one update, over all ranks")
    assert found["training.max_steps"].default == ""  # must be given
    assert found["training.checkpoint.keep"].takes == "a whole number >= 1"
    assert found["training.optimizer.decay"].takes == "one of inverse_sqrt, linear, constant"


def test_the_settings_of_a_group_come_before_those_of_groups_within_it() -> None:
    config = composed("+exp=abnet_iwslt")
    is_own = [s.key.count(".") == 1 for s in settings_of(config, "training")]
    assert 0 < sum(is_own) < len(is_own) and is_own == sorted(is_own, reverse=True)


def test_a_part_of_a_group_can_be_asked_for_and_an_unknown_one_is_answered_with_the_nearest() -> (
    None
):
    config = composed("+exp=abnet_iwslt")
    keys = [s.key for s in settings_of(config, "cluster.clouds")]
    assert "cluster.clouds.cloud_a.num_ranks" in keys
    assert "cluster.clouds.cloud_b.num_ranks" in keys
    with pytest.raises(ConfigError, match="did you mean 'training'"):
        settings_of(config, "trainin")


@pytest.mark.parametrize(
    ("group", "key"),
    [
        ("training", "training.checkpoint.keep"),
        *(
            (key, f"{key}.{field.name}")
            for rows in feature_rows().values()
            for key, kind in rows.groups.items()
            if key.startswith("training.")
            for field in dataclasses.fields(kind)
        ),
        ("cluster.liveness", "cluster.liveness.lost_after_s"),
        ("launch", "launch.max_restarts"),
    ],
)
def test_settings_that_no_yaml_mentions_are_shown_with_their_defaults(
    group: str, key: str
) -> None:
    found = {s.key: s for s in settings_of(composed("+exp=abnet_iwslt"), group)}
    assert found[key].means and found[key].default == found[key].value != ""


def test_the_command_prints_groups_settings_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "\ntraining     Training\n" in capsys.readouterr().out
    assert main(["compression"]) == 0
    assert "compression=  one of bf16, " in capsys.readouterr().out
    assert main(["training", "training.batch_size=32", "+exp=abnet_iwslt", "--json"]) == 0
    found = {entry["key"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found["training.batch_size"]["value"] == "32"
    assert found["training.batch_size"]["default"] == "64"


def targets_in(node: Any) -> Iterator[str]:
    """Yield the constructors that a YAML names, at any depth."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"]
        for value in node.values():
            yield from targets_in(value)


def settings_classes_of(hint: Any) -> Iterator[type]:
    """Yield the classes of settings in an annotation."""
    for part in typing.get_args(hint):
        yield from settings_classes_of(part)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint


def constructors() -> list[str]:
    """Return what the files of conf/ name, and the classes of the settings of these."""
    found: dict[str, None] = {}
    files = (path for path in conf_dir().rglob("*.yaml") if "hydra" not in path.parts)
    waiting = [name for path in files for name in targets_in(yaml.safe_load(path.read_text()))]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = None
        target = resolve_name(name)
        if dataclasses.is_dataclass(target):
            hints = typing.get_type_hints(target, include_extras=True)
            waiting += [
                f"{cls.__module__}.{cls.__name__}"
                for field in dataclasses.fields(target)
                for cls in settings_classes_of(hints[field.name])
            ]
    return sorted(found)


def test_every_setting_says_what_it_means_and_keeps_its_range_and_default() -> None:
    """What it means stands below the field, or in the docstring of its class. The table is what
    experiment files of others rely on: who changes a row of it tells them in CHANGELOG.md. A class
    that is new gets its row with the next release."""
    silent = []
    found = {}
    for name in constructors():
        every = settings_of(OmegaConf.create({"group": {"_target_": name}}), "group")
        taken = [setting for setting in every if setting.takes]
        silent += [f"{name}: {setting.key}" for setting in taken if not setting.means]
        own = [setting for setting in taken if setting.key.count(".") == 1]
        if own:
            found[name] = {s.key.partition(".")[2]: f"{s.takes} = {s.default}" for s in own}
    assert silent == []
    table = Path(__file__).parents[1].joinpath("settings.json")
    relied_on = json.loads(table.read_text(encoding="utf-8"))
    for rows in feature_rows().values():
        for name, own in rows.settings.items():
            relied_on[name] = {**relied_on.get(name, {}), **own}
    changed = {name: found.get(name) for name in relied_on if found.get(name) != relied_on[name]}
    assert not changed, (
        "experiment files of others rely on these rows. If the change is meant, write what is "
        "found now (null: there is no such class) into tests/settings.json, or where the setting "
        "is a feature's into the `settings` of tests/features/NAME_rows.py, and a line into "
        f"CHANGELOG.md:\n{json.dumps(changed, indent=1)}"
    )


@pytest.mark.parametrize(
    "experiment",
    first_daily(sorted(path.stem for path in (conf_dir() / "exp").glob("*.yaml")), count=3),
)
def test_every_setting_of_an_experiment_says_what_it_means(experiment: str) -> None:
    """Also of what its own lines or a choice among them compose."""
    config = composed(f"+exp={experiment}")
    groups = [str(key) for key in config if key not in NOT_SHOWN]
    silent = [
        s.key for group in groups for s in settings_of(config, group) if s.takes and not s.means
    ]
    assert not silent

"""How a refused setting, a name or foreign data is worded: to the letter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import as_settings, between, settings, with_defaults
from xcloud.base.walk import walk
from xcloud.base.wording import (
    MAX_NAME_BYTES,
    allowed,
    check,
    check_label,
    check_name,
    does_not_fit,
    listed,
    meant,
    quoted,
    unknown_key,
)

FORMS: dict[str, Any] = {
    "a whole number": int,
    "a whole number >= 2": Annotated[int, Field(ge=2)],
    "2..8": between(2, 8),
    "a number": float,
    "a number in (0, inf)": Annotated[float, Field(gt=0)],
    "a number in [0, 1]": Annotated[float, Field(ge=0, le=1)],
    "a number in (-inf, 1]": Annotated[float, Field(le=1)],
    "one of True, False": bool,
    "one of a, b": Literal["a", "b"],
    "a text": str,
    "null": None,
    "a mapping": Mapping[str, int],
    "a list of which each is a text": list[str],
    "a list of 2, of which each is a text": Annotated[
        list[str], Field(min_length=2, max_length=2)
    ],
    "a list of 1..3, of which each is 2..8": Annotated[
        Sequence[between(2, 8)], Field(min_length=1, max_length=3)
    ],
    "a list of 0..3, of which each is a text": Annotated[list[str], Field(max_length=3)],
    "a list of 1+, of which each is a text": Annotated[list[str], Field(min_length=1)],
    "a whole number or null": int | None,
    "a text or a whole number": Annotated[str | int, "a mark"],
    "an Outer": type("Outer", (), {}),
    "a Seen": type("Seen", (), {}),
}


@pytest.mark.parametrize("words", FORMS)
def test_what_a_setting_takes_is_said_in_words(words: str) -> None:
    assert allowed(FORMS[words]) == words


def test_foreign_data_is_cut_before_it_is_shown() -> None:
    assert quoted("a" * 78) == "'" + "a" * 78 + "'"
    assert quoted("a" * 79) == "'" + "a" * 79 + "…"
    assert quoted(b"\0" * 10**6) == "b'" + r"\x00" * 19 + r"\x…"
    assert listed([]) == "none" and listed(["a", 1]) == "a, 1"
    assert listed(["a" * 40, "b" * 41]) == "a" * 40 + ", " + "b" * 40 + "…"
    many = listed(["a" * 40] * 6)
    assert len(many) == 241 and many[-1] == "…"


def test_the_nearest_name_is_offered_and_what_other_programs_call_it() -> None:
    known = ("learning_rate", "batch_size")
    assert meant("learning_rat", known) == "; did you mean 'learning_rate'?"
    assert meant("zzz", known) == "."
    assert unknown_key("training", "learning_rat", known) == (
        "unknown setting 'training.learning_rat'; did you mean 'learning_rate'? Allowed here: "
        "learning_rate, batch_size"
    )
    assert unknown_key("", "zzz", ()) == "unknown setting 'zzz'."
    assert unknown_key("a", "zzz", (), elsewhere="b.zzz") == (
        "unknown setting 'a.zzz'; did you mean 'b.zzz'?"
    )
    near = unknown_key("a", "learning_rat", known, elsewhere="b.zzz")
    assert "learning_rate'?" in near and "b.zzz" not in near
    assert unknown_key("model", "qlora", known) == (
        "unknown setting 'model.qlora': it is model.weights=nf4, of the frozen weights beside "
        "adapters"
    )
    corpus = "; with profile=files task.data.path is the folder of your corpus"
    assert unknown_key("task", "path", ()).endswith(corpus)
    assert unknown_key("task.data", "path", ()).endswith(corpus)
    assert not unknown_key("model", "path", ()).endswith(corpus)


@pytest.mark.parametrize(
    ("name", "spoken", "fits"),
    [
        ("a-b.c_1", False, True), ("a b", False, False), ("ä", False, False), (".a", False, False),
        ("a/b", False, False), ("", False, False), ("-a", False, False), ("a b+ä", True, True),
        ("a/b", True, False), ("+a", True, False), ("a$", True, False),
        ("a" * MAX_NAME_BYTES, False, True), ("a" * (MAX_NAME_BYTES + 1), False, False),
        ("ä" * (MAX_NAME_BYTES // 2), True, True), ("ä" * (MAX_NAME_BYTES // 2 + 1), True, False),
    ],
)  # fmt: skip
def test_a_name_leads_into_no_folder_shell_or_command(name: str, spoken: bool, fits: bool) -> None:
    if fits:
        assert check_name("cloud", name, spoken=spoken) == name
        return
    with pytest.raises(ConfigError, match="cloud must") as error:
        check_name("cloud", name, spoken=spoken)
    assert ("'+' and spaces" in str(error.value)) is (spoken and len(name) < MAX_NAME_BYTES // 2)


def test_a_label_is_a_text_on_which_nothing_acts() -> None:
    assert check_label("title", "50 % of <all>") == "50 % of <all>"
    for text in ("a\x1b", "a$b", "a`b", "a\nb"):
        with pytest.raises(ConfigError, match="title must be a text without control"):
            check_label("title", text)


def test_a_setting_that_follows_from_what_the_chosen_option_lacks_is_named() -> None:
    given = {"model.size": "${task.size}", "task._target_": "xcloud.tasks.Demo", "a": "${b}"}
    assert does_not_fit("key 'task.size' not found", given) == (
        "model.size follows from task.size, which the chosen task (Demo) does not have: this "
        "model and this task do not fit together; choose another of the two"
    )
    assert does_not_fit("key 'b' not found", given).startswith(
        "a is '${b}', but there is no setting 'b'; '${' begins a reference"
    )
    assert does_not_fit("key 'c' not found", given) == "key 'c' not found"
    assert does_not_fit("no key", given) == "no key"


def test_a_value_that_is_no_field_is_held_to_its_annotation() -> None:
    check("n", 3, between(1, 3))
    check("n", None, int | None)
    for value in (4, True, "3", 2.0):
        with pytest.raises(ConfigError, match=r"n must be 1\.\.3, got "):
            check("n", value, between(1, 3))
    with pytest.raises(ConfigError, match="n must be a number, got inf"):
        check("n", float("inf"), float)


@settings("group")
class Inner:
    wait_s: float = 1.0
    bits: int = 8
    rates_per_s: float = 1.0


@settings("outer")
class Holding:
    inner: Inner = Inner()
    each: Mapping[str, Inner] | None = None
    names: Sequence[int] = ()


def test_what_no_clock_or_tensor_holds_is_refused_by_its_key() -> None:
    Inner(wait_s=1e9, bits=2**63 - 1, rates_per_s=1e300)
    with pytest.raises(
        ConfigError, match=r"group\.wait_s is 1\.1e\+09; a time has at most 1e\+09"
    ):
        Inner(wait_s=1.1e9)
    for bits in (2**63, -(2**63)):
        with pytest.raises(ConfigError, match=f"group.bits is {bits}; a whole number has at most"):
            Inner(bits=bits)
    with pytest.raises(ConfigError, match=r"outer\.names is 9223372036854775808; a whole"):
        Holding(names=[1, 2**63])
    with pytest.raises(ConfigError, match=r"outer\.names\[1\] must be a whole number, got 'x'"):
        Holding(names=[1, "x"])  # type: ignore[list-item]


def test_settings_come_in_the_order_of_the_constructor_with_its_defaults() -> None:
    name = f"{Inner.__module__}.Inner"
    found = with_defaults(Holding, {"other": 1, "_target_": "x", "inner": {"bits": 4}})
    inner = {"_target_": name, "wait_s": 1.0, "bits": 4, "rates_per_s": 1.0}
    assert [*found.items()] == [
        ("_target_", "x"), ("inner", inner), ("each", None), ("names", []), ("other", 1),
    ]  # fmt: skip
    chosen = with_defaults(Holding, {"inner": {"_target_": "y", "bits": 4}})
    assert chosen["inner"] == {"_target_": "y", "bits": 4}
    given = {"each": {"a": {"bits": 4}, "b": {"_target_": "y"}, "c": 1}}
    assert with_defaults(Holding, given)["each"] == given["each"]
    typed = with_defaults(Holding, given, by_position=True)["each"]
    assert typed == {"a": {"_target_": name, "bits": 4}, "b": {"_target_": "y"}, "c": 1}
    assert as_settings(Holding(each={"a": Inner()})) == {
        "_target_": f"{Holding.__module__}.Holding",
        "inner": as_settings(Inner()),
        "each": {"a": as_settings(Inner())},
        "names": [],
    }


def test_a_walk_visits_each_value_before_what_it_holds_with_its_name_and_owner() -> None:
    data = {"a": {"_target_": "X", "b": [1, {"c": 2}]}, "d": {"_target_": 3, "e": Inner()}}
    seen = []
    for node in walk(data):
        seen.append((node.path, node.setting, node.name, node.owner, node.is_of_owner))
        node.is_closed = node.path == "d.e"
    assert seen == [
        ("", "", "", None, False),
        ("a", "a", "a", None, False),
        ("a._target_", "a._target_", "_target_", "X", True),
        ("a.b", "a.b", "b", "X", True),
        ("a.b[0]", "a.b", "b", "X", True),
        ("a.b[1]", "a.b", "b", "X", True),
        ("a.b[1].c", "a.b[1].c", "c", "X", False),
        ("d", "d", "d", None, False),
        ("d._target_", "d._target_", "_target_", None, True),
        ("d.e", "d.e", "e", None, True),
    ]
    assert [node.path for node in walk(Inner(), "i")] == [
        "i",
        "i.wait_s",
        "i.bits",
        "i.rates_per_s",
    ]

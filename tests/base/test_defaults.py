"""The numbers, flags and names that a caller gets who says nothing, to the letter."""

import json
import os
from importlib import import_module
from inspect import isclass, isfunction
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from tests.feature_rows import feature_rows
from tests.import_walk import MODULES

TESTS = Path(__file__).parents[1]
PLAIN = (bool, int, float, str, tuple)
NOT_LOADED = ("evaluate.harness", "models.protocol_gpt")  # lm-eval need not be there; seconds
NOTHING = ("", ())  # what nearly every default of a text or a list is


def defaults_of(function: FunctionType) -> dict[str, Any]:
    """Return the arguments of a function, or the fields of a dataclass, that have a default."""
    code = function.__code__
    last = function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    given = dict(zip(names[len(names) - len(last) :], last, strict=True))
    given |= function.__kwdefaults__ or {}
    return {k: v for k, v in given.items() if type(v) in PLAIN and v not in NOTHING}


def defaults_in(module: ModuleType) -> dict[str, dict[str, Any]]:
    """Return what has a default in a module, with what its classes hold for all, in public."""
    found = {}
    for name, one in vars(module).items():
        if getattr(one, "__module__", None) != module.__name__:
            continue
        if isfunction(one):
            found[name] = defaults_of(one)
        elif isclass(one):
            held = {key: value for key, value in vars(one).items() if type(value) in PLAIN[:3]}
            # What a NamedTuple's constructor takes is written down there alone.
            fields = getattr(one, "_field_defaults", {})
            held |= {key: fields[key] for key in fields if type(fields[key]) in PLAIN}
            found[name] = {key: held[key] for key in held if key[0] != "_"}
            for method, value in vars(one).items():
                function = getattr(value, "__func__", value)
                if isfunction(function) and function.__module__ == module.__name__:
                    of_all = "" if method == "__init__" else f".{method}"
                    found.setdefault(f"{name}{of_all}", {}).update(defaults_of(function))
    return {f"{module.__name__}.{name}": own for name, own in found.items() if own}


def test_the_defaults_of_the_package_are_these() -> None:
    """Who changes one of them looks at every caller that relies on it, then changes its row. Rows
    of settings.json, which files of others rely on, are not repeated here."""
    rows = feature_rows().values()
    elsewhere = json.loads((TESTS / "settings.json").read_text(encoding="utf-8"))
    elsewhere = {*elsewhere, *(name for feature in rows for name in feature.settings)}
    found: dict[str, Any] = {}
    for name in MODULES:
        if name not in NOT_LOADED:
            found |= defaults_in(import_module(f"xcloud.{name}".rstrip(".")))
    kept = {
        name: {argument: json.dumps(own[argument]) for argument in sorted(own)}
        for name, own in sorted(found.items())
        if name not in elsewhere
    }
    held = {
        name: ", ".join(" = ".join(each) for each in own.items()) for name, own in kept.items()
    }
    table = TESTS / "defaults.json"
    if os.environ.get("XCLOUD_TESTS_WRITE"):
        table.write_text(json.dumps(held, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    known = json.loads(table.read_text(encoding="utf-8"))
    changed = {name: held.get(name) for name in held | known if held.get(name) != known.get(name)}
    assert not changed, (
        f"if this is meant, run this test with XCLOUD_TESTS_WRITE=1, which writes {table.name}: "
        f"{json.dumps(changed, indent=1)}"
    )

"""The numbers that other owners, other releases and scripts rely on: codes on the wire, bounds on
what a stranger may send, waits for a peer, exit codes; and those of the rooms that meet nobody."""

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import xcloud

ROOT = Path(xcloud.__file__).parent
NAMED = re.compile(
    r"^class (?P<cls>\w+)|^(?P<member> {4})?(?P<name>_?[A-Z][A-Z0-9_]*)(?:: [^=\n]+)? = "
    r"(?P<value>[-\w(\[][^\n]*)$",
    re.MULTILINE,
)
KNOWN = {"timedelta": timedelta, "float": float, "__builtins__": {}}


def numbers_of(text: str) -> dict[str, Any]:
    """Return the numbers that a module, or a class of it, names in one line."""
    found: dict[str, Any] = {}
    of_class = ""
    for line in NAMED.finditer(text):
        if line["cls"]:
            of_class = line["cls"]
            continue
        name = f"{of_class}.{line['name']}" if line["member"] else line["name"]
        try:
            value = eval(line["value"], KNOWN | found)  # a line of this package
        except (NameError, SyntaxError, TypeError, AttributeError, ImportError):
            continue
        value = value.total_seconds() if isinstance(value, timedelta) else value
        several = value if isinstance(value, tuple | list) else [value]
        if all(type(one) in (int, float) for one in several):
            found[name] = value
    return found


def test_the_numbers_that_others_rely_on_are_these() -> None:
    """Who changes one of them changes its row, and says in CHANGELOG.md what follows from it.

    Of a name that several modules have all values stand in its row.
    """
    found: dict[str, list[Any]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for name, value in numbers_of(path.read_text(encoding="utf-8")).items():
            found.setdefault(name, []).append(value)
    rows = {name: sorted(found[name], key=str) for name in sorted(found)}
    table = Path(__file__).parents[1].joinpath("numbers.json")
    assert json.loads(json.dumps(rows)) == json.loads(table.read_text(encoding="utf-8"))


def test_a_number_is_found_however_it_is_written() -> None:
    text = "A = 1 << 4\n_B_S: float = 2.5  # why\nC = A * 2\nD = timedelta(minutes=1)\n"
    text += (
        'E = (1, -2)\nF = "no number"\nG = other(A)\nh = 3\nclass I(IntEnum):\n    J = 4  # why\n'
    )
    found = numbers_of(text)
    assert found == {"A": 16, "_B_S": 2.5, "C": 32, "D": 60.0, "E": (1, -2), "I.J": 4}

"""Find what the settings of an experiment lead to: files, names on the hub, servers.

A setting says so where it is declared (`base.settings.Leads`), so that nothing is guessed from
what a text looks like. In a class that is not xcloud's, what is not marked counts as a path if it
could be one.
"""

from __future__ import annotations

import copy
import importlib
import os
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from xcloud.base.project import project_root
from xcloud.base.settings import MOVED, PACKAGED, Leads, with_defaults
from xcloud.base.walk import Node, walk

MAX_ENTRIES = 1_000_000
"""Files and folders below one that is named, which are all looked at for links."""


@dataclass(frozen=True)
class Lead:
    """A text that leads somewhere.

    where: the dotted name of the setting.
    to: the kind of place it leads to, as `Leads` has it.
    revision: the setting `revision` that stands beside a name on the hub.
    """

    where: str
    to: str
    value: str
    revision: str | None = None


def is_named(target: object) -> bool:
    return isinstance(target, str)


def leads_of(settings: Any, may_import: Callable[[object], bool] = is_named) -> Iterator[Lead]:
    """Yield all that these settings lead to, with the defaults of what they leave out.

    Imports the modules of every `_target_`, which must have been checked before or be refused by
    may_import.

    may_import: a function that tells whether a `_target_` may be looked at. If not, what it takes
        is guessed.
    """
    # Of a copy: defaults are filled in as the walk comes to each class.
    for node in walk(copy.deepcopy(settings)):
        value = node.value
        if isinstance(value, dict) and may_import(value.get("_target_")):
            made = _made_by(value["_target_"])
            # Only a class that may be imported says what its defaults are.
            if callable(made):
                value.update(with_defaults(made, given=value))
        mark, is_foreign = mark_of(node, may_import)
        if mark is not None:
            node.is_closed = True
            to: str | None = mark.to
            texts = [below.value for below in walk(value) if isinstance(below.value, str)]
        # A class that is not xcloud's says nothing of its settings, so what could lead somewhere
        # counts as if it did.
        elif is_foreign and isinstance(value, str) and node.name != "_target_":
            to = None
            if "://" in value:
                to = "address"
            elif "/" in value or (value and is_place(value)):
                to = "read"
            texts = [value]
        else:
            continue
        for text in texts if to not in (None, "inside") else ():
            # A revision stands beside the name that it belongs to.
            revision = node.holder.get("revision") if node.holder else None
            yield Lead(
                where=node.setting,
                to=str(to),
                # The ranks of a cloud listen at ports one after the other.
                value=with_ports(text, node.holder) if to == "line" else text,
                revision=revision if isinstance(revision, str) else None,
            )


def mark_of(
    node: Node, may_import: Callable[[object], bool] = is_named
) -> tuple[Leads | None, bool]:
    """Return where a setting leads, by its mark, and whether it belongs to a constructor that is
    not xcloud's, or to none. Imports the module of its owner if it may."""
    if not may_import(node.owner):
        return None, True
    assert node.owner is not None, "no name is to be imported"
    marks, is_foreign = marks_of(node.owner)
    # An entry of a mapping is named by the user, so it has no mark of its own.
    return marks.get(node.name) if node.is_of_owner else None, is_foreign


@cache
def marks_of(target: str) -> tuple[dict[str, Leads], bool]:
    """Return where the settings of a constructor lead, by name, and whether the constructor is not
    xcloud's. Imports its module.

    target: a `_target_`, which must have been checked before.
    """
    made = _made_by(target)
    try:
        hints = typing.get_type_hints(made, include_extras=True)
    except (NameError, TypeError, AttributeError):  # of somebody's own class
        hints = {}
    found = {key: _lead_in(hint) for key, hint in hints.items()}
    marks = {key: lead for key, lead in found.items() if lead is not None}
    # xcloud.x of another package does not begin so, as the whole first part is compared.
    return marks, made is None or target.partition(".")[0] != "xcloud"


def _made_by(target: str) -> Any:
    """Return a constructor; None where it cannot be had, and building it says what is wrong."""
    module, _, name = MOVED.get(target, target).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    # Whatever a module raises: it may be a user's own.
    except Exception:
        return None


def _lead_in(hint: Any) -> Leads | None:
    """Return the mark that an annotation has, if any."""
    # Metadata of Annotated, then what stands inside of unions and lists.
    for part in (*getattr(hint, "__metadata__", ()), *typing.get_args(hint)):
        lead = part if isinstance(part, Leads) else _lead_in(part)
        if lead is not None:
            return lead
    return None


def with_ports(address: str, cloud: Mapping[str, Any]) -> str:
    """Return HOST:PORT of a cloud's first rank on a machine with all ports of that machine's
    ranks, as HOST:FIRST-LAST."""
    port = address.rpartition(":")[2]
    machines = cloud.get("address")
    num_machines = len(machines) if isinstance(machines, list | tuple) else 1
    num_ranks = cloud.get("num_ranks", 1)
    # What is no number here is refused where the layout is made.
    if not (port.isdecimal() and isinstance(num_ranks, int)):
        return address
    more = num_ranks // num_machines - 1
    return f"{address}-{int(port) + more}" if more > 0 else address


def covers(allowed: str, value: str) -> bool:
    """Return whether an entry of `addresses` names an address, or all ports of a range."""
    if allowed == value:
        return True
    (host, ports), (other, others) = _ports(allowed), _ports(value)
    # All ports of the value must be allowed, at the same host.
    return bool(ports and others) and host == other and others <= ports


def _ports(address: str) -> tuple[str, set[int]]:
    host, _, ports = address.rpartition(":")
    first, _, last = ports.partition("-")
    # Longer than two ports and a dash is no range.
    if not (first.isdecimal() and (last or first).isdecimal() and len(ports) <= 11):
        # At most 65,535 numbers, whatever a file says.
        return address, set()
    return host, set(range(int(first), min(int(last or first), 65_535) + 1))


def is_place(value: str) -> bool:
    """Return whether the name of a checkpoint or data set means a folder.

    It does if one is there, or if it could be no name on the hub.
    """
    # A packaged checkpoint needs neither a folder nor the hub.
    if value in PACKAGED:
        return False
    name = value.partition("@")[0]  # owner/name@refs/pr/7
    # The hub has owner/name: more slashes, or one in front, is a path.
    looks = value.startswith(("/", ".", "~")) or "\\" in value or name.count("/") > 1
    # A folder that is called like a name on the hub is taken before it by transformers.
    return looks or any(os.path.lexists(place) for place in _readings(value))


def _readings(value: str) -> list[str]:
    """Return what a relative path may mean: below the project, and where this process runs."""
    # A path may be read from the project's folder or from where the process runs: both have to be
    # looked at.
    path = os.path.expanduser(value or ".")
    try:
        return [os.path.realpath(project_root() / path), os.path.realpath(path)]
    except ValueError:  # a character that no path has
        return []


def lies_below(value: str, folders: Sequence[str]) -> bool:
    """Return whether a path leads nowhere else, links followed, however it may be read."""
    # realpath follows links, also of the allowed folders themselves.
    below = [os.path.realpath(project_root() / os.path.expanduser(name)) for name in folders]
    places = [Path(place) for place in _readings(value)]
    inside = [any(place.is_relative_to(folder) for folder in below) for place in places]
    # Readings that disagree: the one outside must not exist.
    if len(inside) == 2 and inside[0] != inside[1]:  # one of the two may be nothing at all
        return all(
            ok or not os.path.lexists(place) for ok, place in zip(inside, places, strict=True)
        )
    return bool(inside) and all(inside)


def link_out(value: str, folders: Sequence[str]) -> str | None:
    """Return the first link below this folder that leads out of `folders`; None if there is none.

    Links to folders are followed. A folder that holds too much to look through is returned itself.
    """
    seen = set[str]()
    num_entries = 0
    for top in _readings(value):
        for folder, inner, files in os.walk(top, followlinks=True):
            real = os.path.realpath(folder)
            # Links may lead in a circle.
            if real in seen:
                inner.clear()
                continue
            seen.add(real)
            num_entries += len(inner) + len(files)
            # Too many entries to look through: then it counts as leading out.
            if num_entries > MAX_ENTRIES:
                return folder
            for name in (*inner, *files):
                path = os.path.join(folder, name)
                # A link to a place within the allowed folders is fine.
                if os.path.islink(path) and not lies_below(os.path.realpath(path), folders):
                    return path
    return None

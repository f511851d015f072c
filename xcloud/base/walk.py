"""The one walk through settings, as nested plain data or as the objects built of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


@dataclasses.dataclass(slots=True)
class Node:
    """A value among settings.

    path: the dotted name, with [index] for an entry of a list.
    setting: the same without indexes at its end: an entry of a list has the name of its list.
    name: the last part of `setting`.
    holder: the nearest mapping or object around the value.
    owner: the `_target_` of the nearest mapping around that has one.
    is_closed: set to True by the reader, it keeps the walk from what the value holds.
    """

    path: str
    setting: str
    name: str
    value: Any
    holder: Any = None
    owner: str | None = None
    is_closed: bool = False

    @property
    def is_of_owner(self) -> bool:
        """The value is a setting of its owner, and no entry of a mapping among these."""
        return isinstance(self.holder, Mapping) and "_target_" in self.holder


def walk(settings: Any, path: str = "") -> Iterator[Node]:
    """Yield the settings and every value below, each before what it holds, in their order.

    What a value holds is looked up after the reader has had it, so that a reader may change it.
    """
    waiting = [Node(path, path, path, settings)]
    while waiting:
        node = waiting.pop()
        yield node
        if not node.is_closed:
            # The last one is taken first, so they wait in reverse.
            waiting += reversed([*_below(node)])


def _below(node: Node) -> Iterator[Node]:
    value = node.value
    if isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            path = f"{node.path}[{index}]"
            # An entry of a list belongs to whatever holds the list.
            yield Node(path, node.setting, node.name, entry, node.holder, node.owner)
        return
    owner = node.owner
    named: Mapping[str, Any] = {}
    if isinstance(value, Mapping):
        named = value
        if "_target_" in value:  # nobody owns the settings of what is no name
            owner = value["_target_"] if isinstance(value["_target_"], str) else None
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        # A setting that was not kept has no value to walk into.
        named = {one.name: getattr(value, one.name, None) for one in dataclasses.fields(value)}
    for key, entry in named.items():
        path = f"{node.path}.{key}" if node.path else str(key)
        yield Node(path, path, str(key), entry, value, owner)

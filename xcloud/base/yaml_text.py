"""YAML texts as plain containers, with numbers as Hydra's files have them (1e-3 is one).

libyaml reads and writes them, ten times as fast as Python does, where PyYAML was built with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml  # type: ignore[import-untyped]

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

# PyYAML takes 1e-3 and 1.5e3 for texts.
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+\Z")


class _PlainLoader(_Loader):  # type: ignore[misc]
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Build a mapping. Raises yaml.YAMLError for a key that comes twice."""
        names = set[str]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused below
            # PyYAML keeps the last of two equal keys and says nothing.
            if key.value in names:
                raise yaml.constructor.ConstructorError(
                    "while constructing a mapping",
                    node.start_mark,
                    f"found duplicate key {key.value}",
                    key.start_mark,
                )
            names.add(key.value)
        return super().construct_mapping(node, deep)


class _PlainDumper(_Dumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        """Write what stands in two places twice: anchors are read nowhere."""
        return True


for _class in (_PlainLoader, _PlainDumper):
    # As YAML 1.2 and Hydra read numbers.
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
# A date stays a text.
_PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in _PlainLoader.yaml_implicit_resolvers.items()
}


def from_yaml(text: str) -> Any:
    """Return what a YAML text says as plain containers; an empty mapping where it is empty.

    Raises yaml.YAMLError, and ValueError for a number that Python does not read.
    """
    loaded = yaml.load(text, Loader=_PlainLoader)
    return {} if loaded is None else loaded


def to_yaml(plain: Any) -> str:
    """Return plain containers as a YAML text, in their order, which `from_yaml` reads as equal."""
    # What is read back must be equal, so names keep their order.
    return str(
        yaml.dump(
            plain,
            Dumper=_PlainDumper,
            default_flow_style=False,
            allow_unicode=True,
            sort_keys=False,
        )
    )


def events(text: str) -> Iterator[Any]:
    """Yield the events of a YAML text one by one, before any value is built.

    Raises yaml.YAMLError.
    """
    yield from yaml.parse(text, Loader=_Loader)

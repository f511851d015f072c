"""Data sets loaded by `datasets` as sources: a hub id, or a local folder of parquet or jsonl.

Rows are columns, or {"translation": {"es": …, "en": …}}. `datasets` no longer runs scripts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcloud.base.errors import DataError
from xcloud.base.settings import settings
from xcloud.contracts.task import Split
from xcloud.hub import go_offline_if_unreachable
from xcloud.tasks.corpus.rows import (
    Form,
    Source,
    SplitTables,
    Text,
    check_columns,
)

BATCH_ROWS = 1000


@dataclass(frozen=True)
class HubTable:
    """A Table: one split of a data set, map-style or streaming."""

    dataset: Any
    where: str
    names: Sequence[str] = ()

    @property
    def _names(self) -> list[str]:
        return list(self.dataset.column_names or next(iter(self.dataset), {}))

    def columns(self) -> list[str]:
        if "translation" not in self._names:
            return self._names
        return list(next(iter(self.dataset), {"translation": {}})["translation"])

    def rows(self, columns: Sequence[str], keys: str) -> Iterator[tuple[Any, ...]]:
        """See Table. Loads only these columns; a rank that sees none counts the rows of any."""
        check_columns(self, columns, keys)
        nested = "translation" in self._names
        kept = ["translation"] if nested else list(dict.fromkeys(columns)) or self._names[:1]
        for batch in self.dataset.select_columns(kept).iter(batch_size=BATCH_ROWS):
            cells = (
                {c: [row.get(c) for row in batch[kept[0]]] for c in columns} if nested else batch
            )
            yield from (
                zip(*(cells[c] for c in columns), strict=True)
                if columns
                else (() for _ in batch[kept[0]])
            )


@settings("task", kw_only=True)
class OnHub(Source):
    """path: such as "Helsinki-NLP/opus-100", or a folder. revision: null: the newest.

    Only the visible columns of a local folder are kept. A hub data set is public: `datasets`
    caches all columns on disk, and a rank loads the visible ones.
    """

    path: Text
    revision: str | None = None

    @property
    def where(self) -> str:
        return self.path

    def source_name(self) -> str:
        return self.where

    @property
    def data_set(self) -> str | None:
        """The data set's config to check for."""
        raise NotImplementedError

    def check_source(self, form: Form) -> None:
        """Raise DataError if the hub is out of reach and the data set is not cached."""
        if not is_local(self.where) and not go_offline_if_unreachable():
            load_hub(self.where, self.data_set, self.revision)


@settings("task", kw_only=True)
class Hub(OnHub):
    """A Hugging Face data set, or a local folder in the same format.

    config: such as "en-es".
    train, dev, test: split names; null: train, validation (valid, dev) and test, if present.
    """

    config: str | None = None
    train: str | None = None
    dev: str | None = None
    test: str | None = None

    @property
    def hides_test(self) -> bool:
        """Whether the data set's test labels are not public."""
        return False

    def is_usual(self, name: str, split: Split) -> bool:
        return not (split == "test" and self.hides_test) and super().is_usual(name, split)

    @property
    def data_set(self) -> str | None:
        return self.config

    def source_name(self) -> str:
        name = Path(self.where).name if is_local(self.where) else self.where
        return f"{name} {self.data_set}" if self.data_set else name

    def find(self, form: Form) -> SplitTables:
        loaded: Mapping[str, Any] = load_hub(self.where, self.data_set, self.revision)
        there = [
            HubTable(data, f"{self.where}, split {name}", [name]) for name, data in loaded.items()
        ]
        facts = {"config": self.data_set, "revision": self.revision}
        key = None if self.test is None else "task.test"
        return SplitTables(self.choose(there, "task.{}", "a split train"), facts, test_key=key)


def is_local(name: str) -> bool:
    return Path(name).expanduser().exists()


def load_hub(
    name: str,
    config: str | None,
    revision: str | None,
    split: str | None = None,
    streaming: bool | None = None,
) -> Any:
    """Split name -> data set, or only `split`. Raises DataError: what is missing and why."""
    local = is_local(name)
    # Never ask the network about a local folder.
    reached = local or go_offline_if_unreachable()
    import datasets

    path = str(Path(name).expanduser()) if local else name
    # Streaming reads local files in place: no invisible columns are copied to a cache.
    streaming = local if streaming is None else streaming
    try:
        return datasets.load_dataset(
            path, config, split=split, revision=revision, streaming=streaming
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise not_loaded(name, reached, error) from error


def not_loaded(name: str, reached: bool, error: Exception) -> DataError:
    if reached:
        return DataError(f"{name}: {' '.join(str(error).split())[:300]}")
    return DataError(
        f"{name}: the hub cannot be reached and no copy is in the cache; load it "
        "once with network access, or give a folder of parquet or jsonl files"
    )

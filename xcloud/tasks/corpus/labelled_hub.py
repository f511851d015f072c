"""Labelled texts through `datasets`: a hub id such as nyu-mll/glue, or a folder in that form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xcloud.errors import ConfigError, DataError
from xcloud.tasks.corpus.files import DEV_NAMES
from xcloud.tasks.corpus.hub import BATCH_ROWS, check_hub, is_local, load_hub
from xcloud.tasks.corpus.labelled import ColumnChoice, Columns, Sets, arranged
from xcloud.tasks.corpus.text import SPLITS, Parallel, Rows, Sampling
from xcloud.tasks.task import Split


@dataclass(frozen=True)
class LabelledHub:
    """config: the data set's own, such as sst2. train, dev, test: split names; None: train,
    validation (valid, dev), test where there are any.

    own_names: split -> the data set's split -> part, where several make up one. hidden_test: its
    test labels are kept back, so that its dev set is the test.
    Of a local folder only the visible columns are kept. A hub id is public: `datasets` keeps all
    columns in its cache on disk, and a rank loads the visible ones.
    """

    name: str
    config: str | None = None
    train: str | None = None
    dev: str | None = None
    test: str | None = None
    columns: ColumnChoice = field(default_factory=ColumnChoice)
    own_names: Mapping[Split, Mapping[str, str]] = field(default_factory=dict)
    hidden_test: bool = False
    revision: str | None = None
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError("task.path must be a hub id such as owner/name, or a folder")

    def describe(self) -> str:
        name = Path(self.name).name if is_local(self.name) else self.name
        return f"{name} {self.config}" if self.config else name

    def check(self) -> None:
        check_hub(self.name, self.config, self.revision)

    def read(self, visible: frozenset[str]) -> Parallel:
        loaded: Mapping[str, Any] = load_hub(self.name, self.config, self.revision)
        names = self._names(list(loaded))
        columns: Columns | None = None
        splits: dict[Split, Sets] = {}
        for split, parts in names.items():
            sets = {}
            for name, part in parts.items():
                where = f"{self.name}, split {name}"
                there = column_names(loaded[name])
                columns = columns or self.columns.find(there, where)
                sets[part] = hub_rows(loaded[name], columns.visible(visible), there, where)
            splits[split] = sets
        rows, remarks = arranged(splits, self.sampling, self.name)
        agreed = {
            "config": self.config,
            "revision": self.revision,
            "columns": str(columns),
            "sampling": repr(self.sampling),
        }
        return Parallel(self.describe(), rows, [f"columns {columns}", *remarks], agreed)

    def _names(self, there: list[str]) -> dict[Split, Mapping[str, str]]:
        names: dict[Split, Mapping[str, str]] = {}
        for split in SPLITS:
            asked: str | None = getattr(self, split)
            own = self.own_names.get(split, {})
            usual = DEV_NAMES if split == "dev" else (split,)
            if asked is not None:
                if asked not in there:
                    raise DataError(
                        f"{self.name}: no split {asked!r} for task.{split}; there are: "
                        f"{', '.join(there)}"
                    )
                names[split] = {asked: ""}
            elif own and set(own) <= set(there):
                names[split] = own
            elif split == "test" and self.hidden_test:
                continue
            elif found := next((name for name in usual if name in there), None):
                names[split] = {found: ""}
        if "train" not in names:
            raise DataError(
                f"{self.name}: no split train; there are: {', '.join(there)}. Another: task.train"
            )
        if "dev" in names and names["dev"] == names.get("test"):
            del names["dev"]  # task.test=validation: dev is then held out of train
        return names


def column_names(dataset: Any) -> list[str]:
    """Of a map-style or a streaming data set."""
    return list(dataset.column_names or next(iter(dataset), {}))


def hub_rows(dataset: Any, columns: Mapping[str, str], there: list[str], where: str) -> Rows:
    """columns: first, second, label -> column, the visible ones. Cells become text."""
    if missing := sorted(set(columns.values()) - set(there)):
        raise DataError(
            f"{where}: no column {', '.join(missing)}; there are: {', '.join(there)}. Choose with "
            "task.text_columns and task.label_column"
        )
    # A rank that sees nothing counts the rows, of whichever column.
    kept = sorted(set(columns.values())) or there[:1]
    texts: dict[str, list[str]] = {key: [] for key in columns}
    num_rows = 0
    for batch in dataset.select_columns(kept).iter(batch_size=BATCH_ROWS):
        num_rows += len(batch[kept[0]])
        for key, column in columns.items():
            texts[key].extend("" if c is None else str(c).strip() for c in batch[column])
    return Rows(num_rows, texts)

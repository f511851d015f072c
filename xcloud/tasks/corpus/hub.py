"""Other corpora through `datasets.load_dataset`: a hub id, or a local folder of parquet or jsonl.

Rows are {"translation": {"es": …, "en": …}} or columns. Dataset scripts are gone from `datasets`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xcloud.errors import ConfigError, DataError
from xcloud.hub_access import go_offline_if_unreachable
from xcloud.tasks.corpus.files import DEV_NAMES
from xcloud.tasks.corpus.text import SPLITS, Parallel, Rows, Sampling
from xcloud.tasks.task import Split

BATCH_ROWS = 1000


@dataclass(frozen=True)
class Hub:
    """A data set of the Hugging Face hub, or a local folder in the same form.

    name: "Helsinki-NLP/opus-100", say, or a folder. config: the data set's own, such as "en-es".
    train, dev, test: split names; null: train, validation (valid, dev), test where there are any,
    else held out of train by `sampling`. source_column, target_column: where the columns are
    named otherwise than the languages.

    Of a local folder only the visible side is kept. A hub id is public, and `datasets` keeps
    both sides in its cache on disk; a rank loads the visible one.
    """

    name: str
    config: str | None = None
    train: str = "train"
    dev: str | None = None
    test: str | None = None
    source_column: str | None = None
    target_column: str | None = None
    revision: str | None = None
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("task.path must be a hub id such as owner/name, or a folder")

    def describe(self) -> str:
        return Path(self.name).name if is_local(self.name) else self.name

    def check(self, source: str, target: str) -> None:
        """The hub is asked when it is read, by the ranks."""

    def read(self, source: str, target: str, visible: frozenset[str]) -> Parallel:
        loaded = load_hub(self.name, self.config, self.revision)
        columns = {source: self.source_column or source, target: self.target_column or target}
        splits: dict[Split, Rows] = {}
        for split, name in self._split_names(loaded).items():
            wanted = {language: columns[language] for language in sorted(visible)}
            splits[split] = _rows(loaded[name], wanted, f"{self.name}, split {name}")
        splits, remarks = self.sampling.apply(splits, self.name)
        agreed = {
            "config": self.config,
            "revision": self.revision,
            "sampling": repr(self.sampling),
        }
        return Parallel(self.describe(), splits, remarks, agreed)

    def _split_names(self, loaded: Mapping[str, Any]) -> dict[Split, str]:
        there = list(loaded)
        names: dict[Split, str] = {}
        for split in SPLITS:
            asked: str | None = getattr(self, split)
            usual: Sequence[str] = DEV_NAMES if split == "dev" else (split,)
            found = asked or next((name for name in usual if name in there), None)
            if found is None:
                continue
            if found not in there:
                raise DataError(
                    f"{self.name}: no split {found!r} for {split}; there are: {', '.join(there)}"
                )
            names[split] = found
        return names


def is_local(name: str) -> bool:
    return Path(name).expanduser().exists()


def load_hub(name: str, config: str | None, revision: str | None, split: str | None = None) -> Any:
    """Split name -> data set; or the one `split`. Raises DataError: missing, and how to get it."""
    local = is_local(name)
    # A rank must not ask the network about a folder that is there.
    reached = local or go_offline_if_unreachable()
    import datasets

    path = str(Path(name).expanduser()) if local else name
    try:
        # Streaming reads local files in place: no copy of the other side in a cache.
        return datasets.load_dataset(path, config, split=split, revision=revision, streaming=local)
    except (OSError, ValueError, RuntimeError) as error:
        raise _not_loaded(name, reached, error) from error


def check_hub(name: str, config: str | None, revision: str | None) -> None:
    """Raise DataError if the hub cannot be reached and its cache has no such data set."""
    if is_local(name) or go_offline_if_unreachable():
        return
    import datasets

    try:
        datasets.load_dataset_builder(name, config, revision=revision)
    except (OSError, ValueError, RuntimeError) as error:
        raise _not_loaded(name, False, error) from error


def _not_loaded(name: str, reached: bool, error: Exception) -> DataError:
    if reached:
        return DataError(f"{name}: {' '.join(str(error).split())[:300]}")
    return DataError(
        f"{name}: the hub cannot be reached and no copy is in the cache; load it "
        "once where there is network, or give a folder of parquet or jsonl files"
    )


def _rows(dataset: Any, columns: Mapping[str, str], where: str) -> Rows:
    """dataset: map-style or streaming. columns: visible language -> column."""
    there: Sequence[str] = dataset.column_names or list(next(iter(dataset), {}))
    nested = "translation" in there
    if nested:
        dataset = dataset.select_columns(["translation"])
    elif missing := sorted(set(columns.values()) - set(there)):
        raise DataError(
            f"{where}: no column {', '.join(missing)}; there are: {', '.join(there)}. Choose with "
            "task.source, task.target or task.source_column, task.target_column"
        )
    elif columns:
        dataset = dataset.select_columns(sorted(columns.values()))
    texts: dict[str, list[str]] = {language: [] for language in columns}
    num_rows = 0
    for batch in dataset.iter(batch_size=BATCH_ROWS):
        cells = batch["translation"] if nested else next(iter(batch.values()), ())
        num_rows += len(cells)
        for language, column in columns.items():
            texts[language].extend(_texts(batch, column, nested, where))
    return Rows(num_rows, texts)


def _texts(batch: Mapping[str, Any], column: str, nested: bool, where: str) -> Iterable[str]:
    cells = [row.get(column) for row in batch["translation"]] if nested else batch[column]
    if nested and cells and cells[0] is None and column not in batch["translation"][0]:
        raise DataError(
            f"{where}: no {column!r} in its translations, only: "
            f"{', '.join(batch['translation'][0])}. Choose with task.source and task.target"
        )
    return ((cell or "").strip() for cell in cells)

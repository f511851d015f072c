"""Data sets loaded by `datasets` as sources: a hub id, or a local folder of parquet or jsonl.

Rows are columns, or {"translation": {"es": …, "en": …}}. `datasets` no longer runs scripts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.task import Split
from xcloud.hub import go_offline_if_unreachable
from xcloud.tasks.corpus.folder import check_languages
from xcloud.tasks.corpus.source import DEV_NAMES, Form, Found, OwnNames
from xcloud.tasks.corpus.text import SPLITS, Rows

BATCH_ROWS = 1000


@dataclass(frozen=True)
class HubTable:
    """A Table: one split of a data set, map-style or streaming. Cells are converted to text."""

    dataset: Any
    where: str

    def columns(self) -> list[str]:
        return list(self.dataset.column_names or next(iter(self.dataset), {}))

    def batches(self, columns: Sequence[str]) -> Iterator[Mapping[str, Sequence[Any]]]:
        """Load only these columns. Raises DataError if one is missing."""
        yield from self.dataset.select_columns(list(columns)).iter(batch_size=BATCH_ROWS)

    def read(self, wanted: Mapping[str, str], keys: str, number: str | None = None) -> Rows:
        """See Table."""
        there = self.columns()
        nested = "translation" in there
        if not nested and (missing := sorted(set(wanted.values()) - set(there))):
            raise DataError(
                f"{self.where}: no column {', '.join(missing)}; there are: {', '.join(there)}. "
                f"Choose with {keys}"
            )
        # A rank that sees nothing counts the rows of any column.
        kept = ["translation"] if nested else sorted(set(wanted.values())) or there[:1]
        texts: dict[str, list[str]] = {name: [] for name in wanted}
        num_rows = 0
        for batch in self.batches(kept):
            rows = batch[kept[0]]
            num_rows += len(rows)
            for name, column in wanted.items():
                if nested and rows and column not in rows[0]:
                    raise DataError(
                        f"{self.where}: no {column!r} in its translations, only: "
                        f"{', '.join(rows[0])}. Choose with {keys}"
                    )
                cells = [row.get(column) for row in rows] if nested else batch[column]
                texts[name].extend("" if cell is None else str(cell).strip() for cell in cells)
        return Rows(num_rows, texts)


@dataclass(frozen=True)
class HubSet:
    """A Hugging Face data set, or a local folder in the same format.

    path: such as "Helsinki-NLP/opus-100", or a folder. config: such as "en-es".
    train, dev, test: split names; None: train, validation (valid, dev) and test, if present.
    own_names: splits to be joined into one. hidden_test: its test labels are not public.

    Only the visible columns of a local folder are kept. A hub data set is public: `datasets`
    caches all columns on disk, and a rank loads the visible ones.
    """

    path: str = ""
    config: str | None = None
    train: str | None = None
    dev: str | None = None
    test: str | None = None
    revision: str | None = None
    own_names: OwnNames = field(default_factory=dict)
    hidden_test: bool = False

    def __post_init__(self) -> None:
        check_name(self.path)

    @property
    def where(self) -> str:
        return self.path

    def describe(self) -> str:
        name = Path(self.path).name if is_local(self.path) else self.path
        return f"{name} {self.config}" if self.config else name

    def check(self) -> bool:
        check_hub(self.path, self.config, self.revision)
        return False

    def find(self, form: Form) -> Found:
        loaded: Mapping[str, Any] = load_hub(self.path, self.config, self.revision)
        splits: dict[Split, Mapping[str, Sequence[HubTable]]] = {}
        for split in SPLITS:
            splits[split] = {
                part: [HubTable(loaded[name], f"{self.path}, split {name}")]
                for name, part in self._names(split, list(loaded)).items()
            }
        splits = {split: parts for split, parts in splits.items() if parts}
        if "train" not in splits:
            raise DataError(
                f"{self.path}: no split train; there are: {', '.join(loaded)}. Set task.train"
            )
        facts = {"config": self.config, "revision": self.revision}
        return Found(splits, None if self.test is None else "task.test", facts)

    def _names(self, split: Split, there: Sequence[str]) -> Mapping[str, str]:
        """The data set's splits that make up this one, with their part names."""
        asked: str | None = getattr(self, split)
        if asked is not None:
            if asked not in there:
                raise DataError(
                    f"{self.path}: no split {asked!r} for task.{split}; there are: "
                    f"{', '.join(there)}"
                )
            return {asked: ""}
        own = self.own_names.get(split, {})
        if own and set(own) <= set(there):
            return own
        if split == "test" and self.hidden_test:
            return {}
        usual = DEV_NAMES if split == "dev" else (split,)
        return {name: "" for name in [n for n in usual if n in there][:1]}


@dataclass(frozen=True)
class HubByLanguage:
    """A data set with one config per language, such as facebook/xnli: train and validation of
    train_language, test of every language in `languages`."""

    path: str
    train_language: str = "en"
    languages: Sequence[str] = ()
    revision: str | None = None

    def __post_init__(self) -> None:
        check_name(self.path)
        check_languages(self.train_language, self.languages)
        if is_local(self.path):
            raise ConfigError(
                f"task.path={self.path} is a folder, but the paper profile reads the hub; "
                "use profile=files for a folder"
            )

    @property
    def where(self) -> str:
        return self.path

    def describe(self) -> str:
        return self.path

    def check(self) -> bool:
        check_hub(self.path, self.train_language, self.revision)
        return False

    def find(self, form: Form) -> Found:
        def table(language: str, split: str) -> Sequence[HubTable]:
            loaded = load_hub(self.path, language, self.revision, split)
            return [HubTable(loaded, f"{self.path} {language}, split {split}")]

        here = self.train_language
        splits: dict[Split, Mapping[str, Sequence[HubTable]]] = {
            "train": {"": table(here, "train")},
            "dev": {"": table(here, "validation")},
            "test": {language: table(language, "test") for language in self.languages},
        }
        facts = {"revision": self.revision, "languages": list(self.languages)}
        return Found(splits, "task.languages", facts)


def check_name(path: object) -> None:
    if not isinstance(path, str) or not path:
        raise ConfigError("task.path must be a hub id such as owner/name, or a folder")


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


def check_hub(name: str, config: str | None, revision: str | None) -> None:
    """Raise DataError if the hub is out of reach and the data set is not cached."""
    if is_local(name) or go_offline_if_unreachable():
        return
    import datasets

    try:
        datasets.load_dataset_builder(name, config, revision=revision)
    except (OSError, ValueError, RuntimeError) as error:
        raise not_loaded(name, False, error) from error


def not_loaded(name: str, reached: bool, error: Exception) -> DataError:
    if reached:
        return DataError(f"{name}: {' '.join(str(error).split())[:300]}")
    return DataError(
        f"{name}: the hub cannot be reached and no copy is in the cache; load it "
        "once with network access, or give a folder of parquet or jsonl files"
    )

"""Parallel corpora in a folder: .tsv, .jsonl or line pairs, plain or gzipped. No filtering.

Formats, told by the file's name (each may end in .gz):
    train.tsv              tab-separated, no quoting; the first line names the columns: es, en
    train.jsonl, .json     one object a line: {"es": …, "en": …} or {"translation": {"es": …, …}}
    train.es, train.en     one sentence a line, row i with row i; also train.es-en.es
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Literal

from xcloud.errors import ConfigError, DataError
from xcloud.tasks.corpus.text import SPLITS, Parallel, Rows, Sampling
from xcloud.tasks.task import Split

EXPECTED = (
    "train.tsv (first line: column names), train.jsonl, or train.{source} and train.{target}"
)
DEV_NAMES = ("dev", "val", "valid", "validation")
LANGUAGE_KEYS = "task.source and task.target"
Names = str | Sequence[str] | None


@dataclass(frozen=True)
class TextFile:
    """One table, or the files of a line pair. `name` is what is left without the endings."""

    name: str
    kind: Literal["table", "json", "lines"]
    paths: dict[str, Path]  # language -> file for lines; "" -> file for the others

    @property
    def label(self) -> str:
        return " + ".join(path.name for path in self.paths.values())

    def matches(self, pattern: str) -> bool:
        names = [self.name, *(path.name for path in self.paths.values())]
        return any(fnmatch(name, pattern) for name in names)

    def read(self, visible: frozenset[str]) -> Rows:
        if self.kind == "lines":
            return read_line_pair(self, visible)
        read = read_table if self.kind == "table" else read_json_lines
        return read(self.paths[""], visible)


@dataclass(frozen=True)
class ParallelFiles:
    """A folder with train, dev (val, valid, validation) and test files, told by their names.

    train_file, dev_file, test_file: other files for a split: a name, a pattern such as
    "newstest20*.tsv.gz", or a list of them. Without dev or test, `sampling` holds rows out.
    """

    path: str
    train_file: Names = None
    dev_file: Names = None
    test_file: Names = None
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("task.path must name the folder that holds the corpus")
        for name in ("train_file", "dev_file", "test_file"):
            patterns_of(getattr(self, name), f"task.{name}")

    def describe(self) -> str:
        return f"files in {Path(self.path).expanduser().resolve().name}"

    def check(self, source: str, target: str) -> None:
        self._chosen_files(source, target)

    def _chosen_files(self, source: str, target: str) -> dict[Split, list[TextFile]]:
        folder = Path(self.path).expanduser()
        files = list_corpus_files(folder, source, target)
        asked: dict[Split, Names] = {
            "train": self.train_file, "dev": self.dev_file, "test": self.test_file
        }  # fmt: skip
        expected = EXPECTED.format(source=source, target=target)
        return choose_files(folder, files, asked, is_usual_name, expected)

    def read(self, source: str, target: str, visible: frozenset[str]) -> Parallel:
        folder = Path(self.path).expanduser()
        chosen = self._chosen_files(source, target)
        splits: dict[Split, Rows] = {
            split: Rows.joined(file.read(visible) for file in parts)
            for split, parts in chosen.items()
        }
        if not splits["train"].num_rows:
            raise DataError(f"{folder}: the training file has no rows")
        splits, remarks = self.sampling.apply(splits, str(folder))
        names = {split: [file.name for file in parts] for split, parts in chosen.items()}
        agreed = {"files": names, "sampling": repr(self.sampling)}
        return Parallel(self.describe(), splits, remarks, agreed)


def choose_files(
    folder: Path,
    files: Sequence[TextFile],
    asked: Mapping[Split, Names],
    is_usual: Callable[[str, Split], bool],
    expected: str,
) -> dict[Split, list[TextFile]]:
    """The files of each split: those asked for, else the one whose name is usual for it.

    dev and test may stay without one. Raises DataError where a choice is missing or ambiguous.
    """
    there = ", ".join(file.label for file in files) or "none"
    chosen: dict[Split, list[TextFile]] = {}
    for split in SPLITS:
        for pattern in patterns_of(asked[split], f"task.{split}_file"):
            found = [file for file in files if file.matches(pattern)]
            if not found:
                raise DataError(
                    f"{folder}: no file for task.{split}_file={pattern}; there are: {there}"
                )
            new = [file for file in found if file not in chosen.get(split, [])]
            chosen.setdefault(split, []).extend(new)
    taken = [file for parts in chosen.values() for file in parts]
    if twice := [file.label for file in taken if taken.count(file) > 1]:
        raise DataError(f"{folder}: {twice[0]} is asked for in two splits; check task.*_file")
    for split in SPLITS:
        if split in chosen:
            continue
        found = [file for file in files if file not in taken and is_usual(file.name, split)]
        if len(found) > 1:
            raise DataError(
                f"{folder}: several files for {split}: {', '.join(f.label for f in found)}; "
                f"say which with task.{split}_file=NAME"
            )
        if found:
            chosen[split] = found
    if "train" not in chosen:
        raise DataError(
            f"{folder}: no training file; expected {expected}; there are: {there}. "
            "Another name: task.train_file=NAME (dev and test are then held out of it)"
        )
    return chosen


def patterns_of(names: Names, setting: str) -> list[str]:
    patterns = [] if names is None else [names] if isinstance(names, str) else list(names)
    if not all(isinstance(name, str) and name for name in patterns):
        raise ConfigError(f"{setting} must be a file name or a list of them, got {names!r}")
    return patterns


def is_usual_name(name: str, split: Split) -> bool:
    if split == "test":  # test, test_2016_flickr, test-2; but not testimony
        return name == "test" or (name.startswith("test") and not name[4:5].isalpha())
    return name in (DEV_NAMES if split == "dev" else ("train",))


def list_corpus_files(folder: Path, source: str, target: str) -> list[TextFile]:
    """Every file of a known format in this folder, sorted by name. Opens none of them."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataError(
            f"{folder} {what}; task.path must be a folder with "
            + EXPECTED.format(source=source, target=target)
        )
    tables: list[TextFile] = []
    pairs: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):
        if not path.is_file():
            continue
        name, _, ending = path.name.removesuffix(".gz").rpartition(".")
        if ending == "tsv":
            tables.append(TextFile(name, "table", {"": path}))
        elif ending in ("jsonl", "json"):
            tables.append(TextFile(name, "json", {"": path}))
        elif ending in (source, target):
            for pair in (f".{source}-{target}", f".{target}-{source}"):
                name = name.removesuffix(pair)
            if ending in pairs.setdefault(name, {}):
                both = f"{pairs[name][ending].name} and {path.name}"
                raise DataError(f"{folder}: {both} are the same side; remove one")
            pairs[name][ending] = path
    return tables + [TextFile(name, "lines", paths) for name, paths in pairs.items()]


def read_lines(path: Path) -> Iterator[str]:
    """Lines without their end, from UTF-8 text, plain or .gz. Raises DataError on other bytes.

    Only a line feed ends a line: a U+2028 or a lone carriage return inside a text must not shift
    the rows of one side.
    """
    try:
        file: IO[str]
        if path.suffix == ".gz":
            file = gzip.open(path, "rt", encoding="utf-8-sig", newline="\n")
        else:
            file = path.open(encoding="utf-8-sig", newline="\n")
        with file:
            for line in file:
                yield line.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error})") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def read_table(path: Path, visible: frozenset[str], choose: str = LANGUAGE_KEYS) -> Rows:
    """choose: the settings that name the columns, for the message of an error."""
    lines = read_lines(path)
    header = next(lines, "").split("\t")
    if missing := sorted(visible - set(header)):
        raise DataError(
            f"{path}: no column {', '.join(missing)}; its first line names these columns: "
            f"{', '.join(header)}. Choose with {choose}"
        )
    columns = {language: header.index(language) for language in visible}
    texts: dict[str, list[str]] = {language: [] for language in visible}
    num_rows = 0
    for num_rows, line in enumerate(lines, start=1):
        cells = line.split("\t")
        if len(cells) != len(header):
            raise DataError(
                f"{path}, line {num_rows + 1}: {len(cells)} columns, but the first line names "
                f"{len(header)}; a text may hold no tab"
            )
        # The other columns are dropped here, line by line: they may not be ours to see.
        for language, column in columns.items():
            texts[language].append(cells[column].strip())
    return Rows(num_rows, texts)


def read_json_lines(
    path: Path,
    visible: frozenset[str],
    choose: str = LANGUAGE_KEYS,
    numbers: frozenset[str] = frozenset(),
) -> Rows:
    """choose: as in read_table. numbers: keys that may also hold a number (a label)."""
    texts: dict[str, list[str]] = {language: [] for language in visible}
    num_rows = 0
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}, line {number}: not JSON ({error.msg}); expected one object a line"
            ) from error
        row = row.get("translation", row) if isinstance(row, dict) else {}
        for language in visible:
            text = row.get(language) if isinstance(row, dict) else None
            if language in numbers and isinstance(text, int | float):
                text = str(text)
            if not isinstance(text, str):
                keys = ", ".join(row) if isinstance(row, dict) and row else "none"
                raise DataError(
                    f"{path}, line {number}: no text under {language!r}; its keys: {keys}. "
                    f"Choose with {choose}"
                )
            texts[language].append(text.strip())
        num_rows += 1
    return Rows(num_rows, texts)


def read_line_pair(file: TextFile, visible: frozenset[str]) -> Rows:
    """Opens the visible sides only. A rank that sees neither counts the rows of one there is."""
    beside = next(iter(file.paths.values()))
    for language in visible:
        if language not in file.paths:
            raise DataError(f"{beside}: its other side, {file.name}.{language}, is missing")
    if not visible:
        return Rows(sum(1 for _ in read_lines(beside)), {})
    texts = {lang: [line.strip() for line in read_lines(file.paths[lang])] for lang in visible}
    counts = {file.paths[language].name: len(side) for language, side in texts.items()}
    if len(set(counts.values())) > 1:
        said = " and ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
        raise DataError(f"{beside.parent}: the sides of a line pair differ in lines: {said}")
    return Rows(next(iter(counts.values())), texts)

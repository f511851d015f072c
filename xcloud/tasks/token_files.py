"""Language modelling on files of token ids, as the speedruns of nanoGPT and the benchmark Protocol
NanoGPT have them (fineweb_train_000001.bin): no tokenizer, no packing, windows of equal length.

A file: 256 int32, of which the first three are MAGIC, VERSION and the number of tokens, then that
many uint16, all little-endian. Window i of a file holds its tokens i * S to (i + 1) * S - 1; what
is to be guessed at its last place is the next window's first token. Files are mapped, not read.

Batch fields, int64 [B, S]: "text" token ids; "types" zeros, as a window counts as one document;
"label" the token that follows. Shapes: B samples, S positions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.placeholders import AGAIN, check_is_data
from xcloud.base.settings import Leads, Positive, ReadPath, settings
from xcloud.contracts.model import (
    NO_TOKEN,
    SPLITS,
    Batch,
    DataSplit,
    Follow,
    Head,
    NumCut,
    Scores,
    TokenIds,
    no_text,
)
from xcloud.tasks.language_modelling import scores_of
from xcloud.tasks.sources import unread_remarks
from xcloud.tasks.text_task import check_visible

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 256 * 4
# Tokens at each end of a file; a whole file of a hundred million would take seconds.
DIGEST_TOKENS = 2**15
FIELDS = frozenset(("text", "types", "label"))


@dataclass(frozen=True)
class TokenFile:
    path: Path
    num_tokens: int

    @staticmethod
    def opened(path: Path) -> TokenFile:
        """Return a file whose header and size agree. Raises DataError."""
        # Its first bytes tell a pointer of LFS or a page of an error, too.
        head = check_is_data(path)
        if len(head) < HEADER_BYTES:
            raise DataError(
                f"{path} has {len(head)} bytes, and the header alone of a token file has "
                f"{HEADER_BYTES}; {AGAIN}"
            )
        magic, version, num_tokens = np.frombuffer(head, "<i4", count=3).tolist()
        if magic != MAGIC or version != VERSION:
            raise DataError(
                f"{path} is no token file: its first numbers are {magic} and {version}, and they "
                f"must be {MAGIC} and {VERSION} (uint16 token ids behind a header of 256 int32)"
            )
        # A download that was cut off has fewer bytes than its header promises.
        there = path.stat().st_size - HEADER_BYTES
        if there != 2 * num_tokens:
            raise DataError(
                f"{path}: its header promises {num_tokens:,} tokens, and {there:,} bytes follow "
                f"where {2 * num_tokens:,} must; {AGAIN}"
            )
        return TokenFile(path, num_tokens)

    def tokens(self) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
        # Mapped: ranks of a machine share the pages, and only windows that are used are read.
        return np.memmap(
            self.path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(self.num_tokens,)
        )

    def digest(self) -> str:
        """Return a digest of the number of tokens and of those at both ends, which is quick for
        files of any size."""
        tokens = self.tokens()
        found = hashlib.sha256(f"{self.num_tokens}".encode())
        found.update(tokens[:DIGEST_TOKENS].tobytes())
        found.update(tokens[-DIGEST_TOKENS:].tobytes())
        return found.hexdigest()[:32]


class TokenWindows:
    """The windows of a split: those of its files from `first` on, at most `most` (None: all)."""

    def __init__(
        self, files: Sequence[TokenFile], length: int, first: int = 0, most: int | None = None
    ) -> None:
        self.files = [file for file in files if file.num_tokens]  # nothing of others can be mapped
        self._length = length
        self._first = first
        # One token fewer: the last window needs one behind it to guess.
        counts = [(file.num_tokens - 1) // length for file in self.files]
        self._starts = np.asarray([0, *accumulate(counts)])
        # Windows before `first` are another split's.
        there = max(0, int(self._starts[-1]) - first)
        self.num_windows = there if most is None else min(there, most)
        self._tokens = [file.tokens() for file in self.files]

    def tokens(self, ids: Tensor, vocab_size: int) -> Tensor:
        """Return the windows and the token behind each, int64 [B, S + 1]. Raises DataError for a
        token that the vocabulary has not."""
        numbers = ids.numpy() + self._first
        # side="right": a file without windows starts where the next one does, and is passed over.
        of_file = np.searchsorted(self._starts, numbers, side="right") - 1
        # uint16 of the file become int64 here, which embeddings index by.
        rows = np.empty((len(numbers), self._length + 1), dtype=np.int64)
        for row, number, file in zip(rows, numbers, of_file, strict=True):
            start = (number - self._starts[file]) * self._length
            row[:] = self._tokens[file][start : start + self._length + 1]
            # Checked here and not when a file is opened, which would read all of it.
            if row.max() >= vocab_size:
                raise DataError(
                    f"{self.files[file].path}: token {row.max()} stands near place {start:,}, and "
                    f"task.vocab_size={vocab_size} has none of that number"
                )
        return torch.from_numpy(rows)


@settings("task", kw_only=True)
class TokenFiles:
    """A folder of token files.

    path: the folder.
    train: the pattern of the names of the training files.
    validation: the pattern of the names of the files of which dev is the beginning and test what
        follows it.
    num_dev: the number of windows of dev.
    num_test: the number of windows of test.
    max_length: the number of tokens of a window.
    vocab_size: the number of token ids that may occur.
    sizes: the number of windows of train, dev and test, for ranks that read none. null: rank 0
        sends them.
    """

    name: ClassVar[str] = "tokens"
    path: ReadPath
    train: Annotated[str, Field(min_length=1), Leads("inside")] = "*train*.bin"
    validation: Annotated[str, Field(min_length=1), Leads("inside")] = "*val*.bin"
    num_dev: Positive = 10_240
    num_test: Positive = 10_240
    max_length: Annotated[int, Field(ge=8)] = 1024
    vocab_size: Annotated[int, Field(ge=2, le=2**16)] = 50_257
    sizes: Mapping[DataSplit, Positive] | None = None

    def __post_init__(self) -> None:
        if self.sizes is not None and set(self.sizes) != set(SPLITS):
            raise ConfigError(
                f"task.sizes must be null or a number for each of {', '.join(SPLITS)}; got "
                f"{self.sizes!r}"
            )

    def describe(self) -> str:
        return f"{self.name} ({Path(self.path).name})"

    def check(self) -> None:
        self.windows()

    def windows(self) -> dict[DataSplit, TokenWindows]:
        """Return the windows of each split. Reads headers alone. Raises DataError."""
        train, validation = (
            self._files(pattern, key)
            for key, pattern in (("train", self.train), ("validation", self.validation))
        )
        # A file that is in both would be trained on and scored.
        if both := {file.path for file in train} & {file.path for file in validation}:
            raise DataError(
                f"{min(both)} fits task.train={self.train} and task.validation="
                f"{self.validation}: choose patterns that share no file"
            )
        length = self.max_length
        found: dict[DataSplit, TokenWindows] = {
            "train": TokenWindows(train, length),
            # dev and test are consecutive parts of the same files, as the speedruns score the
            # first 10,485,760 tokens.
            "dev": TokenWindows(validation, length, most=self.num_dev),
            "test": TokenWindows(validation, length, first=self.num_dev, most=self.num_test),
        }
        wanted = {"train": 1, "dev": self.num_dev, "test": self.num_test}
        for split, windows in found.items():
            if windows.num_windows < wanted[split]:
                raise DataError(
                    f"{self.path}: {split} has {windows.num_windows:,} windows of {length} tokens "
                    f"and needs {wanted[split]:,}: add files, or lower task.max_length, "
                    "task.num_dev or task.num_test"
                )
        return found

    def _files(self, pattern: str, key: str) -> list[TokenFile]:
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise DataError(f"{folder} {what}; task.path must be a folder of token files")
        # "../*.bin" would read folders that a policy has not allowed.
        if Path(pattern).name != pattern:
            raise ConfigError(f"task.{key}={pattern!r} is a pattern of names, not of folders")
        paths = sorted(folder.glob(pattern))
        # Sorted by name: window i is the same one in every cloud.
        if not paths:
            raise DataError(f"{folder} has no file like {pattern} (task.{key})")
        return [TokenFile.opened(path) for path in paths]

    def load(self, fields: frozenset[str], seed: int) -> TokenData:
        """Load a rank's view. `seed` is ignored: all seeds train and are scored on the same
        windows."""
        if unknown := fields - FIELDS:
            raise ConfigError(
                f"the task {self.name} has the fields {', '.join(sorted(FIELDS))}, but the model "
                f"reads {', '.join(sorted(unknown))}; choose another model (model=…)"
            )
        # A rank that sees no field opens no file.
        if self.sizes is not None and not fields:
            return TokenData(self, fields, windows={}, sizes=self.sizes)
        windows = self.windows()
        sizes = {split: windows[split].num_windows for split in SPLITS}
        if self.sizes is not None and dict(self.sizes) != sizes:
            raise DataError(f"{self.describe()}: task.sizes differ from the data, {sizes}")
        return TokenData(self, fields, windows, sizes=sizes)


class TokenData:
    """One rank's view (TaskData)."""

    head: Head | None = None

    def __init__(
        self,
        task: TokenFiles,
        fields: frozenset[str],
        windows: Mapping[DataSplit, TokenWindows],
        sizes: Mapping[DataSplit, int],
    ) -> None:
        self._task = task
        self._fields = fields
        self._windows = windows
        self._sizes = dict(sizes)
        self.num_cut: NumCut = {}

    def describe(self) -> str:
        counts = ", ".join(f"{num:,} {split}" for split, num in self._sizes.items())
        said = f"{self._task.describe()}: {counts} windows of {self._task.max_length} tokens"
        taken = {file.path.name for of in self._windows.values() for file in of.files}
        # A rank that sees no field has no folder.
        if taken:
            folder = Path(self._task.path).expanduser()
            said = ", ".join([said, *unread_remarks(folder, endings=["bin", "npy"], taken=taken)])
        return said

    def fingerprint(self) -> str:
        task = self._task
        # Names and digests of files are no part of it: a rank without files knows none.
        known = {
            "task": task.name, "max_length": task.max_length, "vocab_size": task.vocab_size,
            "rows": {split: self._sizes[split] for split in SPLITS},
        }  # fmt: skip
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    def own_digests(self) -> dict[str, str]:
        if not self._fields:
            return {}
        # dev and test share files, of which one digest is enough.
        every = {file.path: file for of in self._windows.values() for file in of.files}
        return {f"tokens of {path.name}": file.digest() for path, file in every.items()}

    def shared_digests(self) -> dict[str, str]:
        return {}

    def num_samples(self, split: DataSplit) -> int:
        return self._sizes[split]

    @property
    def vocabularies(self) -> dict[str, TokenIds]:
        if "text" not in self._fields:
            return {}
        last = self._task.vocab_size - 1  # GPT-2's end of text
        return {"text": TokenIds(size=last + 1, pad=NO_TOKEN, bos=last, eos=last, mask=NO_TOKEN)}

    def sentences(self, field: str) -> Sequence[Sequence[int]]:
        check_visible(field, there=self._fields)
        # The whole training set as lists: only asked for to measure the basis of a cut.
        ids = torch.arange(self._sizes["train"])
        rows: list[list[int]] = self.batch("train", ids)[field].tolist()
        return rows

    def batch(self, split: DataSplit, ids: Tensor) -> Batch:
        if not self._fields:
            return {"ids": ids}
        tokens = self._windows[split].tokens(ids, self._task.vocab_size)
        # All fields come from the same tokens, so what is not visible is made and dropped.
        of_fields = {
            "text": tokens[:, :-1],
            "types": torch.zeros_like(tokens[:, :-1]),
            "label": tokens[:, 1:],
        }
        return {"ids": ids, **{name: of_fields[name] for name in sorted(self._fields)}}

    def weight(self, ids: Tensor) -> float:
        return float(len(ids) * self._task.max_length)

    def score(self, split: DataSplit, predictions: dict[int, list[int]]) -> Scores:
        """Return perplexity and the mean loss in nats; errors are over windows."""
        check_visible("label", there=self._fields)
        num = self._sizes[split]
        if not predictions or not all(0 <= i < num for i in predictions):
            raise ValueError(f"{len(predictions)} predictions of {split}, which has {num} windows")
        # A window counts as a document of its own, for the errors.
        return scores_of(predictions, documents=[(number,) for number in range(num)])

    def signature(self) -> dict[str, str]:
        over = "over all tokens of the windows"
        return {"perplexity": f"exp of the mean loss {over}", "loss": f"nats, mean {over}"}

    def sample_outputs(
        self, split: DataSplit, scores: Scores, count: int, follow: Follow = no_text
    ) -> str:
        """Return nothing: without a tokenizer there is no text to show."""
        return ""

    def save_tokenizers(self, folder: Path) -> None:
        """Write nothing: token files have no tokenizer."""

"""What tasks share: settings, checks, a rank's view, token ids of many samples in flat tensors.

A rank that sees no field opens no file: if task.sizes are not set, rank 0 sends them
(xcloud/rank/task_data.py). In a single process they are counted.

    TokenTable   rows of any lengths
    PairTable    single texts or pairs, joined as a checkpoint expects:
        bos a eos            types 0 0 0
        bos a eos b eos      types 0 0 0 1 1      (num_separators eos between a and b)

Shapes: B samples, S positions.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.project import in_project
from xcloud.base.settings import Positive, WritePath, settings
from xcloud.contracts.model import (
    SPLITS,
    Batch,
    Cut,
    DataSplit,
    Follow,
    Head,
    Scores,
    TokenIds,
    no_text,
)
from xcloud.demo import public_sentences
from xcloud.tasks.rows import (
    Corpus,
    Form,
    Rows,
    RowTable,
    Share,
    Source,
    SplitTables,
    chosen_rows,
    in_train,
    interleaved,
    unread_keys,
)
from xcloud.tasks.sources import quotes_kept
from xcloud.tasks.tokenizer import Tokenizer, TokenizerChoice

TOKENIZER_TEXTS = 10_000
SAMPLING = ("dev_share", "test_share", "max_train_samples", "max_eval_samples")
"""Settings that say which rows are used: all clouds agree on them where one is set."""


@settings("task", kw_only=True)
class TextTask(ABC):
    """The settings that all tasks share. A task has a source, `data`, and reads what of it a rank
    may see.

    fields: the names of the fields; the last one is predicted.
    data: the place that its rows come from.
    max_length: the largest number of tokens of a sample, special ids included.
    dev_share, test_share: the rows to hold out of train where a dev or test split is missing: a
        row count (500) or a fraction of the training rows (0.02).
    max_train_samples, max_eval_samples: the largest number of samples, in splits with parts of
        each part; null: all. Which rows are held out and drawn does not depend on `seed`: every
        run is scored on the same ones.
    sizes: the number of samples of train, dev and test, for ranks that read none. null: rank 0
        sends them.
    cache_dir: the folder of trained tokenizers, relative to the checkout.
    """

    fields: ClassVar[tuple[str, ...]] = ("text", "types", "label")
    agreed_names: ClassVar[tuple[str, ...]] = ()
    """Settings of one task that its fingerprint has, too."""
    data: Source
    max_length: Positive
    dev_share: Share = 0.02
    test_share: Share = 0.02
    max_train_samples: Positive | None = None
    max_eval_samples: Positive | None = None
    sizes: Mapping[DataSplit, Positive] | None = None
    cache_dir: WritePath = ".cache"

    def __post_init__(self) -> None:
        """Check what relates several settings; each task calls this one."""
        if self.sizes is not None and set(self.sizes) != set(SPLITS):
            all_three = "{train: 5000, dev: 100, test: 500}"
            raise ConfigError(f"task.sizes must be null or {all_three}; got {self.sizes!r}")
        self.data.check(self.form)

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def form(self) -> Form:
        """Return what the task reads, for its source."""

    @property
    def shared_tokenizer(self) -> TokenizerChoice | None:
        """The tokenizer that all clouds have alike; None where each side has its own. A
        TrainedTokenizer is trained on public_sentences, not on the task's texts, because a
        vocabulary reveals its training text."""
        return getattr(self, "tokenizer", None)

    @property
    def is_public(self) -> bool:
        return self.data.is_public

    @property
    def where(self) -> str:
        return self.data.where(self.form)

    @abstractmethod
    def read(self, fields: frozenset[str]) -> Corpus:
        """Read all splits, as far as these fields need them. Raises DataError."""

    @abstractmethod
    def view(self, corpus: Corpus, fields: frozenset[str]) -> View[Any]:
        """Return the view of a rank that sees these fields."""

    def load(self, fields: frozenset[str], seed: int) -> View[Any]:
        """Load a rank's view. `seed` is ignored: all seeds train and are scored on the same
        rows."""
        if unknown := fields - {*self.fields}:
            raise ConfigError(
                f"the task {self.name} has the fields {', '.join(self.fields)}, but the model "
                f"reads {', '.join(sorted(unknown))}; choose another model (model=…)"
            )
        # A rank that sees no field reads nothing where the counts of rows are set.
        if fields or self.sizes is None:
            return self.view(self.read(fields), fields)
        counts = {split: Rows(num_rows=num, texts={}) for split, num in self.sizes.items()}
        return self.view(Corpus(counts), fields)

    def describe(self) -> str:
        return f"{self.name} ({self.data.source_name(self.form)})"

    def check(self) -> None:
        """Raise DataError or ConfigError if the corpus is missing, before any rank starts."""
        # A source that returns no tables (the hub, demo texts) has looked at them itself, or is
        # read by the ranks alone.
        if (tables := self.data.check_source(self.form)) is not None:
            self.check_tables(tables)
            self.check_content(tables)
        if self.shared_tokenizer is not None:
            self.shared_tokenizer.check()

    @abstractmethod
    def check_tables(self, tables: SplitTables) -> None:
        """Raise DataError if the tables cannot be used. Reads no text."""

    def check_content(self, tables: SplitTables) -> None:  # noqa: B027
        """Raise DataError for texts that every rank would refuse, where finding them takes
        seconds."""

    def agreed_settings(self) -> dict[str, object]:
        """Return what the fingerprint has beside name, max_length, row counts and corpus: nothing
        of the corpus where sizes are set, as a rank without files knows no file names."""
        # A rank without files knows no file names, so with sizes set nobody compares facts of the
        # corpus.
        agreed: dict[str, object] = {name: getattr(self, name) for name in self.agreed_names}
        if self.sizes is not None:
            agreed["corpus"] = None
        if self.shared_tokenizer is not None:
            agreed["tokenizer"] = repr(self.shared_tokenizer)
        return agreed

    def arrange(
        self,
        tables: SplitTables,
        rows_of: Callable[[RowTable], Rows],
        used: Callable[[RowTable], Collection[str]],
        dev_as_test: bool = False,
        useless_of: Callable[[Rows], Mapping[int, str]] = lambda _: {},
    ) -> Corpus:
        """Read all three splits, with a remark for each one held out of train or sampled, and
        for its rows that are not used. Parts are sampled equally and interleaved, so that a prefix
        of a split covers all of them.

        used: a function that returns the keys of a table that its task uses, including those that
            this rank does not see.
        dev_as_test: if there is no test set, the dev set becomes the test set, and dev is held out
            of train, so that nothing is tuned on the reported scores.
        useless_of: a function that returns the numbers of the rows of which nothing can be
            learned, each with the reason.

        Rows with the same cell in a column "group" are held out together.
        """
        # All splits are read before one is held out or sampled, so that remarks and errors speak
        # of what the files hold.
        splits: dict[DataSplit, Mapping[str, Rows]] = {
            split: {part: Rows.joined(map(rows_of, held)) for part, held in parts.items()}
            for split, parts in tables.tables.items()
        }
        for split, parts in splits.items():
            if empty := [part for part, rows in parts.items() if not rows.num_rows]:
                raise DataError(f"{self.where}: {empty[0] or 'the set'} of {split} has no rows")
        remarks = list(tables.remarks)
        every = [table for of in tables.tables.values() for table in chain(*of.values())]
        remarks += unread_keys(every, used) + quotes_kept(every)
        for split in (split for split in SPLITS if split in splits):
            # Counted where rows are still those of the files: what is taken from them below
            # forgets it.
            if num := sum(rows.num_empty for rows in splits[split].values()):
                remarks.append(f"{split}: {num:,} empty texts left out")
        # Rows that teach nothing go before anything is drawn. Chance would else fill a small dev
        # set with them, and clouds would not number the rest alike.
        useless: dict[str, dict[DataSplit, Cut]] = {}
        for split, parts in splits.items():
            for part, rows in parts.items():
                reasons = useless_of(rows)
                found = Counter(reasons.values())
                for why, num in found.items():
                    cut = Cut(num, of=rows.num_rows, setting="they teach nothing")
                    useless.setdefault(why, {})[split] = cut
                if len(reasons) == rows.num_rows:
                    said = f"none of {rows.num_rows:,} rows of {split} can be learned: "
                    said += "; ".join(f"{num:,}: {why}" for why, num in found.items())
                    raise DataError(f"{self.where}: {said}")
                if reasons:
                    left = [i for i in range(rows.num_rows) if i not in reasons]
                    splits[split] = {**splits[split], part: rows.take(left)}
        # `train` stays the set that labels are read from (Corpus.train_set), even where rows of it
        # are held out.
        train = splits["train"][""]
        if dev_as_test and "test" not in splits and "dev" in splits:
            splits["test"] = splits.pop("dev")
            remarks.append("test: the dev set, as there is no labelled test set")
        for split, numbers in self._held_out(splits, train).items():
            splits[split] = {"": train.take(numbers)}
            if split != "train":
                remarks.append(f"{split} held out of train")
        result = dict[DataSplit, Rows]()
        for split in SPLITS:
            most = self.max_train_samples if split == "train" else self.max_eval_samples
            parts = splits[split]
            if most is not None and any(rows.num_rows > most for rows in parts.values()):
                before = sum(rows.num_rows for rows in parts.values())
                remarks.append(f"{split}: a sample of its {before:,} rows")
                # Parts of equal length keep the same rows, as the draw depends on their number
                # alone: a sample in several languages stays one (label_scores).
                parts = {
                    part: rows.take(chosen_rows(rows.num_rows, wanted=most))
                    for part, rows in parts.items()
                }
            result[split] = parts[""] if list(parts) == [""] else interleaved(parts)
        # What is held out or drawn is compared, not the files: a sample counts as leaked only if
        # it is used.
        remarks += in_train(result)
        for split, rows in result.items():
            for column in (name for name in rows.texts if name not in ("label", "part", "group")):
                if num := sum(cell == "" for cell in rows.texts[column]):
                    remarks.append(f"{split}: {num:,} empty cells of {column} are kept")
        agreed = dict(tables.facts)
        drawn = {name: getattr(self, name) for name in SAMPLING}
        if any(value != getattr(TextTask, name) for name, value in drawn.items()):
            agreed["sampling"] = drawn
        return Corpus(
            splits=result, remarks=remarks, agreed=agreed, further=tables.further, train_set=train,
            useless=useless
        )  # fmt: skip

    def _held_out(self, there: Iterable[DataSplit], train: Rows) -> dict[DataSplit, list[int]]:
        """Return row numbers of train for each missing split and, last, for what remains of it."""
        # Groups are drawn, not rows: questions on one paragraph would else stand in train and in
        # dev.
        groups = train.texts.get("group", range(train.num_rows))
        left = list(dict.fromkeys(groups))
        shares: dict[DataSplit, int | float] = {"dev": self.dev_share, "test": self.test_share}
        wanted = {
            split: share if isinstance(share, int) else max(1, int(share * len(left)))
            for split, share in shares.items()
            if split not in there
        }
        if not wanted:
            return {}
        # At least one group has to be left to train on.
        if sum(wanted.values()) >= len(left):
            said = f"{' and '.join(wanted)} need {sum(wanted.values()):,} rows, but train has"
            lower = " and ".join(f"task.{split}_share" for split in wanted)
            said += f" {len(left):,}; lower {lower}, or add a set for each"
            raise DataError(f"{self.where}: {said}")
        split_of: dict[Any, DataSplit] = {}
        for split, count in wanted.items():
            split_of |= {left[i]: split for i in chosen_rows(len(left), wanted=count)}
            left = [group for group in left if group not in split_of]
        return {
            split: [i for i, group in enumerate(groups) if split_of.get(group, "train") == split]
            for split in (*wanted, "train")
        }


T = TypeVar("T", bound=TextTask)


def check_visible(field: str, there: Iterable[str]) -> None:
    """Raise DataError for a field that this rank does not see."""
    if field not in (fields := sorted(there)):
        visible = ", ".join(fields) or "none"
        raise DataError(f"{field!r} is no field visible here; visible: {visible}")


class Tokenized:
    """The tokenizers of the visible text fields."""

    _tokenizers: Mapping[str, Any]

    @property
    def vocabularies(self) -> dict[str, TokenIds]:
        return {field: tokenizer.token_ids for field, tokenizer in self._tokenizers.items()}

    def tokenizer(self, field: str) -> Any:
        check_visible(field, there=self._tokenizers)
        return self._tokenizers[field]

    def save_tokenizers(self, folder: Path) -> None:
        """Write text_tokenizer.json, or that of any other visible text field."""
        for field, tokenizer in self._tokenizers.items():
            tokenizer.save(folder / f"{field}_tokenizer.json")


class View(Tokenized, Generic[T]):
    """One rank's view of a task, as far as all tasks share it (TaskData).

    tokenizers: the tokenizers of text fields.
    columns: the data of each field that batches are made of. Fields that are not visible are not
        kept.
    sizes: the number of samples by split, where samples are not rows.
    in_words: a description of these sizes.
    remarks: remarks besides those of the corpus.
    cuts: the counts of texts that did not fit (TaskData.num_cut). Code that truncates a text or
        leaves one out reports it here.
    """

    head: Head | None = None

    def __init__(
        self,
        task: T,
        corpus: Corpus,
        fields: frozenset[str],
        tokenizers: Mapping[str, Any],
        columns: Mapping[str, Mapping[DataSplit, TokenTable | Tensor]],
        sizes: Mapping[DataSplit, int] | None = None,
        remarks: Sequence[str] = (),
        in_words: str | None = None,
        cuts: Mapping[str, Mapping[DataSplit, Cut]] = {},
    ) -> None:
        self._task = task
        self._fields = fields
        self._rows = dict(sizes or corpus.counts)
        # Fields that a rank may not see are dropped here, whatever its task has read.
        self._columns = {name: column for name, column in columns.items() if name in fields}
        self._tokenizers = {name: made for name, made in tokenizers.items() if name in fields}
        if task.sizes is not None and dict(task.sizes) != self._rows:
            there = ", ".join(f"{split}: {self._rows[split]}" for split in SPLITS)
            said = f"task.sizes differ from the data, which has {{{there}}}"
            raise DataError(f"{task.describe()}: {said}")
        self._remarks = [*corpus.remarks, *remarks]
        self._remarks += [made.remark for made in self._tokenizers.values() if made.remark]
        self._agreed = corpus.agreed
        # A rank without fields has read no row, so it has nothing to compare.
        self._digests = corpus.digests() if fields else {}
        for name, by_split in self._columns.items():
            for split, column in by_split.items():
                if isinstance(column, TokenTable):
                    self._digests[f"tokens of {name} of {split}"] = column.content_digest
                    unknown = None
                    if name in self._tokenizers:
                        unknown = self._tokenizers[name].reader.unknown
                    if unknown is not None and (num := column.count(unknown)):
                        said = f"{num:,} of {column.num_tokens:,} tokens of {name} are unknown"
                        self._remarks.append(f"{split}: {said} to its tokenizer")
        self._in_words = in_words if in_words and fields else counted(self._rows)
        # Texts that were truncated are told by the ranks that read them: others have no tokens to
        # count.
        found = {
            what: {split: cut for split, cut in by_split.items() if cut.num and fields}
            for what, by_split in cuts.items()
        }
        self.num_cut = {what: by_split for what, by_split in found.items() if by_split}

    def describe(self) -> str:
        return ", ".join([f"{self._task.describe()}: {self._in_words}", *self._remarks])

    def fingerprint(self) -> str:
        shared = {"task": self._task.name, "max_length": self._task.max_length}
        shared |= {"rows": self._rows, "corpus": dict(self._agreed)}
        described = json.dumps(shared | self._task.agreed_settings(), sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()

    def own_digests(self) -> dict[str, str]:
        return self._digests | self._tokenizer_digests

    def shared_digests(self) -> dict[str, str]:
        return {} if self._task.shared_tokenizer is None else self._tokenizer_digests

    @property
    def _tokenizer_digests(self) -> dict[str, str]:
        return {f"the {name} tokenizer": f"{t.digest:08x}" for name, t in self._tokenizers.items()}

    def num_samples(self, split: DataSplit) -> int:
        return self._rows[split]

    def batch(self, split: DataSplit, ids: Tensor) -> Batch:
        batch = {"ids": ids}
        for name, columns in self._columns.items():
            column = columns[split]
            if isinstance(column, Tensor):
                batch[name] = column[ids]
            else:
                batch[name] = column.padded(ids)
        return batch

    def weight(self, ids: Tensor) -> float:
        return float(len(ids))

    def check_predictions(self, split: DataSplit, predictions: Mapping[int, object]) -> None:
        """Raise DataError if what they are compared with is not visible here, ValueError if there
        are none, or one is for no sample of the split."""
        check_visible(self._task.fields[-1], there=self._fields)
        if not predictions:
            raise ValueError(f"no predictions to score on {split}")
        num = self._rows[split]
        if outside := [i for i in predictions if not 0 <= i < num]:
            raise ValueError(f"sample {outside[0]} is not in {split} (0..{num - 1})")

    def shown(self, split: DataSplit, ident: int) -> Mapping[str, str]:
        """Return what a sample of Scores asks, if this rank sees it: texts by name."""
        return {}

    def sample_outputs(
        self, split: DataSplit, scores: Scores, count: int, follow: Follow = no_text
    ) -> str:
        """Return the first samples that were scored, each with what it asks."""
        lines = []
        for ident, sample in islice(scores.samples.items(), count):
            # Lists are counts of a score, not something to show.
            said = {name: text for name, text in sample.items() if not isinstance(text, list)}
            entries = {**self.shown(split, ident), **said}.items()
            lines += [f"{name:10} {text}" for name, text in entries] + [""]
        return "\n".join(lines)


def counted(counts: Mapping[DataSplit, int]) -> str:
    """Return counts in words: "1,000 train, 50 dev, 50 test"."""
    return ", ".join(f"{count:,} {split}" for split, count in counts.items())


def public_tokenizer(choice: TokenizerChoice, cache_dir: str) -> Tokenizer:
    """Return the tokenizer, trained on public sentences if needed."""
    texts = public_sentences(TOKENIZER_TEXTS) if choice.is_trained else ()
    return choice.prepare(texts, in_project(cache_dir))


def cuts_of(tables: Mapping[DataSplit, TokenTable]) -> dict[DataSplit, Cut]:
    """Return how many rows of each table were longer than max_length."""
    return {
        s: Cut(num=table.num_cut, of=len(table), setting="task.max_length")
        for s, table in tables.items()
    }


def write_table(rows: Iterable[Sequence[int]], tokens: Path, offsets: Path) -> None:
    """Stream a table to two files: int32 tokens, int64 offsets."""
    ends = array("q", [0])
    with tokens.open("wb") as file:
        for row in rows:
            array("i", row).tofile(file)
            ends.append(ends[-1] + len(row))
    with offsets.open("wb") as file:
        ends.tofile(file)


class TokenTable:
    """Rows of tokens; `pad` fills up the shorter ones of a batch. 4 bytes per token, 8 per row.
    num_texts: texts that a table which is mapped from files was made of. num_cut: texts that were
    longer than a row may be. num_left_out: texts that gave no row."""

    digest = ""  # of a table that is mapped from files
    num_texts = 0
    num_cut = 0
    num_left_out = 0

    def __init__(self, rows: Iterable[Sequence[int]], pad: int = 0) -> None:
        # Flat arrays take 4 bytes a token. Lists of Python integers take 8 for each place, and 28
        # more for most ids.
        flat = array("i")
        ends = [0]
        for row in rows:
            flat.extend(row)
            ends.append(len(flat))
        self._flat = torch.from_numpy(np.asarray(flat))
        self._offsets = torch.tensor(ends)
        self._pad = pad

    @classmethod
    def mapped(cls, tokens: Path, offsets: Path) -> TokenTable:
        """Memory-map files written by `write_table`; they must stay in place."""
        table = cls(())
        num_rows = offsets.stat().st_size // 8
        num_tokens = tokens.stat().st_size // 4
        # Pages are read when their rows are, and are shared by the ranks of a machine.
        table._offsets = torch.from_file(str(offsets), size=num_rows, dtype=torch.int64)
        table._flat = torch.from_file(str(tokens), size=num_tokens, dtype=torch.int32)
        return table

    @property
    def num_tokens(self) -> int:
        return len(self._flat)

    def count(self, token: int) -> int:
        """Return how often a token stands in all rows."""
        return int((self._flat == token).sum())

    @property
    def content_digest(self) -> str:
        """Return a digest of all tokens and of where each row ends."""
        found = hashlib.sha256(self._flat.numpy().tobytes())
        found.update(self._offsets.numpy().tobytes())
        return found.hexdigest()[:32]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> list[int]:
        # range() takes negative numbers, and raises IndexError behind the last row, which ends an
        # iteration.
        start, end = self._offsets[range(len(self))[index] :][:2].tolist()
        return self._flat[start:end].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        flat = self._flat.tolist()
        return (flat[start:end] for start, end in pairwise(self._offsets.tolist()))

    def lengths(self, ids: Tensor) -> Tensor:
        """Return the lengths of these rows, int64 [B]."""
        return self._offsets[ids + 1] - self._offsets[ids]

    @cached_property
    def num_unlike_pad(self) -> Tensor:
        """For each row the number of tokens that differ from `pad`, int64."""
        # A difference of two running counts is the count of a row, so no loop over rows is needed.
        before = torch.cat(
            [torch.zeros(1, dtype=torch.int64), (self._flat != self._pad).cumsum(0)]
        )
        return before[self._offsets].diff()

    def padded(self, ids: Tensor) -> Tensor:
        """Return these rows as int64 [B, S], S being the length of the longest."""
        lengths_B1 = self.lengths(ids)[:, None]
        position_S = torch.arange(int(lengths_B1.max()) if len(ids) else 2)
        inside_BS = position_S < lengths_B1
        tokens_BS = torch.full(inside_BS.shape, self._pad)
        places_BS = self._offsets[ids][:, None] + position_S
        tokens_BS[inside_BS] = self._flat[places_BS[inside_BS]].long()
        return tokens_BS


class PairTable:
    """Single texts, or pairs where second ones are given, with their special ids. A sample that
    exceeds max_length (special ids included) is truncated; a pair at the end of its longer text,
    until both are equally long. second_at: position of each sample's first token of the second
    text; the length of the row in single texts."""

    def __init__(
        self,
        firsts: Sequence[Sequence[int]],
        seconds: Sequence[Sequence[int]] | None,
        max_length: int,
        special: TokenIds,
        num_separators: int = 1,
    ) -> None:
        self._num_separators = 1 if seconds is None else num_separators
        # Settings that leave no room were refused before; a test's table may have none.
        room = max(0, max_length - self.num_special(seconds is not None, num_separators))
        # A single text is a pair whose second text is empty, without its separators.
        pairs = list(zip(firsts, seconds or [()] * len(firsts), strict=True))
        self.second_at: list[int] = []

        def rows() -> Iterator[list[int]]:
            for first, second in pairs:
                # The shorter text may use half of the room plus what the longer leaves. The second
                # gets what the first leaves, so a short first text costs nothing.
                kept = min(len(first), max(room - len(second), room - room // 2))
                row = [special.bos, *first[:kept], *[special.eos] * self._num_separators]
                self.second_at.append(len(row))
                # The separator in `row` ends a single text.
                yield row if seconds is None else [*row, *second[: room - kept], special.eos]

        self.tokens = TokenTable(rows=rows(), pad=special.pad)
        self.tokens.num_cut = sum(len(first) + len(second) > room for first, second in pairs)

    @staticmethod
    def num_special(paired: bool, num_separators: int) -> int:
        return 2 + (num_separators if paired else 0)

    @staticmethod
    def encoded(tokenizer: Tokenizer, sides: Sequence[Sequence[str]], most: int) -> PairTable:
        """Build a table of one or two columns of texts. Repeated ones are tokenised once."""
        distinct = list(dict.fromkeys(text for side in sides for text in side))
        # Texts repeat: the same sentence stands in many pairs, and a paragraph beside each of its
        # questions.
        ids = dict(zip(distinct, tokenizer.encode(distinct), strict=True))
        firsts, *seconds = [[ids[text] for text in side] for side in sides]
        of = (tokenizer.token_ids, tokenizer.num_separators)
        return PairTable(firsts, seconds[0] if seconds else None, most, *of)

    def types(self) -> TokenTable:
        """Return for each token the text that it belongs to, 0 or 1."""
        lengths = self.tokens.lengths(torch.arange(len(self.tokens))).tolist()
        starts = zip(self.second_at, lengths, strict=True)
        return TokenTable([0] * start + [1] * (length - start) for start, length in starts)

    def texts(self, index: int) -> list[list[int]]:
        """Return the sample's one or two texts, truncated, without special ids."""
        row = self.tokens[index]
        start = self.second_at[index]
        # `start` is behind bos, the first text and its separators.
        first = row[1 : start - self._num_separators]
        return [first] if start == len(row) else [first, row[start:-1]]

"""Tokenizers: trained on the task's own text, or taken from a pretrained model. Both yield a
`Tokenizer`, saved as one JSON file. Knows nothing of sentence pairs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import threading
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from xcloud.base.bounded import parsed_json, read_json
from xcloud.base.errors import ConfigError, DataError
from xcloud.base.placeholders import check_is_json
from xcloud.base.settings import HubName, SharedTokenizerPath, settings
from xcloud.base.wording import listed, quoted
from xcloud.contracts.model import TokenIds
from xcloud.pretrained import (
    TOKENIZER_FILES,
    check_tokenizer_files,
    go_offline_if_unreachable,
    key_of,
    make_once,
    on_hub,
    resolve,
)
from xcloud.tasks.text_reader import TextReader
from xcloud.tasks.tokenizer_bounds import check_growth

# Ranks already share the cores, and forking after parallel tokenisation warns.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

FORMAT = "xcloud tokenizer 1"
SPECIAL_TOKENS = ("[PAD]", "[BOS]", "[EOS]", "[MASK]", "[UNK]")
UNKNOWN_TOKENS = ("[UNK]", "<unk>")
BYTES = 256
MAX_SEPARATORS = 8

T = TypeVar("T")


def digest_32(described: str) -> int:
    return int.from_bytes(hashlib.sha256(described.encode()).digest()[:4], "big")


@dataclass(eq=False)
class Tokenizer:
    """Text to ids and back. encode gives no special ids, whatever stands in a text (TextReader);
    decode stops at eos and drops the others.

    backend: the tokenizer of `tokenizers`. special: all special ids, including unknown.
    rejoin: true if pieces are words and punctuation, and decode reattaches punctuation ("Ve ."
        becomes "Ve."); if false, decode(encode(text)) is `text` byte for byte.
    num_separators: the number of eos ids between the texts of a pair: 1 as in BERT, 2 as in
        RoBERTa.
    remark: what a user should know of it, or "".
    """

    backend: Any
    token_ids: TokenIds
    special: Collection[int]
    rejoin: bool
    num_separators: int = 1
    remark: str = ""

    @cached_property
    def reader(self) -> TextReader:
        return TextReader(backend=self.backend, special=self.special)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.reader.encode(texts)

    def decode(self, ids: Iterable[int]) -> str:
        kept = []
        for token in ids:
            # What a model writes behind its end token is noise: it was trained no further.
            if token == self.token_ids.eos:
                break
            if token not in self.special:
                kept.append(int(token))
        text: str = self.backend.decode(kept)
        return rejoin_marks(text) if self.rejoin else text

    @cached_property
    def digest(self) -> int:
        """32-bit digest of vocabulary and rules, equal if two clouds hold the same tokenizer."""
        return digest_32(f"{self.token_ids!r} {sorted(self.special)} {self.backend.to_str()}")

    def word_starts(self) -> list[bool]:
        """For each id, whether it starts a word: special ids, pieces after a space, and pieces of
        scripts written without spaces."""
        # "##" marks what is inside a word in WordPiece; the others mark what begins one.
        model = self.backend.model
        decoder = str(self.backend.decoder)
        is_word_piece = type(model).__name__ == "WordPiece"
        continuation = model.continuing_subword_prefix if is_word_piece else None
        # A vocabulary may have gaps, which start a word as an empty piece does.
        pieces = [self.backend.id_to_token(i) or "" for i in range(self.token_ids.size)]
        return [
            i in self.special
            or begins_word(piece, continuation, byte_level="ByteLevel" in decoder)
            for i, piece in enumerate(pieces)
        ]

    def save_pretrained(self, folder: Path, max_length: int) -> None:
        """Write a folder for transformers' AutoTokenizer: `bos a eos`, pairs in the tokenizer's
        own format or `bos a eos b eos`."""
        from tokenizers.processors import TemplateProcessing
        from transformers import PreTrainedTokenizerFast

        piece = self.backend.id_to_token
        ids = self.token_ids
        bos = piece(ids.bos)
        eos = piece(ids.eos)
        backend = type(self.backend).from_str(self.backend.to_str())
        # A trained tokenizer has no processor of its own: its special ids are added by this
        # project.
        if backend.post_processor is None:
            single = f"{bos} $A {eos}"
            outer = [(bos, ids.bos), (eos, ids.eos)]
            backend.post_processor = TemplateProcessing(single, f"{single} $B {eos}", outer)
        unknown = next((p for i in self.special if (p := piece(i)) in UNKNOWN_TOKENS), None)
        made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=backend, cls_token=bos, sep_token=eos, pad_token=piece(ids.pad),
            mask_token=piece(ids.mask), unk_token=unknown, model_max_length=max_length,
            model_input_names=["input_ids", "attention_mask"], clean_up_tokenization_spaces=False,
        )  # fmt: skip
        made.save_pretrained(str(folder))

    def save(self, path: Path) -> None:
        content = {
            "format": FORMAT,
            "token_ids": asdict(self.token_ids),
            "special": sorted(self.special),
            "rejoin": self.rejoin,
            "num_separators": self.num_separators,
            "tokenizer": parsed_json(self.backend.to_str()),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Tokenizer:
        from tokenizers import Tokenizer as Backend

        try:
            content = read_json(path)
            if content["format"] != FORMAT:
                raise ValueError(f"format {quoted(content['format'])}")
            # Before the backend is built, which would carry out what a stranger's file says.
            check_growth(content["tokenizer"])
            if content["num_separators"] not in range(1, MAX_SEPARATORS + 1):
                raise ValueError(f"num_separators {quoted(content['num_separators'])}")
            backend = Backend.from_str(json.dumps(content["tokenizer"]))
            how = (content["special"], content["rejoin"], content["num_separators"])
            return Tokenizer(backend, TokenIds(**content["token_ids"]), *how)
        except Exception as error:  # tokenizers raises plain Exception
            raise DataError(f"{path}: no {FORMAT} file ({str(error)[:200]})") from error


class TokenizerChoice(ABC):
    """A configured tokenizer. Its `repr` (the settings) is part of the task's fingerprint.

    is_trained: true if it is made from texts.
    """

    is_trained: ClassVar[bool] = False

    def check(self) -> None:  # noqa: B027
        """Quick check: raise DataError if files are missing."""

    @abstractmethod
    def prepare(self, texts: Sequence[str], cache_dir: Path) -> Tokenizer:
        """The tokenizer, trained on these texts if needed. Raises DataError."""


@settings("tokenizer")
class TrainedTokenizer(TokenizerChoice):
    """A tokenizer trained on one side's training text, equal for the same text and settings. It is
    kept under cache_dir/tokenizers by the hash of these.

    vocab_size: the upper limit of the number of ids, special ones included. Small texts give
        fewer.
    kind: bpe = byte-level, without unknown tokens, lossless, at least 261 ids; wordpiece = as in
        BERT, where punctuation is split off and decode reattaches it by rule.
    lowercase: write all text in small letters first.
    """

    vocab_size: int = 4000
    kind: Literal["bpe", "wordpiece"] = "bpe"
    lowercase: bool = False
    is_trained: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # All bytes must have an id of their own, else not every text could be written.
        least = len(SPECIAL_TOKENS) + (BYTES if self.kind == "bpe" else 1)
        if self.vocab_size < least:
            said = f"must be a whole number >= {least}, got {self.vocab_size}"
            raise ConfigError(f"tokenizer.vocab_size for {self.kind} {said}")

    def prepare(self, texts: Sequence[str], cache_dir: Path) -> Tokenizer:
        if not any(texts):
            raise DataError("a tokenizer cannot be trained: the training texts are all empty")
        import tokenizers

        # The library's version counts: another one may learn other pieces from the same texts.
        described = {"format": FORMAT, "version": tokenizers.__version__, "settings": repr(self)}
        key = key_of(described, (text.encode() + b"\n" for text in texts))
        path = cache_dir / "tokenizers" / f"{key}.json"
        make_once(path, make=lambda part: self._train(texts).save(part))
        return Tokenizer.load(path)

    def _train(self, texts: Sequence[str]) -> Tokenizer:
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

        special = list(SPECIAL_TOKENS)
        backend: Any
        # A merge that comes once in the texts helps no other text.
        how: Any = {"vocab_size": self.vocab_size, "min_frequency": 2, "show_progress": False}
        if self.kind == "bpe":
            backend = Backend(models.BPE())
            if self.lowercase:
                backend.normalizer = normalizers.Lowercase()
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
            # Bytes that the texts lack get ids, too, so no text is unknown.
            how["initial_alphabet"] = sorted(pre_tokenizers.ByteLevel.alphabet())
        else:
            backend = Backend(models.WordPiece(unk_token="[UNK]"))
            # Accents stay, as they tell words of Spanish or French apart.
            backend.normalizer = normalizers.BertNormalizer(
                lowercase=self.lowercase, strip_accents=False
            )
            backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            backend.decoder = decoders.WordPiece(cleanup=False)
            # The trainer numbers pieces of one character in the order of a hash table, which
            # differs between processes and changes the merges. As special ones they are numbered
            # before it begins.
            special += self._pieces(map(backend.normalizer.normalize_str, texts))
        trainer = trainers.BpeTrainer if self.kind == "bpe" else trainers.WordPieceTrainer
        backend.train_from_iterator(texts, trainer(special_tokens=special, **how))
        content = parsed_json(backend.to_str())
        content["added_tokens"] = []  # pieces of the vocabulary, which TextReader guards
        backend = backend.from_str(json.dumps(content))
        # token_ids below says these numbers, so a library that orders them otherwise must not
        # pass.
        ids = range(len(SPECIAL_TOKENS))
        assert [backend.token_to_id(token) for token in SPECIAL_TOKENS] == list(ids)
        token_ids = TokenIds(size=backend.get_vocab_size(), pad=0, bos=1, eos=2, mask=3)
        return Tokenizer(backend, token_ids, special=ids, rejoin=self.kind == "wordpiece")

    def _pieces(self, texts: Iterable[str]) -> list[str]:
        """Return the pieces of one character each. Raises ConfigError if they are too many."""
        characters = sorted({c for text in texts for c in text if not c.isspace()})
        # Each character needs a piece that begins a word and one inside it.
        if (least := len(SPECIAL_TOKENS) + 2 * len(characters)) > self.vocab_size:
            said = f"the text has {len(characters)} characters; set at least {least}"
            raise ConfigError(f"tokenizer vocab_size {self.vocab_size} is too small: {said}")
        return [piece for c in characters for piece in (c, f"##{c}")]


@dataclass(frozen=True, repr=False)
class RunsTokenizer(TokenizerChoice):
    """A run's own tokenizer: trained once, when the run begins, and kept in its folder. A run that
    goes on takes it from there, so that ids keep their meaning whatever has become of the texts or
    of the library that trains it.

    trained: the tokenizer's settings, by which it is trained.
    goes_on: true if the run resumes from a checkpoint.
    """

    trained: TrainedTokenizer
    file: Path
    goes_on: bool
    is_trained: ClassVar[bool] = True

    def __repr__(self) -> str:
        return repr(self.trained)  # for the fingerprint, alike in all clouds

    def prepare(self, texts: Sequence[str], cache_dir: Path) -> Tokenizer:
        # Not compared with the texts: a run that goes on keeps its ids even where the texts have
        # changed.
        if self.goes_on and self.file.exists():
            return Tokenizer.load(self.file)
        made = self.trained.prepare(texts, cache_dir)
        with contextlib.suppress(OSError):  # a full disk: it is trained again, and compared
            # Ranks of one machine may all write here: each has a name of its own, and the last one
            # wins with the same content.
            part = self.file.with_name(f"{self.file.name}.{os.getpid()}.{threading.get_ident()}")
            made.save(part)
            part.replace(self.file)
        return made


def keep_tokenizers(task: T, folder: Path, goes_on: bool) -> T:
    """Return the task with its trained tokenizers kept in a run's folder, each in a file named
    after its setting. A rank that does not see a field makes and reads none of it."""
    if not dataclasses.is_dataclass(task):
        return task
    own = {
        field.name: RunsTokenizer(
            trained=choice, file=folder / f"{field.name}.json", goes_on=goes_on
        )
        for field in dataclasses.fields(task)
        # Only tokenizers that a run trains: a file's or a checkpoint's stays where it is.
        if isinstance(choice := getattr(task, field.name), TrainedTokenizer)
    }
    return dataclasses.replace(task, **own) if own else task  # type: ignore[type-var]


@settings("tokenizer")
class FileTokenizer(TokenizerChoice):
    """Trained beforehand by python -m xcloud train-tokenizer --out FILE …; every cloud has it.

    path: the file.
    """

    path: SharedTokenizerPath

    def check(self) -> None:
        if not Path(self.path).expanduser().is_file():
            command = f"python -m xcloud train-tokenizer FOLDER --languages … --out {self.path}"
            raise DataError(f"no tokenizer file {self.path}; make it with `{command}`")
        check_is_json(Path(self.path).expanduser())

    def prepare(self, texts: Sequence[str], cache_dir: Path) -> Tokenizer:
        return Tokenizer.load(Path(self.path).expanduser())


@settings("tokenizer")
class PretrainedTokenizer(TokenizerChoice):
    """The tokenizer of a pretrained model: a hub id such as bert-base-cased, a local folder, or
    the name of a packaged checkpoint (minilm). Its classifier and separator ids ([CLS] and [SEP],
    <s> and </s>) are used as bos and eos.

    name_or_path: the tokenizer's owner/name or owner/name@revision on the hub, a folder, or the
        name of a packaged one.
    """

    name_or_path: HubName

    @property
    def is_here(self) -> bool:
        """True if it is a folder of this machine."""
        return Path(resolve(self.name_or_path)).expanduser().is_dir()

    def check(self) -> None:
        """Raise DataError if a local folder holds no tokenizer, or a placeholder for one. Loads
        none."""
        folder = Path(resolve(self.name_or_path)).expanduser()
        if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
            said = f"{folder} holds no tokenizer ({' or '.join(TOKENIZER_FILES)})"
            raise DataError(f"task.tokenizer: {said}; copy its model's there, or name another")
        # On the hub there is nothing to look at before it is loaded.
        check_tokenizer_files(folder)

    def prepare(self, texts: Sequence[str], cache_dir: Path) -> Tokenizer:
        pretrained = self.load()
        backend = pretrained.backend_tokenizer
        cls = pretrained.cls_token_id
        sep = pretrained.sep_token_id
        # BERT has [CLS] and [SEP], RoBERTa <s> and </s> as these, and others only begin and end.
        ids = {
            "pad": pretrained.pad_token_id,
            "bos": pretrained.bos_token_id if cls is None else cls,
            "eos": pretrained.eos_token_id if sep is None else sep,
            "mask": pretrained.mask_token_id,
        }
        if missing := [name for name, token in ids.items() if token is None]:
            said = f"has no {', '.join(missing)} token; use a BERT or RoBERTa tokenizer"
            raise DataError(f"tokenizer {self.name_or_path}: {said}")
        # Tables cut and fill rows themselves; the checkpoint's own limits would cut pairs by other
        # rules.
        backend.no_padding()
        backend.no_truncation()
        special = {*ids.values(), *pretrained.all_special_ids}
        # WordPiece alone loses the spaces around punctuation.
        rejoin = type(backend.model).__name__ == "WordPiece"
        # Counted in what the tokenizer itself writes for a pair.
        between = max(1, backend.encode("a", "b").ids[1:-1].count(ids["eos"]))
        return Tokenizer(
            backend,
            token_ids=TokenIds(len(pretrained), **ids),
            special=special,
            rejoin=rejoin,
            num_separators=between,
            remark=self.replaced_rules(backend),
        )

    def replaced_rules(self, backend: Any) -> str:
        """Return a remark if transformers goes by other rules than tokenizer.json, or "".

        Some of its classes (Qwen2Tokenizer, BertTokenizer) take the vocabulary from the file and
        bring rules of their own.
        """
        from tokenizers import Tokenizer as Backend
        from tokenizers import models

        path = Path(resolve(self.name_or_path)).expanduser() / "tokenizer.json"
        if not path.is_file():  # it is on the hub, or made of other files
            return ""
        parts = ("normalizer", "pre_tokenizer", "decoder")
        used = Backend(models.BPE())
        for part in parts:
            setattr(used, part, getattr(backend, part))
        ours = parsed_json(used.to_str())
        # The library writes out defaults that a file may omit, so the file's parts go through it.
        written = read_json(path)
        rules = {part: written.get(part) for part in parts}
        theirs = parsed_json(Backend.from_str(json.dumps(ours | rules)).to_str())
        replaced = [part for part in parts if theirs[part] != ours[part]]
        if not replaced:
            return ""
        return (
            f"{listed(replaced)} of {path.name} not used, as transformers replaces what is of "
            "another tokenizer_class (tokenizer_config.json)"
        )

    def load(self) -> Any:
        """Return the tokenizer of transformers, in its fast form. Raises DataError."""
        from transformers import AutoTokenizer

        name = resolve(self.name_or_path)
        local = Path(name).expanduser().is_dir()
        # Checked before transformers opens them: a placeholder of LFS would end in an error of its
        # parser.
        if local:
            check_tokenizer_files(Path(name).expanduser())
        plain, revision = on_hub(name)
        reached = local or go_offline_if_unreachable()
        try:
            found = AutoTokenizer.from_pretrained(
                str(Path(name).expanduser()) if local else plain,
                **revision,
                local_files_only=not reached or local,
                trust_remote_code=False,  # else it asks whoever sits at the terminal
            )
        except Exception as error:  # broken folders raise all kinds
            reason = " ".join(str(error).split())[:200]
            if not reached:
                reason = "the hub cannot be reached and no copy is in the cache"
            remedy = "load it once with network access, or give a folder with tokenizer.json"
            raise DataError(f"tokenizer {name}: {reason}; {remedy}") from error
        # Slow tokenizers are Python code of transformers, which TextReader can't rename pieces in.
        backend = getattr(found, "backend_tokenizer", None)
        if backend is None:
            raise DataError(f"tokenizer {name}: has no tokenizer.json (fast) form")
        check_growth(parsed_json(backend.to_str()))
        return found


def rejoin_marks(text: str) -> str:
    """Reattach punctuation after pieces were joined by spaces: "¿ Qué ?" -> "¿Qué?". Rule-based,
    so not always right; only bpe restores the text exactly."""
    # The order matters: apostrophes of contractions go before those at the end of a word.
    text = re.sub(r"([¿¡(\[{«]) ", r"\1", text)
    text = re.sub(r" ([.,;:!?…)\]}»%])", r"\1", text)
    text = re.sub(r"(\w) (['’]) (s|t|re|ve|ll|d|m)\b", r"\1\2\3", text)  # don ' t
    text = re.sub(r"\b(\w{1,2}) (['’]) (?=\w)", r"\1\2", text)  # l ' eau
    text = re.sub(r"(\w) (['’])", r"\1\2", text)  # the girls ' books
    text = re.sub(r"(\w) ([-/]) (?=\w)", r"\1\2", text)  # twenty - one
    text = re.sub(r"(\d[.:]) (?=\d)", r"\1", text)  # 3. 5
    text = re.sub(r"(\d,) (?=\d{1,3}(?!\d))", r"\1", text)  # 1, 250 but May 9, 1955
    return text.strip()


# Which pieces start a word, for whole-word masking. Scripts written without spaces do not mark
# words: each piece counts as a word.
UNSPACED = re.compile(
    r"[\u0e00-\u109f\u1780-\u17ff\u1950-\u1aaf\uaa60-\uaadf"  # Thai, Lao, Tibetan, Myanmar, Khmer
    r"\u2e80-\ua4cf\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef"  # Chinese, Japanese, Yi, full width
    r"\U0001b000-\U0001b16f\U00020000-\U0003ffff]"  # kana, Chinese
)
# Bytes that GPT-2's alphabet maps to themselves; the others are mapped to U+0100 and up.
_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
BYTE_OF = {chr(b): b for b in _SHOWN} | {chr(0x100 + i): b for i, b in enumerate(_HIDDEN)}


def begins_word(piece: str, continuation: str | None, byte_level: bool) -> bool:
    """continuation: the prefix of word-internal pieces, "##" in WordPiece. None: spaces are marked
    instead, by "▁" (SentencePiece) or "Ġ" (byte_level: pieces are bytes in GPT-2's alphabet)."""
    if continuation is not None:
        inside = piece.startswith(continuation)
        return not inside or begins_unspaced(piece.removeprefix(continuation).encode())
    # Added tokens are written as they are, so one of them may have letters outside of the
    # alphabet.
    if byte_level and all(sign in BYTE_OF for sign in piece):
        is_marked = piece.startswith("Ġ")
        text = bytes(BYTE_OF[sign] for sign in piece)
    else:
        is_marked = piece.startswith(("Ġ", "▁"))
        text = piece.encode()
    return is_marked or begins_unspaced(text)


def begins_unspaced(text: bytes) -> bool:
    """Return whether UTF-8 text starts with a character of an unspaced script, combining marks
    excluded; of an incomplete character, whether its first and last possible values both are."""
    if not text:
        return False
    num_bytes = max(1, 8 - (~text[0] & 0xFF).bit_length())  # as many as ones lead the first byte
    missing = num_bytes - len(text[:num_bytes])
    lowest, highest = (
        # A piece of a byte-level tokenizer may end inside a character: the bytes that are missing
        # lie between these two.
        (text[:num_bytes] + filler * missing).decode(errors="replace")[0]
        for filler in (b"\x80", b"\xbf")
    )
    # A vowel sign of Thai belongs to the letter before it.
    if not missing and unicodedata.category(lowest).startswith("M"):
        return False
    return bool(UNSPACED.match(lowest) and UNSPACED.match(highest))

"""Documents and chats as token ids for a causal language model and back, packed into samples.

A tokenizer is kept as a folder that transformers' AutoTokenizer loads, the chat template with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xcloud.base.errors import DataError
from xcloud.contracts.model import NO_LABEL, NO_TOKEN, TokenIds
from xcloud.tasks.public_text import public_tokenizer
from xcloud.tasks.tables import TokenTable
from xcloud.tasks.tokenizer import SPECIAL_TOKENS, PretrainedTokenizer, TokenizerChoice

Chat = Sequence[Mapping[str, str]]
"""Messages, each with "role" (system, user, assistant …) and "content"."""

CHATS_FILE = "learned_chats"  # beside a tokenizer whose model has
OPEN = 64  # samples that a document is tried in; more fill little better


class Document(NamedTuple):
    """learned: for each token, whether a model is to guess it. number: of the document that a
    piece is of."""

    ids: list[int]
    learned: list[bool]
    number: int = 0


class CausalTokenizer:
    """A tokenizer of transformers with an end-of-text token. Padding it needs none."""

    def __init__(self, pretrained: Any, name: str) -> None:
        if pretrained.eos_token_id is None:
            raise DataError(f"tokenizer {name}: has no end-of-text token (eos_token)")
        self._pretrained, self._name = pretrained, name
        self.learns_chats = False  # or it did: a prompt is then a question
        self._first = [] if pretrained.bos_token_id is None else [pretrained.bos_token_id]
        self._eos = pretrained.eos_token_id

    @staticmethod
    def of(choice: TokenizerChoice, cache_dir: str) -> CausalTokenizer:
        """A pretrained model's, or one trained on public sentences. Raises DataError."""
        if isinstance(choice, PretrainedTokenizer):
            return CausalTokenizer(choice.load(), choice.name_or_path)
        from transformers import PreTrainedTokenizerFast

        pad, bos, eos, _, unknown = SPECIAL_TOKENS
        backend = public_tokenizer(choice, cache_dir).backend
        made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=backend, pad_token=pad, bos_token=bos, eos_token=eos,
            unk_token=unknown, clean_up_tokenization_spaces=False,
        )  # fmt: skip
        return CausalTokenizer(made, repr(choice))

    @staticmethod
    def load(folder: Path) -> CausalTokenizer:
        found = CausalTokenizer(PretrainedTokenizer(str(folder)).load(), str(folder))
        found.learns_chats = (folder / CHATS_FILE).exists()
        return found

    def save(self, folder: Path) -> None:
        self._pretrained.save_pretrained(folder)
        if self.learns_chats:
            (folder / CHATS_FILE).touch()

    @property
    def token_ids(self) -> TokenIds:
        first = self._first[0] if self._first else self._eos
        return TokenIds(len(self._pretrained), NO_TOKEN, first, self._eos, NO_TOKEN)

    @property
    def vocabularies(self) -> dict[str, TokenIds]:
        return {"text": self.token_ids}

    def texts(self, texts: Sequence[str]) -> list[Document]:
        """Begin token (where there is one), text, end token: all to be guessed."""
        found = [[*self._first, *ids, self._eos] for ids in self._encode(texts)]
        return [Document(ids, [True] * len(ids)) for ids in found]

    def chat(self, messages: Chat, where: str) -> Document:
        """Rendered by the tokenizer's own template; only the assistant's turns are to be guessed.
        What follows the last of them is left out. where: for messages.

        Prompt and answer are cut into tokens apart, as they are when a model is asked.
        """
        pieces: list[tuple[str, bool]] = []
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked = self._render(messages[:number], True, where)
            answered = self._render(messages[: number + 1], False, where)
            if not (asked.startswith(done) and answered.startswith(asked)):
                raise DataError(
                    f"{where}: the chat template of {self._name} writes earlier turns anew when "
                    "an answer is added, so it cannot be told what the answer is; give chats with "
                    "one answer each, or a tokenizer whose template only appends"
                )
            pieces += [(asked[len(done) :], False), (answered[len(asked) :], True)]
            done = answered
        if not pieces:
            raise DataError(f"{where}: no message of the role assistant, so nothing to learn")
        document = Document([], [])
        encoded = self._encode([text for text, _ in pieces])
        for ids, (_, learned) in zip(encoded, pieces, strict=True):
            document.ids.extend(ids)
            document.learned.extend([learned] * len(ids))
        return document

    def prompt(self, text: str) -> list[int]:
        """What a model is given to go on from: a chat with one question if it has learned chats,
        else the begin token and the text."""
        if not self.learns_chats:
            return [*self._first, *self._encode([text])[0]] or [self._eos]
        asked = self._render([{"role": "user", "content": text}], True, "prompt")
        return self._encode([asked])[0]

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._pretrained.decode(list(ids), skip_special_tokens=True)
        return text

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        backend = self._pretrained.backend_tokenizer
        return [e.ids for e in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _render(self, messages: Chat, ask: bool, where: str) -> str:
        if self._pretrained.chat_template is None:
            raise DataError(
                f"{where}: tokenizer {self._name} has no chat template; give plain text, or the "
                "tokenizer of a model made for chats"
            )
        try:
            text: str = self._pretrained.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=ask
            )
        except Exception as error:  # whatever the template raises
            raise DataError(f"{where}: the chat template refuses it: {error}") from error
        return text


def pieces_of(documents: Iterable[Document], max_length: int, split: bool) -> Iterator[Document]:
    """Documents of at most max_length tokens with something to guess. split: a longer one becomes
    several; else its end is lost, as a chat's second half is no chat."""
    for number, (ids, learned, _) in enumerate(documents):
        for start in range(0, len(ids) if split else 1, max_length):
            piece = slice(start, start + max_length)
            if any(learned[piece][1:]):
                yield Document(ids[piece], learned[piece], number)


def pack(documents: Iterable[Document], max_length: int) -> list[list[Document]]:
    """Samples of whole documents: each goes into the first of the last OPEN samples that has room.
    The same for the same documents in every cloud."""
    samples: list[list[Document]] = []
    room: list[int] = []
    for document in documents:
        size = len(document.ids)
        first = max(0, len(samples) - OPEN)
        place = next((i for i in range(first, len(samples)) if room[i] >= size), None)
        if place is None:
            samples.append([])
            room.append(max_length)
            place = len(samples) - 1
        samples[place].append(document)
        room[place] -= size
    return samples


def columns_of(
    samples: Sequence[Sequence[Document]], fields: frozenset[str]
) -> dict[str, TokenTable]:
    """Only what these fields (text, types, label) need is kept."""
    return {
        name: TokenTable(map(column, samples), pad)
        for name, (column, pad) in COLUMNS.items()
        if name in fields
    }


def _labels(document: Document) -> Iterator[int]:
    """At each place the token that follows, if it is to be guessed."""
    for token, learned in zip(document.ids[1:], document.learned[1:], strict=True):
        yield token if learned else NO_LABEL
    yield NO_LABEL


COLUMNS: Mapping[str, tuple[Callable[[Sequence[Document]], list[int]], int]] = {
    "text": (lambda sample: [token for document in sample for token in document.ids], NO_TOKEN),
    "types": (lambda sample: [n for n, document in enumerate(sample) for _ in document.ids], 0),
    "label": (lambda sample: [t for document in sample for t in _labels(document)], NO_LABEL),
}
"""How a sample becomes a row of each field, and what fills up a batch."""

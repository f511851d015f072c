"""Language modelling: every next token of plain texts, or those of the answers in chats, packed
into samples.

Rows (rows.py) have one column, "text", or two: "messages", where each row is a chat, and "given",
what its template gets beside them (tools, documents).
Batch fields, int64 [B, S]: "text" token ids of prompts and answers; "types" which of the sample's
documents a token belongs to; "label" the token to be guessed at each place, of answers only.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, groupby, islice, takewhile
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import Field
from torch import Tensor

from xcloud.base.bounded import parsed_json, read_json
from xcloud.base.errors import DataError
from xcloud.base.project import MODEL_DIR
from xcloud.base.settings import settings
from xcloud.base.terminal import say
from xcloud.base.wording import listed, quoted
from xcloud.contracts.model import (
    NO_LABEL,
    NO_TOKEN,
    Cut,
    DataSplit,
    Follow,
    Scores,
    TokenIds,
    no_text,
)
from xcloud.demo import stories
from xcloud.pretrained import generation_config, resolve
from xcloud.tasks.chat_template import DATE, TemplateError, template_process
from xcloud.tasks.rows import (
    Corpus,
    Demo,
    Form,
    GivenText,
    Rows,
    RowTable,
    Size,
    SplitTables,
    unread_keys,
)
from xcloud.tasks.scores import ratio_error
from xcloud.tasks.sources import TextFile
from xcloud.tasks.text_reader import TextReader
from xcloud.tasks.text_task import TextTask, TokenTable, View, check_visible, public_tokenizer
from xcloud.tasks.tokenizer import (
    SPECIAL_TOKENS,
    PretrainedTokenizer,
    TokenizerChoice,
    TrainedTokenizer,
    digest_32,
)

Messages = Sequence[Mapping[str, Any]]
"""Messages, each with "role" (system, user, assistant …), "content" and what else there is."""


class Chat(NamedTuple):
    """A chat as a template takes it. given: what it gets beside the messages: tools, documents."""

    messages: Messages
    given: Mapping[str, Any] = {}


TEXT = "text"
MESSAGES = "messages"
GIVEN = "given"
SYSTEM = "system"
TEMPLATE_KEYS = ("tools", "documents")  # of a row, which a template gets beside the messages
CHAT_KEYS = (SYSTEM, *TEMPLATE_KEYS)
"""Keys of a row that are used beside its messages. "system" is the text of a first message."""
UNREADABLE = frozenset(
    ("image", "images", "video", "videos", "audio", "audios", "functions", "chat_template",
     "chat_template_kwargs")
)  # fmt: skip
"""Keys of a row that would change what its messages mean, and that nothing here reads."""
MEANT = frozenset(
    ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "image",
     "images", "video", "audio", *TEMPLATE_KEYS)
)  # fmt: skip
"""Keys whose messages mean something else without them: a template has to write them."""
NOT_LEARNED = ("weight", "train", "training")  # keys of an answer that is not to be learned
MAX_CHECKED_BYTES = 64 << 20  # of files that are read before a run starts
MAX_TRIES = 100  # messages of which a template has to write a key once
FOLDER_NAME = "tokenizer"
GENERATION_FILE = "generation_config.json"

# Keys of that file that change no token here, or that options of `generate` are in place of.
_FOLLOWED = {
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "do_sample",
    "temperature", "top_p", "max_length", "max_new_tokens", "use_cache", "cache_implementation",
    "transformers_version", "_from_model_config",
}  # fmt: skip
TEMPLATE_FILE = "chat_template.jinja"
NAMES_CODE = ("auto_map", "custom_pipelines", "custom_generate", "trust_remote_code")
"""Keys of files of transformers by which code beside weights is loaded."""
CHATS_FILE = "learned_chats"  # beside a tokenizer whose model has
FORMS = 'A line is {"text": …} or {"messages": [{"role": …, "content": …}, …]}.'
CONVERTER = "docs/causal-language-models.md#texts"
LARGEST_LOSS = 700.0  # nats; exp of more is no float
_MARK = "end-of-what-is-begun "  # whose space tells whether a template keeps spaces
QUESTION = "question"
ANSWER = "answer"
EXPECTED = "expected"
MAX_ANSWER = 64  # tokens of an answer that is shown
OPEN = 64  # samples that a document is tried in; more fill little better


class Document(NamedTuple):
    """A document, or a piece of one.

    learned: one value for each token, true if a model is to guess it.
    number: the number of the document that the piece belongs to.
    """

    ids: list[int]
    learned: list[bool]
    number: int = 0

    def labels(self) -> list[int]:
        """Return at each place the token that follows, if it is to be guessed."""
        following = zip(self.ids[1:], self.learned[1:], strict=True)
        return [*(token if learned else NO_LABEL for token, learned in following), NO_LABEL]


class Fitted(NamedTuple):
    """The pieces of a split's documents that fit into samples.

    num: the number of documents.
    num_cut: the number of them that lost a part.
    num_left_out: the number of them of which nothing is to be guessed.
    useless: the number of others that are left out, by reason.
    remarks: other remarks on them.
    """

    pieces: list[Document]
    num: int
    num_cut: int
    num_left_out: int
    useless: Mapping[str, int] = {}
    remarks: Sequence[str] = ()


def fitted(documents: Sequence[Document], max_length: int, split: bool) -> Fitted:
    """Return pieces of at most max_length tokens with something to guess. split: a longer document
    becomes several; else its end is lost, as a chat's second half is no chat."""
    pieces: list[Document] = []
    num_cut = num_left_out = 0
    for number, (ids, learned, _) in enumerate(documents):
        places = [
            # A chat that is too long is one place alone, its beginning: without a question its
            # second half is no chat.
            slice(start, start + max_length)
            for start in range(0, len(ids) if split else 1, max_length)
        ]
        # The first token of a piece is never guessed, so a piece needs another one that is.
        kept = [place for place in places if any(learned[place][1:])]
        pieces += [
            Document(ids=ids[place], learned=learned[place], number=number) for place in kept
        ]
        if not kept:
            num_left_out += 1
        elif sum(len(ids[place]) for place in kept) < len(ids):
            num_cut += 1
    return Fitted(pieces, num=len(documents), num_cut=num_cut, num_left_out=num_left_out)


def pack(documents: Iterable[Document], max_length: int) -> list[list[Document]]:
    """Pack whole documents into samples: each goes into the first of the last OPEN samples that
    has room. The same for the same documents in every cloud."""
    samples: list[list[Document]] = []
    room: list[int] = []
    for document in documents:
        # Only the last OPEN samples are tried, so that packing takes time in proportion to the
        # documents.
        size = len(document.ids)
        first = max(0, len(samples) - OPEN)
        place = next((i for i in range(first, len(samples)) if room[i] >= size), len(samples))
        if place == len(samples):
            # Samples and their room grow side by side; place is the same number in both.
            samples.append([])
            room.append(max_length)
        samples[place].append(document)
        room[place] -= size
    return samples


def columns_of(samples: Sequence[Sequence[Document]]) -> dict[str, TokenTable]:
    """Return by field each sample as a row, and what fills up a batch."""
    # Generators: the tokens of a split are put into flat tables once, and stand nowhere else as
    # lists.
    texts = ([token for document in sample for token in document.ids] for sample in samples)
    types = ([n for n, document in enumerate(sample) for _ in document.ids] for sample in samples)
    labels = ([token for document in sample for token in document.labels()] for sample in samples)
    rows = {"text": (texts, NO_TOKEN), "types": (types, 0), "label": (labels, NO_LABEL)}
    return {name: TokenTable(*of) for name, of in rows.items()}


class CausalTokenizer:
    """A tokenizer of transformers with an end-of-text token. Padding it needs none. Kept as a
    folder that AutoTokenizer loads, the chat template with it.

    pretrained: the tokenizer of transformers itself.
    """

    def __init__(self, pretrained: Any, name: str) -> None:
        if pretrained.eos_token_id is None:
            raise DataError(f"tokenizer {name} has no end-of-text token (eos_token): use another")
        self.pretrained = pretrained
        self._name = name
        self.learns_chats = False  # or it did: a prompt is then a question
        self.date = DATE
        self.writes_date = False  # the template has asked for the day
        self.other_template = ""  # what of the checkpoint's files transformers does not read
        self.remark = ""  # the same of its rules
        self._generation: dict[str, Any] = {}  # the checkpoint's generation_config.json
        bos = pretrained.bos_token_id
        eos = pretrained.eos_token_id
        # A model without a begin token (GPT-2, Qwen) begins a prompt of no tokens with its end
        # token.
        self._first = [] if bos is None else [bos]
        first = eos if bos is None else bos
        self.token_ids = TokenIds(
            size=len(pretrained), pad=NO_TOKEN, bos=first, eos=eos, mask=NO_TOKEN
        )
        self.reader = TextReader(
            backend=pretrained.backend_tokenizer, special=pretrained.all_special_ids
        )
        self.vocabularies = {"text": self.token_ids}

    @staticmethod
    def of(choice: TokenizerChoice, cache_dir: str) -> CausalTokenizer:
        """Load a pretrained model's, or train one on public sentences. Raises DataError."""
        if isinstance(choice, PretrainedTokenizer):
            return CausalTokenizer._of_checkpoint(choice)
        from transformers import PreTrainedTokenizerFast

        # The mask token of trained tokenizers is for models that fill gaps; a causal one needs
        # none.
        pad, bos, eos, _, unknown = SPECIAL_TOKENS
        backend = public_tokenizer(choice, cache_dir).backend
        made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=backend, pad_token=pad, bos_token=bos, eos_token=eos,
            unk_token=unknown, clean_up_tokenization_spaces=False,
        )  # fmt: skip
        return CausalTokenizer(pretrained=made, name=repr(choice))

    @staticmethod
    def _of_checkpoint(choice: PretrainedTokenizer) -> CausalTokenizer:
        found = CausalTokenizer(pretrained=choice.load(), name=choice.name_or_path)
        # Read here and not when saving, as the folder may be gone by then.
        found._generation = generation_config(resolve(choice.name_or_path))
        found.remark = choice.replaced_rules(found.pretrained.backend_tokenizer)
        folder = Path(resolve(choice.name_or_path)).expanduser()
        own, other = folder / TEMPLATE_FILE, folder / "tokenizer_config.json"
        # transformers reads the file, as it is newer than the key. Both may stand there after
        # somebody edited one of them.
        if own.exists() and other.exists():
            written = read_json(other).get("chat_template")
            if written is not None and written != own.read_text("utf-8"):
                found.other_template = (
                    f"the chat template is of {TEMPLATE_FILE}: the other one in {other.name} "
                    "is not read"
                )
        return found

    def lost(self, texts: Iterable[str]) -> list[str]:
        """Return a remark on characters of texts that no token stands for, if there are any."""
        if not (found := self.reader.lost(texts)):
            return []
        shown = listed([quoted(char) for char, _ in found.most_common(5)])
        said = f"{found.total():,} characters are lost, for which {self._name} has no token"
        return [f"{said} ({shown}{' …' if len(found) > 5 else ''})"]

    @staticmethod
    def load(folder: Path) -> CausalTokenizer:
        found = CausalTokenizer._of_checkpoint(PretrainedTokenizer(str(folder)))
        found.learns_chats = (folder / CHATS_FILE).exists()
        return found

    def save(self, folder: Path) -> None:
        """Write it for transformers, with the tokens at which a model that learned by it ends."""
        # What is written is served: it names no code, whatever the folder did that it came from.
        for key in [key for key in self.pretrained.init_kwargs if key in NAMES_CODE]:
            del self.pretrained.init_kwargs[key]
        self.pretrained.save_pretrained(folder)
        given = {key: value for key, value in self._generation.items() if key not in NAMES_CODE}
        generation = {**given, "eos_token_id": sorted(self.ends)}
        (folder / GENERATION_FILE).write_text(json.dumps(generation, indent=2) + "\n", "utf-8")
        if self.learns_chats:
            said = "The model has learned chats: xcloud generate takes a text as a question.\n"
            (folder / CHATS_FILE).write_text(said, "utf-8")

    @property
    def ends(self) -> frozenset[int]:
        """Tokens at which a text ends: the end token, those that the checkpoint names, and what
        ends an answer in its chat template, if chats are learned."""
        # A number, a list of numbers, or nothing: what transformers takes.
        named = self._generation.get("eos_token_id")
        found = [self.token_ids.eos, *(named if isinstance(named, list) else [named])]
        if self.learns_chats:
            found.append(self._end_of_turn())
        return frozenset(token for token in found if isinstance(token, int))

    @property
    def not_followed(self) -> str:
        """Say what generation_config.json asks for that changes which token is chosen, and that
        xcloud does not do. Nothing if there is none."""
        asked = [
            f"{key}={json.dumps(value)[:60]}"
            for key, value in self._generation.items()
            # Such values are how transformers leaves a rule out.
            if key not in _FOLLOWED and value not in (None, False, 0, 1, "", [], {})
        ]
        if not asked:
            return ""
        return (
            f"{GENERATION_FILE} of the checkpoint asks for what is not done here: {listed(asked)}"
        )

    def _end_of_turn(self) -> int | None:
        """Return the first special token that the template writes behind an answer, if any."""
        # Any content would do that no template writes itself; a digit stands alone as a token
        # almost everywhere.
        content = "7"
        question = {"role": "user", "content": content}
        answer = {"role": "assistant", "content": content}
        try:
            written = self.render([question, answer], ask=False, where="end of a turn")
        except DataError:  # it wants other turns: then the end of a text has to do
            return None
        after = self.reader.encode_written([written.rpartition(content)[2]])[0]
        # Some checkpoints mark the end of a turn as special without naming it among their special
        # tokens (<|eot_id|>).
        added = self.pretrained.added_tokens_decoder
        special = {*self.pretrained.all_special_ids, *(n for n, t in added.items() if t.special)}
        return next((token for token in after if token in special), None)

    def samples(
        self, rows: Rows, max_length: int, where: str
    ) -> tuple[list[list[Document]], Fitted]:
        """Return the packed documents, and the parts of them that fitted. Raises DataError if
        nothing is to be guessed.

        where: the place that messages name.
        """
        chats = chats_of(rows)
        # Set before the first chat is written: a model that learned chats takes a prompt as a
        # question.
        self.learns_chats |= bool(chats)
        remarks = self.check_is_written(chats, where)
        documents = self.texts(rows.texts.get(TEXT, ()))
        documents += [
            self.chat(
                chat.messages,
                where=f"{where}, chat {n}",
                given=chat.given,
                max_length=max_length,
            )
            for n, chat in enumerate(chats, start=1)
        ]
        found = fitted(documents, max_length=max_length, split=not chats)
        if not found.pieces:
            said = f"nothing to guess in {found.num:,} {'chats' if chats else 'texts'}: "
            said += "their prompts fill" if chats else "they are too short for"
            raise DataError(f"{where}: {said} task.max_length={max_length}")
        return pack(found.pieces, max_length=max_length), found._replace(remarks=remarks)

    def check_is_written(self, chats: Sequence[Chat], where: str) -> list[str]:
        """Return remarks on keys of messages that the template never writes. Raises DataError for
        one without which a message means something else: an answer that calls a tool would be
        empty, and the model would learn to end there."""
        tried = Counter[str]()
        num = Counter[str]()
        first: dict[str, int] = {}
        written = {"role", "content"}
        # A key is tried until the template has written it once, or MAX_TRIES messages have shown
        # no trace of it: each try writes the chat twice.
        for number, chat in enumerate(chats, start=1):
            for key, lacking in _lacking_each(chat):
                if key in written:
                    continue
                num[key] += 1
                first.setdefault(key, number)
                # `where` ends in the split's name; a remark stands beside those of other splits.
                if tried[key] < MAX_TRIES:
                    tried[key] += 1
                    if self._differ(chat, lacking, where):
                        written.add(key)
        split = where.rpartition(", ")[2]
        remarks = []
        ends = sum(chat.messages[-1]["role"] != "assistant" for chat in chats)
        if ends:
            said = "continue after their last answer: what follows it is not learned"
            remarks.append(f"{split}: {ends:,} of {len(chats):,} chats {said}")
        answers = [m for chat in chats for m in chat.messages if m["role"] == "assistant"]
        # They say, call and think nothing.
        if empty := sum(
            not (one["content"].strip() or any(one.get(key) for key in MEANT)) for one in answers
        ):
            said = "answers are empty: the model learns to end at once"
            remarks.append(f"{split}: {empty:,} {said}")
        unwritten = sorted(num.keys() - written)
        for key in unwritten:
            if key in MEANT:
                raise DataError(
                    f"{where}: the chat template of {self._name} never writes {key!r}, which "
                    f"stands {num[key]:,} times (first in chat {first[key]}): the model would "
                    "learn to answer without it. Take a tokenizer whose template writes it, or "
                    f"remove {key!r} from the rows"
                )
        return remarks + [
            f"{split}: the chat template does not write {quoted(key)} of {num[key]:,} messages"
            for key in unwritten
        ]

    def _differ(self, chat: Chat, other: Chat, where: str) -> bool:
        """Return whether the template writes two chats differently, or cannot write the other."""
        text = self.render(chat.messages, ask=False, where=where, given=chat.given)
        try:
            return text != self.render(other.messages, ask=False, where=where, given=other.given)
        except DataError:
            return True

    def texts(self, texts: Sequence[str]) -> list[Document]:
        """Return texts as documents: begin token (where there is one), text, end token, all to be
        guessed."""
        found = [[*self._first, *ids, self.token_ids.eos] for ids in self.reader.encode(texts)]
        return [Document(ids, learned=[True] * len(ids)) for ids in found]

    def chat(
        self,
        messages: Messages,
        where: str,
        num_given: int = 0,
        given: Mapping[str, Any] = {},
        max_length: int | None = None,
    ) -> Document:
        """Return the text that the tokenizer's own template writes, as a document.

        Only the assistant's turns behind the first `num_given` messages are to be guessed. The
        text after the last of them is left out. Each prompt is split into tokens as it is when a
        model is asked, and only the template writes special tokens.

        given: the input of the template beside the messages: tools, documents.
        max_length: turns that begin after so many tokens may be left out. Each turn is written and
            split from the beginning of the chat on, so time grows with the square of the turns.
        """
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            roles = listed(dict.fromkeys(quoted(message["role"]) for message in messages))
            raise DataError(
                f"{where}: no message of the role 'assistant', so nothing to learn; its roles are "
                f"{roles}"
            )
        # The chat is written twice for each answer, up to the question and behind the answer: what
        # the second adds to the first is what the model is to write.
        pieces: list[tuple[str, bool]] = []
        done = ""
        for count, number in enumerate(turns, start=1):
            asked = self.render(messages[:number], ask=True, where=where, given=given)
            answered = self.render(messages[: number + 1], ask=False, where=where, given=given)
            # Templates that drop the thinking of earlier turns, for example, write another
            # beginning than the one that was learned.
            if not (asked.startswith(done) and answered.startswith(asked)):
                raise DataError(
                    f"{where}: the chat template of {self._name} rewrites earlier turns when "
                    "an answer is added; give chats with one answer each, or another tokenizer"
                )
            learned = number >= num_given
            pieces += [(asked[len(done) :], False), (answered[len(asked) :], learned)]
            done = answered
            # Cutting into tokens costs as much as the whole chat so far, so it is done a number of
            # times that grows with the logarithm of the turns.
            if max_length is None or count & (count - 1):  # only after 1, 2, 4, 8, ...
                continue
            if len(self._cut_into_tokens(pieces).ids) > max_length:
                break
        return self._cut_into_tokens(pieces)

    def _cut_into_tokens(self, pieces: Sequence[tuple[str, bool]]) -> Document:
        """Return prompts and answers in turn, each with whether it is to be guessed, as one
        document."""
        encoded = self.reader.encode_written([text for text, _ in pieces])
        learned = [flag for ids, (_, flag) in zip(encoded, pieces, strict=True) for _ in ids]
        return Document(ids=[*chain.from_iterable(encoded)], learned=learned)

    def continued(self, prompt: str, answer: str) -> Document:
        """Return a plain text of which the answer and the end token are to be guessed. The prompt
        is split into tokens as it is when a model continues it."""
        # Special pieces in a plain text are text, here as in `texts`: only chat templates write
        # special tokens.
        escaped = [self.reader.escape(text) for text in (prompt, answer)]
        asked, answered = self.reader.encode_written(escaped)
        given = [*self._first, *asked]
        guessed = [*answered, self.token_ids.eos]
        return Document(
            ids=[*given, *guessed], learned=[False] * len(given) + [True] * len(guessed)
        )

    def prompt(self, text: str, system: str | None = None, plain: bool = False) -> list[int]:
        """Return the input that a model continues: a chat with one question if it has learned
        chats and `plain` is not asked for, else the begin token and the text.

        system: the chat's first message, as in training.
        """
        if not self.learns_chats or plain:
            if system is not None:
                raise DataError("a system message needs a chat: this prompt is plain text")
            # A model must be asked something; without a begin token the end of a text is what
            # texts begin behind.
            return self.encode(text, begins=True) or [self.token_ids.eos]
        first = [] if system is None else [{"role": "system", "content": system}]
        return self.asked([*first, {"role": "user", "content": text}])

    def asked(
        self, messages: Messages, where: str = "prompt", given: Mapping[str, Any] = {}
    ) -> list[int]:
        """Return a chat up to the place where the assistant is to answer."""
        return self.encode_written(self.render(messages, ask=True, where=where, given=given))

    def encode(self, text: str, begins: bool) -> list[int]:
        """Return the tokens of a plain text.

        begins: true to put the begin token before it, if there is one.
        """
        return [*(self._first if begins else ()), *self.reader.encode([text])[0]]

    def encode_written(self, text: str) -> list[int]:
        """Return the tokens of what `render` has written, which may end in a plain text."""
        return self.reader.encode_written([text])[0]

    @cached_property
    def _writes_begin(self) -> bool:
        """Return True if the tokenizer itself begins a text with the begin token."""
        return bool(self._first) and self.pretrained.encode("")[:1] == self._first

    def encode_itself(self, text: str) -> list[int]:
        """Return the tokens of a plain text, behind the begin token only where the tokenizer
        itself writes it or the text has it."""
        begin = self.pretrained.bos_token
        # Harnesses put the begin token's text in front themselves; as a text it would be cut into
        # pieces.
        if begin and text.startswith(begin):
            return self.encode(text.removeprefix(begin), begins=True)
        return self.encode(text, begins=self._writes_begin)

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of those texts that are special tokens, which `decode` leaves out."""
        added = self.pretrained.added_tokens_decoder
        special = {token.content: number for number, token in added.items() if token.special}
        return frozenset(special[text] for text in texts if text in special)

    @cached_property
    def digest(self) -> int:
        """A 32-bit digest of vocabulary, rules and chat template."""
        described = (self.token_ids, self._first, self.pretrained.chat_template)
        return digest_32(f"{described!r} {self.pretrained.backend_tokenizer.to_str()}")

    def decode(self, ids: Iterable[int], as_written: bool = False) -> str:
        """Return the text of tokens. as_written: as it grows token by token, so without what some
        tokenizers clean up afterwards (do n't), which changes letters before."""
        how: dict[str, Any] = {"clean_up_tokenization_spaces": False} if as_written else {}
        return str(self.pretrained.decode(list(ids), skip_special_tokens=True, **how))

    def render(
        self, messages: Messages, ask: bool, where: str, given: Mapping[str, Any] = {}
    ) -> str:
        """Return what the chat template writes.

        ask: true to write up to where the assistant is to answer.
        given: the input of the template beside the messages: tools, documents.
        """
        # What a user wrote is escaped, keys too, and what the template adds is not.
        plain = [self.reader.escape(dict(message)) for message in messages]
        how = {**self.pretrained.special_tokens_map, "add_generation_prompt": ask}
        how |= self.reader.escape(dict(given))
        try:
            # Of several templates the one named tool_use writes chats with tools.
            template = self.pretrained.get_chat_template(tools=given.get("tools"))
        except ValueError as error:
            named = self.pretrained.chat_template
            there = f"only templates named {listed(sorted(named))}" if named else "none"
            raise DataError(
                f"{where}: a chat needs a chat template, and {self._name} has {there}: write one "
                f"to {TEMPLATE_FILE} beside tokenizer.json, or set task.tokenizer to another"
            ) from error
        try:
            text, dated = template_process().render(
                template, messages=plain, settings=how, date=self.date
            )
        except TemplateError as error:
            why = quoted(str(error))
            said = f"the chat template of {self._name} cannot write it: {why}"
            raise DataError(f"{where}: {said}") from error
        # The day is part of what is learned, so a run tells whether any template asked for it.
        self.writes_date |= dated
        return text

    def begun(self, messages: Messages, where: str) -> str:
        """Return what the chat template writes up to the end of the last message, which is the
        beginning of an answer, as transformers' continue_final_message does."""
        last = messages[-1]
        # A mark at the end of the last message is looked for in what is written: where it stands
        # the answer goes on.
        marked = {**last, "content": f"{last['content']}{_MARK}"}
        written = self.render([*messages[:-1], marked], ask=False, where=where)
        place = written.rfind(_MARK.strip())
        if place < 0:
            raise DataError(
                f"{where}: the chat template of {self._name} does not write the end of the last "
                "message, so nothing can continue it (gen_prefix)"
            )
        # A template that strips contents takes the mark's last space, so the answer's own would
        # have gone, too.
        keeps_spaces = written[place:].startswith(_MARK)
        return written[:place] if keeps_spaces else written[:place].rstrip()


@settings("task", kw_only=True)
class LanguageModelling(TextTask):
    """Documents, packed into samples of at most max_length tokens. A document that is longer is
    cut into several; a chat that is longer loses its end.

    tokenizer: the model's own, with its chat template; a TrainedTokenizer is trained on public
        sentences.
    column: the name of the column with texts or chats. None: messages, or else text. A chat's row
        may also have system, the text of its first message, and tools and documents, which its
        template gets.
    date: the day that it is for a chat template that writes one (strftime_now): the same in all
        clouds, when the run is resumed, and when it is used.
    A cloud that sees the labels but not the text reads the same file and keeps the answers only.
    """

    name: ClassVar[str] = "language_modelling"
    used_as: ClassVar[str] = "causal language model"
    agreed_names: ClassVar[tuple[str, ...]] = ("date",)
    unit: ClassVar[str] = "texts"  # what rows are that hold no chats, for messages
    form: ClassVar[Form] = Form(
        expected="train.txt (plain text) or train.jsonl (text or messages)",
        rows="texts or chats",
        endings={"txt": "text", "jsonl": "json"},
    )
    tokenizer: TokenizerChoice = TrainedTokenizer()
    max_length: Annotated[int, Field(ge=8)] = 128
    column: GivenText | None = None
    date: Annotated[str, Field(pattern=r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$")] = DATE

    def column_of(self, table: RowTable) -> str:
        """Return where the documents of a table stand. Raises DataError for another form."""
        if isinstance(table, TextFile) and table.kind == "text":
            return TEXT
        # The first line tells: a table is of one form, which each row is checked for when it is
        # read.
        there = table.columns()
        for name in (self.column,) if self.column else (MESSAGES, TEXT):
            if name in there:
                return name
        if self.column:
            said = f"no column {self.column!r} (task.column); it has {listed(there)}"
            raise DataError(f"{table.where}: {said}")
        said = f"{table.where}: its keys are {listed(there)}. {FORMS}"
        # The commonest other form has a task of its own.
        if {"chosen", "rejected"} <= {*there}:
            said += " This is preference data: task=preferences learns from it"
            raise DataError(f"{said} (docs/preferences.md); for other forms {CONVERTER}")
        raise DataError(f"{said} Make messages of instructions or conversations: {CONVERTER}")

    def used_keys(self, table: RowTable) -> tuple[str, ...]:
        column = self.column_of(table)
        return (column, *(CHAT_KEYS if column != TEXT else ()))

    def rows_of(self, table: RowTable) -> Rows:
        """Return the documents of a table, one a row, as they stand; empty texts are left out."""
        column = self.column_of(table)
        rows = list(table.rows((column,), keys="task.column", optional=CHAT_KEYS))
        # With task.column=conversations, say, only the cells tell that they are chats.
        if rows and (column == MESSAGES or isinstance(rows[0][0], list)):
            check_is_readable(table)
            chats = [
                chat_of(dict(zip((MESSAGES, *CHAT_KEYS), row, strict=True)), _row(table, number))
                for number, row in enumerate(rows, start=1)
            ]
            return Rows(
                num_rows=len(chats),
                texts={MESSAGES: [c.messages for c in chats], GIVEN: [c.given for c in chats]},
            )
        for number, (cell, *_) in enumerate(rows, start=1):
            if not isinstance(cell, str | None):
                raise DataError(f"{_row(table, number)}: {column!r} is {quoted(cell)}. {FORMS}")
        texts = [cell for cell, *_ in rows if cell and cell.strip()]
        return Rows(num_rows=len(texts), texts={TEXT: texts}, num_empty=len(rows) - len(texts))

    def useless_of(self, rows: Rows) -> Mapping[int, str]:
        """Return the numbers of the rows of which nothing can be learned, with the reason."""
        return {}

    def check_tables(self, tables: SplitTables) -> None:
        every = [table for parts in tables.tables.values() for table in parts[""]]
        kinds = set[bool]()
        for table in every:
            column = self.column_of(table)
            if isinstance(table, TextFile) and table.kind == "text":
                kinds.add(False)
                continue
            # One row a table is looked at before the ranks start; a rank reads them all.
            for row in islice(table.rows((column,), "task.column", CHAT_KEYS), 1):
                kinds.add(isinstance(row[0], list))
                if isinstance(row[0], list) or column == MESSAGES:
                    chat_of(dict(zip((MESSAGES, *CHAT_KEYS), row, strict=True)), _row(table, 1))
        if len(kinds) > 1:
            raise DataError(f"{self.where}: plain texts and chats are mixed; give one kind")

    def check_content(self, tables: SplitTables) -> None:
        """Raise DataError for chats that the template does not write, as ranks would. Files above
        MAX_CHECKED_BYTES and tokenizers of the hub are left to the ranks."""
        every = [table for parts in tables.tables.values() for table in parts[""]]
        # A data set or a tokenizer of the hub would have to be fetched first.
        files = [table.path for table in every if isinstance(table, TextFile)]
        is_small = sum(path.stat().st_size for path in files) <= MAX_CHECKED_BYTES
        is_here = not isinstance(self.tokenizer, PretrainedTokenizer) or self.tokenizer.is_here
        if len(files) < len(every) or not (is_small and is_here):
            return
        rows_of_splits = self.read(frozenset(self.fields)).splits
        # Plain texts need no template, so nothing is left to check.
        if not any(self.chats(rows) for rows in rows_of_splits.values()):
            return
        tokenizer = CausalTokenizer.of(self.tokenizer, self.cache_dir)
        tokenizer.date = self.date
        try:
            for split, rows in rows_of_splits.items():
                chats = self.chats(rows)
                where = f"{self.describe()}, {split}"
                tokenizer.check_is_written(chats, where)
                # check_is_written has looked at all chats for keys; writing all of them, as the
                # ranks will, would take as long as their start.
                for number, chat in enumerate(chats[:MAX_TRIES], start=1):
                    place = f"{where}, chat {number}"
                    tokenizer.chat(
                        chat.messages,
                        where=place,
                        given=chat.given,
                        max_length=self.max_length,
                    )
        finally:
            template_process().close()  # it would stay beside the ranks for the whole run

    def chats(self, rows: Rows) -> list[Chat]:
        """Return the chats of some rows; none where they are plain texts."""
        return chats_of(rows)

    def read(self, fields: frozenset[str]) -> Corpus:
        tables = self.data.find(self.form)
        self.check_tables(tables)
        # Which rows there are must not depend on what a rank sees, so useless ones are found in
        # columns that all ranks read.
        corpus = self.arrange(
            tables, rows_of=self.rows_of, used=self.used_keys, useless_of=self.useless_of
        )
        every = [table for parts in tables.tables.values() for table in parts[""]]
        if self.column is None and any({TEXT, MESSAGES} <= table.seen.keys() for table in every):
            said = "messages are learned, and texts beside them are not (task.column chooses)"
            corpus = replace(corpus, remarks=[*corpus.remarks, said])
        return corpus

    def samples(
        self, tokenizer: CausalTokenizer, rows: Rows, where: str
    ) -> tuple[list[list[Document]], Fitted]:
        """Return the documents of each sample of a split. where: for messages."""
        return tokenizer.samples(rows, self.max_length, where)

    def saved_text(self, folder: Path) -> CausalTokenizer:
        found = CausalTokenizer.load(folder / FOLDER_NAME)
        found.date = self.date
        return found

    def view(self, corpus: Corpus, fields: frozenset[str]) -> LanguageData:
        return LanguageData(task=self, corpus=corpus, fields=fields)

    def test_chats(self, num: int) -> list[Chat]:
        """Return the first chats of the test set, each with its answer."""
        return chats_of(self.read(frozenset({"text"})).splits["test"])[:num]

    def next_command(self, run_dir: Path) -> str | None:
        """Return the command by which the model answers some chats of its test, or continues a
        text. The run itself shows only its loss."""
        learns_chats = (run_dir / MODEL_DIR / FOLDER_NAME / CHATS_FILE).exists()
        asked = "--chats" if learns_chats else '"Once upon"'
        return f"python -m xcloud generate {shlex.quote(str(run_dir))} {asked}"


def scores_of(predictions: Mapping[int, list[int]], documents: Sequence[Sequence[int]]) -> Scores:
    """Return perplexity and the mean loss of these samples. documents: the numbers of the
    documents of each sample of the split."""
    order = sorted(predictions)
    # Millionths of a nat and counts in turn, a pair for each piece (CausalStage.predict).
    found = [np.reshape(predictions[i], (-1, 2)) / (1e6, 1) for i in order]
    for of_sample in found:
        of_sample[of_sample[:, 0] < 0, 0] = math.nan  # NOT_FINITE
    of_piece = [number for i in order for number in documents[i]]
    by_document = np.zeros((max(of_piece) + 1, 2))
    # Pieces of one document are added up first: they are no independent samples, so the error is
    # over documents.
    np.add.at(by_document, of_piece, np.concatenate(found))
    nats, tokens = by_document.T
    loss = float(nats.sum() / tokens.sum())
    # The error of a mean over tokens, where documents differ in length (ratio_error).
    error = ratio_error(nats, below=tokens)
    perplexity = math.inf if loss > LARGEST_LOSS else math.exp(loss)
    samples = {}
    for i, pieces in zip(order, found, strict=True):
        # d exp(x) = exp(x) dx below.
        nats, tokens = pieces.sum(0)
        samples[i] = {"loss": float(nats / tokens), "tokens": int(tokens)}
    return Scores(
        values={"perplexity": perplexity, "loss": loss},
        errors={"perplexity": perplexity * error, "loss": error},
        samples=samples,
    )


class LanguageData(View[LanguageModelling]):
    """One rank's view (TaskData): of fields that may not be seen here nothing was kept."""

    def __init__(self, task: LanguageModelling, corpus: Corpus, fields: frozenset[str]) -> None:
        self._tokenizer: CausalTokenizer | None = None
        self.documents: dict[DataSplit, list[list[int]]] = {}  # their numbers, by sample
        columns: dict[str, dict[DataSplit, TokenTable]] = {name: {} for name in task.fields}
        packed: list[str] = []
        remarks: list[str] = []
        cuts: dict[str, dict[DataSplit, Cut]] = {}
        # A rank that sees neither text nor labels has read no rows, and needs no tokenizer.
        if any(rows.texts for rows in corpus.splits.values()):
            self._tokenizer = CausalTokenizer.of(task.tokenizer, task.cache_dir)
            self._tokenizer.date = task.date
            for split, rows in corpus.splits.items():
                name = "chats" if MESSAGES in rows.texts else task.unit
                samples, found = task.samples(
                    self._tokenizer, rows, where=f"{task.describe()}, {split}"
                )
                self.documents[split] = [[document.number for document in of] for of in samples]
                for field, table in columns_of(samples).items():
                    columns[field][split] = table
                num_tokens = columns["text"][split].num_tokens
                # Counted over fields that this rank may not see, too: which documents fit follows
                # from texts, and only numbers are kept.
                full = num_tokens / (len(samples) * task.max_length)
                used = found.num - found.num_left_out - sum(found.useless.values())
                packed.append(
                    f"{split} {used:,} {name} packed into "
                    f"{len(samples):,} samples of {task.max_length} ({num_tokens:,} tokens, "
                    f"{100 * full:.0f} % full)"
                )
                for what, num in (("left out", found.num_left_out), ("cut", found.num_cut)):
                    by_split = cuts.setdefault(f"{name} {what}", {})
                    by_split[split] = Cut(num, of=found.num, setting="task.max_length")
                for why, num in found.useless.items():
                    by_split = cuts.setdefault(f"{name} left out: {why}", {})
                    by_split[split] = Cut(num, of=found.num, setting="they teach nothing")
                remarks += found.remarks
                texts = [*rows.texts.get(TEXT, ())]
                # Contents as they stand in the messages; what a template makes of them is not
                # looked at.
                texts += [str(m["content"]) for chat in task.chats(rows) for m in chat.messages]
                remarks += [f"{split}: {said}" for said in self._tokenizer.lost(texts)]
            # Rows that were left out before any was drawn (TextTask.arrange).
            for why, of_splits in corpus.useless.items():
                name = "chats" if MESSAGES in corpus.splits["train"].texts else task.unit
                cuts[f"{name} left out: {why}"] = {**of_splits}
            if self._tokenizer.learns_chats and self._tokenizer.other_template:
                remarks.append(self._tokenizer.other_template)
            if self._tokenizer.writes_date:
                remarks.append(f"the chat template writes the date {task.date} (task.date)")
        sizes = {split: len(samples) for split, samples in self.documents.items()}
        super().__init__(
            task, corpus, fields, {"text": self._tokenizer}, columns, sizes, remarks=remarks,
            in_words=", ".join(packed), cuts=cuts,
        )  # fmt: skip

    @property
    def tokenizer_here(self) -> CausalTokenizer:
        """The tokenizer of text and labels, of a rank that sees either."""
        assert self._tokenizer is not None
        return self._tokenizer

    @property
    def _tokenizer_digests(self) -> dict[str, str]:
        """Return digests of the tokenizer, also for a rank that sees labels alone: they are its
        token ids."""
        if self._tokenizer is None or not self._fields:
            return {}
        return {"the text tokenizer": f"{self._tokenizer.digest:08x}"}

    def sentences(self, field: str) -> Sequence[Sequence[int]]:
        """Return the tokens of each training sample, special ones among them."""
        self.tokenizer(field)
        return list(self._columns[field]["train"])

    def weight(self, ids: Tensor) -> float:
        check_visible("label", there=self._fields)
        # A label that is not guessed is NO_LABEL, which also fills up the table.
        labels = self._columns["label"]["train"]
        assert isinstance(labels, TokenTable)
        return float(labels.num_unlike_pad[ids].sum())

    def score(self, split: DataSplit, predictions: dict[int, list[int]]) -> Scores:
        """Return perplexity and the mean loss in nats of the guessed tokens of these samples;
        errors are over documents. Predicted are millionths of a nat and tokens of each document,
        or piece of one, in a sample."""
        self.check_predictions(split, predictions)
        return scores_of(predictions, documents=self.documents[split])

    def signature(self) -> dict[str, str]:
        over = "over all guessed tokens of the tokenizer, end tokens among them"
        return {"perplexity": f"exp of the mean loss {over}", "loss": f"nats, mean {over}"}

    def sample_outputs(
        self, split: DataSplit, scores: Scores, count: int, follow: Follow = no_text
    ) -> str:
        """Return the first documents that were scored: of chats what was asked, what the model
        answers and what was expected; of plain texts what was to be guessed. Chats are left out
        where the model can't answer here: an expected answer alone says nothing."""
        found = chain.from_iterable(self._documents_of(split, ident) for ident in scores.samples)
        lines = []
        for document in islice(found, count):
            shown = document
            if QUESTION in document:
                answer = self._answer(document[QUESTION], follow)
                if answer is None:
                    # No model follows here: neither do the other chats get an answer.
                    break
                shown = {QUESTION: document[QUESTION], ANSWER: answer, **document}
            for name, tokens in shown.items():
                text = self.tokenizer_here.decode(tokens).rstrip().lstrip("\r\n")
                lines.append(f"{name:10} " + text.replace("\n", "\n" + 11 * " "))
            lines.append("")
        return "\n".join(lines)

    def _answer(self, question: list[int], follow: Follow) -> list[int] | None:
        """Return the tokens of the model's answer, or None where it can write none."""
        # What ends a text is written last, and not shown.
        ends = self.tokenizer_here.ends
        written = []
        for token in islice(follow(question), MAX_ANSWER):
            written.append(token)
            if token in ends:
                break
        return [token for token in written if token not in ends] if written else None

    def _documents_of(self, split: DataSplit, ident: int) -> Iterator[dict[str, list[int]]]:
        """Yield the documents of a sample: tokens by the names that they are shown under."""
        # Labels alone show which answers there are, not where a document ends.
        labels = self._columns["label"][split][ident]
        if "text" not in self._fields:  # then not even where a document ends
            if self.tokenizer_here.learns_chats:
                return  # nor what was asked
            for is_learned, run in groupby(labels, lambda token: token != NO_LABEL):
                if is_learned:
                    yield {TEXT: list(run)}
            return
        texts, types = (self._columns[name][split][ident] for name in ("text", "types"))
        rows = zip(texts, types, labels, strict=True)
        for _, document in groupby(rows, lambda row: row[1]):
            tokens, _, learned = map(list, zip(*document, strict=True))
            if not self.tokenizer_here.learns_chats:
                yield {TEXT: tokens}
                continue
            first = next(n for n, token in enumerate(learned) if token != NO_LABEL)
            # A question ends with the place where the first label stands: a label is the token
            # that follows.
            answer = list(takewhile(lambda token: token != NO_LABEL, learned[first:]))
            yield {QUESTION: tokens[: first + 1], EXPECTED: answer}

    def save_tokenizers(self, folder: Path) -> None:
        """Write tokenizer/ as transformers loads it, where text or labels are seen."""
        if self._tokenizer is not None and self._fields:
            self._tokenizer.save(folder / FOLDER_NAME)


def _lacking_each(chat: Chat) -> Iterator[tuple[str, Chat]]:
    """Yield each key of a chat's messages, and of what is given beside them, with the chat that
    lacks it in that place."""
    messages, given = chat
    # role and content are what a message is.
    for number, message in enumerate(messages):
        for key in message.keys() - {"role", "content"}:
            lacking = {name: one for name, one in message.items() if name != key}
            yield key, Chat([*messages[:number], lacking, *messages[number + 1 :]], given)
    for key in given:
        yield key, Chat(messages, {name: one for name, one in given.items() if name != key})


def _row(table: RowTable, number: int) -> str:
    return f"{table.where}, row {number}"


def chats_of(rows: Rows) -> list[Chat]:
    """Return the chats of some rows; none where they are plain texts."""
    messages = rows.texts.get(MESSAGES, ())
    return [Chat(*of) for of in zip(messages, rows.texts.get(GIVEN, ()), strict=True)]


def check_is_readable(table: RowTable) -> None:
    """Raise DataError for a table of chats with keys that change what they mean, and that nothing
    here reads."""
    if odd := sorted(table.seen.keys() & UNREADABLE):
        said = f"its key {quoted(odd[0])} is not read here, and chats mean something else without"
        raise DataError(f"{table.where}: {said} it. Remove it if they are to be learned like that")


def chat_of(cells: Mapping[str, Any], where: str) -> Chat:
    """Return the chat of a row. Raises DataError that names what is of another form.

    cells: the row's messages, and its system, tools and documents, if any.
    """
    messages: Messages = messages_of(cells[MESSAGES], where)
    system = cells.get(SYSTEM)
    if isinstance(system, str) and system.strip():
        # An empty system says nothing, as none does.
        messages = with_system(system, messages, where)
    elif system:
        raise DataError(f"{where}: system is {quoted(system)}, which is no text")
    return Chat(messages, given=given_of(cells, where))


def given_of(cells: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what a template gets beside the messages of a row: lists of objects, which may be
    written as JSON texts."""
    # Tables store lists of objects with different keys as texts.
    given = {}
    for name in TEMPLATE_KEYS:
        value = cells.get(name)
        if isinstance(value, str) and value.strip():
            try:
                value = parsed_json(value)
            except ValueError as error:
                raise DataError(f"{where}: {name} is a text that is no JSON ({error})") from error
        if not value:
            continue
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise DataError(f"{where}: {name} is {quoted(value)}, which is no list of objects")
        given[name] = value
    return given


def with_system(system: str, messages: Messages, where: str) -> Messages:
    """Return messages behind one of the role system. Raises DataError if they have another."""
    first = {"role": SYSTEM, "content": system}
    if messages and messages[0]["role"] == SYSTEM:
        # Data sets that have the key often repeat it as the first message.
        if messages[0]["content"].strip() == system.strip():
            return messages
        raise DataError(f"{where}: its key system and its first message, of that role, differ")
    return [first, *messages]


def messages_of(cell: Any, where: str, forms: str = FORMS) -> list[dict[str, Any]]:
    """Return messages whose role and content are texts. Raises DataError that names what is of
    another form. A message that only calls tools may have no content.

    forms: the words that say which forms are read.
    """
    if not isinstance(cell, list) or not cell:
        raise DataError(f"{where}: {quoted(cell)} is no list of messages. {forms}")
    found = []
    for number, one in enumerate(cell, start=1):
        if not isinstance(one, dict):
            raise DataError(f"{where}: message {number} is {quoted(one)}. {forms}")
        # Tables have every key in every message, empty where the message has none.
        message = {key: value for key, value in one.items() if value is not None}
        # A message that calls a tool says nothing beside it.
        if message.get("tool_calls") or message.get("function_call"):
            message.setdefault("content", "")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                said = f"{key} of message {number} is {quoted(one.get(key))}, which is no text"
                raise DataError(f"{where}: {said}. {forms} Others are converted: {CONVERTER}")
        for key in NOT_LEARNED:
            # Left in, a wrong answer that was marked so would be learned.
            if not message.get(key, True):
                said = f"message {number} has {key}={message[key]}: every answer of a chat is "
                said += "learned; make one chat of each that is to be"
                raise DataError(f"{where}: {said}")
        found.append(message)
    return found


def is_chat(messages: Any) -> bool:
    return isinstance(messages, list) and all(isinstance(one, dict) for one in messages)


def read_chats(path: Path) -> list[Chat]:
    """Return the chats of a file, one {"messages": […]} a line, and say what of it is not used.
    Raises DataError."""
    file = TextFile(name=path.name, kind="json", paths={"": path})
    rows = file.rows((MESSAGES,), keys="--chats", optional=CHAT_KEYS)
    chats = [
        chat_of(dict(zip((MESSAGES, *CHAT_KEYS), row, strict=True)), f"{path.name}, chat {number}")
        for number, row in enumerate(rows, start=1)
    ]
    if not chats:
        raise DataError(f"{path}: there is no chat in it")
    # Known only after all rows were read: keys are counted as they are seen.
    check_is_readable(file)
    for remark in unread_keys([file], used=lambda _: (MESSAGES, *CHAT_KEYS)):
        say(remark, error=True)
    return chats


@settings("task.data", kw_only=True)
class DemoStories(Demo):
    """Embedded English paragraphs of four events.

    num_train, num_dev, num_test: the number of texts of each split.
    """

    rows = "texts or chats"
    title = "demo stories"
    order = ("dev", "test", "train")
    num_train: Size = 3_000
    num_dev: Size = 200
    num_test: Size = 400

    def find(self, form: Form) -> SplitTables:
        # dev and test come first (order), so they are the same for every num_train.
        told = stories(self.total)
        return self.generated((TEXT,), rows=[(one.text,) for one in told], samples=told)

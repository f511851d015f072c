"""Language modelling: documents and chats into packed samples, what is seen, the score."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.configs import build
from tests.corpora import given
from tests.small_tokenizer import TEMPLATE, write_chat_tokenizer
from xcloud import use
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.model import NO_LABEL, NO_TOKEN, NOT_FINITE, Scores
from xcloud.tasks.chat_template import template_process
from xcloud.tasks.language_modelling import (
    CausalTokenizer,
    DemoStories,
    Document,
    LanguageData,
    LanguageModelling,
    columns_of,
    fitted,
    pack,
    read_chats,
)
from xcloud.tasks.scores import ratio_error
from xcloud.tasks.sources import Folder, Hub, HubTable, list_files
from xcloud.tasks.tokenizer import PretrainedTokenizer, TrainedTokenizer

ALL = frozenset({"text", "types", "label"})
CHAT = [
    {"role": "user", "content": "Who came?"},
    {"role": "assistant", "content": "Ana."},
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "On Monday."},
    {"role": "user", "content": "Thanks"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_chat_tokenizer(path)
    return path


def task(data: Path, tokenizer: Path, **settings: Any) -> LanguageModelling:
    return given(LanguageModelling, Folder, 
        path=str(data), tokenizer=PretrainedTokenizer(str(tokenizer)),
        **({"max_length": 64} | settings),
    )  # fmt: skip


def written(data: Path, name: str, *rows: object) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (data / name).write_text("\n".join(lines) + "\n")


def chats(data: Path, tokenizer: Path, fields: frozenset[str] = ALL, **settings: Any):
    for split in ("train", "dev", "test"):
        written(data, f"{split}.jsonl", {"messages": CHAT})
    return task(data, tokenizer, **settings).load(fields, 0)


def learned(data: LanguageData) -> list[int]:
    label = data.batch("train", torch.tensor([0]))["label"][0]
    return label[label != NO_LABEL].tolist()


def test_only_answers_are_guessed_in_a_chat(tmp_path: Path, folder: Path) -> None:
    data = chats(tmp_path, folder)
    tokenizer = CausalTokenizer.load(folder)
    batch = data.batch("train", torch.tensor([0]))
    text, label = batch["text"][0], batch["label"][0]

    rendered = tokenizer.pretrained.decode(text)
    assert rendered == (
        "<user>Who came?</s><assistant>Ana.</s><user>When?</s><assistant>On Monday.</s>"
    ), "what follows the last answer is left out"
    assert tokenizer.pretrained.decode(learned(data)) == "Ana.</s>On Monday.</s>"
    places = (label != NO_LABEL).nonzero()[:, 0]
    assert torch.equal(label[places], text[places + 1]), "each guesses the token behind it"


def test_a_chat_is_rendered_as_the_tokenizer_of_transformers_does(
    folder: Path, tmp_path: Path
) -> None:
    tokenizer = CausalTokenizer.load(folder)
    theirs = tokenizer.pretrained.apply_chat_template(CHAT[:4], return_dict=False)
    assert tokenizer.chat(CHAT[:4], "here").ids == theirs
    asked = tokenizer.pretrained.apply_chat_template(
        CHAT[:1], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(tokenizer.prompt("Who came?")) == "Who came?", "it learns plain texts"
    tokenizer.learns_chats = True
    assert tokenizer.prompt("Who came?") == asked
    tokenizer.save(tmp_path)
    assert CausalTokenizer.load(tmp_path).prompt("Who came?") == asked


def test_a_cloud_without_the_text_keeps_the_answers_and_one_without_labels_none(
    tmp_path: Path, folder: Path
) -> None:
    whole = chats(tmp_path, folder)
    answers = chats(tmp_path, folder, frozenset({"label"}))
    text = chats(tmp_path, folder, frozenset({"text", "types"}))

    assert answers.batch("train", torch.tensor([0])).keys() == {"ids", "label"}
    assert learned(answers) == learned(whole)
    assert not answers.vocabularies
    scores = answers.score("test", {0: [10, 2]})
    assert answers.sample_outputs("test", scores, 1) == "", "an expected answer alone says nothing"
    assert text.batch("train", torch.tensor([0])).keys() == {"ids", "text", "types"}
    for refused in (lambda: answers.sentences("text"), lambda: text.weight(torch.tensor([0]))):
        with pytest.raises(DataError, match="visible here"):
            refused()
    assert whole.fingerprint() == answers.fingerprint() == text.fingerprint()


def test_a_cloud_that_sees_nothing_is_told_the_sizes(tmp_path: Path, folder: Path) -> None:
    sizes = {"train": 5, "dev": 1, "test": 2}
    data = task(tmp_path / "nowhere", folder, sizes=sizes).load(frozenset(), 0)
    assert data.num_samples("train") == 5
    assert data.batch("train", torch.tensor([3])).keys() == {"ids"}
    with pytest.raises(DataError, match=r"task\.sizes differ"):
        chats(tmp_path, folder, sizes=sizes)


def test_plain_text_is_guessed_whole_and_ends_with_the_end_token(
    tmp_path: Path, folder: Path
) -> None:
    for split in ("train", "dev", "test"):
        written(tmp_path, f"{split}.txt", "One line.", "Another.", "", "Second text.")
    batch = task(tmp_path, folder).load(ALL, 0).batch("train", torch.tensor([0]))
    tokenizer = CausalTokenizer.load(folder)
    text, types, label = (batch[name][0] for name in ("text", "types", "label"))

    assert tokenizer.pretrained.decode(text) == "One line.\nAnother.</s>Second text.</s>"
    first = text[types == 0]
    assert tokenizer.pretrained.decode(first) == "One line.\nAnother.</s>"
    assert label[: len(first)].tolist() == [*first[1:].tolist(), NO_LABEL]


def test_a_folder_without_a_tokenizer_is_named_before_any_rank_starts(tmp_path: Path) -> None:
    task = given(LanguageModelling, DemoStories, tokenizer=PretrainedTokenizer(str(tmp_path)))
    with pytest.raises(DataError, match="holds no tokenizer"):
        task.check()
    (tmp_path / "tokenizer.json").write_text("{}")
    task.check()


@pytest.mark.parametrize(("document", "count"), [("blank_line", 2), ("line", 3), ("file", 1)])
def test_what_a_document_is_can_be_said(tmp_path: Path, document: str, count: int) -> None:
    for split in ("train", "dev", "test"):
        written(tmp_path, f"{split}.txt", "One line.", "Another.", "", "", "Second text.")
    rows = (
        given(LanguageModelling, Folder, path=str(tmp_path), document=document)
        .read(ALL)
        .splits["train"]
    )
    assert rows.num_rows == count


def document(size: int, first: int = 0) -> Document:
    return Document(list(range(first, first + size)), [True] * size)


def test_no_token_is_lost_or_doubled_and_no_sample_is_longer_than_asked() -> None:
    documents = [document(size, 100 * n) for n, size in enumerate((5, 17, 8, 2, 9, 3, 30, 1))]
    samples = pack(fitted(documents, 10, split=True).pieces, 10)

    tokens = [token for sample in samples for d in sample for token in d.ids]
    assert sorted(tokens) == sorted(token for d in documents[:7] for token in d.ids)
    assert all(sum(len(d.ids) for d in sample) <= 10 for sample in samples)
    assert len(samples) == 8, "74 tokens in samples of 10"


def test_a_chat_that_is_too_long_loses_its_end_and_one_without_an_answer_is_left_out() -> None:
    long = Document(list(range(20)), [False] * 5 + [True] * 15)
    prompt_only = Document(list(range(20)), [False] * 12 + [True] * 8)
    short = Document([1, 2], [False, True])
    found = fitted([long, prompt_only, short], 10, split=False)
    assert found.pieces == [
        Document(list(range(10)), [False] * 5 + [True] * 5), Document([1, 2], [False, True], 2)
    ]  # fmt: skip
    assert found[1:4] == (3, 1, 1)


def test_padding_is_no_token_of_any_vocabulary() -> None:
    columns = columns_of([[document(3)], [document(2), document(2, 7)]])
    batch = {name: table.padded(torch.arange(2)) for name, table in columns.items()}
    assert batch["text"].tolist() == [[0, 1, 2, NO_TOKEN], [0, 1, 7, 8]]
    assert batch["types"].tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert batch["label"].tolist() == [[1, 2, NO_LABEL, NO_LABEL], [1, NO_LABEL, 8, NO_LABEL]]


def test_perplexity_is_that_of_all_guessed_tokens(tmp_path: Path, folder: Path) -> None:
    data = chats(tmp_path, folder)
    found = data.score("test", {0: [round(12e6), 5]})
    assert found.values == pytest.approx({"perplexity": math.exp(2.4), "loss": 2.4}, abs=1e-12)
    assert data.score("test", {0: [10**12, 1]}).values["perplexity"] == math.inf
    found = data.score("test", {0: [NOT_FINITE, 1]})
    assert all(map(math.isnan, [*found.values.values(), *found.errors.values()]))
    with pytest.raises(ValueError, match="is not in test"):
        data.score("test", {1: [1, 1]})


def test_the_error_of_a_perplexity_is_over_documents_not_over_samples(
    tmp_path: Path, folder: Path
) -> None:
    """Two short documents share a sample; a long one is cut into two and stays one document."""
    for split in ("train", "dev", "test"):
        written(tmp_path, f"{split}.txt", "a" * 9, "", "b" * 9, "", "c" * 25)
    data = task(tmp_path, folder, max_length=20).load(ALL, 0)
    assert data.documents["test"] == [[0, 1], [2], [2]]
    found = data.score("test", {0: [round(9e6), 9, round(27e6), 9], 1: [round(38e6), 19],
                                2: [round(10e6), 5]})  # fmt: skip
    error = ratio_error([9, 27, 48], [9, 9, 24])
    assert found.values["loss"] == 2.0 and found.errors["loss"] == pytest.approx(error, abs=1e-12)
    assert found.errors["perplexity"] == pytest.approx(math.exp(2) * error)
    assert found.samples[0] == {"loss": 2.0, "tokens": 18}, "a line is a sample, as before"


def test_perplexity_is_a_mean_over_tokens_not_over_documents_or_samples(
    tmp_path: Path, folder: Path
) -> None:
    """Documents of 9, 9 and 24 tokens and of 1, 4 and 2 nats a token: over tokens these are 93/42
    nats, over documents 7/3, over samples (45/18 + 38/19 + 2) / 3."""
    for split in ("train", "dev", "test"):
        written(tmp_path, f"{split}.txt", "a" * 9, "", "b" * 9, "", "c" * 25)
    data = task(tmp_path, folder, max_length=20).load(ALL, 0)
    nats_and_tokens = {0: [round(9e6), 9, round(36e6), 9], 1: [round(38e6), 19],
                       2: [round(10e6), 5]}  # fmt: skip
    found = data.score("test", nats_and_tokens).values
    assert found == pytest.approx({"loss": 93 / 42, "perplexity": math.exp(93 / 42)}, abs=1e-12)


def test_the_demo_splits_share_no_text() -> None:
    task = given(
        LanguageModelling,
        DemoStories,
        num_train=30,
        num_dev=10,
        num_test=10,
        tokenizer=TrainedTokenizer(400),
    )
    texts = [text for rows in task.read(ALL).splits.values() for text in rows.texts["text"]]
    assert len(set(texts)) == len(texts) == 50
    data = task.load(ALL, 0)
    assert data.weight(torch.arange(data.num_samples("train"))) > 500


def test_a_batch_weighs_the_tokens_that_are_learned_and_is_not_made_for_that(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "dev", "test"):
        written(tmp_path, f"{split}.txt", "a" * 9, "", "b" * 9, "", "c" * 25)
    data = task(tmp_path, folder, max_length=20).load(ALL, 0)
    ids = torch.tensor([2, 0, 2])
    labels = data.batch("train", ids)["label"]
    assert [int((row != NO_LABEL).sum()) for row in labels] == [5, 18, 5]
    monkeypatch.setattr(data, "batch", None)
    assert data.weight(ids) == 28.0 and data.weight(ids[:0]) == 0.0


def test_a_tokenizer_comes_back_from_its_folder(tmp_path: Path, folder: Path) -> None:
    chats(tmp_path, folder).save_tokenizers(tmp_path)
    back = CausalTokenizer.load(tmp_path / "tokenizer")
    assert back.chat(CHAT, "here") == CausalTokenizer.load(folder).chat(CHAT, "here")
    trained = CausalTokenizer.of(TrainedTokenizer(300), str(tmp_path))
    trained.save(tmp_path / "own")
    text = "Ana came.  Twice!"
    [found], [again] = trained.texts([text]), CausalTokenizer.load(tmp_path / "own").texts([text])
    assert found == again and trained.decode(found.ids) == text
    assert found.ids[0] == trained.token_ids.bos and found.ids[-1] == trained.token_ids.eos


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [{"messages": [{"role": "user", "content": "Hm"}]}],
            "no message of the role 'assistant', .* roles are 'user'",
        ),
        ([{"messages": "Hm"}], "'Hm' is no list of messages"),
        ([{"text": " "}], "the set of train has no rows"),
        (
            [{"text": "a b"}, {"messages": CHAT}],
            "line 2: no text under 'text'; its keys: messages",
        ),
        (
            [{"messages": [*CHAT[:1], {"role": "assistant"}]}],
            "train.jsonl, row 1: content of message 2 is None",
        ),
    ],
)
def test_a_file_that_cannot_be_learned_from_is_named(
    tmp_path: Path, folder: Path, rows: list[object], said: str
) -> None:
    for split in ("train", "dev", "test"):
        written(tmp_path, f"{split}.jsonl", *rows)
    with pytest.raises(DataError, match=said):
        task(tmp_path, folder).load(ALL, 0)


TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"</s>": 1}}}]
CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "utc"}}}
WRITES_ALL = (
    "{% for t in tools or [] %}<tool>{{ t | tojson }}{% endfor %}"
    "{% for d in documents or [] %}<doc>{{ d.text }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def writing_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template writes tools, documents, calls and thoughts."""
    path = tmp_path_factory.mktemp("writing_all")
    write_chat_tokenizer(path, template=WRITES_ALL)
    return path


def of_rows(data: Path, tokenizer: Path, *rows: object, **settings: Any) -> LanguageData:
    for split in ("train", "dev", "test"):
        written(data, f"{split}.jsonl", *rows)
    found = task(data, tokenizer, max_length=512, **settings)
    found.check()
    return found.load(ALL, 0)


@pytest.mark.parametrize("form", [TOOLS, json.dumps(TOOLS)], ids=["list", "JSON text"])
def test_a_template_gets_the_tools_documents_and_system_message_of_a_row(
    form: object, tmp_path: Path, writing_all: Path
) -> None:
    documents = [{"text": "It rained."}]
    row = {"messages": CHAT[:2], "tools": form, "documents": documents, "system": "Be brief."}
    data = of_rows(tmp_path, writing_all, row)
    reader = CausalTokenizer.load(writing_all).pretrained
    messages = [{"role": "system", "content": "Be brief."}, *CHAT[:2]]
    theirs = reader.apply_chat_template(messages, tools=TOOLS, documents=documents, tokenize=False)
    assert reader.decode(data.batch("train", torch.tensor([0]))["text"][0]) == theirs
    end = reader.eos_token_id
    found = data.batch("train", torch.tensor([0]))["text"][0]
    assert (found == end).sum() == 3, "the end token in the name of a parameter is a word"
    assert "not used" not in data.describe()


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize(
    "names", [("default",), ("default", "tool_use"), ("rag", "tool_use"), ("rag",)], ids="+".join
)
def test_of_templates_with_names_the_one_is_taken_that_transformers_takes(
    names: tuple[str, ...], tools: object, tmp_path: Path, writing_all: Path
) -> None:
    named = tmp_path / "named"
    shutil.copytree(writing_all, named)
    template = (named / "chat_template.jinja").read_text()
    (named / "chat_template.jinja").unlink()
    config = json.loads((named / "tokenizer_config.json").read_text())
    every = [{"name": name, "template": f"{name}: {template}"} for name in names]
    (named / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": every}))
    row = {"messages": CHAT[:2]} | ({} if tools is None else {"tools": tools})
    if "default" not in names and not (tools and "tool_use" in names):
        said = f"a chat needs a chat template, and .* has only templates named {', '.join(names)}:"
        with pytest.raises(DataError, match=said):
            of_rows(tmp_path, named, row)
        return
    data = of_rows(tmp_path, named, row)
    reader = CausalTokenizer.load(named).pretrained
    theirs = reader.apply_chat_template(CHAT[:2], tools=tools, tokenize=False)
    assert reader.decode(data.batch("train", torch.tensor([0]))["text"][0]) == theirs


@pytest.mark.parametrize("content", ["", None], ids=["empty", "null"])
def test_a_call_of_a_tool_is_learned_without_content(
    content: str | None, tmp_path: Path, writing_all: Path
) -> None:
    called = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    data = of_rows(tmp_path, writing_all, {"messages": [CHAT[0], called]})
    reader = CausalTokenizer.load(writing_all).pretrained
    assert json.loads(reader.decode(learned(data)).removesuffix("</s>")) == [CALL]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tools": TOOLS}, "never writes 'tools'.*first in chat 1"),
        ({"documents": [{"text": "a"}]}, "never writes 'documents'"),
        ({"messages": [CHAT[0], {**CHAT[1], "tool_calls": [CALL]}]}, "never writes 'tool_calls'"),
        ({"messages": [CHAT[0], {**CHAT[1], "reasoning_content": "x"}]}, "'reasoning_content'"),
        ({"messages": [CHAT[0], {**CHAT[1], "thinking": "x"}]}, "never writes 'thinking'"),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0}]}, "message 2 has weight=0"),
        ({"images": ["a.png"]}, "its key 'images' is not read here"),
        ({"system": ["a"]}, "system is .*no text"),
        ({"tools": "clock"}, "tools is a text that is no JSON"),
        ({"tools": ["clock"]}, "tools is .*no list of objects"),
        (
            {"system": "a", "messages": [{"role": "system", "content": "b"}, *CHAT]},
            "its key system and its first message, of that role, differ",
        ),
    ],
)
def test_what_a_chat_would_lose_is_refused(
    row: dict[str, Any], said: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that starts the ranks refuses it, and so does a rank. The former ends the
    process that wrote the chats."""
    ends = list[bool]()
    monkeypatch.setattr(template_process(), "close", lambda: ends.append(True))
    for split in ("train", "dev", "test"):
        written(tmp_path, f"{split}.jsonl", {"messages": CHAT[:2], **row})
    found = task(tmp_path, folder)
    with pytest.raises(DataError, match=said):
        found.check()
    assert ends or "never writes" not in said
    with pytest.raises(DataError, match=said):
        found.load(ALL, 0)


def test_chats_without_a_template_are_refused_before_a_rank_starts(tmp_path: Path) -> None:
    written(tmp_path, "train.jsonl", *4 * [{"messages": CHAT[:2]}])
    own = TrainedTokenizer(300)
    folder = Folder(path=str(tmp_path))
    made = LanguageModelling(data=folder, tokenizer=own, cache_dir=str(tmp_path))
    with pytest.raises(DataError, match=r"chat 1: a chat needs a chat template, and .* has none"):
        made.check()


NOT_LEARNED = {
    "a key": ([{**CHAT[0], "name": "Bo"}, CHAT[1]],
              "train: the chat template does not write 'name' of 1 messages"),
    "what follows the last answer": (CHAT[:3], "train: 1 of 1 chats continue after their last"),
    "an empty answer": ([CHAT[0], {**CHAT[1], "content": " "}], "train: 1 answers are empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_LEARNED)
def test_what_of_a_chat_is_not_learned_is_told(case: str, tmp_path: Path, folder: Path) -> None:
    messages, said = NOT_LEARNED[case]
    assert said in of_rows(tmp_path, folder, {"messages": messages}).describe()
    assert said not in of_rows(tmp_path, folder, {"messages": CHAT[:2]}).describe()


def test_of_two_chat_templates_the_one_that_is_not_read_is_told(
    tmp_path: Path, folder: Path
) -> None:
    both = tmp_path / "both"
    shutil.copytree(folder, both)
    for own in ("ignored", (both / "chat_template.jinja").read_text()):
        config = json.loads((both / "tokenizer_config.json").read_text())
        (both / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": own}))
        said = of_rows(tmp_path, both, {"messages": CHAT[:2]}).describe()
        assert ("the other one in tokenizer_config.json is not read" in said) == (own == "ignored")


def test_a_run_tells_what_rules_of_its_tokenizer_are_not_used(
    tmp_path: Path, folder: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "Qwen2Tokenizer"
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    for tokenizer in (folder, other):
        said = of_rows(tmp_path, tokenizer, {"messages": CHAT[:2]}).describe()
        assert ("tokenizer.json not used" in said) == (tokenizer == other)


@pytest.mark.parametrize(
    ("unknown", "said"),
    [
        (None, r"train: 3 characters are lost, for which .* has no token \('本', 'é'\)"),
        ("<unk>", "train: 3 of 7 tokens of text are unknown to its tokenizer"),
    ],
)
def test_what_a_vocabulary_lacks_is_counted(
    unknown: str | None, said: str, tmp_path: Path
) -> None:
    """Without a token for the unknown, tokenizers leave such characters out and say nothing."""
    vocabulary = {token: n for n, token in enumerate(("<s>", "</s>", "<unk>", "a", "b"))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=unknown))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    made.save_pretrained(tmp_path / "tokenizer")
    assert re.search(
        said, of_rows(tmp_path, tmp_path / "tokenizer", {"text": "ab本本é"}).describe()
    )
    assert said[:12] not in of_rows(tmp_path, tmp_path / "tokenizer", {"text": "ab"}).describe()


def test_texts_beside_messages_are_told_and_can_be_chosen(tmp_path: Path, folder: Path) -> None:
    row = {"text": "Plain words.", "messages": CHAT[:2]}
    said = of_rows(tmp_path, folder, row).describe()
    assert "messages are learned, and texts beside them are not (task.column" in said
    assert "not used: 'text' of 3 rows" in said
    texts = of_rows(tmp_path, folder, row, column="text")
    assert "1 texts packed" in texts.describe() and "'messages' of 3" in texts.describe()
    with pytest.raises(DataError, match=r"no column 'words' \(task.column\); it has text, mess"):
        of_rows(tmp_path, folder, row, column="words")


@pytest.mark.parametrize("document", ["blank_line", "line", "file"])
def test_a_text_keeps_its_indentation(document: str, tmp_path: Path, folder: Path) -> None:
    text = "    def f():\n        return 1"
    for split in ("train", "dev", "test"):
        (tmp_path / f"{split}.txt").write_text(f"\n{text}\n\n")
    made = task(tmp_path, folder, document=document)
    [first, *rest] = made.read(ALL).splits["train"].texts["text"]
    assert "\n".join([first, *rest]) == text
    written(tmp_path, "train.jsonl", {"text": text + "\n"})
    [table] = [t for t in list_files(tmp_path, made.form) if t.kind == "json"]
    assert made.rows_of(table).texts["text"] == [text + "\n"]
    rows = datasets.Dataset.from_list([{"text": text + "\n"}])
    hub = given(LanguageModelling, Hub, dataset="owner/name")
    assert hub.rows_of(HubTable(rows, "hub")).texts["text"] == [text + "\n"]


PREFERENCE = {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"instruction": "Add", "input": "1 1", "output": "2"},
            "keys are instruction, in",
        ),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, "its keys are conversations"),
        ({"prompt": "Hi", "completion": "Hello"}, "its keys are prompt, completion"),
        (PREFERENCE, r"preference data: task=preferences learns from it \(docs/preferences.md\)"),
        ({"messages": [{"from": "human", "value": "Hi"}]}, "row 1: role of message 1 is None"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "row 1: content of message 1 is .*no text",
        ),
    ],
)
def test_other_forms_of_chats_are_refused_before_a_run_with_the_way_to_convert_them(
    tmp_path: Path, folder: Path, row: object, said: str
) -> None:
    written(tmp_path, "train.jsonl", *[row] * 9)
    with pytest.raises(DataError, match=said) as raised:
        task(tmp_path, folder).check()
    for part in (
        '{"text": …} or {"messages": [{"role": …, "content": …}, …]}', "train.jsonl",
        "docs/causal-language-models.md#texts",
    ):  # fmt: skip
        assert part in str(raised.value)
    assert (
        "## Texts\n" in (Path(__file__).parents[2] / "docs/causal-language-models.md").read_text()
    )


def test_chats_need_a_template_that_only_appends(tmp_path: Path, folder: Path) -> None:
    without = CausalTokenizer.of(TrainedTokenizer(300), str(tmp_path))
    with pytest.raises(DataError, match=r"here: a chat needs a chat template, and .* has none"):
        without.chat(CHAT, "here")
    rewriting = CausalTokenizer.load(folder)
    rewriting.pretrained.chat_template = "{{ messages|length }}" + TEMPLATE
    with pytest.raises(DataError, match="rewrites earlier turns"):
        rewriting.chat(CHAT, "here")


def test_of_a_long_chat_only_the_turns_that_fit_are_written(folder: Path) -> None:
    """Or a chat of 400 messages takes minutes: each turn is written from the beginning on."""
    tokenizer = CausalTokenizer.load(folder)
    chat = CHAT[:2] * 40
    whole = tokenizer.chat(chat, "here")
    for max_length in (1, 9, 60, len(whole.ids), 2 * len(whole.ids)):
        found = tokenizer.chat(chat, "here", max_length=max_length)
        for theirs, own in zip(whole[:2], found[:2], strict=True):
            assert own[:max_length] == theirs[:max_length]
        assert len(found.ids) <= max(4 * max_length, len(whole.ids) // 40)
        assert (len(found.ids) > max_length) == (len(whole.ids) > max_length), "it loses its end"


def test_a_folder_that_is_not_there_is_refused_before_a_run(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist; task\.data\.path must be a folder"):
        task(tmp_path / "nowhere", folder).check()
    with pytest.raises(ConfigError, match=r"task\.max_length"):
        task(tmp_path, folder, max_length=2)
    with pytest.raises(ConfigError, match="the model reads source"):
        task(tmp_path, folder).load(frozenset({"source"}), 0)


TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<END>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "named", "learns_chats", "ends"),
    [
        (TEMPLATE, None, True, {"</s>"}),
        (TURNS, None, True, {"</s>", "<end>"}),
        (TURNS, None, False, {"</s>"}),
        (TURNS, "<user>", True, {"</s>", "<user>", "<end>"}),
        (TURNS, ["<user>", "<assistant>"], False, {"</s>", "<user>", "<assistant>"}),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
            None,
            True,
            {"</s>"},
        ),
        ("{{ raise_exception('other turns') }}", None, True, {"</s>"}),
    ],
)
def test_a_text_ends_where_the_model_has_learned_that_it_does(
    template: str,
    named: str | list[str] | None,
    learns_chats: bool,
    ends: set[str],
    folder: Path,
    tmp_path: Path,
) -> None:
    """<end> ends a turn and is not the end of a text, as in Qwen2.5 and Gemma."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(folder)
    made.add_special_tokens({"extra_special_tokens": ["<user>", "<assistant>", "<end>"]})
    made.chat_template = template.replace("<END>", "<end>")
    made.save_pretrained(tmp_path / "checkpoint")
    if named is not None:
        config = {"eos_token_id": made.convert_tokens_to_ids(named), "top_p": 0.8}
        (tmp_path / "checkpoint" / "generation_config.json").write_text(json.dumps(config))
    choice = PretrainedTokenizer(str(tmp_path / "checkpoint"))
    tokenizer = CausalTokenizer.of(choice, str(tmp_path))
    tokenizer.learns_chats = learns_chats
    tokenizer.save(tmp_path / "run")
    again = CausalTokenizer.load(tmp_path / "run")

    assert set(made.convert_ids_to_tokens(sorted(tokenizer.ends))) == ends
    assert again.ends == tokenizer.ends and again.learns_chats == learns_chats
    written = json.loads((tmp_path / "run" / "generation_config.json").read_text())
    assert written["eos_token_id"] == sorted(tokenizer.ends)
    assert written.get("top_p") == (None if named is None else 0.8), "the rest is kept"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"repetition_penalty": 1.1, "top_k": 20, "temperature": 0.6, "do_sample": True},
         "repetition_penalty=1.1, top_k=20"),
        ({"suppress_tokens": [3], "eos_token_id": [2], "transformers_version": "5"},
         "suppress_tokens=[3]"),
        ({"repetition_penalty": 1.0, "num_beams": 1, "bad_words_ids": None, "top_p": 0.9}, ""),
        ({"a_rule_of_tomorrow": "x"}, 'a_rule_of_tomorrow="x"'),
    ],
)  # fmt: skip
def test_how_a_checkpoint_wants_its_tokens_chosen_is_named_where_it_is_not_done(
    asked: dict[str, Any], said: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "generation_config.json").write_text(json.dumps(asked))
    tokenizer = CausalTokenizer.of(PretrainedTokenizer(str(tmp_path / "checkpoint")), "")
    tokenizer.save(tmp_path / "run")
    for one in (tokenizer, CausalTokenizer.load(tmp_path / "run")):
        assert one.not_followed.endswith(said) and bool(one.not_followed) == bool(said)


def test_a_prompt_takes_a_system_message_or_is_plain(folder: Path, tmp_path: Path) -> None:
    tokenizer = CausalTokenizer.of(PretrainedTokenizer(str(folder)), str(tmp_path))
    tokenizer.learns_chats = True
    assert tokenizer.decode(tokenizer.prompt("Who?")) == "Who?"
    chat = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Who?"}]
    assert tokenizer.prompt("Who?", system="Be brief") == tokenizer.asked(chat)
    assert tokenizer.decode(tokenizer.asked(chat)) == "<system>Be briefWho?"
    assert tokenizer.prompt("Who?", plain=True) == tokenizer.texts(["Who?"])[0].ids[:-1]
    with pytest.raises(DataError, match="a system message needs a chat"):
        tokenizer.prompt("Who?", system="Be brief", plain=True)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([" "], "there is no chat in it"),
        (["no json"], r"chats.jsonl, line 1: not JSON"),
        (['{"messages": []}'], r"chats.jsonl, chat 1: .* is no list of messages"),
        (['{"messages": [{"role": "user", "content": "a"}]}', "[1]"], "line 2: .*no object"),
    ],
)
def test_what_is_no_chat_is_named(lines: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=said):
        read_chats(tmp_path / "chats.jsonl")


def test_the_first_test_chats_of_a_run_are_asked_beside_what_is_expected(
    tmp_path: Path, folder: Path
) -> None:
    chats(tmp_path, folder)
    asked = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ana"}]
    rows = [{"messages": asked}, {"messages": CHAT}] * 4
    written(tmp_path, "test.jsonl", *rows)
    text = CausalTokenizer.load(folder)
    run = SimpleNamespace(
        text=text, experiment=SimpleNamespace(task=task(tmp_path, tokenizer=folder))
    )
    text.learns_chats = True
    found = use.prompts_of(run, argparse.Namespace(chats=use.OWN_CHATS))

    assert [shown for shown, _ in found] == [
        "question   Who?\nexpected   Ana\ngenerated", "question   Thanks\ngenerated"
    ] * 2 + ["question   Who?\nexpected   Ana\ngenerated"]  # fmt: skip
    assert text.pretrained.decode(found[0][1]) == "<user>Who?</s><assistant>"
    (tmp_path / "mine.jsonl").write_text(json.dumps(rows[0]))
    assert use.prompts_of(run, argparse.Namespace(chats=str(tmp_path / "mine.jsonl"))) == found[:1]


@pytest.mark.parametrize("fields", [ALL, frozenset({"label"})], ids=["all", "labels only"])
@pytest.mark.parametrize("are_chats", [True, False], ids=["chats", "texts"])
def test_samples_are_shown_document_by_document(
    are_chats: bool, fields: frozenset[str], folder: Path, tmp_path: Path
) -> None:
    """Several are packed into a sample; run together nobody can read them."""
    if are_chats:
        asked = [
            {"role": "user", "content": "Who is n{n}?"},
            {"role": "assistant", "content": "Ana {n}"},
        ]
        rows = [
            json.dumps({"messages": [{**m, "content": m["content"].format(n=n)} for m in asked]})
            for n in range(12)
        ]
        (tmp_path / "train.jsonl").write_text("\n".join(rows))
    else:
        (tmp_path / "train.txt").write_text("\n\n".join(f"text {n} is\nhere" for n in range(12)))
    task = given(
        LanguageModelling,
        Folder,
        path=str(tmp_path),
        tokenizer=PretrainedTokenizer(str(folder)),
        max_length=128,
        dev_share=4,
        test_share=4,
        cache_dir=str(tmp_path / "cache"),
    )
    data = task.load(fields, 1)
    assert data.num_samples("test") < 4, "packed"
    scores = Scores({}, {}, {i: {"loss": 1.0} for i in range(data.num_samples("test"))})
    if are_chats:
        assert data.sample_outputs("test", scores, 3) == "", "no model at hand, so no answer"
    asked_for = []

    def follow(tokens: Sequence[int]) -> Iterator[int]:
        asked_for.append(data.tokenizer_here.decode(tokens).strip())
        told = [*data.tokenizer_here.encode("Bo", begins=False), data.tokenizer_here.token_ids.eos]
        return cycle(told)

    text = data.sample_outputs("test", scores, 3, follow)
    if are_chats and "text" not in fields:
        assert text == "", "nobody here knows what was asked"
        return
    shown = text.rstrip().split("\n\n")
    assert len(shown) == 3 and len(asked_for) == 3 * are_chats
    for document in shown:
        if not are_chats and "text" in fields:
            assert re.fullmatch(r"text       text \d+ is\n {11}here", document)
        elif not are_chats:
            assert re.fullmatch(r"text       ext \d+ is\n {11}here", document), "without its first"
        else:
            form = r"question   (Who is n(\d+)\?)\nanswer     Bo\nexpected   Ana (\d+)"
            asked_of = re.fullmatch(form, document)
            assert asked_of is not None and asked_of[2] == asked_of[3]
            assert asked_of[1] in asked_for, "up to where the model is to answer, and no further"


def test_names_of_runs_differ_in_what_is_trained() -> None:
    """In MLflow three runs of one compressor, nf4, int8 and all weights, had one name."""
    names = [
        build("+exp=lora_clm", "profile=demo", *words).run_name
        for words in ([], ["model.weights=nf4"], ["model.lora.r=4"], ["model.lora=null"])
    ]
    assert len({*names}) == 4 and " full " in names[3] and "nf4" in names[1]


@pytest.mark.parametrize(
    ("files", "asked"),
    [
        (("stage0.safetensors", "stage1.safetensors", "tokenizer/learned_chats"), "--chats"),
        (("stage0.safetensors", "stage1.safetensors"), '"Once upon"'),  # it learned plain texts
        (("stage1.safetensors", "tokenizer/learned_chats"), None),  # the rest is elsewhere
    ],
)
def test_a_run_says_how_its_model_is_tried(
    files: Sequence[str], asked: str | None, tmp_path: Path
) -> None:
    for name in files:
        (file := tmp_path / "a run" / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    said = build("+exp=lora_clm", "profile=demo").next_command(tmp_path / "a run")
    command = f"python -m xcloud generate '{tmp_path}/a run' {asked}"
    assert said == (command if asked else None)

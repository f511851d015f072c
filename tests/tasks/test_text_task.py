"""Texts as ids, one or two a sample; what is shortened or left out is counted and said."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.corpora import given
from xcloud.base.errors import DataError
from xcloud.contracts.model import Cut, NumCut, TokenIds
from xcloud.rank.task_data import cuts_in_words, report_cuts
from xcloud.record import intake
from xcloud.record.reporter import Reporter
from xcloud.record.summary import RunStatistics
from xcloud.tasks.classification import Classification
from xcloud.tasks.language_modelling import LanguageModelling
from xcloud.tasks.multilingual_text import MultilingualText, TextStream
from xcloud.tasks.question_answering import QuestionAnswering
from xcloud.tasks.sources import Folder
from xcloud.tasks.text_sources import FolderText
from xcloud.tasks.text_task import PairTable, TextTask
from xcloud.tasks.tokenizer import PretrainedTokenizer
from xcloud.tasks.translation import Translation

IDS = TokenIds(100, pad=0, bos=1, eos=2, mask=3)


def table(firsts: list[list[int]], seconds: list[list[int]] | None, longest: int = 20,
          separators: int = 1) -> PairTable:  # fmt: skip
    return PairTable(firsts, seconds, longest, IDS, separators)


def padded(made: PairTable, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return made.tokens.padded(ids), made.types().padded(ids)


def test_one_text() -> None:
    tokens, types = padded(table([[11, 12], [13], []], None), torch.tensor([1, 0, 2]))
    assert tokens.tolist() == [[1, 13, 2, 0], [1, 11, 12, 2], [1, 2, 0, 0]]
    assert not types.any() and types.shape == tokens.shape


def test_pairs_as_in_bert_and_as_in_roberta() -> None:
    firsts, seconds = [[11, 12], [13]], [[21], [22, 23, 24]]
    tokens, types = padded(table(firsts, seconds), torch.arange(2))
    assert tokens.tolist() == [[1, 11, 12, 2, 21, 2, 0], [1, 13, 2, 22, 23, 24, 2]]
    assert types.tolist() == [[0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1]]
    tokens, types = padded(table(firsts, seconds, separators=2), torch.arange(1))
    assert tokens.tolist() == [[1, 11, 12, 2, 2, 21, 2]]
    assert types.tolist() == [[0, 0, 0, 0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [(2, 3, (2, 3)), (9, 2, (5, 2)), (2, 9, (2, 5)), (9, 9, (4, 3)), (4, 9, (4, 3)),
     (9, 4, (4, 3)), (3, 9, (3, 4)), (0, 9, (0, 7))],
)  # fmt: skip
def test_the_longer_text_is_cut_first(first: int, second: int, kept: tuple[int, int]) -> None:
    found = table([list(range(50, 50 + first))], [list(range(70, 70 + second))], longest=10)
    assert tuple(map(len, found.texts(0))) == kept
    tokens, _ = padded(found, torch.tensor([0]))
    assert tokens.shape[1] <= 10
    assert found.texts(0)[0] == list(range(50, 50 + kept[0]))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    found = table([[5] * n for n in range(1, 9)], [[6] * (9 - n) for n in range(1, 9)], 9)
    tokens, types = padded(found, torch.arange(8))
    for i in range(8):
        alone, of_it = padded(found, torch.tensor([i]))
        assert torch.equal(alone[0], tokens[i, : alone.shape[1]])
        assert torch.equal(of_it[0], types[i, : alone.shape[1]])


@pytest.mark.parametrize("separators", [1, 2])
def test_the_texts_come_back_without_special_ids(separators: int) -> None:
    pairs = table([[7, 8], []], [[31, 32], [33]], separators=separators)
    assert [pairs.texts(i) for i in range(2)] == [[[7, 8], [31, 32]], [[], [33]]]
    assert pairs.second_at == [3 + separators, 1 + separators]
    assert table([[7, 8], []], None, separators=separators).texts(0) == [[7, 8]]


def test_no_samples_make_an_empty_batch() -> None:
    tokens, types = padded(table([[5]], [[6]]), torch.tensor([], dtype=torch.int64))
    assert tokens.shape == types.shape == (0, 2)


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} "
    "{% if m['role'] == 'assistant' %}[EOS] {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LENGTH = 40  # tokens in a sample
NUM_LONG = {"train": 3, "dev": 2, "test": 1}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> PretrainedTokenizer:
    """A token for each word."""
    pieces = ["[PAD]", "[BOS]", "[EOS]", "[MASK]", "[UNK]", "user:", "assistant:"]
    pieces += [f"w{i}" for i in range(200)]
    backend = Tokenizer(models.WordLevel({p: n for n, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="[BOS]", eos_token="[EOS]", pad_token="[PAD]",
        unk_token="[UNK]", mask_token="[MASK]", cls_token="[BOS]", sep_token="[EOS]",
    )  # fmt: skip
    made.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("words")
    made.save_pretrained(folder)
    return PretrainedTokenizer(str(folder))


def text(length: int, first: int = 0) -> str:
    return " ".join(f"w{i}" for i in range(first, first + length))


def chat(asked: int, answered: int) -> dict[str, object]:
    said = {"user": text(asked), "assistant": text(answered)}
    return {"messages": [{"role": role, "content": content} for role, content in said.items()]}


def question(length: int, answer: int) -> dict[str, object]:
    """The answer has so many words, from the 30th word of a paragraph of 120 on."""
    asked = {"question": text(length), "answers": [text(answer, first=30)]}
    return {"context": text(120), "qas": [asked]}


Make = Callable[[str, PretrainedTokenizer], TextTask]


def chats(path: str, words: PretrainedTokenizer) -> TextTask:
    return given(LanguageModelling, Folder, path=path, tokenizer=words, max_length=LENGTH)


def questions(path: str, words: PretrainedTokenizer) -> TextTask:
    return given(
        QuestionAnswering,
        Folder,
        path=path,
        tokenizer=words,
        max_length=LENGTH,
        max_question=8,
        stride=16,
    )


def labelled(path: str, words: PretrainedTokenizer) -> TextTask:
    return given(Classification, Folder, path=path, tokenizer=words, max_length=LENGTH)


def pairs(path: str, words: PretrainedTokenizer) -> TextTask:
    both: dict[str, Any] = {"source_tokenizer": words, "target_tokenizer": words}
    return given(Translation, Folder, path=path, max_length=LENGTH, **both)


CASES: dict[str, tuple[Make, object, object, str]] = {
    "chats without an answer in reach": (chats, chat(3, 3), chat(50, 3), "chats left out"),
    "chats whose answer is long": (chats, chat(3, 3), chat(3, 50), "chats cut"),
    "questions": (questions, question(3, 2), question(20, 2), "questions cut"),
    "answers longer than a window": (
        questions, question(3, 2), question(3, 60), "answers in no window",
    ),
    "answers between windows": (
        questions, question(3, 2), question(3, 33), "answers in no window",
    ),
    "labelled texts": (
        labelled, {"text": "w1", "label": "0"}, {"text": text(50), "label": "1"}, "texts cut",
    ),
    "pairs of texts": (
        labelled, {"text1": text(9), "text2": text(9), "label": "0"},
        {"text1": text(20), "text2": text(20), "label": "1"}, "texts cut",
    ),
    "sources": (pairs, {"es": "w1", "en": "w1"}, {"es": text(50), "en": "w1"},
                "source texts cut"),
    "targets": (pairs, {"es": "w1", "en": "w1"}, {"es": "w1", "en": text(50)},
                "target texts cut"),
}  # fmt: skip


def write(folder: Path, split: str, rows: Sequence[object]) -> None:
    (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_counted_by_split(
    case: str, tmp_path: Path, words: PretrainedTokenizer
) -> None:
    make, short, long, what = CASES[case]
    for split, num in NUM_LONG.items():
        write(tmp_path, split, [short] * 4 + [long] * num)
    task = make(str(tmp_path), words)
    found = task.load(frozenset(task.fields), 0).num_cut
    assert found.keys() == {what}
    assert {split: cut[:2] for split, cut in found[what].items()} == {
        split: (num, num + 4) for split, num in NUM_LONG.items()
    }
    assert not task.load(frozenset(), 0).num_cut, "of private texts a rank knows nothing"


def test_what_does_not_fit_is_one_line_a_split() -> None:
    of = "task.max_length"
    num_cut: NumCut = {
        "chats left out": {"train": Cut(85, 120, of), "test": Cut(10, 12, of)},
        "chats cut": {"train": Cut(2, 120, of)},
        "pairs left out: equal": {"train": Cut(1_000, 120_000, "they teach nothing")},
    }
    assert cuts_in_words(num_cut) == [
        "train: 85 of 120 chats left out, 2 of 120 chats cut (task.max_length); "
        "1,000 of 120,000 pairs left out: equal (they teach nothing)",
        "test: 10 of 12 chats left out (task.max_length)",
    ]


def test_a_set_whose_answers_all_lie_in_no_window_is_refused(
    tmp_path: Path, words: PretrainedTokenizer
) -> None:
    for split in NUM_LONG:
        write(tmp_path, split, [question(3, 60 if split == "dev" else 2)] * 4)
    task = questions(str(tmp_path), words)
    with pytest.raises(
        DataError,
        match=r"no window of dev holds a full answer to any of its 4 questions.*max_length",
    ):
        task.load(frozenset(task.fields), 0)


def test_chats_and_samples_are_told_apart(tmp_path: Path, words: PretrainedTokenizer) -> None:
    for split in NUM_LONG:
        write(tmp_path, split, [chat(3, 3)] * 6 + [chat(50, 3)])
    task = chats(str(tmp_path), words)
    # user: w0 w1 w2 assistant: w0 w1 w2 [EOS] are 9 tokens, and four times 9 fit into 40.
    said = task.load(frozenset(task.fields), 0).describe()
    assert "test 6 chats packed into 2 samples of 40 (54 tokens, 68 % full)" in said
    assert said.endswith("test: 7 of 7 samples are also in train")


def test_a_set_of_chats_without_an_answer_in_reach_says_so(
    tmp_path: Path, words: PretrainedTokenizer
) -> None:
    for split in NUM_LONG:
        write(tmp_path, split, [chat(50 if split == "dev" else 3, 3)])
    task = chats(str(tmp_path), words)
    with pytest.raises(DataError, match=r"dev: nothing to guess in 1 chats: their prompts fill "):
        task.load(frozenset(task.fields), 0)


def test_empty_texts_are_said_to_be_left_out(tmp_path: Path, words: PretrainedTokenizer) -> None:
    for split in NUM_LONG:
        write(tmp_path, split, [{"text": "w1 w2"}, {"text": " "}, {"text": "w3 w4"}])
    task = chats(str(tmp_path), words)
    corpus = task.read(frozenset(task.fields))
    empty = [f"{split}: 1 empty texts left out" for split in NUM_LONG]
    assert corpus.remarks[:3] == empty
    assert task.load(frozenset(task.fields), 0).describe().count("1 empty texts left out") == 3


def test_pairs_of_a_multilingual_text_are_counted_also_from_the_cache(
    tmp_path: Path, words: PretrainedTokenizer
) -> None:
    (tmp_path / "train.es").write_text("\n".join(["w1", text(30), "", "w2"]))
    (tmp_path / "train.en").write_text("\n".join(["w1", text(30), "w1", "w2"]))
    source = MultilingualText(FolderText(str(tmp_path)), words, max_length=LENGTH)
    tokenizer = source.load_tokenizer(tmp_path)
    for _ in range(2):
        table = source.table("es-en", tokenizer, tmp_path, lambda line: None)
        assert (len(table), table.num_cut, table.num_left_out) == (3, 1, 1)
    stream = TextStream({"es-en": table}, tokenizer.token_ids, 1.0, 0, 2)
    assert stream.num_cut("b") == {
        "es-en pairs cut in b": {"train": (1, 4, "model.text.max_length")},
        "es-en texts left out in b": {"train": (1, 4, "they are empty")},
    }


@pytest.mark.parametrize("is_abroad", [False, True])
def test_what_a_producers_texts_lack_is_in_the_summary_but_of_another_owners(
    is_abroad: bool,
) -> None:
    lines: list[bytes] = []
    reporter = Reporter(1, "b", lines.append, is_abroad=is_abroad)
    report_cuts(reporter, {"es-en pairs cut in b": {"train": Cut(1, 4, "model.text.max_length")}})
    reporter.flush()
    statistics = RunStatistics(2)
    for event in map(json.loads, b"".join(lines).splitlines()):
        intake.check(event, max_steps=2, kinds=intake.kinds_of(()))
        statistics.feed({"rank": 1, "cloud": "b", "t": 1.0} | event)
    expected = {} if is_abroad else {"es-en pairs cut in b": {"train": 1}}
    assert statistics.summary(name="a", status="finished", commit="c")["num_cut"] == expected

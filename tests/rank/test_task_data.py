"""What a rank loads, scores and says of its data: in parts, without a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.logged import Log
from xcloud.base.errors import DataError, FrameError
from xcloud.contracts.model import Cut
from xcloud.rank import row_counts, task_data
from xcloud.rank.row_counts import load_or_be_told
from xcloud.rank.task_data import (
    context_of,
    cuts_in_words,
    gather_predictions,
    report_cuts,
    scored_pieces,
    token_pads,
)


def test_what_did_not_fit_is_a_line_a_split_by_the_setting_that_cut_it() -> None:
    cut = {
        "chats left out": {"train": Cut(3, 1200, "task.max_length"), "dev": Cut(1, 9, "task.b")},
        "chats cut": {"train": Cut(2, 1200, "task.max_length")},
        "texts": {"train": Cut(1000, 1200, "task.b")},
    }
    assert cuts_in_words(cut) == [  # type: ignore[arg-type]
        "train: 3 of 1,200 chats left out, 2 of 1,200 chats cut (task.max_length); 1,000 of 1,200 "
        "texts (task.b)",
        "dev: 1 of 9 chats left out (task.b)",
    ]
    assert cuts_in_words({}) == []
    for may_tell in (True, False):  # another owner's texts are told of in its own log alone
        said: list[str] = []
        events: list[Any] = []
        reporter: Any = SimpleNamespace(
            is_abroad=not may_tell,
            remark=said.append,
            event=lambda name, **fields: events.append((name, *fields.values())),  # noqa: B023
        )
        report_cuts(reporter, num_cut={"texts": {"train": Cut(3, 12, "task.b")}})
        assert said == ["train: 3 of 12 texts (task.b)"]
        assert events == ([("cut", "texts", "train", 3, 12)] if may_tell else [])


def test_as_many_samples_are_scored_as_there_are_or_as_the_settings_say() -> None:
    def pieces(eval_samples: int | None, num_samples: int = 7) -> list[list[int]]:
        settings: Any = SimpleNamespace(eval_samples=eval_samples, eval_batch_size=3)
        return [piece.tolist() for piece in scored_pieces(settings, num_samples)]

    assert pieces(None) == [[0, 1, 2], [3, 4, 5], [6]] == pieces(99)
    assert pieces(4) == [[0, 1, 2], [3]]


def test_predictions_of_all_ranks_of_a_stage_come_together_whole_or_empty() -> None:
    mine = {4: [7, 8, 9], 1: []}
    theirs = [2, 1, 5, 3, 0]  # id, length, tokens …
    sent: list[list[int]] = []

    def gather(values: Tensor) -> list[Tensor]:
        sent.append(values.tolist())
        other = torch.zeros_like(values)
        other[: 1 if len(sent) == 1 else 5] = torch.tensor([5] if len(sent) == 1 else theirs)
        return [values, other]

    group: Any = SimpleNamespace(gather=gather)
    assert gather_predictions(mine, group) == {4: [7, 8, 9], 1: [], 2: [5], 3: []}
    assert sent == [[7], [4, 3, 7, 8, 9, 1, 0]]


@pytest.mark.parametrize(
    ("num_samples", "count", "ids"),
    [(9, 3, [0, 3, 6]), (10, 3, [0, 3, 6]), (2, 5, [0, 1]), (0, 5, []), (5, 5, [0, 1, 2, 3, 4])],
)
def test_samples_for_the_stages_are_from_all_over_the_file(
    num_samples: int, count: int, ids: list[int]
) -> None:
    data: Any = SimpleNamespace(
        num_samples=lambda split: num_samples,
        batch=lambda split, ids: {split: ids.tolist()},
        vocabularies={},
        sentences=None,
        head=None,
    )
    job: Any = SimpleNamespace(
        seed=1, cache_path=Path("c"), task=SimpleNamespace(max_length=9), model=None
    )
    context = context_of(job, data, torch.device("cpu"), report=lambda text: None)
    assert context.samples(count) == {"train": ids}
    assert (context.seed, context.max_length, context.group_rank) == (1, 9, 0)


def test_a_field_of_tokens_is_counted_where_it_is_read_first() -> None:
    reads = [{"a"}, {"a", "b"}, {"b"}]
    job: Any = SimpleNamespace(
        cluster=SimpleNamespace(num_stages=3),
        model=SimpleNamespace(fields=lambda stage, num_stages: reads[stage]),
    )
    vocabularies = {name: SimpleNamespace(pad=pad) for name, pad in (("a", 7), ("b", 8), ("c", 9))}
    data: Any = SimpleNamespace(vocabularies=vocabularies)
    found = [token_pads(job, data, [stage]) for stage in range(3)]
    assert found == [{"a": 7}, {"b": 8}, {}]


def test_a_task_that_gives_more_than_it_was_asked_for_is_refused_with_the_names() -> None:
    def data(num_samples: int, *names: str) -> Any:
        return SimpleNamespace(
            num_samples=lambda split: num_samples,
            batch=lambda split, ids: dict.fromkeys(names, ids),
        )

    task_data.check_fields(data(1, "ids", "text"), frozenset({"text"}))
    task_data.check_fields(data(0, "label"), frozenset({"text"}))
    with pytest.raises(DataError, match=r"gave label, word, which no .* it is given: text$"):
        task_data.check_fields(data(1, "text", "word", "label"), frozenset({"text"}))
    with pytest.raises(DataError, match=r"it is given: none$"):
        task_data.check_fields(data(1, "label"), frozenset())


@dataclass
class Unread:
    """A task of which this rank reads nothing."""

    sizes: dict[str, int] | None = None

    def load(self, fields: frozenset[str], seed: int) -> Any:
        assert not fields and seed == 7
        return SimpleNamespace(sizes=self.sizes, fingerprint=lambda: "f")


@pytest.mark.parametrize("text", [None, "-1", "1" * 10, "1.5", "x"])
def test_sizes_that_another_rank_sends_are_numbers_of_bounded_length(
    text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"samples of train": "1" * 9, "samples of dev": "0", "samples of test": "2"}
    facts["the task's settings and sizes"] = "f"
    job: Any = SimpleNamespace(
        task=Unread(),
        cluster=SimpleNamespace(num_ranks=2),
        fields_of=lambda rank: () if rank else ("text",),
        seed=7,
    )
    monkeypatch.setattr(row_counts, "agree_on", lambda *given, **named: facts)
    rendezvous: Any = SimpleNamespace(rank=1)
    found: Any = load_or_be_told(job, rendezvous)
    assert found.sizes == {"train": 111_111_111, "dev": 0, "test": 2}
    if text is None:
        del facts["samples of test"]
    else:
        facts["samples of test"] = text
    with pytest.raises(FrameError, match="as the numbers of samples"):
        load_or_be_told(job, rendezvous)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_reports_its_data_and_others_write_to_their_own_log(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: Log
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(task_data, "say", lambda text: said.append(("say", text)))
    monkeypatch.setattr(task_data, "shown_digest", lambda job, data: "digest")
    reporter = SimpleNamespace(
        is_abroad=False,
        note=lambda text: said.append(("note", text)),
        remark=lambda text: said.append(("remark", text)),
        event=lambda kind, **fields: said.append((kind, fields)),
    )
    task = SimpleNamespace(describe=lambda: "task")
    context: Any = SimpleNamespace(rank=rank, job=SimpleNamespace(task=task), reporter=reporter)
    data: Any = SimpleNamespace(
        describe=lambda: "40 samples",
        num_cut={"texts": {"train": Cut(3, 12, "task.b")}},
        num_samples=lambda split: len(split),
    )
    task_data.note_data(context, data)
    if rank:
        assert said == [("say", "40 samples")]
        assert [r.getMessage() for r in caplog.records] == ["train: 3 of 12 texts (task.b)"]
        return
    note, (kind, fields), remark, (cut, _) = said
    assert (note, kind, remark) == (
        ("note", "40 samples"), "data", ("remark", "train: 3 of 12 texts (task.b)")
    )  # fmt: skip
    assert fields == {
        "name": "task", "digest": "digest", "rows": {"train": 5, "dev": 3, "test": 4},
    }  # fmt: skip
    assert cut == "cut" and not caplog.records

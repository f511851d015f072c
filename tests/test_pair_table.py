"""One text or two as ids: forms, types, cutting, padding, shared sentences."""

from __future__ import annotations

import pytest
import torch

from xcloud.contracts.model import TokenIds
from xcloud.tasks.text_task import PairTable

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

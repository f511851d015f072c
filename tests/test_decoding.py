"""Greedy and beam search, on a scripted network whose probabilities are known."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from xcloud.base.errors import ConfigError
from xcloud.contracts.model import TokenIds
from xcloud.models.transformer import Beam, Greedy, Search

PAD, BOS, EOS, MASK, A, B, C = range(7)
IDS = TokenIds(size=7, pad=PAD, bos=BOS, eos=EOS, mask=MASK)


class Scripted:
    """Next-token probabilities of each sentence by the text so far, from a table."""

    def __init__(self, tables: list[dict[tuple[int, ...], dict[int, float]]]) -> None:
        self.tables = tables
        self.past: list[tuple[int, ...]] = [()] * len(tables)
        self.sentence = list(range(len(tables)))
        self.rows_computed = 0

    def step(self, tokens_N: Tensor) -> Tensor:
        assert len(tokens_N) == len(self.past)
        self.rows_computed += len(tokens_N)
        pairs = zip(self.past, tokens_N.tolist(), strict=True)
        self.past = [(*past, token) for past, token in pairs]
        per_sentence = len(self.past) // len(self.sentence)
        lines = []
        for row, past in enumerate(self.past):
            table = self.tables[self.sentence[row // per_sentence]]
            chances = table.get(past[1:], {EOS: 1.0})
            lines.append([math.log(chances.get(word, 1e-9)) for word in range(IDS.size)])
        return torch.tensor(lines)

    def keep(self, rows: Tensor, sentences: Tensor | None = None) -> None:
        self.past = [self.past[row] for row in rows.tolist()]
        if sentences is not None:
            self.sentence = [self.sentence[i] for i in sentences.tolist()]


# Greedy takes A (0.6) and then must take an even chance; B leads to a sure end.
GARDEN = {
    (): {A: 0.6, B: 0.4},
    (A,): {A: 0.3, B: 0.3, C: 0.4},
    (A, C): {EOS: 0.5, A: 0.5},
    (B,): {C: 0.99, EOS: 0.01},
    (B, C): {EOS: 0.98, A: 0.02},
}
SHORT = {(): {C: 0.9, A: 0.1}, (C,): {EOS: 0.9, B: 0.1}, (A,): {EOS: 1.0}}


def chance(table: dict[tuple[int, ...], dict[int, float]], text: list[int]) -> float:
    whole = [*text, EOS]
    return math.prod(
        table.get(tuple(whole[:i]), {EOS: 1.0}).get(word, 1e-9) for i, word in enumerate(whole)
    )


def run(search: Search, *tables: dict[tuple[int, ...], dict[int, float]]) -> list[list[int]]:
    limits = search.limits(torch.full((len(tables),), 10), 10)
    return search.search(Scripted(list(tables)), limits, IDS)


def test_greedy_takes_the_likeliest_token_each_time() -> None:
    assert run(Greedy(), GARDEN) == [[A, C, A]] or run(Greedy(), GARDEN) == [[A, C]]
    assert run(Greedy(), SHORT) == [[C]]


def test_beam_finds_a_likelier_text_than_greedy() -> None:
    (greedy,) = run(Greedy(), GARDEN)
    (beam,) = run(Beam(size=2, length_penalty=0.0), GARDEN)
    assert beam == [B, C]
    assert chance(GARDEN, beam) > 2 * chance(GARDEN, greedy)


def test_a_wide_beam_finds_the_best_text_of_all() -> None:
    """Against all texts of up to 4 words, on random tables."""
    draw = torch.Generator().manual_seed(0)
    words = (A, B, C)
    for penalty in (0.0, 1.0):
        table = {}
        for length in range(4):
            for text in itertools.product(words, repeat=length):
                shares = torch.rand(4, generator=draw).pow(3)
                table[text] = dict(
                    zip((EOS, *words), (shares / shares.sum()).tolist(), strict=True)
                )
        everything = [
            list(text) for length in range(5) for text in itertools.product(words, repeat=length)
        ]
        best = max(
            everything,
            key=lambda text: math.log(chance(table, text)) / (len(text) + 1) ** penalty,
        )
        assert run(Beam(size=100, length_penalty=penalty), table) == [best]


def test_an_early_good_end_is_not_forgotten_for_a_later_worse_one() -> None:
    table = {
        text: {EOS: 0.1, A: 0.3, B: 0.3, C: 0.3}
        for length in range(2, 7)
        for text in itertools.product((A, B, C), repeat=length)
    }
    table |= {(): {EOS: 0.5, A: 0.5}, (A,): {A: 0.95, EOS: 0.05}}
    decoder = Scripted([table])
    assert Beam(size=3).search(decoder, torch.tensor([6]), IDS) == [[]]
    assert max(map(len, decoder.past)) > 3  # what was alive looked better for a while


def test_a_beam_of_one_is_greedy() -> None:
    draw = torch.Generator().manual_seed(0)
    tables = []
    for _ in range(20):
        table = {}
        for length in range(6):
            for text in itertools.product((A, B, C), repeat=length):
                shares = torch.rand(4, generator=draw)
                table[text] = dict(
                    zip((EOS, A, B, C), (shares / shares.sum()).tolist(), strict=True)
                )
        tables.append(table)
    greedy = run(Greedy(), *tables)
    assert len({len(text) for text in greedy}) > 2
    assert run(Beam(size=1), *tables) == greedy


@pytest.mark.parametrize("search", [Greedy(), Beam(size=3)], ids=["greedy", "beam"])
def test_sentences_do_not_disturb_each_other(search: Search) -> None:
    tables = [SHORT, GARDEN, SHORT, {(): {B: 1.0}}]
    assert run(search, *tables) == [run(search, table)[0] for table in tables]


def test_finished_sentences_cost_nothing_more() -> None:
    decoder = Scripted([{}, {}, {(): {A: 1.0}, (A,): {B: 1.0}}])
    assert Greedy().search(decoder, torch.tensor([9, 9, 9]), IDS) == [[], [], [A, B]]
    assert decoder.rows_computed == 3 + 1 + 1


@pytest.mark.parametrize("search", [Greedy(), Beam(size=2)], ids=["greedy", "beam"])
def test_a_text_ends_at_its_limit(search: Search) -> None:
    endless = {(A,) * n: {A: 1.0} for n in range(20)}
    assert search.search(Scripted([endless, endless]), torch.tensor([3, 5]), IDS) == [
        [A] * 3,
        [A] * 5,
    ]


@pytest.mark.parametrize("search", [Greedy(), Beam(size=2)], ids=["greedy", "beam"])
def test_special_ids_are_never_written(search: Search) -> None:
    table = {(): {PAD: 0.3, BOS: 0.3, MASK: 0.3, A: 0.1}}
    assert run(search, table) == [[A]]


def test_longer_texts_win_as_the_length_penalty_grows() -> None:
    table = {(): {EOS: 0.5, A: 0.5}, (A,): {A: 0.9, EOS: 0.1}, (A, A): {EOS: 0.9, A: 0.1}}
    assert run(Beam(size=3, length_penalty=0.0), table) == [[]]
    assert run(Beam(size=3, length_penalty=1.0), table) == [[A, A]]


def test_limits_follow_the_source_and_the_task() -> None:
    counts = torch.tensor([2, 10, 40])
    assert Greedy().limits(counts, 50).tolist() == [14, 30, 50]
    assert Beam(length_ratio=1.0).limits(counts, 45).tolist() == [12, 20, 45]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Greedy(length_extra="long"), "Greedy.length_extra must be a whole number"),
        (lambda: Beam(size=0), "Beam.size must be"),
        (lambda: Beam(length_penalty=-1), "Beam.length_penalty must be"),
        (lambda: Beam(length_extra=0), "Beam.length_extra must be"),
    ],
)
def test_settings_are_checked_when_given(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]

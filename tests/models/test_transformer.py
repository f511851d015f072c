"""The Transformer from scratch, its cut, and greedy and beam search."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.translation_models import (
    IDS,
    backward_split,
    batch_of,
    build,
    context,
    gradients,
    predict,
    reversing,
    run_joined,
    target_scores,
    texts,
    train,
)
from xcloud.base.errors import ConfigError
from xcloud.contracts.model import SplitModel, TokenIds
from xcloud.models.transformer import Beam, Decoding, Greedy, Transformer, sinusoids

MODEL = Transformer(
    hidden=16,
    num_encoder_layers=3,
    num_decoder_layers=2,
    num_heads=2,
    feed_forward=32,
    dropout=0.0,
)
BATCH = batch_of(texts(6, seed=1), texts(6, seed=2))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_split_gradients_equal_those_of_the_whole(tmp_path: Path, num_stages: int) -> None:
    where = context(tmp_path)
    whole, split = build(MODEL, num_stages, where), build(MODEL, num_stages, where)
    loss = run_joined(whole, BATCH)
    loss.backward()
    assert torch.equal(backward_split(split, BATCH), loss.detach())
    for expected, got in zip(gradients(whole), gradients(split), strict=True):
        for name, gradient in expected.items():
            assert gradient is not None and got[name] is not None, name
            assert torch.equal(gradient, got[name]), name


def test_the_layout_changes_neither_start_weights_nor_loss(tmp_path: Path) -> None:
    model: SplitModel = MODEL
    assert model.describe() == "Transformer from scratch, 3 + 2 layers x 16"
    expected = run_joined(build(model, 2, context(tmp_path)), BATCH)
    for layers in (None, [1, 2], [2, 1]):
        split = dataclasses.replace(MODEL, encoder_layers_per_stage=layers)
        stages = [
            split.build_stage(stage, 3, context(tmp_path, vocabularies=known))
            for stage, known in ((0, {"source": IDS}), (1, {}), (2, {"target": IDS}))
        ]
        assert torch.equal(run_joined(stages, BATCH), expected)
    assert [sorted(model.fields(stage, 3)) for stage in range(3)] == [["source"], [], ["target"]]
    other = build(model, 2, context(tmp_path, seed=1))
    assert not torch.equal(run_joined(other, BATCH), expected)


def test_what_comes_later_does_not_change_earlier_scores(tmp_path: Path) -> None:
    stages = build(MODEL, 2, context(tmp_path))
    inputs = torch.randint(4, IDS.size, (6, 7))
    changed = inputs.clone()
    changed[:, 4] = 4 + (changed[:, 4] - 3) % (IDS.size - 4)
    before, after = (target_scores(stages, BATCH, ids) for ids in (inputs, changed))
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(2).all()


def test_decoding_with_cache_equals_decoding_without(tmp_path: Path) -> None:
    stages = build(MODEL, 2, context(tmp_path))
    found = predict(stages, BATCH)
    for i, text in enumerate(found):
        one = {name: tensor[i : i + 1] for name, tensor in BATCH.items()}
        scores = target_scores(stages, one, torch.tensor([[IDS.bos, *text]]))[0]
        scores[:, [IDS.pad, IDS.bos, IDS.mask]] = -torch.inf
        assert scores.argmax(1)[: len(text)].tolist() == text


@pytest.mark.nightly
@pytest.mark.slow
def test_a_small_reversing_task_is_learned(tmp_path: Path) -> None:
    model = Transformer(48, 2, 2, 4, 96, dropout=0.0)
    stages = build(model, 2, context(tmp_path))
    train(stages, [reversing(64, 4, seed=100 + i) for i in range(100)], 6e-3)
    test = reversing(64, 4, seed=1)
    wanted = [[w for w in line.tolist()[1:] if w not in (0, 2)] for line in test["target"]]
    for stage in stages:
        stage.eval()
    for decoding in (model.decoding, Beam(size=3)):
        stages[1].settings = dataclasses.replace(stages[1].settings, decoding=decoding)  # type: ignore[type-var, assignment]
        found = predict(stages, test)
        assert sum(a == b for a, b in zip(found, wanted, strict=True)) > 0.6 * 64


def test_positions_are_those_of_the_paper() -> None:
    table = sinusoids(10, 8)
    for position in (0, 3, 9):
        for feature in range(0, 8, 2):
            angle = position / 10_000 ** (feature / 8)
            assert table[position, feature].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, feature + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert sinusoids(4, 5).shape == (4, 5)


def test_a_stage_is_saved_without_its_sinusoids_and_built_again(tmp_path: Path) -> None:
    stages = build(MODEL, 2, context(tmp_path))
    again = []
    for number, stage in enumerate(stages):
        state = stage.state_dict()
        assert "embeddings.positions" not in state
        save_file(state, tmp_path / f"{number}.safetensors")
        known = {("source", "target")[number]: IDS}
        where = context(tmp_path, vocabularies=known, architecture={})
        empty = MODEL.build_stage(number, 2, where)
        empty.load_state_dict(load_file(tmp_path / f"{number}.safetensors"))
        again.append(empty)
    assert torch.equal(run_joined(again, BATCH), run_joined(stages, BATCH))


def test_a_text_longer_than_the_task_allows_is_refused(tmp_path: Path) -> None:
    stages = build(MODEL, 2, context(tmp_path, max_length=8))
    with pytest.raises(ValueError, match=r"supports at most 8: lower task.max_length"):
        run_joined(stages, batch_of([[5] * 9], [[5]]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 17}, "Transformer.num_heads must divide the hidden size 17"),
        ({"num_decoder_layers": 0}, "Transformer.num_decoder_layers must be"),
        ({"dropout": "0.1"}, "Transformer.dropout must be a number"),
        (
            {"encoder_layers_per_stage": 3},
            "must be a list of which each is a whole number >= 1 or null, got 3",
        ),
        ({"decoding": None}, "Transformer.decoding must be a Greedy or a Beam"),
    ],
)
def test_settings_are_checked_when_given(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(MODEL, **change)


PAD, BOS, EOS, MASK, A, B, C = range(7)
SEVEN_IDS = TokenIds(size=7, pad=PAD, bos=BOS, eos=EOS, mask=MASK)


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
            lines.append([math.log(chances.get(word, 1e-9)) for word in range(SEVEN_IDS.size)])
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


def run(search: Decoding, *tables: dict[tuple[int, ...], dict[int, float]]) -> list[list[int]]:
    limits = search.limits(torch.full((len(tables),), 10), 10)
    return search.search(Scripted(list(tables)), limits, SEVEN_IDS)


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
    assert Beam(size=3).search(decoder, torch.tensor([6]), SEVEN_IDS) == [[]]
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
def test_sentences_do_not_disturb_each_other(search: Decoding) -> None:
    tables = [SHORT, GARDEN, SHORT, {(): {B: 1.0}}]
    assert run(search, *tables) == [run(search, table)[0] for table in tables]


def test_finished_sentences_cost_nothing_more() -> None:
    decoder = Scripted([{}, {}, {(): {A: 1.0}, (A,): {B: 1.0}}])
    assert Greedy().search(decoder, torch.tensor([9, 9, 9]), SEVEN_IDS) == [[], [], [A, B]]
    assert decoder.rows_computed == 3 + 1 + 1


@pytest.mark.parametrize("search", [Greedy(), Beam(size=2)], ids=["greedy", "beam"])
def test_a_text_ends_at_its_limit(search: Decoding) -> None:
    endless = {(A,) * n: {A: 1.0} for n in range(20)}
    assert search.search(Scripted([endless, endless]), torch.tensor([3, 5]), SEVEN_IDS) == [
        [A] * 3,
        [A] * 5,
    ]


@pytest.mark.parametrize("search", [Greedy(), Beam(size=2)], ids=["greedy", "beam"])
def test_special_ids_are_never_written(search: Decoding) -> None:
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
def test_settings_of_a_search_are_checked_when_given(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]

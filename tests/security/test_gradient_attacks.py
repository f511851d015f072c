"""What the gradient of a batch gives away: tokens and their order, on tiny models of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.gradient_leaks.gradient_attacks import (
    Victim,
    attack_layers,
    changed_rows,
    f1_of_sets,
    raised_words,
    rouge,
)
from experiments.gradient_leaks.gradient_matching import (
    gradient_distance,
    improve_by_swaps,
    match_gradients,
    nearest_words,
    soft_word_gradients,
)
from tests.causal_models import WIDTH, WORDS, words
from tests.gradient_texts import TEXTS, as_batch, causal, gradients, run
from tests.understanding_models import build, model, question, where
from xcloud.contracts.model import Stage
from xcloud.models.causal_network import Lora

READ = {3, 9, 4, 20, 21}  # no later word of its text reads the last one, and no loss needs it
EMBEDDINGS, HEAD = "network.model.embed_tokens.weight", "network.lm_head.weight"


def attacked(stage: Stage, changes: dict[str, Tensor]) -> tuple[set[int], list[list[int]]]:
    victim = Victim(stage, lambda ids: run(stage, ids), torch.arange(WORDS), 6)
    found = attack_layers(victim, changes)
    return set(found.tokens.tolist()), sorted(found.texts)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_layer_gradients_give_tokens_and_their_order_exactly(kind: str, tmp_path: Path) -> None:
    for lora in (None, Lora(r=8)):  # gpt2 learns positions, gemma2 ties head and embeddings
        stage = causal(kind, tmp_path, lora)
        tokens, texts = attacked(stage, gradients([stage], as_batch(TEXTS)))

        assert tokens == READ
        assert texts == [[3, 9, 4], [20, 21]]


def test_embedding_rows_give_the_words_of_any_batch_and_head_rows_its_labels(
    tmp_path: Path,
) -> None:
    stage = causal("llama", tmp_path)
    many = [words(6, seed) for seed in range(6)]
    changes = gradients([stage], as_batch(many))

    assert set(changed_rows(changes[EMBEDDINGS]).tolist()) == {t for x in many for t in x[:-1]}
    # 30 tokens in 16 dimensions: the layers' inputs span everything, which tells nothing.
    assert attacked(stage, changes) == (set(), [])

    stage.zero_grad()
    few = gradients([stage], as_batch(TEXTS))
    assert set(raised_words(few[HEAD]).tolist()) == {9, 4, 11, 21}


def test_weight_decay_does_not_hide_the_rows_that_changed() -> None:
    weights = torch.randn(WORDS, WIDTH)
    change = 0.01 * weights
    change[[4, 7]] += 0.02 * torch.randn(2, WIDTH)

    assert set(changed_rows(change, weights).tolist()) == {4, 7}


def test_adapters_of_a_rank_below_the_number_of_tokens_give_none_away(tmp_path: Path) -> None:
    stage = causal("llama", tmp_path, Lora(r=2, targets=["q_proj"]))

    assert attacked(stage, gradients([stage], as_batch(TEXTS)))[0] != READ


def test_noise_on_the_gradient_leaves_nothing_to_recover(tmp_path: Path) -> None:
    stage = causal("llama", tmp_path)
    changes = gradients([stage], as_batch(TEXTS))
    draw = torch.Generator().manual_seed(0)
    noised = {
        name: change + change.norm() * torch.randn(change.shape, generator=draw)
        for name, change in changes.items()
    }

    assert attacked(stage, noised) == (set(), [])
    assert not len(changed_rows(noised[EMBEDDINGS]))


def test_a_little_noise_does_not_hide_which_rows_changed() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 64, generator=draw)
    rows[[3, 9, 77]] += 2.0  # norms of 18 beside 8 +- 0.7

    assert set(changed_rows(rows).tolist()) == {3, 9, 77}


def test_an_encoder_gives_its_tokens_away(tmp_path: Path) -> None:
    stages = [stage.eval() for stage in build(model(), 2, where(tmp_path))]
    batch = {name: value[:1] for name, value in question(1).items()}
    changes = gradients(stages, batch)
    text = batch["text"]
    true = set(text[text != 0].tolist())
    words_N = torch.arange(1, 24)  # without padding
    victim = Victim(stages[0], lambda ids: run(stages[0], ids), words_N, 12)
    found = attack_layers(victim, changes)

    assert set(changed_rows(changes["embeddings.words.weight"]).tolist()) == true
    assert f1_of_sets(found.tokens.tolist(), sorted(true)) > 0.5, (found, true)
    assert found.texts == []  # its layers look ahead


@pytest.mark.slow
@pytest.mark.nightly
def test_matching_gradients_finds_a_short_text() -> None:
    """A transformer of one layer without an embedding's gradient, as where embeddings rest."""
    draw = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return (0.1 * torch.randn(*shape, generator=draw)).requires_grad_()

    width = 32
    table = torch.randn(WORDS, width, generator=draw)
    query, key, value = (weight(width, width) for _ in range(3))
    up, head = weight(width, width), weight(width, WORDS)
    parameters = [query, key, value, up, head]

    def logits_of(rows_BSH: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            mixed = torch.nn.functional.scaled_dot_product_attention(
                rows_BSH @ query, rows_BSH @ key, rows_BSH @ value, is_causal=True
            )
        return torch.tanh((rows_BSH + mixed) @ up) @ head

    text = torch.tensor([[5, 17, 8, 30]])
    loss = torch.nn.functional.cross_entropy(logits_of(table[text])[0, :-1], text[0, 1:])
    target = [g.detach() for g in torch.autograd.grad(loss, parameters)]
    gradients_of = soft_word_gradients(logits_of, parameters, table)
    norm = float(table.norm(dim=1).mean())
    start = torch.randn(1, 4, width, generator=draw)
    everything = torch.arange(WORDS)

    rows = match_gradients(gradients_of, target, start, norm, num_steps=200, learning_rate=0.2)
    found = nearest_words(rows, table, everything)

    def distance(ids: Tensor) -> float:
        return float(gradient_distance(gradients_of(table[ids]), target).detach())

    better = improve_by_swaps(found, distance, everything, 200)

    assert rouge(found.tolist(), text.tolist(), 1) >= 0.5
    assert distance(better) <= distance(found)
    assert rouge(better.tolist(), text.tolist(), 2) > 0.6


def test_scores_by_hand() -> None:
    assert f1_of_sets([1, 2, 3, 3], [2, 3, 4]) == pytest.approx(2 / 3)
    assert f1_of_sets([], [1]) == 0.0
    assert rouge([[1, 2, 3]], [[1, 2, 3]], 2) == 1.0
    assert rouge([[3, 2, 1]], [[1, 2, 3]], 1) == 1.0
    assert rouge([[3, 2, 1]], [[1, 2, 3]], 2) == 0.0
    assert rouge([[1, 2], [4, 5]], [[1, 2, 9]], 2) == pytest.approx(2 * 1 / (2 + 2))

"""Attacks find planted leaks and nothing where nothing is."""

import math

import pytest
import torch
from torch import Tensor

from xcloud.features.leak_meter.meter import (
    auc,
    direction_attack,
    linear_inverter,
    network_inverter,
    norm_attack,
    probe,
    spectral_attack,
)

N, D = 600, 12


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def labels() -> Tensor:
    return torch.rand(N, generator=draw(9)) < 0.4


def probed(vectors: Tensor, positive: Tensor) -> float:
    known = torch.arange(N) % 2 == 0
    return auc(probe(vectors, positive.long(), known, 2)[:, 1], positive[~known])


def test_auc_by_hand_with_ties() -> None:
    scores = torch.tensor([1.0, 2.0, 2.0, 3.0])
    positive = torch.tensor([False, True, False, True])
    assert auc(scores, positive) == (1 + 0.5 + 1 + 1) / 4
    assert auc(torch.zeros(4), positive) == 0.5
    assert auc(-scores, positive) == pytest.approx(1 - auc(scores, positive))
    assert math.isnan(auc(scores, torch.ones(4, dtype=torch.bool)))


def test_a_norm_that_depends_on_the_label_is_found_by_the_norm_alone() -> None:
    positive = labels()
    unit = torch.nn.functional.normalize(torch.randn(N, D, generator=draw()), dim=1)
    gradients = unit * torch.where(positive, 3.0, 1.0)[:, None]

    assert norm_attack(gradients.norm(dim=1), positive) == 1.0
    assert norm_attack(gradients.norm(dim=1), ~positive) == 1.0  # which one is longer is given
    assert direction_attack(gradients, positive) == pytest.approx(0.5, abs=0.06)


def test_a_direction_that_depends_on_the_label_is_found_by_one_known_sample() -> None:
    positive = labels()
    line = torch.randn(D, generator=draw(1))
    sign = torch.where(positive, 1.0, -1.0)[:, None]
    gradients = sign * line + 0.1 * torch.randn(N, D, generator=draw())
    gradients /= gradients.norm(dim=1, keepdim=True)

    assert direction_attack(gradients, positive) > 0.99
    assert spectral_attack(gradients, positive) > 0.99
    assert norm_attack(gradients.norm(dim=1), positive) < 0.6


def test_a_probe_finds_what_neither_norm_nor_direction_shows() -> None:
    positive = labels()
    vectors = torch.randn(N, D, generator=draw())
    vectors[:, 3] += 2.5 * positive
    vectors[:, 5] *= 20  # a loud direction that says nothing

    assert probed(vectors, positive) > 0.93
    assert spectral_attack(vectors, positive) < 0.6
    assert direction_attack(vectors, positive) < 0.6


def test_random_gradients_give_nothing_away() -> None:
    positive, vectors = labels(), torch.randn(N, D, generator=draw())

    for found in (norm_attack(vectors.norm(dim=1), positive), direction_attack(vectors, positive),
                  spectral_attack(vectors, positive), probed(vectors, positive)):  # fmt: skip
        assert found == pytest.approx(0.5, abs=0.08)


def test_a_probe_takes_constant_tiny_and_many_features() -> None:
    positive = labels()
    vectors = torch.cat([torch.zeros(N, 5), 1e-9 * torch.randn(N, 200, generator=draw())], 1)
    vectors[:, 5] += 1e-8 * positive

    assert probed(vectors, positive) > 0.9
    assert probed(torch.zeros(N, 3), positive) == 0.5


ROWS = 1500


def rows_of(noise: float, deep: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Rows made of token embeddings, rare and common tokens, and who knows which."""
    weights = torch.arange(1, 41, dtype=torch.float64).flip(0)
    tokens = 1000 + torch.multinomial(weights, ROWS, True, generator=draw(2))
    table = torch.randn(40, 8, generator=draw(3))
    rows = table[tokens - 1000] @ torch.randn(8, 16, generator=draw(4))
    rows = torch.tanh(rows) if deep else rows
    rows = rows + noise * torch.randn(rows.shape, generator=draw(5))
    return rows, tokens, torch.arange(ROWS) % 2 == 0


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("inverter", [linear_inverter, network_inverter])
def test_an_embedding_in_the_rows_is_read_back(inverter, deep: bool) -> None:
    rows, tokens, known = rows_of(0.05, deep)

    right = (inverter(rows, tokens, known) == tokens[~known]).double().mean()
    assert float(right) > 0.97


@pytest.mark.parametrize("inverter", [linear_inverter, network_inverter])
def test_noise_leaves_no_more_than_the_commonest_token(inverter) -> None:
    rows, tokens, known = rows_of(1e4)
    unknown = tokens[~known]
    baseline = float((unknown == tokens[known].bincount().argmax()).double().mean())

    right = float((inverter(rows, tokens, known) == unknown).double().mean())
    assert 0.03 < baseline < 0.08
    assert right < baseline + 0.02

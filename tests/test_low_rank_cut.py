"""The cut of one block: what the factors are, what full rank loses, which settings go together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from xcloud.base.errors import ConfigError
from xcloud.models.encoder import EncoderConfig, EncoderLayer, Packing
from xcloud.models.low_rank_split import cut_inside, factors
from xcloud.models.split_point import Basis, Projection, Split

H = 12
PACKING = Packing(torch.tensor([5, 3, 1]))


def block() -> EncoderLayer:
    torch.manual_seed(0)
    layer = EncoderLayer(EncoderConfig(20, H, 1, 2, 30, 8, dropout=0.0))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def halves(split: Split, basis: Basis | None = None) -> tuple[Any, Any]:
    if basis is None:
        return cut_inside(split, 0, block()), cut_inside(split, 1, block())
    bottom, top = (Projection(split, is_up, H, 8) for is_up in (False, True))
    bottom.start(*basis)
    top.start(*basis)
    return bottom, top


def rows() -> torch.Tensor:
    return torch.randn(9, H, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_full_rank_in_the_feed_forward_is_the_block_without_its_skip() -> None:
    bottom, top = halves(Split(0, H))
    whole = block()
    attended = whole.attend(rows(), PACKING)
    expected = whole.norm(whole.down(whole.activation(whole.up(attended))))

    torch.testing.assert_close(top(bottom(rows(), PACKING), PACKING), expected)
    with_skip = whole.norm(attended + whole.down(whole.activation(whole.up(attended))))
    assert not torch.allclose(expected, with_skip, atol=0.1)


@torch.no_grad()
def test_full_rank_in_the_attention_is_the_block_without_its_skip() -> None:
    bottom, top = halves(Split(0, H, linear="attention_output"))
    whole = block()
    expected = whole.feed(whole.attention_norm(whole.attention(rows(), PACKING)))

    torch.testing.assert_close(top(bottom(rows(), PACKING), PACKING), expected)


@torch.no_grad()
@pytest.mark.parametrize("method", ["identity", "orthogonal"])
def test_a_projection_of_full_rank_is_the_whole_block(method: Any) -> None:
    rotation = torch.linalg.qr(torch.randn(H, H))[0]
    anchor = torch.randn(8, H)
    basis = Basis(rotation.T.contiguous(), anchor, rotation)
    bottom, top = halves(Split(0, H, method, anchor="position"), basis)

    whole = block()(rows(), PACKING)
    found = top(bottom(whole, PACKING), PACKING)
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


def test_factors_are_the_best_approximation_of_their_rank() -> None:
    weight = torch.randn(10, 6) @ torch.randn(6, 14)
    u, s, v = factors(weight, 6)
    torch.testing.assert_close(u @ s @ v, weight, atol=1e-4, rtol=1e-4)
    u, s, v = factors(weight, 2)
    values = torch.linalg.svdvals(weight)
    error = torch.linalg.norm(weight - u @ s @ v)
    torch.testing.assert_close(error, values[2:].square().sum().sqrt(), atol=1e-3, rtol=1e-3)
    assert (u.shape, s.shape, v.shape) == ((10, 2), (2, 2), (2, 14))


def test_clouds_that_compute_the_factors_apart_agree_on_the_signs() -> None:
    weight = torch.randn(10, 14)
    first, again = factors(weight, 4), factors(weight.T.contiguous().T, 4)

    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert (first[0].gather(0, first[0].abs().argmax(0, keepdim=True)) > 0).all()


@torch.no_grad()
def test_orthonormal_projections_stay_so_while_they_are_trained() -> None:
    rotation = torch.linalg.qr(torch.randn(H, 4))[0].T.contiguous()
    nothing = torch.zeros(8, H)
    basis = Basis(rotation.T.contiguous(), nothing, rotation)
    bottom, top = halves(Split(0, 4, "orthogonal"), basis)
    torch.testing.assert_close(bottom.linear.weight, rotation, atol=1e-5, rtol=1e-5)
    for parameter in (*bottom.linear.parameters(), *top.linear.parameters()):
        parameter.mul_(0.9).add_(0.1 * torch.randn_like(parameter))

    torch.testing.assert_close(
        bottom.linear.weight @ bottom.linear.weight.T, torch.eye(4), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        top.linear.weight.T @ top.linear.weight, torch.eye(4), atol=1e-5, rtol=1e-5
    )
    assert not torch.allclose(bottom.linear.weight, rotation, atol=1e-2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layer": -1}, "split.layer must be a whole number >= 0 or null, got -1"),
        ({"layer": "last"}, "split.layer must be"),
        ({"rank": 0}, "split.rank must be"),
        ({"head_rank": 0}, "split.head_rank must be"),
        ({"method": "lora"}, "split.method must be one of svd, identity, pca, orthogonal"),
        ({"linear": "query"}, "feed_forward_output, attention_output"),
        ({"anchor": "token"}, "split.anchor must be one of none, mean, position or null"),
        ({"freeze_bottom": "yes"}, "split.freeze_bottom must be one of True, False"),
        (
            {"anchor": "mean"},
            "split.anchor applies only to split.method=identity, pca, orthogonal",
        ),
        ({"whiten": True}, "split.whiten applies only to .*=pca"),
        ({"calibration": "public"}, "split.calibration applies only to .*=identity"),
        ({"rank": None, "linear": "attention_output"}, "linear applies .* with a rank"),
        ({"rank": None, "method": "pca", "whiten": True}, "whiten applies .* with a rank"),
        ({"method": "pca", "linear": "attention_output"}, "linear applies only to .*=svd"),
        ({"method": "orthogonal", "whiten": True}, "split.whiten applies only to .*=pca"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Split(**({"layer": 0} | settings))

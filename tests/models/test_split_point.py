"""Where an encoder is cut: the basis measured on public text, and the cut of one block."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.translation_models import IDS
from tests.understanding_models import HIDDEN, RandomText, backbone, model, where
from xcloud.base.errors import ConfigError
from xcloud.contracts.model import TokenIds
from xcloud.models.backbone import PublicBackbone, Weights
from xcloud.models.encoder import Encoder, EncoderConfig, EncoderLayer, Packing
from xcloud.models.low_rank_split import cut_inside, factors
from xcloud.models.split_point import Basis, Projection, Split, measured_basis, public_batch

TEXT = RandomText(9)
SIZES = (IDS.size, HIDDEN)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return backbone().weights("text", where(tmp_path_factory.mktemp("cache")))


def measured(weights: Weights, cache: Path, seed: int = 0, **settings: Any) -> Basis:
    split = Split(**({"layer": 1, "rank": 5, "calibration_texts": 30} | settings))
    lower = model().lower(weights)
    basis, _ = measured_basis(split, lower, SIZES, TEXT, where(cache, seed=seed))
    return basis


@torch.no_grad()
def rows(weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of block 1 on the calibration texts, and each row's position."""
    encoder = Encoder(replace(weights.config, dropout=0.0), range(2), head=False)
    encoder.load_part(weights.tensors or {})
    found, places = [], []
    for text in TEXT.sentences(30, Path()):
        packing = Packing(torch.tensor([len(text) + 2]))
        types = torch.zeros(len(text) + 2, dtype=torch.long)
        ids = torch.tensor([IDS.bos, *text, IDS.eos])
        found.append(encoder(ids, packing, types))
        places.append(packing.positions)
    return torch.cat(found), torch.cat(places)


def test_the_basis_is_that_of_the_principal_components(tmp_path: Path, weights: Weights) -> None:
    basis = measured(weights, tmp_path, method="pca")
    wanted, _ = rows(weights)
    torch.testing.assert_close(basis.anchor[0], wanted.mean(0), atol=1e-5, rtol=1e-4)
    around = wanted - wanted.mean(0)
    _, _, components = torch.linalg.svd(around.double(), full_matrices=False)
    best = components[:5].T @ components[:5]
    torch.testing.assert_close((basis.decode @ basis.encode).double(), best, atol=1e-4, rtol=1e-4)


def test_whitened_features_have_variance_one(tmp_path: Path, weights: Weights) -> None:
    basis = measured(weights, tmp_path, method="pca", whiten=True)
    sent = rows(weights)[0] @ basis.encode.T - basis.anchor @ basis.encode.T
    covariance = sent.T @ sent / len(sent)
    torch.testing.assert_close(covariance, torch.eye(5), atol=1e-3, rtol=1e-3)


def test_an_anchor_by_position_leaves_less_to_send(tmp_path: Path, weights: Weights) -> None:
    wanted, places = rows(weights)
    errors = {}
    for anchor in ("none", "mean", "position"):
        basis = measured(weights, tmp_path, method="pca", anchor=anchor)
        assert len(basis.anchor) == {"none": 0, "mean": 1, "position": 16}[anchor]
        lines = places if anchor == "position" else torch.zeros_like(places)
        anchors = basis.anchor[lines] if anchor != "none" else torch.zeros_like(wanted)
        kept = (wanted - anchors) @ basis.encode.T @ basis.decode.T + anchors
        errors[anchor] = float((wanted - kept).square().sum())
    assert errors["position"] < errors["mean"] < errors["none"] * 1.001


def own_pairs(count: int) -> dict[str, torch.Tensor]:
    """[5 6 | 7] and, without padding, [8 | 9 10], as the task's batches hold them."""
    text = [
        [IDS.bos, 5, 6, IDS.eos, 7, IDS.eos, IDS.pad],
        [IDS.bos, 8, IDS.eos, 9, 9, 10, IDS.eos],
    ]
    types = [[0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1]]
    return {"text": torch.tensor(text)[:count], "types": torch.tensor(types)[:count]}


def test_the_owners_basis_is_measured_on_the_samples_themselves(
    tmp_path: Path, weights: Weights
) -> None:
    split = Split(1, 5, "pca", anchor="mean")
    basis, _ = measured_basis(
        split, model().lower(weights), SIZES, None, where(tmp_path, samples=own_pairs)
    )

    encoder = Encoder(replace(weights.config, dropout=0.0), range(2), head=False)
    encoder.load_part(weights.tensors or {})
    batch = own_pairs(2)
    there = batch["text"] != IDS.pad
    with torch.no_grad():
        rows = encoder(batch["text"][there], Packing(there.sum(1)), batch["types"][there])
    torch.testing.assert_close(basis.anchor[0], rows.mean(0), atol=1e-5, rtol=1e-4)


def test_a_kept_basis_has_an_anchor_for_every_place(tmp_path: Path, weights: Weights) -> None:
    for max_length in (16, 12):
        place = where(tmp_path, max_length=max_length, samples=own_pairs)
        split, lower = Split(1, 5, "orthogonal"), model().lower(weights)
        basis, _ = measured_basis(split, lower, SIZES, None, place)
        assert len(basis.anchor) == max_length


def test_it_is_measured_once(tmp_path: Path, weights: Weights) -> None:
    def kept() -> int:
        return len(list(tmp_path.glob("cuts/*.safetensors")))

    first = measured(weights, tmp_path, method="pca")
    again = measured(weights, tmp_path, seed=5, method="pca", freeze_bottom=True, head_rank=2)
    assert kept() == 1 and torch.equal(first.encode, again.encode)
    measured(weights, tmp_path, method="pca", anchor="position")
    measured(weights, tmp_path, method="pca", calibration_pairs=True)
    measured(weights, tmp_path, method="identity", anchor="mean")
    measured(weights, tmp_path, method="identity", anchor="mean", seed=5)
    assert kept() == 5
    assert not list(tmp_path.glob("cuts/*.tmp"))


def test_public_text_of_another_tokenizer_is_refused(tmp_path: Path, weights: Weights) -> None:
    foreign = RandomText(9, TokenIds(1000, 0, 1, 2, 3))
    with pytest.raises(ConfigError, match="1000 token ids, but the model has 24"):
        measured_basis(Split(1, 5, "pca"), model().lower(weights), SIZES, foreign, where(tmp_path))
    with pytest.raises(ConfigError, match="give both the same tokenizer"):
        replace(backbone(), text=foreign).weights("text", where(tmp_path))


def test_a_public_backbone_is_the_same_for_those_who_see_no_text(tmp_path: Path) -> None:
    seeing = backbone().weights("text", where(tmp_path / "a"))
    blind = backbone().weights("text", where(tmp_path / "b", vocabularies={}))
    assert seeing.config == blind.config and seeing.config.type_vocab_size == 2
    assert seeing.tensors is not None and blind.tensors is not None
    assert all(torch.equal(seeing.tensors[k], blind.tensors[k]) for k in seeing.tensors)
    with pytest.raises(ConfigError, match=r"PublicBackbone\.text must be a PublicTexts"):
        PublicBackbone(text="text")  # type: ignore[arg-type]


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


def drawn_rows() -> torch.Tensor:
    return torch.randn(9, H, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_full_rank_in_the_feed_forward_is_the_block_without_its_skip() -> None:
    bottom, top = halves(Split(0, H))
    whole = block()
    attended = whole.attend(drawn_rows(), PACKING)
    expected = whole.norm(whole.down(whole.activation(whole.up(attended))))

    torch.testing.assert_close(top(bottom(drawn_rows(), PACKING), PACKING), expected)
    with_skip = whole.norm(attended + whole.down(whole.activation(whole.up(attended))))
    assert not torch.allclose(expected, with_skip, atol=0.1)


@torch.no_grad()
def test_full_rank_in_the_attention_is_the_block_without_its_skip() -> None:
    bottom, top = halves(Split(0, H, linear="attention_output"))
    whole = block()
    expected = whole.feed(whole.attention_norm(whole.attention(drawn_rows(), PACKING)))

    torch.testing.assert_close(top(bottom(drawn_rows(), PACKING), PACKING), expected)


@torch.no_grad()
@pytest.mark.parametrize("method", ["identity", "orthogonal"])
def test_a_projection_of_full_rank_is_the_whole_block(method: Any) -> None:
    rotation = torch.linalg.qr(torch.randn(H, H))[0]
    anchor = torch.randn(8, H)
    basis = Basis(rotation.T.contiguous(), anchor, rotation)
    bottom, top = halves(Split(0, H, method, anchor="position"), basis)

    whole = block()(drawn_rows(), PACKING)
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


@pytest.mark.parametrize(("pairs", "longest"), [(False, 16), (True, 15)])
def test_public_texts_that_are_too_long_are_cut_to_the_length_of_a_sample(
    pairs: bool, longest: int, tmp_path: Path
) -> None:
    split = Split(1, 5, "pca", calibration_texts=3, calibration_pairs=pairs)
    public: Any = SimpleNamespace(sentences=lambda num, cache_dir: [[7] * 40] * num)
    batch = public_batch(split, public, IDS, where(tmp_path, max_length=16))
    assert batch["text"].shape == batch["types"].shape == (3, longest)
    assert int(batch["types"].max()) == int(pairs)

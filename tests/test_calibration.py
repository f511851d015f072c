"""A basis measured on public text: what it is, that it is kept, that it helps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.translation_models import IDS
from tests.understanding_models import HIDDEN, RandomText, backbone, model, where
from xcloud.base.errors import ConfigError
from xcloud.contracts.model import TokenIds
from xcloud.models.backbone import PublicBackbone, Weights
from xcloud.models.encoder import Encoder, Packing
from xcloud.models.split_point import Basis, Split, measured_basis

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

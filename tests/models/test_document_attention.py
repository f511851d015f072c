"""Causal attention within packed documents: that of each document alone, and no memory in the
square of a sample."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.causal_models import KINDS, WIDTH, batch_of, build, saved, through, where, words
from tests.nightly import first_daily
from xcloud.contracts.model import NO_LABEL
from xcloud.models import document_attention
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Lora
from xcloud.models.document_attention import LONG, Documents, causal
from xcloud.models.encoder import Packing
from xcloud.rank.peak_bytes import PeakBytes
from xcloud.rank.reports import SavedTensors

OWN_PATHS = ("llama", "mistral", "gemma2")  # plain, behind a window, with a soft cap
CPU = torch.device("cpu")
PLAIN: dict[str, Any] = {"dropout": 0.0, "scaling": 0.5, "window": None, "softcap": None}


def drawn(num_new: int, num_keys: int, num_samples: int = 2) -> list[Tensor]:
    """Query of 4 heads, key and value of 2, with gradients."""
    draw = torch.Generator().manual_seed(0)
    sizes = ((4, num_new), (2, num_keys), (2, num_keys))
    return [torch.randn(num_samples, *size, 8, generator=draw).requires_grad_() for size in sizes]


def by_mask(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, softcap: float | None
) -> Tensor:
    """What `causal` is to return, by scores of all pairs."""
    key, value = (tensor.repeat_interleave(2, 1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * 0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    last = torch.arange(key.shape[2])
    distance = last[-query.shape[2] :, None] - last
    hidden = (distance < 0) | (distance >= (window or key.shape[2]))
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_is_dropped_in_training_whatever_its_path(
    window: int | None, softcap: float | None
) -> None:
    given = drawn(11, 11)
    how = PLAIN | {"window": window, "softcap": softcap}
    torch.manual_seed(0)
    first, second = (causal(*given, **how | {"dropout": 0.5}) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(causal(*given, **how), causal(*given, **how))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize(("num_new", "num_keys"), [(11, 11), (1, 1), (1, 11), (6, 11)])
def test_attention_is_that_of_a_mask_over_all_pairs(
    monkeypatch: pytest.MonkeyPatch,
    num_new: int,
    num_keys: int,
    window: int | None,
    softcap: float | None,
) -> None:
    monkeypatch.setattr(document_attention, "QUERIES", 4)
    given = drawn(num_new, num_keys)
    made = causal(*given, **PLAIN | {"window": window, "softcap": softcap})
    expected = by_mask(*given, window=window, softcap=softcap)
    torch.testing.assert_close(made, expected)
    slope = torch.randn(made.shape, generator=torch.Generator().manual_seed(1))
    for found, wanted in zip(
        torch.autograd.grad(made, given, slope),
        torch.autograd.grad(expected, given, slope),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


def test_attention_is_the_same_where_heads_cannot_share_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = drawn(11, 11)
    expected = causal(*given, **PLAIN)
    monkeypatch.setattr(document_attention, "_shares_keys", lambda query: False)
    torch.testing.assert_close(causal(*given, **PLAIN), expected)


@pytest.mark.parametrize("lengths", [[7], [5, 5, 5], [9, 1, 8, 7, 2, 1]])
def test_a_document_is_attended_to_as_if_it_stood_alone(lengths: list[int]) -> None:
    places_R = torch.cat([torch.arange(length) for length in lengths])
    documents = Documents(Packing(torch.tensor([len(places_R)]), positions=places_R), device=CPU)
    given = [tensor[0].transpose(0, 1) for tensor in drawn(len(places_R), len(places_R), 1)]
    how = partial(causal, **PLAIN)

    made_RNF = documents.attend(*given, how=how)

    pieces = zip(*(torch.split(tensor, lengths) for tensor in given), strict=True)
    alone = [how(*(t.transpose(0, 1)[None] for t in piece))[0].transpose(0, 1) for piece in pieces]
    torch.testing.assert_close(made_RNF, torch.cat(alone))


def test_a_sample_never_sees_another_whatever_places_arrive() -> None:
    told = Packing(torch.tensor([2, 3]), positions=torch.tensor([4, 5, 6, 7, 8]))
    query, key, value = (t[0].transpose(0, 1) for t in drawn(5, 5, num_samples=1))
    made = Documents(told, device=CPU).attend(query, key, value, how=partial(causal, **PLAIN))
    (gradient,) = torch.autograd.grad(made[2:].sum(), value)
    assert not gradient[:2].any() and gradient[2:].all()


@pytest.mark.parametrize(
    "kind",
    first_daily(sorted(KINDS, key=lambda kind: kind not in OWN_PATHS), count=len(OWN_PATHS)),
)
def test_no_gradient_of_a_document_reaches_another(tmp_path: Path, kind: str) -> None:
    """Exactly none: neither those before it nor those behind it, in its sample or another."""
    saved(kind, tmp_path)
    stages = build(CausalLM(checkpoint=str(tmp_path), lora=Lora(r=2)), 2, where(tmp_path))
    batch = batch_of([words(3, 1), words(5, 2), words(2, 3)], [words(4, 4)])
    message = through(stages, batch)
    assert message is not None
    rows = message["hidden"].detach().requires_grad_()
    assert message["places"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3]
    is_second = batch["types"] == 1
    label = torch.where(is_second, batch["label"], NO_LABEL)

    loss = stages[1]({**message, "hidden": rows}, {**batch, "label": label}).loss

    assert loss is not None
    (gradient,) = torch.autograd.grad(loss, rows)
    assert gradient.shape == (14, WIDTH)
    assert gradient[3:7].any(1).all(), "of each of its tokens but the last, which guesses none"
    gradient[3:8] = 0
    assert not gradient.any()


@pytest.mark.parametrize("window", [None, 64])
def test_memory_is_not_in_the_square_of_a_sample(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    monkeypatch.setattr(document_attention, "QUERIES", 64)
    lengths = [700, 200, 124]
    places_R = torch.cat([torch.arange(length) for length in lengths])
    how = partial(causal, **PLAIN | {"window": window})
    with PeakBytes() as bytes_:
        documents = Documents(Packing(torch.tensor([1024]), positions=places_R), device=CPU)
        made = documents.attend(*(torch.randn(1024, 1, 4) for _ in range(3)), how=how)
    assert made.shape == (1024, 1, 4)
    assert bytes_.peak < 1024**2 // 4, "a quarter of a byte a pair"


def test_long_documents_in_bf16_keep_no_scores_for_the_backward() -> None:
    query, key, value = (tensor.bfloat16() for tensor in drawn(LONG, LONG, 1))
    saved_tensors = SavedTensors()
    with sdpa_kernel(SDPBackend.MATH), saved_tensors:  # as the trainer sets it on CPUs
        causal(query, key, value, **PLAIN)
    assert saved_tensors.peak_bytes < LONG**2  # plain products: 8 bytes a pair and more

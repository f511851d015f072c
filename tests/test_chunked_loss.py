"""Cross-entropy in pieces of the vocabulary: the plain loss, and never all logits at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xcloud.models.causal_stage import chunked_cross_entropy

ROWS, WIDTH, WORDS = 7, 16, 50


def made(words: int = WORDS) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, WIDTH, generator=draw, requires_grad=True)
    matrix = torch.randn(words, WIDTH, generator=draw, requires_grad=True)
    return rows, matrix, torch.randint(words, (ROWS,), generator=draw)


def plain(rows: Tensor, words: Tensor, labels: Tensor, softcap: float | None) -> Tensor:
    logits = rows @ words.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [1, 7, 25, 50, 1000])
def test_loss_and_gradients_equal_the_plain_ones(chunk: int, softcap: float | None) -> None:
    weight = torch.linspace(0.5, 2, ROWS)  # another gradient for each row
    results = []
    for function in (plain, lambda *given: chunked_cross_entropy(*given[:3], chunk, given[3])):
        rows, words, labels = made()
        losses = function(rows, words, labels, softcap)
        (losses * weight).sum().backward()
        results.append((losses.detach(), rows.grad, words.grad))

    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # of values about 1


def test_huge_logits_do_not_overflow() -> None:
    rows, words, labels = made()
    losses = chunked_cross_entropy(rows * 1e4, words, labels, 8)
    losses.sum().backward()

    assert losses.isfinite().all() and rows.grad is not None and rows.grad.isfinite().all()
    torch.testing.assert_close(losses, plain(rows * 1e4, words, labels, None))


def test_under_autocast_products_are_in_its_dtype_backwards_too() -> None:
    found = []
    for precision in (torch.float32, torch.bfloat16):
        rows, words, labels = made()
        given = rows.to(precision), words.to(precision)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.float32):
            losses = chunked_cross_entropy(*given, labels, 7)
        losses.sum().backward()
        found.append((losses.detach(), rows.grad, words.grad))
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


def test_frozen_words_get_no_gradient_and_no_rows_are_no_loss() -> None:
    rows, words, labels = made()
    words.requires_grad_(False)
    chunked_cross_entropy(rows, words, labels, 8).sum().backward()
    assert rows.grad is not None and words.grad is None

    none = chunked_cross_entropy(rows[:0], words, labels[:0], 8)
    assert none.shape == (0,) and float(none.detach().sum()) == 0


def test_products_are_in_the_dtype_of_autocast_and_losses_are_float32() -> None:
    rows, words, labels = made()
    with torch.autocast("cpu", torch.bfloat16):
        losses = chunked_cross_entropy(rows, words, labels, 8)
    losses.sum().backward()

    assert losses.dtype == rows.grad.dtype == words.grad.dtype == torch.float32
    torch.testing.assert_close(losses, plain(rows, words, labels, None), rtol=0.05, atol=0.1)
    assert not torch.equal(losses, plain(rows, words, labels, None))


class Largest(TorchDispatchMode):
    """Notes the most words of any tensor [rows, words] that an operation makes."""

    words = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for found in made if isinstance(made, tuple | list) else (made,):
            if isinstance(found, Tensor) and found.dim() == 2 and found.shape[0] == ROWS:
                self.words = max(self.words, found.shape[1])
        return made


def test_a_quarter_of_a_million_words_never_have_all_their_logits_at_once() -> None:
    rows, words, labels = made(250_000)
    words.requires_grad_(False)
    with Largest() as largest:
        chunked_cross_entropy(rows, words, labels, 4096).sum().backward()
    assert largest.words == 4096

    with Largest() as largest:
        plain(rows, words, labels, None)
    assert largest.words == 250_000

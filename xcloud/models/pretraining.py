"""Masked language modelling: pretrains our small encoders on one side's own texts.
Not a run's training loop (training/); caching is in backbone.py.

Shapes: R rows (tokens that are not padding), M rows to predict from, H features.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcloud.checks import check_int, check_number
from xcloud.contracts.stage import TokenIds
from xcloud.errors import DataError
from xcloud.models.attention import Packing
from xcloud.models.electra import choose_masked
from xcloud.models.encoder import Encoder
from xcloud.models.seeding import seed_of
from xcloud.training.optimizer import Optimizer

REPORT_EVERY_S = 5.0
MAX_HELD_OUT = 500  # sentences; enough to know the loss to about 1 %
BATCHES_SORTED_TOGETHER = 50


class Descent:
    """How a backbone is pretrained: AdamW with linear warm-up, then linear decay to zero, and
    gradients of norm 1 at most. Weight decay spares biases and norms, as in training/optimizer.py.
    """

    steps: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    seed: int

    def check_descent(self, owner: str) -> None:
        check_int(f"{owner}.steps", self.steps, 0)
        check_number(f"{owner}.learning_rate", self.learning_rate, 0, above=True)
        check_int(f"{owner}.warmup_steps", self.warmup_steps, 0)
        check_number(f"{owner}.weight_decay", self.weight_decay, 0)
        check_int(f"{owner}.seed", self.seed, 0)

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        warm = (step + 1) / (self.warmup_steps + 1)
        left = (self.steps - step) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * min(1.0, warm, left)

    def descend(
        self, network: nn.Module, loss_of_a_batch: Callable[[], Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """Train `network` in place; yields each step, counted from 0, and its loss."""
        decayed = Optimizer(betas=(0.9, 0.98), weight_decay=self.weight_decay)
        optimizer = decayed.build(network.parameters())
        for step in range(self.steps):
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate_at(step)
            loss = loss_of_a_batch()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            yield step, loss.detach()


@dataclass(frozen=True)
class MaskedLanguageModelling(Descent):
    """Guess masked words.

    `mask_share` of the tokens are predicted; of these 80 % are replaced by the mask id, 10 % by a
    random id, 10 % are kept (Devlin et al., arXiv:1810.04805). Masking is dynamic (Liu et al.,
    arXiv:1907.11692).
    causal_share: of the batches, read from left to right under a causal mask instead: every token
    is predicted from those before it. A network that shall also serve as a decoder has then seen
    what a decoder sees (both objectives share all weights: Dong et al., UniLM, arXiv:1905.03197;
    without their segments and sequence-to-sequence masks).
    seed is the backbone's own, not the run's: runs with different seeds share one cached backbone,
    as they would share a published checkpoint. steps=0 keeps random weights (an ablation).
    """

    steps: int = 2000
    batch_tokens: int = 1024  # 1,600 small steps beat 800 of twice the size, in the same time
    learning_rate: float = 2e-3  # for widths about 128; 4e-3 got stuck there, 1e-3 was slower
    warmup_steps: int = 100
    weight_decay: float = 0.01
    mask_share: float = 0.15
    held_out_share: float = 0.02
    seed: int = 0
    causal_share: float = 0.0

    def __post_init__(self) -> None:
        owner = "MaskedLanguageModelling"
        self.check_descent(owner)
        check_int(f"{owner}.batch_tokens", self.batch_tokens, 1)
        check_number(f"{owner}.mask_share", self.mask_share, 0, 0.9, above=True)
        check_number(f"{owner}.held_out_share", self.held_out_share, 0, 0.5, above=True)
        check_number(f"{owner}.causal_share", self.causal_share, 0, 1)


@dataclass(frozen=True)
class HeldOutScore:
    """On held-out sentences: mean cross-entropy (nats) and accuracy, of masked tokens; of next
    tokens only where the network has seen no others (causal_share=1)."""

    loss: float
    accuracy: float

    def __str__(self) -> str:
        return f"held-out loss {self.loss:.3f}, accuracy {self.accuracy:.3f}"


def pretrain(
    encoder: Encoder,
    sentences: Sequence[Sequence[int]],
    ids: TokenIds,
    settings: MaskedLanguageModelling,
    report: Callable[[str], None],
) -> HeldOutScore:
    """Train `encoder` in place, on its device. Deterministic given settings, sentences and initial
    weights; independent of timing and reports.

    sentences: token ids without special ids; DataError if fewer than two are non-empty.
    """
    config = encoder.config
    device = next(encoder.parameters()).device
    texts = [
        torch.tensor([ids.bos, *sentence[: config.max_positions - 2], ids.eos])
        for sentence in sentences
        if len(sentence)
    ]
    if len(texts) < 2:
        raise DataError(
            f"pretraining a backbone needs 2 sentences or more, got {len(texts)}. "
            "Is the corpus empty?"
        )
    draw = torch.Generator().manual_seed(seed_of(settings.seed, "masks and order"))
    order = torch.randperm(len(texts), generator=draw).tolist()
    num_held_out = max(1, min(MAX_HELD_OUT, round(settings.held_out_share * len(texts))))
    held_out = [texts[i] for i in order[:num_held_out]]
    train = [texts[i] for i in order[num_held_out:]]

    batches = _batches(train, settings.batch_tokens, draw)
    started_at_s = last_report_at_s = time.monotonic()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        torch.manual_seed(seed_of(settings.seed, "dropout"))
        encoder.train()
        modes = _evenly(settings.causal_share)

        def loss() -> Tensor:
            batch, causal = next(batches), next(modes)
            return _loss(encoder, batch, ids, settings.mask_share, draw, causal)[0]

        for step, _ in settings.descend(encoder, loss):
            now_s = time.monotonic()
            if now_s - last_report_at_s > REPORT_EVERY_S:
                last_report_at_s = now_s
                score = evaluate(encoder, held_out, ids, settings)
                elapsed_s = now_s - started_at_s
                report(f"step {step + 1}/{settings.steps}, {score}, {elapsed_s:.0f} s")
        encoder.eval()
        return evaluate(encoder, held_out, ids, settings)


@torch.no_grad()
def evaluate(
    encoder: Encoder, texts: Sequence[Tensor], ids: TokenIds, settings: MaskedLanguageModelling
) -> HeldOutScore:
    """texts: with special ids. Uses the same masks at each call."""
    was_training = encoder.training
    encoder.eval()
    draw = torch.Generator().manual_seed(seed_of(settings.seed, "held-out masks"))
    total, right, num = 0.0, 0, 0
    for start in range(0, len(texts), 64):
        batch = texts[start : start + 64]
        causal = settings.causal_share == 1
        loss, hits, masked = _loss(encoder, batch, ids, settings.mask_share, draw, causal)
        total, right, num = total + float(loss) * masked, right + int(hits), num + masked
    encoder.train(was_training)
    return HeldOutScore(total / num, right / num)


def _evenly(share: float) -> Iterator[bool]:
    """True for this share, spread: of any ten steps seven if it is 0.7."""
    return (math.floor((n + 1) * share) > math.floor(n * share) for n in count())


def _batches(
    texts: Sequence[Tensor], batch_tokens: int, draw: torch.Generator
) -> Iterator[list[Tensor]]:
    """Endless batches of about `batch_tokens` tokens, with texts of similar length."""
    pending: list[Tensor] = []
    while True:
        order = torch.randperm(len(texts), generator=draw).tolist()
        pending += [texts[i] for i in order]
        ready: list[list[Tensor]] = []
        mean_length = sum(map(len, texts)) / len(texts)
        pool = max(1, round(BATCHES_SORTED_TOGETHER * batch_tokens / mean_length))
        while len(pending) >= min(pool, len(texts)):
            group = sorted(pending[:pool], key=len)
            del pending[:pool]
            ready += _cut(group, batch_tokens)
        for i in torch.randperm(len(ready), generator=draw).tolist():
            yield ready[i]


def _cut(texts: Sequence[Tensor], batch_tokens: int) -> list[list[Tensor]]:
    batches: list[list[Tensor]] = []
    room = 0
    for text in texts:
        if room < len(text) or not batches:
            batches.append([])
            room = max(batch_tokens, len(text))
        batches[-1].append(text)
        room -= len(text)
    return batches


def _loss(
    encoder: Encoder,
    texts: Sequence[Tensor],
    ids: TokenIds,
    mask_share: float,
    draw: torch.Generator,
    causal: bool = False,
) -> tuple[Tensor, Tensor, int]:
    """Mean cross-entropy of the predicted tokens, number correct, and their number."""
    device = next(encoder.parameters()).device
    truth_R = torch.cat(list(texts))
    lengths = torch.tensor([len(text) for text in texts])
    if causal:
        seen_R = truth_R
        is_last_R = torch.zeros(len(truth_R), dtype=torch.bool)
        is_last_R[lengths.cumsum(0) - 1] = True
        from_M = (~is_last_R).nonzero().flatten()
        truth_M = truth_R[from_M + 1].to(device)
    else:
        seen_R, from_M = mask_tokens(truth_R, ids, mask_share, draw)
        truth_M = truth_R[from_M].to(device)
    rows = encoder(seen_R.to(device), Packing(lengths.to(device)), causal=causal)
    # These rows only: the head is most of the work in a small network.
    scores = encoder.logits(rows.index_select(0, from_M.to(device)))
    loss = F.cross_entropy(scores.float(), truth_M)
    return loss, (scores.argmax(1) == truth_M).sum(), len(from_M)


def mask_tokens(
    truth_R: Tensor, ids: TokenIds, mask_share: float, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Network input [R] and the rows to predict [M]: at least one, never bos or eos."""
    masked_M = choose_masked(truth_R, ids, mask_share, draw)
    fate = torch.rand(len(masked_M), generator=draw)
    words = torch.randint(ids.size, (len(masked_M),), generator=draw)
    replaced = torch.where(fate < 0.8, torch.full_like(words, ids.mask), words)
    seen_R = truth_R.clone()
    seen_R[masked_M] = torch.where(fate < 0.9, replaced, truth_R[masked_M])
    return seen_R, masked_M

"""Small networks are pretrained on the spot: on what public text, by which descent, and masked
language modelling for our encoders. Not a run's training loop (pipeline/); next tokens are learned
in causal_stage.py.

Shapes: R rows (tokens that are not padding), M rows to predict from, H features.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from xcloud.base.errors import DataError
from xcloud.base.settings import (
    Fraction,
    NotNegative,
    NotNegativeFloat,
    Positive,
    PositiveFloat,
    settings,
)
from xcloud.base.units import human_duration
from xcloud.comm.state import State, Stateful, load_states, states_of
from xcloud.contracts.model import TokenIds
from xcloud.models.encoder import Encoder, Packing
from xcloud.models.stages import seed_of, seeded_on
from xcloud.pipeline.settings import Optimizer
from xcloud.pipeline.trainer import TrainedModule
from xcloud.record.checkpoint_files import CheckpointFolder

FIRST_REPORT_S = 2.0  # by then the time of a step is known
REPORT_EVERY_S = 30.0
SAVE_EVERY_S = 20.0
MAX_HELD_OUT = 500  # sentences; enough to know the loss to about 1 %
BATCHES_SORTED_TOGETHER = 50
PATIENCE = 3  # passes over the texts without a smaller held-out loss
LONGEST_WORD = 24  # pieces; longer ones are URLs, or a script without known word boundaries


@runtime_checkable
class PublicTexts(Protocol):
    """Text that every cloud produces or reads identically, as token ids."""

    @property
    def label(self) -> str:
        """A short name, without reading anything."""

    def token_ids(self, cache_dir: Path) -> TokenIds:
        """Size and special ids of the tokenizer."""

    def sentences(self, num: int, cache_dir: Path) -> Sequence[Sequence[int]]:
        """Token ids of `num` texts without special ids, equal in every cloud. Raises DataError if
        there are fewer."""


@settings("pretraining")
class Descent:
    """AdamW with linear warm-up, then linear decay to zero, and gradients of norm 1 at most.

    seed: the seed of this network alone. It does not follow the run's `seed`: runs of several
        seeds share the network, as they would share a published checkpoint.
    steps: the number of updates; 0 leaves random weights.
    learning_rate: the highest learning rate, at the end of the warm-up.
    warmup_steps: the number of updates in which the learning rate rises from 0.
    weight_decay: the weight decay of matrices, as in AdamW.
    """

    steps: NotNegative
    learning_rate: PositiveFloat
    warmup_steps: NotNegative
    weight_decay: NotNegativeFloat = 0.01
    seed: NotNegative = 0

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        # The smaller of both lines counts: up to the end of the warm-up, then down to zero.
        warm = (step + 1) / (self.warmup_steps + 1)
        left = (self.steps - step) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * min(1.0, warm, left)

    def descend(
        self,
        network: nn.Module,
        batches: Iterator[Any],
        loss_of: Callable[[Any], Tensor],
        report: Callable[[str], None],
        score: Callable[[], object],
        unfinished: Path,
        more: nn.Module | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Train `network` in place; yields each step, counted from 0, and its loss.

        batches: the same from the first on in every process. score: part of progress reports.
        unfinished: a folder for the state of network, optimizer, random generators and `more`,
        written every SAVE_EVERY_S; an earlier process's descent is resumed from it, bit for bit.
        """
        network.train()
        # The run's own optimizer, so that what decays and what does not is said in one place.
        decayed = Optimizer(betas=(0.9, 0.98), weight_decay=self.weight_decay)
        optimizer = decayed.build(network)
        parts: dict[str, Stateful] = {
            "network": TrainedModule(module=network, optimizer=optimizer)
        }
        parts["generators"] = _Generators(next(network.parameters()).device)
        if more is not None:
            parts["more"] = TrainedModule(module=more, optimizer=None)
        folder = CheckpointFolder(unfinished)
        # The newest state that is complete; an interrupted write left one without.
        first = next((step for step in folder.steps() if folder.ranks(step)), 0)
        if first:
            load_states(parts, state=folder.read(first, 0), owner="an unfinished backbone")
            report(f"resumed after step {first} of {self.steps}, where it was interrupted")
        # Batches are drawn again up to here, as their generator is no part of the state.
        batches = islice(batches, first, None)
        began_at_s = saved_at_s = time.monotonic()
        report_at_s = began_at_s + FIRST_REPORT_S
        for step in range(first, self.steps):
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate_at(step)
            with torch.enable_grad():
                loss = loss_of(next(batches))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            yield step, loss.detach()
            now_s = time.monotonic()
            if step == first:  # takes longer than others
                began_at_s = now_s
            elif now_s >= report_at_s:
                left_s = (now_s - began_at_s) / (step - first) * (self.steps - step - 1)
                about = f"about {human_duration(left_s)} left"
                report(f"step {step + 1}/{self.steps}, {about}, {score()}")
                report_at_s = time.monotonic() + REPORT_EVERY_S
            if now_s - saved_at_s >= SAVE_EVERY_S:
                # The new one first, then the earlier ones go: there is always one to resume from.
                folder.write(step + 1, 0, states_of(parts), {})
                for earlier in folder.steps()[1:]:
                    folder.delete(earlier, rank=0)
                saved_at_s = now_s


class _Generators:
    """Torch's own random generators, from which dropout draws on this device."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            on_gpu = [torch.cuda.default_generators[device.index or 0]]
        else:
            on_gpu = []
        self._all = dict(enumerate([torch.default_generator, *on_gpu]))

    def state_dict(self) -> State:
        return {str(number): one.get_state() for number, one in self._all.items()}

    def load_state_dict(self, state: State) -> None:
        for number, one in self._all.items():
            one.set_state(torch.as_tensor(state[str(number)]))


@contextmanager
def same_arithmetic() -> Iterator[None]:
    """Compute in one thread, whatever the cloud has: sums in another order round otherwise, and
    clouds that each make a network from public text must come to the same. Kinds of processors
    still differ, which a comparison of the results shows."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@settings("MaskedLanguageModelling")
class MaskedLanguageModelling(Descent):
    """Guess masked words: `mask_share` of the tokens are predicted; of these 80 % are replaced by
    the mask id, 10 % by a random id, 10 % are kept (Devlin et al., arXiv:1810.04805). They are
    drawn again each time (Liu et al., arXiv:1907.11692).

    causal_share: the share of the batches in which every token is predicted from those before it,
        under a causal mask, which is what a decoder sees (as in UniLM, Dong et al.,
        arXiv:1905.03197, without its segments and sequence-to-sequence masks).
    max_epochs: the largest number of passes over the texts. `steps` is reduced to it (and
        warmup_steps to a tenth of that at most). Training ends earlier when the held-out loss has
        not fallen for PATIENCE passes, and keeps the weights with the lowest loss. None: train
        for `steps` and keep the last weights.
    batch_tokens: the approximate number of tokens in a batch of texts of similar length.
    mask_share: the share of tokens that are predicted.
    held_out_share: the share of the texts that is not trained on and gives the held-out loss.
    """

    steps: NotNegative = 2000
    # for widths about 128; 4e-3 got stuck there, 1e-3 was slower
    learning_rate: PositiveFloat = 2e-3
    warmup_steps: NotNegative = 100
    batch_tokens: Positive = 1024  # 1,600 small steps beat 800 of twice the size, in equal time
    mask_share: Annotated[float, Field(gt=0.0, le=0.9)] = 0.15
    held_out_share: Annotated[float, Field(gt=0.0, le=0.5)] = 0.02
    causal_share: Fraction = 0.0
    max_epochs: Positive | None = None


@dataclass(frozen=True)
class HeldOutScore:
    """Mean cross-entropy (nats) and accuracy, of masked tokens; of next tokens if causal_share is
    1."""

    loss: float
    accuracy: float

    def __str__(self) -> str:
        return f"held-out loss {self.loss:.3f}, accuracy {self.accuracy:.3f}"


class _Best(nn.Module):
    """The network of least held-out loss, and for how many passes there was no smaller one."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = deepcopy(encoder)
        self.loss = nn.Buffer(torch.tensor(math.inf))
        self.num_worse = nn.Buffer(torch.tensor(0))

    def take(self, encoder: Encoder, loss: float) -> None:
        self.num_worse.add_(1)
        if loss < self.loss:
            self.loss.fill_(loss)
            self.num_worse.zero_()
            self.encoder.load_state_dict(encoder.state_dict())


def pretrain(
    encoder: Encoder,
    sentences: Sequence[Sequence[int]],
    ids: TokenIds,
    settings: MaskedLanguageModelling,
    report: Callable[[str], None],
    unfinished: Path,
    setting: str = "pretraining",
) -> HeldOutScore:
    """Train the encoder in place, on its device; the same settings, sentences and initial weights
    give the same bits, interrupted or not.

    sentences: token ids without special ids; DataError if fewer than two are non-empty. setting:
    the dotted name of `settings`, for the user who wants it shorter.
    """
    device = next(encoder.parameters()).device
    draw = torch.Generator().manual_seed(seed_of(settings.seed, "masks and order"))
    # Room for bos and eos.
    longest = encoder.config.max_positions - 2
    texts = [torch.tensor([ids.bos, *text[:longest], ids.eos]) for text in sentences if len(text)]
    if len(texts) < 2:
        raise DataError(f"pretraining a backbone needs 2 sentences or more, got {len(texts)}")
    # Drawn before all else, so that a resumed pretraining holds out the same texts.
    order = torch.randperm(len(texts), generator=draw).tolist()
    num_held_out = max(1, min(MAX_HELD_OUT, round(settings.held_out_share * len(texts))))
    train = [texts[i] for i in order[num_held_out:]]
    held_out = [texts[i] for i in order[:num_held_out]]
    # Updates for one pass over the texts, about.
    a_pass = math.ceil(sum(map(len, train)) / settings.batch_tokens)
    shorter = "steps"
    if settings.max_epochs is not None and (most := settings.max_epochs * a_pass) < settings.steps:
        warmup = min(settings.warmup_steps, most // 10)
        shorter = "max_epochs"
        settings = replace(settings, steps=most, warmup_steps=warmup)
    passes = f"{settings.steps} steps, {settings.steps / a_pass:.1f} passes over them"
    report(f"on {len(texts):,} texts: {passes}; for fewer {setting}.{shorter}=N")

    score = partial(evaluate, encoder, held_out, ids, settings)
    modes = evenly(settings.causal_share)
    several = batches_of(train, batch_tokens=settings.batch_tokens, draw=draw)
    batches = (
        guesses_of(texts, ids, mask_share=settings.mask_share, draw=draw, causal=next(modes))
        for texts in several
    )
    # A bound by epochs is for small corpora, which are soon learned by heart: keep the best then.
    best = _Best(encoder) if settings.max_epochs is not None else None
    with seeded_on(device, seed=seed_of(settings.seed, "dropout")):
        steps = settings.descend(
            encoder,
            batches,
            loss_of=lambda b: loss_and_hits(encoder, batch=b)[0],
            report=report,
            score=score,
            unfinished=unfinished,
            more=best,
        )
        for step, _ in steps:
            if best is not None and (step + 1) % a_pass == 0:
                best.take(encoder, score().loss)
                # `best` is a part of the saved state, so a resumed pretraining ends at the same
                # step.
                if best.num_worse == PATIENCE:
                    report(f"ends at step {step + 1}: the held-out loss rises")
                    break
        if best is not None and best.loss < math.inf:
            encoder.load_state_dict(best.encoder.state_dict())
        encoder.eval()
        return score()


@torch.no_grad()
def evaluate(
    encoder: Encoder, texts: Sequence[Tensor], ids: TokenIds, settings: MaskedLanguageModelling
) -> HeldOutScore:
    """texts: with special ids. Uses the same masks at each call."""
    was_training = encoder.training
    encoder.eval()
    # The same masks each time: losses of different steps differ by the network alone.
    draw = torch.Generator().manual_seed(seed_of(settings.seed, "held-out masks"))
    causal = settings.causal_share == 1
    total = 0.0
    right = 0
    num = 0
    for start in range(0, len(texts), 64):
        guesses = guesses_of(
            texts[start : start + 64],
            ids,
            mask_share=settings.mask_share,
            draw=draw,
            causal=causal,
        )
        loss, hits = loss_and_hits(encoder, batch=guesses)
        masked = len(guesses.truth_M)
        # Batches differ in how many tokens are masked, so means are weighed by that.
        total += float(loss) * masked
        right += int(hits)
        num += masked
    encoder.train(was_training)
    return HeldOutScore(loss=total / num, accuracy=right / num)


def evenly(share: float) -> Iterator[bool]:
    """True for this share, spread: of any ten steps seven if it is 0.7."""
    return (math.floor((n + 1) * share) > math.floor(n * share) for n in count())


def batches_of(
    texts: Sequence[Tensor], batch_tokens: int, draw: torch.Generator
) -> Iterator[list[Tensor]]:
    """Endless batches of about `batch_tokens` tokens, with texts of similar length."""
    pending: list[Tensor] = []
    mean_length = sum(map(len, texts)) / len(texts)
    # Sorted within a pool and not over all texts: batches are alike in length, and still mixed.
    pool = max(1, round(BATCHES_SORTED_TOGETHER * batch_tokens / mean_length))
    while True:
        order = torch.randperm(len(texts), generator=draw).tolist()
        pending += [texts[i] for i in order]
        ready: list[list[Tensor]] = []
        while len(pending) >= min(pool, len(texts)):
            room = 0
            for text in sorted(pending[:pool], key=len):
                if room < len(text):
                    ready.append([])
                    room = max(batch_tokens, len(text))
                ready[-1].append(text)
                room -= len(text)
            del pending[:pool]
        # Drawn once more: in the order of the sorting texts would grow longer batch by batch.
        for i in torch.randperm(len(ready), generator=draw).tolist():
            yield ready[i]


class Guesses(NamedTuple):
    """A batch: what the network sees [R], texts' lengths, rows to predict from [M], the truth."""

    seen_R: Tensor
    lengths: Tensor
    from_M: Tensor
    truth_M: Tensor
    causal: bool


def guesses_of(
    texts: Sequence[Tensor],
    ids: TokenIds,
    mask_share: float,
    draw: torch.Generator,
    causal: bool = False,
) -> Guesses:
    truth_R = torch.cat(list(texts))
    lengths = torch.tensor([len(text) for text in texts])
    if not causal:
        seen_R, from_M = mask_tokens(truth_R, ids, mask_share, draw=draw)
        return Guesses(seen_R, lengths, from_M, truth_M=truth_R[from_M], causal=False)
    # The last token of a text has nothing behind it to be guessed.
    has_next_R = torch.ones_like(truth_R).index_fill_(0, lengths.cumsum(0) - 1, 0)
    from_M = has_next_R.nonzero()[:, 0]
    return Guesses(
        seen_R=truth_R, lengths=lengths, from_M=from_M, truth_M=truth_R[from_M + 1], causal=True
    )


def loss_and_hits(encoder: Encoder, batch: Guesses) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of the predicted tokens, and how many are right."""
    device = next(encoder.parameters()).device
    seen_R, lengths, from_M, truth_M = (tensor.to(device) for tensor in batch[:4])
    rows = encoder(seen_R, Packing(lengths), causal=batch.causal)
    # These rows only: the head is most of the work in a small network.
    scores = encoder.logits(rows.index_select(0, from_M))
    return F.cross_entropy(scores.float(), truth_M), (scores.argmax(1) == truth_M).sum()


def mask_tokens(
    truth_R: Tensor, ids: TokenIds, mask_share: float, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Network input [R] and the rows to predict [M]: at least one, never bos or eos."""
    masked_M = choose_masked(truth_R, special=ids, share=mask_share, draw=draw)
    # Below 0.8 the mask id, below 0.9 a random one, else the token itself.
    fate = torch.rand(len(masked_M), generator=draw)
    words = torch.randint(ids.size, (len(masked_M),), generator=draw)
    replaced = torch.where(fate < 0.8, torch.full_like(words, ids.mask), words)
    seen_R = truth_R.clone()
    seen_R[masked_M] = torch.where(fate < 0.9, replaced, truth_R[masked_M])
    return seen_R, masked_M


def choose_masked(
    ids_R: Tensor,
    special: TokenIds,
    share: float,
    draw: torch.Generator,
    starts_V: Tensor | None = None,
) -> Tensor:
    """Rows to mask, int64 [M], ascending, at least one: each token, or with starts_V (bool [V],
    ids that start a word) each whole word, with probability `share`. Words longer than
    LONGEST_WORD are split into parts of that length. Never pad, bos or eos."""
    fixed_R = (ids_R == special.bos) | (ids_R == special.eos) | (ids_R == special.pad)
    if starts_V is None:
        chance_R = torch.rand(len(ids_R), generator=draw)
    else:
        after_fixed_R = torch.cat((torch.ones(1, dtype=torch.bool), fixed_R[:-1]))
        # A word begins at a piece that starts one, at a special id, and behind one.
        begins_R = starts_V[ids_R] | fixed_R | after_fixed_R
        row_R = torch.arange(len(ids_R))
        # The place of each piece within its word.
        place_R = row_R - (row_R * begins_R).cummax(0).values
        word_R = (place_R % LONGEST_WORD == 0).cumsum(0) - 1
        # One draw for each word, which all of its pieces share.
        chance_R = torch.rand(int(word_R[-1]) + 1, generator=draw)[word_R]
    # Never below `share`; and never the least of all, unless nothing else is there.
    chance_R = chance_R.masked_fill(fixed_R, 1.0)
    masked_M = (chance_R < share).nonzero()[:, 0]
    return masked_M if len(masked_M) else chance_R.argmin(0, keepdim=True)

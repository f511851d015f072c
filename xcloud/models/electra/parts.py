"""Settings, networks and one rank each of ELECTRA's generators (a Producer: mask, fill, train,
pack) and discriminator (a Consumer: unpack, train, count, export). Clark et al., arXiv:2003.10555.

Text, gradients and masks stay in a generator's cloud; corrupted ids and replaced flags leave it.
Nothing is sent back. Differences: the networks share no embeddings, because only ids pass between
them; special ids are never sampled, and the outer bos and eos carry no loss.

Shapes: B samples, R rows (tokens, bos and eos included), M masked rows, C rows without the outer
bos and eos, V token ids, H features.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from xcloud.base.errors import ConfigError, FrameError
from xcloud.base.project import MODEL_DIR
from xcloud.base.settings import Positive, settings
from xcloud.comm.ids import CorruptedTexts, IdPacking
from xcloud.comm.state import State, Stateful, StatefulTree
from xcloud.contracts.model import NumCut, Scores, TokenIds
from xcloud.contracts.one_way import SUMS, Fed, OneWayContext
from xcloud.models.backbone import PretrainedBackbone, PublicBackbone, SeededBackbone, export
from xcloud.models.encoder import Encoder, EncoderConfig, Packing
from xcloud.models.pretraining import choose_masked
from xcloud.models.stages import seed_of, seeded_on
from xcloud.pipeline.settings import Optimizer, autocast_for
from xcloud.pipeline.trainer import TrainedModule, diverged
from xcloud.tasks.multilingual_text import TextStream
from xcloud.tasks.scores import ratio_error
from xcloud.tasks.text_sources import TextSource
from xcloud.tasks.tokenizer import Tokenizer

DISCRIMINATOR_DIR = "discriminator"
SAMPLED_TOGETHER = 2**24  # probabilities held at once during sampling
SCORED_STEPS = 50  # evaluate over the last steps; batches are scored before training on them

Network = SeededBackbone | PretrainedBackbone | PublicBackbone


@settings("generator")
class Generator:
    """One cloud's generator: its texts, network, masking and optimizer.

    languages, pairs: the parts of its texts, such as [es] and [es-en]. A pair is a text and its
        translation, masked on both sides (TLM). No other cloud reads them for it.
    source: its own source of texts, if it is not model.text.source.
    batch_size: the number of samples in a batch. A batch is one generator update and one message.
    whole_words: mask all pieces of a word or none. In scripts without spaces (Chinese, Thai) each
        piece is a word.
    temperature: the temperature of the softmax from which replacements are sampled.
    frozen: the generator only samples and is not trained.
    backbone: its network.
    optimizer: the optimizer of its weights.
    mask_share: the share of tokens that are masked and guessed.
    precision: the precision of matrix products, as training.precision of a pipeline.
    """

    languages: Sequence[str] = ()
    pairs: Sequence[str] = ()
    backbone: Network = field(default_factory=SeededBackbone)
    optimizer: Optimizer = field(default_factory=Optimizer)
    batch_size: Positive = 32
    mask_share: Annotated[float, Field(gt=0.0, le=0.9)] = 0.15
    whole_words: bool = False
    temperature: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    frozen: bool = False
    precision: Literal["fp32", "bf16", "auto"] = "auto"
    source: TextSource | None = None

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("generator.languages and generator.pairs are both empty: name one")
        if odd := [pair for pair in self.pairs if pair.count("-") != 1]:
            raise ConfigError(f"generator.pairs must be such as [es-en], got {odd[0]!r}")
        if twice := [part for part in self.parts if self.parts.count(part) > 1]:
            raise ConfigError(f"generator.languages and generator.pairs name {twice[0]} twice")
        if self.frozen and not self.backbone.is_checkpoint:
            said = f"{self.backbone.label} cannot fill masks; train it (frozen=false)"
            raise ConfigError(f"generator.frozen needs a PretrainedBackbone: {said}")

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.languages, *self.pairs)


@settings("discriminator")
class DiscriminatorSettings:
    """The settings of the discriminator.

    loss_weight: the paper's λ in loss = MLM + λ RTD. With separate optimizers it matters only
        where gradient magnitude does, in clip_norm and eps: AdamW normalises the rest away.
    backbone: its network.
    optimizer: the optimizer of its weights.
    precision: the precision of matrix products, as training.precision of a pipeline.
    """

    backbone: Network = field(default_factory=SeededBackbone)
    optimizer: Optimizer = field(default_factory=Optimizer)
    loss_weight: Annotated[float, Field(gt=0.0)] = 50.0
    precision: Literal["fp32", "bf16", "auto"] = "auto"


def corrupt(
    generator: Encoder,
    ids_R: Tensor,
    packing: Packing,
    masked_M: Tensor,
    special: TokenIds,
    temperature: float,
    draw: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Mask these rows and sample replacements from the generator.

    draw: a generator on the CPU, so that no random number depends on the device.
    Returns ids [R], and the mean cross-entropy of the masked tokens, with graph.
    """
    hidden_RH = generator(ids_R.index_fill(0, masked_M, special.mask), packing)
    # The head is applied to masked rows only.
    scores_MV = generator.logits(hidden_RH.index_select(0, masked_M)).float()
    # No gradient passes the sampling: the generator learns by its own loss alone (Clark et al.).
    words_M = sample_words(scores_MV.detach(), special, temperature, draw=draw)
    return ids_R.index_copy(0, masked_M, words_M), F.cross_entropy(scores_MV, ids_R[masked_M])


@torch.no_grad()
def sample_words(
    scores_MV: Tensor, special: TokenIds, temperature: float, draw: torch.Generator
) -> Tensor:
    """Sample one id per row from softmax(scores / temperature), int64 [M], by inverse CDF: one
    random number per row. Special ids, and ids beyond the tokenizer's, are never drawn."""
    forbidden_V = torch.arange(scores_MV.shape[1], device=scores_MV.device) >= special.size
    forbidden_V[[special.pad, special.bos, special.eos, special.mask]] = True
    # All random numbers at once: how many rows are sampled together changes nothing.
    random_M = torch.rand(len(scores_MV), generator=draw).to(scores_MV.device)
    drawn = []
    rows = max(1, SAMPLED_TOGETHER // scores_MV.shape[1])
    for first in range(0, len(scores_MV), rows):
        scores = scores_MV[first : first + rows]
        random = random_M[first : first + rows]
        chances = (scores / temperature).masked_fill(forbidden_V, -torch.inf).softmax(1)
        sums = chances.cumsum(1)
        # Slightly below the total, or rounding could step past the last allowed id.
        wanted = (random * (1 - 1e-6))[:, None] * sums[:, -1:]
        drawn.append(torch.searchsorted(sums, wanted, right=True)[:, 0])
    return torch.cat(drawn)


class Discriminator(nn.Module):
    """An encoder without a masked-language head, and a score per token, w . gelu(dense(x)) + b;
    positive means replaced."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config, head=False)
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.score = nn.Linear(config.hidden, 1)
        for layer in (self.dense, self.score):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, ids_R: Tensor, packing: Packing) -> Tensor:
        scores_R: Tensor = self.score(F.gelu(self.dense(self.encoder(ids_R, packing))))[:, 0]
        return scores_R


def detect_replaced(
    discriminator: Discriminator, texts: CorruptedTexts, special: TokenIds
) -> tuple[Tensor, list[int]]:
    """Score received tokens, whose outer bos and eos are added back.

    Returns the loss, summed, with graph, and true positives, false positives and false negatives.
    A token counts as detected if its score is positive.
    """
    ids_C, counts_B, replaced_C = texts
    ids_R, inner_C = with_ends(ids_C, counts_B, special)
    scores_C = discriminator(ids_R, Packing(counts_B + 2)).index_select(0, inner_C).float()
    loss = F.binary_cross_entropy_with_logits(scores_C, replaced_C.float(), reduction="sum")
    found_C = scores_C.detach() > 0
    # True positives, false positives, false negatives.
    counts = (found_C & replaced_C, found_C & ~replaced_C, ~found_C & replaced_C)
    return loss, torch.stack(counts).sum(1).tolist()


def inner_rows(counts_B: Tensor) -> Tensor:
    """Return the rows that are neither first nor last in their sample, int64 [C].

    counts_B: the number of rows of each sample, bos and eos included.
    """
    ends = counts_B.cumsum(0)
    is_inner = torch.ones(int(ends[-1]), dtype=torch.bool, device=counts_B.device)
    is_inner[ends - 1] = False
    is_inner[ends - counts_B] = False
    return is_inner.nonzero()[:, 0]


def with_ends(ids_C: Tensor, counts_B: Tensor, special: TokenIds) -> tuple[Tensor, Tensor]:
    """Add bos and eos around each sample: ids [R], and the new rows of the tokens [C]."""
    inner_C = inner_rows(counts_B + 2)
    ids_R = ids_C.new_full((len(ids_C) + 2 * len(counts_B),), special.eos)
    ids_R[(counts_B + 2).cumsum(0) - counts_B - 2] = special.bos
    ids_R[inner_C] = ids_C
    return ids_R, inner_C


@dataclass
class _Learner(StatefulTree):
    """A network on one rank, and what trains it: nothing where it is frozen."""

    network: Any
    settings: Any
    packing: IdPacking
    tokenizer: Tokenizer
    context: OneWayContext

    def __post_init__(self) -> None:
        is_trained = not getattr(self.settings, "frozen", False)
        self.network.to(self.context.device).train(is_trained).requires_grad_(is_trained)
        self._num_steps = self.context.num_steps
        self._device = self.context.device
        self._autocast = autocast_for(self.settings.precision, device=self._device)
        rule = self.settings.optimizer
        self._optimizer = rule.build(self.network) if is_trained else None
        self._trained = TrainedModule(module=self.network, optimizer=self._optimizer)

    def children(self) -> dict[str, Stateful]:
        return {"network": self._trained}

    def own_digests(self) -> dict[str, str]:
        return {"the tokenizer": f"{self.tokenizer.digest:08x}"}

    def _learn(self, number: int) -> None:
        if self._optimizer is None:
            return
        rule: Optimizer = self.settings.optimizer
        if rule.clip_norm:
            nn.utils.clip_grad_norm_(self.network.parameters(), rule.clip_norm)
        for group in self._optimizer.param_groups:
            # The number of steps may change while a run goes on (`replan`), so the rate is set
            # each time.
            group["lr"] = rule.learning_rate_at(number, max_steps=self._num_steps)
        self._optimizer.step()


@dataclass
class GeneratorRank(_Learner):
    """One rank of a generator: it masks, fills, trains and packs."""

    network: Encoder
    settings: Generator
    stream: TextStream = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        words = self.settings.whole_words
        # bool [V]: the ids that begin a word.
        self._starts_V = torch.tensor(self.tokenizer.word_starts()) if words else None

    def own_digests(self) -> dict[str, str]:
        texts = {f"texts of {part}": table.digest for part, table in self.stream.tables.items()}
        return super().own_digests() | texts

    @property
    def num_cut(self) -> NumCut:
        return self.stream.num_cut(self.context.cloud)

    @property
    def parameters_module(self) -> nn.Module | None:
        return None if self.settings.frozen else self.network

    def produce(self, number: int) -> Fed:
        """Make a batch. Texts, masks, ids and dropout depend on seed, cloud, group rank and number
        alone."""
        settings = self.settings
        special = self.tokenizer.token_ids
        ids_R, counts_B = self.stream.batch(number)
        draw = torch.Generator().manual_seed(self._random("masks", number))
        masked_M = choose_masked(
            ids_R, special, share=settings.mask_share, draw=draw, starts_V=self._starts_V
        )
        with (
            seeded_on(self._device, seed=self._random("dropout", number)),
            torch.set_grad_enabled(not settings.frozen),
            self._autocast(),
        ):
            made_R, loss = corrupt(
                self.network,
                ids_R=ids_R.to(self._device),
                packing=Packing(counts_B.to(self._device)),
                masked_M=masked_M.to(self._device),
                special=special,
                temperature=settings.temperature,
                draw=draw,
            )
        if not settings.frozen:
            torch.autograd.backward(loss)
        if not loss.isfinite():
            raise diverged(
                f"the loss of batch {number} of producer {self.context.cloud!r} is {loss.item()}",
                remark="the batch cannot be skipped: nothing can be sampled, nothing can be sent",
            )
        inner_C = inner_rows(counts_B)
        made_R = made_R.cpu()  # a token that is drawn as it was is not replaced
        texts = CorruptedTexts(
            ids_R=made_R[inner_C], counts_B=counts_B - 2, replaced_R=(made_R != ids_R)[inner_C]
        )
        return Fed(
            payload=self.packing.pack(texts),
            num_samples=len(counts_B),
            num_tokens=len(inner_C),
            loss=loss.item(),
        )

    def replan(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def update(self, number: int) -> None:
        self._learn(number)

    def finish(self, run_dir: Path) -> None:
        """Export a trained generator as a BertForMaskedLM, in its own cloud."""
        if self.settings.frozen:
            return
        folder = run_dir / MODEL_DIR / f"generator_{self.context.cloud}"
        export(self.network, folder=folder, pad=self.tokenizer.token_ids.pad)
        self.tokenizer.save_pretrained(folder, max_length=self.network.config.max_positions)

    def _random(self, what: str, number: int) -> int:
        of = self.context
        return seed_of(of.seed, what, of.cloud, of.group_rank, number)


@dataclass
class DiscriminatorRank(_Learner):
    """One rank of the discriminator: it unpacks, trains, counts and exports."""

    network: Discriminator
    settings: DiscriminatorSettings

    own_names = ("recent",)
    _step_sums: Counter[str] = field(default_factory=Counter, init=False)
    _recent: deque[list[float]] = field(
        default_factory=lambda: deque(maxlen=SCORED_STEPS), init=False
    )
    """SUMS of each step."""

    @property
    def module(self) -> nn.Module:
        return self.network

    def consume(self, payloads: Sequence[tuple[int, Tensor]]) -> Mapping[str, float]:
        sums: Counter[str] = Counter()
        for producer, payload in payloads:
            try:
                texts = self.packing.unpack(payload)
            except FrameError as error:
                name = dict(enumerate(self.context.producers)).get(producer, producer)
                raise FrameError(f"a batch of producer {name!r} is refused: {error}") from error
            # Dropout depends on the batch itself, not on which rank consumes it, or when.
            content = zlib.crc32(texts.ids_R.numpy().tobytes())
            dropout = seed_of(self.context.seed, "discriminator dropout", content)
            there = CorruptedTexts(*(tensor.to(self._device) for tensor in texts))
            with seeded_on(self._device, seed=dropout), self._autocast():
                loss, counts = detect_replaced(
                    self.network, texts=there, special=self.tokenizer.token_ids
                )
            # Batch by batch: gradients add up, and only one batch's activations are in memory.
            torch.autograd.backward(loss)
            tokens = len(texts.ids_R)
            found = (float(loss.detach()), tokens, len(texts.counts_B), tokens, *counts)
            sums.update(dict(zip(SUMS, found, strict=True)))
        self._step_sums.update(sums)
        return sums

    def update(self, step: int, weight: float) -> None:
        for parameter in self.network.parameters():
            if parameter.grad is not None:
                # A mean over the tokens of all ranks (weight), times lambda.
                parameter.grad.mul_(self.settings.loss_weight / weight)
        self._learn(step)
        # Scored before it was learned from: a held-out score that costs nothing.
        self._recent.append([self._step_sums[name] for name in SUMS])
        self._step_sums = Counter()

    def skip(self, step: int) -> None:
        self._step_sums = Counter()

    def own(self) -> State:
        return {"recent": self._recent_sums()}

    def _recent_sums(self) -> Tensor:
        return torch.tensor([*self._recent], dtype=torch.float64).view(-1, len(SUMS))

    def take(self, own: State) -> None:
        recent = own.get("recent")
        if not isinstance(recent, Tensor) or recent.shape[1:] != (len(SUMS),):
            said = f"needs 'recent', {len(SUMS)} sums of each step, got {sorted(own)}"
            raise ValueError(f"the state of a discriminator {said}; other settings saved it")
        self._recent = deque(recent.tolist(), maxlen=SCORED_STEPS)

    def export(self, run_dir: Path) -> None:
        folder = run_dir / MODEL_DIR / DISCRIMINATOR_DIR
        network = self.network
        pad = self.tokenizer.token_ids.pad
        heads = {"dense": network.dense, "dense_prediction": network.score}
        export(network.encoder, folder=folder, pad=pad, **heads)
        self.tokenizer.save_pretrained(folder, max_length=network.encoder.config.max_positions)

    def evaluate(self) -> Scores:
        """Return replaced-token detection over this rank's batches of the last steps: percent, and
        nats per token. Errors are over these batches."""
        of = dict(zip(SUMS, self._recent_sums().T, strict=True))
        hits = of["true_positives"]
        detected = hits + of["false_positives"]
        replaced = hits + of["false_negatives"]
        ratios = {
            "replaced_precision": (100 * hits, detected),
            "replaced_recall": (100 * hits, replaced),
            "replaced_f1": (200 * hits, detected + replaced),
            "replaced_loss": (of["loss_sum"], of["weight"]),
        }
        values = {}
        errors = {}
        for name, (above, below) in ratios.items():
            values[name] = float(above.sum()) / max(1.0, float(below.sum()))
            errors[name] = ratio_error(above, below)
        return Scores(values, errors)

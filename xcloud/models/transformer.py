"""Source -> target models, cut into encoder | decoder: greedy and beam search, what the models
share, and the Transformer that is trained from scratch. AB-Net is in abnet.py.

Stages 0..n-2 hold the encoder layers, the last stage holds the decoder. Only stage 0 reads the
source text, only the last the target text; the encoder's hidden rows cross the boundaries.
Batch fields "source" and "target": int64 [B, S], `bos x1 .. xn eos`, padded on the right.
A layer is a module of (rows [R, H], packing) -> rows [R, H]; in the decoder it also takes its
Cache. In a decoding step there is one row for each hypothesis.

Shapes: B (unfinished) samples, R rows of the source, T rows of the target (tokens that are not
padding), H features, V token ids, N = B * K live hypotheses, K beams, L tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Fraction, NotNegativeFloat, Positive, settings
from xcloud.comm.channel import Boundary, Message
from xcloud.comm.devices import bring
from xcloud.contracts.model import Architecture, Batch, BuildContext, Stage, StageOutput, TokenIds
from xcloud.models.encoder import Cache, CrossAttention, Layer, Packing
from xcloud.models.stages import RowsStage, rows_boundary, seeded

SOURCE = "source"
TARGET = "target"


@settings("decoding")
class Limits:
    """A limit on the tokens of an output: length_ratio * (source tokens) + length_extra.

    Without one a half-trained network rambles on to the task's maximum length.

    length_ratio: the number of output tokens for each token of the source.
    length_extra: the number of output tokens beside these.
    """

    length_ratio: NotNegativeFloat = 2.0
    length_extra: Positive = 10

    def limits(self, source_counts: Tensor, longest: int) -> Tensor:
        """Maximum output tokens per sentence, eos included, int64 [B]; at most `longest`."""
        wanted = (source_counts * self.length_ratio).long() + self.length_extra
        return wanted.clamp(max=longest)


@settings("Greedy")
class Greedy(Limits):
    """The most probable token at each step."""

    def search(self, decoder: CachedDecoder, limits: Tensor, ids: TokenIds) -> list[list[int]]:
        """Token ids of each sentence, without bos and eos. limits: int64 [B]."""
        num_sentences = len(limits)
        longest = int(limits.max())
        written = limits.new_full((num_sentences, longest), ids.eos)
        alive = torch.arange(num_sentences, device=limits.device)
        tokens = torch.full_like(alive, ids.bos)
        for position in range(longest):
            tokens = _without_special(decoder.step(tokens), ids).argmax(1)
            written[alive, position] = tokens
            # Sentences that have ended leave the batch, so that late ones cost only themselves.
            going = ((tokens != ids.eos) & (limits[alive] > position + 1)).nonzero()[:, 0]
            if not len(going):
                break
            if len(going) < len(alive):
                decoder.keep(going, sentences=going)
                alive = alive[going]
                tokens = tokens[going]
        return _texts(written, eos=ids.eos)


@settings("Beam")
class Beam(Limits):
    """Beam search of width `size`; score = log-probability / length ** length_penalty.

    A sentence is done once `size` hypotheses have ended and no live one is better, or no live one
    can still win. The bookkeeping (2K candidates, of which at most K end) is that of fairseq's
    SequenceGenerator, which stops at `size` ends regardless. Beam(size=1) is Greedy.

    size: the number of hypotheses of a sentence that are followed at a time.
    length_penalty: the exponent of the length in the score; 0 favours short sentences.
    """

    size: Positive = 4
    length_penalty: NotNegativeFloat = 1.0

    def search(self, decoder: CachedDecoder, limits: Tensor, ids: TokenIds) -> list[list[int]]:
        beams = self.size
        longest = int(limits.max())
        alive = torch.arange(len(limits), device=limits.device)
        best = torch.full(limits.shape, -torch.inf, device=limits.device)
        best_written = limits.new_full((len(limits), longest), ids.eos)
        num_ended = torch.zeros_like(limits)

        # K hypotheses of each sentence from the start; the source's keys stay one for each
        # sentence.
        decoder.keep(alive.repeat_interleave(beams))
        tokens_N = limits.new_full((len(limits) * beams,), ids.bos)
        written_BKL = limits.new_full((len(limits), beams, longest), ids.eos)
        # All beams start equal; only one of them may be continued.
        total_BK = torch.full((len(limits), beams), -torch.inf, device=limits.device)
        total_BK[:, 0] = 0.0

        for position in range(longest):
            scores_NV = _without_special(decoder.step(tokens_N), ids).float().log_softmax(1)
            num_words = scores_NV.shape[1]
            grown = total_BK[:, :, None] + scores_NV.view(len(alive), beams, num_words)
            # Over all words of all hypotheses of a sentence: [B, K V].
            candidates, flat = grown.flatten(1).topk(2 * beams, dim=1)
            parent = flat // num_words
            word = flat % num_words
            ends = word == ids.eos

            # Ended hypotheses, and all at the limit, compete to be the sentence's best.
            at_limit = limits[alive] == position + 1
            ended = (ends | at_limit[:, None])[:, :beams] & candidates[:, :beams].isfinite()
            scaled = candidates[:, :beams] / (position + 1) ** self.length_penalty
            score, winner = scaled.masked_fill(~ended, -torch.inf).max(1, keepdim=True)
            # Only a strictly better one replaces a sentence found earlier, which is the shorter
            # one.
            score, better = score[:, 0], score[:, 0] > best[alive]
            line = written_BKL[torch.arange(len(alive)), parent.gather(1, winner)[:, 0]]
            line[:, position] = word.gather(1, winner)[:, 0]
            best_written[alive[better]] = line[better]
            best[alive] = torch.maximum(best[alive], score)
            num_ended[alive] += ended.sum(1)

            # At most K of the 2K candidates end, so K remain.
            total_BK, pick = candidates.masked_fill(ends, -torch.inf).topk(beams, dim=1)
            word = word.gather(1, pick)
            parent = parent.gather(1, pick)
            # The best live hypothesis, if it ended here, and the best score that it can still
            # have: log-probabilities only fall, so dividing by the largest length bounds it.
            now = total_BK[:, 0] / (position + 1) ** self.length_penalty
            reachable = total_BK[:, 0] / limits[alive] ** self.length_penalty
            enough = (num_ended[alive] >= beams) & (best[alive] >= now)
            done = at_limit | enough | (best[alive] >= reachable)
            going = (~done).nonzero()[:, 0]
            if not len(going):
                break
            rows_BK = going[:, None] * beams + parent[going]
            decoder.keep(rows_BK.flatten(), sentences=going if len(going) < len(alive) else None)
            alive = alive[going]
            total_BK = total_BK[going]
            tokens_N = word[going].flatten()
            written_BKL = written_BKL.flatten(0, 1)[rows_BK]
            written_BKL[:, :, position] = word[going]
        return _texts(best_written, eos=ids.eos)


Decoding = Greedy | Beam


def _without_special(scores_NV: Tensor, ids: TokenIds) -> Tensor:
    """Exclude pad, bos and mask, which never occur in a text. In place."""
    # Some tokenizers have one id for bos and eos, which must stay possible.
    scores_NV[:, sorted({ids.pad, ids.bos, ids.mask} - {ids.eos})] = -torch.inf
    return scores_NV


def _texts(written: Tensor, eos: int) -> list[list[int]]:
    return [line[: line.index(eos)] if eos in line else line for line in written.tolist()]


@settings("model", kw_only=True)
class EncoderDecoder:
    """The cut of a SplitModel into encoder | decoder. encoder_layers_per_stage: of each stage but
    the last; null spreads them evenly."""

    dropout: Fraction = 0.1
    label_smoothing: Annotated[float, Field(ge=0.0, le=0.99)] = 0.1
    encoder_layers_per_stage: Sequence[Positive] | None = None
    decoding: Decoding = field(default_factory=Greedy)

    def fields(self, stage: int, num_stages: int) -> frozenset[str]:
        if num_stages < 2:
            raise ConfigError(f"{type(self).__name__} needs 2 stages or more, got {num_stages}")
        if stage == 0:
            return frozenset({SOURCE})
        if stage == num_stages - 1:
            return frozenset({TARGET})
        return frozenset()

    def parts(self, stage: int, num_stages: int) -> frozenset[str]:
        if stage == num_stages - 1:
            return frozenset({"target_embeddings", "decoder", "head"})
        return frozenset({"encoder", "source_embeddings"} if stage == 0 else {"encoder"})

    def encoder_layers(self, num_layers: int, stage: int, num_stages: int) -> range:
        """Return the encoder layers of a stage: as encoder_layers_per_stage says, else evenly,
        with one more in the first ones."""
        num_parts = num_stages - 1
        counts = self.encoder_layers_per_stage
        if counts is None:
            share, over = divmod(num_layers, num_parts)
            counts = [share + (part < over) for part in range(num_parts)]
        if len(counts) != num_parts or sum(counts) != num_layers or 0 in counts:
            raise ConfigError(
                f"{type(self).__name__}.encoder_layers_per_stage must be {num_parts} counts >= 1 "
                f"(no last stage's) that add up to {num_layers} layers, got {list(counts)}"
            )
        first = sum(counts[:stage])
        return range(first, first + counts[stage])


class TargetStage(Stage):
    """The decoder, the loss and the prediction.

    loss: sum over the target tokens, eos included and bos not, of cross-entropy with label
    smoothing e: -(1-e) log p(y) - e/V * sum over V of log p (Szegedy et al., arXiv:1512.00567).
    embeddings: has `words`, [V, H]. head: (rows [T, H], words [V, H]) -> scores [T, V].
    """

    def __init__(
        self,
        embeddings: nn.Module,
        layers: Mapping[str, nn.Module],
        head: nn.Module,
        settings: EncoderDecoder,
        context: BuildContext,
        architecture: Architecture,
    ) -> None:
        super().__init__(architecture)
        self.embeddings = embeddings
        self.layers = nn.ModuleDict(layers)
        self.head = head
        self.settings = settings
        self._ids = context.vocabularies[TARGET]
        self._max_length = context.max_length

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        target_BS = batch[TARGET]
        assert received is not None
        assert int(target_BS[0, 0]) == self._ids.bos, "a target must start with bos"
        # eos is not an input, bos not an output: one row fewer than tokens.
        packing = Packing((target_BS != self._ids.pad).sum(1) - 1)
        given_T, guessed_T = (
            bring(packing.pack(ids_BS), device=self.device)
            for ids_BS in (target_BS, target_BS[:, 1:])
        )
        scores = self.scores(given_T, packing=packing.on(self.device), caches=self.open(received))
        loss = F.cross_entropy(
            scores.float(),
            guessed_T,
            label_smoothing=self.settings.label_smoothing,
            reduction="sum",
        )
        return StageOutput(loss=loss)

    def open(self, received: Message, decodes: bool = False) -> list[Cache]:
        """Return the cache of each layer, filled from the encoder's rows."""
        packing = Packing(received["counts"]).on(self.device)
        # Keys and values of the source are computed once, not in every decoding step.
        crosses = (part for part in self.layers.modules() if isinstance(part, CrossAttention))
        return [cross.open(received["hidden"], packing, decodes) for cross in crosses]

    def scores(self, ids_T: Tensor, packing: Packing, caches: Sequence[Cache]) -> Tensor:
        """Next-token scores [T, V], given each row and those before it."""
        rows = self.embeddings(ids_T, packing)
        for layer, cache in zip(self.layers.values(), caches, strict=True):
            rows = layer(rows, packing, cache)
        return cast(Tensor, self.head(rows, self.get_parameter("embeddings.words.weight")))

    @torch.no_grad()
    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        """Target ids without bos and eos. Ignores the batch; no dropout."""
        assert received is not None
        was_training = self.training
        self.eval()
        decoding = self.settings.decoding
        counts = bring(received["counts"].long(), device=self.device)
        limits = decoding.limits(counts, longest=self._max_length - 1)
        decoder = CachedDecoder(stage=self, caches=self.open(received, decodes=True))
        answers = decoding.search(decoder, limits, self._ids)
        self.train(was_training)
        return answers


@dataclass(eq=False)
class CachedDecoder:
    """Scores the next token of many hypotheses at once, and keeps what it needs of their past."""

    stage: TargetStage
    caches: Sequence[Cache]
    _position: int = 0

    def step(self, tokens_N: Tensor) -> Tensor:
        """Append one token to each hypothesis; return next-token scores [N, V], a new tensor."""
        packing = Packing(
            counts=torch.ones(len(tokens_N), dtype=torch.int64),
            positions=torch.full_like(tokens_N, self._position),
        )
        self._position += 1
        return self.stage.scores(tokens_N, packing=packing, caches=self.caches)

    def keep(self, rows: Tensor, sentences: Tensor | None = None) -> None:
        """Hypothesis i continues the former hypothesis rows[i]; sentence j is the former sentence
        sentences[j] (None: unchanged). All sentences have equally many, adjacent hypotheses."""
        for cache in self.caches:
            cache.keep(rows, sentences=sentences)


def sinusoids(num_positions: int, hidden: int) -> Tensor:
    """[positions, H]: sine in even features, cosine in odd ones (section 3.5 of the paper)."""
    # 1 / 10,000^(2i / H), by way of its logarithm.
    rate = torch.exp(torch.arange(0, hidden, 2) * (-math.log(10_000.0) / hidden))
    angle = torch.arange(num_positions)[:, None] * rate
    return torch.stack((angle.sin(), angle.cos()), 2).flatten(1)[:, :hidden]


class ScaledEmbeddings(nn.Module):
    """sqrt(H) * word + sinusoid. Sinusoids are recomputed, not saved."""

    positions: Tensor

    def __init__(self, vocab_size: int, hidden: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, hidden)
        # Times sqrt(H) below, so that words and sinusoids are of one size.
        nn.init.normal_(self.words.weight, std=hidden**-0.5)
        self.register_buffer("positions", sinusoids(max_length, hidden), persistent=False)
        self.scale = math.sqrt(hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids_R: Tensor, packing: Packing) -> Tensor:
        packing.check(len(self.positions))
        words = self.words(ids_R) * self.scale
        return cast(Tensor, self.dropout(words + self.positions[packing.positions]))


class LastNorm(nn.LayerNorm):
    """The last norm of the encoder, a layer of its last stage."""

    def forward(self, rows_RH: Tensor, packing: Packing | None = None) -> Tensor:
        return super().forward(rows_RH)


class TiedHead(nn.Module):
    """words . LN(x): output weights tied to the target embedding."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)

    def forward(self, rows_TH: Tensor, words_VH: Tensor) -> Tensor:
        return F.linear(self.norm(rows_TH), words_VH)


@settings("Transformer")
class Transformer(EncoderDecoder):
    """Encoder | decoder from scratch; a SplitModel. Each side has its own vocabulary, because
    neither may see the other's; the target embedding is tied to the output.

    Vaswani et al., arXiv:1706.03762 ("base": hidden 512, 6 + 6 layers, 8 heads, 2048). Difference:
    pre-LN (Xiong et al., arXiv:2002.04745), x + f(LN(x)), because it trains at learning rates and
    warm-ups where post-LN diverges, so one setting works for all sizes here.

    hidden: the number of features of a row, a multiple of num_heads.
    num_encoder_layers: the number of blocks of the encoder.
    num_decoder_layers: the number of blocks of the decoder.
    num_heads: the number of attention heads of a block.
    feed_forward: the number of features inside a block's feed-forward network.
    dropout: the share of features that is zeroed in training.
    label_smoothing: the share of the target's probability that is spread over the vocabulary.
    decoding: the method of searching for translations.
    """

    hidden: Positive = 512
    num_encoder_layers: Positive = 6
    num_decoder_layers: Positive = 6
    num_heads: Positive = 8
    feed_forward: Positive = 2048

    def __post_init__(self) -> None:
        if self.hidden % self.num_heads:
            raise ConfigError(
                f"Transformer.num_heads must divide the hidden size {self.hidden}, got "
                f"{self.num_heads}"
            )

    def describe(self) -> str:
        layers = f"{self.num_encoder_layers} + {self.num_decoder_layers} layers"
        return f"Transformer from scratch, {layers} x {self.hidden}"

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        return rows_boundary(self.hidden, max_length)

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        is_last = stage == num_stages - 1
        name, end = (TARGET, "decoder") if is_last else (SOURCE, "encoder")
        numbers = range(self.num_decoder_layers)
        if not is_last:
            numbers = self.encoder_layers(self.num_encoder_layers, stage, num_stages)
        layers: dict[str, nn.Module] = {}
        for i in numbers:
            # One random stream per layer: initial weights do not depend on the layout.
            with seeded(context.seed, f"{end} layer", i):
                sizes = (self.hidden, self.num_heads, self.feed_forward)
                layers[str(i)] = Layer(*sizes, self.dropout, crosses=is_last)
        embeddings = None
        pad = 0
        if is_last or stage == 0:
            ids = context.vocabularies[name]
            with seeded(context.seed, f"{end} ends"):
                shape = (ids.size, self.hidden, context.max_length)
                embeddings = ScaledEmbeddings(*shape, self.dropout)
                pad = ids.pad
        if embeddings is not None and is_last:
            return TargetStage(
                embeddings,
                layers,
                head=TiedHead(self.hidden),
                settings=self,
                context=context,
                architecture={},
            )
        # Pre-LN needs a last norm; it belongs to the stage whose rows the decoder reads.
        if stage == num_stages - 2:
            layers["norm"] = LastNorm(self.hidden)
        return RowsStage(
            architecture={}, embeddings=embeddings, layers=layers, field=SOURCE, pad=pad
        )

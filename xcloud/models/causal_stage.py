"""A stage of a cut causal language model: token ids or rows in, rows or the loss out; and a small
model pretrained as one such stage (`OwnCausal`). Which blocks a stage holds is causal.py's.

Batch fields, int64 [B, S]: "text" token ids, NO_TOKEN after them; "types" which of the sample's
documents a token belongs to, from 0; "label" the token to be guessed at each place, NO_LABEL where
none is.
Shapes: B samples, S positions, R rows (tokens that are not padding), H features,
V token ids, C of them in a piece of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import DataError
from xcloud.base.settings import Labelled, Positive, PositiveFloat, settings
from xcloud.comm.channel import Message
from xcloud.comm.devices import bring
from xcloud.contracts.model import (
    NO_LABEL,
    NO_TOKEN,
    NOT_FINITE,
    Architecture,
    Batch,
    BuildContext,
    DocumentLoss,
    Stage,
    StageOutput,
    TokenIds,
)
from xcloud.models.causal_network import (
    HEAD,
    Part,
    Past,
    config_of,
    draw_weights,
    network_of,
    peft_name,
    positions_of,
    run,
    write_checkpoint,
)
from xcloud.models.document_attention import Documents
from xcloud.models.encoder import Packing, check_heads
from xcloud.models.experts import RouterLoss
from xcloud.models.following import Choice, following
from xcloud.models.frozen_weights import cast_to
from xcloud.models.pretraining import Descent, PublicTexts, same_arithmetic
from xcloud.models.split_point import Projection
from xcloud.models.stages import LABEL, TEXT, TYPES, seed_of
from xcloud.pretrained import bytes_of, key_of, made_once

# Part of every cache key: raise it when the same settings would give other weights than before.
CODE_VERSION = 2


def packed_places(types_BS: Tensor) -> Tensor:
    """Position of each token in its document, from 0."""
    order_BS = torch.arange(types_BS.shape[1], device=types_BS.device).expand_as(types_BS)
    # The first token begins a document, whatever its type.
    begins_BS = types_BS.diff(dim=1, prepend=types_BS[:, :1] - 1) != 0
    starts_BS = torch.where(begins_BS, order_BS, 0).cummax(1).values
    return order_BS - starts_BS


class CausalStage(Stage):
    """A stage of a causal language model.

    network: the part of the model that this stage holds.
    chunk: the number of tokens whose loss is computed at once.
    cut: the module that reduces rows on their way out, or restores them on their way in.
    is_tied: the embeddings or the head are one matrix with the pipeline's other end.
    router_loss: the loss of the routers; None without one.
    document_loss: see BuildContext.
    """

    def __init__(
        self,
        network: Any,
        part: Part,
        chunk: int,
        architecture: Architecture,
        cut: nn.Module | None = None,
        handed_over: tuple[Tensor, ...] = (),
        frozen: bool = False,
        is_tied: bool = False,
        router_loss: RouterLoss | None = None,
        document_loss: DocumentLoss | None = None,
    ) -> None:
        config = {"config": parsed_json(network.config.to_json_string())}
        super().__init__({**architecture, **config}, handed_over, frozen)
        self.network = network
        self._part = part
        self._chunk = chunk
        self._cap = cap_of(network.config)
        self.cut = cut
        self._is_tied = is_tied
        self._router_loss = router_loss
        self._document_loss = document_loss
        if frozen:
            self.requires_grad_(False)

    def tied(self) -> nn.Parameter | None:
        if not self._is_tied:
            return None
        words = cast(Any, self.network).get_input_embeddings()
        return cast(nn.Parameter, (self._head if self._part.is_last else words).weight)

    def take_over(self, tensors: tuple[Tensor, ...]) -> None:
        cast(Projection, self.cut).start(*tensors)

    def exported(self) -> dict[str, Tensor]:
        """Return what training changes, adapters or all, by the names of peft or transformers."""
        cut = {} if self.cut is None else self.cut.state_dict(prefix="cut.")
        state: dict[str, Tensor] = self.network.state_dict()
        if self.architecture["lora"]:
            return {peft_name(name): state[name] for name in state if ".lora_" in name} | cut
        is_whole = self._part.is_first and self._part.is_last
        config = self.network.config
        if is_whole and config.tie_word_embeddings:
            del state[f"{HEAD}.weight"]  # it is that of the embeddings
        return state | cut

    def load_exported(self, tensors: Mapping[str, Tensor]) -> None:
        own = self.exported()
        if own.keys() != tensors.keys():
            odd = sorted(own.keys() ^ tensors.keys())
            raise RuntimeError(f"{odd[0]} and {len(odd) - 1} more are on one side only")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])

    def forward(
        self, received: Message | None, batch: Batch, past: Past | None = None
    ) -> StageOutput:
        """past: of the tokens before those of the batch, which it takes in."""
        logits: list[Tensor] | None = None if self._router_loss is None else []
        packing, rows = self._rows(received, batch, past, router_logits=logits)
        routed: Message = {}
        if self._router_loss is not None:
            # Routers of the stages before have sent their sums along: the last stage has those of
            # all.
            routed = self._router_loss.sums(
                logits or (), packing=packing.on(rows.device), received=received
            )
        if self._part.is_last:
            losses, guessed = self._losses(rows, packing=packing, batch=batch)
            loss = losses.sum()
            # What the loss is a sum over: tokens, or pairs of answers. The routers' loss is a
            # mean, so it is given as much weight as there are of them.
            weight = len(losses)
            if self._document_loss is not None:
                nats, _ = _by_document(losses, guessed, packing)
                loss = self._document_loss(nats, batch["ids"])
                weight = len(batch["ids"])
            if self._router_loss is not None:
                loss = loss + self._router_loss.of(routed) * weight
            return StageOutput(loss=loss)
        # Places are below 2^15 (MAX_LENGTH): two bytes a token.
        counts = packing.counts.to(torch.int16)
        places = packing.positions.to(torch.int16)
        known = {"counts": counts, "places": places}
        # Boundaries take float32, whatever precision the stage computed in.
        return StageOutput(known | routed | {"hidden": rows.float()})

    @torch.no_grad()
    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        """Return for each sample [millionths of a nat, tokens guessed] of one document after the
        other; NOT_FINITE in place of millionths that are no number."""
        packing, rows = self._rows(received, batch=batch)
        losses, guessed = self._losses(rows, packing=packing, batch=batch)
        nats, counts = _by_document(losses.cpu(), guessed, packing)
        millionths = (1e6 * nats).round()
        # Whole numbers cross clouds and are added up alike everywhere; NaN has none.
        millionths = torch.where(nats.isfinite(), millionths, NOT_FINITE)
        found = torch.stack((millionths.long(), counts), 1)
        starts_R = packing.positions == 0
        # How many documents have begun up to the last token of each sample.
        ends = starts_R.cumsum(0)[packing.counts.cumsum(0) - 1].tolist()
        return [found[start:end].flatten().tolist() for start, end in pairwise([0, *ends])]

    @torch.no_grad()
    def likelihoods(self, received: Message | None, batch: Batch) -> list[tuple[float, bool]]:
        """Return for each sample the log-likelihood of its labels in nats, and whether each of
        them is the most probable token at its place."""
        packing, rows = self._rows(received, batch=batch)
        losses, guessed = self._losses(rows, packing=packing, batch=batch)
        labels = packing.pack(batch[LABEL])[guessed]
        best = self._most_probable(rows[bring(guessed, device=rows.device)]).cpu()
        misses = (best != labels).double()
        num_samples = len(packing.counts)
        owners = torch.arange(num_samples).repeat_interleave(packing.counts)[guessed]
        nats = owners.bincount(losses.double().cpu(), num_samples)
        num_misses = owners.bincount(misses, num_samples)
        return [(-x, not wrong) for x, wrong in torch.stack((nats, num_misses), 1).tolist()]

    def _most_probable(self, rows_RH: Tensor) -> Tensor:
        """Return the most probable token of each row, [R]; the logits of a piece of the vocabulary
        exist at a time."""
        best_R = torch.full((len(rows_RH),), -math.inf, device=rows_RH.device)
        tokens_R = torch.zeros(len(rows_RH), dtype=torch.long, device=rows_RH.device)
        head = self._head
        for start in range(0, len(head.weight), self._chunk):
            piece = slice(start, start + self._chunk)
            logits_RC = _logits(rows_RH, head.weight, head.bias, piece, cap=self._cap)
            value_R, place_R = logits_RC.max(1)
            # Greater and not equal: of equal logits the first token counts, as in one argmax over
            # all.
            tokens_R = torch.where(value_R > best_R, start + place_R, tokens_R)
            best_R = torch.maximum(best_R, value_R)
        return tokens_R

    @torch.no_grad()
    def next_words(
        self, received: Message | None, batch: Batch, past: Past | None = None
    ) -> Tensor:
        """Logits [B, V] of what follows each sample."""
        packing, rows = self._rows(received, batch=batch, past=past)
        last_BH = rows[bring(packing.counts.cumsum(0) - 1, device=rows.device)]
        return _logits(last_BH, self._head.weight, self._head.bias, slice(None), cap=self._cap)

    def follow(self, tokens: Sequence[int]) -> Iterator[int]:
        if not (self._part.is_first and self._part.is_last):
            return iter(())
        longest = positions_of(self.network.config)
        # One stage: nothing is carried.
        written = following([self], lambda number, sent, batch: sent, tokens, Choice())
        return islice(written, max(0, longest - len(tokens)))

    def _rows(
        self,
        received: Message | None,
        batch: Batch,
        past: Past | None = None,
        router_logits: list[Tensor] | None = None,
    ) -> tuple[Packing, Tensor]:
        """Return where tokens stand in their documents, on the host, and this part's rows."""
        device = self.device
        ids_R = rows_RH = None
        if received is None:
            there_BS = batch[TEXT] != NO_TOKEN
            places_R = packed_places(batch[TYPES])[there_BS]
            if past is not None:
                places_R = places_R + past.length
            packing = Packing(counts=there_BS.sum(1), positions=places_R)
            ids_R = bring(batch[TEXT][there_BS], device)
        else:
            packing = Packing(counts=received["counts"], positions=received["places"].long())
            rows_RH = received["hidden"]
            if self.cut is not None:
                # Back to all features, before the first block of this side.
                rows_RH = self.cut(rows_RH, packing.on(device))
        # Rows of a micro-batch stand one behind the other, as one sample without padding. Only
        # kept keys and values need samples, of equal length, side by side.
        num_samples = 1 if past is None else len(packing.counts)
        documents = Documents(packing, device) if past is None else None
        grid = partial(torch.unflatten, dim=0, sizes=(num_samples, -1))
        made_BSH = run(
            self.network,
            places_BS=grid(bring(packing.positions, device)),
            ids_BS=None if ids_R is None else grid(ids_R),
            rows_BSH=None if rows_RH is None else grid(rows_RH),
            documents=documents,
            past=past,
            router_logits=router_logits,
        )
        rows = made_BSH.flatten(0, 1)
        if self.cut is not None and self._part.is_first:
            # On the way out, so that a narrow row crosses.
            rows = self.cut(rows, packing.on(device))
        return packing, rows

    def _losses(self, rows: Tensor, packing: Packing, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the nats of each guessed token, and its row, which the host knows. Other rows
        never reach the head."""
        labels_R = packing.pack(batch[LABEL])
        # On the host, where labels are: a mask on the device would make the host wait for it.
        guessed = (labels_R != NO_LABEL).nonzero()[:, 0]
        losses = chunked_cross_entropy(
            rows[bring(guessed, device=rows.device)],
            words_VH=self._head.weight,
            labels_R=bring(labels_R[guessed], device=rows.device),
            chunk=self._chunk,
            cap=self._cap,
            bias_V=self._head.bias,
        )
        return losses, guessed

    @property
    def _head(self) -> nn.Linear:
        return cast(nn.Linear, getattr(self.network, HEAD))


def _by_document(losses: Tensor, guessed: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """Return the nats of each document, float64 [D] in the graph, and how many tokens are guessed
    in it, int64 [D] on the host.

    losses: the loss of each guessed token, in nats.
    guessed: the rows of these tokens.
    """
    starts_R = packing.positions == 0
    num_documents = int(starts_R.sum())
    owners = starts_R.cumsum(0)[guessed] - 1
    nats = losses.new_zeros(num_documents, dtype=torch.float64)
    nats = nats.index_add(0, bring(owners, device=losses.device), losses.double())
    return nats, owners.bincount(minlength=num_documents)


class TanhCap(NamedTuple):
    """bound * tanh(x / bound), as in Gemma 2."""

    bound: float

    def of(self, logits: Tensor) -> Tensor:
        return self.bound * torch.tanh(logits / self.bound)

    def slope(self, capped: Tensor) -> Tensor:
        return 1 - (capped / self.bound) ** 2


class RootCap(NamedTuple):
    """bound * x / sqrt(x ** 2 + bound ** 2), as in modded-nanogpt and Protocol NanoGPT."""

    bound: float

    def of(self, logits: Tensor) -> Tensor:
        return self.bound * logits * (logits.square() + self.bound**2).rsqrt()

    def slope(self, capped: Tensor) -> Tensor:
        # Rounding may lift a huge logit's cap above the bound.
        return (1 - (capped / self.bound) ** 2).clamp_(min=0) ** 1.5


LogitCap = TanhCap | RootCap
"""A bound on the size of logits. The slope is taken of capped logits, which the backward computes
again."""


def cap_of(config: Any) -> LogitCap | None:
    """Return what bounds a network's logits, as its config says."""
    if (bound := getattr(config, "final_logit_softcapping", None)) is not None:
        return TanhCap(float(bound))
    if (bound := getattr(config, "final_logit_root_cap", None)) is not None:
        return RootCap(float(bound))
    return None


def chunked_cross_entropy(
    rows_RH: Tensor,
    words_VH: Tensor,
    labels_R: Tensor,
    chunk: int,
    cap: LogitCap | None = None,
    bias_V: Tensor | None = None,
) -> Tensor:
    """float32 [R]: -log softmax(rows @ words' + bias)[label] of each row, in nats, words being
    [V, H].

    Only [R, C] logits exist at any time, C = `chunk`: the backward computes each piece again.
    Under autocast the products are in its dtype; sums are float32.
    """
    device = rows_RH.device.type
    if torch.is_autocast_enabled(device):
        # A function of our own is not autocast by torch: it would compute in float32.
        rows_RH = rows_RH.to(torch.get_autocast_dtype(device))
    losses: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows_RH, words_VH, bias_V, labels_R, chunk, cap
    )
    return losses


def _logits(
    rows_RH: Tensor, words_VH: Tensor, bias_V: Tensor | None, piece: slice, cap: LogitCap | None
) -> Tensor:
    """Return the logits of a piece of the vocabulary, float32 [R, C]."""
    logits_RC = (rows_RH @ cast_to(rows_RH.dtype, words_VH[piece]).T).float()
    if bias_V is not None:
        logits_RC = logits_RC + bias_V[piece].float()
    return logits_RC if cap is None else cap.of(logits_RC)


def _pieces(
    num_words: int, labels_R: Tensor, chunk: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield a piece of the vocabulary; whether each row's label is in it, [R, 1]; and at which
    place (any, where it is not), [R, 1]."""
    labels_R1 = labels_R[:, None]
    for start in range(0, num_words, chunk):
        piece = slice(start, min(start + chunk, num_words))
        places_R1 = labels_R1 - start
        is_there_R1 = (places_R1 >= 0) & (labels_R1 < piece.stop)
        yield piece, is_there_R1, places_R1.where(is_there_R1, 0)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RH: Tensor,
        words_VH: Tensor,
        bias_V: Tensor | None,
        labels_R: Tensor,
        chunk: int,
        cap: LogitCap | None,
    ) -> Tensor:
        norms = []
        right_R1 = torch.zeros(len(labels_R), 1, device=rows_RH.device)
        for piece, is_there_R1, places_R1 in _pieces(len(words_VH), labels_R, chunk=chunk):
            logits_RC = _logits(rows_RH, words_VH, bias_V, piece, cap=cap)
            # log sum exp over all = log sum exp of those of the pieces.
            norms.append(logits_RC.logsumexp(1))
            # A mask and no selection of rows: its size would depend on values, and the host would
            # wait.
            right_R1 = logits_RC.gather(1, places_R1).where(is_there_R1, right_R1)
        norm_R = torch.stack(norms).logsumexp(0)
        ctx.save_for_backward(rows_RH, words_VH, bias_V, labels_R, norm_R)
        ctx.chunk = chunk
        ctx.cap = cap
        return norm_R - right_R1[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows_RH, words_VH, bias_V, labels_R, norm_R = ctx.saved_tensors
        wants_rows, wants_words, wants_bias = ctx.needs_input_grad[:3]
        # Summed over the pieces, so in float32 whatever the dtype of the products.
        to_rows = torch.zeros_like(rows_RH, dtype=torch.float32) if wants_rows else None
        to_words = torch.zeros_like(words_VH) if wants_words else None
        to_bias = torch.zeros_like(bias_V) if wants_bias else None
        for piece, is_there_R1, places_R1 in _pieces(len(words_VH), labels_R, chunk=ctx.chunk):
            logits_RC = _logits(rows_RH, words_VH, bias_V, piece, cap=ctx.cap)
            # d loss / d logits = softmax - one-hot, in place, as this is the largest tensor of
            # all.
            slope_RC = (logits_RC - norm_R[:, None]).exp_()
            slope_RC.scatter_add_(1, places_R1, -is_there_R1.float())
            slope_RC *= gradients[0][:, None]
            if ctx.cap is not None:
                slope_RC *= ctx.cap.slope(logits_RC)
            if to_bias is not None:
                to_bias[piece] = slope_RC.sum(0)
            slope_RC = slope_RC.to(rows_RH.dtype)
            if to_rows is not None:
                to_rows += slope_RC @ cast_to(rows_RH.dtype, words_VH[piece])
            if to_words is not None:
                to_words[piece] = slope_RC.T @ rows_RH
        if to_rows is not None:
            to_rows = to_rows.to(rows_RH.dtype)
        return to_rows, to_words, to_bias, None, None, None


@settings("NextTokenPretraining", kw_only=True)
class NextTokenPretraining(Descent):
    """Guess the next token, in windows of `length` tokens of the joined texts.

    batch_size: the number of windows of an update.
    length: the number of tokens of a window.
    """

    learning_rate: PositiveFloat = 3e-3
    batch_size: Positive = 16
    length: Annotated[int, Field(ge=2)] = 64

    def train(
        self,
        stage: CausalStage,
        texts: Sequence[Sequence[int]],
        ids: TokenIds,
        report: Callable[[str], None],
        unfinished: Path,
    ) -> float:
        """In place, from settings and texts alone; returns nats per token of the last batches."""
        flat = torch.tensor([token for text in texts for token in (ids.bos, *text, ids.eos)])
        if len(flat) <= self.length:
            raise DataError(
                f"the public texts have {len(flat)} tokens, fewer than a window of {self.length}: "
                "raise OwnCausal.num_texts"
            )
        mean = math.nan
        draw = torch.Generator().manual_seed(seed_of(self.seed, "windows"))

        def windows() -> Iterator[dict[str, Tensor]]:
            num = len(flat) - self.length
            places_S = torch.arange(self.length)
            while True:
                starts_B = torch.randint(num, (self.batch_size,), generator=draw)
                places_BS = starts_B[:, None] + places_S
                text_BS = flat[places_BS]
                label_BS = flat[places_BS + 1]
                yield {TEXT: text_BS, TYPES: torch.zeros_like(text_BS), LABEL: label_BS}

        steps = self.descend(
            stage,
            batches=windows(),
            loss_of=lambda batch: cast(Tensor, stage(None, batch).loss) / batch[LABEL].numel(),
            report=report,
            score=lambda: f"loss {mean:.3f}",
            unfinished=unfinished,
        )
        for _, loss in steps:
            mean = float(loss) if math.isnan(mean) else 0.95 * mean + 0.05 * float(loss)
        return mean


@settings("OwnCausal")
class OwnCausal(Labelled):
    """A model of the Llama kind, made from `num_texts` public texts and kept as
    cache_dir/causal/<hash>, a folder that transformers loads, so that every cloud can make the
    same one. The hash covers texts, sizes, settings and CODE_VERSION, not the seed of the run.

    num_kv_heads: heads of keys and values; None: num_heads. tied: one matrix for embeddings and
    head. The cloud that makes it holds it whole, once.
    text: the public sentences it learns from.
    pretraining: the method of pretraining, before the run.
    num_texts: the number of public texts that are used.
    kind: the type of model in transformers.
    hidden: the number of features of a row, a multiple of num_heads.
    num_layers: the number of blocks.
    num_heads: the number of attention heads of a block.
    feed_forward: the number of features inside a block's feed-forward network.
    """

    text: PublicTexts
    pretraining: NextTokenPretraining
    num_texts: Positive = 20_000
    kind: Literal["llama", "mistral", "qwen2"] = "llama"  # others: model.checkpoint
    hidden: Positive = 128
    num_layers: Positive = 4
    num_heads: Positive = 4
    num_kv_heads: Positive | None = None
    feed_forward: Positive = 384
    tied: bool = False

    def __post_init__(self) -> None:
        check_heads("OwnCausal.num_heads", num_heads=self.num_heads, whole=self.hidden)
        check_heads(
            "OwnCausal.num_kv_heads",
            num_heads=self.num_kv_heads or 1,
            whole=self.num_heads,
            what="num_heads",
        )

    label_form = "own {kind} {num_layers} x {hidden}"

    def config(self, max_length: int, ids: TokenIds | None = None) -> Any:
        """ids None: of one token, enough for the shapes of blocks."""
        ids = ids or TokenIds(size=1, pad=0, bos=0, eos=0, mask=0)
        described = {
            "model_type": self.kind,
            "vocab_size": ids.size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads or self.num_heads,
            "intermediate_size": self.feed_forward,
            "max_position_embeddings": max(max_length, self.pretraining.length),
            "tie_word_embeddings": self.tied,
            "bos_token_id": ids.bos,
            "eos_token_id": ids.eos,
            "pad_token_id": None,
        }
        # Mistral's default is a window; here every token sees all before it, whatever the kind.
        return config_of(described | ({"sliding_window": None} if self.kind == "mistral" else {}))

    def folder(self, context: BuildContext) -> Path:
        """The checkpoint, made if it is not in the cache."""
        ids = self.text.token_ids(context.cache_dir)
        config = self.config(context.max_length, ids)
        texts = self.text.sentences(self.num_texts, context.cache_dir)

        def build(folder: Path, unfinished: Path) -> None:
            whose = f"{self.label}: pretraining on {len(texts):,} public texts, "
            shorter = "model.own.pretraining.steps=N makes it shorter"
            context.report(f"{whose}{self.pretraining.steps} steps; {shorter}")
            part = Part(blocks=range(self.num_layers), is_first=True, is_last=True)
            network = network_of(config, part)
            draw_weights(network, seed=self.pretraining.seed)
            stage = CausalStage(network, part, chunk=8192, architecture={"lora": False})
            with same_arithmetic():  # and on the CPU, where every cloud can compute the same
                loss = self.pretraining.train(
                    stage, texts, ids, lambda line: context.report(whose + line), unfinished
                )
            write_checkpoint(network, folder)
            if self.pretraining.steps:
                context.report(f"{self.label}: loss {loss:.3f} at the end")

        described = {
            "code": CODE_VERSION,
            "settings": {k: v for k, v in asdict(self).items() if k != "text"},
            "positions": config.max_position_embeddings,
            "ids": asdict(ids),
        }
        return made_once(f"causal/{key_of(described, bytes_of(texts))}", context, build)[0]

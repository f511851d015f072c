"""Sources of backbone weights: pretrained here, on one side's own texts or on public ones; drawn
from the run's seed; or a checkpoint of the BERT family, which can be written, too: query, key and
value are one matrix here, RoBERTa has no unused first positions, ERNIE's constant task embedding
is added to the type embeddings. The network is in encoder.py."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import Fraction, HubName, Labelled, Positive, settings
from xcloud.contracts.model import BuildContext, TokenIds
from xcloud.models.encoder import ACTIVATIONS, Encoder, EncoderConfig, check_heads
from xcloud.models.pretraining import (
    HeldOutScore,
    MaskedLanguageModelling,
    PublicTexts,
    pretrain,
    same_arithmetic,
)
from xcloud.models.stages import seeded
from xcloud.pretrained import WeightFiles, bytes_of, key_of, made_once, raw_config, resolve

# Part of every cache key: increase it when the same settings would give different weights.
CODE_VERSION = 2
PUBLIC = "public text"

MODEL_TYPES = ("bert", "camembert", "electra", "ernie", "roberta", "xlm-roberta")
OFFSET_TYPES = ("camembert", "roberta", "xlm-roberta")  # positions start at padding_idx + 1
CONFIG_NAMES = {  # ours: theirs
    "vocab_size": "vocab_size",
    "hidden": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "activation": "hidden_act",
    "layer_norm_eps": "layer_norm_eps",
    "type_vocab_size": "type_vocab_size",
}
EMBEDDING_NAMES = {"words": "word", "positions": "position", "types": "token_type"}
LAYER_NAMES = {  # several of theirs are one matrix of ours
    "attention.query_key_value": [f"attention.self.{name}" for name in ("query", "key", "value")],
    "attention.output": ["attention.output.dense"],
    "attention_norm": ["attention.output.LayerNorm"],
    "up": ["intermediate.dense"],
    "down": ["output.dense"],
    "norm": ["output.LayerNorm"],
}
_BERT = "cls.predictions"
_ELECTRA = "generator_predictions"
HEAD_NAMES = (  # dense layer, norm, bias
    (f"{_BERT}.transform.dense", f"{_BERT}.transform.LayerNorm", f"{_BERT}.bias"),
    ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    (f"{_ELECTRA}.dense", f"{_ELECTRA}.LayerNorm", "generator_lm_head.bias"),
)


@dataclass(frozen=True)
class Weights:
    """An architecture and tensors named as in Encoder's state dict (None: no weights yet). bases:
    digests of what they were read from, for Stage.architecture."""

    config: EncoderConfig
    tensors: Mapping[str, Tensor] | None
    bases: Mapping[str, str] = field(default_factory=dict)

    @property
    def have_head(self) -> bool:
        return self.tensors is not None and "head.bias" in self.tensors


class WeightSource(Labelled):
    """Gives a network's width, depth, and weights for the texts of a field.

    needs_sentences: it needs sentences to build any part of it.
    is_checkpoint: it comes from a file, which may be out of reach here.
    text: the public texts to pretrain on.
    """

    needs_sentences: ClassVar[bool] = False
    is_checkpoint: ClassVar[bool] = False
    text: PublicTexts | None = None

    def check_length(self, max_length: int) -> None:
        """Raise ConfigError if it is known here to have fewer positions."""

    def digests(self, name: str, context: BuildContext) -> dict[str, str]:
        """Return digests of what every cloud that builds a part of it must have."""
        return {}

    def pooler(self) -> Mapping[str, Tensor] | None:
        """ "weight" and "bias" of the pooler's dense layer, if there is one."""
        return None


@settings("OwnSizes")
class OwnSizes(WeightSource):
    """An encoder of our own, sized by settings.

    hidden: the number of features of a row, a multiple of num_heads.
    num_layers: the number of blocks.
    num_heads: the number of attention heads of a block.
    feed_forward: the number of features inside a block's feed-forward network.
    dropout: the share of features that is zeroed in training.
    """

    hidden: Positive = 192
    num_layers: Positive = 3
    num_heads: Positive = 3
    feed_forward: Positive = 768
    dropout: Fraction = 0.1

    def __post_init__(self) -> None:
        check_heads(
            f"{type(self).__name__}.num_heads", num_heads=self.num_heads, whole=self.hidden
        )

    def width(self) -> int:
        return self.hidden

    def depth(self) -> int:
        return self.num_layers

    def config(self, ids: TokenIds, max_length: int, types: int = 1) -> EncoderConfig:
        sizes = {size.name: getattr(self, size.name) for size in fields(OwnSizes)}
        return EncoderConfig(
            vocab_size=ids.size, max_positions=max_length, type_vocab_size=types, **sizes
        )


@settings("OwnBackbone")
class OwnBackbone(OwnSizes):
    """A small encoder of our own, pretrained once by masked language modelling on its side's
    training texts and cached as cache_dir/backbones/<hash>.safetensors. The hash covers texts,
    architecture, settings and CODE_VERSION, but not the run's seed (see pretraining.seed).

    dropout: the dropout during pretraining.
    type_vocab_size: 2 for text pairs; pretraining uses only type 0.
    pretraining: the method of pretraining, before the run.
    """

    pretraining: MaskedLanguageModelling = field(default_factory=MaskedLanguageModelling)
    type_vocab_size: Positive = 1

    needs_sentences: ClassVar[bool] = True

    label_form = "own {num_layers} x {hidden}"

    def weights(self, name: str, context: BuildContext) -> Weights:
        """The first rank of a stage fills the cache, the others read it."""
        if name not in context.vocabularies:
            raise ConfigError(
                f"an OwnBackbone is made from the {name!r} texts, and this cloud may not see "
                f"them: make {name!r} visible to it, move these layers to a cloud that sees it "
                "(model.encoder_layers_per_stage), or use a PretrainedBackbone"
            )
        sentences = context.sentences(name)
        ids = context.vocabularies[name]
        config = self.config(ids, context.max_length, self.type_vocab_size)
        whose = f"backbone for {name!r}"
        settings = self.pretraining

        def build(path: Path, unfinished: Path) -> None:
            # From the seed of pretraining and not of the run: runs of several seeds share one
            # backbone.
            with seeded(settings.seed, "backbone"):
                encoder = Encoder(config).to(context.device)
            setting = f"{context.setting}.pretraining"
            # Each cloud makes the same weights, whatever number of threads and precision its run
            # has.
            with same_arithmetic():
                score = pretrain(
                    encoder,
                    sentences,
                    ids,
                    settings=settings,
                    report=lambda line: context.report(f"{whose}: pretraining {line}"),
                    unfinished=unfinished,
                    setting=setting,
                )
            tensors = {k: v.detach().cpu().contiguous() for k, v in encoder.state_dict().items()}
            save_file(tensors, path, {k: str(v) for k, v in asdict(score).items()})

        given = asdict(settings)
        if settings.max_epochs is None:  # the key from before this setting existed
            del given["max_epochs"]
        described = {"code": CODE_VERSION, "config": asdict(config), "ids": asdict(ids)}
        key = key_of(described | {"pretraining": given}, bytes_of(sentences))
        path, made = made_once(f"backbones/{key}.safetensors", context, build)
        if context.group_rank == 0:
            with safe_open(path, framework="pt") as kept:
                score = HeldOutScore(**{k: float(v) for k, v in kept.metadata().items()})
            context.report(f"{whose}: {score}, {'kept as' if made else 'from'} {path}")
        tensors = load_file(path)
        values = (tensors[key].numpy().tobytes() for key in sorted(tensors))
        # Not of the file: safetensors writes its metadata in any order.
        return Weights(config, tensors, bases={f"backbone for {name!r}": key_of({}, values)})


@settings("SeededBackbone")
class SeededBackbone(OwnSizes):
    """An encoder of our own, initialised from the run's seed and trained in the run."""

    hidden: Positive = 128
    num_heads: Positive = 4
    feed_forward: Positive = 512

    label_form = "{num_layers} x {hidden}"

    def weights(self, name: str, context: BuildContext) -> Weights:
        config = self.config(context.vocabularies[name], context.max_length)
        with seeded(context.seed, "backbone", name):
            encoder = Encoder(config)
        return Weights(config, tensors=encoder.state_dict())


@settings("PublicBackbone", kw_only=True)
class PublicBackbone(OwnBackbone):
    """Pretrained on public text, so that every cloud can build the same one without private text.
    The task must use the same tokenizer.

    text: the public sentences it is pretrained on.
    num_texts: the number of texts that are used.
    """

    text: PublicTexts
    num_texts: Annotated[int, Field(ge=2)] = 20_000

    needs_sentences: ClassVar[bool] = False

    label_form = "own {num_layers} x {hidden}, pretrained on {text.label}"

    def weights(self, name: str, context: BuildContext) -> Weights:
        ids = self.text.token_ids(context.cache_dir)
        seen = context.vocabularies.get(name)
        # A stage that does not see the texts has no vocabulary to compare.
        if seen not in (None, ids):
            raise ConfigError(
                f"the encoder's public text has the special ids {ids}, but the task's {name!r} "
                f"has {seen}: give both the same tokenizer"
            )
        texts = self.text.sentences(self.num_texts, context.cache_dir)
        # Nothing of this side's own goes into it: text, vocabulary and device are public or the
        # same.
        public = replace(
            context,
            vocabularies={PUBLIC: ids},
            sentences=lambda of: texts,
            device=torch.device("cpu"),  # where every cloud can compute the same
        )
        return super().weights(PUBLIC, public)


@settings("PretrainedBackbone")
class PretrainedBackbone(WeightSource):
    """A BERT-type checkpoint of transformers: bert, roberta, xlm-roberta, camembert, ernie, or
    electra with a single width; a local folder, a hub name or a packaged checkpoint ("minilm").
    The task must use its tokenizer. hidden: for a cloud that cannot read the checkpoint.

    name_or_path: the checkpoint: owner/name or owner/name@revision on the hub, a folder, or a
        packaged one.
    """

    name_or_path: HubName
    hidden: Positive | None = None

    is_checkpoint: ClassVar[bool] = True

    @property
    def checkpoint(self) -> str:
        return self.name_or_path

    label_form = "{name_or_path}"

    def width(self) -> int:
        return self.hidden or self._read()[0].hidden

    def depth(self) -> int | None:
        return None if self.hidden is not None else self._read()[0].num_layers

    def check_length(self, max_length: int) -> None:
        if self.hidden is None and max_length > (most := self._read()[0].max_positions):
            raise ConfigError(
                f"task.max_length is {max_length}, but {self.name_or_path!r} has {most} "
                "positions; lower it"
            )

    def weights(self, name: str, context: BuildContext) -> Weights:
        if context.group_rank == 0:
            context.report(f"backbone for {name!r}: reading {self.name_or_path}")
        config, theirs = self._read()
        replace(self, hidden=None).check_length(context.max_length)  # it can be read here
        if self.hidden not in (None, config.hidden):
            raise ConfigError(
                f"PretrainedBackbone.hidden is {self.hidden}, but {self.name_or_path!r} has "
                f"{config.hidden}; set it to that, or leave it out"
            )
        # middle layers have none
        ids = context.vocabularies.get(name)
        pad = theirs.pad_token_id
        if ids and (ids.size > config.vocab_size or pad not in (None, ids.pad)):
            raise ConfigError(
                f"{self.name_or_path!r} has {config.vocab_size} token ids and pads with {pad}, "
                f"the task's has {ids.size} and {ids.pad}: use the checkpoint's own tokenizer"
            )
        found = read_weights(resolve(self.name_or_path))
        return replace(found, bases=self.digests(name, context=context))

    def digests(self, name: str, context: BuildContext) -> dict[str, str]:
        """Return digests of the whole checkpoint, for Stage.architecture."""
        files = WeightFiles(resolve(self.name_or_path)).digests(context.cache_dir)
        return {f"checkpoint for {name!r}: {file}": digest for file, digest in files.items()}

    def pooler(self) -> Mapping[str, Tensor] | None:
        files, (_, theirs) = WeightFiles(resolve(self.name_or_path)), self._read()
        if not any(there.endswith("pooler.dense.weight") for there in files):
            return None
        return {
            k: _tensor(files, name=f"pooler.dense.{k}", theirs=theirs) for k in ("weight", "bias")
        }

    def _read(self) -> tuple[EncoderConfig, Any]:
        return read_config(resolve(self.name_or_path))


def read_config(name_or_path: str) -> tuple[EncoderConfig, Any]:
    """A checkpoint's in our terms and in theirs. Raises DataError if it is nowhere, ConfigError if
    it is not of the BERT family."""
    from transformers import AutoConfig

    raw = raw_config(name_or_path)
    model_type = raw.get("model_type")
    positions = raw.get("position_embedding_type", "absolute")
    # transformers fills in what an old config.json leaves out.
    theirs = AutoConfig.for_model(**raw) if model_type in MODEL_TYPES else None
    reason = None
    if theirs is None:
        reason = f"is of type {model_type!r}"
    elif getattr(theirs, "embedding_size", theirs.hidden_size) != theirs.hidden_size:
        reason = "projects its embeddings to another width"
    elif theirs.hidden_act not in ACTIVATIONS:
        reason = f"uses the activation {theirs.hidden_act!r}"
    # The heads of RoBERTa and ELECTRA compute gelu, whatever their layers do; one activation
    # serves both here.
    elif model_type not in ("bert", "ernie") and theirs.hidden_act != "gelu":
        reason = f"uses {theirs.hidden_act!r} in its layers, gelu in its head"
    elif positions != "absolute":
        reason = f"has {positions!r} positions"
    # A token of a decoder sees none of the later ones; here each sees all.
    elif raw.get("is_decoder"):
        reason = "is a decoder (is_decoder)"
    if theirs is None or reason:
        raise ConfigError(
            f"PretrainedBackbone {name_or_path!r} {reason}; supported are checkpoints of type "
            f"{', '.join(MODEL_TYPES)} with absolute positions, a single width and an "
            f"activation among {', '.join(ACTIVATIONS)}"
        )
    values = {ours: getattr(theirs, name) for ours, name in CONFIG_NAMES.items()}
    if model_type in OFFSET_TYPES:
        # Positions of RoBERTa begin behind the padding id, so the first rows of the table are
        # never used.
        values["max_positions"] -= theirs.pad_token_id + 1
    return EncoderConfig(**values), theirs


def read_weights(name_or_path: str) -> Weights:
    """Float32; without a head ("head.…") if the checkpoint has none, or one not tied to the
    embeddings."""
    (config, theirs), files = read_config(name_or_path), WeightFiles(name_or_path)
    # Without them this would be another model than the one that the file holds.
    for name in files:
        block = re.search(r"\bencoder\.layer\.(\d+)\.", name)
        if block is not None and int(block[1]) >= config.num_layers:
            raise DataError(
                f"checkpoint {name_or_path!r}: {name} lies behind the {config.num_layers} blocks "
                "of its config.json (num_hidden_layers): put that right, or take the tensor out"
            )
    is_tied = getattr(theirs, "tie_word_embeddings", True)
    # The bias tells which head a file has, if any: all have one, under different names.
    heads = (names for names in HEAD_NAMES if is_tied and names[2] in files)

    read = partial(_tensor, files, theirs)
    names = _names(config.num_layers, head=next(heads, None))
    weights = {ours: torch.cat([read(name) for name in parts]) for ours, parts in names.items()}
    if getattr(theirs, "use_task_id", False):
        # ERNIE adds the embedding of its task, of which there is one here: a constant.
        weights["embeddings.types.weight"] += read("embeddings.task_type_embeddings.weight")[0]
    # A clone: the slice would keep the whole table alive.
    positions = weights["embeddings.positions.weight"][-config.max_positions :].clone()
    return Weights(config, tensors=weights | {"embeddings.positions.weight": positions})


def _tensor(files: WeightFiles, theirs: Any, name: str) -> Tensor:
    """float32. Norms of the first BERTs are gamma and beta; bare encoders have no prefix."""
    prefix = f"{theirs.model_type}." if theirs.model_type not in OFFSET_TYPES else "roberta."
    old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    old = old.replace("LayerNorm.bias", "LayerNorm.beta")
    return files.tensor(files.first_of(prefix + name, name, prefix + old, old)).float()


def _names(num_layers: int, head: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Return for each of our tensors those of theirs that it is made of, one below the other."""
    names = {
        f"embeddings.{ours}.weight": [f"embeddings.{theirs}_embeddings.weight"]
        for ours, theirs in EMBEDDING_NAMES.items()
    }
    modules = {"embeddings.norm": ["embeddings.LayerNorm"]} | {
        f"layers.{layer}.{ours}": [f"encoder.layer.{layer}.{name}" for name in theirs]
        for layer in range(num_layers)
        for ours, theirs in LAYER_NAMES.items()
    }
    if head is not None:
        modules |= {"head.dense": [head[0]], "head.norm": [head[1]]}
        names["head.bias"] = [head[2]]
    for ours, theirs in modules.items():
        for kind in ("weight", "bias"):
            names[f"{ours}.{kind}"] = [f"{name}.{kind}" for name in theirs]
    return names


def export(encoder: Encoder, folder: Path, pad: int, **replaced: nn.Linear) -> None:
    """Write a whole Encoder as a folder of transformers without a tokenizer: of BertForMaskedLM,
    or of ElectraForPreTraining, with its replaced-token head (dense, dense_prediction)."""
    config = encoder.config
    kind = "electra" if replaced else "bert"
    described = {name: getattr(config, ours) for ours, name in CONFIG_NAMES.items()}
    described |= {"dtype": "float32", "model_type": kind, "pad_token_id": pad}
    described["architectures"] = ["ElectraForPreTraining" if replaced else "BertForMaskedLM"]
    if replaced:
        described["embedding_size"] = config.hidden
    theirs: dict[str, Tensor] = {}
    for name, layer in replaced.items():
        theirs |= layer.state_dict(prefix=f"discriminator_predictions.{name}.")
    weights = encoder.state_dict()
    for ours, names in _names(config.num_layers, head=None if replaced else HEAD_NAMES[0]).items():
        inside = "" if ours.startswith("head.") else f"{kind}."
        # query_key_value is three of theirs, one below the other.
        parts = weights[ours].chunk(len(names))
        theirs |= {f"{inside}{name}": part for name, part in zip(names, parts, strict=True)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in theirs.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})

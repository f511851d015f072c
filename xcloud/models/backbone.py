"""Sources of backbone weights: pretrained here, on one side's own texts or on public ones; drawn
from the run's seed; or a checkpoint. The network is in encoder.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Fraction, Positive, settings
from xcloud.contracts.model import BuildContext, TokenIds
from xcloud.hub import bytes_of, key_of, made_once, resolve
from xcloud.models.checkpoint import Checkpoint, read_config, read_pooler, read_weights
from xcloud.models.encoder import Encoder, EncoderConfig, check_heads
from xcloud.models.pretraining import HeldOutScore, MaskedLanguageModelling, PublicTexts, pretrain
from xcloud.models.stages import seeded

# Part of every cache key: increase it when the same settings would give different weights.
CODE_VERSION = 2
PUBLIC = "public text"


@dataclass(frozen=True)
class Weights:
    """An architecture and tensors named as in Encoder's state dict (None: no weights yet)."""

    config: EncoderConfig
    tensors: Mapping[str, Tensor] | None

    @property
    def have_head(self) -> bool:
        return self.tensors is not None and "head.bias" in self.tensors


class Source:
    """Gives the weights of the network for one side, named by its text field ("source" or
    "target"), its width, which the other cloud needs to know too, and its depth.

    needs_sentences: whether building any part of it requires the field's texts. is_checkpoint:
    whether it comes from a file, which may be out of reach here. text: public ones that it is
    pretrained on.
    """

    needs_sentences: ClassVar[bool] = False
    is_checkpoint: ClassVar[bool] = False
    text: PublicTexts | None = None

    def check_length(self, max_length: int) -> None:
        """Raise ConfigError if it is known here to have fewer positions."""

    def pooler(self) -> Mapping[str, Tensor] | None:
        """ "weight" and "bias" of the pooler's dense layer, if there is one."""
        return None


@settings("OwnSizes")
class OwnSizes(Source):
    """An encoder of our own, sized by settings."""

    hidden: Positive = 192
    num_layers: Positive = 3
    num_heads: Positive = 3
    feed_forward: Positive = 768
    dropout: Fraction = 0.1

    def __post_init__(self) -> None:
        check_heads(f"{type(self).__name__}.num_heads", self.num_heads, self.hidden)

    def width(self) -> int:
        return self.hidden

    def depth(self) -> int:
        return self.num_layers

    def config(self, ids: TokenIds, max_length: int, types: int = 1) -> EncoderConfig:
        sizes = {size.name: getattr(self, size.name) for size in fields(OwnSizes)}
        return EncoderConfig(ids.size, max_positions=max_length, type_vocab_size=types, **sizes)


@settings("OwnBackbone")
class OwnBackbone(OwnSizes):
    """A small encoder of our own, pretrained once by masked language modelling on its side's
    training texts and cached as cache_dir/backbones/<hash>.safetensors. The hash covers texts,
    architecture, settings and CODE_VERSION, but not the run's seed (see pretraining.seed).

    dropout: during pretraining. max_positions is the task's max_length.
    type_vocab_size: 2 for tasks with text pairs; pretraining uses only type 0.
    """

    pretraining: MaskedLanguageModelling = field(default_factory=MaskedLanguageModelling)
    type_vocab_size: Positive = 1

    needs_sentences: ClassVar[bool] = True

    def describe(self) -> str:
        return f"own {self.num_layers} x {self.hidden}"

    def weights(self, name: str, context: BuildContext) -> Weights:
        """The first rank of a stage fills the cache, the others read it."""
        if name not in context.vocabularies:
            raise ConfigError(
                f"an OwnBackbone is made from the {name!r} texts, and this cloud may not see "
                f"them. Make {name!r} visible to it, or move these layers to a cloud that "
                "sees it (model.encoder_layers_per_stage), or use a PretrainedBackbone."
            )
        sentences, ids = context.sentences(name), context.vocabularies[name]
        config = self.config(ids, context.max_length, self.type_vocab_size)

        def report(line: str) -> None:
            context.report(f"backbone for {name!r}: pretraining {line}")

        def build(path: Path, unfinished: Path) -> None:
            with seeded(self.pretraining.seed, "backbone"):
                encoder = Encoder(config).to(context.device)
            setting = f"{context.setting}.pretraining"
            score = pretrain(
                encoder, sentences, ids, self.pretraining, report, unfinished, setting
            )
            tensors = {k: v.detach().cpu().contiguous() for k, v in encoder.state_dict().items()}
            save_file(tensors, path, {k: str(v) for k, v in asdict(score).items()})

        file = f"backbones/{self._key(config, ids, sentences)}.safetensors"
        path, made = made_once(file, context, build)
        if context.group_rank == 0:
            with safe_open(path, framework="pt") as kept:
                score = HeldOutScore(**{k: float(v) for k, v in kept.metadata().items()})
            what = "kept as" if made else "from"
            context.report(f"backbone for {name!r}: {score}, {what} {path}")
        return Weights(config, load_file(path))

    def _key(
        self, config: EncoderConfig, ids: TokenIds, sentences: Sequence[Sequence[int]]
    ) -> str:
        described = {"code": CODE_VERSION, "config": asdict(config), "ids": asdict(ids)}
        pretraining = asdict(self.pretraining)
        if self.pretraining.max_epochs is None:  # the key from before this setting existed
            del pretraining["max_epochs"]
        return key_of(described | {"pretraining": pretraining}, bytes_of(sentences))


@settings("SeededBackbone")
class SeededBackbone(OwnSizes):
    """An encoder of our own, initialised from the run's seed and trained in the run."""

    hidden: Positive = 128
    num_heads: Positive = 4
    feed_forward: Positive = 512

    def describe(self) -> str:
        return f"{self.num_layers} x {self.hidden}"

    def weights(self, name: str, context: BuildContext) -> Weights:
        config = self.config(context.vocabularies[name], context.max_length)
        with seeded(context.seed, "backbone", name):
            encoder = Encoder(config)
        return Weights(config, encoder.state_dict())


@settings("PublicBackbone", kw_only=True)
class PublicBackbone(OwnBackbone):
    """Pretrained on public text, so that every cloud can build the same one without private text.

    text, num_texts: to pretrain on; the task must use the same tokenizer.
    """

    text: PublicTexts
    num_texts: Annotated[int, Field(ge=2)] = 20_000

    needs_sentences: ClassVar[bool] = False

    def describe(self) -> str:
        return f"{super().describe()}, pretrained on {self.text.describe()}"

    def weights(self, name: str, context: BuildContext) -> Weights:
        ids = self.text.token_ids(context.cache_dir)
        seen = context.vocabularies.get(name)
        if seen not in (None, ids):
            raise ConfigError(
                f"the encoder's public text has the special ids {ids}, but the task's {name!r} "
                f"has {seen}: give both the same tokenizer"
            )
        texts = self.text.sentences(self.num_texts, context.cache_dir)
        public = replace(context, vocabularies={PUBLIC: ids}, sentences=lambda of: texts)
        return super().weights(PUBLIC, public)


@settings("PretrainedBackbone")
class PretrainedBackbone(Source):
    """A BERT-type checkpoint of transformers: bert, roberta, xlm-roberta, camembert, ernie, or
    electra with a single width; a local folder, a hub name or a packaged checkpoint ("minilm").

    The task must use the checkpoint's own tokenizer. hidden: set it if another cloud, which needs
    the width too, cannot read the checkpoint.
    """

    name_or_path: Annotated[str, Field(min_length=1)]
    hidden: Positive | None = None

    is_checkpoint: ClassVar[bool] = True

    def describe(self) -> str:
        return self.name_or_path

    @property
    def _checkpoint(self) -> Checkpoint:
        return read_config(resolve(self.name_or_path))

    def width(self) -> int:
        return self.hidden or self._checkpoint.config.hidden

    def depth(self) -> int | None:
        # The checkpoint may be out of reach here.
        return None if self.hidden is not None else self._checkpoint.config.num_layers

    def check_length(self, max_length: int) -> None:
        if self.hidden is None:
            self._check_length(self._checkpoint, max_length)

    def weights(self, name: str, context: BuildContext) -> Weights:
        if context.group_rank == 0:
            context.report(f"backbone for {name!r}: reading {self.name_or_path}")
        checkpoint, tensors = read_weights(resolve(self.name_or_path))
        self._check(checkpoint, context.vocabularies.get(name), context.max_length)
        return Weights(checkpoint.config, tensors)

    def pooler(self) -> Mapping[str, Tensor] | None:
        return read_pooler(resolve(self.name_or_path))

    def _check(self, checkpoint: Checkpoint, ids: TokenIds | None, max_length: int) -> None:
        config, name = checkpoint.config, self.name_or_path
        if self.hidden not in (None, config.hidden):
            raise ConfigError(
                f"PretrainedBackbone.hidden is {self.hidden}, but {name!r} has {config.hidden}"
            )
        self._check_length(checkpoint, max_length)
        if ids is None:  # middle layers have no vocabulary
            return
        if ids.size > config.vocab_size or checkpoint.pad not in (None, ids.pad):
            raise ConfigError(
                f"{name!r} has {config.vocab_size} token ids and pads with {checkpoint.pad}, but "
                f"the task's tokenizer has {ids.size} and pads with {ids.pad}: use the "
                "checkpoint's own tokenizer"
            )

    def _check_length(self, checkpoint: Checkpoint, max_length: int) -> None:
        if max_length > checkpoint.config.max_positions:
            raise ConfigError(
                f"the task's max_length is {max_length}, but {self.name_or_path!r} has "
                f"{checkpoint.config.max_positions} positions"
            )

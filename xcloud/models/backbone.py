"""Sources of backbone weights: pretrained here on one side's own texts, or a checkpoint.
The network is in encoder.py, the pretraining loop in pretraining.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from xcloud.base.checks import check_int, check_number
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.model import BuildContext, TokenIds
from xcloud.hub import bytes_of, key_of, make_once, resolve
from xcloud.models.checkpoint import Checkpoint, read_config, read_pooler, read_weights
from xcloud.models.encoder import Encoder, EncoderConfig, check_heads
from xcloud.models.pretraining import HeldOutScore, MaskedLanguageModelling, pretrain
from xcloud.models.seeding import seeded

# Part of every cache key: increase it when the same settings would give different weights.
CODE_VERSION = 2


@dataclass(frozen=True)
class Weights:
    """An architecture and tensors named as in Encoder's state dict (None: no weights yet)."""

    config: EncoderConfig
    tensors: Mapping[str, Tensor] | None

    @property
    def have_head(self) -> bool:
        return self.tensors is not None and "head.bias" in self.tensors


class Backbone(Protocol):
    """A source of weights for one side, named by its text field ("source" or "target")."""

    def describe(self) -> str:
        """Which network, in a few words."""

    @property
    def needs_sentences(self) -> bool:
        """Whether building any part of it requires the field's texts."""

    def width(self) -> int:
        """Features of a row; the other cloud needs to know it too."""

    def depth(self) -> int | None:
        """Blocks; None if only the width is known."""

    def config(
        self, name: str, vocabularies: Mapping[str, TokenIds], max_length: int
    ) -> EncoderConfig:
        """The architecture, without the weights."""

    def weights(self, name: str, context: BuildContext) -> Weights:
        """The weights. Called by every lane; may wait for lane 0 at context.barrier."""

    def pooler(self) -> Mapping[str, Tensor] | None:
        """ "weight" and "bias" of the pooler's dense layer, if there is one."""


def make_in_lane_0(path: Path, context: BuildContext, make: Callable[[Path, Path], None]) -> bool:
    """Make `path` in the cache unless it is there; returns whether this rank made it. Every lane
    calls it. make: called with the path to write, and with a folder that outlives an interrupted
    call. Raises DataError in a lane that does not find what lane 0 wrote."""
    unfinished = path.with_suffix(".unfinished")
    made = context.lane == 0 and make_once(path, lambda part: make(part, unfinished))
    if made:
        shutil.rmtree(unfinished, ignore_errors=True)
    context.barrier()  # Every lane must reach this line, cached or not, or the others hang.
    if not path.exists():
        raise DataError(
            f"lane {context.lane} does not find {path}, which lane 0 wrote: the lanes of a stage "
            "must share one cache folder"
        )
    return made


def check_backbone(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is an OwnBackbone or a PretrainedBackbone."""
    if not isinstance(value, OwnBackbone | PretrainedBackbone):
        raise ConfigError(f"{name} must be an OwnBackbone or a PretrainedBackbone, got {value!r}")


class OwnSizes:
    """An encoder of our own, sized by settings."""

    hidden: int
    num_layers: int
    num_heads: int
    feed_forward: int
    dropout: float

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name in ("hidden", "num_layers", "num_heads", "feed_forward"):
            check_int(f"{owner}.{name}", getattr(self, name), 1)
        check_heads(f"{owner}.num_heads", self.num_heads, self.hidden)
        check_number(f"{owner}.dropout", self.dropout, 0, 1)

    def width(self) -> int:
        return self.hidden

    def depth(self) -> int:
        return self.num_layers

    def config(
        self, name: str, vocabularies: Mapping[str, TokenIds], max_length: int
    ) -> EncoderConfig:
        return EncoderConfig(
            vocab_size=vocabularies[name].size,
            hidden=self.hidden,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            feed_forward=self.feed_forward,
            max_positions=max_length,
            dropout=self.dropout,
        )

    def pooler(self) -> None:
        return None


@dataclass(frozen=True)
class OwnBackbone(OwnSizes):
    """A small encoder of our own, pretrained once by masked language modelling on its side's
    training texts and cached as cache_dir/backbones/<hash>.safetensors. The hash covers texts,
    architecture, settings and CODE_VERSION, but not the run's seed (see pretraining.seed).

    dropout: during pretraining. max_positions is the task's max_length.
    type_vocab_size: 2 for tasks with text pairs; pretraining uses only type 0.
    """

    hidden: int = 192
    num_layers: int = 3
    num_heads: int = 3
    feed_forward: int = 768
    dropout: float = 0.1
    pretraining: MaskedLanguageModelling = field(default_factory=MaskedLanguageModelling)
    type_vocab_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("OwnBackbone.type_vocab_size", self.type_vocab_size, 1)
        if not isinstance(self.pretraining, MaskedLanguageModelling):
            raise ConfigError(
                "OwnBackbone.pretraining must be a MaskedLanguageModelling, got "
                f"{self.pretraining!r}"
            )

    def describe(self) -> str:
        return f"own {self.num_layers} x {self.hidden}"

    @property
    def needs_sentences(self) -> bool:
        return True

    def config(
        self, name: str, vocabularies: Mapping[str, TokenIds], max_length: int
    ) -> EncoderConfig:
        if name not in vocabularies:
            raise ConfigError(
                f"an OwnBackbone is made from the {name!r} texts, and this cloud may not see "
                f"them. Make {name!r} visible to it, or move these layers to a cloud that "
                "sees it (model.encoder_layers_per_stage), or use a PretrainedBackbone."
            )
        config = super().config(name, vocabularies, max_length)
        return replace(config, type_vocab_size=self.type_vocab_size)

    def weights(self, name: str, context: BuildContext) -> Weights:
        """Lane 0 fills the cache, the others wait and read it, so all lanes share one network."""
        config = self.config(name, context.vocabularies, context.max_length)
        sentences = context.sentences(name)
        key = self._key(config, context.vocabularies[name], sentences)
        path = context.cache_dir / "backbones" / f"{key}.safetensors"
        make = partial(self._make, name, config, sentences, context)
        made = make_in_lane_0(path, context, make)
        if context.lane == 0:
            what = "kept as" if made else "from"
            context.report(f"backbone for {name!r}: {_score(path)}, {what} {path}")
        return Weights(config, load_file(path))

    def _make(
        self,
        name: str,
        config: EncoderConfig,
        sentences: Sequence[Sequence[int]],
        context: BuildContext,
        path: Path,
        unfinished: Path,
    ) -> None:
        said = f"backbone for {name!r}: pretraining"
        with seeded(self.pretraining.seed, "backbone"):
            encoder = Encoder(config).to(context.device)
        score = pretrain(
            encoder,
            sentences,
            context.vocabularies[name],
            self.pretraining,
            lambda line: context.report(f"{said} {line}"),
            unfinished,
            f"{context.setting}.pretraining",
        )
        tensors = {k: v.detach().cpu().contiguous() for k, v in encoder.state_dict().items()}
        about = {"loss": str(score.loss), "accuracy": str(score.accuracy)}
        save_file(tensors, path, metadata=about)

    def _key(
        self, config: EncoderConfig, ids: TokenIds, sentences: Sequence[Sequence[int]]
    ) -> str:
        pretraining = asdict(self.pretraining)
        if self.pretraining.max_epochs is None:  # the key it had before there was this setting
            del pretraining["max_epochs"]
        described = {
            "code": CODE_VERSION,
            "config": asdict(config),
            "pretraining": pretraining,
            "ids": asdict(ids),
        }
        return key_of(described, bytes_of(sentences))


@dataclass(frozen=True)
class SeededBackbone(OwnSizes):
    """An encoder of our own, initialised from the run's seed and trained in the run."""

    hidden: int = 128
    num_layers: int = 3
    num_heads: int = 4
    feed_forward: int = 512
    dropout: float = 0.1

    def describe(self) -> str:
        return f"{self.num_layers} x {self.hidden}"

    @property
    def needs_sentences(self) -> bool:
        return False

    def weights(self, name: str, context: BuildContext) -> Weights:
        config = self.config(name, context.vocabularies, context.max_length)
        with seeded(context.seed, "backbone", name):
            encoder = Encoder(config)
        return Weights(config, encoder.state_dict())


@dataclass(frozen=True)
class PretrainedBackbone:
    """A BERT-type checkpoint of transformers: bert, roberta, xlm-roberta, camembert, ernie, or
    electra with a single width; a local folder, a hub name or a packaged checkpoint ("minilm").

    The task must use the checkpoint's own tokenizer. hidden: set it if another cloud, which needs
    the width too, cannot read the checkpoint.
    """

    name_or_path: str
    hidden: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name_or_path, str) or not self.name_or_path:
            raise ConfigError(
                "PretrainedBackbone.name_or_path must be a folder or a name on the hub, got "
                f"{self.name_or_path!r}"
            )
        if self.hidden is not None:
            check_int("PretrainedBackbone.hidden", self.hidden, 1)

    def describe(self) -> str:
        return self.name_or_path

    @property
    def needs_sentences(self) -> bool:
        return False

    def width(self) -> int:
        return self.hidden or read_config(resolve(self.name_or_path)).config.hidden

    def depth(self) -> int | None:
        if self.hidden is not None:  # the checkpoint may be out of reach here
            return None
        return read_config(resolve(self.name_or_path)).config.num_layers

    def check_length(self, max_length: int) -> None:
        """Raise ConfigError if the checkpoint, if readable here, has fewer positions."""
        if self.hidden is None:
            _check_length(read_config(resolve(self.name_or_path)), self.name_or_path, max_length)

    def config(
        self, name: str, vocabularies: Mapping[str, TokenIds], max_length: int
    ) -> EncoderConfig:
        checkpoint = read_config(resolve(self.name_or_path))
        self._check(checkpoint, vocabularies.get(name), max_length)
        return checkpoint.config

    def weights(self, name: str, context: BuildContext) -> Weights:
        if context.lane == 0:
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
        _check_length(checkpoint, name, max_length)
        if ids is None:  # middle layers have no vocabulary
            return
        if ids.size > config.vocab_size or checkpoint.pad not in (None, ids.pad):
            raise ConfigError(
                f"{name!r} has {config.vocab_size} token ids and pads with {checkpoint.pad}, but "
                f"the task's tokenizer has {ids.size} and pads with {ids.pad}: use the "
                "checkpoint's own tokenizer"
            )


def _check_length(checkpoint: Checkpoint, name: str, max_length: int) -> None:
    if max_length > checkpoint.config.max_positions:
        raise ConfigError(
            f"the task's max_length is {max_length}, but {name!r} has "
            f"{checkpoint.config.max_positions} positions"
        )


def _score(path: Path) -> HeldOutScore:
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    return HeldOutScore(float(about["loss"]), float(about["accuracy"]))

"""Settings of the generators and the discriminator. They are built in model.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from xcloud.base.checks import check_choice, check_int, check_number
from xcloud.base.errors import ConfigError
from xcloud.models.backbone import Backbone, PretrainedBackbone, SeededBackbone
from xcloud.models.public_backbone import PublicBackbone
from xcloud.tasks.corpus.multilingual import TextSource
from xcloud.training.optimizer import Optimizer


@dataclass(frozen=True)
class Generator:
    """One cloud's generator: its texts, network, masking and optimizer.

    languages, pairs: parts of its texts, such as [es] and [es-en]; a pair is a text and its
        translation, masked on both sides (TLM). No other cloud reads them for it.
    source: its own texts, if not those of model.text.source.
    batch_size: samples per batch; a batch is one generator update and one message.
    whole_words: mask all pieces of a word or none; in scripts without spaces (Chinese, Thai) each
        piece is a word. temperature: for sampling replacements.
    frozen: it only samples and is not trained.
    """

    languages: Sequence[str] = ()
    pairs: Sequence[str] = ()
    backbone: Backbone = field(default_factory=SeededBackbone)
    optimizer: Optimizer = field(default_factory=Optimizer)
    batch_size: int = 32
    mask_share: float = 0.15
    whole_words: bool = False
    temperature: float = 1.0
    frozen: bool = False
    precision: Literal["fp32", "bf16", "auto"] = "auto"
    source: TextSource | None = None

    def __post_init__(self) -> None:
        owner = "generator"
        for name in ("languages", "pairs"):
            parts = getattr(self, name)
            wrong = isinstance(parts, str) or not all(isinstance(p, str) and p for p in parts)
            if wrong or len(set(parts)) < len(parts):
                raise ConfigError(f"{owner}.{name} must be a list such as [es], got {parts!r}")
        if not self.parts:
            raise ConfigError(f"{owner}.languages and {owner}.pairs are both empty")
        if odd := [pair for pair in self.pairs if pair.count("-") != 1]:
            raise ConfigError(f"{owner}.pairs must be such as [es-en], got {odd[0]!r}")
        _check_network(owner, self.backbone, self.optimizer)
        check_int(f"{owner}.batch_size", self.batch_size, 1)
        check_number(f"{owner}.mask_share", self.mask_share, 0, 0.9, above=True)
        check_choice(f"{owner}.whole_words", self.whole_words, (True, False))
        check_number(f"{owner}.temperature", self.temperature, 0, 100, above=True)
        check_choice(f"{owner}.frozen", self.frozen, (True, False))
        check_choice(f"{owner}.precision", self.precision, ("fp32", "bf16", "auto"))
        if self.frozen and not isinstance(self.backbone, PretrainedBackbone):
            raise ConfigError(
                f"{owner}.frozen needs a PretrainedBackbone: a randomly initialised network "
                "cannot fill masks"
            )

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.languages, *self.pairs)


@dataclass(frozen=True)
class DiscriminatorSettings:
    """loss_weight: the paper's λ in loss = MLM + λ RTD. With separate optimizers it matters only
    where gradient magnitude does, in clip_norm and eps: AdamW normalises the rest away.
    """

    backbone: Backbone = field(default_factory=SeededBackbone)
    optimizer: Optimizer = field(default_factory=Optimizer)
    loss_weight: float = 50.0
    precision: Literal["fp32", "bf16", "auto"] = "auto"

    def __post_init__(self) -> None:
        _check_network("discriminator", self.backbone, self.optimizer)
        check_number("discriminator.loss_weight", self.loss_weight, 0, above=True)
        check_choice("discriminator.precision", self.precision, ("fp32", "bf16", "auto"))


def _check_network(owner: str, backbone: object, optimizer: object) -> None:
    if not isinstance(backbone, SeededBackbone | PretrainedBackbone | PublicBackbone):
        raise ConfigError(
            f"{owner}.backbone must be a SeededBackbone, PretrainedBackbone or PublicBackbone, "
            f"got {backbone!r}"
        )
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"{owner}.optimizer must be an Optimizer, got {optimizer!r}")

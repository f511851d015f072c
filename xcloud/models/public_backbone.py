"""A small encoder pretrained on public text, so that every cloud can build the same one without
private text. For a side's own text see backbone.OwnBackbone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from xcloud.base.checks import check_int
from xcloud.base.errors import ConfigError
from xcloud.contracts.model import BuildContext, TokenIds
from xcloud.models.backbone import OwnBackbone, Weights
from xcloud.models.encoder import EncoderConfig
from xcloud.models.text_source import PublicTexts, check_public_text

PUBLIC = "public text"


@dataclass(frozen=True)
class PublicBackbone:
    """An OwnBackbone pretrained on public text, in the same cache; a Backbone.

    text, num_texts: the pretraining texts and their number; the task must use the same tokenizer.
    network: sizes and pretraining.
    """

    text: PublicTexts
    num_texts: int = 20_000
    network: OwnBackbone = field(default_factory=OwnBackbone)

    def __post_init__(self) -> None:
        check_public_text("PublicBackbone.text", self.text)
        check_int("PublicBackbone.num_texts", self.num_texts, 2)
        if not isinstance(self.network, OwnBackbone):
            raise ConfigError(
                f"PublicBackbone.network must be an OwnBackbone, got {self.network!r}"
            )

    def describe(self) -> str:
        return f"{self.network.describe()}, pretrained on {self.text.describe()}"

    @property
    def needs_sentences(self) -> bool:
        """No private text is needed."""
        return False

    def width(self) -> int:
        return self.network.width()

    def depth(self) -> int:
        return self.network.depth()

    def config(
        self, name: str, vocabularies: Mapping[str, TokenIds], max_length: int
    ) -> EncoderConfig:
        """vocabularies: must contain the field, visible or not; `weights` needs none."""
        return self.network.config(name, vocabularies, max_length)

    def weights(self, name: str, context: BuildContext) -> Weights:
        ids = self.text.token_ids(context.cache_dir)
        seen = context.vocabularies.get(name)
        if seen not in (None, ids):
            raise ConfigError(
                f"the encoder's public text has the special ids {ids}, but the task's {name!r} "
                f"has {seen}: give both the same tokenizer"
            )
        sentences = self.text.sentences(self.num_texts, context.cache_dir)
        public = replace(
            context,
            vocabularies={PUBLIC: ids},
            sentences=lambda field_name: sentences,
            setting=f"{context.setting}.network",
        )
        return self.network.weights(PUBLIC, public)

    def pooler(self) -> Mapping[str, Tensor] | None:
        return None

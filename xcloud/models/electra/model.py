"""MultilingualElectra as configured; builds each rank's part."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Literal

from xcloud.base.errors import ConfigError
from xcloud.base.overrides import as_override
from xcloud.base.project import MODEL_DIR, run_command
from xcloud.base.settings import settings
from xcloud.comm.ids import IdPacking
from xcloud.contracts.model import BuildContext, BuildPlace
from xcloud.contracts.one_way import OneWayContext
from xcloud.models.electra.parts import (
    DISCRIMINATOR_DIR,
    Discriminator,
    DiscriminatorRank,
    DiscriminatorSettings,
    Generator,
    GeneratorRank,
    Network,
)
from xcloud.models.encoder import Encoder
from xcloud.models.stages import seed_of, seeded
from xcloud.tasks.multilingual_text import MultilingualText, TextStream
from xcloud.tasks.text_sources import DemoText
from xcloud.tasks.tokenizer import Tokenizer, TrainedTokenizer

MAX_VOCABULARY = 2**20  # bounds the message size before the tokenizer is known


@settings("model")
class MultilingualElectra:
    """Generators in several clouds, and the discriminator they feed; a OneWayModel.

    Sources: Pan et al., ZTE Technology Journal 2023(4), section 2.1; Clark et al.,
    arXiv:2003.10555.

    text: the texts that the clouds read, and the way in which they are split into samples.
    generators: a generator for each producing cloud, by the cloud's name.
    discriminator: the network of the consumer.
    coding: the code of token ids on the wire (IdPacking). smallest = the smallest code for each
        message; fixed = never ranked ids, which is a third more bytes and three times as fast.
    """

    text: MultilingualText
    generators: Mapping[str, Generator]
    discriminator: DiscriminatorSettings = field(default_factory=DiscriminatorSettings)
    coding: Literal["smallest", "fixed"] = "smallest"

    def __post_init__(self) -> None:
        if not self.generators:
            raise ConfigError("model.generators must have a generator for each producing cloud")
        # Public text is read in every cloud; a source that only one cloud may read would go with
        # it.
        networks = [generator.backbone for generator in self.generators.values()]
        for text in (network.text for network in (*networks, self.discriminator.backbone)):
            if isinstance(text, MultilingualText) and text.source.public_texts() is None:
                raise ConfigError(
                    "a PublicBackbone is pretrained on public text in every cloud; use another, "
                    f"as {text.label} is not public"
                )

    @property
    def max_payload_bytes(self) -> int:
        return self._packing(None).max_bytes

    @property
    def max_positions(self) -> int | None:
        """The positions of the discriminator; None if its checkpoint defines them."""
        if self.discriminator.backbone.is_checkpoint:
            return None
        return self.text.max_length

    def describe(self) -> str:
        generators = ", ".join(
            f"{name} ({'+'.join(of.parts)}; {of.backbone.label}{', frozen' * of.frozen})"
            for name, of in self.generators.items()
        )
        size = self.discriminator.backbone.label
        return f"{self.text.label}; generators {generators} → discriminator {size}"

    @property
    def data(self) -> str:
        return "; ".join(
            f"{name}: {'+'.join(own.parts)} of {self.text.of(own.source).label}"
            for name, own in self.generators.items()
        )

    def check(self, producers: Sequence[str]) -> None:
        if set(producers) != set(self.generators):
            said = f"model.generators has {', '.join(self.generators)}; each cloud needs one"
            raise ConfigError(f"the producing clouds are {', '.join(producers)}, but {said}")
        for generator in self.generators.values():
            self.text.of(generator.source).check(generator.parts)

    def producer(self, context: OneWayContext) -> GeneratorRank:
        settings = self.generators[context.cloud]
        text = self.text.of(settings.source)
        tokenizer = self._tokenizer(context)
        report = context.report if context.group_rank == 0 else lambda line: None
        tables = {
            part: text.table(part, tokenizer, cache_dir=context.cache_dir, report=report)
            for part in settings.parts
        }
        # The ranks of a cloud share one order; clouds with the same language draw different ones.
        seed = seed_of(context.seed, "texts", context.cloud)
        ranks = (context.group_rank, context.group_size)
        how = (text.language_power, seed, settings.batch_size, *ranks)
        # Each rank takes its share of the order; which samples are in a batch follows from seed,
        # cloud and number alone, so a resumed run goes on with the same.
        stream = TextStream(tables, tokenizer.token_ids, *how)
        report(f"texts: {stream.describe()}")
        encoder = self._encoder(
            settings.backbone, name="generator", tokenizer=tokenizer, context=context
        )
        packing = self._packing(tokenizer)
        return GeneratorRank(
            network=encoder,
            settings=settings,
            packing=packing,
            tokenizer=tokenizer,
            context=context,
            stream=stream,
        )

    def consumer(self, context: OneWayContext) -> DiscriminatorRank:
        settings = self.discriminator
        tokenizer = self._tokenizer(context)
        encoder = self._encoder(
            settings.backbone, name="discriminator", tokenizer=tokenizer, context=context
        )
        # The head that transformers loads with it computes gelu.
        if (used := encoder.config.activation) != "gelu":
            said = f"uses {used!r}; a discriminator is exported with gelu: choose another"
            raise ConfigError(f"discriminator.backbone {settings.backbone.label} {said}")
        # The encoder inside is drawn as well, and replaced by the one with weights right below.
        with seeded(context.seed, "replaced-token head"):
            network = Discriminator(encoder.config)
        network.encoder = encoder
        return DiscriminatorRank(
            network=network,
            settings=settings,
            packing=self._packing(tokenizer),
            tokenizer=tokenizer,
            context=context,
        )

    def leaves(self, run_dir: Path) -> dict[str, str]:
        """Return task settings that use the exported encoder and its tokenizer."""
        return {"task.tokenizer.name_or_path": str(run_dir / MODEL_DIR / DISCRIMINATOR_DIR)}

    def next_command(self, run_dir: Path) -> str:
        """Return the command to fine-tune the discriminator; the user supplies inference pairs."""
        encoder = shlex.join(as_override(*one) for one in self.leaves(run_dir).items())
        files = " profile=files task.data.path=DIR"
        if isinstance(self.text.source, DemoText):
            files = ""
        return f"{run_command()} +exp=xnli_zero_shot {encoder}{files}"

    def _tokenizer(self, context: OneWayContext) -> Tokenizer:
        tokenizer = self.text.load_tokenizer(context.cache_dir)
        if (num := tokenizer.token_ids.size) > MAX_VOCABULARY:
            said = f"the tokenizer has {num:,} ids; take one with at most {MAX_VOCABULARY:,}"
            raise ConfigError(f"model.text.tokenizer: {said}")
        return tokenizer

    def _packing(self, tokenizer: Tokenizer | None) -> IdPacking:
        """Return the packing of ids.

        tokenizer: None before it is known.
        """
        choice = self.text.tokenizer
        most = max(g.batch_size for g in self.generators.values())
        # Messages must be bounded before any text is read; the tokenizer then says how large it
        # is.
        size = choice.vocab_size if isinstance(choice, TrainedTokenizer) else MAX_VOCABULARY
        known = (size, 0) if tokenizer is None else (tokenizer.token_ids.size, tokenizer.digest)
        return IdPacking(
            vocab_size=known[0],
            max_samples=most,
            # bos and eos of a sample are not sent: the consumer adds them again.
            max_length=self.text.max_length - 2,
            digest=known[1],
            coding=self.coding,
        )

    def _encoder(
        self, backbone: Network, name: str, tokenizer: Tokenizer, context: OneWayContext
    ) -> Encoder:
        """Return the encoder with its initial weights, equal in all ranks of its cloud."""

        def report(line: str) -> None:
            """Report a line without folder names: it may be shown in another cloud."""
            if backbone.is_checkpoint:
                line = line.replace(backbone.label, Path(backbone.label).name)
            context.report(line.replace(f"{context.cache_dir}/", ""))

        generates = name == "generator"
        place = {one.name: getattr(context, one.name) for one in fields(BuildPlace)}
        build = BuildContext(
            **{**place, "report": report},
            vocabularies={name: tokenizer.token_ids},
            sentences=lambda field: (),
            max_length=self.text.max_length,
            setting=f"model.{'generators.CLOUD' if generates else name}.backbone",
        )
        weights = backbone.weights(name, build)
        assert weights.tensors is not None
        if generates and not weights.have_head:
            raise ConfigError(
                f"{name}.backbone {backbone.label} has no masked-language head; use a "
                "checkpoint with one (BERT, RoBERTa, XLM-R), a SeededBackbone or a PublicBackbone"
            )
        with seeded(context.seed, name):
            encoder = Encoder(config=weights.config, head=generates)
        encoder.load_part(weights.tensors)
        return encoder

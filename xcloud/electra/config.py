"""MultilingualElectra: what is pre-trained on what, as configured. Builds a rank's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from xcloud.checks import check_choice, check_int, check_number
from xcloud.comm.id_packing import IdPacking
from xcloud.electra.discriminator import DISCRIMINATOR_DIR, MODEL_DIR, DiscriminatorRank
from xcloud.electra.generator import GeneratorRank
from xcloud.errors import ConfigError
from xcloud.models.backbone import Backbone, PretrainedBackbone, SeededBackbone
from xcloud.models.electra import Discriminator
from xcloud.models.encoder import Encoder
from xcloud.models.public_backbone import PublicBackbone
from xcloud.models.seeding import seed_of, seeded
from xcloud.models.split import BuildContext
from xcloud.parallel.feed_parts import FeedContext
from xcloud.tasks.corpus.monolingual import DemoText, TextSource
from xcloud.tasks.multilingual_text import MultilingualText, TextStream
from xcloud.tasks.tokenizer import Tokenizer, TrainedTokenizer
from xcloud.training.optimizer import Optimizer
from xcloud.training.settings import autocast_for

MAX_VOCABULARY = 2**20  # for the longest message, before a tokenizer is there


@dataclass(frozen=True)
class Generator:
    """One cloud's: what it reads, its network, how it masks and learns.

    languages, pairs: parts of its texts, such as [es] and [es-en]; a pair is text beside its
        translation, masked on both sides (TLM). No other cloud reads them for it.
    source: its own texts where not those of model.text.source.
    batch_size: samples of one batch, which is one update of the generator and one message.
    whole_words: mask all pieces of a word or none; in scripts without spaces (Chinese, Thai) a
        word is one piece. temperature: of the sampled words.
    frozen: it only fills; nothing is trained in its cloud.
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
                f"{owner}.frozen needs a PretrainedBackbone: a network with weights drawn from a "
                "seed has nothing to fill with"
            )

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.languages, *self.pairs)


@dataclass(frozen=True)
class DiscriminatorSettings:
    """loss_weight: the paper's λ of loss = MLM + λ RTD. With an optimizer of its own it acts only
    where the size of a gradient matters: on clip_norm and eps, for AdamW divides the rest out.
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


@dataclass(frozen=True)
class MultilingualElectra:
    """Generators by the name of their cloud, and the discriminator that they feed (FeedModel).

    Sources: Pan et al., ZTE Technology Journal 2023(4), section 2.1; Clark et al.,
    arXiv:2003.10555. coding: of the ids on the wire, see IdPacking.
    """

    text: MultilingualText
    generators: Mapping[str, Generator]
    discriminator: DiscriminatorSettings = field(default_factory=DiscriminatorSettings)
    coding: Literal["smallest", "fixed"] = "smallest"

    def __post_init__(self) -> None:
        if not isinstance(self.text, MultilingualText):
            raise ConfigError(f"model.text must be a MultilingualText, got {self.text!r}")
        if not isinstance(self.generators, Mapping) or not self.generators:
            raise ConfigError("model.generators must name a generator for each cloud that feeds")
        for name, generator in self.generators.items():
            if not isinstance(generator, Generator):
                raise ConfigError(f"model.generators.{name} must be a Generator")
        if not isinstance(self.discriminator, DiscriminatorSettings):
            raise ConfigError("model.discriminator must be a DiscriminatorSettings")
        networks = [generator.backbone for generator in self.generators.values()]
        for backbone in (*networks, self.discriminator.backbone):
            text = backbone.text if isinstance(backbone, PublicBackbone) else None
            if isinstance(text, MultilingualText) and text.source.public_texts() is None:
                raise ConfigError(
                    "a PublicBackbone is pretrained on public text in every cloud, and "
                    f"{text.describe()} is not public; take a SeededBackbone or a "
                    "PretrainedBackbone"
                )
        check_choice("model.coding", self.coding, ("smallest", "fixed"))

    @property
    def max_payload_bytes(self) -> int:
        if isinstance(self.text.tokenizer, TrainedTokenizer):
            return self._packing(self.text.tokenizer.vocab_size, 0).max_bytes
        return self._packing(MAX_VOCABULARY, 0).max_bytes

    @property
    def max_positions(self) -> int | None:
        """Of the discriminator; None where only its checkpoint knows."""
        from_here = not isinstance(self.discriminator.backbone, PretrainedBackbone)
        return self.text.max_length if from_here else None

    def describe(self) -> str:
        generators = ", ".join(
            f"{name} ({'+'.join(generator.parts)}; {generator.backbone.describe()}"
            f"{', frozen' if generator.frozen else ''})"
            for name, generator in self.generators.items()
        )
        size = self.discriminator.backbone.describe()
        return f"{self.text.describe()}; generators {generators} → discriminator {size}"

    def check(self, producers: Sequence[str]) -> None:
        if set(producers) != set(self.generators):
            raise ConfigError(
                f"the clouds that feed are {', '.join(producers)}, but model.generators has "
                f"{', '.join(self.generators)}; there must be one for each"
            )
        for generator in self.generators.values():
            self.text.of(generator.source).check(generator.parts)

    def producer(
        self, index: int, cloud: str, lane: int, num_lanes: int, context: FeedContext
    ) -> GeneratorRank:
        settings = self.generators[cloud]
        text = self.text.of(settings.source)
        tokenizer = self._tokenizer(context)
        special = tokenizer.token_ids
        report = context.report if lane == 0 else _nothing
        tables = {
            part: text.table(part, tokenizer, context.cache_dir, report) for part in settings.parts
        }
        # All lanes of a cloud deal one order; two clouds with one language draw different ones.
        seed = seed_of(context.seed, "texts", cloud)
        stream = TextStream(
            tables, special, text.language_power, seed, settings.batch_size, lane, num_lanes
        )
        report(f"texts: {stream.describe()}")
        encoder = _encoder(settings.backbone, "generator", special, text, context, lane, True)
        return GeneratorRank(
            encoder.to(context.device),
            stream,
            tokenizer,
            self._packing(special.size, tokenizer.digest),
            settings,
            cloud,
            lane,
            context,
            autocast_for(settings.precision, context.device),
        )

    def consumer(self, lane: int, num_lanes: int, context: FeedContext) -> DiscriminatorRank:
        settings = self.discriminator
        tokenizer = self._tokenizer(context)
        special = tokenizer.token_ids
        encoder = _encoder(
            settings.backbone, "discriminator", special, self.text, context, lane, False
        )
        if encoder.config.activation != "gelu":
            raise ConfigError(
                f"discriminator.backbone {settings.backbone.describe()} uses "
                f"{encoder.config.activation!r}; a discriminator is exported with gelu only"
            )
        with seeded(context.seed, "replaced-token head"):
            network = Discriminator(encoder.config)
        network.encoder = encoder
        return DiscriminatorRank(
            network.to(context.device),
            tokenizer,
            self._packing(special.size, tokenizer.digest),
            settings,
            context,
            autocast_for(settings.precision, context.device),
        )

    def leaves(self, run_dir: Path) -> dict[str, str]:
        """The encoder of a task, and its tokenizer."""
        return {"task.tokenizer.name_or_path": str(run_dir / MODEL_DIR / DISCRIMINATOR_DIR)}

    def next_command(self, run_dir: Path) -> str:
        """Fine-tunes the discriminator; the files of the inference pairs are the user's."""
        encoder = " ".join(f"{key}={value}" for key, value in self.leaves(run_dir).items())
        files = "" if isinstance(self.text.source, DemoText) else " profile=files task.path=DIR"
        return f"python run.py +exp=xnli_zero_shot {encoder}{files}"

    def _tokenizer(self, context: FeedContext) -> Tokenizer:
        tokenizer = self.text.load_tokenizer(context.cache_dir)
        if tokenizer.token_ids.size > MAX_VOCABULARY:
            raise ConfigError(
                f"the tokenizer has {tokenizer.token_ids.size:,} ids, most are {MAX_VOCABULARY:,}"
            )
        return tokenizer

    def _packing(self, vocab_size: int, digest: int) -> IdPacking:
        most = max(generator.batch_size for generator in self.generators.values())
        return IdPacking(vocab_size, most, self.text.max_length - 2, digest, self.coding)


def _encoder(
    backbone: Backbone,
    name: str,
    special: object,
    text: MultilingualText,
    context: FeedContext,
    lane: int,
    head: bool,
) -> Encoder:
    """With its start weights: the same in all ranks of its cloud."""

    def report(line: str) -> None:
        """Without folders: it may be read in another cloud."""
        if isinstance(backbone, PretrainedBackbone):
            line = line.replace(backbone.name_or_path, Path(backbone.name_or_path).name)
        context.report(line.replace(f"{context.cache_dir}/", ""))

    build = BuildContext(
        seed=context.seed,
        device=context.device,
        cache_dir=context.cache_dir,
        vocabularies={name: special},  # type: ignore[dict-item]
        sentences=lambda field: (),
        max_length=text.max_length,
        lane=lane,
        barrier=context.barrier,
        report=report,
    )
    weights = backbone.weights(name, build)
    assert weights.tensors is not None
    if head and not weights.have_head:
        raise ConfigError(
            f"{name}.backbone {backbone.describe()} has no masked-language head to fill with; "
            "take a checkpoint that has one (BERT, RoBERTa, XLM-R), a SeededBackbone or a "
            "PublicBackbone"
        )
    with seeded(context.seed, name):
        encoder = Encoder(weights.config, head=head)
    encoder.load_part(weights.tensors)
    return encoder


def _nothing(line: str) -> None:
    """Only the first rank of a cloud reports."""

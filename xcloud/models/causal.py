"""A decoder-only language model of `transformers`, cut after any block and fine-tuned whole or
with LoRA; a SplitModel. Its parts: causal_network.py; what a stage computes: causal_stage.py.

1 stage:   embeddings, blocks, norm, head
n stages:  embeddings, blocks | blocks | … | blocks, norm, head
Where the first and the last stage lie in one cloud, text and labels both stay there.

What crosses: tokens of each sample, the place of each token in its document (both int16), and
hidden rows [R, H]; back come their gradients, where something below them is trained.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import HubName, NotNegative, NotNegativeFloat, Positive, settings
from xcloud.base.wording import listed
from xcloud.comm.channel import Boundary, BoundaryField
from xcloud.contracts.architecture import OWN_FOLDER
from xcloud.contracts.model import BASES, Architecture, BuildContext, Stage
from xcloud.models.causal_network import (
    HEAD,
    KINDS,
    MAX_LENGTH,
    Lora,
    Part,
    blocks_of,
    check_checkpoint,
    config_of_stage,
    draw_weights,
    laid_out,
    load_weights,
    merged_weights,
    network_of,
    place_in,
    positions_of,
    read_config,
    tie,
    write_config,
)
from xcloud.models.causal_stage import CausalStage, OwnCausal
from xcloud.models.experts import RouterLoss
from xcloud.models.frozen_weights import DTYPES, WeightFormat
from xcloud.models.pretraining import PublicTexts
from xcloud.models.scratch import ProtocolGpt
from xcloud.models.split_point import Split, projection_at
from xcloud.models.stages import TEXT, TYPES, TextModel, rows_boundary
from xcloud.pretrained import INDEX, WEIGHTS, WeightFiles

DROPOUTS = (  # and other chance
    "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "router_jitter_noise",
)  # fmt: skip
OWN_BASE = "own_base"  # of an architecture: the folder in the cache that the run has made


def same_attention() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return the contexts of a forward and of its repetition in the backward, which takes the same
    attention kernel; the trainer chooses it for its precision."""
    # The switch is that of CPUs too.
    # Asked for in the forward, and held for the backward, which runs after the trainer's context.
    is_fused = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    return nullcontext(), nullcontext() if is_fused else sdpa_kernel(SDPBackend.MATH)


def _check_vocabulary(config: Any, context: BuildContext, whose: str, remedy: str) -> None:
    """Raise ConfigError if the task's tokenizer has more token ids than the network."""
    ids = context.vocabularies.get(TEXT)
    if ids is not None and ids.size > config.vocab_size:
        raise ConfigError(
            f"{whose} has {config.vocab_size} token ids, but the task's tokenizer has "
            f"{ids.size}: {remedy}"
        )


@settings("model")
class CausalLM(TextModel):
    """Each setting: docs/causal-language-models.md. Exactly one of checkpoint, own and scratch is
    given.

    embeddings: the training of the embeddings without lora. None: trained, as the head is; refused
        where both are one matrix (tied) and lie in different stages. Frozen, or beside LoRA, each
        end holds its own copy.
    split: the split point. Its layer is the last block of the first stage. Without a layer all
        features cross.
    public_text: the text for a basis with split.calibration=public; None: the text of `own`.
    checkpoint: the model of transformers to start from: owner/name or owner/name@revision on the
        hub, or a folder; null: see own.
    own: a model that is made here instead, from public text.
    scratch: a network that starts from drawn weights instead, all of which are trained.
    lora: the adapters that are trained instead of the weights; null: all weights are trained.
    weights: the type in which the frozen weights beside lora are kept: float32, bfloat16, float16,
        or packed as int8 or nf4. Embeddings and head are never packed. null: as the checkpoint has
        them. training.precision sets the type in which products are computed.
    router_loss: the weight of the loss that has routers spread tokens over experts; null: as the
        checkpoint's config.json says, router_aux_loss_coef if output_router_logits, else none.
    blocks_per_stage: the number of the model's blocks that each stage holds; null: an even split
        over the cluster's stages.
    vocabulary_chunk: the number of tokens whose logits exist at once while the loss is computed.
        Fewer take less memory.
    text_everywhere: every stage reads the text, each from its own cloud's files, and not the first
        alone; a compression that compares rows by their tokens needs it
        (xcloud.comm.memory.TokenMeans).
    activation_checkpointing: keep only the input of each block and compute the rest again in the
        backward pass, which takes less memory and more time.
    """

    checkpoint: HubName | None = None
    own: OwnCausal | None = None
    scratch: ProtocolGpt | None = None
    lora: Lora | None = None
    weights: WeightFormat | None = None
    router_loss: NotNegativeFloat | None = None
    embeddings: Literal["freeze", "tie", "untie"] | None = None
    blocks_per_stage: Sequence[NotNegative] | None = None
    split: Split = Split(None)
    public_text: PublicTexts | None = None
    vocabulary_chunk: Positive = 8192
    activation_checkpointing: bool = False
    text_everywhere: bool = False

    def __post_init__(self) -> None:
        split = self.split
        is_cut = split.layer is not None
        sources = [bool(self.checkpoint), self.own is not None, self.scratch is not None]
        lacks_text = split.needs_public_text and self._public_text is None
        # A table: each rule stands beside its message.
        for is_wrong, said in (
            (
                sum(sources) != 1,
                "give one of model.checkpoint (a folder or hub id), model.own and model.scratch",
            ),
            (
                self.scratch is not None and self.lora is not None,
                "model.lora trains adapters beside trained weights, and model.scratch draws "
                "weights: set model.lora=null",
            ),
            (
                self.scratch is not None and split.is_measured and split.rank is not None,
                f"model.split.method={split.method} measures rows of a trained network, and "
                "model.scratch draws weights: take method=identity, or leave "
                "model.split out",
            ),
            (
                self.lora and self.embeddings,
                f"model.embeddings={self.embeddings} is for training without LoRA: leave it out",
            ),
            (
                self.lora is None and self.weights not in (None, "float32"),
                f"model.weights={self.weights} is for frozen weights, and without model.lora all "
                "are trained in float32: leave it out, or train adapters (model.lora={r: 16})",
            ),
            (lacks_text, "split.calibration=public needs model.public_text: set it, or own"),
            (
                split.is_inside,
                "model.split.method=svd replaces a sub-layer together with its skip connection: "
                "in a decoder choose pca, identity or orthogonal",
            ),
            (is_cut and split.head_rank, "model.split.head_rank is for encoders: leave it out"),
            (
                is_cut and split.calibration_pairs,
                "model.split.calibration_pairs is for encoders: leave it out",
            ),
            (
                is_cut and self.blocks_per_stage is not None,
                "model.split.layer ends the first stage: remove model.blocks_per_stage",
            ),
        ):
            if is_wrong:
                raise ConfigError(said)

    @property
    def is_pretrained(self) -> bool:
        """True if the model was pretrained."""
        return self.scratch is None

    @property
    def variant(self) -> str:
        """The trained part, for the names of runs: "lora16 nf4", or "full"."""
        if self.lora is None:
            return "full"
        return " ".join(filter(None, (f"lora{self.lora.r}", self.weights)))

    def describe(self) -> str:
        name = self.checkpoint
        if self.own is not None:
            name = self.own.label
        elif self.scratch is not None:
            name = self.scratch.label
        trained = "all weights"
        if self.lora is not None:
            trained = f"LoRA r={self.lora.r}"
            if self.weights is not None:
                trained += f" beside {self.weights}"
        cut = f", {self.split.describe()}" if self.split.layer is not None else ""
        return f"{name}, {trained}{cut}"

    @property
    def _kept_as(self) -> WeightFormat | None:
        """Return the form in which load_weights keeps matrices."""
        return "float32" if self.lora is None else self.weights

    @property
    def _public_text(self) -> PublicTexts | None:
        if self.public_text is None and self.own:
            return self.own.text
        return self.public_text

    def fields(self, stage: int, num_stages: int) -> frozenset[str]:
        read = super().fields(stage, num_stages)
        return read | {TEXT, TYPES} if self.text_everywhere else read

    def ties_ends(self, num_stages: int) -> bool:
        return self.embeddings == "tie" and num_stages > 1

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        """ConfigError for a cut, a length or adapters that the model cannot have."""
        config = self._config(max_length)
        below = range(self._parts(config, num_stages=num_stages)[stage].blocks.stop)
        whole = int(config.hidden_size)
        draws = any(getattr(config, name, 0) for name in DROPOUTS)
        # Whether a gradient comes back: anything trained below the boundary wants one.
        trains = self.embeddings != "freeze" or len(below) > 0
        if self.lora is not None:  # beside which a narrow cut trains its projections
            trains = self.split.rank is not None or self.lora.adapts(config, blocks=below)
        # Nothing moves and nothing is drawn: rows are the same in every epoch (is_constant).
        if stage == 0 and self.split.freeze_bottom:
            trains = draws = False
        router_loss = self._router_loss(config)
        return rows_boundary(
            self.split.width(whole) if stage == 0 else whole,
            max_length,
            BoundaryField(
                name="places", features=(), dtype=torch.int16, rows="counted", most=max_length - 1
            ),
            *(() if router_loss is None else router_loss.fields()),
            whole=whole,
            gradient_returns=trains,
            start=self.split.start_specs(whole, max_length) if stage == 0 else (),
            is_constant=not (trains or draws),
        )

    def check_files(self, num_stages: int, max_length: int) -> None:
        """Raise ConfigError or DataError if the checkpoint is known to be unusable before a run
        starts. The check needs neither weights nor the hub."""
        for stage in range(num_stages - 1):
            self.boundary(stage, num_stages, max_length)
        self._parts(self._config(max_length), num_stages=num_stages)
        if self.checkpoint is not None and Path(self.checkpoint).expanduser().is_dir():
            check_checkpoint(str(Path(self.checkpoint).expanduser()))

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        """Build a stage.

        A stage with LoRA saves only its adapters, so the rest is read from the base."""
        # Built for an export: sizes are those of the run, not of these settings.
        if (about := context.architecture) is not None:
            context = replace(context, max_length=int(about["max_length"]))
            if self.lora is None:
                config = config_of_stage(about["config"])
                part = self._parts(config, num_stages=num_stages)[stage]
                network = network_of(config, part)
                return self._stage(
                    network, part, stage, name="", bases=about[BASES], context=context
                )
        # Checked before anything is made.
        self._parts(self._config(context.max_length), num_stages=num_stages)
        if self.scratch is not None:
            return self._drawn(self.scratch, stage=stage, num_stages=num_stages, context=context)
        name = self._base(context)
        # One rank of a stage speaks for all: they read the same.
        if context.group_rank == 0:
            context.report(f"stage {stage}: reading its part of {name}")
        if context.group_rank == 0 and stage == 0 and context.architecture is None:
            # Once for the whole checkpoint, in the rank that says it.
            if unread := check_checkpoint(name):
                context.report(f"{name}: not read are {listed(unread)}")
        config = read_config(name)
        _check_vocabulary(config, context, f"{name!r}", "use the checkpoint's own tokenizer")
        part = self._parts(config, num_stages=num_stages)[stage]
        network = laid_out(config, part)
        built = self._stage(network, part, stage, name=name, bases={}, context=context)

        def end_block(prefix: str, block: nn.Module) -> None:
            if self.lora is not None:
                self.lora.draw(prefix, block=block, seed=context.seed)
            # A sharded stage takes the block apart now, before the next one has memory.
            context.deal(block)

        # The stage is complete by now, adapters included: filling goes block by block, so that no
        # more than one whole block is in memory beside what is kept.
        load_weights(network, name_or_path=name, weights=self._kept_as, end_block=end_block)
        built.architecture[BASES].update(self._digests(name, context))
        return built

    def _drawn(
        self, scratch: ProtocolGpt, stage: int, num_stages: int, context: BuildContext
    ) -> CausalStage:
        """Build a stage whose weights the seed draws, each block from a stream of its own."""
        config = self._config(context.max_length)
        remedy = f"set model.scratch.vocab_size, which is {config.vocab_size}"
        _check_vocabulary(config, context, scratch.label, remedy)
        part = self._parts(config, num_stages=num_stages)[stage]
        network = network_of(config, part)
        draw_weights(network, seed=context.seed)
        built = self._stage(network, part, stage, name="", bases={}, context=context)
        for number, (_, block) in enumerate(blocks_of(network)):
            if number in part.blocks:
                context.deal(block)
        return built

    def _base(self, context: BuildContext) -> str:
        """Return the checkpoint that stages are built from: of an exported run the one that it was
        trained on, which is never made again. Raises DataError if it is another or is not here."""
        about = context.architecture
        if about is None:
            return str(self.checkpoint if self.own is None else self.own.folder(context))
        name = str(self.checkpoint)
        # The files that make a network what it is. Others (a readme, a tokenizer) may have
        # changed.
        needed = {"base model: config.json", "base model: list of weights"}
        if self.own is not None:
            folder = self._own_folder(about.get(OWN_BASE), context.cache_dir)
            name = str(folder)
        now = self._digests(name, context)
        if self.own is not None:
            needed |= now.keys()
        # What the run has written down when it began. Files that only one side has count if they
        # are needed for the network.
        meant = about.get(BASES, {})
        differing = [
            file
            for file in sorted(now.keys() | needed)
            if (file in needed or file in meant) and now.get(file) != meant.get(file)
        ]
        if differing:
            raise DataError(
                f"{name} is not what this run trained adapters beside: {differing[0]} "
                "differs. Put that checkpoint back; adapters of one network are noise in another"
            )
        return name

    def _own_folder(self, given: object, cache_dir: Path) -> Path:
        """Return the folder of the base that the run has made, as its architecture names it.

        Another owner may have written the architecture, so the name leads nowhere but into the
        cache's folder of such bases."""
        assert self.own is not None
        if not isinstance(given, str) or not re.fullmatch(OWN_FOLDER, given):
            raise DataError(
                f"the stage says that its base lies in {given!r:.200}; a base that a run has made "
                f"lies in {OWN_FOLDER} of the cache"
            )
        folder = cache_dir / given
        if not folder.is_dir():
            raise DataError(
                f"the base model of this run's adapters is not here: there is "
                f"no {folder}. Copy that folder from a cloud that ran it; a base that is made "
                "again on another processor differs"
            )
        # The name is harmless by its pattern, but a link of that name may lead anywhere.
        if folder.resolve().parent != (cache_dir / "causal").resolve():
            raise DataError(
                f"{folder} is a link that leads out of the cache; put the folder there"
            )
        return folder

    def _digests(self, name: str, context: BuildContext) -> dict[str, str]:
        digests = WeightFiles(name).digests(context.cache_dir)
        return {f"base model: {file}": digest for file, digest in digests.items()}

    def join(
        self,
        tensors: dict[str, Tensor],
        architecture: Architecture,
        context: BuildContext,
        out: Path,
    ) -> list[Path]:
        """Write all stages' exported tensors into `out`: adapters as peft loads them, with our own
        base in out/base; or all weights as transformers does. Returns the folders that want the
        tokenizer, too. architecture: of any stage."""
        file, weights = self.joined(tensors, architecture)
        folders = self.write_beside(architecture, context, out)
        save_file(weights, out / file, {"format": "pt"})
        return folders

    def joined(
        self, tensors: Mapping[str, Tensor], architecture: Architecture
    ) -> tuple[str, dict[str, Tensor]]:
        """Return the name of the file with weights that `join` writes, and what is in it.

        Raises DataError for a tensor that is missing."""
        self._check_is_known()
        if self.lora is not None:
            return "adapter_model.safetensors", dict(tensors)
        network = self._whole(config_of_stage(architecture["config"]))
        kind = KINDS[network.config.model_type]
        names = [name for name, _ in network.named_parameters()]  # of a tied pair one
        if missing := set(names) - set(tensors):
            raise DataError(f"no part of the model holds {sorted(missing)[0]}")
        return "model.safetensors", {kind.in_file(name): tensors[name] for name in names}

    def write_beside(
        self, architecture: Architecture, context: BuildContext, out: Path
    ) -> list[Path]:
        """Write what `join` writes beside the weights. Returns the folders that want the
        tokenizer, too."""
        self._check_is_known()
        out.mkdir(parents=True, exist_ok=True)
        config = config_of_stage(architecture["config"])
        if self.lora is None:
            # Laying out sets float32 for computing; the file says what the checkpoint had.
            dtype = config.dtype
            network = self._whole(config)
            network.config.use_cache = True
            network.config.dtype = dtype
            write_config(network, folder=out)
            return [out]
        base = self._base(replace(context, architecture=architecture))
        folders = [out]
        if self.own is not None:
            folders.append((out / "base").resolve())
            folders[-1].mkdir(exist_ok=True)
            for file in ("config.json", WEIGHTS):  # what write_checkpoint writes, nothing else
                shutil.copyfile(Path(base, file), folders[-1] / file, follow_symlinks=False)
            base = str(folders[-1])
        elif Path(base).expanduser().is_dir():  # peft may be started in another folder
            base = str(Path(base).expanduser().resolve())
        self.lora.adapter_config(config, base).save_pretrained(out)
        return folders

    def _whole(self, config: Any) -> Any:
        """Return the whole network, without memory for its weights."""
        part = Part(blocks=range(config.num_hidden_layers), is_first=True, is_last=True)
        network = laid_out(config, part)
        tie(network)
        return network

    def merge(self, stages: Sequence[CausalStage], context: BuildContext, out: Path) -> list[Path]:
        """Write the model with its adapters added to its weights into `out`, as transformers loads
        it, each tensor in its dtype in the checkpoint; a file and a stage at a time, in FP32 only
        in between. Returns the folders that want the tokenizer, too."""
        if self.lora is None:
            raise ConfigError("--merge adds adapters to weights, and this run trained all weights")
        self._check_is_known()
        base = self._base(replace(context, architecture=stages[0].architecture))
        files = WeightFiles(base)
        config = read_config(base)
        dtype = str(config.dtype or "float32").removeprefix("torch.")
        weight_map = dict[str, str]()
        num_bytes = 0
        # Stage after stage, as the whole model may not fit into memory in FP32.
        for number, stage in enumerate(stages, start=1):
            network: Any = stage.network
            network.config.dtype = dtype
            network.config.use_cache = True
            write_config(network, folder=out)
            is_tied = network.config.tie_word_embeddings
            head = KINDS[network.config.model_type].in_file(f"{HEAD}.weight")
            tensors = {}
            for name, weight in merged_weights(network):
                # A tied head is no tensor of a file.
                if not (name == head and is_tied):
                    place = place_in(files, network, name, is_tied=is_tied)
                    tensors[name] = weight.to(DTYPES[files.dtype(place)]).contiguous()
            file = f"model-{number:05}-of-{len(stages):05}.safetensors"
            save_file(tensors, out / file, {"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
            num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        # The list by which transformers finds each tensor in its file.
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (out / INDEX).write_text(json.dumps(index, indent=1))
        return [out]

    def _check_is_known(self) -> None:
        """Raise ConfigError for a network that transformers cannot load."""
        if self.scratch is not None:
            raise ConfigError(
                f"transformers has no type of model like {self.scratch.label}: use "
                "`xcloud generate`"
            )
        if self.split.rank is not None:
            raise ConfigError(
                "transformers and peft have no place for model.split: use `xcloud generate`"
            )

    def _lower(self, name: str) -> Stage:
        config = read_config(name)
        part = Part(blocks=range(self.split.block + 1), is_first=True, is_last=False)
        network = laid_out(config, part)
        load_weights(network, name_or_path=name, weights=self._kept_as)
        return CausalStage(
            network, part, chunk=self.vocabulary_chunk, architecture={"lora": False}
        )

    def _stage(
        self,
        network: Any,
        part: Part,
        stage: int,
        name: str,
        bases: Mapping[str, str],
        context: BuildContext,
    ) -> CausalStage:
        """Build a stage whose weights are not set yet.

        name: the name of the checkpoint, or "" if all weights will come from a file.
        bases: the digests that are known of the checkpoint.
        """
        config = network.config
        sizes = (config.vocab_size, config.hidden_size)
        lower = partial(self._lower, name)
        # Before adapters and freezing: a basis is measured on the checkpoint's network, below the
        # split.
        cut, handed = projection_at(
            self.split, stage, sizes, lower=lower, public=self._public_text, context=context
        )
        if self.embeddings == "untie":
            config.tie_word_embeddings = False
            head = getattr(network, HEAD)
            if part.is_first and part.is_last:
                # In one stage the two would else stay one tensor, whatever the config says.
                head.weight = nn.Parameter(head.weight.detach().clone())
        if self.lora is not None:
            self.lora.add_to(network, part=part)
        elif self.embeddings == "freeze":
            kind = KINDS[config.model_type]
            # What the first stage runs before its blocks (learned positions of GPT-2) freezes with
            # it.
            for inner in (kind.embeddings, *kind.first):
                getattr(network.base_model, inner).requires_grad_(False)
            getattr(network, HEAD).requires_grad_(False)
        if self.activation_checkpointing:
            # Non-reentrant: the first stage's input needs no gradient, so a reentrant block would
            # get none.
            how = {"use_reentrant": False, "context_fn": same_attention}
            network.activation_checkpointing_enable(how)
        about: dict[str, Any] = {"lora": self.lora is not None, "max_length": context.max_length}
        # Digests that whoever builds this stage again must find: other weights mean other
        # adapters.
        about[BASES] = {**bases, **({} if cut is None else cut.measured_on)}
        if self.own is not None and name:
            about[OWN_BASE] = Path(name).relative_to(context.cache_dir).as_posix()
        is_tied = self.embeddings == "tie" and part.is_first != part.is_last
        frozen = stage == 0 and self.split.freeze_bottom
        chunk = self.vocabulary_chunk
        return CausalStage(
            network,
            part,
            chunk,
            architecture=about,
            cut=cut,
            handed_over=handed,
            frozen=frozen,
            is_tied=is_tied,
            router_loss=self._router_loss(config),
            document_loss=context.document_loss,
        )

    def _router_loss(self, config: Any) -> RouterLoss | None:
        if not KINDS[config.model_type].experts:
            return None
        weight = self.router_loss
        if weight is None and config.output_router_logits:
            # As transformers: its own loss is on only where the config has the logits put out.
            weight = config.router_aux_loss_coef
        if not weight:
            return None
        return RouterLoss(
            weight, num_experts=config.num_experts, num_chosen=config.num_experts_per_tok
        )

    def _config(self, max_length: int) -> Any:
        """The model's, checked against these settings. Reads config.json, no weights."""
        if self.own:
            config = self.own.config(max_length)
        elif self.scratch:
            config = self.scratch.config(max_length)
        else:
            config = read_config(str(self.checkpoint))
        positions = positions_of(config)
        if max_length > positions:
            whose = f"{self.describe()} has {positions} positions"
            if positions < min(MAX_LENGTH, config.max_position_embeddings):
                whose += " for short texts (rope_type longrope: its longer ones change the others)"
            raise ConfigError(f"task.max_length is {max_length}, but {whose}; lower it")
        if self.lora is not None:
            self.lora.check(config)
        if self.router_loss is not None and not KINDS[config.model_type].experts:
            raise ConfigError(
                f"model.router_loss={self.router_loss}: {self.describe()} has no experts, so no "
                "routers; leave it out"
            )
        if self.embeddings in ("tie", "untie") and not config.tie_word_embeddings:
            raise ConfigError(
                f"model.embeddings={self.embeddings}: embeddings and head of {self.describe()} "
                "are two matrices already; leave it out"
            )
        return config

    def _parts(self, config: Any, num_stages: int) -> list[Part]:
        trained_twice = self.lora is None and self.embeddings is None and num_stages > 1
        if trained_twice and config.tie_word_embeddings:
            raise ConfigError(
                f"{self.describe()}: its embeddings and its head are one matrix (tied) in two "
                "stages: let its gradients cross (model.embeddings=tie), train two (untie), keep "
                "it as it is (model.embeddings=freeze), or train adapters (model.lora={r: 16})"
            )
        if self.split.layer is not None and num_stages == 1:
            raise ConfigError(
                "model.split.layer splits the model, and this cluster has one stage: set it to "
                "null, or choose cluster=two_clouds"
            )
        num_blocks = config.num_hidden_layers
        counts = self.blocks_per_stage
        self.split.check(num_blocks, int(config.hidden_size))
        # The split ends the first stage; the rest is spread over the others.
        starts = [0] if self.split.layer is None else [0, self.split.layer + 1]
        if counts is None:
            spread = num_stages - len(starts) + 1
            rest = num_blocks - starts[-1]
            # Rounded down: the later stages get the larger shares.
            starts += [starts[-1] + rest * (n + 1) // spread for n in range(spread)]
        elif len(counts) != num_stages - 1 or sum(counts) > num_blocks:
            raise ConfigError(
                f"model.blocks_per_stage must be {num_stages - 1} counts (one for each stage but "
                f"the last) that add up to {num_blocks} blocks at most, got {list(counts)}"
            )
        else:
            starts = [*accumulate(counts, initial=0), num_blocks]
        last = num_stages - 1
        return [
            Part(blocks=range(*ends), is_first=n == 0, is_last=n == last)
            for n, ends in enumerate(pairwise(starts))
        ]

    def num_blocks(self, max_length: int) -> int:
        is_free = self.split.layer is None
        if is_free:
            return int(self._config(max_length).num_hidden_layers)
        return 0

    def block_counts(self, num_stages: int, max_length: int) -> list[int]:
        return [
            len(part.blocks)
            for part in self._parts(self._config(max_length), num_stages=num_stages)
        ]

    def with_block_counts(self, counts: Sequence[int]) -> CausalLM:
        return replace(self, blocks_per_stage=tuple(counts[:-1]))

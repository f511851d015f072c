"""Import and export transformers checkpoints of the BERT family; find any checkpoint.

Only names and layouts change: query, key and value are fused into one matrix, RoBERTa's unused
first positions are dropped, ERNIE's constant task embedding is added to the type embeddings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from xcloud.base.errors import ConfigError, DataError
from xcloud.hub import go_offline_if_unreachable
from xcloud.models.encoder import ACTIVATIONS, Encoder, EncoderConfig

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
EMBEDDING_NAMES = {
    "embeddings.words.weight": "embeddings.word_embeddings.weight",
    "embeddings.positions.weight": "embeddings.position_embeddings.weight",
    "embeddings.types.weight": "embeddings.token_type_embeddings.weight",
    "embeddings.norm.weight": "embeddings.LayerNorm.weight",
    "embeddings.norm.bias": "embeddings.LayerNorm.bias",
}
LAYER_NAMES = {  # several of theirs are one matrix of ours
    "attention.query_key_value": [f"attention.self.{name}" for name in ("query", "key", "value")],
    "attention.output": ["attention.output.dense"],
    "attention_norm": ["attention.output.LayerNorm"],
    "up": ["intermediate.dense"],
    "down": ["output.dense"],
    "norm": ["output.LayerNorm"],
}
HEAD_NAMES = (  # dense layer, norm, bias
    (
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
    ),
    ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    ("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias"),
)

T = TypeVar("T")


class WeightFiles:
    """The safetensors of a checkpoint, in a folder, the hub's cache or on the hub. A shard is
    looked for when something in it is asked for, so others' shards are not fetched."""

    def __init__(self, name_or_path: str) -> None:
        self._name = name_or_path
        try:
            index = self._file("model.safetensors.index.json")
            self._shards: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except DataError:  # one file then
            with safe_open(self._file("model.safetensors"), "pt") as file:
                self._shards = dict.fromkeys(file.keys(), "model.safetensors")

    def _file(self, name: str) -> Path:
        from transformers.utils.hub import cached_file

        return Path(fetch(self._name, lambda at, **where: str(cached_file(at, name, **where))))

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def first_of(self, *names: str) -> str:
        """The first name that there is a tensor of. DataError if there is none."""
        found = next((name for name in names if name in self), None)
        if found is None:
            raise DataError(f"checkpoint {self._name!r} has no weights {names[0]}")
        return found

    def tensor(self, name: str) -> Tensor:
        with safe_open(self._file(self._shards[name]), "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's config.json in our terms. prefix: of its encoder's names in files; others
    have none. has_tasks: a constant task embedding is added."""

    config: EncoderConfig
    pad: int | None
    position_offset: int
    prefix: str
    has_tasks: bool
    ties_head: bool


def read_config(name_or_path: str) -> Checkpoint:
    """Read from a local folder, the local hub cache, or the hub. Raises DataError if not found,
    ConfigError if it is not of the BERT family.
    """
    from transformers import AutoConfig

    raw = raw_config(name_or_path)
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise _refusal(name_or_path, f"is of type {model_type!r}")
    given = AutoConfig.for_model(**raw)
    if getattr(given, "embedding_size", given.hidden_size) != given.hidden_size:
        raise _refusal(name_or_path, "projects its embeddings to another width")
    if given.hidden_act not in ACTIVATIONS:
        raise _refusal(name_or_path, f"uses the activation {given.hidden_act!r}")
    if model_type not in ("bert", "ernie") and given.hidden_act != "gelu":
        raise _refusal(name_or_path, f"uses {given.hidden_act!r} in its layers, gelu in its head")
    if raw.get("position_embedding_type", "absolute") != "absolute":
        raise _refusal(name_or_path, f"has {raw['position_embedding_type']!r} positions")
    offset = given.pad_token_id + 1 if model_type in OFFSET_TYPES else 0
    values = {ours: getattr(given, theirs) for ours, theirs in CONFIG_NAMES.items()}
    values["max_positions"] -= offset
    return Checkpoint(
        EncoderConfig(**values),
        given.pad_token_id,
        offset,
        "roberta." if model_type in OFFSET_TYPES else f"{model_type}.",
        bool(getattr(given, "use_task_id", False)),
        bool(getattr(given, "tie_word_embeddings", True)),
    )


def read_weights(name_or_path: str) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Weights named as in Encoder's state dict, float32, on the CPU. Without a head ("head.…") if
    the checkpoint has none, or one not tied to the embeddings.
    """
    checkpoint, files = read_config(name_or_path), WeightFiles(name_or_path)
    heads = (names for names in HEAD_NAMES if checkpoint.ties_head and names[2] in files)
    names = _names(checkpoint.config.num_layers, next(heads, None))

    def read(name: str) -> Tensor:
        return _tensor(files, name, checkpoint.prefix)

    weights = {ours: torch.cat([read(name) for name in theirs]) for ours, theirs in names.items()}
    if checkpoint.has_tasks:
        weights["embeddings.types.weight"] += read("embeddings.task_type_embeddings.weight")[0]
    positions = weights["embeddings.positions.weight"][checkpoint.position_offset :]
    return checkpoint, weights | {"embeddings.positions.weight": positions.clone()}


def read_pooler(name_or_path: str) -> dict[str, Tensor] | None:
    """ "weight" and "bias" of the pooler's dense layer; None without one."""
    files, prefix = WeightFiles(name_or_path), read_config(name_or_path).prefix
    if "pooler.dense.weight" not in files and f"{prefix}pooler.dense.weight" not in files:
        return None
    return {kind: _tensor(files, f"pooler.dense.{kind}", prefix) for kind in ("weight", "bias")}


def _tensor(files: WeightFiles, name: str, prefix: str) -> Tensor:
    """float32. Norms of the first BERTs are gamma and beta."""
    old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
    old = old.replace("LayerNorm.bias", "LayerNorm.beta")
    return files.tensor(files.first_of(prefix + name, name, prefix + old, old)).float()


def _names(num_layers: int, head: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Of each of our tensors, theirs, of which it is made one below the other."""
    names = {ours: [theirs] for ours, theirs in EMBEDDING_NAMES.items()}
    modules = {
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


def export_bert(encoder: Encoder, folder: Path, pad: int) -> None:
    """Write a whole Encoder as a transformers BertForMaskedLM: config.json and
    model.safetensors, no tokenizer.
    """
    about = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "pad_token_id": pad}
    _export(encoder, folder, about, HEAD_NAMES[0], {})


def export_electra(
    encoder: Encoder, dense: nn.Linear, score: nn.Linear, folder: Path, pad: int
) -> None:
    """Write an Encoder and its replaced-token head as a transformers ElectraForPreTraining:
    config.json and model.safetensors, no tokenizer.
    """
    about: dict[str, Any] = {"model_type": "electra", "architectures": ["ElectraForPreTraining"]}
    about |= {"pad_token_id": pad, "embedding_size": encoder.config.hidden}
    prefix = "discriminator_predictions.dense"
    head = dense.state_dict(prefix=f"{prefix}.") | score.state_dict(prefix=f"{prefix}_prediction.")
    _export(encoder, folder, about, None, head)


def _export(
    encoder: Encoder,
    folder: Path,
    about: Mapping[str, Any],
    head_names: Sequence[str] | None,
    head: Mapping[str, Tensor],
) -> None:
    """about: of the config, beside sizes. head_names: of the encoder's own head, if it goes with
    it. head: another one, named as theirs."""
    weights, theirs, config = encoder.state_dict(), dict(head), encoder.config
    for ours, names in _names(config.num_layers, head_names).items():
        inside = "" if ours.startswith("head.") else f"{about['model_type']}."
        parts = weights[ours].chunk(len(names))
        theirs |= {f"{inside}{name}": part for name, part in zip(names, parts, strict=True)}
    described = {name: getattr(config, ours) for ours, name in CONFIG_NAMES.items()}
    described |= {"dtype": "float32", **about}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in theirs.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


def raw_config(name_or_path: str) -> dict[str, Any]:
    """What config.json says. Raises DataError if it is not found."""
    from transformers import PreTrainedConfig

    read = PreTrainedConfig.get_config_dict
    described: dict[str, Any] = fetch(name_or_path, lambda name, **where: read(name, **where)[0])
    return described


def _refusal(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"PretrainedBackbone {name!r} {reason}; supported are checkpoints of type "
        f"{', '.join(MODEL_TYPES)} with absolute positions, a single width and an "
        f"activation among {', '.join(ACTIVATIONS)}"
    )


def fetch(name: str, load: Callable[..., T]) -> T:
    """Load from disk if possible; ask the hub only if it answers, so that a machine without
    network fails at once, not after half a minute of retries.
    """
    wanted = (
        f"put its config.json and model.safetensors into a folder and give the folder's path "
        f"instead of {name!r}, or fill the hub cache on a machine with network access "
        f"(hf download {name}) and copy it to ~/.cache/huggingface/hub"
    )
    unreachable = f"checkpoint {name!r} is not in the hub cache, and the hub is out of reach"
    folder = Path(name).expanduser()
    try:
        return load(str(folder) if folder.is_dir() else name, local_files_only=True)
    except OSError as error:
        if folder.is_dir():
            why = _first_line(error)
            raise DataError(f"folder {folder} is not a complete checkpoint: {why}") from error
        if name.startswith(("/", ".", "~")):
            raise DataError(f"no folder {name}; {wanted}") from None
        if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON"):
            raise DataError(f"{unreachable} (HF_HUB_OFFLINE is set); {wanted}") from None
    if not go_offline_if_unreachable():
        raise DataError(f"{unreachable} (no answer); {wanted}")
    try:
        return load(name)
    except OSError as error:
        why = _first_line(error)
        raise DataError(f"the hub has no such checkpoint: {why}; {wanted}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)

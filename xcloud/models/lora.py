"""LoRA: low-rank adapters beside frozen matrices, by `peft`, in a part of a causal model.

Hu et al., arXiv:2106.09685: y = W x + (alpha / r) B A x, A drawn, B zero at the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor, nn

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Positive, between, check, settings
from xcloud.models.causal_network import KINDS, blocks_of, linear_names
from xcloud.models.stages import seeded

NAME = "default"  # what peft calls the only adapter of a network
PREFIX = "base_model.model."  # of every tensor in a file of peft


@settings("model.lora")
class Lora:
    """r: rank. alpha: scale, of which alpha / r counts. dropout: in front of A.

    targets: last names of the matrices in a block (q_proj, down_proj …); None: those that peft
        takes for this type of model. layers: blocks that get adapters, from 0; None: all. Below
        the first of them nothing is trained, and no gradient comes back over a boundary there.
    """

    r: Positive = 16
    alpha: Positive = 32
    dropout: Annotated[float, Field(ge=0.0, le=0.99)] = 0.0
    targets: Annotated[Sequence[str], Field(min_length=1)] | None = None
    layers: Annotated[Sequence[int], Field(min_length=1)] | None = None

    def check(self, config: Any) -> None:
        """Raise ConfigError for a matrix or a block that the model has not."""
        matrices = linear_names(config)
        if unknown := sorted(set(self.targets_in(config)) - set(matrices)):
            raise ConfigError(
                f"model.lora.targets: a block of this {config.model_type} has no "
                f"{', '.join(unknown)}; its matrices are {', '.join(matrices)}"
            )
        for layer in self.layers or ():
            check("model.lora.layers", layer, between(0, config.num_hidden_layers - 1))

    def targets_in(self, config: Any) -> list[str]:
        if self.targets is not None:
            return list(self.targets)
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as usual

        if config.model_type not in usual:
            raise ConfigError(
                f"peft names no usual matrices for {config.model_type}; set model.lora.targets to "
                f"some of {', '.join(linear_names(config))}"
            )
        return sorted(usual[config.model_type])

    def layers_in(self, config: Any) -> frozenset[int]:
        return frozenset(range(config.num_hidden_layers) if self.layers is None else self.layers)

    def add_to(self, network: Any) -> None:
        """Freeze the network and put trained adapters beside its targets, in place; `draw` starts
        them."""
        from peft import inject_adapter_in_model

        config = network.config
        layers, targets = self.layers_in(config), self.targets_in(config)
        names = [
            name
            for number, (prefix, block) in enumerate(blocks_of(network))
            if number in layers
            for name, _ in block.named_modules(prefix=prefix)
            if name.rsplit(".", 1)[-1] in targets
        ]
        network.requires_grad_(False)
        if not names:  # a stage without adapted blocks
            return
        with seeded(0, "replaced by draw"):
            inject_adapter_in_model(self._settings(config, names), network, NAME)

    def draw(self, prefix: str, block: nn.Module, seed: int) -> None:
        """Start the adapters of a block called `prefix`. It depends on the seed and their own name
        alone."""
        from peft.tuners.lora import LoraLayer

        for name, module in block.named_modules(prefix=prefix):
            if isinstance(module, LoraLayer):
                with seeded(seed, "lora", name):
                    module.reset_lora_parameters(NAME, True)  # type: ignore[no-untyped-call]

    def adapter_config(self, config: Any, base: str) -> Any:
        """What peft writes beside the adapter's tensors. base: folder or hub id of the model."""
        settings = self._settings(config, self.targets_in(config))
        if self.layers is not None:
            settings.layers_to_transform = sorted(self.layers)
            settings.layers_pattern = KINDS[config.model_type].blocks
        settings.base_model_name_or_path, settings.inference_mode = base, True
        return settings

    def _settings(self, config: Any, targets: Sequence[str]) -> Any:
        from peft import LoraConfig

        return LoraConfig(
            r=self.r, lora_alpha=self.alpha, lora_dropout=self.dropout,
            target_modules=list(targets), task_type="CAUSAL_LM",
            fan_in_fan_out=config.model_type == "gpt2",  # its matrices are stored transposed
        )  # fmt: skip


def adapter_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The adapters' tensors under the names that peft gives them in a file."""
    for name, tensor in network.state_dict().items():
        if ".lora_" in name:
            yield PREFIX + name.replace(f".{NAME}.", "."), tensor

"""Mixtures of experts: the loss, with that of the routers, and its gradients are those of
transformers wherever the model is cut, adapters are those of peft, and experts are kept as other
matrices are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import configs
from tests.causal_models import (
    batch_of,
    build,
    folder_in,
    loss_of,
    next_words,
    saved,
    through,
    where,
    words,
)
from tests.channels import IDENTITY, InProcessLink
from tests.nightly import each_once, first_daily
from tests.runs import in_threads, losses, weights
from xcloud.base.errors import ConfigError
from xcloud.comm.channel import Codec, Codecs, ReceiveChannel, SendChannel
from xcloud.comm.memory import NoMemory
from xcloud.comm.precision import BlockInt
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.model import Stage
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import KINDS, Lora, merged_weights
from xcloud.models.experts import SHARES, TOKENS, ExpertAdapters
from xcloud.models.frozen_weights import FrozenMatrix
from xcloud.net.frame import Kind, MessageKey

MIXTURES = ("mixtral", "qwen3_moe")
ROUTED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
UNEVEN = [words(9, 1), words(4, 2), words(6, 3)]
EXPERTS = Lora(r=2, alpha=4, experts=True)


def model_of(folder: Path, **settings: Any) -> CausalLM:
    return CausalLM(checkpoint=str(folder), **({"lora": None} | settings))


def padded(lines: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids [B, S] as transformers takes them, and its mask of what is no padding."""
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(line) for line in lines], batch_first=True, padding_value=0
    )
    mask = [[1] * len(line) + [0] * (ids.shape[1] - len(line)) for line in lines]
    return ids, torch.tensor(mask)


def their_loss(network: Any, lines: list[list[int]]) -> Tensor:
    ids, mask = padded(lines)
    labels = ids.masked_fill(mask == 0, -100)
    loss: Tensor = network(ids, attention_mask=mask, labels=labels).loss
    return loss


def by_expert(kind: str, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of transformers' parameters, those of experts cut into their matrices."""
    gate, up, down = KINDS[kind].experts
    found = {}
    for name, gradient in gradients.items():
        path, _, last = name.rpartition(".")
        if not path.endswith(".experts"):
            found[name] = gradient
            continue
        for number, one in enumerate(gradient):
            matrices = {down: one}
            if last == "gate_up_proj":
                matrices = dict(zip((gate, up), one.chunk(2), strict=True))
            found |= {f"{path}.{number}.{n}.weight": matrix for n, matrix in matrices.items()}
    return found


@pytest.mark.parametrize("kind", first_daily(MIXTURES, count=1))
@pytest.mark.parametrize(("num_stages", "checkpointing"), [(1, False), (3, False), (2, True)])
def test_loss_and_gradients_are_those_of_transformers_with_its_routers_loss(
    tmp_path: Path, kind: str, num_stages: int, checkpointing: bool
) -> None:
    network = saved(kind, tmp_path, **ROUTED)
    model = model_of(tmp_path, activation_checkpointing=checkpointing)
    stages = [stage.train() for stage in build(model, num_stages, where(tmp_path))]
    loss = loss_of(stages, batch_of(*([line] for line in UNEVEN))) / sum(
        len(line) - 1 for line in UNEVEN
    )
    loss.backward()
    expected = their_loss(network, UNEVEN)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)

    network.config.output_router_logits = False
    assert their_loss(network, UNEVEN).item() < expected.item() - 0.1, "it is a part of the loss"
    slopes = by_expert(kind, {n: p.grad for n, p in network.named_parameters()})
    found = {n: p.grad for stage in stages for n, p in stage.network.named_parameters()}
    assert found.keys() == slopes.keys()
    for name, slope in slopes.items():
        torch.testing.assert_close(found[name], slope, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_routers_loss_follows_the_checkpoint_or_its_setting(tmp_path: Path, kind: str) -> None:
    def fields(**settings: Any) -> list[str]:
        boundary = model_of(tmp_path, **settings).boundary(0, 2, 16)
        return [field.name for field in boundary.fields]

    network = saved(kind, tmp_path)
    assert fields() == ["counts", "places", "hidden"]
    model = model_of(tmp_path, router_loss=0.3)
    network.config.output_router_logits = True
    network.router_aux_loss_coef = 0.3
    loss = loss_of(build(model, 2, where(tmp_path)), batch_of([UNEVEN[0]])) / 8
    torch.testing.assert_close(loss, their_loss(network, UNEVEN[:1]), rtol=1e-6, atol=1e-6)

    saved(kind, tmp_path, **ROUTED)
    assert fields() == ["counts", "places", TOKENS, SHARES, "hidden"]
    assert fields(router_loss=0.0) == ["counts", "places", "hidden"]


def test_what_routers_tell_crosses_as_it_is_and_rows_are_compressed(tmp_path: Path) -> None:
    saved("mixtral", tmp_path, **ROUTED)
    model = model_of(tmp_path)
    boundary = model.boundary(0, 2, 16)
    batch = batch_of(*([line] for line in UNEVEN))
    message = through(build(model, 2, where(tmp_path)), batch)
    assert message is not None and list(message) == [field.name for field in boundary.fields]
    assert message[TOKENS].sum(1).tolist() == [2 * 2 * len(line) for line in UNEVEN]
    torch.testing.assert_close(message[SHARES].sum(1), message[TOKENS].sum(1) / 2)

    def codecs() -> Codecs:
        return Codecs([(None, Codec(BlockInt(bits=4), NoMemory()))])

    for fields in (boundary.fields, boundary.gradient_fields):
        link = InProcessLink()
        sender = SendChannel(link, fields, codecs, StepClock(), IDENTITY)
        receiver = ReceiveChannel(
            link, fields, codecs, StepClock(), IDENTITY, torch.device("cpu"), 5.0, 16
        )
        key = MessageKey(Kind.ACTIVATION, 1, 0)
        sender.send(key, message, batch)
        known = {name: message[name] for name in ("counts", "places")}
        arrived = receiver.recv(key, batch, known)
        assert all(torch.equal(arrived[n], message[n]) for n in arrived if n != "hidden")
        assert not torch.equal(arrived["hidden"], message["hidden"])
    assert [field.name for field in boundary.gradient_fields] == [SHARES, "hidden"]


def test_a_defence_would_change_what_routers_tell_and_is_refused(tmp_path: Path) -> None:
    saved("mixtral", tmp_path, max_position_embeddings=256, **ROUTED)
    given = (
        "+exp=lora_clm", "model.own=null", f"model.checkpoint={tmp_path}",
        "model.lora.targets=[q_proj]", "security/defences/backward=max_norm",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"shares.*set model\.router_loss=0, or leave"):
        configs.build(*given).check()
    configs.build(*given, "model.router_loss=0").check()


def adapted(stages: list[Stage]) -> dict[str, Tensor]:
    """The adapters of all stages, made large enough to matter."""
    with torch.no_grad():
        for stage in stages:
            for name, parameter in stage.named_parameters():
                if ".lora_" in name:
                    parameter.normal_(std=0.2)
    return {name: t for stage in stages for name, t in stage.exported().items()}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(("layers", "kind"), each_once([None, [1, 3]], MIXTURES, count=2))
def test_adapters_of_experts_are_those_of_peft_and_merge_into_the_model(
    tmp_path: Path, kind: str, layers: list[int] | None
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    saved(kind, tmp_path / "base")
    lora = Lora(r=2, alpha=4, experts=True, targets=["q_proj", "o_proj"], layers=layers)
    model = model_of(tmp_path / "base", lora=lora, blocks_per_stage=[3])
    at = where(tmp_path)
    stages = build(model, 2, at)
    tensors = adapted(stages)
    assert len(tensors) == (2 * 2 + 4) * (4 if layers is None else 2)
    found = next_words(stages, batch_of([UNEVEN[0]]))[0]

    (joined,) = model.join(tensors, stages[0].architecture, at, tmp_path / "joined")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(base, joined).eval()
    model.merge(stages, at, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    for network in (theirs, merged):
        expected = network(torch.tensor([UNEVEN[0]])).logits[0, -1].detach()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, plain(torch.tensor([UNEVEN[0]])).logits[0, -1], atol=0.1)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_gradients_of_adapters_of_experts_are_those_of_peft(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    saved("qwen3_moe", tmp_path / "base", **ROUTED)
    model = model_of(tmp_path / "base", lora=EXPERTS)
    at = where(tmp_path)
    stages = [stage.train() for stage in build(model, 2, at)]
    tensors = adapted(stages)
    (joined,) = model.join(tensors, stages[0].architecture, at, tmp_path / "joined")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(base, joined, is_trainable=True)
    (loss_of(stages, batch_of(*([line] for line in UNEVEN))) / 16).backward()
    their_loss(theirs, UNEVEN).backward()
    slopes = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in theirs.named_parameters()
        if ".lora_" in name
    }
    for stage in stages:
        for parameter in stage.parameters():
            parameter.data = parameter.data if parameter.grad is None else parameter.grad
    found = {name: t for stage in stages for name, t in stage.exported().items()}
    assert found.keys() == slopes.keys()
    for name, slope in slopes.items():
        torch.testing.assert_close(found[name], slope, rtol=1e-3, atol=1e-5)


def test_a_whole_model_is_exported_for_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    saved("mixtral", tmp_path / "base")
    model = model_of(tmp_path / "base")
    stages = build(model, 2, where(tmp_path))
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.parameters():
                parameter.mul_(0.9)
    tensors = {name: t for stage in stages for name, t in stage.exported().items()}
    (joined,) = model.join(tensors, stages[0].architecture, where(tmp_path), tmp_path / "joined")
    network = AutoModelForCausalLM.from_pretrained(joined).eval()
    expected = network(torch.tensor([UNEVEN[0]])).logits[0, -1].detach()
    found = next_words(stages, batch_of([UNEVEN[0]]))[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "weights"), each_once(MIXTURES, ["bfloat16", "int8", "nf4"], count=2)
)
def test_experts_are_kept_as_other_matrices_are(tmp_path: Path, kind: str, weights: str) -> None:
    """And compute as transformers does with their dense values."""
    network = folder_in(kind, tmp_path, torch.bfloat16)
    stages = build(model_of(tmp_path, lora=EXPERTS, weights=weights), 2, where(tmp_path))
    kept = {
        name: module
        for stage in stages
        for name, module in stage.network.named_modules()
        if isinstance(module, FrozenMatrix)
    }
    assert sum(".experts." in name for name in kept) == 4 * 4 * 3 and len(kept) == 4 * (4 + 4 * 3)
    assert {module.kind for module in kept.values()} == {weights}
    dense = [p for s in stages for n, p in s.named_parameters() if p.dim() > 1 and "lora" not in n]
    in_fp32 = [p for p in dense if p.dtype == torch.float32]
    assert all(p.shape == (4, 16) for p in in_fp32), "routers"

    values = dict(pair for stage in stages for pair in merged_weights(stage.network))
    save_file({n: t.contiguous() for n, t in values.items()}, tmp_path / "model.safetensors")
    dense_network = type(network).from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = dense_network(torch.tensor([UNEVEN[0]])).logits[0, -1].detach()
    found = next_words(stages, batch_of([UNEVEN[0]]))[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("llama", {"router_loss": 0.1}, r"model\.router_loss=0\.1: .* has no experts.*leave it"),
        ("llama", {"lora": EXPERTS}, r"model\.lora\.experts=true: this llama has no experts"),
        (
            "mixtral",
            {"lora": Lora(experts=True, dropout=0.1)},
            r"lora\.experts=true: .* no dropout.*lora\.dropout is 0\.1: set it to 0",
        ),
        (
            "qwen3_moe",
            {"lora": Lora(targets=["q_proj", "down_proj"])},
            r"lora\.targets: .* no down_proj; its matrices are k_proj, .*lora\.experts=true",
        ),
    ],
)
def test_a_wrong_setting_is_named(
    tmp_path: Path, kind: str, settings: dict[str, Any], said: str
) -> None:
    saved(kind, tmp_path)
    with pytest.raises(ConfigError, match=said):
        model_of(tmp_path, **settings).boundary(0, 2, 16)


def test_weights_of_an_expert_without_tokens_get_a_gradient_of_zeros(tmp_path: Path) -> None:
    """Ranks that share out a stage's parameters must all have the gradient of each."""
    saved("mixtral", tmp_path)
    (stage,) = build(model_of(tmp_path), 1, where(tmp_path))
    loss_of([stage], batch_of([words(2, 1)])).backward()
    slopes = [p.grad for n, p in stage.network.named_parameters() if ".experts." in n]
    assert all(slope is not None for slope in slopes)
    assert not all(slope.any() for slope in slopes if slope is not None)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_run_over_two_clouds_is_that_of_one_and_goes_on_from_its_checkpoint(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(kind, tmp_path / "base", vocab_size=400, max_position_embeddings=128, **ROUTED)
    given = [
        "+exp=lora_clm", "tracker=none", "model.own=null", f"model.checkpoint={tmp_path / 'base'}",
        "model.lora.targets=[q_proj]", "model.lora.experts=true", "model.weights=nf4",
        "training.precision=fp32", "training.max_steps=4", "training.batch_size=8",
        "training.optimizer.decay=constant", "training.optimizer.warmup_steps=1",
        "task.data.num_train=60", "task.data.num_dev=10", "task.data.num_test=10",
        "task.max_length=64",
        "training.checkpoint.every_steps=1", "task.tokenizer.vocab_size=400", "cluster/wan=free",
        f"cache_dir={tmp_path / 'cache'}",
    ]  # fmt: skip

    def made(name: str, *overrides: str) -> list[float]:
        config = configs.composed(*given, *overrides)
        in_threads(tmp_path / name, config, monkeypatch)
        return losses(tmp_path / name)

    assert made("two", "compression=none") == made("one", "compression=none", "cluster=local")
    whole = made("whole", "compression=int8")
    made("part", "compression=int8", "training.max_steps=2")
    assert made("part", "compression=int8") == whole
    assert weights(tmp_path / "part").keys() == weights(tmp_path / "whole").keys()
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "part")[name], tensor)


def test_adapters_of_experts_start_as_those_of_peft_do() -> None:
    """A is uniform within 1 / sqrt(inputs), B is zero."""
    adapters = ExpertAdapters(num_experts=8, shape=(6, 64), r=16, scale=2.0)
    torch.manual_seed(0)
    adapters.draw()
    assert adapters.lora_A.abs().max() <= 1 / 8
    assert float(adapters.lora_A.detach().std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.03)
    assert not adapters.lora_B.any()

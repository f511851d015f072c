"""A step of every kind of task on a far device: the host never waits for a value there, and loss
and gradients are those of the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests import causal_models, translation_models
from tests import understanding_models as understanding
from tests.causal_models import batch_of, folder_in, saved, words
from tests.far_device import FAR, HOST, FarDevice, held
from tests.nightly import first_daily
from xcloud.comm.channel import Boundary, Codec, Codecs, ReceiveChannel, SendChannel
from xcloud.comm.compression import ChannelId
from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.memory import NoMemory
from xcloud.comm.precision import BlockInt, Cast
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.model import Batch, Stage
from xcloud.models import frozen_weights
from xcloud.models.abnet import AbNet
from xcloud.models.backbone import OwnBackbone
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Lora
from xcloud.models.pretraining import MaskedLanguageModelling
from xcloud.models.transformer import Transformer
from xcloud.net.frame import Kind, MessageKey

PACKED = batch_of([words(9, 1)], [words(4, 2), words(5, 3)], [words(2, 4), words(1, 5)])
LENGTH = 32
TRANSFORMER = Transformer(
    hidden=16,
    num_encoder_layers=2,
    num_decoder_layers=1,
    num_heads=2,
    feed_forward=32,
    dropout=0.0,
)
QUICK = MaskedLanguageModelling(steps=2, batch_tokens=64, warmup_steps=1)
AB_NET = AbNet(
    OwnBackbone(24, 2, 2, 48, pretraining=QUICK),
    OwnBackbone(16, 2, 2, 32, pretraining=QUICK),
    adapter_size=8,
    cross_attention_heads=2,
    dropout=0.0,
)

Made = tuple[list[Stage], list[Boundary], Batch]


def cut(model: Any, stages: list[Stage], batch: Batch) -> Made:
    num_stages = len(stages)
    boundaries = [model.boundary(n, num_stages, LENGTH) for n in range(num_stages - 1)]
    return stages, boundaries, batch


def causal(folder: Path, kind: str = "llama", **settings: Any) -> Made:
    kept = settings.get("weights")
    if kept is None:
        saved(kind, folder)
    else:
        folder_in(kind, folder, dtype=torch.bfloat16)
    model = CausalLM(checkpoint=str(folder), **({"lora": Lora(r=2)} | settings))
    stages = causal_models.build(model, 3, causal_models.where(folder))
    return cut(model, stages, PACKED)


def preferences(folder: Path) -> Made:
    saved("qwen2", folder)
    model = CausalLM(checkpoint=str(folder), lora=Lora(r=2))
    at = causal_models.where(
        folder, document_loss=lambda nats_D, ids_B: nats_D.square().sum().float()
    )
    return cut(model, causal_models.build(model, 2, at), PACKED)


def question(folder: Path, kind: str, pooling: str = "first") -> Made:
    head = {"classes": understanding.CLASSES, "value": understanding.VALUE,
            "span": understanding.SPAN}[kind]  # fmt: skip
    model = understanding.model("span" if kind == "span" else "sample", pooling)
    stages = understanding.build(model, 3, understanding.where(folder), head=head)
    return cut(model, stages, understanding.question(5, kind=kind))


def translation(folder: Path, model: Any) -> Made:
    stages = translation_models.build(model, 3, translation_models.context(folder))
    sides = (translation_models.texts(6, seed=seed) for seed in (1, 2))
    return cut(model, stages, translation_models.batch_of(*sides))


NUM_DAILY = 5
CASES: dict[str, Callable[[Path], Made]] = {
    "adapters": causal,
    "nf4 weights": lambda folder: causal(folder, weights="nf4"),
    "preferences": preferences,
    "classes": lambda folder: question(folder, kind="classes"),
    "translation": lambda folder: translation(folder, model=TRANSFORMER),
    "a window": lambda folder: causal(folder, kind="mistral"),
    "a soft cap": lambda folder: causal(folder, kind="gemma2"),
    "gpt2": lambda folder: causal(folder, kind="gpt2"),
    "all weights": lambda folder: causal(folder, lora=None, vocabulary_chunk=16),
    "activations again": lambda folder: causal(folder, activation_checkpointing=True),
    "int8 weights": lambda folder: causal(folder, weights="int8"),
    "a value": lambda folder: question(folder, kind="value", pooling="mean"),
    "a span": lambda folder: question(folder, kind="span"),
    "AB-Net": lambda folder: translation(folder, model=AB_NET),
}
COMPRESSORS: dict[str, Compressor] = {
    "int8": BlockInt(8),
    "fp16": Cast("float16"),
    "bf16": Cast("bfloat16"),
    "off": Chain(),
}


class HostLink:
    """Both ends of a link whose messages lie on the host, as those of every link do."""

    def __init__(self) -> None:
        self._messages: deque[list[Tensor]] = deque()

    def send(self, key: MessageKey, parts: Sequence[Tensor], carries: Sequence[str]) -> None:
        self._messages.append([held(part).detach().clone() for part in parts])

    def recv(self, key: MessageKey, overdue_s: float) -> list[Tensor]:
        return self._messages.popleft()


class Way:
    """Both channels of one direction of a boundary."""

    def __init__(self, fields: Any, compressor: Compressor, device: torch.device) -> None:
        def new_codecs() -> Codecs:
            return Codecs([(None, Codec(compressor, NoMemory()))])

        link: Any = HostLink()
        identity = ChannelId(7, 0, "forward", 0, 1)
        self.sender = SendChannel(link, fields, new_codecs, StepClock(), identity)
        self.receiver = ReceiveChannel(
            link, fields, new_codecs, StepClock(), identity, device, 5.0, LENGTH
        )


def step(made: Made, compressor: Compressor, device: torch.device) -> list[Tensor]:
    """Return the loss and all gradients of one micro-batch."""
    stages, boundaries, batch = made
    place: AbstractContextManager[object] = nullcontext() if device == HOST else FarDevice()
    samples = {"ids": batch["ids"]}
    with place, sdpa_kernel(SDPBackend.MATH):
        for stage in stages:
            stage.to(device)
        received = None
        sends = []
        for stage, boundary in zip(stages[:-1], boundaries, strict=True):
            sent = stage(received, batch).send
            forth = Way(boundary.fields, compressor=compressor, device=device)
            forth.sender.send(MessageKey(Kind.ACTIVATION, 1), sent, samples)
            received = forth.receiver.recv(MessageKey(Kind.ACTIVATION, 1), samples)
            received["hidden" if "hidden" in received else "pooled"].requires_grad_()
            sends.append((sent, received))
        loss = stages[-1](received, batch).loss
        loss.backward()
        for (sent, received), boundary in zip(sends[::-1], boundaries[::-1], strict=True):
            (field,) = boundary.gradient_fields
            back = Way(boundary.gradient_fields, compressor=compressor, device=device)
            known = {n: value for n, value in received.items() if not value.is_floating_point()}
            slope = received[field.name].grad
            key = MessageKey(Kind.GRADIENT, 1)
            back.sender.send(key, {**known, field.name: slope}, samples)
            arrived = back.receiver.recv(key, samples, known)[field.name]
            if sent[field.name].requires_grad:
                sent[field.name].backward(arrived)
    gradients = [p.grad for stage in stages for p in stage.parameters() if p.grad is not None]
    return [held(tensor).detach() for tensor in (loss, *gradients)]


@pytest.fixture(autouse=True)
def far_device_only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch knows of no autocast there, and makes nothing there that is not brought."""
    pairs = frozen_weights.pairs_of_halves(HOST)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    monkeypatch.setattr(frozen_weights, "pairs_of_halves", lambda device: pairs.to(device))


@pytest.mark.parametrize("case", first_daily([*CASES], NUM_DAILY))
def test_the_host_waits_for_nothing_in_a_step(tmp_path: Path, case: str) -> None:
    expected = step(CASES[case](tmp_path / "host"), COMPRESSORS["off"], device=HOST)
    found = step(CASES[case](tmp_path / "far"), COMPRESSORS["off"], device=FAR)
    assert len(found) == len(expected) > 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert any(gradient.any() for gradient in expected[1:])


@pytest.mark.parametrize("name", first_daily([*COMPRESSORS], 2))
def test_the_host_waits_for_no_compressor(tmp_path: Path, name: str) -> None:
    expected = step(causal(tmp_path / "host"), COMPRESSORS[name], device=HOST)
    found = step(causal(tmp_path / "far"), COMPRESSORS[name], device=FAR)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_far_device_refuses_what_waits() -> None:
    with FarDevice():
        far = torch.arange(4.0).to(FAR)
        for wait in (
            lambda: float(far.sum()),
            lambda: far.tolist(),
            lambda: far.cpu(),
            lambda: far[far > 1],
            lambda: (far > 1).nonzero(),
            lambda: bool((far > 1).all()),
            lambda: far + torch.ones(4),
        ):
            with pytest.raises((AssertionError, RuntimeError)):
                wait()

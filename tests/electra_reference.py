"""Generators and a discriminator in turn, in one process: what a one-way job must come to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from xcloud.contracts.one_way import OneWayContext
from xcloud.models.backbone import SeededBackbone
from xcloud.models.electra.model import MultilingualElectra
from xcloud.models.electra.parts import (
    DiscriminatorRank,
    DiscriminatorSettings,
    Generator,
    GeneratorRank,
)
from xcloud.pipeline.exchange import FlatBuffer
from xcloud.pipeline.settings import Optimizer
from xcloud.tasks.multilingual_text import MultilingualText
from xcloud.tasks.text_sources import DemoText
from xcloud.tasks.tokenizer import TrainedTokenizer

FAST = Optimizer(4e-3, warmup_steps=20, decay="constant", weight_decay=0.01, clip_norm=1.0)


def feed_context(cache_dir: Path, **changes: Any) -> OneWayContext:
    settings: dict[str, Any] = {
        "seed": 1,
        "num_steps": 100,
        "device": torch.device("cpu"),
        "cache_dir": cache_dir,
        "barrier": lambda: None,
        "report": lambda line: None,
    }
    return OneWayContext(**(settings | changes))


def small_electra(**changes: Any) -> MultilingualElectra:
    """Spanish in one cloud, English in the other; mostly whole words, few and short texts."""
    network = SeededBackbone(64, 2, 2, 128, dropout=0.0)
    faster, slower = (replace(FAST, learning_rate=rate) for rate in (6e-3, 3e-3))
    generators = {
        language: Generator(
            [language], backbone=network, optimizer=faster, batch_size=16, precision="fp32"
        )
        for language in ("es", "en")
    }
    settings: dict[str, Any] = {
        "text": MultilingualText(DemoText(60), TrainedTokenizer(1000), max_length=10),
        "generators": generators,
        "discriminator": DiscriminatorSettings(network, slower, precision="fp32"),
    }
    return MultilingualElectra(**(settings | changes))


class Reference:
    """step(): a batch of each generator, one update of the discriminator from all of them."""

    def __init__(self, model: MultilingualElectra, context: OneWayContext) -> None:
        names = list(model.generators)
        model.check(names)
        self.producers: list[GeneratorRank] = [
            model.producer(replace(context, cloud=name)) for name in names
        ]
        self.consumer: DiscriminatorRank = model.consumer(context)
        modules = [producer.parameters_module for producer in self.producers]
        self._buffers = [None if m is None else FlatBuffer(m.parameters()) for m in modules]
        self._buffer = FlatBuffer(self.consumer.module.parameters())
        self.steps = 0

    def step(self) -> dict[str, float]:
        """Sums of the discriminator, and each generator's loss under its number."""
        self.steps += 1
        made = []
        for producer, buffer in zip(self.producers, self._buffers, strict=True):
            if buffer is not None:
                buffer.zero()
            made.append(producer.produce(self.steps))
            producer.update(self.steps)
        self._buffer.zero()
        sums = dict(self.consumer.consume([(i, fed.payload) for i, fed in enumerate(made)]))
        self.consumer.update(self.steps, sums["weight"])
        return sums | {str(i): fed.loss for i, fed in enumerate(made)}

"""What a finished run passes on between clouds is what an evaluation of the run has there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.codecs import ERRORS
from tests.pipelines import BORDER, ToyStage, in_threads, pipelines, samples, wired_job
from xcloud.base.errors import ConfigError
from xcloud.comm.channel import Message
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Selectable
from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.memory import NoMemory
from xcloud.comm.precision import BlockInt
from xcloud.contracts.model import Batch, StageOutput
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline import guard
from xcloud.pipeline.crossing import Crossing
from xcloud.pipeline.schedule import GPipe
from xcloud.security.defences import Defence, GaussianNoise, MaxNorm
from xcloud.security.policy import Visibility
from xcloud.use import TrainedRun

LAYOUT = ClusterLayout({"a": Cloud(), "b": Cloud()})
PIECES = [torch.arange(12)[i : i + 5] for i in (0, 5, 10)]
LAST_STEP = 9


class Noting(ToyStage):
    """A stage that notes what reaches it in an evaluation."""

    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        assert received is not None
        self.received = [*getattr(self, "received", []), dict(received)]
        return super().predict(received, batch)


def crossing(compressor: Compressor, defence: Defence | None, boundary: Any = BORDER) -> Crossing:
    compression = Compression(compressor, Chain(), NoMemory(), NoMemory())
    security = Visibility(defences=cast(Any, {} if defence is None else {"forward": defence}))
    job = wired_job(LAYOUT, {0: BORDER}, compression, GPipe(1), 100, 7, security=security)
    return Crossing(job, stage=0, boundary=boundary, last_step=LAST_STEP)


@pytest.mark.parametrize(
    ("compressor", "defence"),
    [
        *((compressor, None) for compressor, _ in ERRORS),
        (Chain(), GaussianNoise(clip=1.0, sigma=0.5)),
        (BlockInt(4, stochastic=True), GaussianNoise(clip=0.1, sigma=0.1, unit="absolute")),
        (BlockInt(8), MaxNorm()),
    ],
    ids=lambda one: getattr(one, "label", ""),
)
def test_what_arrives_is_what_an_evaluation_of_the_run_has(
    compressor: Compressor, defence: Defence | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, message by message; noise is drawn alike here, where a run keeps it secret."""
    chance = lambda: np.random.Generator(np.random.PCG64(3))  # noqa: E731
    monkeypatch.setattr(guard, "np", SimpleNamespace(random=SimpleNamespace(default_rng=chance)))
    stages = {0: ToyStage(0, 2), 1: Noting(1, 2)}
    defences = {} if defence is None else {"forward": defence}
    ranks = pipelines(LAYOUT, compressor, stages=stages, defences=defences)
    in_threads([lambda r=rank: r.predict(PIECES, samples, LAST_STEP) for rank in ranks])

    here = crossing(compressor, defence)
    sent = []
    for piece, expected in zip(PIECES, stages[1].received, strict=True):
        batch = samples(piece)
        with torch.no_grad():
            message = stages[0].eval()(None, batch).send
        found = here.arrived(message, batch)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor)
        sent.append(torch.equal(found["hidden"], message["hidden"]))
    assert all(sent) == (defence is None and compressor.label == "none")


def test_a_choice_that_no_setting_says_is_refused() -> None:
    compression = Selectable({"int8": Compression(BlockInt(8), Chain(), NoMemory(), NoMemory())})
    job = wired_job(LAYOUT, {0: BORDER}, compression, GPipe(1), 100)
    with pytest.raises(ConfigError, match="leave the compressors out"):
        Crossing(job, stage=0, boundary=BORDER, last_step=LAST_STEP)


class Run(TrainedRun):
    """A run of toy stages without a folder."""

    def __init__(self, layout: ClusterLayout, precision: str, compressed: bool = True) -> None:
        compression = Compression(BlockInt(4), Chain(), NoMemory(), NoMemory())
        boundaries = dict.fromkeys(range(layout.num_stages - 1), BORDER)
        noise = Visibility(defences=cast(Any, {"forward": GaussianNoise(clip=1.0, sigma=0.5)}))
        self.experiment = wired_job(
            layout, boundaries, compression, GPipe(1), 100, security=noise,
            training=SimpleNamespace(precision=precision, max_steps=LAST_STEP),
            task=SimpleNamespace(max_length=5),
            model=SimpleNamespace(boundary=lambda *which, **how: BORDER),
        )  # fmt: skip
        self._compressed = compressed
        self.stages = [Plain(n, layout.num_stages).eval() for n in range(layout.num_stages)]


class Plain(ToyStage):
    """Sends float32, whatever it computes in."""

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        found = super().forward(received, batch)
        if found.send is not None:
            found.send["hidden"] = found.send["hidden"].float()
        return found


def dtypes(run: Run) -> list[torch.dtype]:
    """Return the dtype of each stage's product."""
    seen: list[torch.dtype] = []
    for stage in run.stages:
        stage.layer.register_forward_hook(lambda layer, given, made: seen.append(made.dtype))
    run.ask_last(samples(PIECES[0]), lambda last, *given: last(*given))
    return seen


def test_stages_compute_in_the_precision_of_the_run_and_compressors_do_not() -> None:
    assert dtypes(Run(LAYOUT, "bf16")) == [torch.bfloat16] * 2
    assert dtypes(Run(LAYOUT, "fp32")) == [torch.float32] * 2
    run = Run(LAYOUT, "bf16")
    computing: list[bool] = []

    def carry(stage: int, message: Message, batch: Batch) -> Message:
        computing.append(torch.is_autocast_enabled("cpu"))
        return message

    run.carry = carry  # type: ignore[method-assign]
    run.ask_last(samples(PIECES[0]), lambda last, *given: last(*given))
    assert computing == [False]


@pytest.mark.parametrize(
    ("clouds", "compressed", "label", "changes"),
    [
        ({"a": Cloud(), "b": Cloud()}, True, "int4+none, gaussian(0.5)", True),
        ({"a": Cloud(), "b": Cloud()}, False, "none", False),
        ({"a": Cloud(1, [0, 1])}, True, "none", False),
    ],
)
def test_only_what_crosses_clouds_is_changed_and_the_label_says_by_what(
    clouds: dict[str, Cloud], compressed: bool, label: str, changes: bool
) -> None:
    run = Run(ClusterLayout(clouds, "free"), "fp32", compressed)
    batch = samples(PIECES[0])
    sent = run.stages[0](None, batch).send
    arrived = run.carry(0, sent, batch)
    assert torch.equal(arrived["counts"], sent["counts"])
    assert torch.equal(arrived["hidden"], sent["hidden"]) != changes
    assert run.compressor == label

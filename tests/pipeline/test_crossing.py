"""What a finished run passes on between clouds is what an evaluation of the run has there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.codecs import ERRORS, ONE_OF_EACH
from tests.nightly import NIGHTLY
from tests.pipelines import (
    BORDER,
    ToyStage,
    in_threads,
    pipeline,
    samples,
    wired,
    wired_job,
)
from xcloud.base.errors import ConfigError, DataError
from xcloud.comm.channel import Codec, Codecs, Message
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Selectable
from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.memory import DeltaCache, NoMemory, TokenMeans
from xcloud.comm.precision import BlockInt
from xcloud.comm.transform import Transform
from xcloud.contracts.model import Batch, StageOutput
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline import guard
from xcloud.pipeline.crossing import Crossing
from xcloud.pipeline.schedule import GPipe
from xcloud.rank.export import export_stage
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


def crossing(
    compressor: Compressor, defence: Defence | None, learned: Any = None, boundary: Any = BORDER
) -> Crossing:
    compression = Compression(compressor, Chain(), NoMemory(), NoMemory())
    security = Visibility(defences=cast(Any, {} if defence is None else {"forward": defence}))
    job = wired_job(LAYOUT, {0: BORDER}, compression, GPipe(1), 100, 7, security=security)
    return Crossing(job, 0, boundary=boundary, last_step=LAST_STEP, learned=learned)


@pytest.mark.parametrize(
    ("compressor", "defence"),
    [
        *(
            pytest.param(compressor, None, marks=() if compressor in ONE_OF_EACH else NIGHTLY)
            for compressor, _ in ERRORS
        ),
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
    compression = Compression(compressor, Chain(), NoMemory(), NoMemory())
    joined = wired(LAYOUT, {0: BORDER}, compression, defences=defences)
    ranks = [pipeline(one, LAYOUT, stages) for one in joined]
    batches = {number: samples(piece) for number, piece in enumerate(PIECES)}
    for step in (1, 2, 3) if defence is None else ():  # compressors learn, and noise is drawn
        in_threads([lambda r=r, n=step: r.step(GPipe(3), batches, n, weight=12.0) for r in ranks])
    in_threads([lambda r=rank: r.predict(PIECES, samples, LAST_STEP) for rank in ranks])

    here = crossing(compressor, defence, learned=joined[0].wiring.boundaries.learned(0))
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


@pytest.mark.parametrize("defence", [None, GaussianNoise(clip=1.0, sigma=0.5)], ids=str)
def test_a_sender_of_activations_learns_from_gradients_in_training_alone(
    defence: Defence | None,
) -> None:
    defences = {} if defence is None else {"forward": defence}
    compression = Compression(Transform(0.5), Chain(), NoMemory(), NoMemory())
    joined = wired(LAYOUT, {0: BORDER}, compression, defences=defences)
    ranks = [pipeline(one, LAYOUT, {0: ToyStage(0, 2), 1: ToyStage(1, 2)}) for one in joined]
    batches = {number: samples(piece) for number, piece in enumerate(PIECES)}
    found = []
    for _ in range(2):
        in_threads([lambda r=rank: r.predict(PIECES, samples, LAST_STEP) for rank in ranks])
        learned = joined[0].wiring.boundaries.learned(0)
        found.append([name for name in learned if name.endswith("gradients")])
        in_threads([lambda r=rank: r.step(GPipe(3), batches, 1, weight=12.0) for rank in ranks])
    assert found[0] == [] and len(found[1]) == 1


def test_what_is_kept_of_training_samples_is_not_learned_and_means_of_tokens_are() -> None:
    for memory, kept in ((TokenMeans(), {"memory"}), (DeltaCache(), set()), (NoMemory(), set())):
        codecs = Codecs([(None, Codec(Transform(), memory))])
        (parts,) = codecs.learned().values()
        assert {name for name, part in parts.items() if part is not None} - {"compressor"} == kept


def test_a_choice_that_no_setting_says_is_refused() -> None:
    compression = Selectable({"int8": Compression(BlockInt(8), Chain(), NoMemory(), NoMemory())})
    job = wired_job(LAYOUT, {0: BORDER}, compression, GPipe(1), 100)
    with pytest.raises(ConfigError, match="leave the compressors out"):
        Crossing(job, stage=0, boundary=BORDER, last_step=LAST_STEP)


class Run(TrainedRun):
    """A run of toy stages without a folder."""

    def __init__(
        self,
        layout: ClusterLayout,
        precision: str,
        compressed: bool = True,
        folder: Path = Path("nowhere"),
        compressor: Compressor = BlockInt(4),  # noqa: B008
        noise: bool = True,
    ) -> None:
        self.folder = folder / "model"
        compression = Compression(compressor, Chain(), NoMemory(), NoMemory())
        boundaries = dict.fromkeys(range(layout.num_stages - 1), BORDER)
        drawn = {"forward": GaussianNoise(clip=1.0, sigma=0.5)} if noise else {}
        security = Visibility(defences=cast(Any, drawn))
        self.experiment = wired_job(
            layout, boundaries, compression, GPipe(1), 100, security=security,
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


def test_what_compressors_have_learned_lies_beside_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = {0: ToyStage(0, 2), 1: ToyStage(1, 2)}
    joined = wired(LAYOUT, {0: BORDER}, Compression(Transform(), Chain(), NoMemory(), NoMemory()))
    ranks = [pipeline(one, LAYOUT, stages) for one in joined]
    batches = {number: samples(piece) for number, piece in enumerate(PIECES)}
    for step in (1, 2, 3):
        in_threads([lambda r=r, n=step: r.step(GPipe(3), batches, n, weight=12.0) for r in ranks])
    learned = joined[0].wiring.boundaries.learned(0)
    # Who receives, and the last stage, write nothing.
    assert joined[1].wiring.boundaries.learned(0) is joined[1].wiring.boundaries.learned(1) is None
    stage: Any = SimpleNamespace(architecture={})
    data: Any = SimpleNamespace(save_tokenizers=lambda folder: None)
    export_stage(tmp_path, 0, stage, {}, learned, data)
    batch = samples(PIECES[0])
    sent = stages[0].eval()(None, batch).send
    expected = crossing(Transform(), None, learned=learned).arrived(sent, batch)["hidden"]

    run = Run(LAYOUT, "fp32", folder=tmp_path, compressor=Transform(), noise=False)
    assert torch.equal(run.carry(0, sent, batch)["hidden"], expected)
    assert not capsys.readouterr().err
    other = Run(LAYOUT, "fp32", folder=tmp_path)
    with pytest.raises(DataError, match=r"boundary0\.safetensors: .*saved with other settings"):
        other.carry(0, sent, batch)
    damaged = {name: value for name, value in learned.items() if "mean_square" not in name}
    export_stage(tmp_path, 0, stage, {}, damaged, data)
    run = Run(LAYOUT, "fp32", folder=tmp_path, compressor=Transform(), noise=False)
    with pytest.raises(DataError, match=r"boundary0\.safetensors: .*mean_square"):
        run.carry(0, sent, batch)
    narrow = {
        name: value[..., :-1].contiguous()
        if isinstance(value, torch.Tensor) and value.dim()
        else value
        for name, value in learned.items()
    }
    export_stage(tmp_path, 0, stage, {}, narrow, data)
    run = Run(LAYOUT, "fp32", folder=tmp_path, compressor=Transform(), noise=False)
    with pytest.raises(DataError, match=r"boundary0\.safetensors does not fit the messages"):
        run.carry(0, sent, batch)
    (tmp_path / "model" / "boundary0.safetensors").unlink()
    run = Run(LAYOUT, "fp32", folder=tmp_path, compressor=Transform(), noise=False)
    assert not torch.equal(run.carry(0, sent, batch)["hidden"], expected)
    assert "boundary0.safetensors is missing" in capsys.readouterr().err


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

"""The compressors as a communication hook of torch's DistributedDataParallel."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.replicas import same_bits
from tests.runs import command
from xcloud.comm.compression_plans import PerTensor
from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.precision import BlockInt, Cast
from xcloud.comm.sparsify import RandomK, TopK
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.features.replicas.gradient_averaging import CompressedAveraging, compressed_averaging
from xcloud.features.replicas.merging import Median


class Ranks:
    """torch.distributed for ranks of one process: a gather is over when all have called it."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self._waiting = num_ranks, list[tuple[list[Tensor], Tensor, Any]]()

    def get_rank(self, group: Any) -> int:
        return int(group.rank)

    def get_world_size(self, group: Any) -> int:
        return self.num_ranks

    def all_gather(self, found: list[Tensor], own: Tensor, group: Any, async_op: bool) -> Any:
        future: torch.futures.Future[None] = torch.futures.Future()
        self._waiting.append((found, own, future))
        if len(self._waiting) == self.num_ranks:
            for everybodys, _, _ in self._waiting:
                for target, (_, message, _) in zip(everybodys, self._waiting, strict=True):
                    target.copy_(message)
            for _, _, done in self._waiting:
                done.set_result(None)
            self._waiting = []
        return SimpleNamespace(get_future=lambda: future)


@dataclass
class Bucket:
    """As a GradBucket."""

    own: list[nn.Parameter]
    flat: Tensor

    def parameters(self) -> list[nn.Parameter]:
        return self.own

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        pieces = self.flat.split([p.numel() for p in self.own])
        return [piece.view_as(p) for piece, p in zip(pieces, self.own, strict=True)]


SHAPES = [(20, 10), (20,), (5, 20), (5,)]


class Job:
    """`num_ranks` ranks, each with its parameters and hook."""

    def __init__(self, num_ranks: int, *args: Any, **kwargs: Any) -> None:
        self.parameters = [
            [nn.Parameter(torch.zeros(s)) for s in SHAPES] for _ in range(num_ranks)
        ]
        self.states = [
            CompressedAveraging(
                nn.ParameterList(own), *args, process_group=SimpleNamespace(rank=r), **kwargs
            )
            for r, own in enumerate(self.parameters)
        ]

    def step(
        self,
        step: int,
        buckets: list[list[int]],
        gradient: Callable[[int, int, int], Tensor] = lambda step, rank, n: gradient(
            step, rank, n
        ),
    ) -> list[list[Tensor]]:
        """By rank, the merged gradients of all parameters; buckets: numbers of parameters."""
        found: list[dict[int, Tensor]] = [{} for _ in self.states]
        for numbers in buckets:
            futures = []
            for rank, state in enumerate(self.states):
                flat = torch.cat([gradient(step, rank, n).flatten() for n in numbers])
                bucket = Bucket([self.parameters[rank][n] for n in numbers], flat)
                futures.append((bucket, compressed_averaging(state, bucket)))  # type: ignore[arg-type]
            for rank, (bucket, future) in enumerate(futures):
                assert future.wait() is bucket.flat
                found[rank] |= zip(numbers, bucket.gradients(), strict=True)
        return [[own[n] for n in sorted(own)] for own in found]


def gradient(step: int, rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    return torch.randn(SHAPES[number], generator=generator)


FIRST, REBUILT = [[3, 2], [1, 0]], [[2], [3, 1, 0]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xcloud.features.replicas.gradient_averaging.dist", Ranks(3))


@pytest.mark.usefixtures("ranks")
def test_without_compression_it_is_the_mean_and_equal_in_all_ranks() -> None:
    found = Job(3, Chain()).step(1, FIRST)
    mean = [torch.stack([gradient(1, r, n) for r in range(3)]).mean(0) for n in range(4)]

    assert same_bits(found)
    for merged, expected in zip(found[0], mean, strict=True):
        torch.testing.assert_close(merged, expected)
    robust = Job(3, Chain(), merge=Median()).step(1, FIRST)
    medians = [torch.stack([gradient(1, r, n) for r in range(3)]).median(0) for n in range(4)]
    assert same_bits([robust[0], [m.values for m in medians]])


def test_a_mean_holds_one_decoded_message_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 ranks all of them would be 64 gradients."""
    monkeypatch.setattr("xcloud.features.replicas.gradient_averaging.dist", Ranks(64))
    alive, most = weakref.WeakSet[Tensor](), list[int]()

    def decode(codec: TensorCodec, parts: Any, plain: Any = TensorCodec.decode) -> list[Tensor]:
        found = [tensor.clone() for tensor in plain(codec, parts)]
        for tensor in found:
            alive.add(tensor)
        most.append(len(alive))
        return found

    monkeypatch.setattr(TensorCodec, "decode", decode)
    found = Job(64, Chain()).step(1, [[3, 2, 1, 0]])
    mean = [torch.stack([gradient(1, r, n) for r in range(64)]).mean(0) for n in range(4)]

    assert len(most) == 64 * 64 * len(SHAPES) and max(most) <= 2 * len(SHAPES)
    for merged, expected in zip(found[0], mean, strict=True):
        torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("ranks")
def test_what_is_kept_follows_the_parameters_into_other_buckets_and_over_a_restart() -> None:
    compressor = Chain(randomk=RandomK(0.3), int4=BlockInt(4, stochastic=True))
    one, other, restarted = (Job(3, compressor) for _ in range(3))
    for step in (1, 2, 3):
        expected = one.step(step, FIRST)
        assert same_bits(expected + other.step(step, FIRST if step == 1 else REBUILT))
    for job, state in zip(restarted.states, other.states, strict=True):
        job.load_state_dict(state.state_dict())
        assert job.state_dict().keys() == state.state_dict().keys()
    for step in (4, 5):
        assert same_bits(
            one.step(step, FIRST)
            + other.step(step, REBUILT)
            + restarted.step(step, FIRST if step == 4 else REBUILT)
        )
    with pytest.raises(ValueError, match="residual missing"):
        restarted.states[0].load_state_dict({})


@pytest.mark.usefixtures("ranks")
def test_gradients_are_chosen_for_by_shape_or_by_name() -> None:
    by_shape = PerTensor(TopK(0.1), vectors=Chain())
    found = Job(3, by_shape).step(1, FIRST)
    assert same_bits(found) and int((found[0][0] != 0).sum()) <= 60 and found[0][1].all()

    by_name = PerTensor(Chain(), names={"^2": BlockInt(1)})
    assert len(Job(3, by_name).step(1, FIRST)[0][2].abs().unique()) < 30


@pytest.mark.usefixtures("ranks")
def test_bytes_are_those_of_the_messages() -> None:
    job = Job(3, Cast("bfloat16"))
    job.step(1, [[0], [2]])

    assert {state.raw_bytes for state in job.states} == {4 * 300}
    assert {state.num_bytes for state in job.states} == {2 * 300}


LOSSY = [TopK(0.1), Chain(topk=TopK(0.2), int4=BlockInt(4)), BlockInt(1, block=1024)]


class Scaler:
    """As torch's GradScaler, of which the hook asks for the scale alone."""

    scale = 1024.0

    def get_scale(self) -> float:
        return self.scale


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("compressor", LOSSY, ids=repr)
def test_a_step_that_is_skipped_leaves_nothing_behind_in_any_rank_or_bucket(
    compressor: Compressor,
) -> None:
    """One bucket of one rank is not finite; of the others healthy ranks have sent something."""

    def bad(step: int, rank: int, number: int) -> Tensor:
        scale = math.inf if (step, rank, number) == (3, 1, 0) else 1e20 if step == 3 else 1.0
        return gradient(step, rank, number) * scale

    job, undisturbed = Job(3, compressor), Job(3, compressor)
    for step in (1, 2, 3, 4, 5):
        found = job.step(step, REBUILT, bad)
        if step != 3:
            expected = undisturbed.step(step, REBUILT)
            assert same_bits([*found, *expected])


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("compressor", LOSSY, ids=repr)
def test_what_is_kept_follows_the_scale_of_the_losses(compressor: Compressor) -> None:
    """Gradients divided by the scale are those of a run without one; powers of two round alike."""
    scaler = Scaler()
    job, plain = Job(3, compressor, scaler=scaler), Job(3, compressor)
    for step, scale in ((1, 1024.0), (2, 512.0), (3, 512.0), (4, 4096.0)):
        scaler.scale = scale
        scaled = job.step(step, FIRST, lambda *which, s=scale: gradient(*which) * s)
        expected = plain.step(step, FIRST)
        assert same_bits([*([t / scale for t in own] for own in scaled), *expected])
        if step == 2:  # a restart in between
            states = [state.state_dict() for state in job.states]
            job = Job(3, compressor, scaler=scaler)
            for state, saved in zip(job.states, states, strict=True):
                state.load_state_dict(saved)


@pytest.mark.usefixtures("ranks")
def test_a_loop_may_say_that_it_left_gradients_out() -> None:
    job, undisturbed = Job(3, TopK(0.1)), Job(3, TopK(0.1))
    for step in (1, 2, 3):
        found = job.step(step, FIRST)
        if step == 2:
            for state in job.states:
                state.settle(was_used=False)
        else:
            assert same_bits([*found, *undisturbed.step(step, FIRST)])


@pytest.mark.nightly
@pytest.mark.slow
def test_two_real_ranks_learn_stay_equal_and_send_little(tmp_path: Path) -> None:
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    words = ("-m", "tests.ddp_rank")
    processes = [
        command(*words, str(rank), str(tmp_path / "store"), log=log)
        for rank, log in enumerate(logs)
    ]
    assert [process.wait(120) for process in processes] == [0, 0], [p.read_text() for p in logs]
    first, second = (json.loads(log.read_text().splitlines()[-1]) for log in logs)

    assert first["bits"] == second["bits"]
    for losses in (first["losses"], second["losses"]):
        assert sum(losses[-5:]) < 0.3 * sum(losses[:5])
    assert first["num_bytes"] < 0.07 * first["raw_bytes"]
    assert first["raw_bytes"] == 60 * 4 * len(first["bits"])
    assert first["residual"] == 6

"""Noise shaping: sums over rows of a gradient keep what single rows lose in its code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.channels import IDENTITY, InProcessLink
from xcloud.comm.channel import BoundaryField, Codec, Codecs, Message, ReceiveChannel, SendChannel
from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.memory import ErrorFeedback, NoMemory
from xcloud.comm.noise_shaping import NoiseShaping
from xcloud.comm.sparsify import TopRows
from xcloud.comm.step_clock import StepClock
from xcloud.comm.transform import Transform
from xcloud.net.frame import Kind, MessageKey, TensorSpec
from xcloud.pipeline.guard import Guard
from xcloud.security.defences import MaxNorm

H = 16
R = 400


def drawn(number: int, num_rows: int = R) -> tuple[Tensor, Tensor]:
    """A gradient and its activations: large noise, and a little that depends on the activations in
    the same way in every message."""
    generator = torch.Generator().manual_seed(number)
    activations = torch.randn(num_rows, H, generator=generator)
    activations = 1.0 + activations * torch.linspace(0.2, 30.0, H)
    weights = torch.randn(H, H, generator=torch.Generator().manual_seed(99))
    noise = torch.randn(num_rows, H, generator=generator) * torch.arange(1, H + 1) ** -1.5
    return noise + 0.002 * activations @ weights, activations


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    codes = rows.round()
    return codes, codes


def sums(activations: Tensor, gradient: Tensor) -> Tensor:
    """What a weight and a bias get."""
    return torch.cat([activations, torch.ones(len(activations), 1)], 1).T @ gradient


def error_of_sums(activations: Tensor, gradient: Tensor, seen: Tensor) -> float:
    true = sums(activations, gradient)
    return float((true - sums(activations, seen)).norm() / true.norm())


def test_weights_lose_little_of_what_single_rows_lose() -> None:
    gradient, activations = drawn(1)
    codes, _ = NoiseShaping().shaped(gradient, activations, rounded, seed=3)
    plain = gradient.round()
    assert error_of_sums(activations, gradient, plain) > 0.5
    assert error_of_sums(activations, gradient, codes) < 0.2
    # Rows themselves are not much worse.
    assert (gradient - codes).norm() < 1.5 * (gradient - plain).norm()


def test_what_a_message_still_owes_comes_with_later_ones() -> None:
    """Eight rows cannot pay for seventeen sums, and all their values round to zero."""
    shaping, meant, came = NoiseShaping(), torch.zeros(H + 1, H), torch.zeros(H + 1, H)
    for number in range(120):
        gradient, activations = drawn(number, num_rows=8)
        gradient /= 8
        assert not gradient.round().any()
        codes, shaping.owed_FH = shaping.shaped(gradient, activations, rounded, seed=number)
        meant += sums(activations, gradient)
        came += sums(activations, codes)
    assert (meant - came).norm() < 0.5 * meant.norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300, 0.0, 1e-300])
def test_activations_of_any_size_shape_a_gradient(value: float) -> None:
    gradient, activations = drawn(1)
    activations = activations.double()
    activations[:, 3] = value
    activations[5] = value
    codes, owed_FH = NoiseShaping().shaped(gradient, activations, rounded, seed=3)
    assert codes.isfinite().all() and owed_FH.isfinite().all()


@pytest.mark.parametrize("num_rows", [1, 2, 23, 25])
def test_few_rows_come_back_in_their_order(num_rows: int) -> None:
    gradient, activations = drawn(1, num_rows)
    codes, _ = NoiseShaping().shaped(
        1000 * gradient, activations, lambda rows: (rows, rows), seed=num_rows
    )
    assert torch.allclose(codes, 1000 * gradient)


def test_a_transform_of_gradients_keeps_the_sums_at_a_step_that_loses_them() -> None:
    errors = {}
    for shapes in (False, True):
        sender, receiver = Transform(3.0), Transform(3.0)
        for number in range(6):
            gradient, activations = drawn(number)
            if shapes:
                parts = sender.compress_gradient(gradient, activations)
            else:
                parts = sender.compress(gradient)
            seen = receiver.decompress(parts, TensorSpec.of(gradient))
        assert sender.basis is not None
        errors[shapes] = error_of_sums(activations, gradient, seen)
    assert errors[True] < 0.3 * errors[False]


def test_a_transform_of_gradients_goes_on_to_the_bit() -> None:
    going, resumed = Transform(2.0), Transform(2.0)
    for number in range(6):
        gradient, activations = drawn(number)
        first = going.compress_gradient(gradient, activations)
        second = resumed.compress_gradient(gradient, activations)
        assert torch.equal(first[0], second[0]), number
        resumed = Transform(2.0)
        resumed.load_state_dict(going.state_dict())
    assert "shaping.owed" in going.state_dict()
    resumed.load_state_dict(Transform(2.0).state_dict())
    assert "shaping.owed" not in resumed.state_dict()


class Noting(Compressor):
    """Notes what came beside a gradient."""

    family = "precision"
    feedback = "needless"
    label = "noting"

    def __init__(self) -> None:
        self.came: list[Tensor | None] = []

    def __deepcopy__(self, memo: object) -> Noting:
        return self

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (spec,)

    def compress(self, tensor: Tensor) -> tuple[Tensor, ...]:
        self.came.append(None)
        return (tensor,)

    def compress_gradient(self, gradient: Tensor, activations: Tensor) -> tuple[Tensor, ...]:
        assert not activations.requires_grad
        self.came.append(activations)
        return (gradient,)

    def decompress(self, parts: tuple[Tensor, ...], spec: TensorSpec) -> Tensor:
        return parts[0]


FIELDS = (BoundaryField("hidden", (H,), torch.float32, "counted"),)


@pytest.mark.parametrize(
    ("of", "memory", "arrives"),
    [
        (lambda noting: noting, NoMemory(), True),
        (lambda noting: noting, ErrorFeedback(), True),
        (lambda noting: Chain(noting=noting), NoMemory(), True),
        # Half of the rows are no rows of these activations.
        (lambda noting: Chain(rows=TopRows(0.5), noting=noting), NoMemory(), False),
    ],
)
@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_compressor_of_a_gradient_gets_what_it_is_the_gradient_of(
    of: object, memory: object, arrives: bool, is_guarded: bool
) -> None:
    noting, link = Noting(), InProcessLink()

    def codecs() -> Codecs:
        return Codecs([(None, Codec(of(noting), memory))])  # type: ignore[operator,arg-type]

    own = (FIELDS, codecs, StepClock(), IDENTITY)
    channel = SendChannel(link, *own)  # type: ignore[arg-type]
    receiver = ReceiveChannel(link, *own, torch.device("cpu"), 5.0, 40)  # type: ignore[arg-type]
    sender = Guard(channel, MaxNorm()) if is_guarded else channel
    gradient, activations = drawn(1, num_rows=6)
    activations.requires_grad_()
    known: Message = {"counts": torch.tensor([4, 2]), "hidden": activations}
    key, samples = MessageKey(Kind.GRADIENT, 1), {"ids": torch.arange(2)}
    sender.send(key, {"hidden": gradient}, samples, known)
    receiver.recv(key, samples, {"counts": known["counts"]})
    [came] = noting.came
    if arrives:
        assert came is not None and torch.equal(came, activations)
    else:
        assert came is None

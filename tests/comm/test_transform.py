"""Transform coding, and the entropy code below it."""

import copy
import math
import struct

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.channels import IDENTITY, InProcessLink
from tests.codecs import admitted, relative_error
from xcloud.base.errors import ConfigError, FrameError
from xcloud.comm import bit_planes
from xcloud.comm.channel import BoundaryField, Codec, Codecs, ReceiveChannel, SendChannel
from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.memory import NoMemory
from xcloud.comm.precision import BlockInt
from xcloud.comm.step_clock import StepClock
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.comm.transform import MAX_FEATURES, Transform
from xcloud.net.frame import Kind, MessageKey, TensorSpec
from xcloud.simulator.codec_timer import time_codec

H = 48


def rows(num: int, seed: int = 0, rotation: int = 0, num_features: int = H) -> Tensor:
    """Rows whose components are as unequal as those of a model, around a mean."""
    generator = torch.Generator().manual_seed(rotation)
    basis = torch.linalg.qr(torch.randn(num_features, num_features, generator=generator)).Q
    generator.manual_seed(100 + seed)
    sizes = torch.arange(1, num_features + 1) ** -0.7
    drawn = torch.randn(num, num_features, generator=generator)
    return (drawn * sizes) @ basis.T + torch.arange(num_features) / num_features


def crossed(sender: Transform, receiver: Transform, tensor: Tensor) -> tuple[Tensor, int]:
    """What arrives, and its bytes."""
    parts = sender.compress(tensor)
    assert admitted(sender, TensorSpec.of(tensor), parts)
    return receiver.decompress(parts, spec=TensorSpec.of(tensor)), parts[0].nbytes


@pytest.mark.parametrize("scale", [0.0, 0.05, 0.4, 2.0, 300.0])
@pytest.mark.parametrize(
    ("num_rows", "edges"),
    [(0, [0, 5]), (1, [0, 1]), (1, [0, 3000]), (70, [0, 1, 9, 9, 40]), (3, [0, 2, 4])],
)
def test_whole_numbers_come_back_and_nothing_is_left_over(
    scale: float, num_rows: int, edges: list[int]
) -> None:
    draw = np.random.default_rng(3)
    sizes = scale * np.linspace(2.0, 0.0, edges[-1])
    codes = np.round(draw.standard_t(3, (num_rows, edges[-1])) * sizes).astype(np.int32)
    coded = bit_planes.encode(codes, edges)
    if coded is None:
        assert scale == 300.0  # some 14 planes of every value: rather in larger steps
        return
    assert np.array_equal(bit_planes.decode(coded, num_rows, edges), codes)
    for wrong in (coded[:-1], np.append(coded, np.uint8(0)), coded[:3]):
        with pytest.raises(FrameError):
            bit_planes.decode(wrong, num_rows, edges)


@pytest.mark.parametrize(("share", "most"), [(0.002, 1.2), (0.02, 1.04), (0.2, 1.05), (0.5, 1.05)])
def test_places_cost_little_more_than_their_entropy(share: float, most: float) -> None:
    draw = np.random.default_rng(1)
    codes = (draw.random((2000, 64)) < share).astype(np.int32)
    codes *= draw.choice([-1, 1], codes.shape)
    coded = bit_planes.encode(codes, [0, 64])
    assert coded is not None
    share = float((codes != 0).mean())
    entropy = -share * math.log2(share) - (1 - share) * math.log2(1 - share) + share  # and signs
    assert 8 * len(coded) / codes.size < most * entropy


def test_rows_without_a_value_cost_a_bit_each_at_most() -> None:
    codes = np.zeros((8000, 64), dtype=np.int32)
    codes[::100] = np.random.default_rng(1).integers(-1, 2, (80, 64))
    coded = bit_planes.encode(codes, [0, 64])
    assert coded is not None and len(coded) < 80 * 64 * 1.7 / 8 + 100


def test_numbers_beyond_24_bits_and_more_codes_than_values_are_refused() -> None:
    codes = np.full((2, 3), 1 << 23, dtype=np.int32)
    coded = bit_planes.encode(codes, [0, 3])
    assert coded is not None and np.array_equal(bit_planes.decode(coded, 2, [0, 3]), codes)
    many = np.full(4000, 255, dtype=np.uint8)  # 32,000 numbers of no length
    head = np.frombuffer(np.array([len(many)], dtype="<u4").tobytes(), dtype=np.uint8)
    with pytest.raises(FrameError, match="at most"):
        bit_planes.decode(np.concatenate([head, many]), 2, [0, 3])


def test_a_basis_comes_once_there_are_rows_enough_and_saves_bytes_at_equal_error() -> None:
    sender, receiver = Transform(1.6), Transform(1.6)
    sizes, errors = [], []
    for number in range(10):
        tensor = rows(80, seed=number)
        seen, num_bytes = crossed(sender, receiver, tensor)
        sizes.append(num_bytes)
        mean = torch.arange(H) / H
        errors.append(relative_error(tensor - mean, seen - mean))
    first = 8 * H // 80  # the fifth message has 400 rows before it and in it
    assert sizes[first] > sizes[0] > 1.5 * sizes[-1]
    assert max(sizes[first + 1 :]) < 1.1 * min(sizes[first + 1 :])
    assert max(errors) < 0.55 and errors[-1] < 1.3 * errors[0]


def test_fewer_bytes_than_whole_numbers_of_a_scale_each_at_equal_error() -> None:
    """The reason for all of it: BlockInt(4) of all features."""
    sender, receiver = Transform(0.25), Transform(0.25)
    for number in range(8):
        tensor = rows(80, seed=number)
        seen, num_bytes = crossed(sender, receiver, tensor)
    plain = BlockInt(4)
    parts = plain.compress(tensor)
    error = relative_error(tensor, plain.decompress(parts, TensorSpec.of(tensor)))
    assert relative_error(tensor, seen) < error
    assert num_bytes < 0.9 * sum(part.nbytes for part in parts)


def test_a_basis_follows_rows_that_turn_where_that_pays() -> None:
    sender, receiver = Transform(1.0), Transform(1.0)
    numbers, sizes = [], []
    for number in range(160):
        tensor = rows(80, seed=number, rotation=int(number >= 40))
        seen, num_bytes = crossed(sender, receiver, tensor)
        assert relative_error(tensor, seen) < 0.4
        if sender.basis is not None and receiver.basis is not None:
            assert torch.equal(sender.basis.codes_KH, receiver.basis.codes_KH)
        numbers.append(-1 if sender.basis is None else sender.basis.number)
        sizes.append(num_bytes)
    # One basis for 35 messages of the same kind, then others, in doubling distances.
    assert numbers[0] == -1 and numbers[6] == numbers[39] == 0 and 1 <= numbers[-1] <= 3
    assert np.median(sizes[-20:]) < 1.15 * np.median(sizes[20:38]) < np.median(sizes[41:48])


def test_a_small_message_after_a_large_one_costs_little() -> None:
    """So one step serves all gradients, as one table of sizes would."""
    sender, receiver = Transform(1.0), Transform(1.0)
    for number in range(8):
        _, usual = crossed(sender, receiver, rows(80, seed=number))
    small = rows(80, seed=9) - torch.arange(H) / H
    _, num_bytes = crossed(sender, receiver, small / 20 + torch.arange(H) / H)
    assert num_bytes < usual / 10
    seen, num_bytes = crossed(sender, receiver, 1000 * small)
    assert seen.isfinite().all() and num_bytes <= 80 * H + 700


@pytest.mark.parametrize("size", [1.0, 1e-25, 1e25])
@pytest.mark.parametrize("messages", [1, 8])
def test_small_rows_of_a_gradient_do_not_all_round_to_zero(messages: int, size: float) -> None:
    errors = []
    for gradients in ("shaped", "evened"):
        sender, receiver = (Transform(0.8, gradients=gradients) for _ in range(2))
        for number in range(messages):
            tensor = rows(80, seed=number) - torch.arange(H) / H
            tensor[40:] /= 30
            tensor[79] = 0
            seen, _ = crossed(sender, receiver, tensor * size)
        errors.append(relative_error(tensor[40:], seen[40:] / size))
        assert relative_error(tensor[:40], seen[:40] / size) < 0.5
    assert (sender.basis is not None) == (messages == 8 and size == 1)
    assert errors[1] < 0.85 < 0.95 < errors[0]
    assert not seen[79].any(), "no gradient is none"


def test_what_gradients_of_earlier_updates_had_in_common_is_no_gradient_of_this_one() -> None:
    sender, receiver = (Transform(1.0, gradients="evened") for _ in range(2))
    for number in range(8):
        crossed(sender, receiver, rows(80, seed=number))
    tensor = torch.zeros(80, H)
    tensor[0, 0] = 9.0
    seen, _ = crossed(sender, receiver, tensor)
    assert sender.basis is not None and not seen[1:].any()


def test_a_row_that_is_beyond_all_octaves_is_refused() -> None:
    codes = np.array([[1, 0, 15]], dtype=np.int32)
    coded = bit_planes.encode(codes, [0, 2, 3])
    assert coded is not None
    head = struct.pack("<BBHf", 2, 0, 0, 1.0)
    data = np.concatenate([np.frombuffer(head, dtype=np.uint8), coded])
    with pytest.raises(FrameError, match="more than 14 octaves"):
        Transform(gradients="evened").decompress(
            (torch.from_numpy(data),), TensorSpec((1, 2), torch.float32)
        )


@pytest.mark.parametrize("what", ["none", "another width", "not first"])
def test_a_message_in_a_basis_that_has_not_come_is_refused(what: str) -> None:
    sender, receiver = Transform(1.0), Transform(1.0)
    for number in range(6):
        parts = sender.compress(rows(80, seed=number))
        if what == "not first" and number == 3:
            receiver.decompress(parts, TensorSpec((80, H), torch.float32))
    spec = TensorSpec((80, H - 1 if what == "another width" else H), torch.float32)
    with pytest.raises(FrameError, match="has not come"):
        receiver.decompress(parts, spec)


def test_rows_too_wide_for_a_basis_and_rows_of_other_widths_cross_without() -> None:
    sender, receiver = Transform(1.0), Transform(1.0)
    wide_rows = torch.randn(20, MAX_FEATURES + 1, generator=torch.Generator().manual_seed(1))
    assert relative_error(wide_rows, crossed(sender, receiver, wide_rows)[0]) < 0.32
    assert sender.features == 0
    for number in range(6):
        crossed(sender, receiver, rows(80, seed=number))
    other = rows(30, num_features=12)
    assert relative_error(other, crossed(sender, receiver, other)[0]) < 0.4
    assert sender.features == H


def test_averages_refuse_messages_of_several_sizes() -> None:
    with pytest.raises(ConfigError, match=r"transform\(2.2\), chosen for 'w', .*averaging"):
        TensorCodec({"w": torch.Size([8, 8])}, lambda name, shape: Transform(), 1, feedback=True)
    with pytest.raises(ConfigError, match=r"Transform.step"):
        Transform(0.01)


D = 6
FIELDS = (
    BoundaryField("counts", (), torch.int16),
    BoundaryField("hidden", (D,), torch.float32, "counted"),
)


class Ends:
    """Both ends of a channel over one link."""

    def __init__(self) -> None:
        self.link = InProcessLink()

        def codecs() -> Codecs:
            return Codecs([(None, Codec(Transform(1.0), NoMemory()))])

        own = (FIELDS, codecs, StepClock(), IDENTITY)
        self.sender = SendChannel(self.link, *own)
        self.receiver = ReceiveChannel(self.link, *own, torch.device("cpu"), 5.0, 40)

    def cross(self, step: int, kind: Kind = Kind.ACTIVATION) -> Tensor:
        counts = torch.tensor([20, 5 + step], dtype=torch.int16)
        hidden = rows(25 + step, seed=step, num_features=D)
        key, samples = MessageKey(kind, step), {"ids": torch.arange(2)}
        self.sender.send(key, {"counts": counts, "hidden": hidden}, samples)
        return self.receiver.recv(key, samples)["hidden"]


def test_a_channel_goes_on_bit_for_bit_and_evaluation_leaves_it_alone() -> None:
    """Also where the evaluation's message is the one that would have brought the basis."""
    plain, evaluated, resumed = Ends(), Ends(), Ends()
    for step in range(1, 6):
        seen = plain.cross(step)
        if step == 2:
            with_basis = copy.deepcopy(evaluated.sender.codecs["hidden"].at(1).compressor)
            with_basis.compress(rows(27, seed=2, num_features=D))
            assert isinstance(with_basis, Transform) and with_basis.basis is not None
        if step > 1:
            evaluated.cross(step, Kind.EVALUATION)
        assert torch.equal(evaluated.cross(step), seen)
        if step > 1:
            assert torch.equal(resumed.cross(step), seen), step
        resumed = Ends()
        resumed.sender.load_state_dict(plain.sender.state_dict())
        resumed.receiver.load_state_dict(plain.receiver.state_dict())


def test_planning_takes_the_bytes_of_a_message_once_there_is_a_basis() -> None:
    spec = TensorSpec((100, H), torch.float32)
    priced = time_codec(Transform(2.2), [spec], torch.device("cpu"))
    assert 2 * 100 < priced.num_bytes < 5 * 100
    assert priced.num_bytes < sum(part.num_bytes for part in Transform(2.2).wire_specs(spec)) / 10


def taught(gradients: Tensor | None, step: float = 1.0) -> tuple[Transform, Transform]:
    """Both ends, whose sender has had rows enough for a basis, and these gradients of them."""
    sender, receiver = Transform(step), Transform(step)
    for number in range(6):
        crossed(sender, receiver, rows(80, seed=number))
        if gradients is not None:
            sender.learn_from_gradient(gradients)
    return sender, receiver


def test_errors_go_where_the_loss_does_not_answer() -> None:
    """At no more bytes the loss changes less, and rows as a whole lose more."""
    generator = torch.Generator().manual_seed(5)
    answers = torch.randn(8, H, generator=generator)  # directions that the loss answers to
    gradients = torch.randn(200, 8, generator=generator) @ answers
    tensor = rows(400, seed=9)
    errors, costs, sizes = [], [], []
    for one in (None, gradients):
        seen, num_bytes = crossed(*taught(one), tensor)
        errors.append(relative_error(tensor, seen))
        costs.append(float(((tensor - seen) @ answers.T).square().mean()))
        sizes.append(num_bytes)
    assert sizes[1] < 1.05 * sizes[0]
    assert costs[1] < 0.75 * costs[0]
    assert errors[1] > errors[0]


@pytest.mark.parametrize(
    "gradients",
    [
        torch.zeros(80, H), torch.full((80, H), math.nan), torch.full((80, H), math.inf),
        torch.zeros(0, H), torch.randn(80, H + 1, generator=torch.Generator().manual_seed(1)),
    ],
    ids=["zero", "nan", "inf", "none", "another width"],
)  # fmt: skip
def test_gradients_that_tell_nothing_change_nothing(gradients: Tensor) -> None:
    tensor = rows(80, seed=9)
    expected, num_bytes = crossed(*taught(None), tensor)
    seen, found_bytes = crossed(*taught(gradients), tensor)
    assert found_bytes == num_bytes and torch.equal(seen, expected)


@pytest.mark.parametrize("scale", [2.0**-100, 1.0, 2.0**100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_gradients_tell_does_not_depend_on_their_size(
    scale: float, dtype: torch.dtype
) -> None:
    gradients = rows(80, seed=7).to(dtype)
    gradients[3] *= 1024  # one row far above the others counts as one row
    same = rows(80, seed=7).to(dtype)
    tensor = rows(80, seed=9)
    expected, _ = crossed(*taught(same), tensor)
    seen, _ = crossed(*taught(gradients * scale), tensor)
    assert torch.equal(seen, expected)


@pytest.mark.parametrize(
    "members", [{}, {"transform": Transform(1.0)}, {"bits": BlockInt(8)}],
    ids=["nothing", "transform", "another"],
)  # fmt: skip
def test_the_first_member_of_a_chain_learns_from_gradients(members: dict[str, Compressor]) -> None:
    chain = Chain(**members)
    chain.learn_from_gradient(rows(80))
    has_learned = [name for name, one in members.items() if "gradients" in one.own()]
    assert has_learned == [name for name in members if name == "transform"]


def test_a_sender_that_learns_from_gradients_goes_on_bit_for_bit() -> None:
    sender, receiver = taught(rows(80, seed=3))
    other = Transform(1.0)
    other.take(sender.own())
    for number in range(3):
        sender.learn_from_gradient(rows(80, seed=20 + number))
        other.learn_from_gradient(rows(80, seed=20 + number))
        sender.look_at = other.look_at = 0  # so that each message tries a new basis
        expected, _ = crossed(sender, receiver, rows(80, seed=30 + number))
        assert torch.equal(crossed(other, copy.deepcopy(receiver), rows(80, seed=30 + number))[0],
                           expected)  # fmt: skip


def test_a_sender_that_decodes_its_own_messages_goes_on_as_one_that_does_not() -> None:
    """As it does in front of a memory of what has crossed."""
    plain, decoding, receiver = Transform(1.0), Transform(1.0), Transform(1.0)
    for number in range(9):
        for sender in (plain, decoding):
            sender.learn_from_gradient(rows(80, seed=3))
        tensor = rows(80, seed=number)
        expected, _ = crossed(plain, receiver, tensor)
        assert torch.equal(crossed(decoding, decoding, tensor)[0], expected)
    assert decoding.basis is not None


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 4 * H], ids=["mean", "size"])
def test_a_basis_that_is_not_finite_is_refused(place: int, value: float) -> None:
    sender = Transform(1.0)
    for number in range(5):
        parts = sender.compress(rows(80, seed=number))
    data = parts[0].numpy().copy()
    start = 8 + place  # behind the head and the step
    data[start : start + 4] = np.frombuffer(struct.pack("<f", value), dtype=np.uint8)
    with pytest.raises(FrameError, match="not finite"):
        Transform(1.0).decompress((torch.from_numpy(data),), TensorSpec((80, H), torch.float32))

"""What a peer sends is input: messages with a valid frame whose contents no honest rank sends."""

import time

import pytest
import torch
from torch import Tensor

from tests.in_process_link import InProcessLink
from tests.memory_group import MemoryGroup
from tests.peak_bytes import PeakBytes
from xcloud.base.errors import FrameError
from xcloud.comm.channel import BoundaryField, Codec, Codecs, ReceiveChannel
from xcloud.comm.compression import ChannelId
from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.low_rank import Svd
from xcloud.comm.memory import NoMemory
from xcloud.comm.sparsify import RandomTopK, TopK, TopRows
from xcloud.comm.step_clock import StepClock
from xcloud.net.frame import Kind, MessageKey, TensorSpec, encode_frame, seal_frame
from xcloud.net.gloo_link import GlooInLink
from xcloud.net.link_end import InSettings
from xcloud.net.link_profile import LinkWindow, Liveness
from xcloud.net.peer import Peer

KEY = MessageKey(Kind.ACTIVATION, 1, 0)
DAY_S = 86_400.0
MAX_ROWS, D = 6, 16


def sent_over(group: MemoryGroup, deliver_at_s: float) -> None:
    for sequence, key in enumerate((MessageKey(Kind.ALIVE), KEY)):
        frame = encode_frame(key, (torch.ones(3),), sequence)
        seal_frame(frame, deliver_at_s)
        group.isend(frame, sequence).wait()


def test_a_real_line_delivers_at_once_whatever_time_its_peer_writes() -> None:
    group, life = MemoryGroup(), Peer(Liveness(1.0, 3.0))
    settings = InSettings("rank 1", 4096, window=LinkWindow(2), peer=life)
    link = GlooInLink(group, settings)

    sent_over(group, time.monotonic() + DAY_S)

    assert link.recv(KEY, 5.0)[0].tolist() == [1, 1, 1]
    assert life.left_s(0.0, 0.0) <= 3.0  # no word of tomorrow


@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), float("-inf")])
def test_a_frame_whose_time_is_no_moment_is_refused(time_s: float) -> None:
    group = MemoryGroup()
    link = GlooInLink(group, InSettings("rank 1", 4096, window=LinkWindow(2), is_emulated=True))

    sent_over(group, time_s)

    with pytest.raises(FrameError, match="frame from rank 1 is damaged: its time is"):
        link.recv(KEY, 5.0)


def received(compressor: Compressor, counts: list[int], parts: tuple[Tensor, ...]) -> Tensor:
    """Of rank 0, whose boundary has two samples of at most MAX_ROWS rows."""
    fields = (
        BoundaryField("counts", (), torch.int16),
        BoundaryField("places", (), torch.int16, "counted", most=MAX_ROWS - 1),
        BoundaryField("hidden", (D,), torch.float32, "counted"),
    )
    link = InProcessLink()
    channel = ReceiveChannel(
        link, fields, lambda: Codecs([(None, Codec(compressor, NoMemory()))]), StepClock(),
        ChannelId(7, 0, "forward", 3, 1), torch.device("cpu"), 5.0, MAX_ROWS,
    )  # fmt: skip
    link.send(KEY, (torch.tensor(counts, dtype=torch.int16), *parts))
    return channel.recv(KEY, {"ids": torch.arange(2)})["hidden"]


@pytest.mark.parametrize("counts", [[MAX_ROWS + 1, 1], [-1, 3], [-32768, 32767], [32767, 32767]])
def test_rows_beyond_what_the_boundary_promises_are_refused_before_anything_is_allocated(
    counts: list[int],
) -> None:
    """SVD makes of few bytes as many rows as `counts` say."""
    compressor = Svd(0.1)
    rows = max(0, sum(counts))
    spec = TensorSpec((rows, D), torch.float32)
    parts = [torch.zeros(s.shape, dtype=s.dtype) for s in compressor.wire_specs(spec)]

    with pytest.raises(FrameError, match=r"from rank 3: 'counts' from .*, allowed are 0 to 6"):
        received(compressor, counts, (torch.zeros(rows, dtype=torch.int16), *parts))


def test_refusing_a_message_of_many_rows_allocates_nothing_for_them() -> None:
    """Attack by counts: 1.5 MB became 584 MB."""
    compressor, num_rows = Svd(0.1), 60_000
    spec = TensorSpec((num_rows, D), torch.float32)
    parts = [torch.zeros(s.shape, dtype=s.dtype) for s in compressor.wire_specs(spec)]
    places = torch.zeros(num_rows, dtype=torch.int16)
    sent = sum(part.nbytes for part in parts) + places.nbytes
    with PeakBytes() as peak, pytest.raises(FrameError):
        received(compressor, [30_000, 30_000], (places, *parts))
    assert peak.peak < 3 * sent + 4096  # two copies of the frame; with the rows 9 times as much


@pytest.mark.parametrize("place", [-1, MAX_ROWS])
def test_places_outside_a_sample_are_refused(place: int) -> None:
    places = torch.tensor([0, 1, place], dtype=torch.int16)

    with pytest.raises(FrameError, match=r"'places' from .*, allowed are 0 to 5"):
        received(Chain(), [1, 2], (places, torch.zeros(3, D)))


@pytest.mark.parametrize("counts", [[0, 3], [MAX_ROWS, MAX_ROWS]])
def test_as_many_rows_as_promised_pass(counts: list[int]) -> None:
    rows = sum(counts)

    hidden = received(Chain(), counts, (torch.zeros(rows, dtype=torch.int16), torch.ones(rows, D)))

    assert hidden.shape == (rows, D)


SPARSE = [TopK(0.02), TopK(0.2), TopK(0.9), TopRows(0.1), TopRows(0.6), RandomTopK(0.5, 0.1)]


@pytest.mark.parametrize("compressor", SPARSE, ids=lambda c: c.label)
def test_positions_outside_the_tensor_or_too_many_name_their_sender(compressor: TopK) -> None:
    rows = 12
    tensor = torch.randn(rows, D, generator=torch.Generator().manual_seed(0))
    honest = list(compressor.compress(tensor))
    damaged = []
    for byte in (0x00, 0xFF):  # no position; every position, and the highest low bits
        parts = [part.clone() for part in honest]
        parts[1].fill_(byte)
        damaged.append(tuple(parts))
    places = torch.zeros(rows, dtype=torch.int16)

    assert received(compressor, [6, 6], (places, *honest)).count_nonzero() > 0
    for parts in damaged:
        with pytest.raises(FrameError, match=r"activation of step 1.*from rank 3: .*position"):
            received(compressor, [6, 6], (places, *parts))


def test_a_position_just_past_the_end_is_refused() -> None:
    """The upper bits fit, the lower ones do not: as many positions as promised, one outside."""
    tensor = torch.zeros(1000)
    tensor[[10, 990]] = 1.0
    compressor = TopK(0.002)
    values, packed = compressor.compress(tensor)
    spec = TensorSpec.of(tensor)
    assert compressor.decompress((values, packed), spec).nonzero().flatten().tolist() == [10, 990]
    refused = []
    for place in range(len(packed)):
        for bit in range(8):
            other = packed.clone()
            other[place] ^= 1 << bit
            try:
                assert compressor.decompress((values, other), spec).shape == (1000,)
            except FrameError as error:
                refused.append(str(error))
    assert any(line.startswith("position 10") for line in refused), refused
    assert any("1 positions" in line for line in refused)

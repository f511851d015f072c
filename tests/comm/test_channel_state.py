"""What both ends of a channel carry from message to message: for every compressor and memory that
ships, evaluation leaves it alone, and a pair that takes it over goes on bit for bit."""

from itertools import combinations
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.channels import (
    IDENTITY,
    ROWS_PER_SAMPLE,
    B,
    InProcessLink,
    Pair,
    Phases,
    copies,
    message_of,
    same,
    same_state,
    stored,
)
from tests.codecs import COMPRESSORS
from tests.nightly import NIGHTLY
from tests.pipelines import wired
from xcloud.comm.channel import Boundary, BoundaryField, Codec, Codecs, ReceiveChannel, SendChannel
from xcloud.comm.compression import ChannelId, Compression
from xcloud.comm.compression_plans import Phased
from xcloud.comm.compressor import Chain
from xcloud.comm.low_rank import Svd
from xcloud.comm.memory import DeltaCache, ErrorFeedback, Memory, NoMemory
from xcloud.comm.precision import BlockInt
from xcloud.comm.sparsify import RandomK
from xcloud.comm.step_clock import StepClock
from xcloud.job.config import build, resolved
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.frame import Kind, MessageKey
from xcloud.pipeline.wiring import Wiring

CONF = Path(__file__).parents[2] / "conf" / "compression"
MEMORIES = [NoMemory(), ErrorFeedback(), DeltaCache("bfloat16")]
RANDOM = [BlockInt(2, stochastic=True), RandomK(0.3, unbiased=True)]


def shipped(path: Path, direction: str) -> Phases:
    whole = {"compression": OmegaConf.load(path), "model": {"split": {"rank": 112}}}
    built = build(resolved(whole)["compression"])
    # So early that both phases are seen.
    phases = (
        [(2 if until else None, compression) for until, compression in built.by_step]
        if isinstance(built, Phased)
        else [(None, built)]
    )
    return [(u, getattr(c, direction), getattr(c, f"{direction}_memory")) for u, c in phases]


SETTINGS: dict[str, Phases] = {
    f"{path.stem}-{direction}": shipped(path, direction)
    for path in sorted(CONF.glob("*.yaml"))
    if "defaults:" not in path.read_text()  # composed of others of these files
    for direction in ("forward", "backward")
}
SETTINGS |= {
    f"{compressor}-{memory}": [(None, compressor, memory)]
    for compressor in COMPRESSORS
    for memory in MEMORIES
}
SETTINGS["phases with state"] = [
    (2, Chain(svd=Svd(0.05), int4=BlockInt(4, stochastic=True)), ErrorFeedback()),
    (None, Chain(k=RandomK(0.3), int8=BlockInt(8, stochastic=True)), DeltaCache()),
]
# Half of the shipped files say the same of a direction as another one, which has the row.
DISTINCT = {repr(SETTINGS[name]): name for name in reversed(SETTINGS)}.values()
# Any compressor with one memory, and at night with each.
BY_DAY = {f"{c}-{MEMORIES[n % len(MEMORIES)]}" for n, c in enumerate(COMPRESSORS)}
AT_NIGHT = {f"{c}-{memory}" for c in COMPRESSORS for memory in MEMORIES} - BY_DAY
every_setting = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NIGHTLY * (name in AT_NIGHT)) for name in DISTINCT]
)


@every_setting
def test_evaluation_leaves_no_trace_at_either_end(name: str) -> None:
    alone, evaluated = Pair(SETTINGS[name]), Pair(SETTINGS[name])
    for number in (1, 2):
        assert same(evaluated.pass_on(number), alone.pass_on(number))
        first, second = (evaluated.pass_on(number + 2, Kind.EVALUATION) for _ in range(2))

        assert same(first, second)  # an evaluation depends on training alone
        assert same_state(evaluated.states(), alone.states())


@every_setting
def test_fresh_ends_with_the_state_of_others_go_on_bit_for_bit(name: str) -> None:
    goes_on_bit_for_bit(SETTINGS[name], 2)


@pytest.mark.parametrize("num_messages", [0, 1, 3, 4])
def test_so_they_do_before_and_after_a_change_of_phase(num_messages: int) -> None:
    goes_on_bit_for_bit(SETTINGS["phases with state"], num_messages)


def goes_on_bit_for_bit(phases: Phases, num_messages: int) -> None:
    original, restored = Pair(phases), Pair(phases)
    for number in range(1, num_messages + 1):
        original.pass_on(number)
    states = original.states()
    kept = copies(states)
    numbers = range(num_messages + 1, max(5, num_messages + 2))
    expected = [original.pass_on(number) for number in numbers]
    quality = original.pass_on(9, Kind.EVALUATION)

    assert same_state(states, kept)  # a snapshot
    restored.load([stored(state) for state in states])
    for number, parts in zip(numbers, expected, strict=True):
        assert same(restored.pass_on(number), parts)
    assert same(restored.pass_on(9, Kind.EVALUATION), quality)
    assert same_state(restored.states(), original.states())


@pytest.mark.parametrize("name", ["topk_ef-forward", "delta_int4-forward", "randomk-backward",
                                  "phases with state", f"{Svd(0.1)}-NoMemory()",
                                  f"{BlockInt(4, stochastic=True)}-NoMemory()"])  # fmt: skip
def test_fresh_ends_without_the_state_would_send_something_else(name: str) -> None:
    original = Pair(SETTINGS[name])
    for number in (1, 2, 3):
        original.pass_on(number)

    assert not same(Pair(SETTINGS[name]).pass_on(4), original.pass_on(4))


def test_evaluation_begins_at_the_state_that_training_left() -> None:
    fresh, trained = Pair([(None, Svd(0.1), NoMemory())]), Pair([(None, Svd(0.1), NoMemory())])
    for number in (1, 2):
        trained.pass_on(number)

    assert not same(trained.pass_on(3, Kind.EVALUATION), fresh.pass_on(3, Kind.EVALUATION))
    assert same(trained.pass_on(3, Kind.EVALUATION), trained.pass_on(3))


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        ((BlockInt(4), DeltaCache()), (BlockInt(4), NoMemory()), r"NoMemory contains .*ids"),
        ((Chain(a=BlockInt(4)), NoMemory()), (Chain(b=BlockInt(4)), NoMemory()), r"'a.num_calls'"),
        ((Svd(0.1), NoMemory()), (BlockInt(4), NoMemory()), r"whole number 'num_calls'"),
        ((BlockInt(4), NoMemory()), (Svd(0.1), NoMemory()), r"a Svd contains .*num_calls"),
    ],
)
def test_a_state_saved_with_other_settings_is_refused(saved, loaded, message: str) -> None:
    original, other = Pair([(None, *saved)]), Pair([(None, *loaded)])
    original.pass_on(1)

    with pytest.raises(ValueError, match=message):
        other.load(original.states())


def test_a_state_with_a_phase_or_field_too_many_is_refused() -> None:
    one = (None, BlockInt(4), NoMemory())
    two = Pair([(1, BlockInt(4), NoMemory()), one])

    with pytest.raises(ValueError, match=r"a Codecs contains '1\.compressor"):
        Pair([one]).load(two.states())
    with pytest.raises(ValueError, match=r"a SendChannel contains 'other.0'"):
        two.sender.load_state_dict({"other.0": 1})


@pytest.mark.parametrize("compressor", RANDOM, ids=repr)
def test_averaging_over_eight_lanes_averages(compressor: BlockInt | RandomK) -> None:
    senders = [
        Pair([(None, compressor, NoMemory())], ChannelId(1, 0, "backward", sender, 9))
        for sender in range(8)
    ]
    seen = torch.stack([pair.pass_on(1)[-2] for pair in senders])
    exact = Pair([(None, Chain(), NoMemory())]).pass_on(1)[-2]
    of_one = (seen - exact).flatten(1).norm(dim=1).mean()
    of_mean = (seen.mean(0) - exact).norm()

    assert of_mean / of_one == pytest.approx(8**-0.5, rel=0.1)


@pytest.mark.parametrize("compressor", RANDOM, ids=repr)
@pytest.mark.parametrize(
    "other",
    [
        ChannelId(8, 0, "forward", 0, 1),
        ChannelId(7, 1, "forward", 0, 1),
        ChannelId(7, 0, "backward", 0, 1),
        ChannelId(7, 0, "forward", 2, 1),
        ChannelId(7, 0, "forward", 0, 3),
    ],
    ids=str,
)
def test_seeds_boundaries_directions_and_lanes_share_no_random_numbers(
    compressor: BlockInt | RandomK, other: ChannelId
) -> None:
    ours, twin, theirs = (
        Pair([(None, compressor, NoMemory())], identity).sender.codecs["hidden"].at(1).compressor
        for identity in (IDENTITY, IDENTITY, other)
    )
    values = torch.full((900,), 0.3)
    sent = [list(sender.compress(values)) for sender in (ours, theirs) for _ in range(3)]

    # Nor do calls: no two of the six messages are the same.
    assert not any(same(*two) for two in combinations(sent, 2))
    assert same(list(twin.compress(values)), sent[0])


def test_fields_phases_members_and_evaluation_share_no_random_numbers() -> None:
    phases: Phases = [
        (1, Chain(a=BlockInt(1, stochastic=True)), NoMemory()),
        (None, Chain(b=BlockInt(1, stochastic=True)), NoMemory()),
    ]
    pair, values = Pair(phases), torch.ones(900) * 0.3
    values[0] = 1.0
    codecs = [
        pair.sender.codecs[field].at(step) for field in ("hidden", "pooled") for step in (1, 2)
    ]
    sent = [codec.compress_apart(values, stream)[0] for codec in codecs for stream in (1, 2)]
    sent += [codec.compressor.compress(values)[0] for codec in codecs]

    # Of four codecs, the same two streams for an evaluation: two results a member name.
    assert len({bytes(part) for part in sent[:8]}) == 4
    assert len({bytes(part) for part in sent}) == 8


def test_micro_batches_of_an_evaluation_share_no_random_numbers() -> None:
    """Nor do evaluations after different steps; the same one is repeated to the bit."""
    pair = Pair([(None, Chain(a=BlockInt(1, stochastic=True)), NoMemory())])
    ids, message = message_of(1)

    def sent(step: int, micro_batch: int) -> bytes:
        key = MessageKey(Kind.EVALUATION, step, micro_batch)
        pair.sender.send(key, message, {"ids": ids})
        return b"".join(part.numpy().tobytes() for part in pair.link.tape[-1])

    keys = [(step, micro_batch) for step in (4, 5) for micro_batch in range(3)]
    assert len({sent(*key) for key in keys}) == len(keys)
    assert sent(4, 1) == sent(4, 1)


def random_ranks(layout: ClusterLayout) -> list[Wiring]:
    boundary = Boundary((BoundaryField("hidden", (8,), torch.float32),), 1)
    compression = Compression(BlockInt(4, stochastic=True), RandomK(0.3), ErrorFeedback())
    boundaries = dict.fromkeys(range(layout.num_stages - 1), boundary)
    return [one.wiring for one in wired(layout, boundaries, compression, seed=5)]


def test_both_ends_of_every_channel_are_given_the_same_identity_and_no_other_has_it() -> None:
    layout = ClusterLayout({"a": Cloud(2), "b": Cloud(2), "c": Cloud(1)}, "free")
    ends: dict[ChannelId, list[tuple[int, type]]] = {}
    for rank, wiring in enumerate(random_ranks(layout)):
        for channel in wiring.boundaries.channels.values():
            ends.setdefault(channel.identity, []).append((rank, type(channel)))

    assert len(ends) == 2 * (2 + 2)
    for identity, found in ends.items():
        both = [(identity.sender, SendChannel), (identity.receiver, ReceiveChannel)]
        assert sorted(found, key=str) == sorted(both, key=str)
    assert {identity.seed for identity in ends} == {5}


def test_a_rank_gives_and_takes_the_state_of_all_its_channels() -> None:
    layout = ClusterLayout({"a": Cloud(2), "b": Cloud(1)}, "free")
    original, restored = (random_ranks(layout)[2] for _ in range(2))
    for channel in original.boundaries.channels.values():
        for _ in range(3):
            channel.codecs["hidden"].at(1).compressor.compress(torch.ones(4, 8))
    state = original.state_dict()

    assert not same_state([restored.state_dict()], [state])
    restored.load_state_dict(stored(state))
    assert same_state([restored.state_dict()], [state])
    with pytest.raises(ValueError, match="a Wiring contains"):
        random_ranks(layout)[0].load_state_dict(state)


@pytest.mark.parametrize("memory", MEMORIES, ids=lambda memory: type(memory).__name__)
def test_a_tensor_of_fixed_rows_crosses_without_sample_ids(memory: Memory) -> None:
    """A gradient's bucket: what error feedback or a cache keeps is of the whole tensor."""
    fields = (BoundaryField("bucket", (8,), torch.float32, rows=3),)
    link = InProcessLink()

    def codecs() -> Codecs:
        return Codecs([(None, Codec(Chain(int4=BlockInt(4)), memory))])

    sender = SendChannel(link, fields, codecs, StepClock(), IDENTITY)
    receiver = ReceiveChannel(
        link, fields, codecs, StepClock(), IDENTITY, torch.device("cpu"), 5.0, 1
    )
    value = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    mean = torch.zeros(3, 8)
    for number in range(1, 9):
        key = MessageKey(Kind.ACTIVATION, number)
        sender.send(key, {"bucket": value}, {})
        mean += receiver.recv(key, {})["bucket"] / 8

    assert sender.raw_bytes == 8 * 4 * 24
    error = (mean - value).norm() / value.norm()
    assert error < (0.1 if isinstance(memory, NoMemory) else 0.03)


def test_rows_beside_a_counted_field_belong_to_one_sample_each() -> None:
    """Not as many rows to the first sample as it has tokens, and none to the last ones."""
    pair = Pair([(None, Chain(), DeltaCache())])
    pair.pass_on(1)
    state = pair.sender.state_dict()

    for field, rows in (("hidden", ROWS_PER_SAMPLE), ("pooled", 1)):
        counts = state[f"{field}.0.memory.counts"]
        assert isinstance(counts, torch.Tensor) and counts.tolist() == [rows] * B

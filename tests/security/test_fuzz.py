"""Every parser of what a peer sends, with damaged inputs: it takes or refuses them with one of
our errors, and in either case needs little more memory than an honest message. 300 inputs each,
and 100,000 each night."""

from __future__ import annotations

import json
import random
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.codecs import ERRORS
from tests.event_lines import DEEP, STEP, Desk
from tests.feature_rows import feature_rows
from tests.local_replicas import MEAN, rounds_of
from tests.owners import folder_of_keys, keys_of
from tests.replicas import Post
from xcloud.base.errors import ConfigError, FrameError, XcloudError
from xcloud.comm.bit_planes import decode as decode_planes
from xcloud.comm.bit_planes import encode as encode_planes
from xcloud.comm.channel import BoundaryField, Codec, Codecs, ReceiveChannel, SendChannel
from xcloud.comm.compression import ChannelId
from xcloud.comm.compressor import Compressor
from xcloud.comm.ids import (
    CorruptedTexts,
    IdPacking,
    Reader,
    decode_ascending,
    decode_ids,
    encode_ascending,
    encode_ids,
)
from xcloud.comm.memory import NoMemory
from xcloud.comm.precision import BlockInt
from xcloud.comm.sparsify import TopK, drawn_positions
from xcloud.comm.step_clock import StepClock
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.comm.transform import Transform
from xcloud.doctor.talk import Facts, unpack_facts
from xcloud.features.one_way.feed import Order
from xcloud.features.one_way.intake import Inbox
from xcloud.features.one_way.layout import OneWayCloud, OneWayLayout
from xcloud.features.one_way.producer import OrderBook
from xcloud.features.replicas.averaging import Terms
from xcloud.features.replicas.late import Skip
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.line.hello import (
    Hello,
    HelloRefusal,
    StreamName,
    decode_hello,
    encode_hello,
    encode_refusal,
)
from xcloud.line.keys import read_key
from xcloud.line.mailbox import BoxKeys, LinkBox
from xcloud.line.mailbox_lines import Entry, Note, NoteKind, decode_note, encode_note
from xcloud.line.pieces import HEADER, Assembly
from xcloud.line.sealing import open_sealed, seal
from xcloud.net.failure_detector import FailureDetector
from xcloud.net.frame import (
    Frame,
    Kind,
    MessageKey,
    Tensors,
    TensorSpec,
    decode_frame,
    encode_frame,
    seal_frame,
)
from xcloud.net.peer import Peer
from xcloud.net.words import ControlMessage, WordKind, decode, encode
from xcloud.pipeline.control import (
    check_norms,
    number_of,
    reply_of,
)
from xcloud.pipeline.exchange import Work
from xcloud.rank.agreement import (
    Verdict,
    compare_facts,
    decode_facts,
    decode_table,
    decode_verdict,
    encode_table,
)
from xcloud.rank.peak_bytes import PeakBytes
from xcloud.rank.saving import code_of
from xcloud.record.checkpoint_files import CheckpointFolder


class Parser(NamedTuple):
    """honest: messages to damage. take: parses one of them, or raises one of our errors."""

    honest: list[Any]
    take: Callable[[Any], object]


def frame(parts: Tensors, kind: Kind = Kind.NORM, step: int = 1) -> Frame:
    return Frame(MessageKey(kind, step), parts, 0, 0.0, 64)


def whole(*numbers: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def as_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]


# --- parsers


def frames() -> Parser:
    parts = (torch.randn(3, 5), torch.arange(9, dtype=torch.int16), torch.tensor([True]))
    made = encode_frame(MessageKey(Kind.ACTIVATION, 3, 1), parts, 5)
    seal_frame(made, 1.5)
    seals = random.Random(1)

    def take(data: bytes) -> object:
        buffer = as_bytes(data).clone()
        if len(buffer) >= 40 and seals.random() < 0.7:  # with a checksum that fits
            view = memoryview(buffer.numpy())  # type: ignore[arg-type]
            end = min(len(view), len(made))
            struct.pack_into("<I", view, 20, 0)
            struct.pack_into("<I", view, 20, zlib.crc32(view[:end]))
        return decode_frame(buffer, "rank 1")

    return Parser([made.numpy().tobytes()], take)


def greetings() -> Parser:
    stream = StreamName("forward 0", "cloud_a", 0, "cloud_b", 1)
    hello = encode_hello(Hello(stream, bytes(16), attempt=1, connection=2, of=3, expected=7))
    honest = [hello[1:], encode_refusal(HelloRefusal.OTHER_RUN)[1:]]
    return Parser(honest, lambda data: decode_hello(data, "cloud_b"))


def doctors_facts() -> Parser:
    facts = Facts("0.2.0", code="c0de", torch="2.11", python="3.11.4", file="f11e")
    return Parser(
        [json.dumps(facts._asdict()).encode()], lambda data: unpack_facts(data, "cloud_b")
    )


def pieces() -> Parser:
    heads = [HEADER.pack(n, 300_000, number) for n in range(3) for number in (0, 1)]

    def take(data: bytes) -> object:
        assembly = Assembly(1 << 19, max_bytes=600_000, deliver=lambda frame: None)
        for at in range(0, len(data) - HEADER.size + 1, HEADER.size):
            frame, frame_bytes, number = HEADER.unpack_from(data, at)
            assembly.place(frame, frame_bytes, number)
            assembly.arrived(frame, number)
        return assembly.expected

    return Parser([b"".join(heads)], take)


def sealed() -> Parser:
    a, b = (keys_of(cloud, []).own for cloud in ("cloud_a", "cloud_b"))
    a_key, b_key = (read_key(folder_of_keys() / f"{one.cloud}.key") for one in (a, b))
    honest = seal(bytes(999), b, a_key, context=b"round 3")
    return Parser([honest], lambda data: open_sealed(data, b_key, b, sender=a, context=b"round 3"))


def mailbox_objects() -> Parser:
    a, b = (keys_of(cloud, []).own for cloud in ("cloud_a", "cloud_b"))
    a_key, b_key = (read_key(folder_of_keys() / f"{one.cloud}.key") for one in (a, b))
    of_no_store: Any = None
    box = LinkBox(of_no_store, bytes(16), "0" * 32, "forward", ("cloud_a", 0), ("cloud_b", 1))
    made = encode_frame(MessageKey(Kind.AVERAGING, 3), (torch.randn(99),), 7)
    seal_frame(made, -1.0)
    honest = seal(made.numpy().tobytes(), b, a_key, context=box.context(7))

    def take(data: bytes) -> object:
        found = box.open(7, data, BoxKeys(b_key, b, peer=a), max_bytes=2048)
        return decode_frame(as_bytes(found).clone(), "rank 0")

    return Parser([honest], take)


def notes() -> Parser:
    entry = Entry(bytes(16), "0" * 64)
    honest = [
        Note(NoteKind.OFFER, bytes(16)),
        Note(NoteKind.ANSWER, bytes(16), [entry]),
        Note(NoteKind.BEGIN, bytes(16), [entry, entry, entry]),
    ]
    return Parser([encode_note(one) for one in honest], lambda data: decode_note(data, "a", 3))


class Held:
    """A link with one message in it, either way."""

    def __init__(self) -> None:
        self.parts: Tensors = ()
        self.stats = SimpleNamespace()

    def send(self, key: MessageKey, parts: Tensors, carries: object = ()) -> None:
        self.parts = tuple(part.clone() for part in parts)

    def recv(self, key: MessageKey, overdue_s: float) -> Tensors:
        return self.parts


def boundary(compressor: Compressor) -> Parser:
    fields = (
        BoundaryField("counts", (), torch.int16),
        BoundaryField("places", (), torch.int16, "counted", most=15),
        BoundaryField("hidden", (24,), torch.float32, "counted"),
    )
    link, key, ids = Held(), MessageKey(Kind.ACTIVATION, 1), torch.arange(4)
    identity, clock = ChannelId(7, 0, "forward", 0, 1), StepClock()

    def codecs() -> Codecs:
        return Codecs([(None, Codec(compressor, NoMemory()))])

    counts = torch.tensor([16, 3, 8, 1], dtype=torch.int16)
    rows = int(counts.sum())
    message = {
        "counts": counts, "places": torch.zeros(rows, dtype=torch.int16),
        "hidden": torch.randn(rows, 24, generator=torch.Generator().manual_seed(1)),
    }  # fmt: skip
    sender = SendChannel(link, fields, codecs, clock, identity)  # type: ignore[arg-type]
    sender.send(key, message, {"ids": ids})
    receiver = ReceiveChannel(
        link, fields, codecs, clock, identity, torch.device("cpu"), 1.0, 16,  # type: ignore[arg-type]
    )  # fmt: skip
    honest = link.parts

    def take(parts: Tensors) -> object:
        link.parts = parts
        return receiver.recv(key, {"ids": ids})

    return Parser([honest], take)


def bit_planes() -> Parser:
    draw = np.random.default_rng(0)
    edges = [0, 3, 9, 24]
    codes = np.round(draw.standard_normal((40, 24)) * np.repeat([9.0, 2.0, 0.3], np.diff(edges)))
    codes[7, 0] = 5000
    coded = encode_planes(codes.astype(np.int32), edges)
    assert coded is not None
    return Parser(
        [coded.tobytes()],
        lambda data: decode_planes(np.frombuffer(data, np.uint8), num_rows=40, edges=edges),
    )


def rows_in_a_basis() -> Parser:
    """A message with its basis, and the next one, which needs it."""
    rows = torch.randn(200, 24, generator=torch.Generator().manual_seed(1))
    spec, sender, receiver = TensorSpec.of(rows), Transform(1.0), Transform(1.0)
    (bound,) = sender.wire_specs(spec)

    def take(parts: Tensors) -> object:
        if len(parts) != 1 or not bound.admits(TensorSpec.of(parts[0])):
            raise FrameError("no channel passes it on")
        return receiver.decompress(parts, spec=spec)

    return Parser([sender.compress(rows), sender.compress(rows)], take)


def packed_ids() -> Parser:
    packing = IdPacking(4000, 12, 40, digest=7)
    draw = np.random.default_rng(0)
    counts = draw.integers(1, 41, 12)
    num = int(counts.sum())
    ids = torch.tensor(draw.zipf(1.3, num) % 4000)
    texts = CorruptedTexts(ids, torch.tensor(counts), torch.tensor(draw.random(num) < 0.2))
    return Parser(
        [packing.pack(texts).numpy().tobytes()], lambda data: packing.unpack(as_bytes(data))
    )


def ranked_ids() -> Parser:
    ids = np.random.default_rng(0).zipf(1.3, 400) % 4000
    data = encode_ids(ids.astype(np.int64), 4000).numpy().tobytes()
    return Parser([data], lambda data: decode_ids(Reader(as_bytes(data)), 400, 4000))


def gaps() -> Parser:
    numbers = np.sort(np.random.default_rng(0).choice(5000, 200, replace=False)).astype(np.int64)
    data = encode_ascending(numbers, 5000).numpy().tobytes()
    return Parser([data], lambda data: decode_ascending(Reader(as_bytes(data)), 200, 5000))


def orders() -> Parser:
    rows = torch.tensor([[n, n % 2, 40] for n in range(1, 9)], dtype=torch.int32)

    def take(parts: Tensors) -> object:
        book = OrderBook(num_consumers=2, max_waiting=64, max_number=100)
        book.take_orders(frame(parts))
        return [book.next(False) for _ in range(book.waiting.qsize())]

    return Parser([(rows,)], take)


def batches() -> Parser:
    layout = OneWayLayout({"d": OneWayCloud(), "a": OneWayCloud(share=1.0)}, "free")

    def take(parts: Tensors) -> object:
        inbox = Inbox(layout, 64, {1: Peer()}, max_waiting=8)
        inbox.expect([Order(0, number, 0, 9) for number in (1, 2, 5)])
        for number in (1, 2, 5):
            inbox.put(0, frame(parts, Kind.BATCH, number))
        return inbox.state_dict()

    return Parser([(torch.zeros(64, dtype=torch.uint8),)], take)


def norms() -> Parser:
    honest = [(whole(1.0, 2.0, dtype=torch.float64),)]
    return Parser(honest, lambda parts: check_norms(parts, 2, 1))


def answers() -> Parser:
    total = whole(1.0, dtype=torch.float64)
    honest = [(total,), (total, whole(1, dtype=torch.uint8))]
    return Parser(honest, lambda parts: reply_of(parts, 0))


def codes() -> Parser:
    return Parser([(whole(1, dtype=torch.uint8),)], lambda parts: code_of(frame(parts), 1))


def ages() -> Parser:
    detector = FailureDetector(1, num_ranks=3)
    moved = whole(9.0, dtype=torch.float32)
    honest = (whole(0.0, 1.0, 2.0, dtype=torch.float32), moved)
    return Parser([honest], lambda parts: detector.receive(0, frame(parts)))


def facts() -> Parser:
    mine = {"the task's data": "ab" * 32, "the parameters": "cd" * 32}

    def take(data: bytes) -> object:
        return compare_facts(mine, decode_facts(data.decode("utf-8", "replace"), 1), 1)

    return Parser([json.dumps(mine).encode()], take)


def tables() -> Parser:
    honest = encode_table(
        {"setting": {"seed": "1"}, "code": {"xcloud/run.py": "ab"}, "info": {"torch": "2"}}
    )
    return Parser(
        [honest.encode()], lambda data: decode_table(data.decode("utf-8", "replace"), "rank 1")
    )


def verdicts() -> Parser:
    honest = json.dumps(asdict(Verdict("go", "they differ", 40, 7)))
    return Parser([honest.encode()], lambda data: decode_verdict(data.decode("utf-8", "replace")))


SHAPES = {"a": torch.Size([6, 5]), "b": torch.Size([7])}


def words() -> Parser:
    honest = [
        ControlMessage(WordKind.TELL, "table", "{}"),
        ControlMessage(WordKind.ASK, "verdict"),
    ]
    return Parser(
        [encode(message).numpy().tobytes() for message in honest],
        lambda data: decode(as_bytes(data), "rank 1"),
    )


def told_steps() -> Parser:
    return Parser([(whole(7, dtype=torch.int64),), ()], number_of)


def contributions() -> Parser:
    codec = TensorCodec(SHAPES, lambda name, _: TopK(0.3) if name == "a" else BlockInt(4), 7, True)
    parts, _ = codec.encode([torch.randn(shape) for shape in SHAPES.values()])
    return Parser([parts], lambda parts: Terms().contribution(1, 1, 1.0, 1.0, codec, parts))


SETTINGS = LocalUpdates(2, MEAN, late=Skip(5.0))


def round_of(replica: int, honest: list[Tensors]) -> Parser:
    """What one of two replicas takes of the other in a round. The first merges for both."""

    def take(parts: Tensors) -> object:
        post = Post(2)
        weights = nn.ParameterDict({"w": torch.zeros(1)})
        rounds = rounds_of(post.links(replica), weights, SETTINGS, 9)
        key = MessageKey(Kind.AVERAGING, 0, replica)
        post.links(1 - replica).send(replica, key, parts, ("",) * len(parts), 0)
        return rounds.after_update(2, Work(2, 2.0))

    return Parser(honest, take)


def hub() -> Parser:
    head = whole(2.0, 0.0, 2.0, dtype=torch.float64)
    return round_of(0, [(head, torch.ones(1)), (head,)])


def member() -> Parser:
    some = whole(2.0, 2.0, 1.0, 0.0, dtype=torch.float64)
    every = whole(2.0, 2.0, 0.0, 1.0, dtype=torch.float64)
    one = torch.ones(1)
    return round_of(1, [(some, one), (some, one, one), (every, one, one[:0])])


def reports(folder: Path) -> Parser:
    now = iter(range(10**9))
    desk = Desk(folder)
    desk.file.close()
    desk.intake.clock_finding = lambda: 1e3 * next(now)  # the bound on bytes is not what is tried
    desk.file.append = lambda lines: [json.loads(line) for line in lines.splitlines()]  # type: ignore
    honest: list[bytes] = [
        json.dumps(line).encode() + b"\n"
        for line in (
            {**STEP, "loss": 1.0, "line_busy_s": {"forward": {"b": 1.0}}},
            {"event": "note", "text": "größer"},
            {"event": "timeline", "step": 1, "machine": "f", "started_us": 0, "unix_us": 0,
             "step_us": 1, "spans": [["fetch", "", 0, 0, 0, 1]], "sent": [], "received": []},
            {"event": "quality", "step": 2, "split": "dev", "values": {"bleu": 1.0},
             "signature": {}, "evaluation_s": 1.0},
        )
    ]  # fmt: skip

    def take(data: bytes) -> object:
        return desk.intake.take(2, frame((as_bytes(data),), Kind.REPORT))

    take(DEEP)
    assert desk.num_refused == {2: 1}
    return Parser(honest, take)


def checkpoint_headers(folder: Path) -> Parser:
    kept = CheckpointFolder(folder / "kept")
    kept.write(3, 0, {"w": torch.ones(3), "n": 4}, {"seed": 1})
    (header,) = (path for path in kept.step_dir(3).iterdir() if path.suffix == ".json")

    def take(data: bytes) -> object:
        header.write_bytes(data)
        return kept.about(3, 0)

    return Parser([header.read_bytes()], take)


PARSERS: dict[str, Callable[..., Parser]] = {
    maker.__name__: maker
    for maker in (
        frames, bit_planes, rows_in_a_basis, packed_ids, ranked_ids, gaps, orders, batches,
        norms, answers, codes, ages, facts, tables, verdicts, words, told_steps,
        contributions, hub, member, reports,
        greetings, doctors_facts, pieces, sealed, mailbox_objects, notes,
        checkpoint_headers,
    )
}  # fmt: skip
PARSERS |= {
    f"boundary {number} {c.label}": lambda c=c: boundary(c)  # type: ignore[misc]
    for number, (c, _) in enumerate(ERRORS)
}
PARSERS |= {
    name: lambda make=make: Parser(*make())  # type: ignore[misc]
    for rows in feature_rows().values()
    for name, make in rows.parsers.items()
}
ON_DISK = (reports, checkpoint_headers)


FEW, MANY = 60, 100_000
LONGEST_S = 10.0  # of one input: a second, on a machine that does other things too
DTYPES = [torch.float32, torch.float64, torch.float16, torch.uint8, torch.int8, torch.int16,
          torch.int32, torch.int64, torch.bool]  # fmt: skip
EXTREMES = [0, 1, -1, 127, 128, 255, 2**31 - 1, -(2**31), 1e300, -1e300, float("nan"),
            float("inf"), -float("inf")]  # fmt: skip


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(len(found) + 1)
        what = draw.randrange(6)
        if what == 0 and at < len(found):
            found[at] ^= 1 << draw.randrange(8)
        elif what == 1:
            found[at : at + 4] = struct.pack("<I", draw.choice([0, 1, 2**31, 2**32 - 1]))
        elif what == 2:
            del found[at : at + draw.randrange(1, 9)]
        elif what == 3:
            found[at:at] = draw.randbytes(draw.randrange(1, 9))
        elif what == 4:
            del found[at:]
        else:
            found[at : at + 8] = found[-8:]
    return bytes(found)


def damaged_tensors(parts: Tensors, draw: random.Random) -> Tensors:
    found = [part.clone() for part in parts]
    for _ in range(draw.choice([1, 1, 2, 3])):
        at = draw.randrange(len(found)) if found else 0
        what = draw.randrange(8)
        if not found or what == 0:
            found.insert(at, torch.zeros(draw.randrange(9), dtype=draw.choice(DTYPES)))
        elif what == 1:
            del found[at]
        elif what == 2:
            found[at] = found[at].to(draw.choice(DTYPES))
        elif what == 3:
            found[at] = found[at].reshape(-1)[: draw.randrange(found[at].numel() + 1)]
        elif what == 4:
            found[at] = found[at][None]
        elif found[at].numel():
            flat = found[at].reshape(-1)
            if what == 5 or not flat.is_contiguous():
                value = torch.tensor(draw.choice(EXTREMES), dtype=torch.float64)
                flat[draw.randrange(flat.numel())] = value.to(flat.dtype)
            else:
                raw = flat.view(torch.uint8)
                for _ in range(1 if what == 6 else 16):
                    raw[draw.randrange(raw.numel())] = draw.randrange(256)
                if found[at].dtype == torch.bool:
                    raw &= 1
            found[at] = flat.view(found[at].shape)
    return tuple(found)


def fuzzed(name: str, num: int, folder: Path) -> float:
    """Seconds of the longest one."""
    maker = PARSERS[name]
    parser, draw = maker(folder) if maker in ON_DISK else maker(), random.Random(name)
    drawn_positions.cache_clear()  # a message of another seed draws anew
    with PeakBytes() as honest:
        for message in parser.honest:
            parser.take(message)
    size = max(len(m) if isinstance(m, bytes) else sum(p.nbytes for p in m) for m in parser.honest)
    longest_s, num_refused = 0.0, 0
    for _ in range(num):
        message = draw.choice(parser.honest)
        if isinstance(message, bytes):
            other: bytes | Tensors = damaged_bytes(message, draw)
        else:
            other = damaged_tensors(message, draw)
        started_s = time.perf_counter()
        with PeakBytes() as peak:
            try:
                parser.take(other)
            except (FrameError, ConfigError, XcloudError):
                num_refused += 1
        longest_s = max(longest_s, time.perf_counter() - started_s)
        assert peak.peak <= 2 * (honest.peak + size) + 4096, (name, peak.peak, honest.peak)
    assert num_refused or name == "reports"  # which refuses line by line
    return longest_s


@pytest.mark.parametrize("name", PARSERS)
def test_a_damaged_message_is_taken_or_refused_and_nothing_else(name: str, tmp_path: Path) -> None:
    fuzzed(name, FEW, tmp_path)


def test_ten_thousand_damaged_greetings_are_taken_or_refused() -> None:
    """Strangers with a certificate come this far, so that each night is not often enough."""
    parser = PARSERS["greetings"]()
    draw = random.Random(1)
    num_refused = 0
    for _ in range(10_000):
        try:
            parser.take(damaged_bytes(draw.choice(parser.honest), draw))
        except FrameError:
            num_refused += 1
    assert num_refused > 5_000


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", PARSERS)
def test_a_hundred_thousand_damaged_messages_are_taken_or_refused(
    name: str, tmp_path: Path
) -> None:
    assert fuzzed(name, MANY, tmp_path) < LONGEST_S

"""Token ids on the wire: exact, small, and safe against bytes that nobody packed."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xcloud.base.errors import ConfigError, FrameError
from xcloud.comm.ids import (
    HEADER_BYTES,
    CorruptedTexts,
    IdPacking,
    Reader,
    decode_ascending,
    decode_ids,
    encode_ascending,
    encode_ids,
)

XLM_R = 250_002


def zipf_texts(
    num: int, length: int, vocab: int, replaced: float, seed: int = 0
) -> CorruptedTexts:
    """Ids whose frequency falls with 1/rank, spread over the vocabulary."""
    draw = np.random.default_rng(seed)
    words = draw.permutation(vocab)[:20_000]
    chance = 1 / np.arange(1, len(words) + 1)
    counts = draw.integers(length // 2, length + 1, num)
    ids = draw.choice(words, int(counts.sum()), p=chance / chance.sum())
    flags = draw.random(len(ids)) < replaced
    return CorruptedTexts(torch.tensor(ids), torch.tensor(counts), torch.tensor(flags))


def assert_equal(got: CorruptedTexts, wanted: CorruptedTexts) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype


@st.composite
def any_texts(draw: st.DrawFn) -> tuple[IdPacking, CorruptedTexts]:
    vocab = draw(st.sampled_from([1, 2, 3, 255, 256, 257, 4000, XLM_R, 2**31 - 1]))
    counts = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12))
    num = sum(counts)
    few = st.integers(0, min(vocab - 1, 3))
    ids = draw(st.lists(few | st.integers(0, vocab - 1), min_size=num, max_size=num))
    flags = draw(st.lists(st.booleans(), min_size=num, max_size=num))
    coding = draw(st.sampled_from(["smallest", "fixed"]))
    packing = IdPacking(vocab, 12, 40, digest=7, coding=coding)
    return packing, CorruptedTexts(
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(counts, dtype=torch.int64),
        torch.tensor(flags, dtype=torch.bool),
    )


@settings(max_examples=60, deadline=None)
@given(any_texts())
def test_what_is_unpacked_is_what_was_packed(made: tuple[IdPacking, CorruptedTexts]) -> None:
    packing, texts = made
    payload = packing.pack(texts)

    assert payload.dtype == torch.uint8 and len(payload) <= packing.max_bytes
    assert_equal(packing.unpack(payload), texts)


@settings(max_examples=50, deadline=None)
@given(any_texts(), st.data())
def test_damaged_bytes_are_refused_or_mean_something_valid(
    made: tuple[IdPacking, CorruptedTexts], data: st.DataObject
) -> None:
    packing, texts = made
    payload = packing.pack(texts)
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, 3))
    payload = payload[: len(payload) - cut]
    try:
        got = packing.unpack(payload)
    except FrameError:
        return
    assert len(got.counts_B) <= packing.max_samples
    assert int(got.counts_B.sum()) == len(got.ids_R) == len(got.replaced_R)
    assert not len(got.ids_R) or 0 <= int(got.ids_R.min()) <= int(got.ids_R.max()) < (
        packing.vocab_size
    )


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_behind_a_good_header_end_in_an_error_or_in_ids(tail: bytes) -> None:
    packing = IdPacking(1000, 4, 50, digest=1)
    header = packing.pack(zipf_texts(4, 40, 1000, 0.2))[:HEADER_BYTES]
    try:
        packing.unpack(torch.cat((header, torch.tensor(list(tail), dtype=torch.uint8))))
    except FrameError:
        pass


@pytest.mark.parametrize("place", range(HEADER_BYTES))
def test_every_byte_of_the_header_counts(place: int) -> None:
    packing = IdPacking(XLM_R, 8, 64)
    payload = packing.pack(zipf_texts(8, 64, XLM_R, 0.1))
    payload[place] += 77
    with pytest.raises(FrameError):
        packing.unpack(payload)


def test_an_id_at_fixed_width_takes_18_bits_of_the_multilingual_vocabulary() -> None:
    texts = zipf_texts(64, 128, XLM_R, 0.0)
    packing = IdPacking(XLM_R, 64, 128, coding="fixed")
    num = len(texts.ids_R)
    overhead = 8 * HEADER_BYTES + 64 * 7 + 3 * 8

    assert packing.bits == 18
    assert 18 * num <= 8 * len(packing.pack(texts)) <= 18 * num + overhead


def test_ranked_ids_come_near_the_entropy_of_the_message() -> None:
    texts = zipf_texts(256, 128, XLM_R, 0.1)
    num = len(texts.ids_R)
    counts = np.unique(texts.ids_R.numpy(), return_counts=True)[1]
    entropy = float(-(counts / num * np.log2(counts / num)).sum())
    bits = 8 * len(encode_ids(texts.ids_R.numpy(), XLM_R)) / num

    assert bits < 18 * 0.85
    assert bits < entropy + 4.2  # the dictionary and the rare ids stand in no entropy
    smallest = IdPacking(XLM_R, 256, 128).pack(texts)
    fixed = IdPacking(XLM_R, 256, 128, coding="fixed").pack(texts)
    assert len(smallest) < 0.85 * len(fixed)


def test_random_ids_are_never_larger_than_at_fixed_width() -> None:
    ids = torch.randint(XLM_R, (4096,), generator=torch.Generator().manual_seed(0))
    texts = CorruptedTexts(ids, torch.tensor([4096]), torch.ones(4096, dtype=torch.bool))
    sizes = [
        len(IdPacking(XLM_R, 1, 4096, coding=coding).pack(texts))
        for coding in ("smallest", "fixed")
    ]
    assert sizes[0] <= sizes[1] <= IdPacking(XLM_R, 1, 4096).max_bytes


@pytest.mark.parametrize("chance", [0.02, 0.07, 0.12, 0.15])
def test_flags_cost_little_more_than_their_entropy(chance: float) -> None:
    flags = np.random.default_rng(0).random(50_000) < chance
    places = np.flatnonzero(flags)
    bits = 8 * len(encode_ascending(places, len(flags))) / len(flags)
    p = flags.mean()
    entropy = -p * math.log2(p) - (1 - p) * math.log2(1 - p)

    assert entropy * 0.99 < bits < entropy * 1.05


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 5000), max_size=200), st.integers(0, 40))
def test_ascending_numbers_come_back_and_say_how_long_they_were(
    numbers: set[int], beyond: int
) -> None:
    ascending = np.array(sorted(numbers), dtype=np.int64)
    below = max(numbers, default=0) + 1
    data = encode_ascending(ascending, below)
    more = torch.cat((data, torch.full((beyond,), 255, dtype=torch.uint8)))
    rest = Reader(more)
    got = decode_ascending(rest, len(ascending), below)

    assert np.array_equal(got, ascending)
    assert len(rest.data) == beyond


def test_a_dictionary_beyond_the_message_is_refused() -> None:
    data = encode_ids(np.arange(300, dtype=np.int64) % 50, 1000)
    data[3] = 255  # the high byte of its size
    with pytest.raises(FrameError, match="dictionary of"):
        decode_ids(Reader(data), 300, 1000)


def test_classes_that_inflate_without_end_are_cut_off() -> None:
    import zlib

    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = squeeze.compress(bytes(50_000_000)) + squeeze.flush()
    head = np.array([0, len(bomb)], dtype="<u4").tobytes()
    data = torch.frombuffer(bytearray(head + bomb), dtype=torch.uint8)
    with pytest.raises(FrameError, match="101 classes arrived for 100 tokens"):
        decode_ids(Reader(data), 100, 1000)


def test_another_vocabulary_is_refused_in_words() -> None:
    payload = IdPacking(1000, 8, 64, digest=1).pack(zipf_texts(8, 64, 1000, 0.1))
    with pytest.raises(FrameError, match="All clouds need one tokenizer"):
        IdPacking(1000, 8, 64, digest=2).unpack(payload)


def test_a_sender_may_not_exceed_what_was_agreed() -> None:
    texts = zipf_texts(8, 64, 1000, 0.1)
    for packing in (IdPacking(1000, 7, 64), IdPacking(1000, 8, 31), IdPacking(10, 8, 64)):
        with pytest.raises(ValueError, match=r"allowed are|ids must be"):
            packing.pack(texts)
    with pytest.raises(ConfigError, match=r"IdPacking\.coding must be one of smallest, fixed"):
        IdPacking(10, 1, 1, coding="gzip")  # type: ignore[arg-type]

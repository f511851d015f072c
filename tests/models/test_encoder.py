"""Our BERT-type network: packed rows, pooling, the way to the head, and three kinds of answers."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.translation_models import IDS, padded, texts
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.model import Head
from xcloud.models.encoder import Cache, Encoder, EncoderConfig, Layer, Packing
from xcloud.models.low_rank_split import way_to_head
from xcloud.models.stages import SampleHead, SpanHead, pool, seed_of, seeded
from xcloud.rank.peak_bytes import PeakBytes

CONFIG = EncoderConfig(
    vocab_size=IDS.size, hidden=16, num_layers=3, num_heads=2, feed_forward=32, max_positions=16
)


def encoder(**changes: object) -> Encoder:
    with seeded(0, "test"):
        return Encoder(CONFIG, **changes).eval()  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_unpacking_puts_each_row_back_into_its_sample(counts: list[int]) -> None:
    grid = torch.arange(len(counts) * 8).view(len(counts), 8)
    packing = Packing(torch.tensor(counts, dtype=torch.int16))

    rows = packing.pack(grid)
    assert rows.tolist() == [int(grid[i, j]) for i, n in enumerate(counts) for j in range(n)]
    assert packing.positions.tolist() == [j for n in counts for j in range(n)]
    again = packing.unpack(rows)
    assert again.shape == (len(counts), max(counts))
    for line, whole, count in zip(again, grid, counts, strict=True):
        assert line[:count].tolist() == whole[:count].tolist()


def test_a_sample_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no token"):
        Packing(torch.tensor([2, 0]))


@pytest.mark.parametrize("causal", [False, True])
def test_padding_changes_nothing(causal: bool) -> None:
    """Each text alone gives the same rows as in a padded batch, gradients too."""
    network, lines = encoder(), texts(4)
    ids = padded(lines)
    packing = Packing.of(ids, IDS.pad)
    assert packing.mask is not None
    together = network(packing.pack(ids), packing, causal=causal)
    weight = torch.randn(16, generator=torch.Generator().manual_seed(1))
    (together @ weight).sin().sum().backward()
    whole = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}

    alone_network = encoder()
    alone = []
    for line in lines:
        one = padded([line])
        alone.append(alone_network(one[0], Packing.of(one, IDS.pad), causal=causal))
    torch.testing.assert_close(together, torch.cat(alone))
    (torch.cat(alone) @ weight).sin().sum().backward()
    for name, p in alone_network.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(whole[name], p.grad, msg=name)


def test_only_the_causal_network_ignores_what_comes_later() -> None:
    ids = padded([[5, 6, 7, 8]])
    changed = ids.clone()
    changed[0, 4] = 9
    packing = Packing.of(ids, IDS.pad)
    for causal in (True, False):
        before = encoder()(ids[0], packing, causal=causal)
        after = encoder()(changed[0], packing, causal=causal)
        same = (before[:4] == after[:4]).all(1)
        assert same.all() if causal else not same.any()
        assert (before[4] != after[4]).any()


def test_step_by_step_equals_the_whole_causal_text() -> None:
    network = encoder()
    ids = torch.randint(4, IDS.size, (3, 7))
    packing = Packing(torch.full((3,), 7))
    whole = packing.unpack(network(packing.pack(ids), packing, causal=True))
    caches = [Cache(decodes=True) for _ in range(CONFIG.num_layers)]
    assert network.embeddings is not None
    for position in range(7):
        new = Packing(torch.ones(3, dtype=torch.int64), torch.full((3,), position))
        rows = network.embeddings(ids[:, position], new)
        for index, cache in enumerate(caches):
            rows = network.layer(index)(rows, new, cache)
        torch.testing.assert_close(rows, whole[:, position])


def test_cut_anywhere_the_parts_are_the_whole() -> None:
    whole = encoder()
    ids = padded(texts(3))
    packing = Packing.of(ids, IDS.pad)
    expected = whole.logits(whole(packing.pack(ids), packing))
    for cut in range(CONFIG.num_layers + 1):
        low = Encoder(CONFIG, range(cut), head=False).eval()
        high = Encoder(CONFIG, range(cut, CONFIG.num_layers), embeddings=False).eval()
        low.load_part(whole.state_dict())
        high.load_part(whole.state_dict())
        assert not set(low.state_dict()) & set(high.state_dict())
        rows = low(packing.pack(ids), packing)
        for index in range(cut, CONFIG.num_layers):
            rows = high.layer(index)(rows, packing)
        assert high.head is not None and low.embeddings is not None
        assert torch.equal(high.head(rows, low.embeddings.words.weight), expected)


def test_types_are_added_to_the_words() -> None:
    network = encoder()
    ids = padded([[5, 6]])
    packing = Packing.of(ids, IDS.pad)
    zeros = torch.zeros(4, dtype=torch.long)
    assert torch.equal(network(ids[0], packing), network(ids[0], packing, zeros))
    assert network.embeddings is not None
    with torch.no_grad():
        network.embeddings.types.weight[0, 0] += 1
    assert not torch.equal(encoder()(ids[0], packing), network(ids[0], packing))


def test_start_weights_do_not_disturb_the_callers_random_stream() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, second = encoder(), encoder()
    assert torch.equal(torch.rand(2), expected)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])
    assert len({seed_of(0, "a"), seed_of(1, "a"), seed_of(0, "b"), seed_of(0, "a", 1)}) == 4


def test_a_state_dict_can_be_saved_by_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    network = encoder()
    save_file(network.state_dict(), tmp_path / "x.safetensors")
    other = Encoder(CONFIG)
    other.load_state_dict(load_file(tmp_path / "x.safetensors"))
    assert torch.equal(other.layer(2).up.weight, network.layer(2).up.weight)


def test_weights_that_lack_something_are_refused() -> None:
    weights = encoder().state_dict()
    del weights["layers.1.up.bias"]
    with pytest.raises(DataError, match=r"no weights for layers\.1\.up\.bias"):
        Encoder(CONFIG).load_part(weights)


def test_a_text_longer_than_the_positions_is_refused() -> None:
    ids = padded([[5] * 20])
    with pytest.raises(ValueError, match="22 tokens; this network supports at most 16"):
        encoder()(ids[0], Packing.of(ids, IDS.pad))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": "many"}, "hidden must be 1..131072, got 'many'"),
        ({"num_layers": 0}, "num_layers must be"),
        ({"num_heads": 3}, "num_heads must divide the hidden size 16, got 3"),
        (
            {"activation": "tanh"},
            "activation must be one of gelu, gelu_new, .* relu, got 'tanh'",
        ),
        ({"dropout": 1.5}, "dropout must be a number"),
    ],
)
def test_settings_are_checked_when_given(change: dict[str, object], words: str) -> None:
    settings = {"vocab_size": 8, "hidden": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ConfigError, match=words):
        EncoderConfig(**(settings | {"feed_forward": 32, "max_positions": 8} | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("crosses", [False, True])
def test_a_layer_adds_to_its_rows_what_attention_and_feed_forward_give(crosses: bool) -> None:
    with seeded(0, "test"):
        layer = Layer(16, num_heads=2, feed_forward=32, dropout=0.0, crosses=crosses)
        rows = torch.randn(5, 16)
        source = torch.randn(2, 2, 2, 4, 8)
    packing = Packing(torch.tensor([3, 2]))
    cache = Cache(source=source) if crosses else None
    got = layer(rows, packing, cache)
    rows = rows + layer.attention(layer.attention_norm(rows), packing, cache)
    if crosses:
        rows = rows + layer.cross(layer.cross_norm(rows), packing, cache)
    assert torch.equal(got, rows + layer.feed(layer.feed_norm(rows)))


COUNTS = torch.tensor([4, 1, 3])
PACKING = Packing(COUNTS)
STARTS = [0, 4, 5]


def test_a_sample_is_its_first_row_or_their_mean() -> None:
    rows = torch.randn(8, 6)
    parts = rows.split(COUNTS.tolist())

    assert torch.equal(pool(rows, PACKING, "first"), rows[STARTS])
    torch.testing.assert_close(
        pool(rows, PACKING, "mean"), torch.stack([part.mean(0) for part in parts])
    )


def test_the_way_to_the_head_is_an_identity_path_of_its_rank() -> None:
    down, up = way_to_head(10, 4, 7)
    rows = torch.randn(5, 10)
    kept = up(down(rows))

    torch.testing.assert_close(up(down(kept)), kept)  # a projection
    assert torch.linalg.matrix_rank(kept) == 4
    assert not torch.equal(way_to_head(10, 4, 8)[0].weight, down.weight)


def test_losses_are_sums_over_samples() -> None:
    rows = torch.randn(3, 6)
    classes = SampleHead(6, Head("classes", 4), 0.0, 1, None)
    label = torch.tensor([0, 3, 1])
    expected = sum(F.cross_entropy(classes(rows)[i], label[i]) for i in range(3))
    torch.testing.assert_close(classes.loss(classes(rows), label, None), expected)
    value = SampleHead(6, Head("value", 1), 0.0, 1, None)
    wanted = torch.tensor([0.5, 2.0, -1.0])
    torch.testing.assert_close(
        value.loss(value(rows), wanted, None), (value(rows)[:, 0] - wanted).square().sum()
    )


def test_predictions_are_whole_numbers() -> None:
    head = SampleHead(6, Head("value", 1), 0.0, 1, None)
    assert head.predict(torch.tensor([[0.1234567], [-2.0]]), COUNTS, None) == [
        [123457],
        [-2000000],
    ]
    head = SampleHead(6, Head("classes", 3), 0.0, 1, None)
    assert head.predict(torch.tensor([[0.0, 2.0, 1.0]]), COUNTS, None) == [[1]]


def test_a_checkpoint_gives_the_pooler() -> None:
    given = {"weight": torch.randn(6, 6), "bias": torch.randn(6)}
    head = SampleHead(6, Head("classes", 2), 0.0, 1, given)
    assert torch.equal(head.dense.weight, given["weight"])


def test_the_loss_of_a_span_knows_no_padding() -> None:
    head = SpanHead(6, 30, 1)
    scores = torch.randn(8, 2)
    label = torch.tensor([[1, 2, 1], [0, 0, 0], [0, 2, 0]])
    expected = 0.0
    for part, (first, last, _) in zip(scores.split(COUNTS.tolist()), label, strict=True):
        expected += F.cross_entropy(part[:, 0], first) / 2 + F.cross_entropy(part[:, 1], last) / 2
    torch.testing.assert_close(head.loss(scores, label, PACKING), torch.as_tensor(expected))
    gradient = torch.autograd.grad(head.loss(scores.requires_grad_(), label, PACKING), scores)[0]
    assert gradient.isfinite().all()


def test_spans_of_a_long_batch_are_compared_sample_by_sample() -> None:
    head, packing = SpanHead(6, 30, 1), Packing(torch.full((16,), 400))
    label = torch.zeros(16, 3, dtype=torch.int64)
    with PeakBytes() as memory:
        head.predict(torch.randn(16 * 400, 2), label, packing)
    assert memory.peak < 6 * 4 * 400**2, "a few grids of one sample, not those of 16"


@pytest.mark.parametrize("longest", [1, 2, 30])
def test_a_span_is_the_best_that_is_allowed(longest: int) -> None:
    head = SpanHead(6, longest, 1)
    counts = torch.tensor([9, 6])
    packing = Packing(counts)
    label = torch.tensor([[0, 0, 3], [0, 0, 1]])
    draw = torch.Generator().manual_seed(3)
    for _ in range(20):
        scores = torch.randn(15, 2, generator=draw)
        found = head.predict(scores, label, packing)
        for part, allowed_from, answer in zip(
            scores.split(counts.tolist()), (3, 1), found, strict=True
        ):
            spans = {
                (i, j): float(part[i, 0] + part[j, 1])
                for i in range(allowed_from, len(part) - 1)
                for j in range(i, min(i + longest, len(part) - 1))
            }
            best = max(spans, key=lambda span: spans[span])
            assert (answer[0], answer[1]) == best
            assert answer[2] == pytest.approx(1e4 * spans[best], abs=1)

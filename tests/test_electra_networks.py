"""ELECTRA's networks: who is masked, what is sampled, which rows are scored."""

import pytest
import torch

from tests.translation_models import FIRST_WORD, IDS
from xcloud.comm.ids import CorruptedTexts
from xcloud.contracts.model import TokenIds
from xcloud.models.electra.parts import (
    Discriminator,
    corrupt,
    detect_replaced,
    inner_rows,
    sample_words,
    with_ends,
)
from xcloud.models.encoder import Encoder, EncoderConfig, Packing
from xcloud.models.pretraining import LONGEST_WORD, choose_masked
from xcloud.models.stages import seeded

CONFIG = EncoderConfig(IDS.size, 16, 1, 2, 32, max_positions=32, dropout=0.0)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_fifteen_percent_of_the_tokens_are_masked_and_never_a_special_one() -> None:
    ids = TokenIds(10_000, pad=0, bos=1, eos=2, mask=3)
    words = torch.randint(FIRST_WORD, ids.size, (100_000,), generator=draws())
    words[::10], words[9::10] = ids.bos, ids.eos
    masked = choose_masked(words, ids, 0.15, draws())

    assert len(masked) / 80_000 == pytest.approx(0.15, abs=0.005)
    assert (words[masked] >= FIRST_WORD).all()
    assert torch.equal(masked, masked.sort().values)


def test_a_word_is_masked_whole_or_not_at_all() -> None:
    ids = TokenIds(100, pad=0, bos=1, eos=2, mask=3)
    starts = torch.arange(100) % 3 == 0  # ids 6, 9, … begin a word
    words = torch.randint(FIRST_WORD, 100, (50_000,), generator=draws())
    words[::20], words[19::20] = ids.bos, ids.eos
    masked = torch.zeros(len(words), dtype=torch.bool)
    masked[choose_masked(words, ids, 0.15, draws(), starts)] = True

    assert masked.sum() / 45_000 == pytest.approx(0.15, abs=0.01)
    inside = ~starts[words] & (words >= FIRST_WORD)
    inside[0] = False
    follows = inside & (words.roll(1) >= FIRST_WORD)  # continues the token before it
    assert torch.equal(masked[follows], masked.roll(1)[follows])
    assert (masked & ~masked.roll(1) & inside & follows).sum() == 0


def test_a_text_without_a_boundary_is_masked_in_parts() -> None:
    ids = TokenIds(100, pad=0, bos=1, eos=2, mask=3)
    words = torch.full((400 * LONGEST_WORD + 5,), 7)
    words[0], words[-1] = ids.bos, ids.eos
    masked = torch.zeros(len(words), dtype=torch.bool)
    masked[choose_masked(words, ids, 0.3, draws(), torch.zeros(100, dtype=torch.bool))] = True
    parts = masked[1:-1].split(LONGEST_WORD)

    assert all(part.all() or not part.any() for part in parts)
    assert sum(bool(part[0]) for part in parts) / len(parts) == pytest.approx(0.3, abs=0.08)


def test_a_word_of_the_longest_length_is_one() -> None:
    ids = TokenIds(100, pad=0, bos=1, eos=2, mask=3)
    starts = torch.arange(100) == 9
    words = torch.full((10 * LONGEST_WORD,), 7)
    words[::LONGEST_WORD] = 9
    masked = torch.zeros(len(words), dtype=torch.bool)
    masked[choose_masked(words, ids, 0.5, draws(), starts)] = True

    chances = torch.rand(10, generator=draws())  # one draw for each word, as without a limit
    assert torch.equal(masked, (chances < 0.5).repeat_interleave(LONGEST_WORD))


def test_the_shortest_text_has_a_mask() -> None:
    ids_R = torch.tensor([IDS.bos, 7, IDS.eos])
    assert choose_masked(ids_R, IDS, 0.01, draws()).tolist() == [1]


def test_words_are_drawn_by_their_chances_at_a_temperature() -> None:
    scores = torch.full((1, IDS.size), -20.0)
    scores[0, [5, 9]] = torch.tensor([0.0, 1.0])
    scores[0, [IDS.pad, IDS.bos, IDS.eos, IDS.mask]] = 50.0  # wanted, but never drawn
    for temperature in (1.0, 0.5):
        words = sample_words(scores.expand(20_000, -1), IDS, temperature, draws())
        chance = torch.sigmoid(torch.tensor(1.0 / temperature)).item()
        assert set(words.tolist()) == {5, 9}
        assert (words == 9).float().mean().item() == pytest.approx(chance, abs=0.02)


def test_ids_that_the_tokenizer_lacks_are_never_drawn() -> None:
    wide = torch.zeros(50_000, IDS.size + 8)
    words = sample_words(wide, IDS, 1.0, draws())

    assert set(words.tolist()) == set(range(FIRST_WORD, IDS.size))


def test_words_drawn_in_pieces_are_those_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(50, IDS.size, generator=draws(1))
    at_once = sample_words(scores, IDS, 1.0, draws())
    monkeypatch.setattr("xcloud.models.electra.parts.SAMPLED_TOGETHER", 3 * IDS.size)

    assert torch.equal(sample_words(scores, IDS, 1.0, draws()), at_once)


def test_a_word_drawn_right_is_not_replaced_and_the_rest_is_left_alone() -> None:
    with seeded(0, "test"):
        generator = Encoder(CONFIG)
    counts = torch.tensor([9, 9, 6])
    ids_R = torch.randint(FIRST_WORD, IDS.size, (24,), generator=draws())
    masked = torch.tensor([2, 5, 12, 20])
    made_R, _ = corrupt(generator, ids_R, Packing(counts), masked, IDS, 1.0, draws())
    sure = torch.full((IDS.size,), -100.0)
    sure[ids_R[2]] = 100.0

    assert set((made_R != ids_R).nonzero()[:, 0].tolist()) <= set(masked.tolist())
    generator.head.bias.data = sure  # type: ignore[union-attr]
    made_R, loss = corrupt(generator, ids_R, Packing(counts), masked[:1], IDS, 1.0, draws())
    assert torch.equal(made_R, ids_R)
    assert float(loss.detach()) == pytest.approx(0, abs=1e-3)


def test_ends_come_off_and_go_on_again() -> None:
    counts_B = torch.tensor([3, 1, 4])
    ids_C = torch.arange(FIRST_WORD, FIRST_WORD + 8)
    ids_R, inner_C = with_ends(ids_C, counts_B, IDS)

    b, e = IDS.bos, IDS.eos
    assert ids_R.tolist() == [b, 4, 5, 6, e, b, 7, e, b, 8, 9, 10, 11, e]
    assert torch.equal(inner_C, inner_rows(counts_B + 2))
    assert torch.equal(ids_R[inner_C], ids_C)


def test_the_counts_are_those_of_the_scores() -> None:
    with seeded(0, "test"):
        network = Discriminator(CONFIG)
    counts_B = torch.tensor([5, 7])
    ids_C = torch.randint(FIRST_WORD, IDS.size, (12,), generator=draws())
    texts = CorruptedTexts(ids_C, counts_B, torch.arange(12) % 3 == 0)
    for bias, expected in ((100.0, (4, 8, 0)), (-100.0, (0, 0, 4))):
        network.score.bias.data.fill_(bias)
        loss, counts = detect_replaced(network, texts, IDS)
        assert tuple(counts) == expected
    assert float(loss.detach()) == pytest.approx(400, rel=0.05)  # 4 tokens, each 100 nats wrong

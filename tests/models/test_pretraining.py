"""Masked language modelling of our own backbones."""

import math
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nightly import first_daily
from tests.translation_models import FIRST_WORD, IDS, texts
from xcloud.base.errors import ConfigError, DataError
from xcloud.models import pretraining
from xcloud.models.encoder import Encoder, EncoderConfig, Packing
from xcloud.models.pretraining import MaskedLanguageModelling, mask_tokens, pretrain
from xcloud.models.stages import seeded

CONFIG = EncoderConfig(
    vocab_size=IDS.size,
    hidden=32,
    num_layers=2,
    num_heads=2,
    feed_forward=64,
    max_positions=16,
    dropout=0.0,
)


def counting_texts(num: int) -> list[list[int]]:
    """Each word is the one before plus one: a masked word follows from its neighbours."""
    draw = torch.Generator().manual_seed(0)
    words = IDS.size - FIRST_WORD
    starts = torch.randint(words, (num,), generator=draw).tolist()
    lengths = torch.randint(5, 12, (num,), generator=draw).tolist()
    return [
        [FIRST_WORD + (start + i) % words for i in range(length)]
        for start, length in zip(starts, lengths, strict=True)
    ]


def fresh(config: EncoderConfig = CONFIG) -> Encoder:
    with seeded(0, "test"):
        return Encoder(config)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_held_out_loss_falls_far_below_the_unigram_baseline(tmp_path: Path) -> None:
    sentences = counting_texts(300)
    counts = Counter(word for sentence in sentences for word in sentence)
    total = counts.total()
    unigram = -sum(n / total * math.log(n / total) for n in counts.values())
    settings = MaskedLanguageModelling(
        steps=250, batch_tokens=512, learning_rate=5e-3, warmup_steps=20, held_out_share=0.2
    )
    before = pretraining.evaluate(
        fresh(), [torch.tensor([IDS.bos, *s, IDS.eos]) for s in sentences], IDS, settings
    )
    score = pretrain(fresh(), sentences, IDS, settings, lambda line: None, tmp_path)
    assert before.loss > 0.95 * unigram
    assert score.loss < 0.3 * unigram
    assert score.accuracy > 0.8


def test_the_result_depends_on_the_seed_and_not_on_reports_or_the_callers_randomness(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = EncoderConfig(**(vars(CONFIG) | {"dropout": 0.1}))

    def weights(seed: int) -> dict[str, torch.Tensor]:
        torch.rand(1)
        network = fresh(config)
        settings = MaskedLanguageModelling(steps=6, batch_tokens=64, warmup_steps=2, seed=seed)
        pretrain(network, texts(30), IDS, settings, lines.append, tmp_path)
        return network.state_dict()

    lines: list[str] = []
    quiet, other = weights(0), weights(1)
    assert lines == 2 * [
        "on 30 texts: 6 steps, 2.0 passes over them; for fewer pretraining.steps=N"
    ]
    lines.clear()
    monkeypatch.setattr(pretraining, "FIRST_REPORT_S", 0.0)
    monkeypatch.setattr(pretraining, "REPORT_EVERY_S", 0.0)
    talking = weights(0)
    assert len(lines) == 6  # the first step is no measure of the others
    assert lines[-1].startswith("step 6/6, about 0 s left, held-out loss ")
    assert all(torch.equal(quiet[name], talking[name]) for name in quiet)
    assert not torch.equal(quiet["layers.0.up.weight"], other["layers.0.up.weight"])


class Killed(Exception):
    pass


@pytest.mark.parametrize("kept", first_daily([{}, {"max_epochs": 50}], 1), ids=["last", "best"])
def test_an_interrupted_pretraining_ends_with_the_bits_of_an_undisturbed_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: dict[str, int]
) -> None:
    monkeypatch.setattr(pretraining, "SAVE_EVERY_S", 0.0)
    config = EncoderConfig(**(vars(CONFIG) | {"dropout": 0.1}))
    settings = MaskedLanguageModelling(
        steps=24, batch_tokens=64, warmup_steps=2, causal_share=0.4, held_out_share=0.1, **kept
    )
    num_steps, lines = 0, list[str]()

    def pretrained(folder: Path, most: int) -> dict[str, torch.Tensor]:
        network = fresh(config)
        ahead, num = pretraining.loss_and_hits, 0

        def counted(encoder: Encoder, batch: pretraining.Guesses) -> object:
            nonlocal num, num_steps
            if encoder.training:
                if num == most:
                    raise Killed
                num, num_steps = num + 1, num_steps + 1
            return ahead(encoder, batch)

        with monkeypatch.context() as patch:
            patch.setattr(pretraining, "loss_and_hits", counted)
            pretrain(network, texts(60), IDS, settings, lines.append, folder)
        return network.state_dict()

    undisturbed = pretrained(tmp_path / "undisturbed", 99)
    num_steps = 0
    for most in (7, 9):
        with pytest.raises(Killed):
            pretrained(tmp_path / "interrupted", most)
    went_on = pretrained(tmp_path / "interrupted", 99)
    assert "resumed after step 7 of 24, where it was interrupted" in lines
    assert "resumed after step 16 of 24, where it was interrupted" in lines
    assert num_steps == 24
    assert all(torch.equal(undisturbed[name], went_on[name]) for name in undisturbed)


def test_steps_follow_the_size_of_the_corpus_and_the_best_weights_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines, losses = list[str](), list[float]()
    settings = MaskedLanguageModelling(
        steps=5000, batch_tokens=64, warmup_steps=500, learning_rate=1e-2, max_epochs=40
    )
    judged = pretraining.evaluate

    def noted(*given: Any) -> pretraining.HeldOutScore:
        score = judged(*given)
        losses.append(score.loss)
        return score

    monkeypatch.setattr(pretraining, "evaluate", noted)
    score = pretrain(
        fresh(), texts(40), IDS, settings, lines.append, tmp_path
    )  # noise: cannot be learned
    passes = losses[:-1]
    a_pass = int(lines[0].split(": ")[1].split()[0]) // 40
    assert 0 < a_pass < 10 and lines[0].endswith("40.0 passes over them; for fewer "
                                                 "pretraining.max_epochs=N")  # fmt: skip
    assert lines[-1] == f"ends at step {a_pass * len(passes)}: the held-out loss rises"
    best = min(passes)
    assert passes.index(best) == len(passes) - 1 - pretraining.PATIENCE
    assert score.loss == best < passes[-1]


def test_weight_decay_spares_biases_and_norms(tmp_path: Path) -> None:
    def weights(weight_decay: float) -> dict[str, torch.Tensor]:
        network = fresh()
        settings = MaskedLanguageModelling(steps=1, warmup_steps=0, weight_decay=weight_decay)
        pretrain(network, texts(30), IDS, settings, lambda line: None, tmp_path)
        return {name: value.detach() for name, value in network.named_parameters()}

    without, strong = weights(0.0), weights(1.0)
    assert all(
        torch.equal(without[name], strong[name]) == (strong[name].ndim < 2) for name in without
    )


def test_masks_are_15_percent_and_of_these_80_10_10() -> None:
    draw = torch.Generator().manual_seed(0)
    ids = type(IDS)(size=10_000, pad=0, bos=1, eos=2, mask=3)
    truth = torch.randint(FIRST_WORD, ids.size, (100_000,), generator=draw)
    truth[::10], truth[9::10] = ids.bos, ids.eos
    seen, masked = mask_tokens(truth, ids, 0.15, draw)

    assert len(masked) / 80_000 == pytest.approx(0.15, abs=0.005)
    untouched = torch.ones(len(truth), dtype=torch.bool)
    untouched[masked] = False
    assert torch.equal(seen[untouched], truth[untouched])
    assert not {ids.bos, ids.eos} & set(truth[masked].tolist())
    is_mask, stays = seen[masked] == ids.mask, seen[masked] == truth[masked]
    assert is_mask.float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert stays.float().mean().item() == pytest.approx(0.1, abs=0.02)


def test_even_the_shortest_text_has_something_to_guess() -> None:
    truth = torch.tensor([IDS.bos, 7, IDS.eos])
    draw = torch.Generator().manual_seed(0)
    assert all(mask_tokens(truth, IDS, 0.01, draw)[1].tolist() == [1] for _ in range(20))


def test_batches_hold_every_text_once_in_an_epoch_and_no_more_than_their_tokens() -> None:
    lines = [torch.tensor(line) for line in texts(100)]
    draw = torch.Generator().manual_seed(0)
    batches = pretraining.batches_of(lines, 40, draw)
    seen: list[int] = []
    while len(seen) < len(lines):
        batch = next(batches)
        assert sum(map(len, batch)) <= 40
        assert max(map(len, batch)) - min(map(len, batch)) <= 3
        seen += [id(text) for text in batch]
    assert sorted(seen) == sorted(id(text) for text in lines)


@pytest.mark.parametrize(
    ("share", "num_texts", "expected"), [(0.1, 30, 3), (0.5, 12, 4), (0.02, 30, 1)]
)
def test_a_share_of_the_texts_is_held_out_at_least_one_and_no_more_than_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, share: float, num_texts: int, expected: int
) -> None:
    held_out: list[int] = []
    judged = pretraining.evaluate

    def noted(encoder: Encoder, texts: Any, *given: Any) -> pretraining.HeldOutScore:
        held_out.append(len(texts))
        return judged(encoder, texts, *given)

    monkeypatch.setattr(pretraining, "evaluate", noted)
    monkeypatch.setattr(pretraining, "MAX_HELD_OUT", 4)
    settings = MaskedLanguageModelling(
        steps=1, batch_tokens=64, warmup_steps=0, held_out_share=share
    )
    pretrain(fresh(), texts(num_texts), IDS, settings, lambda line: None, tmp_path)
    assert set(held_out) == {expected}


def test_no_sentences_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 sentences or more, got 1"):
        pretrain(
            fresh(), [[5], [], []], IDS, MaskedLanguageModelling(), lambda line: None, tmp_path
        )


def test_the_learning_rate_warms_up_and_decays() -> None:
    settings = MaskedLanguageModelling(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [settings.learning_rate_at(step) for step in range(100)]
    assert rates.index(max(rates)) == 10 and max(rates) == 1.0
    assert 0 < rates[0] < 0.1 and 0 < rates[-1] < 0.02


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": "lots"}, "steps must be a whole number >= 0, got 'lots'"),
        ({"learning_rate": 0}, "learning_rate must be a number"),
        ({"mask_share": 1.5}, "mask_share must be a number"),
        ({"seed": None}, "seed must be"),
    ],
)
def test_settings_are_checked_when_given(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=f"MaskedLanguageModelling.{words}"):
        MaskedLanguageModelling(**change)  # type: ignore[arg-type]


def test_settings_at_the_edge_of_what_is_allowed_are_taken_as_given() -> None:
    least = MaskedLanguageModelling(steps=0, learning_rate=1e-9, mask_share=0.9, seed=0)
    assert (least.steps, least.learning_rate, least.mask_share, least.seed) == (0, 1e-9, 0.9, 0)


def test_a_causal_batch_predicts_every_token_from_those_before_it() -> None:
    texts = [torch.tensor([IDS.bos, 7, 8, 9, IDS.eos]), torch.tensor([IDS.bos, 9, 7, IDS.eos])]
    encoder, draw = fresh().eval(), torch.Generator().manual_seed(0)
    batch = pretraining.guesses_of(texts, IDS, 0.3, draw, causal=True)
    found, num = pretraining.loss_and_hits(encoder, batch)[0], len(batch.truth_M)

    losses = []
    for text in texts:  # each prefix by itself: what comes after it cannot matter
        for end in range(1, len(text)):
            rows = encoder(text[:end], Packing(torch.tensor([end])), causal=True)
            scores = encoder.logits(rows[-1:])
            losses.append(torch.nn.functional.cross_entropy(scores, text[end : end + 1]))
    assert num == len(losses) == 7
    torch.testing.assert_close(found, torch.stack(losses).mean(), rtol=1e-5, atol=1e-5)


def test_the_share_of_causal_batches_is_spread_evenly() -> None:
    for share in (0.0, 0.3, 0.7, 1.0):
        modes = list(islice(pretraining.evenly(share), 100))
        assert all(abs(sum(modes[i : i + 10]) - 10 * share) <= 1 for i in range(90))

"""Writing on: what is kept between tokens changes no token, and drawing follows its settings."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.causal_models import KINDS, batch_of, build, saved, through, where, words
from tests.nightly import first_daily
from xcloud import use
from xcloud.base.errors import ConfigError
from xcloud.comm.channel import Message
from xcloud.contracts.model import NO_LABEL, Batch
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Lora, positions_of
from xcloud.models.causal_stage import CausalStage
from xcloud.models.following import Choice, following


@pytest.mark.parametrize("kind", first_daily([*KINDS], count=2))
def test_kept_keys_and_values_give_the_same_tokens_with_one_row_for_each(
    tmp_path: Path, kind: str
) -> None:
    """Also past the end of a sliding window, and in stages that do not hold the first block."""
    saved(kind, tmp_path)
    model = CausalLM(checkpoint=str(tmp_path), lora=Lora(r=2), blocks_per_stage=[0, 2])
    stages = [s.eval() for s in build(model, 3, where(tmp_path)) if isinstance(s, CausalStage)]
    rows: list[int] = []

    def carry(stage: int, message: Message, batch: Batch) -> Message:
        rows.append(len(message["hidden"]))
        return message

    found = []
    for cached in (True, False):
        tokens = following(stages, carry, words(6, 1), Choice(1.0), cached)
        found.append(list(islice(tokens, 10)))
    assert found[0] == found[1] and len(set(found[0])) > 1
    whole = [n for length in range(6, 16) for n in (length, length)]
    assert rows == [6, 6] + [1, 1] * 9 + whole


def test_only_a_whole_model_writes_on_by_itself(tmp_path: Path) -> None:
    """As it would in `generate`, as far as it has positions."""
    saved("llama", tmp_path)
    whole, *_ = build(CausalLM(checkpoint=str(tmp_path), blocks_per_stage=[]), 1, where(tmp_path))
    assert isinstance(whole, CausalStage)
    whole.eval()
    asked = words(6, 1)
    expected = list(islice(following([whole], lambda _, m, batch: m, asked, Choice()), 5))
    assert list(islice(whole.follow(asked), 5)) == expected
    longest = positions_of(whole.network.config)
    assert len(list(whole.follow(words(longest - 3, 1)))) == 3
    parts = build(CausalLM(checkpoint=str(tmp_path), blocks_per_stage=[1]), 2, where(tmp_path))
    assert not any(list(islice(part.follow(asked), 1)) for part in parts)


def test_likelihoods_are_those_of_transformers_for_texts_of_unequal_length(tmp_path: Path) -> None:
    """With a vocabulary in pieces; one text is what the model itself would write."""
    network = saved("gemma2", tmp_path)
    model = CausalLM(checkpoint=str(tmp_path), blocks_per_stage=[2], embeddings="freeze")
    model = replace(model, vocabulary_chunk=7)
    stages = [s.eval() for s in build(model, 2, where(tmp_path)) if isinstance(s, CausalStage)]
    greedy = list(islice(following(stages, lambda _, m, batch: m, words(3, 1), Choice()), 4))
    texts = [words(9, 2), [*words(3, 1), *greedy], words(4, 3)]
    batch = batch_of(*([text] for text in texts))
    batch["label"][1, :2] = NO_LABEL  # only what follows the prompt counts
    found = stages[-1].likelihoods(through(stages, batch), batch)

    for text, learned, (nats, is_greedy) in zip(texts, (8, 4, 3), found, strict=True):
        with torch.no_grad():
            logits_SV = network(torch.tensor([text])).logits[0, :-1].log_softmax(1)[-learned:]
        labels = torch.tensor(text[-learned:])
        expected = logits_SV.gather(1, labels[:, None]).double().sum().item()
        assert nats == pytest.approx(expected, rel=1e-5)
        assert is_greedy == torch.equal(logits_SV.argmax(1), labels)
    assert [is_greedy for _, is_greedy in found] == [False, True, False]


def test_drawing_follows_temperature_share_and_seed() -> None:
    logits_V = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()

    def drawn(choice: Choice) -> list[int]:
        return [choice.of(logits_V) for _ in range(400)]

    assert set(drawn(Choice())) == {0}, "the most probable"
    counts = torch.tensor(drawn(Choice(1.0))).bincount() / 400
    torch.testing.assert_close(counts, logits_V.exp(), atol=0.06, rtol=0)
    assert set(drawn(Choice(1.0, top_p=0.8))) == {0, 1}
    assert set(drawn(Choice(1.0, top_p=0.81))) == {0, 1, 2}
    assert set(drawn(Choice(1.0, top_p=0.01))) == {0}
    assert drawn(Choice(0.05)).count(0) == 400, "cold"
    assert drawn(Choice(1.0, seed=3)) == drawn(Choice(1.0, seed=3)) != drawn(Choice(1.0, seed=4))


class _Letters:
    """Each id one byte of UTF-8."""

    ends = frozenset({0, 1})

    def prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], as_written: bool) -> str:
        assert as_written
        return bytes(ids).decode(errors="replace")


def test_text_comes_in_whole_characters_and_ends_with_the_end_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = use.TextGenerator.__new__(use.TextGenerator)
    config = SimpleNamespace(max_position_embeddings=99)
    last = SimpleNamespace(network=SimpleNamespace(config=config))
    generator.text, generator.stages = _Letters(), [last]
    generator.autocast = nullcontext
    monkeypatch.setattr(use, "following", lambda *given, **named: iter("dé!".encode() + b"\0rest"))

    assert list(generator.pieces("a", 50, Choice())) == ["d", "é", "!", ""]
    assert list(generator.pieces("a", 2, Choice())) == ["d", "\ufffd"], "cut by the limit"
    monkeypatch.setattr(use, "following", lambda *given, **named: iter(b"so\1rest"))
    assert list(generator.pieces("a", 50, Choice())) == ["s", "o", ""], "by the other end, too"


@pytest.mark.parametrize("kind", first_daily([*KINDS], 3))
def test_a_text_may_be_as_long_as_the_model_has_positions(tmp_path: Path, kind: str) -> None:
    """Whatever config.json calls them: n_positions in GPT-2."""
    saved(kind, tmp_path)
    generator = use.TextGenerator.__new__(use.TextGenerator)
    generator.stages = build(CausalLM(str(tmp_path)), 1, where(tmp_path))
    assert generator.longest == 32


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens must be a whole number >= 1, got 0"),
        (["--temperature", "-1"], r"--temperature must be a number in \[0, inf\), got -1"),
        (["--chats", "FILE"], "either texts to continue or --chats"),
        (["--top-p", "0"], r"--top-p must be a number in \(0, 1\] or null, got 0"),
        (["--seed", "0"], "--top-p, --seed: only with --temperature above 0"),
    ],
)
def test_wrong_options_are_named(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        use.generate(["RUN", "text", *words])

"""Multilingual ELECTRA: its networks, and a one-way job's parts."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.electra_reference import FAST, Reference, feed_context, small_electra
from tests.translation_models import FIRST_WORD, IDS
from xcloud.base.errors import ConfigError, DataError, FrameError, TrainingDiverged
from xcloud.comm.ids import CorruptedTexts, IdPacking
from xcloud.contracts.model import TokenIds
from xcloud.contracts.one_way import SUMS, Fed
from xcloud.models.backbone import PretrainedBackbone, PublicBackbone, SeededBackbone
from xcloud.models.electra.model import MultilingualElectra
from xcloud.models.electra.parts import (
    Discriminator,
    DiscriminatorSettings,
    Generator,
    corrupt,
    detect_replaced,
    inner_rows,
    sample_words,
    with_ends,
)
from xcloud.models.encoder import Encoder, EncoderConfig, Packing
from xcloud.models.pretraining import LONGEST_WORD, MaskedLanguageModelling, choose_masked
from xcloud.models.stages import seeded
from xcloud.pipeline.exchange import FlatBuffer
from xcloud.pipeline.settings import Optimizer
from xcloud.tasks.multilingual_text import MultilingualText
from xcloud.tasks.text_sources import DemoText, FolderText
from xcloud.tasks.tokenizer import FileTokenizer, PretrainedTokenizer, TrainedTokenizer

NETWORK = SeededBackbone(32, 1, 2, 64, dropout=0.1)
TEXT = MultilingualText(DemoText(400), TrainedTokenizer(400), max_length=32)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def tiny(**changes: Any) -> MultilingualElectra:
    """changes: of the Spanish generator, or of the whole where it has such a field."""
    own = {f.name for f in dataclasses.fields(MultilingualElectra)}
    whole = {name: value for name, value in changes.items() if name in own}
    spanish: dict[str, Any] = {
        "languages": ["es"], "backbone": NETWORK, "optimizer": FAST, "batch_size": 8,
        "precision": "fp32",
    }  # fmt: skip
    generators = {
        "es": Generator(**(spanish | {k: v for k, v in changes.items() if k not in own})),
        "en": Generator(["en"], backbone=NETWORK, optimizer=FAST, batch_size=4, precision="fp32"),
    }
    settings = DiscriminatorSettings(NETWORK, FAST, precision="fp32")
    return MultilingualElectra(
        **({"text": TEXT, "generators": generators, "discriminator": settings} | whole)
    )


def made_by(
    model: MultilingualElectra,
    cache_dir: Path,
    numbers: range,
    **changes: Any,
) -> list[Fed]:
    """A lone producer, which learns from its own batches."""
    context = feed_context(cache_dir, cloud="es", group_size=2, **changes)
    part = model.producer(context)
    module = part.parameters_module
    buffer = None if module is None else FlatBuffer(module.parameters())
    made = []
    for number in numbers:
        if buffer is not None:
            buffer.zero()
        made.append(part.produce(number))
        part.update(number)
    return made


def mean(steps: list[dict[str, float]], key: str) -> float:
    return sum(step[key] for step in steps) / len(steps)


def unpacked(model: MultilingualElectra, cache_dir: Path, fed: Fed) -> Any:
    part = model.consumer(feed_context(cache_dir))
    return part.packing.unpack(fed.payload)


@pytest.mark.slow
@pytest.mark.nightly
def test_learning_in_turn_tells_replaced_tokens_better_than_chance(cache_dir: Path) -> None:
    """What some seconds can teach. Of as many tokens as are replaced, those with the highest
    scores, a share as large as theirs would be right by chance.
    """
    reference = Reference(small_electra(), feed_context(cache_dir))
    steps = [reference.step() for _ in range(140)]
    first, last = steps[:5], steps[-15:]
    for generator in ("0", "1"):
        assert mean(last, generator) < 0.9 * mean(first, generator)
    share = mean(last, "true_positives") + mean(last, "false_negatives")
    share /= mean(last, "weight")
    by_share_alone = -share * math.log(share) - (1 - share) * math.log(1 - share)
    assert mean(last, "loss_sum") / mean(last, "weight") < 0.98 * by_share_alone

    network, special = reference.consumer.network, reference.consumer.tokenizer.token_ids
    right = replaced = tokens = 0
    for number in range(141, 144):
        payload = reference.producers[0].produce(number).payload
        ids_C, counts_B, replaced_C = reference.consumer.packing.unpack(payload)
        ids_R, inner_C = with_ends(ids_C, counts_B, special)
        with torch.no_grad():
            scores_C = network(ids_R, Packing(counts_B + 2))[inner_C]
        num = int(replaced_C.sum())
        right += int(replaced_C[scores_C.topk(num).indices].sum())
        replaced, tokens = replaced + num, tokens + len(ids_C)
    assert right / replaced > 1.4 * replaced / tokens


def test_a_batch_follows_from_seed_lane_and_number(cache_dir: Path) -> None:
    first, again = (made_by(tiny(), cache_dir, range(1, 4)) for _ in range(2))
    other_lane = made_by(tiny(), cache_dir, range(1, 4), group_rank=1)
    other_seed = made_by(tiny(), cache_dir, range(1, 4), seed=2)

    for number in range(3):
        assert torch.equal(first[number].payload, again[number].payload)
        assert first[number].loss == again[number].loss
        assert not torch.equal(first[number].payload, other_lane[number].payload)
        assert not torch.equal(first[number].payload, other_seed[number].payload)


def test_what_crosses_is_the_corrupted_text_and_its_flags_alone(cache_dir: Path) -> None:
    model = tiny(batch_size=64)
    part = model.producer(feed_context(cache_dir, cloud="es"))
    ids_R, counts_B = part.stream.batch(1)
    fed = part.produce(1)
    got = unpacked(model, cache_dir, fed)
    ends = counts_B.cumsum(0)
    inner = torch.ones(len(ids_R), dtype=torch.bool)
    inner[ends - 1] = inner[ends - counts_B] = False
    special = part.tokenizer.token_ids

    assert fed.payload.dtype == torch.uint8 and len(fed.payload) <= model.max_payload_bytes
    assert fed.num_samples == 64 and fed.num_tokens == len(got.ids_R)
    assert torch.equal(got.counts_B, counts_B - 2)
    assert torch.equal(got.replaced_R, got.ids_R != ids_R[inner])
    assert 0.08 < got.replaced_R.float().mean() < 0.2
    assert not (
        torch.isin(got.ids_R, torch.tensor([special.pad, special.bos, special.mask]))
    ).any()
    assert set(vars(fed)) == {"payload", "num_samples", "num_tokens", "loss"}


def test_the_consumer_learns_the_sum_whatever_the_order_and_the_ranks(cache_dir: Path) -> None:
    model = tiny()
    payloads = [fed.payload for fed in made_by(model, cache_dir, range(1, 4))]

    def gradients(orders: list[list[int]]) -> tuple[torch.Tensor, float]:
        total, loss = torch.zeros(1), 0.0
        for order in orders:
            part = model.consumer(feed_context(cache_dir))
            buffer = FlatBuffer(part.module.parameters())
            sums = part.consume([(0, payloads[i]) for i in order])
            total, loss = total + buffer.flat, loss + sums["loss_sum"]
        return total, loss

    whole, loss = gradients([[0, 1, 2]])
    for orders in ([[2, 0, 1]], [[0], [1, 2]]):
        other, other_loss = gradients(orders)
        torch.testing.assert_close(other, whole, atol=1e-4, rtol=1e-4)
        assert other_loss == pytest.approx(loss)
    assert whole.abs().max() > 0.1


def test_figures_are_of_the_last_fifty_steps_that_were_not_skipped(cache_dir: Path) -> None:
    model = tiny()
    payload = made_by(model, cache_dir, range(1, 2))[0].payload
    part = model.consumer(feed_context(cache_dir))
    assert set(part.evaluate().values.values()) == {0.0}
    part.consume([(0, payload)])
    part.skip(1)
    for step in range(1, 51):
        part.update(step, weight=1.0)
    assert part.own()["recent"].shape == (50, len(SUMS)) and not part.own()["recent"].any()
    sums = part.consume([(0, payload), (0, payload)])
    part.update(51, weight=1.0)
    part.update(52, weight=1.0)
    recent = part.own()["recent"].tolist()
    assert len(recent) == 50 and not any(recent[-1])
    assert recent[-2] == [sums[name] for name in SUMS]

    # loss, weight, samples, tokens; hits, false alarms, misses
    step = [12.0, 8.0, 2.0, 8.0, 3.0, 1.0, 2.0]
    rows = [[999.0, 1.0, 1.0, 1.0, 0.0, 9.0, 9.0]] * 3 + [step] * 50
    part.take({"recent": torch.tensor(rows, dtype=torch.float64)})
    found = part.evaluate()
    assert found.values == pytest.approx(
        {"replaced_precision": 75, "replaced_recall": 60, "replaced_f1": 200 / 3,
         "replaced_loss": 1.5}
    )  # fmt: skip
    assert found.errors == pytest.approx(dict.fromkeys(found.values, 0.0))


def test_the_loss_weight_scales_gradients_and_so_meets_the_clip(cache_dir: Path) -> None:
    def step(weight: float, clip: float) -> torch.Tensor:
        optimizer = dataclasses.replace(FAST, clip_norm=clip)
        settings = DiscriminatorSettings(NETWORK, optimizer, weight, precision="fp32")
        model = tiny(discriminator=settings)
        part = model.consumer(feed_context(cache_dir))
        fed = made_by(model, cache_dir, range(1, 2))[0]
        sums = part.consume([(0, fed.payload)])
        part.update(1, sums["weight"])
        return torch.cat([p.grad.flatten() for p in part.module.parameters()])  # type: ignore[union-attr]

    plain, weighted = step(1.0, 0.0), step(50.0, 0.0)
    torch.testing.assert_close(weighted, 50 * plain)
    assert float(step(50.0, 0.5).norm()) == pytest.approx(0.5, rel=1e-4)


def test_generators_of_two_sizes_and_a_pair_feed_one_discriminator(cache_dir: Path) -> None:
    model = tiny(
        languages=[], pairs=["es-en"], backbone=SeededBackbone(64, 2, 4, 64), whole_words=True,
        temperature=0.5, mask_share=0.3,
    )  # fmt: skip
    reference = Reference(model, feed_context(cache_dir))
    sums = reference.step()

    assert sums["samples"] == 12
    sizes = [sum(p.numel() for p in r.parameters_module.parameters()) for r in reference.producers]  # type: ignore[union-attr]
    assert sizes[0] > sizes[1]
    payload = unpacked(model, cache_dir, reference.producers[0].produce(2))
    eos = reference.producers[0].tokenizer.token_ids.eos
    assert (payload.ids_R == eos).sum() == 8  # between the sides of every pair


def test_generator_and_discriminator_may_differ_in_precision(cache_dir: Path) -> None:
    settings = DiscriminatorSettings(NETWORK, FAST, precision="bf16")
    for changes in ({"precision": "bf16"}, {"discriminator": settings}):
        plain, mixed = (
            Reference(tiny(**c), feed_context(cache_dir)).step() for c in ({}, changes)
        )
        assert mixed["loss_sum"] == pytest.approx(plain["loss_sum"], rel=0.05)
        assert mixed["0"] == pytest.approx(plain["0"], rel=0.05)
        assert mixed != plain


def test_a_frozen_generator_needs_weights_and_trains_nothing(
    cache_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="frozen needs a PretrainedBackbone"):
        Generator(["es"], frozen=True)
    part = tiny().producer(feed_context(cache_dir, cloud="es"))
    part.finish(tmp_path)
    folder = tmp_path / "model" / "generator_es"
    model = tiny(backbone=PretrainedBackbone(str(folder)), frozen=True)
    frozen = model.producer(feed_context(cache_dir, cloud="es"))

    before = [p.clone() for p in frozen.network.parameters()]
    assert frozen.parameters_module is None
    payload = frozen.produce(1).payload
    frozen.update(1)
    assert all(map(torch.equal, before, frozen.network.parameters()))
    assert torch.equal(frozen.produce(1).payload, payload)
    frozen.finish(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def public_backbone(text: MultilingualText, num_texts: int = 300) -> PublicBackbone:
    pretraining = MaskedLanguageModelling(steps=3)
    return PublicBackbone(32, 1, 2, 64, 0.1, pretraining, text=text, num_texts=num_texts)


def test_all_clouds_may_start_from_one_network_pretrained_on_public_text(cache_dir: Path) -> None:
    backbone = public_backbone(TEXT)
    settings = DiscriminatorSettings(backbone, FAST, precision="fp32")
    reference = Reference(tiny(backbone=backbone, discriminator=settings), feed_context(cache_dir))
    told = reference.consumer.module.encoder.state_dict()
    filled = reference.producers[0].parameters_module.state_dict()  # type: ignore[union-attr]
    drawn = Reference(tiny(), feed_context(cache_dir)).consumer.module.encoder.state_dict()
    for name, tensor in told.items():
        assert torch.equal(tensor, filled[name])
    assert any(not torch.equal(tensor, drawn[name]) for name, tensor in told.items())
    assert reference.step()["samples"] == 12


def test_a_network_is_not_pretrained_on_private_text_for_all(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    private = MultilingualText(
        FolderText(str(tmp_path)), FileTokenizer(str(tmp_path / "tokenizer.json"))
    )
    with pytest.raises(ConfigError, match="pretrained on public text in every cloud"):
        tiny(backbone=public_backbone(private))
    with pytest.raises(DataError, match="has 800 public texts, not 900"):
        TEXT.sentences(900, tmp_path)


def test_the_discriminator_is_exported_as_transformers_loads_it(
    cache_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModel, AutoTokenizer, ElectraForPreTraining

    from xcloud.contracts.model import BuildContext
    from xcloud.models.encoder import Encoder

    reference = Reference(tiny(), feed_context(cache_dir))
    for _ in range(3):
        reference.step()
    reference.consumer.export(tmp_path)
    scores = reference.consumer.evaluate()
    assert set(scores.values) == set(scores.errors) == {
        "replaced_precision", "replaced_recall", "replaced_f1", "replaced_loss"
    }  # fmt: skip
    folder = tmp_path / "model" / "discriminator"
    theirs = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    telling = ElectraForPreTraining.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    batch = tokenizer(
        ["El gato duerme.", "I see a house there."], padding=True, return_tensors="pt"
    )

    ours = reference.consumer.network.eval()
    packing = Packing(batch["attention_mask"].sum(1))
    ids_R = packing.pack(batch["input_ids"])
    with torch.no_grad():
        hidden = packing.pack(theirs(**batch).last_hidden_state)
        logits = packing.pack(telling(**batch).logits)
        torch.testing.assert_close(ours.encoder(ids_R, packing), hidden, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours(ids_R, packing), logits, atol=1e-5, rtol=1e-5)

    # And as a backbone here, with its own tokenizer.
    prepared = PretrainedTokenizer(str(folder)).prepare((), tmp_path)
    context = BuildContext(
        seed=0, device=torch.device("cpu"), cache_dir=tmp_path, report=print, max_length=32,
        vocabularies={"text": prepared.token_ids}, sentences=lambda field: (),
    )  # fmt: skip
    weights = PretrainedBackbone(str(folder)).weights("text", context)
    encoder = Encoder(weights.config, head=False).eval()
    assert weights.tensors is not None and not weights.have_head
    encoder.load_part(weights.tensors)
    with torch.no_grad():
        torch.testing.assert_close(encoder(ids_R, packing), hidden, atol=1e-5, rtol=1e-5)
    ids = prepared.encode(["El gato duerme."])[0]
    assert [prepared.token_ids.bos, *ids, prepared.token_ids.eos] == ids_R[: len(ids) + 2].tolist()
    assert ids == reference.consumer.tokenizer.encode(["El gato duerme."])[0]


def test_a_message_of_another_tokenizer_is_refused(cache_dir: Path) -> None:
    fed = made_by(tiny(), cache_dir, range(1, 2))[0]
    other = dataclasses.replace(TEXT, source=DemoText(399))
    consumer = tiny(text=other).consumer(feed_context(cache_dir, producers=("en", "es")))
    words = r"a batch of producer 'es' is refused: .*All clouds need one tokenizer"
    with pytest.raises(FrameError, match=words):
        consumer.consume([(1, fed.payload)])


def test_a_generator_that_diverges_says_so(cache_dir: Path) -> None:
    part = tiny().producer(feed_context(cache_dir, cloud="es"))
    assert part.parameters_module is not None
    for parameter in part.parameters_module.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    with pytest.raises(TrainingDiverged, match=r"batch 7 of producer 'es' is nan.* learning_rate"):
        part.produce(7)


def test_a_generator_that_takes_over_learns_longer(cache_dir: Path) -> None:
    """Its learning rate falls to zero at the end that it is told last."""
    falling = Optimizer(1e-3, warmup_steps=1, decay="linear")
    part = tiny(optimizer=falling).producer(feed_context(cache_dir, cloud="es", num_steps=1))
    module = part.parameters_module
    assert module is not None

    def learned(number: int) -> bool:
        before = [p.clone() for p in module.parameters()]
        part.produce(number)
        part.update(number)
        return not all(map(torch.equal, before, module.parameters()))

    assert not learned(2)
    part.replan(4)
    assert learned(3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"languages": "es"},
            r"languages must be a list of which each is a text, got 'es'",
        ),
        ({"languages": []}, r"generator\.languages and generator\.pairs are both empty"),
        ({"pairs": ["es"]}, r"generator\.pairs must be such as \[es-en\], got 'es'"),
        ({"mask_share": 0}, r"generator\.mask_share must be a number in \(0"),
        ({"temperature": 0}, r"generator\.temperature"),
        ({"batch_size": "big"}, r"generator\.batch_size must be a whole number"),
        ({"whole_words": "yes"}, r"generator\.whole_words"),
        ({"precision": "fp8"}, r"generator\.precision must be one of fp32, bf16, auto"),
        ({"backbone": 3}, r"generator\.backbone must be a SeededBackbone"),
        ({"coding": "gzip"}, r"model\.coding must be one of smallest, fixed"),
        ({"generators": {}}, r"model\.generators must have a generator"),
        ({"discriminator": None}, r"model\.discriminator must be a DiscriminatorSettings"),
    ],
)
def test_a_wrong_setting_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny(**change)


def test_every_cloud_that_feeds_needs_a_generator_and_texts() -> None:
    with pytest.raises(ConfigError, match=r"producing clouds are es, de, but model\.generators"):
        tiny().check(["es", "de"])
    with pytest.raises(ConfigError, match="demo has es, en"):
        tiny(languages=["fr"]).check(["es", "en"])
    tiny().check(["en", "es"])


def test_the_longest_message_is_known_before_anything_is_read() -> None:
    model = tiny()
    assert model.max_payload_bytes == IdPacking(400, 8, 30).max_bytes
    assert model.describe().startswith("demo texts; generators es (es; 1 x 32), en (en; ")


def test_a_tokenizer_has_as_many_ids_as_a_message_was_promised_to_allow(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    size = model.consumer(feed_context(cache_dir)).tokenizer.token_ids.size
    monkeypatch.setattr("xcloud.models.electra.model.MAX_VOCABULARY", size)
    model.consumer(feed_context(cache_dir))
    monkeypatch.setattr("xcloud.models.electra.model.MAX_VOCABULARY", size - 1)
    with pytest.raises(ConfigError, match=f"has {size} ids; take one with at most {size - 1}"):
        model.consumer(feed_context(cache_dir))


def test_a_masked_token_that_is_drawn_as_it_was_is_not_replaced(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clark et al., arXiv:2003.10555, section 2. A generator that is right every second time."""
    drawn: dict[str, torch.Tensor] = {}

    def half_right(
        generator: object,
        ids_R: torch.Tensor,
        packing: object,
        masked_M: torch.Tensor,
        **named: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wrong_M = masked_M[::2]
        drawn["wrong"], drawn["masked"] = wrong_M, masked_M
        made_R = ids_R.clone()
        made_R[wrong_M] = torch.where(ids_R[wrong_M] == 7, 8, 7)
        return made_R, torch.zeros((), requires_grad=True)

    monkeypatch.setattr("xcloud.models.electra.parts.corrupt", half_right)
    model = tiny(batch_size=16)
    part = model.producer(feed_context(cache_dir, cloud="es"))
    _, counts_B = part.stream.batch(1)
    got = unpacked(model, cache_dir, part.produce(1))

    inner = torch.ones(int(counts_B.sum()), dtype=torch.bool)
    ends = counts_B.cumsum(0)
    inner[ends - 1] = inner[ends - counts_B] = False
    replaced = torch.zeros(len(inner), dtype=torch.bool)
    replaced[drawn["wrong"]] = True
    assert 0 < int(replaced.sum()) < len(drawn["masked"])
    assert torch.equal(got.replaced_R, replaced[inner])


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

"""The leak meter: attacks find planted leaks and nothing else; from notes to figures."""

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from experiments.gradient_leaks.gradient_attacks import Victim, score
from experiments.gradient_leaks.meter import AveragesMeter, AveragesObserver
from tests import gradient_texts
from tests.causal_models import WORDS as NUM_WORDS
from tests.gradient_texts import TEXTS, as_batch, causal, gradients
from tests.nightly import each_once
from tests.pipelines import in_threads
from tests.replicas import connected
from tests.toy_text import text_config
from xcloud.base.errors import DataError
from xcloud.comm.compressor import Chain
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.contracts.model import NO_TOKEN, TokenIds
from xcloud.feature_list import FIGURES
from xcloud.features.leak_meter import meter as leak_meter
from xcloud.features.leak_meter.meter import (
    OBSERVATIONS_DIR,
    CrossedStream,
    LeakMeter,
    auc,
    direction_attack,
    linear_inverter,
    main,
    measure,
    network_inverter,
    norm_attack,
    probe,
    spectral_attack,
)
from xcloud.features.leak_meter.observers import (
    LeakObservers,
    ObservedEnd,
    Observer,
    leak_observers,
    meter_of,
    observed,
)
from xcloud.features.replicas.averaging import AllToAll, ReplicaLinks, Terms
from xcloud.job.config import Settings
from xcloud.launch.local import run
from xcloud.models.causal_network import Lora
from xcloud.net.frame import Kind, MessageKey
from xcloud.pipeline.pipeline import BoundaryPorts
from xcloud.record.run_record import RunRecord

GRADIENT = CrossedStream("backward", 0, "received", "hidden")
ACTIVATION = CrossedStream("forward", 0, "received", "hidden")
PAD, BOS = 0, 1


def observer(
    rank: int, cloud: str, holds: set[str], num_ranks: int = 2, first_step: int = 51,
    max_rows: int = 20_000,
) -> Observer:  # fmt: skip
    token_fields = {"text": (PAD, (BOS,))} if "text" in holds else {}
    return Observer(rank, cloud, num_ranks, first_step, max_rows, token_fields, holds)


def planted(folder: Path, label: Tensor, leak: float, noise: float) -> None:
    """Texts of 2..5 tokens; gradients as long as 1 + leak * label; rows = embedding + noise."""
    generator = torch.Generator().manual_seed(0)
    text_owner = observer(0, "text_owner", {"text"})
    label_owner = observer(1, "label_owner", {"label"})
    table = torch.randn(30, 6, generator=generator)
    for ids in torch.arange(len(label)).split(10):
        counts = torch.randint(2, 6, (len(ids),), generator=generator)
        text = torch.randint(2, 30, (len(ids), 5), generator=generator)
        text[:, 0] = BOS
        text[torch.arange(5) >= counts[:, None]] = PAD
        rows = table[text[text != PAD]]
        rows = rows + noise * torch.randn(rows.shape, generator=generator)
        gradient = torch.randn(rows.shape, generator=generator)
        owner = torch.repeat_interleave(torch.arange(len(ids)), counts)
        norms = torch.zeros(len(ids)).index_add(0, owner, gradient.square().sum(1)).sqrt()
        gradient *= ((1 + leak * label[ids].float()) / norms)[owner, None]
        text_owner.batch(51, {"ids": ids, "text": text, "types": torch.zeros_like(text)})
        label_owner.batch(51, {"ids": ids, "label": label[ids]})
        text_owner.message(GRADIENT, ids, counts.to(torch.int16), gradient)
        label_owner.message(ACTIVATION, ids, counts.to(torch.int16), rows)
    text_owner.write(folder)
    label_owner.write(folder)


def classes(num_classes: int = 2) -> Tensor:
    return torch.randint(num_classes, (300,), generator=torch.Generator().manual_seed(7))


def test_planted_leaks_are_measured(tmp_path: Path) -> None:
    planted(tmp_path, classes(), leak=1.0, noise=0.01)
    found = measure(tmp_path)

    assert found["label_leak_auc"] > 0.99
    attacks = found["leakage"]["label"]["text_owner"]["hidden gradient of boundary 0, received"]
    assert attacks["norm"] > 0.99 and attacks["direction"] < 0.65
    assert attacks["num_samples"] == 300
    assert found["token_recovery"] > 0.97
    assert found["token_recovery_baseline"] < 0.1
    # Who holds labels is not asked for them, nor who holds text for text.
    clouds = {kind: set(attacked) for kind, attacked in found["leakage"].items()}
    assert clouds == {"label": {"text_owner"}, "text": {"label_owner"}}


def test_nothing_planted_is_near_chance(tmp_path: Path) -> None:
    planted(tmp_path, classes(), leak=0.0, noise=1e3)
    found = measure(tmp_path)

    assert found["label_leak_auc"] < 0.65  # the largest of four attacks on 300 samples
    assert found["token_recovery"] < found["token_recovery_baseline"] + 0.05


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("label", [classes(3), torch.linspace(0, 1, 300)], ids=["3", "a number"])
def test_more_classes_and_numbers_as_labels_are_measured(label: Tensor, tmp_path: Path) -> None:
    planted(tmp_path, label, leak=2.0, noise=1.0)

    assert measure(tmp_path)["label_leak_auc"] > 0.8


def test_labels_of_one_class_and_spans_are_no_leak(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    planted(tmp_path / "one", torch.zeros(300, dtype=torch.int64), leak=1.0, noise=1.0)
    assert measure(tmp_path / "one")["label_leak_auc"] is None
    (tmp_path / "span").mkdir()
    owner, other = observer(0, "a", {"text"}), observer(1, "b", {"label"})
    ids = torch.arange(30)
    owner.batch(51, {"ids": ids, "text": torch.full((30, 3), 5)})
    owner.message(GRADIENT, ids, None, torch.randn(30, 4))
    other.batch(51, {"ids": ids, "label": torch.zeros(30, 3, dtype=torch.int64)})
    owner.write(tmp_path / "span")
    other.write(tmp_path / "span")

    found = measure(tmp_path / "span")
    assert found.pop("leakage") == {"label": {}, "text": {}}
    assert len(found) == 5 and set(found.values()) == {None}


def test_notes_are_of_the_last_steps_and_the_newest_rows(tmp_path: Path) -> None:
    notes = observer(0, "a", set(), first_step=91, max_rows=100)
    assert [step for step in range(1, 101) if notes.wants(step)] == list(range(91, 101))
    for first in range(0, 400, 40):
        rows = torch.full((40, 2), float(first))
        notes.message(ACTIVATION, torch.arange(first, first + 40), None, rows)
    kept = load_file(notes.write(tmp_path))

    assert kept["forward.0.received.hidden/ids"].tolist() == list(range(320, 400))


def test_what_an_owner_makes_of_its_own_data_is_not_noted(tmp_path: Path) -> None:
    sent = CrossedStream("forward", 0, "sent", "hidden")
    for holds, noted in (({"text"}, 0), (set(), 1)):
        notes = observer(0, "a", holds)
        notes.message(sent, torch.arange(3), None, torch.zeros(3, 2))
        assert len(notes._streams) == noted


def test_notes_of_a_rank_that_are_elsewhere_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match="no observations"):
        measure(tmp_path)
    planted(tmp_path, classes(), leak=1.0, noise=1.0)
    file = tmp_path / OBSERVATIONS_DIR / "rank1.safetensors"
    elsewhere = file.rename(tmp_path / "rank1.safetensors")
    with pytest.raises(DataError, match="lacks the observations of rank 1"):
        main([str(tmp_path)])

    elsewhere.rename(file)
    (tmp_path / "summary.json").write_text('{"name": "a", "label_leak_auc": null}')
    main([str(tmp_path)])
    assert json.loads(capsys.readouterr().out)["label_leak_auc"] > 0.9
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["name"] == "a" and summary["label_leak_auc"] > 0.9
    assert summary["leakage"]["label"].keys() == {"text_owner"}


def run_of(folder: Path, cluster: str, security: str, *more: str) -> dict:
    overrides = [f"security={security}", "security/meter=attack", *more]
    return run(Settings.of(text_config(cluster, overrides)), folder)


@pytest.mark.parametrize("keeps", [False, True])
def test_what_was_observed_is_deleted_once_measured_and_nothing_else(
    keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leak_meter, "measure", lambda run_dir: {"label_leak_auc": 0.5})
    (tmp_path / OBSERVATIONS_DIR).mkdir()
    (tmp_path / "summary.json").touch()
    assert leak_meter.LeakMeter(keep=keeps).measure(tmp_path) == {"label_leak_auc": 0.5}
    kept = {OBSERVATIONS_DIR} if keeps else set()
    assert {path.name for path in tmp_path.iterdir()} == {"summary.json"} | kept


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_of_two_owners_leaks_and_a_defence_lessens_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run_of(tmp_path / "plain", "two_owners", "two_owners")
    printed = " ".join(capsys.readouterr().out.split())
    noised = run_of(
        tmp_path / "noised", "two_owners", "two_owners", "security/defences/backward=marvell",
        "security.defences.backward.power=25", "security/defences/forward=gaussian_noise",
        "security.defences.forward.sigma=3", "security.meter.keep=true",
    )  # fmt: skip

    assert plain["label_leak_auc"] > 0.95  # cross-entropy's gradient points away from the label
    assert noised["label_leak_auc"] < plain["label_leak_auc"] - 0.1
    assert plain["label_leak_auc_activation"] is None  # the text's owner could learn that alone
    assert plain["token_recovery"] > 0.9 > 0.4 > noised["token_recovery"]
    assert plain["defences"] == "none" and noised["defences"] == "gaussian(3)+marvell(25)"
    assert set(plain["leakage"]["label"]) == {"text_owner"}
    on_disk = json.loads((tmp_path / "plain" / "summary.json").read_text())
    assert on_disk["leakage"] == plain["leakage"]
    assert RunRecord(plain, FIGURES).metrics["label_leak_auc"] == plain["label_leak_auc"]
    assert "label leak, AUC" in printed and "tokens recovered" in printed
    # Notes hold text and labels, so they go unless they are wanted.
    assert not (tmp_path / "plain" / OBSERVATIONS_DIR).exists()
    assert len(list((tmp_path / "noised" / OBSERVATIONS_DIR).iterdir())) == 2


@pytest.mark.nightly
@pytest.mark.slow
def test_the_middle_of_a_u_shape_is_asked_for_both_text_and_labels(tmp_path: Path) -> None:
    summary = run_of(tmp_path, "weak_device", "owner_keeps_text_and_labels")

    assert set(summary["leakage"]["label"]) == set(summary["leakage"]["text"]) == {"other"}
    assert set(summary["leakage"]["label"]["other"]) == {
        "hidden activation of boundary 0, received",
        "hidden activation of boundary 1, sent",
        "hidden gradient of boundary 0, sent",
        "hidden gradient of boundary 1, received",
    }
    assert set(summary["leakage"]["text"]["other"]) == {
        "text from hidden activation of boundary 0, received"
    }
    assert summary["token_recovery"] > 0.9
    by_kind = [summary[f"label_leak_auc_{kind}"] for kind in ("gradient", "activation")]
    assert summary["label_leak_auc"] == max(by_kind) and min(by_kind) > 0.5
    assert "4x slower" in summary["link"]


@pytest.mark.nightly
@pytest.mark.slow
def test_notes_of_several_ranks_of_a_cloud_are_joined(tmp_path: Path) -> None:
    config = text_config("two_owners", ["security=two_owners", "security/meter=attack"])
    config["cluster"]["clouds"]["text_owner"]["num_ranks"] = 2
    summary = run(Settings.of(config), tmp_path)

    (attacks,) = summary["leakage"]["label"]["text_owner"].values()
    assert attacks["num_samples"] == 128
    audit = json.loads((tmp_path / "wire_audit.json").read_text())
    activations = [m for m in audit["messages"] if m["kind"] == "activation"]
    assert len(activations) == 1 and activations[0]["num_messages"] == 16 * 4


def only_for_a_probe(folder: Path, label: Tensor, leak: float) -> None:
    """Gradients with the label in one coordinate that is small beside five noisy ones: lengths,
    directions and the strongest direction show the noise, a linear probe weighs it away."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.arange(len(label))
    rows = 10 * torch.randn(len(label), 6, generator=draw)
    rows[:, 5] = leak * (2.0 * label - 1) + 0.1 * torch.randn(len(label), generator=draw)
    owner, other = observer(0, "text_owner", {"text"}), observer(1, "label_owner", {"label"})
    text = torch.full((len(label), 1), 5)
    owner.batch(51, {"ids": ids, "text": text, "types": torch.zeros_like(text)})
    other.batch(51, {"ids": ids, "label": label})
    owner.message(GRADIENT, ids, None, rows)
    # What came back to it from a later stage says as much, and follows from its own text.
    owner.message(CrossedStream("forward", 1, "received", "hidden"), ids, None, rows)
    owner.write(folder)
    other.write(folder)


def test_a_leak_that_only_a_probe_finds_is_measured_on_the_half_that_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[tuple[int, int]] = []
    real = leak_meter.probe

    def probe(features: Tensor, *, is_known_N: Tensor, **named: Any) -> Tensor:
        judged.append((int(is_known_N.sum()), int((~is_known_N).sum())))
        return real(features, is_known_N=is_known_N, **named)

    monkeypatch.setattr(leak_meter, "probe", probe)
    found = []
    for name, leak in (("planted", 1.0), ("nothing", 0.0)):
        (folder := tmp_path / name).mkdir()
        only_for_a_probe(folder, classes(), leak)
        found.append(measure(folder)["leakage"]["label"])
    planted, nothing = ({**by["text_owner"]} for by in found)

    message = "hidden gradient of boundary 0, received"
    assert planted.keys() == nothing.keys() == {message}, "its own text tells it the other one"
    attacks = planted[message]
    assert attacks["probe"] > 0.98
    assert max(attacks["norm"], attacks["direction"], attacks["spectral"]) < 0.7
    assert 0.35 < nothing[message]["probe"] < 0.65, "of 150 samples that it was not fitted on"
    assert judged == [(150, 150)] * 2


def test_a_label_in_the_first_row_or_in_the_sum_of_all_rows_alone_is_found(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(3)
    label = classes()
    ids = torch.arange(len(label))
    says = (2.0 * label - 1)[:, None] * torch.ones(6) + 0.1 * torch.randn(300, 6, generator=draw)
    noise = 3 * torch.randn(300, 6, generator=draw)
    for name, first, second in (("first", says, noise - says), ("sum", noise, says - noise)):
        (folder := tmp_path / name).mkdir()
        owner, other = observer(0, "text_owner", {"text"}), observer(1, "label_owner", {"label"})
        other.batch(51, {"ids": ids, "label": label})
        rows = torch.stack([first, second], 1).flatten(0, 1)
        owner.message(GRADIENT, ids, torch.full((300,), 2, dtype=torch.int16), rows)
        owner.write(folder)
        other.write(folder)
        [attacks] = measure(folder)["leakage"]["label"]["text_owner"].values()
        assert min(attacks["direction"], attacks["spectral"]) > 0.95


def test_labels_of_fewer_than_20_samples_are_not_attacked(tmp_path: Path) -> None:
    for num in (19, 20):
        (folder := tmp_path / str(num)).mkdir()
        only_for_a_probe(folder, torch.arange(num) % 3 // 2, leak=1.0)
        found = measure(folder)["leakage"]["label"]
        assert [attacks["num_samples"] for by in found.values() for attacks in by.values()] == (
            [] if num < 20 else [20]
        )


N, D = 600, 12


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def labels() -> Tensor:
    return torch.rand(N, generator=draw(9)) < 0.4


def probed(vectors: Tensor, positive: Tensor) -> float:
    known = torch.arange(N) % 2 == 0
    return auc(probe(vectors, positive.long(), known, 2)[:, 1], positive[~known])


def test_auc_by_hand_with_ties() -> None:
    scores = torch.tensor([1.0, 2.0, 2.0, 3.0])
    positive = torch.tensor([False, True, False, True])
    assert auc(scores, positive) == (1 + 0.5 + 1 + 1) / 4
    assert auc(torch.zeros(4), positive) == 0.5
    assert auc(-scores, positive) == pytest.approx(1 - auc(scores, positive))
    assert math.isnan(auc(scores, torch.ones(4, dtype=torch.bool)))


def test_a_norm_that_depends_on_the_label_is_found_by_the_norm_alone() -> None:
    positive = labels()
    unit = torch.nn.functional.normalize(torch.randn(N, D, generator=draw()), dim=1)
    gradients = unit * torch.where(positive, 3.0, 1.0)[:, None]

    assert norm_attack(gradients.norm(dim=1), positive) == 1.0
    assert norm_attack(gradients.norm(dim=1), ~positive) == 1.0  # which one is longer is given
    assert direction_attack(gradients, positive) == pytest.approx(0.5, abs=0.06)


def test_a_direction_that_depends_on_the_label_is_found_by_one_known_sample() -> None:
    positive = labels()
    line = torch.randn(D, generator=draw(1))
    sign = torch.where(positive, 1.0, -1.0)[:, None]
    gradients = sign * line + 0.1 * torch.randn(N, D, generator=draw())
    gradients /= gradients.norm(dim=1, keepdim=True)

    assert direction_attack(gradients, positive) > 0.99
    assert spectral_attack(gradients, positive) > 0.99
    assert norm_attack(gradients.norm(dim=1), positive) < 0.6


def test_a_probe_finds_what_neither_norm_nor_direction_shows() -> None:
    positive = labels()
    vectors = torch.randn(N, D, generator=draw())
    vectors[:, 3] += 2.5 * positive
    vectors[:, 5] *= 20  # a loud direction that says nothing

    assert probed(vectors, positive) > 0.93
    assert spectral_attack(vectors, positive) < 0.6
    assert direction_attack(vectors, positive) < 0.6


def test_random_gradients_give_nothing_away() -> None:
    positive, vectors = labels(), torch.randn(N, D, generator=draw())

    for found in (norm_attack(vectors.norm(dim=1), positive), direction_attack(vectors, positive),
                  spectral_attack(vectors, positive), probed(vectors, positive)):  # fmt: skip
        assert found == pytest.approx(0.5, abs=0.08)


def test_a_probe_takes_constant_tiny_and_many_features() -> None:
    positive = labels()
    vectors = torch.cat([torch.zeros(N, 5), 1e-9 * torch.randn(N, 200, generator=draw())], 1)
    vectors[:, 5] += 1e-8 * positive

    assert probed(vectors, positive) > 0.9
    assert probed(torch.zeros(N, 3), positive) == 0.5


ROWS = 1500


def rows_of(noise: float, deep: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Rows made of token embeddings, rare and common tokens, and who knows which."""
    weights = torch.arange(1, 41, dtype=torch.float64).flip(0)
    tokens = 1000 + torch.multinomial(weights, ROWS, True, generator=draw(2))
    table = torch.randn(40, 8, generator=draw(3))
    rows = table[tokens - 1000] @ torch.randn(8, 16, generator=draw(4))
    rows = torch.tanh(rows) if deep else rows
    rows = rows + noise * torch.randn(rows.shape, generator=draw(5))
    return rows, tokens, torch.arange(ROWS) % 2 == 0


@pytest.mark.parametrize(
    ("inverter", "deep"), each_once([linear_inverter, network_inverter], [False, True], count=2)
)
def test_an_embedding_in_the_rows_is_read_back(inverter, deep: bool) -> None:
    rows, tokens, known = rows_of(0.05, deep)

    right = (inverter(rows, tokens, known) == tokens[~known]).double().mean()
    assert float(right) > 0.97


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("inverter", [linear_inverter, network_inverter])
def test_noise_leaves_no_more_than_the_commonest_token(inverter) -> None:
    rows, tokens, known = rows_of(1e4)
    unknown = tokens[~known]
    baseline = float((unknown == tokens[known].bincount().argmax()).double().mean())

    right = float((inverter(rows, tokens, known) == unknown).double().mean())
    assert 0.03 < baseline < 0.08
    assert right < baseline + 0.02


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_averages_that_are_not_attacked_are_said_where_there_are_any(num_replicas: int) -> None:
    context = Mock(rank=0)
    context.job.cluster.num_replicas = num_replicas
    context.job.max_steps = 100
    context.job.model.fields.return_value = {"text"}
    context.job.security.meter = LeakMeter()
    vocabularies = {"text": TokenIds(size=7, pad=PAD, bos=BOS, eos=2, mask=3)}
    made = leak_observers(context, data=Mock(vocabularies=vocabularies), stages={0: Mock()})
    seen = made.observer
    assert [step for step in range(1, 101) if seen.wants(step)] == list(range(51, 101))
    assert seen.max_rows == 20_000 and seen.token_fields == {"text": (PAD, (BOS, 2))}
    assert context.reporter.note.called is (num_replicas == 2)


LAST_STEP = 5


def watched(
    meter: AveragesMeter, replica: int, victim: Victim
) -> tuple[Observer, AveragesObserver]:
    """Of one of two replicas, each a rank in a cloud of its own."""
    fields = {"text": (NO_TOKEN, (BOS,))}
    observer = Observer(
        replica,
        f"cloud {replica}",
        2,
        LAST_STEP - meter.last_steps + 1,
        100,
        fields,
        {"text"},
        replica,
    )
    return observer, meter.averaged(observer, victim, 1)


@pytest.mark.slow
@pytest.mark.nightly
def test_text_is_read_from_an_averaged_gradient_without_a_word_of_it(tmp_path: Path) -> None:
    stage = causal("llama", tmp_path, Lora(r=8))
    meter = AveragesMeter()
    victim = Victim(stage, lambda ids: gradient_texts.run(stage, ids), torch.arange(NUM_WORDS), 6)
    batch = as_batch([[BOS, *TEXTS[0]], TEXTS[1]])
    batches = [as_batch([[30, 4, 31]]) | {"ids": torch.tensor([9])}, batch]
    changes = gradients([stage], batch)
    both = [watched(meter, replica, victim) for replica in (0, 1)]
    for (observer, averaged), own in zip(both, batches, strict=True):
        observer.batch(LAST_STEP, own)
        averaged.batch(LAST_STEP, own["ids"])
    attacker = both[0][1]
    attacker.received(LAST_STEP, 1, {f"0.{name}": change for name, change in changes.items()})
    before = [parameter.clone() for parameter in stage.parameters()]
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.add_(1.0)  # training goes on; the attack is on the weights of the step
    for observer, averaged in both:
        averaged.finish(tmp_path)
        observer.write(tmp_path)
    found = meter.measure(tmp_path)
    entry = found["leakage"]["averaging"]["cloud 0"]["texts of replica 1"]

    # The last word of each text reaches no loss: 9 of 11 (and 20, 21), which another text has.
    assert entry["tokens"] == found["averaging_token_recovery"] > 0.9
    assert found["averaging_token_recovery_baseline"] < 0.9
    assert found["averaging_order_recovery"] == pytest.approx(2 * 3 / (3 + 5), abs=0.01)
    assert found["token_recovery"] is None and len(found) == 9
    assert all(torch.equal(p, b + 1) for p, b in zip(stage.parameters(), before, strict=True))


def test_only_the_last_averagings_are_kept_and_only_where_their_texts_are_known() -> None:
    stage = torch.nn.Embedding(8, 2)
    victim = Victim(stage, stage, torch.arange(8), 4, covers=2)
    _, attacker = watched(AveragesMeter(last_steps=3, averaging_steps=2), 0, victim)
    for step in range(1, LAST_STEP + 1):  # texts are noted from step 3 on, so steps 4 and 5 fit
        attacker.received(step, 1, {"0.weight": torch.ones(8, 2)})

    assert {guess["step"] for guess in attacker.guesses()} == {4, 5}


def test_an_averager_tells_what_others_contribute() -> None:
    told: list[tuple[int, int, dict[str, list[float]]]] = []

    def take(links: ReplicaLinks) -> None:
        codec = TensorCodec({"a": torch.Size([2])}, lambda name, shape: Chain(), 1, False)
        watch = None
        if links.replica == 0:
            watch = lambda step, replica, tensors: told.append(  # noqa: E731
                (step, replica, {name: tensor.tolist() for name, tensor in tensors.items()})
            )
        averager = AllToAll(links, codec, Terms(watch=watch))
        averager.start(7, [torch.full((2,), float(links.replica))])
        averager.finish(7)

    in_threads([lambda own=own: take(own) for own in connected(3)])

    assert told == [(7, 1, {"a": [1.0, 1.0]}), (7, 2, {"a": [2.0, 2.0]})]


def test_scores_are_means_over_the_steps_that_can_be_judged() -> None:
    truth: dict[int, Sequence[Sequence[int]]] = {1: [[4, 5, 6]], 2: [[7, 8]]}
    guesses: dict[int, Sequence[Sequence[int]]] = {1: [[4, 5, 6]], 2: [[]], 3: [[1]]}

    assert score("texts", guesses, truth, [[4, 4, 4, 5, 9]]) == {
        "tokens": 0.5, "baseline": pytest.approx((4 / 6 + 0) / 2, abs=1e-4), "order": 0.5,
        "num_updates": 2,
    }  # fmt: skip
    assert score("texts", {3: [[1]]}, truth, []) is None


@pytest.mark.parametrize("averages", [True, False])
def test_every_batch_of_a_step_is_noted_by_all_that_observe(averages: bool) -> None:
    told: list[Any] = []
    rows: Any = SimpleNamespace(batch=lambda *given: told.append(("rows", *given)))
    means: Any = SimpleNamespace(batch=lambda *given: told.append(("averages", *given)))
    nobody: Any = None
    hook = LeakObservers(rows, means if averages else None, reporter=nobody, run_dir=Path())
    batches: Any = {0: {"ids": "a"}, 2: {"ids": "b"}}
    hook.before_pass(51, batches)
    expected = [
        [("rows", 51, batch), ("averages", 51, batch["ids"])][: 1 + averages]
        for batch in batches.values()
    ]
    assert told == [one for of_batch in expected for one in of_batch]


def test_what_crosses_to_another_cloud_is_noted_on_both_sides_and_scores_are_not() -> None:
    noted: list[Any] = []
    seen: Any = SimpleNamespace(
        wants=lambda step: step > 3,
        message=lambda stream, ids, counts, rows: noted.append((stream, ids, counts, rows)),
    )
    hidden = SimpleNamespace(name="hidden", dtype=torch.float32, counts=lambda counts: counts + 1)
    mask = SimpleNamespace(name="mask", dtype=torch.bool)
    end = SimpleNamespace(
        identity=SimpleNamespace(direction="forward", boundary=1),
        fields=(hidden, mask),
        send=lambda key, message, samples, known: {**message, "hidden": -message["hidden"]},
        recv=lambda key, samples, known: {"hidden": 8.0, "counts": 4, **known},
        send_start="as it is",
    )
    ends: Any = SimpleNamespace(leaves_cloud=lambda peer: peer != 2)
    both: Any = {1: end, 2: end}
    plain = BoundaryPorts(Mock(), forward_out=both, backward_in=both)
    ports = observed({0: plain}, seen, ends)[0]
    assert ports.forward_out[2] is end and ports.forward_in == {}
    assert isinstance(ports.backward_in[1], ObservedEnd)
    port: Any = ports.forward_out[1]
    assert port.send_start == "as it is"
    samples: Any = {"ids": "ids"}
    for step, kind in ((3, Kind.ACTIVATION), (4, Kind.ACTIVATION), (4, Kind.EVALUATION)):
        message: Any = {"hidden": 2.0}
        known: Any = {"hidden": 7.0, "counts": 1}  # of a gradient: what it is the gradient of
        assert port.send(MessageKey(kind, step), message, samples, known)["hidden"] == -2.0
    assert port.recv(MessageKey(Kind.GRADIENT, step=5), samples, {"more": 1})["more"] == 1
    assert noted == [
        (CrossedStream("forward", 1, how, "hidden"), "ids", counts, rows)
        for how, counts, rows in (("sent", 2, -2.0), ("received", 5, 8.0))
    ]


def test_notes_are_written_once_training_is_over_and_may_be_lost(tmp_path: Path) -> None:
    wrote: list[Any] = []
    rows: Any = SimpleNamespace(write=lambda folder: wrote.append(("rows", folder)))
    means: Any = SimpleNamespace(finish=lambda folder: wrote.append(("means", folder)))
    reporter: Any = SimpleNamespace(may_lose=lambda what: wrote.append(what) or nullcontext())
    for averaged in (None, means):
        LeakObservers(rows, averaged, reporter, tmp_path).finish()
    first, second = [OBSERVATIONS_DIR, ("rows", tmp_path)], [("means", tmp_path)]
    assert wrote == [*first, first[0], *second, first[1]]


def test_a_job_without_a_meter_or_a_second_cloud_is_not_observed() -> None:
    for crosses in (True, False):
        job: Any = Mock()
        job.cluster.crosses_clouds = crosses
        assert meter_of(job) is (job.security.meter if crosses else None)


def test_rows_that_match_the_tokens_of_less_than_half_of_the_samples_do_so_by_chance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leak_meter, "network_inverter", linear_inverter)  # the quicker one
    count = leak_meter.MIN_SAMPLES
    truth = {i: torch.arange(4) for i in range(2 * count + 1)}
    match = {i: torch.randn(4, 3) for i in range(count)}
    other = {i: torch.randn(5, 3) for i in range(count, 2 * count + 1)}
    assert leak_meter._invert(match | other, truth, []) is None
    del other[2 * count]
    assert leak_meter._invert(match | other, truth, []) is not None
    del match[0], other[count]
    assert leak_meter._invert(match | other, truth, []) is None, "too few"


@pytest.mark.parametrize("field", ["hidden", "hidden.of.a.part"])
def test_the_name_of_a_stream_is_read_back(field: str) -> None:
    stream = CrossedStream("backward", 3, "sent", field)
    assert CrossedStream.parse(stream.name) == stream

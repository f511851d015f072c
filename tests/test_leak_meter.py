"""From what ranks noted to the figures of a run; whole runs with and without defences."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.toy_text import text_config
from xcloud.base.errors import DataError
from xcloud.feature_list import FIGURES
from xcloud.features.leak_meter import meter as leak_meter
from xcloud.features.leak_meter.meter import OBSERVATIONS_DIR, CrossedStream, main, measure
from xcloud.features.leak_meter.observers import Observer
from xcloud.job.config import Settings
from xcloud.launch.local import run
from xcloud.tracking.mlflow_store import final_metrics

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


@pytest.mark.slow
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
    assert final_metrics(plain, FIGURES)["label_leak_auc"] == plain["label_leak_auc"]
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

"""The same work in one cloud and across clouds: share of throughput, losses over each other."""

import csv
import json
from functools import cache
from io import StringIO
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from tests.event_lines import append_event
from tests.sweep_runs import split_run, write_run
from tests.toy import toy_config
from xcloud.record.summary import read_run
from xcloud.study import report
from xcloud.study.pictures import LOSSES, curves_of, write_losses
from xcloud.study.report import print_sweep, write_csv
from xcloud.study.results import Results, from_folder

NUM_STEPS = 60


@cache
def composed(cluster: str, overrides: str) -> DictConfig:
    return OmegaConf.create(toy_config(cluster, overrides.split()))


def run(
    folder: Path, cluster: str, overrides: str, rate: float, loss_offset: float | None = None
) -> None:
    """Two ranks; the second knows the loss. No events without an offset."""
    rates = {"samples_per_s": rate, "tokens_per_s": 10 * rate}
    write_run(folder, composed(cluster, overrides), **rates)
    if loss_offset is None:
        return
    for step in range(1, NUM_STEPS + 1):
        for rank in (0, 1):
            loss = {"loss": 5 / step + loss_offset} if rank else {}
            more = {"step": step, "step_s": 0.1, **loss}
            append_event(folder / "events.jsonl", "step", rank=rank, cloud=f"c{rank}", **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "multirun" / "fig5"
    for seed, rate in ((1, 90.0), (2, 110.0)):
        run(folder / f"one{seed}", "one_cloud", f"seed={seed}", rate, 0.1 * seed)
        run(folder / f"two{seed}", "two_clouds", f"seed={seed}", 0.97 * rate, 0.1 * seed + 0.01)
    return folder


def printed(results: Results) -> str:
    stream = StringIO()
    print_sweep(results, Console(file=stream, width=150))
    return " ".join(stream.getvalue().split())


def test_throughput_is_a_share_of_the_same_work_in_one_cloud(folder: Path) -> None:
    results = Results(from_folder(folder))
    rows = results.rows.set_index("cluster")

    assert rows.samples_per_s_share_of_one_cloud["two_clouds"] == pytest.approx(0.97)
    assert rows.tokens_per_s_share_of_one_cloud["two_clouds"] == pytest.approx(0.97)
    assert rows.tokens_per_s_share_of_one_cloud["one_cloud"] == 1.0
    text = printed(results)
    assert "tokens/s of one cloud" in text and "970 ± 137 97.0 %" in text


def test_compression_does_not_part_work_from_its_one_cloud_but_other_settings_do(
    tmp_path: Path,
) -> None:
    run(tmp_path / "a", "one_cloud", "compression=int8", 100.0)
    run(tmp_path / "b", "two_clouds", "compression=int4", 50.0)
    run(tmp_path / "c", "two_clouds", "compression=int4 training.max_steps=9", 40.0)

    shares = Results(from_folder(tmp_path)).rows.samples_per_s_share_of_one_cloud
    assert sorted(shares.dropna()) == [0.5, 1.0] and len(shares) == 3


def test_another_number_of_ranks_is_said(tmp_path: Path) -> None:
    run(tmp_path / "a", "one_cloud", "", 100.0)
    run(tmp_path / "b", "two_clouds_dp", "", 150.0)

    assert "one_cloud has 2" in (text := printed(Results(from_folder(tmp_path))))
    assert "two_clouds_dp has 4" in text


def test_csv_has_rates_and_shares(folder: Path, tmp_path: Path) -> None:
    write_csv(tmp_path, Results(from_folder(folder)))
    with open(tmp_path / "table.csv", encoding="utf-8") as file:
        table = {row["setting"]: row for row in csv.DictReader(file)}

    row = next(row for row in table.values() if row["tokens_per_s_share_of_one_cloud"] != "1.0")
    assert (row["samples_per_s"], row["samples_per_s_share_of_one_cloud"]) == ("97.0", "0.97")


def test_curves_are_read_from_what_the_ranks_said(folder: Path) -> None:
    steps = read_run(folder / "one1" / "events.jsonl").steps

    assert list(steps.step) == list(range(1, NUM_STEPS + 1))
    assert steps["loss"][0] == pytest.approx(5.1)
    assert read_run(folder / "nowhere").num_steps == 0


@pytest.mark.usefixtures("pictures")
def test_losses_of_settings_lie_over_each_other(folder: Path) -> None:
    reference, curves = curves_of(Results(from_folder(folder)))
    alone, across = curves

    assert reference == alone and "one_cloud" in alone and "two_clouds" in across
    loss = curves[across][2]
    assert len(loss) == NUM_STEPS and np.allclose(loss, 5 / loss.index + 0.21)
    differences = curves[across] - curves[alone]
    assert list(differences) == [1, 2] and np.allclose(differences, 0.01)
    picture = write_losses(folder, reference, curves, "sweep fig5")
    pixels = matplotlib.image.imread(picture)
    assert pixels[..., :3].std() > 0.04 and pixels.shape[0] > 600  # with the difference below


def test_without_a_single_cloud_the_uncompressed_setting_is_the_reference(tmp_path: Path) -> None:
    run(tmp_path / "a", "two_clouds", "", 100.0, 0.1)
    run(tmp_path / "b", "two_clouds", "compression=int4", 100.0, 0.1)

    reference, curves = curves_of(Results(from_folder(tmp_path)))
    assert reference == "none" and list(curves) == ["none", "int4+int4"]
    assert curves["int4+int4"].equals(curves["none"])


def test_one_setting_alone_or_runs_without_events_draw_no_curves(tmp_path: Path) -> None:
    run(tmp_path / "a", "one_cloud", "", 100.0, 0.1)
    assert curves_of(Results(from_folder(tmp_path))) == ("", {})

    run(tmp_path / "b", "two_clouds", "compression=int4", 50.0)
    assert curves_of(Results(from_folder(tmp_path))) == ("", {})


def test_the_report_draws_the_curves(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent.parent)

    assert report.main(["fig5"]) == 0
    assert LOSSES in capsys.readouterr().out and (folder / LOSSES).exists()


def test_the_published_share_stands_beside_pre_training_across_clouds() -> None:
    rates = {"samples_per_s": 10.0}
    runs = [
        split_run(None, name="electra_multilingual", summary=rates, cluster__name=name)
        for name in ("one_cloud", "clouds")
    ]
    results = Results(runs)
    found = results.rows.set_index("cluster").published

    assert found["clouds"]["of_one_cloud"] == "85 %"
    assert "85 % of the throughput in a single cloud" in found["clouds"]["notes"][0]
    assert "of_one_cloud" not in found["one_cloud"]
    assert "85 %" in printed(results)


def test_ranks_that_only_feed_others_are_not_waited_for_in_the_curves(tmp_path: Path) -> None:
    step = {"event": "step", "rank": 0, "cloud": "disc", "step_s": 0.1, "t": 5.0}
    fed = {"event": "fed", "rank": 2, "cloud": "one", "num_batches": 1, "loss": 3.0}
    events = [{**step, "step": 1, "loss": 2.0}, fed, {**step, "step": 2, "loss": 1.0}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))

    assert list(read_run(tmp_path / "events.jsonl").steps["loss"]) == [2.0, 1.0]

"""What a sweep came to, in one cloud or across: rows over seeds, table, CSV, pictures, page."""

import csv
import json
import math
import re
import shutil
from functools import cache
from io import StringIO
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from tests import as_written
from tests.event_lines import append_event
from tests.sweep_runs import blank_store, compose, split_run, write_run
from tests.toy import toy_config
from xcloud.base.errors import ConfigError
from xcloud.job.config import Settings
from xcloud.record.summary import read_run
from xcloud.show.canvas import canvas, clipped, legend_columns
from xcloud.study import pictures, report
from xcloud.study.pictures import (
    LOSSES,
    colours_of_curves,
    curves_of,
    front,
    write_losses,
    write_pictures,
)
from xcloud.study.report import columns_of, page_in_mlflow, print_sweep, write_csv
from xcloud.study.results import PointResult, Results, from_folder, open_sweep, spread_text
from xcloud.tracking import mlflow_store as ui
from xcloud.tracking.mlflow_store import COSTS, VIEW_TAG, Store, show_first
from xcloud.tracking.tracker import MlflowTracker, NullTracker

pytestmark = pytest.mark.xdist_group("mlflow")  # one process imports it, not each

RUNS = [  # overrides, BLEU, step time, ratio
    ("compression=none seed=1", 40.0, 1.0, 0.99),
    ("compression=none seed=2", 42.0, 1.0, 0.99),
    ("compression=int8 seed=1", 41.0, 0.4, 3.9),
    ("compression=int8 seed=2", 43.0, 0.5, 3.9),
    ("compression=int2 seed=1", 12.0, 0.2, 14.0),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    for number, (overrides, bleu, step_s, ratio) in enumerate(RUNS):
        config = compose(overrides.split())
        write_run(folder / str(number), config, bleu=bleu, step_s=step_s, ratio=ratio)
    config = compose(["compression=int2", "seed=2"])
    write_run(folder / "5", config, bleu=None, step_s=None, ratio=None, status="failed", cause="x")
    return folder


@pytest.fixture
def sweep(written: Path, tmp_path: Path) -> Path:
    """A copy of its own."""
    return shutil.copytree(written, tmp_path / "multirun" / "s")


def test_the_rows_as_json_are_those_of_the_table_and_nothing_is_written(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(sweep.iterdir())
    assert report.main([str(sweep), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["compression"], row["runs"], row["finished"]) for row in rows] == [
        ("int8+int8", 2, 2),
        ("none", 2, 2),
        ("int2+int2", 2, 1),
    ]
    first, reference, _ = rows
    assert (first["score"], first["bleu"], first["share"]) == ("bleu", 42.0, 0.45)
    assert first["bleu_std"] == pytest.approx(2**0.5) and reference["share"] == 1.0
    assert first["settings"]["seed"] == 1
    assert sorted(sweep.iterdir()) == before


def printed(results: Results, width: int = 100) -> str:
    stream = StringIO()
    print_sweep(results, Console(file=stream, width=width))
    return stream.getvalue()


def test_a_remark_is_shown_as_it_stands_with_brackets_and_without_coloured_numbers(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "remarks_of", lambda results: ["2 clouds [red] ran"])
    stream = StringIO()
    terminal = Console(file=stream, width=100, force_terminal=True, color_system="standard")
    print_sweep(Results(from_folder(sweep)), terminal)
    assert stream.getvalue().endswith("\x1b[2m2 clouds [red] ran\x1b[0m\n")


def test_rows_are_settings_over_seeds_best_first(sweep: Path) -> None:
    rows = Results(from_folder(sweep)).rows

    assert list(rows.setting) == ["int8+int8", "none", "int2+int2"]
    int8, none, int2 = (row for _, row in rows.iterrows())
    assert (int8.bleu, int8.bleu_std) == (42.0, pytest.approx(2**0.5))
    assert int2.bleu == 12.0 and math.isnan(int2.bleu_std), "a single seed has no spread"
    assert int8.step_time_s == pytest.approx(0.45)
    assert (int8.share, none.share, int2.share) == (pytest.approx(0.45), 1.0, 0.2)
    assert (int2.finished, int2.runs) == (1, 2)
    assert (int8.codec_s_cloud_a, int8.codec_s_cloud_b) == (0.05, 0.05)


@pytest.mark.parametrize(
    ("score", "values", "best"),
    [("bleu", (20.1, 20.4, 9.0), 20.4), ("perplexity", (20.4, 20.1, 900.0), 20.1),
     ("loss", (3.2, 3.1, 7.0), 3.1), ("replaced_loss", (0.4, 0.35, 0.9), 0.35)],
)  # fmt: skip
def test_where_less_is_better_the_lowest_score_comes_first_everywhere(
    score: str, values: tuple[float, ...], best: float, tmp_path: Path
) -> None:
    for compression, value in zip(("none", "int8", "int2"), values, strict=True):
        config = compose([f"compression={compression}", "seed=1"])
        write_run(tmp_path / compression, config, quality={score: value})
    results = Results(from_folder(tmp_path))
    write_csv(tmp_path, results)
    with open(tmp_path / "table.csv", encoding="utf-8") as file:
        first = next(csv.DictReader(file))

    ordered = sorted(values, reverse=best == max(values))
    assert list(results.rows[score]) == ordered
    assert float(first[score]) == best


def test_the_share_is_of_the_uncompressed_runs_on_the_same_link(tmp_path: Path) -> None:
    for name, overrides, step_s in [
        ("a", "compression=none cluster/wan=line_8m", 10.0),
        ("b", "compression=int8 cluster/wan=line_8m", 4.0),
        ("c", "compression=int8 cluster/wan=line_1g", 1.0),
    ]:
        write_run(tmp_path / name, compose(overrides.split()), step_s=step_s)

    shares = Results(from_folder(tmp_path)).rows.share
    assert sorted(shares.dropna()) == [0.4, 1.0] and len(shares) == 3


DRIFTS = {  # seconds that a step computes in cloud_b, where the uncompressed one computes 0.2 of 1
    "as fast": (0.2, None),
    "nearly as fast": (0.215, None),
    "faster": (0.11, "45 % less time computing (110 ms against 200 ms a step in cloud_b)"),
    "slower": (0.3, "50 % more time computing (300 ms against 200 ms a step in cloud_b)"),
}


@pytest.mark.parametrize("speed", DRIFTS)
def test_a_share_is_left_out_where_the_machine_computed_at_another_speed(
    speed: str, tmp_path: Path
) -> None:
    computing_s, said = DRIFTS[speed]
    use = {"forward": 0.04, "backward": 0.03}
    for choice, cloud_b_s, step_s in (("none", 0.2, 1.0), ("int8", computing_s, 0.5)):
        for seed in (1, 2):
            config = compose([f"compression={choice}", f"seed={seed}"])
            computing = {"cloud_a": 0.001, "cloud_b": cloud_b_s}
            write_run(
                tmp_path / f"{choice}{seed}", config, step_s=step_s, compute_s=computing,
                link_utilisation=use, bleu=30.0 + 5 * (choice == "none"),
            )  # fmt: skip
    results = Results(from_folder(tmp_path))
    shares = results.rows.set_index("setting").share
    text = " ".join(printed(results, 200).split())
    drawn = canvas("", 8, 5).subplots()
    pictures.draw_scatter(
        drawn, pictures.marks_of(results, "step_time_s"), "step_time_s", results.scores[0]
    )
    labels = drawn.get_legend_handles_labels()[1]

    is_front = any("trade-off front:" in label for label in labels)
    if said is None:
        assert shares["int8+int8"] == 0.5 and "share – of" not in text and is_front
    else:
        assert math.isnan(shares["int8+int8"]) and said in text
        assert "busy: forward 4 %, backward 3 %. Compression can save 7 % of it at most" in text
        assert not is_front and "int8+int8 (!)" in labels
    assert shares["none"] == 1.0


def test_computing_that_is_next_to_nothing_of_a_step_leaves_the_share(tmp_path: Path) -> None:
    """0.02 s more of 10 s are no matter, though half as much again."""
    for choice, computing_s, step_s in (("none", 0.04, 10.0), ("int8", 0.06, 2.5)):
        computing = {"cloud_a": computing_s, "cloud_b": computing_s}
        config = compose([f"compression={choice}"])
        write_run(tmp_path / choice, config, step_s=step_s, compute_s=computing)
    assert sorted(Results(from_folder(tmp_path)).rows.share) == [0.25, 1.0]


def test_figures_of_a_run_that_failed_are_in_no_mean(tmp_path: Path) -> None:
    """It may have made many steps, and been scored."""
    for seed, status, step_s in ((1, "finished", 1.0), (2, "finished", 2.0), (3, "failed", 9.0)):
        config = compose(["compression=int8", f"seed={seed}"])
        write_run(tmp_path / str(seed), config, step_s=step_s, bleu=10.0 * seed, status=status)
    (row,) = (row for _, row in Results(from_folder(tmp_path)).rows.iterrows())

    assert (row.step_time_s, row.bleu) == (1.5, 15.0)
    assert row.step_time_s_std == pytest.approx(0.5**0.5)
    assert (row.finished, row.runs) == (2, 3)


def test_rows_of_one_name_in_two_sweeps_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for sweep, step_s, bleu in (("a", 0.2, 30.0), ("b", 0.3, 28.75)):
        config = compose(["compression=int8"])
        write_run(tmp_path / sweep / "1", config, step_s=step_s, bleu=bleu)
    runs = [*from_folder(tmp_path / "a"), *from_folder(tmp_path / "b")]
    report.compare(Results(runs))
    assert capsys.readouterr().out.splitlines() == [
        "a | b: no common setting differs",
        "int8+int8: b against a: -1.25, step time x1.50",
    ]


def test_settings_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name, steps in (("a", 8), ("b", 9)):
        write_run(tmp_path / name, compose([f"training.max_steps={steps}"]))

    labels = sorted(Results(from_folder(tmp_path)).rows.setting)
    assert labels == ["none max_steps=8", "none max_steps=9"]


def test_a_share_has_the_noise_of_both_its_times(tmp_path: Path) -> None:
    times = [
        ("none seed=1", 0.6),
        ("none seed=2", 1.0),
        ("int8 seed=1", 0.8),
        ("int8 seed=2", 1.6),
    ]
    for number, (choice, step_s) in enumerate(times):
        config = compose(f"compression={choice}".split())
        write_run(tmp_path / str(number), config, step_s=step_s)
    results = Results(from_folder(tmp_path))
    none, int8 = (row for _, row in results.rows.sort_values("share").iterrows())

    relative = ((0.2 * 2**0.5 / 0.8) ** 2 + (0.4 * 2**0.5 / 1.2) ** 2) ** 0.5
    assert int8.share == pytest.approx(1.5) and int8.share_std == pytest.approx(1.5 * relative)
    assert none.share == 1.0 and math.isnan(none.share_std)
    assert "150 ± 88 %" in printed(results)


def test_table_shows_mean_spread_share_and_what_is_missing(sweep: Path) -> None:
    text = printed(Results(from_folder(sweep)))

    lines = {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line.strip()}
    assert lines["int8+int8"] == "int8+int8 2 42.00 ± 1.41 450 ± 71 ms 45 ± 7 % 3.90x"
    assert lines["int2+int2"] == "int2+int2 1 of 2 12.00 200 ms 20 % 14.00x"
    assert "paper" not in text and "standard deviation over seeds" in text


@pytest.mark.slow
@pytest.mark.nightly
def test_the_papers_numbers_stand_beside_ours_and_are_said_not_to_compare(tmp_path: Path) -> None:
    common = {"name": "abnet_iwslt", "model": "AbNet", "cluster.name": "two_clouds"}
    runs = []
    for label, more in [
        ("fp16(svd(0.6))+int8", {}),
        ("fp16(svd(0.2))+int8", {}),
        ("int8+int8", {}),
        ("off", {"cluster.name": "local"}),
        ("none", {"model": "Transformer"}),
        ("fp16(svd(0.6))+int8", {"name": "something else"}),
    ]:
        write_run(tmp_path / "a", compose([]), compression=label)
        run = from_folder(tmp_path)[0]
        runs.append(
            PointResult(label, run.run_dir, {**run.settings, **common, **more}, run.summary)
        )
    results = Results(runs)
    found = results.rows.published.sort_index()

    assert [(entry.get("quality"), entry.get("share")) for entry in found] == [
        ("41.92", "32 %"), ("−4.19", "19 %"), (None, None),
        ("43.19", None), ("39.60", None), (None, None),
    ]  # fmt: skip
    text = " ".join(printed(results, width=500).split())
    assert (
        "41.92" in text
        and "32 %" in text
        and "Pan et al. 2023, Table 2" in text
        and "difference" in text
    )


def test_points_that_ran_at_once_and_mixed_code_are_said(sweep: Path) -> None:
    results = from_folder(sweep)
    object.__setattr__(results[0], "at_once", 2)
    results[1].summary["commit"] = "9f9f9f9"

    text = printed(Results(results))
    assert "2 points ran at once" in text and "1a2b3c4, 9f9f9f9" in text


def test_csv_has_every_setting_and_every_run(sweep: Path, tmp_path: Path) -> None:
    write_csv(tmp_path, Results(from_folder(sweep)))
    with open(tmp_path / "table.csv", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    with open(tmp_path / "points.csv", encoding="utf-8") as file:
        points = list(csv.DictReader(file))

    assert [row["setting"] for row in table] == ["int8+int8", "none", "int2+int2"]
    assert float(table[0]["bleu"]) == 42.0 and float(table[0]["bleu_std"]) > 1.4
    assert float(table[0]["share_of_uncompressed_step_time"]) == 0.45
    assert float(table[0]["waiting_s_cloud_a"]) == 0.3
    assert len(points) == 6 and [p["cause"] for p in points if p["status"] == "failed"] == ["x"]
    assert points[2]["compression_ratio"] == "3.9"


def test_a_score_of_a_single_run_is_shown_with_its_error_over_the_samples(tmp_path: Path) -> None:
    errors = {"bleu": 0.8149}
    write_run(tmp_path / "a", compose(["compression=int8"]), bleu=41.5, quality_error=errors)
    results = Results(from_folder(tmp_path))
    text = printed(results)
    assert "41.50 ± 0.81" in text and "its standard error over the test samples" in text
    write_csv(tmp_path, results)
    for name in ("table.csv", "points.csv"):
        with open(tmp_path / name, encoding="utf-8") as file:
            assert float(next(csv.DictReader(file))["bleu_error"]) == 0.8149


def test_the_front_is_what_nothing_beats_in_both() -> None:
    best = front(pd.Series([1.0, 0.4, 0.2, 0.3, 0.4]), pd.Series([40, 41, 12, 12, 30]))
    assert best.to_numpy().tolist() == [[0.2, 12], [0.4, 41]]


def test_the_drawn_front_ends_at_its_points_and_bars_have_the_colours_of_theirs(
    sweep: Path,
) -> None:
    marks = pictures.marks_of(Results(from_folder(sweep)), "step_time_s")
    assert marks.colour.nunique() == 3
    axes = canvas("x", 8, 5).subplots()
    pictures.draw_scatter(axes, marks, "step_time_s", "bleu")
    (line,) = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert line.get_xydata().tolist() == [[0.2, 12.0], [pytest.approx(0.45), 42.0]]
    for colour, drawn in zip(marks.colour, axes.containers, strict=True):
        assert all(to_rgb(bar.get_color()[0]) == to_rgb(colour) for bar in drawn.lines[2])
    assert axes.get_ylabel() == "BLEU, test set (mean ± std over seeds)"
    marks = pictures.marks_of(Results(from_folder(sweep)), "compression_ratio")
    for ratios, scale in (([0.99, 3.9, 14.0], "log"), ([9.0, 13.9, 24.0], "linear")):
        axes = canvas("x", 8, 5).subplots()
        shown = marks.assign(compression_ratio=ratios)
        pictures.draw_scatter(axes, shown, "compression_ratio", "bleu")
        assert axes.get_xscale() == scale and not axes.lines[0].get_linestyle() == "--"


def test_a_long_label_leaves_room_for_what_is_drawn_and_keeps_both_ends() -> None:
    labels = [f"task.path=/{'x' * 300}{end}" for end in ("one", "two")]
    first, second = map(clipped, labels)
    assert len(first) <= 53 and first.startswith("task.path=/xx") and first.endswith("xone")
    assert first != second and clipped("int8+int8") == "int8+int8"
    assert legend_columns(labels) == 1 and legend_columns(["int8", "int4"]) == 2
    assert legend_columns(["y" * 20] * 9) == 4


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.usefixtures("pictures")
def test_pictures_are_drawn_and_not_blank(sweep: Path, tmp_path: Path) -> None:
    written = write_pictures(tmp_path, Results(from_folder(sweep)), "sweep s")

    names = ["quality_and_step_time.png", "quality_and_ratio.png", "step_time.png"]
    assert [path.name for path in written] == names
    for path in written:
        pixels = matplotlib.image.imread(path)
        assert pixels.shape[1] >= 800 and pixels[..., :3].std() > 0.05


def test_a_sweep_without_a_finished_run_has_a_table_and_no_picture(tmp_path: Path) -> None:
    failed = {"bleu": None, "step_s": None, "ratio": None, "compute_s": {}, "cause": "x"}
    write_run(tmp_path / "m" / "a", compose([]), status="failed", **failed)
    (tmp_path / "m" / "b").mkdir()
    results = Results(from_folder(tmp_path / "m"))

    assert write_pictures(tmp_path, results, "x") == []
    assert "0 of 1" in printed(results)


def test_report_compares_two_sweeps(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(sweep.parent.parent)
    kept = as_written.keep_figures(monkeypatch)
    config = compose(["compression=int8", "cluster/wan=line_8m"])
    write_run(sweep.parent / "t" / "a", config, bleu=41.0, step_s=0.9)

    assert report.main(["s", "t"]) == 0
    said = capsys.readouterr().out
    assert "cluster.wan.bandwidth_bits_per_s" not in said  # a free link has none
    assert "cluster.wan: free | LinkProfile" in said
    assert "int8+int8: t against s: -1.00, step time x2.00" in said
    as_written.check("report of two sweeps", {"said": said, **kept})


def test_a_folder_of_that_name_hides_no_sweep_and_two_sweeps_have_two_names(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sweep.parent.parent)
    (sweep.parent.parent / sweep.name).mkdir()
    assert open_sweep(sweep.name)[0] == Path("multirun") / sweep.name
    write_run(Path("other", sweep.name, "a"), compose([]))
    with pytest.raises(ConfigError, match="names of their own, got s, s"):
        report.main([sweep.name, f"other/{sweep.name}"])


def test_a_run_whose_score_is_not_finite_is_named(tmp_path: Path) -> None:
    for seed, quality in ((1, 30.0), (2, None)):
        write_run(tmp_path / f"{seed}", compose([f"seed={seed}"]), quality={"bleu": quality})
    remarks = report.remarks_of(Results(from_folder(tmp_path)))
    assert "Means exclude runs whose score is not finite: none s2." in remarks


def test_a_sweep_is_pages_without_a_server(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(sweep.parent.parent)
    kept = as_written.keep_figures(monkeypatch)
    points = {"0": {"overrides": ["+exp=abnet_iwslt", "compression=int8"]}}
    (sweep / "sweep.json").write_text(json.dumps({"points": points}))

    assert report.main(["s", "--site", str(tmp_path / "site")]) == 0
    pages = {path.stem: path.read_text("utf-8") for path in (tmp_path / "site").glob("*.html")}
    index = pages.pop("index")
    assert len(pages) == len(Results(from_folder(sweep)).rows)
    assert all(f'href="{name}.html"' in index for name in pages)
    assert "quality_and_step_time.png" in index and "http" not in index
    assert any(
        "python run.py +exp=abnet_iwslt compression=int8" in page for page in pages.values()
    )
    assert any("<td>failed</td>" in page or ">failed<" in page for page in pages.values())
    tags = re.compile(r"(\s*(<(style|script)>.*?</\3>|<[^>]+>)\s*)+", re.S)
    texts = {name: tags.sub(" · ", page) for name, page in {**pages, "index": index}.items()}
    as_written.check("pages of a sweep", {**texts, **kept})


def test_an_unknown_sweep_is_named_with_those_there_are(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(sweep.parent.parent)
    (sweep / "sweep.json").write_text('{"points": {}}')

    unknown = r"no run of a sweep 'nope'.*known sweeps: s  \d{4}-\d\d-\d\d \d\d:\d\d  6 points$"
    with pytest.raises(ConfigError, match=unknown):
        report.main(["nope", "--root", str(sweep / "no")])
    assert report.main([]) == 0
    assert re.fullmatch(r"s  \S+ \S+  6 points\n", capsys.readouterr().out)
    with pytest.raises(ConfigError):
        open_sweep("nope")


def test_the_page_shows_what_differs_and_the_figures_best_first(tmp_path: Path) -> None:
    rate = "compression.forward.svd.rate"
    grid = [f"compression=svd_fp16_int8 {rate}={r} seed={s}" for r in (0.2, 0.6) for s in (1, 2)]
    points = [Settings.of(compose(one.split())).flat for one in [*grid, "compression=none"]]
    assert columns_of(points) == ["label", rate, "seed"]

    client, experiment_id = blank_store(tmp_path).open()
    for score, ascends in {"bleu": False, "perplexity": True}.items():
        show_first(client, experiment_id, (score, *COSTS), columns_of(points), "s")
        tags = client.get_experiment(experiment_id).tags
        view = json.loads(tags[f"{VIEW_TAG}sweep-s"])
        assert view["searchFilter"] == "tags.sweep = 's'"
        assert view["orderByKey"] == f"metrics.`{score}`" and view["orderByAsc"] == ascends
        assert view["selectedColumns"] == [
            "params.`label`", f"params.`{rate}`", "params.`seed`",
            f"metrics.`{score}`", "metrics.`step_time_s`", "metrics.`wan_bytes_per_step`",
        ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.nightly
def test_a_store_keeps_the_page_and_finds_the_runs_of_a_sweep(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "mlruns"
    store = blank_store(root)
    config = from_folder(sweep)[0].settings
    lines = page_in_mlflow("s", MlflowTracker(root=str(root)), [config])
    assert [link for line in lines for link in re.findall(r"http\S+sweep-s", line)]
    assert f"python -m xcloud ui --root {root} --sweep s" in lines[-1]
    client, experiment_id = store.open()
    for folder in sorted(path.parent for path in sweep.glob("*/summary.json")) * 2:
        run = client.create_run(experiment_id, tags={"sweep": "s"})
        for path in folder.iterdir():
            store.keep(client, run.info.run_id, path)
    client.create_run(experiment_id, tags={"sweep": "another"})

    of_sweep = list(ui.links(store, "s"))
    assert "viewStateShareKey=sweep-s" in of_sweep[1] and "compareRunsMode=CHART" in of_sweep[2]
    assert list(ui.links(store, "unknown")) == []
    assert of_sweep == list(ui.links(store))[4:7], "the latest last"
    monkeypatch.chdir(tmp_path / "mlruns")
    _, results = open_sweep("s", store)
    assert len(results) == 6, "a point that ran twice counts once"
    best, same = (Results(own).rows.iloc[0] for own in (results, from_folder(sweep)))
    assert spread_text(best, "bleu") == spread_text(same, "bleu") == "42.00 ± 1.41"


def test_tables_and_pictures_are_kept_in_one_run_beside_the_sweeps_own(
    sweep: Path, tmp_path: Path
) -> None:
    tracker = MlflowTracker(root=str(tmp_path / "mlruns"))
    store = blank_store(tmp_path / "mlruns")
    settings = [result.settings for result in from_folder(sweep)]
    table = tmp_path / "table.csv"
    for text in ("old", "new"):
        table.write_text(text)
        lines = page_in_mlflow("s", tracker, settings, "bleu", [table])

    client, experiment_id = store.open()
    (run,) = client.search_runs([experiment_id])
    assert f"/runs/{run.info.run_id}/artifacts" in "".join(lines) and len(lines) == 4
    assert run.info.run_name == "report of sweep s" and run.info.status == "FINISHED"
    kept = tmp_path / "mlruns" / "artifacts" / run.info.run_id / "artifacts" / "table.csv"
    assert kept.read_text() == "new"
    assert store.artifacts_of_sweep("s") == [], "it is no point of the sweep"


def test_mlflow_that_refuses_is_one_line(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> str:
        raise RuntimeError("no\nentry")

    monkeypatch.setattr(Store, "open", refuse)
    settings = [from_folder(sweep)[0].settings]
    lines = page_in_mlflow("s", MlflowTracker(root=str(tmp_path)), settings)

    assert len(lines) == 1 and "could be prepared" in lines[0] and "\n" not in lines[0]
    assert page_in_mlflow("s", NullTracker(), []) == []


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


def shown_table(results: Results) -> str:
    stream = StringIO()
    print_sweep(results, Console(file=stream, width=150))
    return " ".join(stream.getvalue().split())


@pytest.mark.slow
@pytest.mark.nightly
def test_throughput_is_a_share_of_the_same_work_in_one_cloud(folder: Path) -> None:
    results = Results(from_folder(folder))
    rows = results.rows.set_index("cluster")

    assert rows.samples_per_s_share_of_one_cloud["two_clouds"] == pytest.approx(0.97)
    assert rows.tokens_per_s_share_of_one_cloud["two_clouds"] == pytest.approx(0.97)
    assert rows.tokens_per_s_share_of_one_cloud["one_cloud"] == 1.0
    text = shown_table(results)
    assert "tokens/s of one cloud" in text and "970 ± 137 97.0 %" in text


@pytest.mark.slow
@pytest.mark.nightly
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

    assert "one_cloud has 2" in (text := shown_table(Results(from_folder(tmp_path))))
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


def test_losses_of_settings_lie_over_each_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(from_folder(folder))
    reference, curves = curves_of(results)
    alone, across = curves

    assert reference == alone and "one_cloud" in alone and "two_clouds" in across
    loss = curves[across][2]
    assert len(loss) == NUM_STEPS and np.allclose(loss, 5 / loss.index + 0.21)
    differences = curves[across] - curves[alone]
    assert list(differences) == [1, 2] and np.allclose(differences, 0.01)
    colours = colours_of_curves(results)
    drawn = {
        "beside a reference": (reference, {**curves, across: curves[across] + [0.0, 0.005]}),
        "equal to it": (reference, {alone: curves[alone], across: curves[alone]}),
        "of one seed": (reference, {label: losses[[2]] for label, losses in curves.items()}),
        "without a reference": ("", curves),
        "of other seeds": (reference, {alone: curves[alone][[1]], across: curves[across][[2]]}),
    }
    kept = as_written.keep_figures(monkeypatch)
    found = {}
    for name, (beside, these) in drawn.items():
        assert write_losses(tmp_path, beside, these, "sweep fig5", colours) == tmp_path / LOSSES
        found[name] = kept[LOSSES]
    as_written.check("losses of settings", found)


def test_without_a_single_cloud_the_uncompressed_setting_is_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts for none of the curves that there is room for."""
    monkeypatch.setattr(pictures, "MAX_CURVES", 1)
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


@pytest.mark.slow
@pytest.mark.nightly
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
    assert "85 %" in shown_table(results)


def test_ranks_that_only_feed_others_are_not_waited_for_in_the_curves(tmp_path: Path) -> None:
    step = {"event": "step", "rank": 0, "cloud": "disc", "step_s": 0.1, "t": 5.0}
    fed = {"event": "fed", "rank": 2, "cloud": "one", "num_batches": 1, "loss": 3.0}
    events = [{**step, "step": 1, "loss": 2.0}, fed, {**step, "step": 2, "loss": 1.0}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))

    assert list(read_run(tmp_path / "events.jsonl").steps["loss"]) == [2.0, 1.0]

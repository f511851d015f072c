"""A sweep over the layer and rank of a split: grouping, table, CSV and pictures."""

import csv
from io import StringIO
from pathlib import Path

import matplotlib.image
import pytest
from rich.console import Console

from tests.split_runs import fig_9, split_run
from tests.sweep_runs import compose, write_run
from xcloud.sweep.layer_picture import write_layer_pictures
from xcloud.sweep.layers import layers_of, print_layers, table_of, write_layers
from xcloud.sweep.points import (
    differences,
    identity,
    setting_key,
    varying,
    with_also,
)
from xcloud.sweep.published import SPLIT_FINE_TUNING, TRAFFIC, published_for
from xcloud.sweep.results import Spread, from_folder, rows_of
from xcloud.sweep.table import print_table
from xcloud.sweep.view import view_of

LAYER, RANK = "model.split.layer", "model.split.rank"


def test_the_unsplit_model_joins_once_for_each_seed() -> None:
    asked = [
        ("+exp=b", f"{LAYER}={layer}", f"{RANK}={rank}", f"seed={seed}")
        for layer in (0, 2)
        for rank in (8, 16)
        for seed in (1, 2)
    ]
    unsplit = [("+exp=b", f"seed={seed}", f"{LAYER}=null") for seed in (1, 2)]

    assert with_also(asked, {LAYER: None}) == [*asked, *unsplit]
    assert with_also(asked, {"model": {"split": {"layer": None}}}) == [*asked, *unsplit]
    both = with_also(asked, {LAYER: None, "cluster": "local"})
    assert both[len(asked) :] == [(*words, "cluster=local") for words in unsplit]


def test_the_unsplit_model_of_a_compressed_sweep_can_be_left_uncompressed() -> None:
    asked = [
        (f"{LAYER}=0", "compression=few_bits", "compression.forward.int4.bits=3",
         "security/defences/forward=gaussian_noise", "security.defences.forward.sigma=0.1"),
    ]  # fmt: skip
    also = {LAYER: None, "compression": "none", "security/defences/forward": "none"}

    assert with_also(asked, also)[1:] == [
        (f"{LAYER}=null", "compression=none", "security/defences/forward=none")
    ]


def test_also_spells_values_as_overrides_do() -> None:
    asked = [("a=1", "training.max_steps=3")]

    added = with_also(asked, {"training.eval_samples": None, "b": True, "c": 0.5})[1:]
    assert added == [(*asked[0], "training.eval_samples=null", "b=true", "c=0.5")]


def test_an_unsplit_model_has_no_rank() -> None:
    one, other = (split_run(None, rank).settings for rank in (8, 16))
    eight, sixteen = (split_run(2, rank).settings for rank in (8, 16))

    assert identity(one) == identity(other) and differences(one, other) == {}
    assert setting_key(eight) != setting_key(sixteen) != setting_key(one)
    assert varying([one, other]) == []
    assert varying([one, eight, sixteen]) == [LAYER, RANK]


def test_lines_are_ranks_and_the_unsplit_model_stands_apart() -> None:
    found = layers_of(rows_of(fig_9()))

    assert found is not None
    assert (found.layers, found.scores, found.num_seeds) == ([0, 2, 4], ["accuracy"], "2")
    assert [line.label for line in found.lines] == ["r = 8", "r = 16"]
    assert [row.label for row in found.unsplit] == ["unsplit"]
    spread = found.lines[1].rows[4].quality["accuracy"]
    assert spread == Spread(pytest.approx(80.6), pytest.approx(2 / 2**0.5), 2)


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({"model__split__method": "pca"}, ["r = 8, pca", "r = 8, svd"]),
        ({"model__split__place": "attention"}, ["r = 8, place=attention", "r = 8, place=output"]),
    ],
)
def test_what_else_varies_gets_lines_of_its_own(
    settings: dict[str, object], labels: list[str]
) -> None:
    usual = {"model__split__method": "svd", "model__split__place": "output"}
    runs = [split_run(layer, 8, **{**usual, **own}) for layer in (0, 2) for own in ({}, settings)]
    found = layers_of(rows_of(runs))

    assert found is not None and [line.label for line in found.lines] == labels
    assert len(found.variants) == 2 and found.ranks == [8]


def test_compressions_and_missing_points_are_told_apart() -> None:
    runs = [
        split_run(layer, 8, summary={"compression": name}, compression__forward=name)
        for layer in (0, 2)
        for name in ("none", "int8+int8")
    ]
    found = layers_of(rows_of([*runs, split_run(4, 8, compression__forward="none")]))

    assert found is not None
    assert [line.label for line in found.lines] == ["r = 8, int8+int8", "r = 8, none"]
    assert [cells for layer, cells in table_of(found, "accuracy") if layer == "4"] == [
        ["-", "85.00"]
    ]


def test_other_sweeps_have_no_layers(tmp_path: Path) -> None:
    write_run(tmp_path / "a", compose([]))

    assert layers_of(rows_of(from_folder(tmp_path))) is None
    assert layers_of(rows_of([split_run(2, 8), split_run(None, 8)])) is None
    failed = split_run(4, 8)
    failed.summary.update(status="failed")
    assert layers_of(rows_of([split_run(2, 8), failed])) is None


def test_table_has_layers_down_and_ranks_across(tmp_path: Path) -> None:
    found = layers_of(rows_of(fig_9()))
    assert found is not None
    stream = StringIO()
    print_layers(found, Console(file=stream, width=100))
    lines = [" ".join(line.split()) for line in stream.getvalue().splitlines()]

    assert "layer r = 8 r = 16" in lines
    assert "4 79.80 ± 1.41 80.60 ± 1.41" in lines
    assert "unsplit 91.00 ± 1.41 91.00 ± 1.41" in lines
    with open(write_layers(tmp_path / "new", found), encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 7 and table[-1]["layer"] == "unsplit" and table[-1]["seeds"] == "2"
    assert {k: table[0][k] for k in ("layer", "rank", "mean")} == {
        **{"layer": "0", "rank": "8", "mean": "71.8"}
    }


def test_pictures_of_layers_are_drawn_and_not_blank(tmp_path: Path) -> None:
    found = layers_of(rows_of(fig_9()))
    assert found is not None
    for path in (written := write_layer_pictures(tmp_path, found, "sweep s")):
        assert matplotlib.image.imread(path)[..., :3].std() > 0.04

    assert [path.name for path in written] == ["layers.png", "layers_and_ranks.png"]
    one_layer = layers_of(rows_of([split_run(2, rank) for rank in (8, 16)]))
    assert one_layer is not None
    names = [path.name for path in write_layer_pictures(tmp_path, one_layer, "s")]
    assert names == ["layers_and_ranks.png"]


def test_scores_of_leaks_have_a_panel_and_a_column(tmp_path: Path) -> None:
    runs = [split_run(layer, 8, summary={"label_leak_auc": 0.9 - layer / 10}) for layer in (0, 2)]
    rows = rows_of(runs)
    found = layers_of(rows)
    assert found is not None and found.scores == ["accuracy", "label_leak_auc"]
    write_layer_pictures(tmp_path, found, "s")
    stream = StringIO()
    print_table(rows, Console(file=stream, width=150))

    assert "label leak AUC" in stream.getvalue() and "0.7000" in stream.getvalue()


@pytest.mark.parametrize(
    ("layer", "rank", "name", "task", "quality", "ratio"),
    [
        (None, 8, "bert_split_sst2", None, "92.23±0.57", None),
        (None, 8, "bert_split_sst2", "qnli", "90.82±0.17", None),
        (None, 8, "bert_split_squad", "squad_v1", "F1 88.52 / EM 81.22", None),
        (None, 8, "bert_split_trec", None, None, None),
        (11, 8, "bert_split_sst2", None, "", 96.0),
        (11, 16, "bert_split_sst2", None, None, None),
        (None, 8, "another", "sst2", None, None),
    ],
)
def test_published_numbers_stand_beside_rows_they_belong_to(
    layer: int | None, rank: int, name: str, task: str | None, quality: str | None, ratio: float
) -> None:
    row = rows_of([split_run(layer, rank, name=name, **({"task__name": task} if task else {}))])[0]
    found = published_for(row)

    assert (found.quality if found else None, found.ratio if found else None) == (quality, ratio)


def test_published_numbers_are_said_not_to_compare() -> None:
    stream = StringIO()
    print_table(rows_of([split_run(None), split_run(11)]), Console(file=stream, width=120))
    text = " ".join(stream.getvalue().split())

    assert "paper: accuracy" in text and "92.23±0.57" in text and "96x" in text
    assert SPLIT_FINE_TUNING in text and TRAFFIC in text
    assert "share" not in text, "every row would be compared with itself"


def test_mlflow_shows_layer_and_rank_as_axes() -> None:
    view = view_of("s", [run.settings for run in fig_9()], "accuracy")

    parallel = view["compareRunCharts"][-1]
    assert parallel["selectedParams"] == [LAYER, RANK, "seed"]
    drawn = [chart["xaxis"]["key"] for chart in view["compareRunCharts"][:-1]]
    assert drawn == [LAYER, RANK, "step_time_s", "compression_ratio"]
    assert view["runsHiddenMode"] == "SHOW_ALL"

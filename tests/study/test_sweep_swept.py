"""Quality over a swept setting, as over the layer and rank of a split: lines, table, CSV, picture;
and what others published beside our rows."""

import csv
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests import as_written
from tests.sweep_runs import compose, fig_9, split_run, write_run
from xcloud.study.pictures import write_swept_picture
from xcloud.study.points import (
    differences,
    identity,
    varying,
    with_also,
)
from xcloud.study.report import print_sweep, print_swept, write_swept
from xcloud.study.results import PointResult, Results, from_folder, published_for, swept_of

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
    assert identity(eight, "seed") != identity(sixteen, "seed") != identity(one, "seed")
    assert varying([one, other]) == []
    assert varying([one, eight, sixteen]) == [LAYER, RANK]


def test_lines_are_ranks_and_the_unsplit_model_stands_apart() -> None:
    found = swept_of(Results(fig_9()))

    assert found is not None and (found.setting, found.name) == (LAYER, "layer")
    assert (found.scores, {*found.rows.value}) == (["accuracy"], {0, 2, 4})
    assert {*found.rows.finished} == {2}
    assert found.lines == ["rank=8", "rank=16"]
    assert list(found.beside.setting) == ["unsplit"]
    (row,) = found.rows.query("line == 'rank=16' and value == 4").itertuples()
    assert (row.accuracy, row.accuracy_std) == pytest.approx((80.6, 2 / 2**0.5))


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({"model__split__method": "pca"}, ["rank=8 method=pca", "rank=8 method=svd"]),
        ({"model__split__place": "attention"}, ["rank=8 place=attention", "rank=8 place=output"]),
    ],
)
def test_what_else_varies_gets_lines_of_its_own(
    settings: dict[str, object], labels: list[str]
) -> None:
    usual = {"model__split__method": "svd", "model__split__place": "output"}
    runs = [split_run(layer, 8, **{**usual, **own}) for layer in (0, 2) for own in ({}, settings)]
    found = swept_of(Results([*runs, split_run(0, 16, **usual)]))
    last = labels[1].replace("rank=8", "rank=16")

    assert found is not None and found.lines == [*labels, last]


def test_compressions_and_missing_points_are_told_apart() -> None:
    runs = [
        split_run(layer, 8, summary={"compression": name}, compression__forward=name)
        for layer in (0, 2)
        for name in ("none", "int8+int8")
    ]
    found = swept_of(Results([*runs, split_run(4, 8, compression__forward="none")]))

    assert found is not None
    assert found.lines == ["int8+int8", "none"]
    stream = StringIO()
    print_swept(found, Console(file=stream, width=100))
    assert "4 - 85.00" in " ".join(stream.getvalue().split())


def test_any_number_that_varies_by_itself_is_an_axis() -> None:
    """Not one that only comes with another choice, as the ranks of another cluster do."""
    rates = [split_run(0, summary={"compression": f"svd({rate})"}, compression__rate=rate)
             for rate in (0.2, 0.4, 0.6)]  # fmt: skip
    found = swept_of(Results([*rates, split_run(0, compression__rate=None)]))
    assert found is not None and found.setting == "compression.rate"
    assert found.lines == ["runs"] and sorted(found.rows.value.unique()) == [0.2, 0.4, 0.6]
    assert len(found.beside) == 1

    clusters = [split_run(0, cluster__name=name, cluster__num_ranks=count)
                for name, count in (("a", 1), ("b", 2), ("c", 3))]  # fmt: skip
    assert swept_of(Results(clusters)) is None


def test_sweeps_without_such_a_number_have_no_axis(tmp_path: Path) -> None:
    write_run(tmp_path / "a", compose([]))

    assert swept_of(Results(from_folder(tmp_path))) is None
    assert swept_of(Results([split_run(2, 8), split_run(None, 8)])) is None
    failed = split_run(4, 8)
    failed.summary.update(status="failed")
    assert swept_of(Results([split_run(2, 8), failed])) is None


def test_table_has_values_down_and_lines_across(tmp_path: Path) -> None:
    found = swept_of(Results(fig_9()))
    assert found is not None
    stream = StringIO()
    print_swept(found, Console(file=stream, width=100))
    lines = [" ".join(line.split()) for line in stream.getvalue().splitlines()]

    assert "layer rank=8 rank=16" in lines
    assert "4 79.80 ± 1.41 80.60 ± 1.41" in lines
    assert "unsplit 91.00 ± 1.41 91.00 ± 1.41" in lines
    with open(write_swept(tmp_path / "new", found), encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 7 and table[-1]["line"] == "unsplit" and table[-1]["seeds"] == "2"
    first = next(row for row in table if row[LAYER] == "0" and row["line"] == "rank=8")
    assert first["mean"] == "71.8"


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("swept over layers", fig_9()),
        ("swept over ranks", [split_run(2, rank) for rank in (8, 16)]),
        ("swept over decades", [split_run(layer, 8) for layer in (1, 7, 50)]),
    ],
)
def test_the_picture_is_as_it_is_written_down(
    name: str, runs: list[PointResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = as_written.keep_figures(monkeypatch)
    found = swept_of(Results(runs))
    assert found is not None
    write_swept_picture(tmp_path, found, "sweep s")
    as_written.check(name, kept["quality_over_setting.png"])


def test_scores_of_leaks_have_a_panel_and_a_column(tmp_path: Path) -> None:
    runs = [split_run(layer, 8, summary={"label_leak_auc": 0.9 - layer / 10}) for layer in (0, 2)]
    results = Results(runs)
    found = swept_of(results)
    assert found is not None and found.scores == ["accuracy", "label_leak_auc"]
    write_swept_picture(tmp_path, found, "s")
    stream = StringIO()
    print_sweep(results, Console(file=stream, width=150))

    assert "label leak AUC" in stream.getvalue() and "0.7000" in stream.getvalue()


@pytest.mark.parametrize(
    ("layer", "rank", "name", "task", "quality", "ratio"),
    [
        (None, 8, "bert_split_sst2", "sst2", "92.23±0.57", None),
        (None, 8, "bert_split_sst2", "qnli", "90.82±0.17", None),
        (None, 8, "bert_split_squad", None, "F1 88.52 / EM 81.22", None),
        (None, 8, "bert_split_trec", None, None, None),
        (11, 8, "bert_split_sst2", "sst2", None, "96x"),
        (11, 16, "bert_split_sst2", "sst2", None, None),
        (None, 8, "another", "sst2", None, None),
    ],
)
def test_published_numbers_stand_beside_rows_they_belong_to(
    layer: int | None, rank: int, name: str, task: str | None, quality: str, ratio: str
) -> None:
    run = split_run(layer, rank, name=name, **({"task__name": task} if task else {}))
    found = published_for(run.settings, "none")

    assert (found.get("quality"), found.get("ratio")) == (quality, ratio)


def test_published_numbers_are_said_not_to_compare() -> None:
    stream = StringIO()
    runs = [split_run(layer, task__name="sst2") for layer in (None, 11)]
    print_sweep(Results(runs), Console(file=stream, width=120))
    text = " ".join(stream.getvalue().split())

    assert "paper: accuracy" in text and "92.23±0.57" in text and "96x" in text
    assert "never compares with ours in absolute terms" in text and "1/96 of the traffic" in text
    assert "share" not in text, "every row would be compared with itself"

"""Which experiment a point is, and what it is called."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sweep_runs import compose, points
from xcloud.base.errors import ConfigError
from xcloud.base.wording import MAX_NAME_BYTES
from xcloud.job.config import Settings
from xcloud.study.points import (
    differences,
    free_name,
    identity,
    name_points,
    same_overrides,
    with_also,
)
from xcloud.study.runner import check_name, composed_points, reasons_of


def named(*grid: str) -> list[str]:
    found = points(*grid)
    name_points(found)
    return [point.name for point in found]


def test_what_points_never_come_to_is_told_once_with_their_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = ("training.max_steps=20", "training.evaluate_every=21")
    asked = [(*steps[:num], f"seed={seed}") for num in (1, 2) for seed in (1, 2, 3)]
    found, wrong = composed_points(asked, compose)
    assert len(found) == 6 and not wrong
    said = capsys.readouterr().out
    assert said.count("3 of 6 points: training.evaluate_every=21 is more than") == 1


def test_reasons_name_what_points_do_not_share_and_the_first_of_each() -> None:
    points = [("seed=1", "rank=8"), ("seed=2", "rank=8"), ("seed=3", "rank=8")]
    assert reasons_of({"too low": [("seed=1", "rank=8")]}, points[:1]) == [
        "1 of 1 points:", "  seed=1 rank=8: too low",
    ]  # fmt: skip
    assert reasons_of({"too low": points[:2], "odd": points[2:]}, points) == [
        "3 of 3 points:", "  seed=1 (and 1 more): too low", "  seed=3: odd",
    ]  # fmt: skip
    many = {f"reason {number}": [(f"seed={number}", "rank=8")] for number in range(12)}
    asked = [*(one for (one,) in many.values()), ("seed=12", "rank=8")]
    said = reasons_of(many, asked)
    assert said[0] == "12 of 13 points:" and said[1] == "  seed=0: reason 0"
    assert said[10:] == ["  seed=9: reason 9", "  and 2 more reasons"]
    assert "more reasons" not in reasons_of(dict([*many.items()][:10]), asked)[-1]


def test_identity_forgets_names_and_the_place_of_records_only() -> None:
    settings = Settings.of(compose(["seed=1"])).flat
    renamed = {**settings, "sweep": "x", "label": "y", "tracker.root": "/z", "task.cache_dir": "/"}

    assert identity(settings) == identity(renamed)
    for key in ("seed", "training.max_steps", "cluster.name", "task.label"):
        assert identity(settings) != identity({**settings, key: "another"}), key


def test_seeds_share_a_setting_and_compressions_share_a_reference() -> None:
    one, two = (Settings.of(compose([f"seed={seed}"])).flat for seed in (1, 2))
    int8 = Settings.of(compose(["seed=1", "compression=int8"])).flat
    slow = Settings.of(compose(["seed=1", "cluster/wan=line_8m"])).flat

    assert identity(one) != identity(two) and identity(one, "seed") == identity(two, "seed")
    assert identity(one, "seed") != identity(int8, "seed") and identity(
        one, "seed", "compression"
    ) == identity(int8, "seed", "compression")
    assert identity(one, "seed", "compression") != identity(slow, "seed", "compression")


def test_tab_completion_stays_fast() -> None:
    """Hydra imports the plugin whenever run.py starts, also to complete a word."""
    heavy = "{'torch', 'mlflow', 'matplotlib', 'transformers', 'datasets', 'rich'}"
    script = f"import sys, hydra_plugins.xcloud_launcher; assert not {heavy} & set(sys.modules)"
    path = str(Path(__file__).parents[2] / "xcloud" / "_hydra")
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": path})


@pytest.mark.parametrize(
    ("taken", "free"), [((), "a"), (("a-2", "b"), "a"), (("a",), "a-2"), (("a", "a-2"), "a-3")]
)
def test_a_folder_whose_name_is_taken_gets_a_number(taken: tuple[str, ...], free: str) -> None:
    assert free_name("a", taken) == free


def test_differences_name_both_values() -> None:
    one, two = (
        Settings.of(compose([])).flat,
        Settings.of(compose(["training.max_steps=9", "seed=2"])).flat,
    )

    assert differences(one, two) == {"seed": (1, 2), "training.max_steps": (8, 9)}


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        (["seed=1", "seed=2"], ["none s1", "none s2"]),
        (["compression=int8", "compression=none"], ["int8+int8 s1", "none s1"]),
        (["cluster/wan=line_8m", "cluster/wan=line_1g"], ["line_8m s1", "line_1g s1"]),
        (
            ["training.max_steps=3 compression=int8", "training.max_steps=4 compression=int8"],
            ["max_steps=3 s1", "max_steps=4 s1"],
        ),
        (
            ["compression=svd_fp16_int8 compression.forward.svd.rate=0.2", "compression=none"],
            ["fp16(svd(0.2))+int8 s1", "none s1"],
        ),
        (
            [
                "strategy=pipeline compression=int8",
                "strategy=data_parallel compression=int8",
                "strategy=pipeline compression=none",
            ],
            ["pipeline int8+int8 s1", "data_parallel averaging int8 s1", "pipeline none s1"],
        ),
        # The label of a compressor says nothing of its block size.
        (
            ["compression=int8 +compression.forward.int8.block=32", "compression=int8"],
            ["int8+int8 block=32 s1", "int8+int8 s1"],
        ),
    ],
    ids=lambda value: value[0],
)
def test_names_say_what_differs(grid: list[str], names: list[str]) -> None:
    assert named(*grid) == names


def test_a_folder_needs_no_quotes() -> None:
    found = points("compression=svd_fp16_int8 seed=3", "compression=none seed=3")
    name_points(found)

    assert [point.folder for point in found] == ["fp16-svd-0.6+int8_s3", "none_s3"]


def test_also_adds_the_reference_once_for_each_seed() -> None:
    rate = "compression.forward.svd.rate"
    asked = [("+exp=a", f"{rate}={r}", f"seed={s}") for r in (0.2, 0.4) for s in (1, 2)]

    assert with_also(asked, {}) == asked
    assert with_also(asked, {"compression": "none"}) == [
        *asked,
        ("+exp=a", "seed=1", "compression=none"),
        ("+exp=a", "seed=2", "compression=none"),
    ]


def test_a_folder_has_a_name_that_every_file_system_takes() -> None:
    """Paths and texts of any length are settings, and stand in labels."""
    long = "/".join(["a" * 150, "ü" * 150])
    one, other = points(*(f"task.label='{long}/{end}' seed=1" for end in "xy"))
    name_points([one, other])

    assert one.label != other.label and long in one.label  # whole in points.csv
    assert one.folder != other.folder and one.folder.endswith("_s1")
    assert all(len(point.folder.encode()) <= MAX_NAME_BYTES for point in (one, other))
    with pytest.raises(ConfigError, match=r"sweep must have at most 140 bytes.*got 300"):
        check_name("s" * 300)


@pytest.mark.parametrize(
    ("key", "spellings"),
    [
        ("training.optimizer.weight_decay", ["0", "0.0", "-0.0", "0e0"]),
        ("training.optimizer.learning_rate", ["1", "1.0"]),
        ("training.optimizer.learning_rate", ["1e-3", "0.001", "0.0010"]),
    ],
)
def test_a_number_is_one_setting_however_it_is_spelled(key: str, spellings: list[str]) -> None:
    found = points(*(f"{key}={spelling} seed=1" for spelling in spellings))
    other = points(f"{key}=0.5 seed=1")[0]
    name_points([*found, other])

    assert len({point.identity for point in found}) == 1 != other.identity
    assert len({point.label for point in found}) == 1 and found[0].label != other.label
    for point in found:
        assert same_overrides(found[0].overrides, point.overrides)
        assert differences(found[0].settings, point.settings) == {}
    assert not same_overrides(found[0].overrides, other.overrides)

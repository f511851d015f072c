"""Going on from the files of a lost run, bit for bit, and with changed settings."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.attempts import (
    SETTINGS,
    Attempt,
    changed,
    undisturbed,
    whole,
)
from tests.channels import same_state
from tests.combinations import FIRST, STEPS, experiment, interrupted, run
from tests.nightly import each_once
from tests.resumable_jobs import CODECS, SHAPES, job
from xcloud.base.errors import ConfigError, DataError
from xcloud.features.checkpoints.common_step import newest_common
from xcloud.pipeline.hook import Hook, StepReport
from xcloud.record.checkpoint_files import CheckpointFolder


@pytest.mark.parametrize(
    ("shape", "codec"),
    each_once([*SHAPES], ["int4, delta", "svd with warm start, int4", "phases"]),
)
def test_a_run_that_was_lost_goes_on_from_its_files_bit_for_bit(
    shape: str, codec: str, tmp_path: Path
) -> None:
    def attempt() -> Attempt:
        return Attempt(tmp_path, job(SHAPES[shape], CODECS[codec]))

    first = attempt()
    assert first.from_step == 0
    first.train(5)
    second = attempt()
    assert second.from_step == 4
    second.train()

    assert same_state(second.state, undisturbed(shape, codec))
    assert second.folder.agreed_steps() == [9, 8]
    assert {e["step"] for e in first.told("checkpoint")} == {2, 4}


def test_another_compression_goes_on_without_what_the_old_one_remembers(tmp_path: Path) -> None:
    shape = "two clouds, GPipe"
    Attempt(tmp_path, job(SHAPES[shape], CODECS["int4, delta"])).train(4)
    other = changed(tmp_path, shape, "topk and randomk, error feedback", compression="b")
    found = other.holders[0].changes(4)
    assert found.said == ["compression a -> b"]
    assert found.price(True) == "lost by this: what compression remembers of earlier steps"
    assert found.price(False) == "nothing is lost by this"
    other.train(4)  # loads, and trains no step
    weights = [
        {key: value for key, value in state.items() if key.startswith("trainer.")}
        for states in (other.state, whole(SHAPES[shape], "int4, delta", 4)) for state in states
    ]  # fmt: skip
    assert same_state(weights[:2], weights[2:])
    other.train(5)


def test_another_number_of_lanes_takes_over_the_stages(tmp_path: Path) -> None:
    Attempt(tmp_path, job(SHAPES["2x2 lanes, 1F1B"], CODECS["plain"])).train(4)
    fewer = changed(tmp_path, "two clouds, GPipe", "plain", cluster__clouds="one each")
    assert fewer.from_step == 4
    fewer.train(4)
    parts = [fewer.folder.read(4, rank) for rank in (0, 2)]
    for state, part in zip(fewer.state, parts, strict=True):
        own = {key: value for key, value in state.items() if key.startswith("trainer.")}
        assert same_state([own], [{key: part[key] for key in own}])
    fewer.train()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": "2"}, "seed is 2: that would be another run; set seed back to 1, or start a"),
        ({"model.size": "9"}, "model.size is 9: that would be another run; leave model.size out"),
    ],
)
def test_what_cannot_go_on_is_refused_with_the_reason(
    settings: dict[str, str], said: str, tmp_path: Path
) -> None:
    shape = SHAPES["two clouds, GPipe"]
    Attempt(tmp_path, job(shape, CODECS["plain"])).train(3)
    with pytest.raises(ConfigError, match=said):
        Attempt(tmp_path, job(shape, CODECS["plain"]), settings={**SETTINGS, **settings})


def test_another_release_or_other_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES["two clouds, GPipe"]
    Attempt(tmp_path, job(shape, CODECS["plain"])).train(3)
    attempt = Attempt(tmp_path, job(shape, CODECS["plain"]))
    other = {"data": {"texts of train": "2", "texts of dev": "1"}}
    said = "not what the checkpoint of step 2 was made with: texts of dev, texts of train"
    with pytest.raises(DataError, match=said):
        attempt.holders[0].restore(2, {}, other)
    other_cluster = changed(tmp_path, "two clouds, GPipe", "plain", cluster__clouds="other")
    with pytest.raises(DataError, match=said):
        other_cluster.holders[0].restore(2, {}, other)
    monkeypatch.setattr("xcloud.features.checkpoints.resume.__version__", "99")
    with pytest.raises(ConfigError, match=r"it was written by xcloud .*, this is 99"):
        Attempt(tmp_path, job(shape, CODECS["plain"]))


def test_training_longer_or_with_another_rate_is_said_and_goes_on(tmp_path: Path) -> None:
    shape = "two clouds, GPipe"
    Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"])).train(4)
    longer = changed(tmp_path, shape, "plain", training__max_steps="12")
    assert longer.from_step == 4
    found = longer.holders[0].changes(4)
    assert found.said == ["training.max_steps 9 -> 12"]
    assert found.price(True) == "nothing is lost by this"
    longer.train()
    assert same_state(longer.state, undisturbed(shape))


def test_a_run_that_is_to_have_fewer_steps_than_are_done_is_refused_and_loses_none(
    tmp_path: Path,
) -> None:
    shape = "two clouds, GPipe"
    Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"])).train(4)
    kept = CheckpointFolder(tmp_path).steps()
    with pytest.raises(ConfigError, match=r"4 steps are done, and training.max_steps is 3"):
        changed(tmp_path, shape, "plain", training__max_steps="3")
    assert CheckpointFolder(tmp_path).steps() == kept
    assert changed(tmp_path, shape, "plain", training__max_steps="4").from_step == 4


def test_parts_of_ranks_that_are_no_more_keep_nobody_from_going_on_and_are_pruned(
    tmp_path: Path,
) -> None:
    four, two = "2x2 lanes, 1F1B", "two clouds, GPipe"
    Attempt(tmp_path, job(SHAPES[four], CODECS["plain"])).train(4, lost=[3])
    fewer = changed(tmp_path, two, "plain", cluster__clouds="one each")
    assert fewer.from_step == 2
    fewer.train(6)
    assert [(s, fewer.folder.ranks(s)) for s in fewer.folder.steps()] == [(6, [0, 1]), (4, [0, 1])]
    again = changed(tmp_path, four, "plain", cluster__clouds="two")
    assert again.from_step == 6
    again.train()


def test_parts_of_two_attempts_with_other_ranks_are_named(tmp_path: Path) -> None:
    four, two = "2x2 lanes, 1F1B", "two clouds, GPipe"
    first = Attempt(tmp_path, job(SHAPES[four], CODECS["plain"]))
    first.train(4)
    kept = {p: p.read_bytes() for p in first.folder.step_dir(4).glob("rank-3.*")}
    first.folder.delete_after(2, 0, roll_back=True)
    changed(tmp_path, two, "plain", cluster__clouds="one each").train(4)
    for path, data in kept.items():  # from a copy of the folder, say
        path.write_bytes(data)
    again = changed(tmp_path, four, "plain", cluster__clouds="two")
    assert again.from_step == 2
    assert "its parts are of different attempts at this step" in again.note


@pytest.mark.parametrize("line", ["ok", "ok agreed", "ok agreed x", "bad", "", "agreed"])
def test_what_is_no_line_of_a_checkpoint_counts_as_none(line: str) -> None:
    assert newest_common({0: {"4": "ok written 1"}, 1: {"4": line}}, str) == (0, "")


class Counter(Hook):
    own_names = ("count",)
    name = "counter"

    def __init__(self, by: int) -> None:
        self.by, self.count = by, 0

    def after_update(self, step: int, report: StepReport) -> None:
        self.count += self.by


@dataclass(frozen=True)
class Counts:
    by: int
    made: list[Counter] = field(default_factory=list)

    def join(self, context: Any) -> Counter:
        self.made.append(Counter(self.by))
        return self.made[-1]


def test_two_further_parts_of_one_class_go_on_each_from_its_own_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = {"ones": Counts(1), "tens": Counts(10)}
    job = replace(experiment(FIRST), hooks=hooks)
    run(job, tmp_path / "first", monkeypatch)
    interrupted(tmp_path / "first", tmp_path / "second")
    run(job, tmp_path / "second", monkeypatch)
    for hook in hooks.values():
        assert [made.count for made in hook.made] == 2 * job.cluster.num_ranks * [hook.by * STEPS]

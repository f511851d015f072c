"""A run goes on from its state in memory or its files, bit for bit: every rank is built anew
with the real wiring, and must do what the old ones would have done.

Not repeatable by design, and so not here: the noise of defences, which the machine draws. Threads
of one process share torch's generator, so only the job of a single rank has dropout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import dropout

from tests.attempts import (
    CODECS,
    SETTINGS,
    SHAPES,
    Attempt,
    Shape,
    changed,
    job,
    undisturbed,
    whole,
)
from tests.channels import same_state, stored
from tests.combinations import FIRST, STEPS, experiment, interrupted, run
from tests.nightly import each_once
from tests.pipelines import in_threads, samples
from tests.trainers import Rank
from xcloud.base.errors import ConfigError, DataError
from xcloud.comm.state import State, joined, states_of
from xcloud.features.checkpoints.common_step import newest_common
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline.hook import Hook, Hooks, StepReport
from xcloud.pipeline.schedule import GPipe
from xcloud.record.checkpoint_files import CheckpointFolder

SAVED_AT, LAST_STEP = 3, 6  # 16 samples: from step 3 on, memories have seen what comes


def train(made: Sequence[Rank], until_step: int) -> dict[tuple[int, int], Any]:
    """By rank and step: what it tells of the update, and the bytes it sent on each line."""

    def one(rank: Rank) -> dict[tuple[int, int], Any]:
        told, begun = {}, num_bytes(rank)
        for step in range(rank.trainer.num_updates + 1, until_step + 1):
            report = rank.update(step)
            assert isinstance(report, StepReport)
            sent = [now - then for now, then in zip(num_bytes(rank), begun, strict=True)]
            begun = num_bytes(rank)
            told[rank.number, step] = (
                report.loss, report.grad_norm, report.learning_rate, report.num_samples, sent
            )  # fmt: skip
        return told

    found = in_threads([lambda r=rank: one(r) for rank in made])
    return {place: report for told in found for place, report in told.items()}


def num_bytes(rank: Rank) -> list[int]:
    return [sum(link.num_bytes.values()) for link in rank.wiring.ends.records]


def evaluate(made: Sequence[Rank], step: int) -> Any:
    pieces = [torch.arange(10, 14), torch.arange(14, 20)]
    layout = made[0].trainer.pipeline.layout
    first = [rank for rank in made if layout.placement(rank.number).replica == 0]
    return in_threads(
        [lambda r=rank: r.trainer.pipeline.predict(pieces, samples, step) for rank in first]
    )


def states(made: Sequence[Rank]) -> list[State]:
    return [stored(rank.state_dict()) for rank in made]


def load(made: Sequence[Rank], saved: Sequence[State]) -> None:
    for rank, state in zip(made, saved, strict=True):
        rank.load_state_dict(state)


@pytest.mark.parametrize(("shape", "codec"), each_once([*SHAPES], [*CODECS], count=3))
def test_a_job_built_anew_goes_on_from_the_state_of_the_old_one_bit_for_bit(
    shape: str, codec: str
) -> None:
    original, restored = (job(SHAPES[shape], CODECS[codec]) for _ in range(2))
    train(original, SAVED_AT)
    evaluate(original, SAVED_AT)
    saved = states(original)
    expected = train(original, LAST_STEP)
    load(restored, saved)
    found = train(restored, LAST_STEP - 1)
    quality = evaluate(restored, LAST_STEP - 1)
    last = train(restored, LAST_STEP)

    assert found | last == expected and len(expected) == len(original) * (LAST_STEP - SAVED_AT)
    assert same_state(states(restored), states(original))
    assert quality == evaluate(original, LAST_STEP - 1)


def test_dropout_goes_on_as_it_would_have() -> None:
    shape = Shape(ClusterLayout({"local": Cloud(1, [0, 1, 2])}, "free"), GPipe(2))
    jobs = [job(shape, CODECS["plain"]) for _ in range(3)]
    for (rank,) in jobs[:2]:
        for stage in rank.trainer.pipeline.stages.values():
            stage.layer.register_forward_hook(lambda layer, given, made: dropout(made, 0.3))
    original, restored, without = jobs
    train(original, SAVED_AT)
    saved = states(original)
    load(restored, saved)
    load(without, saved)
    expected = train(original, LAST_STEP)

    assert train(restored, LAST_STEP) == expected != train(without, LAST_STEP)
    assert same_state(states(restored), states(original))


@pytest.mark.parametrize("left_out", ["trainer.stage 0.moments", "channels."])
def test_a_job_that_lacks_some_of_it_does_something_else(left_out: str) -> None:
    shape = SHAPES["two clouds, GPipe"]
    original, restored, fresh = (job(shape, CODECS["int4, delta"]) for _ in range(3))
    train(original, SAVED_AT)
    saved = states(original)
    for own, new in zip(saved, states(fresh), strict=True):
        for key in [key for key in own if key.startswith(left_out)]:
            del own[key]
        own.update({key: value for key, value in new.items() if key.startswith(left_out)})
    load(restored, saved)

    assert train(restored, LAST_STEP) != train(original, LAST_STEP)


def test_a_state_is_of_one_rank_and_its_settings() -> None:
    shape, other = SHAPES["two clouds, GPipe"], SHAPES["2x2 lanes, 1F1B"]
    saved = states(job(shape, CODECS["plain"]))
    with pytest.raises(ValueError, match=r"a Trainer contains 'stage 0"):
        job(shape, CODECS["plain"])[1].load_state_dict(saved[0])
    lanes = job(other, CODECS["int4, delta"])
    with pytest.raises(ValueError, match=r"a Wiring contains 'boundary 0 .*other settings"):
        lanes[0].load_state_dict(states(lanes)[1])


class Counted(Hook):
    name = "counted"
    own_names = ("n",)

    def __init__(self, n: int) -> None:
        self.n = n


def test_two_hooks_of_one_name_are_refused_since_a_checkpoint_would_keep_one() -> None:
    one, other = Counted(1), Counted(2)
    assert Hooks([one, None, Hook(), Hook()]).children() == {"counted": one}
    with pytest.raises(ValueError, match="two parts of a rank keep their state as 'counted'"):
        Hooks([one, Hook(), other]).children()
    with pytest.raises(ValueError, match="'counted'"):
        joined({"trainer": None, "counted": one}, Hooks([other]).children())
    own = {"first": one, "second": other}  # of a user, who has named each
    assert states_of(joined(Hooks([one]).children(), {"hooks": own})) == {
        "counted.n": 1, "hooks.first.n": 1, "hooks.second.n": 2
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "codec"),
    each_once([*SHAPES], ["int4, delta", "svd with warm start, int4", "phases"], count=2),
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

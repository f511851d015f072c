"""A run goes on from its state in memory, bit for bit: every rank is built anew with the real
wiring, takes over what the old ones had, and must do what they would have done.

Not repeatable by design, and so not here: the noise of defences, which the machine draws. Threads
of one process share torch's generator, so only the job of a single rank has dropout.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import dropout

from tests.channels import same_state, stored
from tests.nightly import each_once
from tests.pipelines import in_threads, samples
from tests.resumable_jobs import CODECS, SHAPES, Shape, job
from tests.trainers import Rank
from xcloud.comm.state import State, joined, states_of
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline.hook import Hook, Hooks, StepReport
from xcloud.pipeline.schedule import GPipe

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


@pytest.mark.parametrize(("shape", "codec"), each_once([*SHAPES], [*CODECS]))
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

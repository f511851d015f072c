"""Small sums of planner and schedules, beside numbers worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from xcloud.pipeline.one_forward_one_backward import max_kept
from xcloud.pipeline.schedule import Action
from xcloud.planner.search import Space, even_split


def pieces(*seconds: float) -> Any:
    at = [SimpleNamespace(at=lambda samples, s=s: s) for s in seconds]
    nothing = SimpleNamespace(at=lambda samples: 0.0)
    return [SimpleNamespace(forward_s=one, backward_s=nothing) for one in at]


def test_a_slow_cloud_gets_fewer_blocks() -> None:
    """Of eight equal blocks a cloud three times slower takes two: 3 x 2 = 6 x 1."""
    eight = pieces(*[1.0] * 8)
    cuts = range(9)
    assert even_split(eight, cuts, (1.0, 3.0)) == (6,)
    assert even_split(eight, cuts, (3.0, 1.0)) == (2,)
    assert even_split(eight, cuts, (1.0, 1.0)) == (4,)


def test_micro_batches_are_dealt_evenly_to_replicas() -> None:
    layout = SimpleNamespace(min_micro_batches=lambda: 2, num_replicas=2)
    space = SimpleNamespace(micro_batches=(1, 2, 3, 4, 6))
    assert Space.counts(space, SimpleNamespace(layout=layout)) == [2, 4, 6]  # type: ignore[arg-type]


def test_each_rank_of_a_stage_keeps_its_own_micro_batches() -> None:
    """Four forwards before the first backward, dealt to two ranks: each keeps two."""
    actions = [
        Action(kind, 0, micro_batch=i) for kind in ("forward", "backward") for i in range(4)
    ]
    assert max_kept(actions, num_ranks=2, activations=10.0, waiting=0.0) == 20.0
    assert max_kept(actions, num_ranks=1, activations=10.0, waiting=0.0) == 40.0

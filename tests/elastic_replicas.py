"""Replicas of one number in threads that are late, leave and come back; what their hub told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.local_replicas import (
    Post,
    PostLinks,
)
from xcloud.comm.chain import Chain
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.parallel.elastic_rounds import ElasticRounds
from xcloud.parallel.hub import Absence, Ends, Hub, Member, Told
from xcloud.parallel.local_updates import LocalUpdates
from xcloud.parallel.merging import weighted_mean
from xcloud.parallel.outer_parameters import OuterParameters
from xcloud.parallel.rank_group import RankGroup
from xcloud.parallel.step_budget import StepBudget

ALONE = RankGroup.alone()


class Diary:
    """What the hub told."""

    def __init__(self) -> None:
        self.merges: list[Told] = []
        self.absences: list[Absence] = []
        self.hub_step = 0  # that it has begun
        self.changed = threading.Condition()

    def merge(self, told: Told) -> None:
        with self.changed:
            self.merges.append(told)
            self.changed.notify_all()

    def absence(self, absence: Absence) -> None:
        with self.changed:
            self.absences.append(absence)
            self.changed.notify_all()

    def begin(self, step: int) -> None:
        with self.changed:
            self.hub_step = step
            self.changed.notify_all()

    def wait_for(self, found: Callable[[Diary], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: found(self), 20), (self.merges, self.absences)

    @property
    def weights(self) -> dict[int, tuple[float, ...]]:
        return {told.step: told.weights for told in self.merges}

    @property
    def words(self) -> list[tuple[int, str]]:
        return [(absence.replica, absence.what) for absence in self.absences]


def end_of(
    links: PostLinks,
    parameters: list[nn.Parameter],
    settings: LocalUpdates,
    diary: Diary,
    codec: Callable[[], Any] = Chain,
    feedback: bool = False,
) -> Hub | Member:
    shapes = {str(i): p.shape for i, p in enumerate(parameters)}
    codecs = [TensorCodec(shapes, lambda *_: codec(), 7 + i, feedback) for i in (0, 1)]
    named = dict(zip(shapes, parameters, strict=True))
    values = OuterParameters(named, [range(len(named))], ALONE, settings.outer)
    ends = Ends(values, *codecs, links)
    if links.replica:
        return Member(ends)
    return Hub(
        ends, weighted_mean, settings.late, settings.leave, settings.wait_s,
        diary.merge, diary.absence,
    )  # fmt: skip


class Scalar:
    """A replica of one number, which each step changes by a known amount."""

    def __init__(
        self,
        replica: int,
        post: Post,
        settings: LocalUpdates,
        last_step: int,
        diary: Diary,
        change: float = 1.0,
        is_newcomer: bool = False,
        **options: Any,
    ) -> None:
        self.parameter = nn.Parameter(torch.zeros(1))
        self.change, self.replica, self.is_newcomer = change, replica, is_newcomer
        self.made: list[int] = []
        self.rounds = ElasticRounds(
            settings,
            [self.parameter],
            ALONE,
            end_of(post.links(replica), [self.parameter], settings, diary, **options),
            last_step,
            lambda step: 1.0,
            StepBudget(settings.every, ALONE),
        )

    def run(
        self, first: int, last: int, before: Callable[[int], None] = lambda step: None
    ) -> None:
        if self.is_newcomer:
            first = self.rounds.join() + 1
        for step in range(first, last + 1):
            if not self.rounds.is_idle(step):
                self.rounds.begin_step(step)
                before(step)
                self.parameter.data += self.change
                self.made.append(step)
            self.rounds.end_step(step)

    @property
    def value(self) -> float:
        return float(self.parameter.detach())


def asked(post: Post, diary: Diary, replica: int, at: int) -> Callable[[int], None]:
    """For the hub, which waits in step `at` until a message of this replica lies in its box."""

    def before(step: int) -> None:
        diary.begin(step)
        with post.changed:
            assert step != at or post.changed.wait_for(lambda: post.queues.get((replica, 0)), 20)

    return before

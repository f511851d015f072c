"""The autopilot as a feature: it changes compression and schedule while a run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from xcloud.base.errors import ConfigError
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Selectable
from xcloud.features.autopilot.pilot import RunPilot, forecast_of
from xcloud.features.autopilot.settings import Autopilot
from xcloud.job.job import PipelineJob
from xcloud.job.needs import Conflict, FeatureUse, no_plan, one_pipeline, one_update_at_a_time
from xcloud.pipeline.one_forward_one_backward import max_kept
from xcloud.pipeline.schedule import Action, Schedule
from xcloud.pipeline.trainer import Trainer
from xcloud.rank.feature import BuiltRank, Feature, FeatureAtRank
from xcloud.rank.switching import check_choices


def one_rank_at_metered_ends(job: PipelineJob) -> Conflict | None:
    layout = job.cluster
    for stage in range(layout.num_stages - 1):
        ends = [layout.ranks_of(s) for s in (stage, stage + 1)]
        wan = layout.wan_between(ends[0][0], peer=ends[1][0])
        most = max(map(len, ends))
        if wan is not None and wan.is_metered and most > 1:
            what = f"after stage {stage} {most} ranks share it (cluster/wan=real)"
            return Conflict(setting=what, remedy="give the clouds on both sides one rank each")
    return None


def around(own: object, autopilot: Autopilot) -> Selectable:
    """Return the run's own compression and the choices, without those that are equal."""
    if isinstance(own, Selectable):  # of a copy of the experiment
        return own
    if not isinstance(own, Compression):
        raise ConfigError(
            "autopilot chooses one compression for all boundaries, and the run's own changes "
            "with boundary or phase; choose a plain one (compression=none), or autopilot=off"
        )
    choices = {own.label: own}
    for choice in autopilot.choices.values():
        choices.setdefault(choice.label, choice)
    return Selectable(choices, chosen_by="autopilot")


def schedules_of(
    autopilot: Autopilot, own: Schedule, num_stages: int, num_lanes: int = 1
) -> list[Schedule]:
    """Return the run's own schedule and those with the other numbers.

    Left out are those that keep the activations of more samples at once than the run's number
    of micro-batches does with the most in flight. Raises ConfigError for a number that no
    schedule can have.
    """
    if not autopilot.micro_batches and not autopilot.in_flight:
        return [own]
    if autopilot.in_flight and not hasattr(own, "num_in_flight"):
        raise ConfigError(
            f"autopilot.in_flight is {list(autopilot.in_flight)}, but {own.label} has no "
            "num_in_flight: choose schedule=one_forward_one_backward or zero_bubble, or leave "
            "it empty"
        )

    def order(schedule: Schedule, stage: int) -> list[Action]:
        return schedule.for_lanes(num_stages, num_lanes).actions(stage, num_stages)

    def share(schedule: Schedule) -> float:
        """Return the share of a pass's samples whose activations the fullest stage keeps."""
        m = schedule.num_micro_batches
        orders = [order(schedule, stage=stage) for stage in range(num_stages)]
        return max(
            max_kept(order, num_ranks=1, activations=1 / m, waiting=1 / m) for order in orders
        )

    given: Any = own
    flights = [own, *(replace(given, num_in_flight=number) for number in autopilot.in_flight)]
    # Whoever sets in_flight accepts the memory of the largest of these; a choice made during the
    # run must never be the first to need more. 1e-9: shares are sums of 1 / m.
    allowed = max(share(schedule) for schedule in flights) + 1e-9
    schedules: dict[tuple[object, ...], Schedule] = {}
    for m in (own.num_micro_batches, *autopilot.micro_batches):
        every = (replace(flight, num_micro_batches=m) for flight in flights)
        fitting = [schedule for schedule in every if share(schedule) <= allowed]
        if not fitting:
            raise ConfigError(
                f"autopilot.micro_batches: {m} of {own.label} would keep the activations of "
                "more samples at once than the run does now; leave it out, or allow fewer at "
                "once (autopilot.in_flight)"
            )
        for schedule in fitting:
            # Two settings can give one order of actions (more in flight than micro-batches).
            schedules.setdefault(tuple(order(schedule, stage=0)), schedule)
    return list(schedules.values())


class AutopilotAtRank(FeatureAtRank):
    """The autopilot of one rank: it switches compression and schedule."""

    def hook(self, built: BuiltRank, trainer: Trainer) -> RunPilot:
        context = built.context
        # Rank 0 alone decides, so only it times the codecs of all choices.
        forecast = forecast_of(context.job, context.device) if context.rank == 0 else None
        return RunPilot(
            context.job, built.wiring, trainer, reporter=context.reporter, forecast=forecast
        )


class AutopilotFeature(Feature):
    """A choice, again and again, between compressions and schedules."""

    at_work = AutopilotAtRank

    uses = (
        FeatureUse(
            setting="autopilot",
            asked=lambda job: job.autopilot,
            why={
                no_plan: "changes the compression",
                one_pipeline: "decides in one rank for a single pipeline",
                one_update_at_a_time: "changes settings where an update has ended",
                one_rank_at_metered_ends: "measures a real network from one rank at each end",
            },
            without="set autopilot=off",
        ),
    )
    left_out_of_trials = MappingProxyType({"autopilot": None})

    def adjusted(self, job: PipelineJob) -> Mapping[str, Any]:
        assert job.autopilot is not None
        layout = job.cluster
        schedules = schedules_of(
            job.autopilot, job.schedule, layout.num_stages, num_lanes=layout.num_lanes
        )
        return {"compression": around(job.compression, job.autopilot), "schedules": schedules}

    def check(self, job: PipelineJob) -> None:
        super().check(job)
        check_choices(job, own=replace(job, autopilot=None), by="autopilot")

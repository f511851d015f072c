"""plan=show and plan=apply: measure, search, show; choose the settings that are run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from xcloud.base.errors import ConfigError
from xcloud.base.project import in_project
from xcloud.cluster.layout import ClusterLayout
from xcloud.comm.activation_cache import MEGABYTE
from xcloud.comm.compression import Compression, Phased
from xcloud.job import config as configs
from xcloud.job.experiment import Experiment
from xcloud.parallel.schedule import GPipe, OneForwardOneBackward, ZeroBubble
from xcloud.parallel.strategy import Strategy
from xcloud.plan.kept import Keeping, OverEpochs, over_epochs
from xcloud.plan.line import lines_of
from xcloud.plan.plans import NO_COMPRESSION, Arranged, Plan, Priced
from xcloud.plan.pricing import Pricer
from xcloud.plan.profile import Profile, WorkFactor, as_in_runs, read_profile, write_profile
from xcloud.plan.recorded import PREDICTED_FILE
from xcloud.plan.report import Report, write_plan
from xcloud.plan.search import (
    Space,
    best_pipeline,
    crossings,
    over_bandwidth,
    over_micro_batches,
    search,
    splits_of,
    step_at,
)
from xcloud.plan.settings import Planning
from xcloud.planner import profile_key, profiling
from xcloud.planner import trial as plan_trial
from xcloud.planner.reference import reference_s
from xcloud.record.timeline import write_trace
from xcloud.report.plan_picture import write_plan_picture
from xcloud.report.plan_table import print_plans
from xcloud.security.defences import LABEL

PICTURE = "plan.png"


def planned(config: Any, run_dir: Path) -> Any:
    """The config to run: as it is without a plan, that of the best plan with plan=apply, None with
    plan=show. Leaves plan.json and plan.png in run_dir. Raises ConfigError."""
    job = configs.job_from_config(config)
    if job.plan is None:
        return config
    if not isinstance(job, Experiment):
        raise ConfigError("plan= knows jobs whose model is cut into stages, and this is another")
    job.check()
    print(job.headline, flush=True)
    trial_s = partial(plan_trial.measured_s, config, job, job.plan.trial_steps)
    planner = Planner(job, job.plan, configs.built(config, "cluster"), trial_s)
    report = planner.report()
    print_plans(report)
    chosen = report.ranked.best[0] if job.plan.mode == "apply" else None
    write_plan(run_dir, report, chosen)
    is_drawn = write_plan_picture(run_dir / PICTURE, report)
    print(run_dir / PICTURE if is_drawn else run_dir, flush=True)
    if chosen is None:
        return None
    if (
        len(chosen.plan.ends) > 1
        and planner.arranged[chosen.plan.strategy].layout.num_replicas == 1
    ):
        # The measured step that it is shown with is one of the last.
        epochs = report.over_epochs.get(chosen.plan)
        last = report.pricer if epochs is None else epochs.at_the_end
        foreseen = last.predict(chosen.plan).timeline
        write_trace(run_dir / PREDICTED_FILE, foreseen, {"plan": chosen.plan.strategy})
    given = configs.plain_settings(config, without=("hydra",))
    return configs.changed(config, planner.settings(chosen, report, given))


@dataclass
class Planner:
    """cluster: as the settings have it, before a strategy arranged it. trial_s: makes a trial run
    of the job (plan_trial.py), and returns seconds of a step."""

    job: Experiment
    plan: Planning
    cluster: ClusterLayout
    trial_s: Callable[[], float]

    def __post_init__(self) -> None:
        job = self.job
        if job.compression.boundaries:
            raise ConfigError(
                "plan: compression differs from boundary to boundary, which is not priced yet; "
                "choose "
                "one compression for all"
            )
        # Not what derives from them: it may have another order.
        if type(job.schedule) not in (GPipe, OneForwardOneBackward, ZeroBubble):
            raise ConfigError(f"plan: schedules like {job.schedule!r} are not priced yet")
        self.batch_size = job.training.batch_size // job.training.accumulate_steps
        self.counts = self.plan.counts(self.batch_size, job.schedule.num_micro_batches)
        assert isinstance(job.compression, Compression | Phased), (
            "autopilot is refused with a plan"
        )
        self.own_compression, self.candidates = self._candidates(job.compression)
        self.not_planned: dict[str, str] = {}
        self.splits_backward = self._splits_backward()
        self.arranged = self._arranged()

    def report(self) -> Report:
        profile, stale = self.profile()
        stale = [*stale, *plan_trial.unusual_because(profile.work_factor)]
        profile = as_in_runs(profile)
        started_s = time.perf_counter()
        pricer = Pricer(
            profile, self.arranged, self.job.training.batch_size,
            self.job.training.accumulate_steps,
        )  # fmt: skip
        pieces = profile.pieces
        splits = {}
        for name, found in list(self.arranged.items()):
            splits[name] = splits_of(pieces, found.num_stages)
            if not all(piece.blocks for piece in pieces) and found.num_stages != 1:
                fits = found.num_stages == len(pieces)
                splits[name] = [tuple(range(1, len(pieces) + 1))] if fits else []
            if not splits[name]:
                self.not_planned[name] = (
                    f"the profile has {len(pieces)} pieces that cannot be joined to "
                    f"{found.num_stages} stages"
                )
                del splits[name], self.arranged[name]
        names = [name for name in self.candidates if name in profile.compressors]
        if missing := set(self.candidates) - set(names):
            why = f"the profile has no costs of {', '.join(sorted(missing))}"
            stale = [*stale, why]
            if self.own_compression in missing or NO_COMPRESSION in missing:
                raise ConfigError(f"plan.profile: {why}")
        if self.job.training.activation_cache_mb and not profile.train_samples:
            why = "it does not say how many samples there are; the first epoch alone is predicted"
            stale = [*stale, why]
        own = self._own(profile)
        space = Space(own, splits, self.counts, names, self.plan.search, self.splits_backward)
        ranked = search(pricer, space, self.plan.rows)
        if not ranked.best:
            raise ConfigError(
                f"plan: none of {', '.join(map(str, self.counts))} micro-batches suits this "
                "cluster; give plan.micro_batches others"
            )
        crosses, best = self.cluster.crosses_clouds, ranked.best[0].plan
        took_s = time.perf_counter() - started_s
        step_s, pipeline = step_at(pricer, best), best_pipeline(pricer, space, ranked)
        counted = [] if pipeline is None else self._counts_for(pipeline)
        return Report(
            pricer,
            ranked,
            took_s,
            crossings(step_s, names) if crosses else [],
            [] if pipeline is None else over_micro_batches(pricer, pipeline, counted),
            over_bandwidth(step_s, names) if crosses else {},
            pipeline,
            stale,
            self.not_planned,
            self._over_epochs(pricer, [best, own]),
        )

    def _over_epochs(self, pricer: Pricer, plans: Sequence[Plan]) -> dict[Plan, OverEpochs]:
        training, num_samples = self.job.training, pricer.profile.train_samples
        if not training.activation_cache_mb or not num_samples:
            return {}
        max_bytes = training.activation_cache_mb * MEGABYTE
        keeping = Keeping(max_bytes, num_samples, training.max_steps)
        found = {plan: over_epochs(pricer, plan, keeping) for plan in plans}
        return {plan: epochs for plan, epochs in found.items() if epochs is not None}

    def settings(self, chosen: Priced, report: Report, given: Mapping[str, Any]) -> dict[str, Any]:
        """What to change in the config for this plan. given: all settings, as plain containers."""
        plan = chosen.plan
        schedule = plan.schedule
        found: dict[str, Any] = {
            "plan": None,
            "schedule": {
                "_target_": f"{type(schedule).__module__}.{type(schedule).__qualname__}",
                **asdict(schedule),  # type: ignore[call-overload]
            },
        }
        if plan.compression != self.own_compression:
            found["compression"] = given["plan"]["compressors"][plan.compression]
        if plan.strategy != self.job.strategy.name:
            found["strategy"] = given["plan"]["strategies"][plan.strategy]
        counts = report.counts(plan)
        if len(plan.ends) > 1 and counts and plan.ends != report.ranked.own.plan.ends:
            found["model.blocks_per_stage"] = counts[:-1]
        return found

    def _candidates(
        self, own: Compression | Phased
    ) -> tuple[str, dict[str, Compression | Phased]]:
        """The name of the job's own compressor, and all by name."""
        found: dict[str, Compression | Phased] = {NO_COMPRESSION: Compression()}
        found |= self.plan.compressors
        for name, other in found.items():
            if repr(other) == repr(own) or (own.is_identity and name == NO_COMPRESSION):
                return name, found
        return own.label, found | {own.label: own}

    def _splits_backward(self) -> bool:
        """Whether the job may put off gradients of weights."""
        try:
            schedule = ZeroBubble(self.job.schedule.num_micro_batches)
            replace(self.job, schedule=schedule, plan=None)
        except ConfigError as error:
            self.not_planned["schedule=zero_bubble"] = str(error)
            return False
        return True

    def _arranged(self) -> dict[str, Arranged]:
        """Every strategy that the cluster, the task and who may see what allow."""
        own, found = self.job.strategy, dict[str, Arranged]()
        wanted = {own.name: own}
        if "strategy" in self.plan.search:
            wanted = {**self.plan.strategies, **wanted}
        for name, strategy in wanted.items():
            try:
                layout = strategy.arrange(self.cluster)
                fewest = layout.min_micro_batches()
                schedule = GPipe(max(fewest, self.job.schedule.num_micro_batches))
                other = replace(
                    self.job, cluster=self.cluster, strategy=strategy, schedule=schedule, plan=None
                )
            except ConfigError as error:
                if name == own.name:
                    raise
                self.not_planned[name] = str(error)
                continue
            if layout.num_replicas == 1 and strategy.averaging is not None:
                self.not_planned[name] = "there is one replica, so nothing is averaged"
                continue
            if self._takes_texts_elsewhere(other):
                self.not_planned[name] = (
                    "each of two clouds has texts that the other has not, and would need these"
                )
                continue
            found[name] = Arranged(strategy, layout)
        return found or {own.name: Arranged(own, self.job.cluster)}

    def _takes_texts_elsewhere(self, other: Experiment) -> bool:
        """Whether two clouds hold texts of their own, not labels, and one would read more."""
        own = {cloud: self.job.fields_of_cloud(cloud) for cloud in self.job.cluster.clouds}
        texts = [fields - {LABEL} for fields in own.values()]
        apart = any(a - b and b - a for a, b in combinations(texts, 2))
        return apart and any(other.fields_of_cloud(cloud) - own[cloud] for cloud in own)

    def _own(self, profile: Profile) -> Plan:
        job, arranged = self.job, self.arranged.get(self.job.strategy.name)
        if arranged is None:
            raise ConfigError(
                f"plan: strategy {job.strategy.name}: {self.not_planned[job.strategy.name]}"
            )
        pieces = profile.pieces
        ends = tuple(range(1, len(pieces) + 1))
        if arranged.num_stages == 1:
            ends = (len(pieces),)
        elif all(piece.blocks for piece in pieces):
            counts = job.model.block_counts(arranged.num_stages, job.task.max_length)  # type: ignore[attr-defined]
            behind, ends = 0, ()
            for count in counts:
                behind += count
                ends = (*ends, behind)
        in_flight = in_memory = None
        if isinstance(job.schedule, OneForwardOneBackward):
            in_flight = job.schedule.num_in_flight or len(ends)
        if isinstance(job.schedule, ZeroBubble):
            in_memory = job.schedule.num_in_memory or in_flight
        return Plan(
            job.strategy.name, ends, job.schedule.num_micro_batches, in_flight,
            self.own_compression, in_memory,
        )  # fmt: skip

    def _counts_for(self, plan: Plan) -> list[int]:
        layout = self.arranged[plan.strategy].layout
        fewest, replicas = layout.min_micro_batches(), layout.num_replicas
        return [m for m in self.counts if m >= fewest and m % replicas == 0]

    def profile(self) -> tuple[Profile, list[str]]:
        """Measured before, now, or read from a file, with its work factor; and why it may not
        hold."""
        job, plan = self._measured_job(), self.plan
        sizes = profile_key.sizes_of(self.batch_size, self.counts)
        of = profile_key.what_is_measured(job, self.candidates, sizes)
        if plan.profile is not None:
            file = in_project(plan.profile)
            found = read_profile(file)
            stale = found.stale_because(of, plan.max_age_days)
            is_here = found.of.get("machine") == of["machine"]
            off_speed = self._off_speed(found) if is_here else ()
            return self._with_factor(found, file), [*stale, *off_speed]
        lines_of(self.cluster, {})  # raises before anything is measured
        file = profile_key.profile_file(job.cache_path, of)
        if file.exists():
            found = read_profile(file)
            stale = found.stale_because(of, plan.max_age_days)
            if not stale:
                off_speed = self._off_speed(found)
                told = [f"{why} To measure anew: plan.max_age_days=0" for why in off_speed]
                return self._with_factor(found, file), told
            print(f"measuring again: {'; '.join(stale)}", flush=True)
        found = profiling.measure(
            job, self.candidates, sizes, lambda line: print(line, flush=True)
        )
        write_profile(file, found)
        print(f"profile: {file}", flush=True)
        return self._with_factor(found, file), []

    def _with_factor(self, profile: Profile, file: Path) -> Profile:
        """The work factor as given, as the profile says, or by a trial, which the profile's file
        then keeps for jobs of as many ranks on this machine."""
        kept, given = profile.work_factor, self.plan.work_factor
        if given is not None:
            return replace(profile, work_factor=WorkFactor(given, "given"))
        if kept is not None and self.plan.profile is not None:
            return replace(profile, work_factor=replace(kept, source="file"))
        if kept is not None and kept.num_ranks == self.job.cluster.num_ranks:
            return profile
        if why := plan_trial.why_none(self.job, self.plan):
            print(f"no trial: {why}", flush=True)
            return replace(profile, work_factor=WorkFactor(source="none"))
        found = plan_trial.work_factor(
            self.job, self._own(profile), profile, self.plan.trial_steps, self.trial_s
        )
        profile = replace(profile, work_factor=found)
        write_profile(file, profile)
        return profile

    def _off_speed(self, profile: Profile) -> list[str]:
        device, threads = profile_key.device_of(self.job), profile_key.threads_of(self.cluster)
        return profile.off_speed_because(reference_s(device, threads))

    def _measured_job(self) -> Experiment:
        """The job as one pipeline."""
        cluster = self.cluster
        if cluster.num_replicas > 1:
            cluster = Arranged(Strategy(), cluster).replicas[0]
        return profiling.as_pipeline(self.job, cluster, self.job.schedule.num_micro_batches)

"""plan=show and plan=apply: measure, search, show; choose the settings that are run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, product
from pathlib import Path
from typing import Any

from xcloud.base.errors import ConfigError
from xcloud.base.project import in_project
from xcloud.base.run_folder import owned
from xcloud.base.settings import as_settings
from xcloud.base.terminal import say
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Phased
from xcloud.feature_list import all_features
from xcloud.job.config import Settings, build
from xcloud.job.misfits import announce
from xcloud.layout import ClusterLayout
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.planner.plan_report import Report, print_plans, write_plan, write_plan_picture
from xcloud.planner.search import Space, search, splits_of
from xcloud.planner.settings import FreelyCut, Planning, with_micro_batches
from xcloud.planner.trial import TrialRun
from xcloud.record.timeline import PLAN_FILE, write_predicted
from xcloud.security.defences import LABEL
from xcloud.simulator.costs import Profile, lines_of, read_profile
from xcloud.simulator.plan import NO_COMPRESSION, Arranged, Plan, Priced, replicas_of
from xcloud.simulator.pricing import OverEpochs, Pricer

PICTURE = "plan.png"


def planned(settings: Settings, run_dir: Path) -> Settings | None:
    """Plan a run; return the settings of the best plan with plan=apply, None with plan=show.

    Leaves plan.json and plan.png in run_dir. Raises ConfigError.
    """
    planner = Planner(settings)
    planner.job.check()
    with owned(run_dir):
        announce(planner.job)
        report = planner.report(*planner.profile())
        print_plans(report)
        chosen = report.ranked.best[0] if planner.plan.mode == "apply" else None
        write_plan(run_dir, report, chosen)
        say(run_dir / PLAN_FILE)
        is_drawn = write_plan_picture(run_dir / PICTURE, report)
        say(run_dir / PICTURE if is_drawn else run_dir)
        if chosen is None:
            return None
        plan = chosen.plan
        layout = planner.arranged[plan.strategy].layout
        # A timeline of one pipeline is drawn beside the measured one; replicas have several.
        if len(plan.ends) > 1 and layout.num_replicas == 1:
            # The measured step that it is shown with is one of the last.
            epochs = report.over_epochs.get(plan)
            last = report.pricer if epochs is None else epochs.at_the_end
            write_predicted(run_dir, last.predict(plan).timeline, strategy=plan.strategy)
        return planner.applied(chosen, report)


class Planner:
    """A search for the best plan of one job.

    cluster: the cluster of the settings, before a strategy arranged it.
    candidates: the compressions by name, the job's own first.
    not_planned: the strategies that the job does not allow, each with the reason.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        job = settings.job.pipeline
        assert isinstance(job.plan, Planning)
        self.job = job
        self.plan = job.plan
        self.features = [feature for feature in all_features() if feature.is_used(job)]
        # The job's own cluster has been arranged by its strategy already; others arrange it anew.
        self.cluster: ClusterLayout = build(settings.plain["cluster"])
        if job.compression.boundaries:
            raise ConfigError(
                "plan: compression differs from boundary to boundary, which is not priced yet; "
                "choose one compression for all"
            )
        batch_size = job.training.batch_size // job.training.accumulate_steps
        self.counts = self.plan.counts(batch_size, own=job.schedule.num_micro_batches)
        assert isinstance(job.compression, Compression | Phased), (
            "a plan is refused where a run chooses its compression itself"
        )
        own = job.compression
        found = {NO_COMPRESSION: Compression(), **self.plan.compressors}
        # The job's own compression may be one of the plan's candidates under another name.
        same = (name for name, other in found.items() if repr(other) == repr(own))
        name = NO_COMPRESSION if own.is_identity else next(same, own.label)
        self.candidates = {name: found.get(name, own)} | found
        self.own_compression = name
        self.not_planned: dict[str, str] = {}
        self.schedules = self._schedules()
        self.arranged = self._arranged()

    def profile(self) -> tuple[Profile, list[str]]:
        """Return the profile, from a file or a trial run of the job, and why it may not hold."""
        if self.plan.profile is None:
            lines_of(self.cluster, given={})  # raises before anything is tried
            # A trial of this very job holds by its making; only a file may be of another.
            return self.trial.profile(), []
        profile = read_profile(in_project(self.plan.profile))
        pairs = {f"{a}-{b}" for a, b in product(self.cluster.clouds, repeat=2)}
        if odd := profile.lines.keys() - {*pairs, "*"}:
            raise ConfigError(
                f"plan.profile: lines.{min(odd)} joins no clouds of this job; name one of "
                f'{", ".join(sorted(pairs))}, or "*" for all between clouds'
            )
        return profile, profile.differs_from(self.trial.of)

    @property
    def trial(self) -> TrialRun:
        cluster = replicas_of(self.cluster)[0]
        num_steps = self.plan.trial_steps
        return TrialRun(
            settings=self.settings,
            job=self.job,
            cluster=cluster,
            candidates=self.candidates,
            counts=self.counts,
            num_steps=num_steps,
        )

    def report(self, profile: Profile, notes: Sequence[str] = ()) -> Report:
        """Search, and return whatever is shown of it.

        notes: the reasons why the profile may not hold.
        """
        started_s = time.perf_counter()
        training = self.job.training
        pricer = Pricer(
            profile,
            arranged=self.arranged,
            batch_size=training.batch_size,
            passes=training.accumulate_steps,
        )
        space = self._space(profile)
        why = [*notes]
        if missing := sorted({*self.candidates} - {*space.compressions}):
            why.append(f"the profile has no costs of {', '.join(missing)}")
            if self.own_compression in missing or NO_COMPRESSION in missing:
                raise ConfigError(f"plan.profile: {why[-1]}")
        why += filter(None, (feature.price_lacks(profile) for feature in self.features))
        ranked = search(pricer, space=space, keep=self.plan.rows)
        if not ranked.best:
            raise ConfigError(
                f"plan: none of {', '.join(map(str, self.counts))} micro-batches suits this "
                "cluster; give plan.micro_batches others"
            )
        took_s = time.perf_counter() - started_s
        epochs = dict[Plan, OverEpochs]()
        for plan, feature in product([ranked.best[0].plan, space.own], self.features):
            if (change := feature.over_epochs(self.job, pricer=pricer, plan=plan)) is not None:
                epochs[plan] = change
        return Report(
            pricer,
            space,
            ranked,
            search_s=took_s,
            stale=why,
            not_planned=self.not_planned,
            over_epochs=epochs,
        )

    def applied(self, chosen: Priced, report: Report) -> Settings:
        """Return the settings with this plan."""
        plan = chosen.plan
        given = self.settings.plain["plan"]
        changes: dict[str, Any] = {"plan": None, "schedule": as_settings(plan.schedule)}
        if plan.compression != self.own_compression:
            # From the settings as they were written, not from the objects that were made of them.
            changes["compression"] = given["compressors"][plan.compression]
        if plan.strategy != self.job.strategy.name:
            changes["strategy"] = given["strategies"][plan.strategy]
        counts = report.counts(plan)
        if len(plan.ends) > 1 and counts and plan.ends != report.ranked.own.plan.ends:
            changes["model.blocks_per_stage"] = counts[:-1]
        return self.settings.changed(changes)

    # What is searched.

    def _space(self, profile: Profile) -> Space:
        """Return the plans to search.

        Strategies that the profile's pieces do not allow leave `arranged`.
        """
        job = self.job
        pieces = profile.pieces
        splits = dict[str, list[tuple[int, ...]]]()
        blocks = self._model_blocks
        own = job.strategy.name
        # Parts of known blocks join to any number of stages; others to one, or as measured.
        is_free = bool(blocks) and all(piece.blocks for piece in pieces)
        for name, arranged in list(self.arranged.items()):
            fits = is_free or arranged.num_stages in (1, len(pieces))
            ways = splits_of(pieces, num_stages=arranged.num_stages, slowness=arranged.slowness)
            splits[name] = ways if fits else []
            if not splits[name]:
                self.not_planned[name] = (
                    f"the profile has {len(pieces)} parts that cannot be joined to "
                    f"{arranged.num_stages} stages"
                )
                del splits[name], self.arranged[name]
        if own not in splits:
            raise ConfigError(f"plan: strategy {own}: {self.not_planned[own]}")
        ends = splits[own][0]
        num_stages = self.arranged[own].num_stages
        if num_stages > 1 and is_free:
            # Pieces are what the trial told apart, stages of the job are counted in blocks: a cut
            # after so many blocks is one after so many pieces.
            cuts = {n: 1 + i for i, n in enumerate(accumulate(piece.blocks for piece in pieces))}
            wanted = [*accumulate(blocks)]
            if wanted[-1] != max(cuts) or not cuts.keys() >= {*wanted}:
                raise ConfigError(
                    f"plan.profile: pieces end at blocks {[*cuts]}, and stages of this job at "
                    f"{wanted}; take a profile of this model"
                )
            ends = tuple(cuts[n] for n in wanted)
            # The job's own split is priced, too, even if the search would not come to it.
            splits[own] = sorted({*splits[own], ends})
        plan = Plan(
            strategy=own, ends=ends, schedule=job.schedule, compression=self.own_compression
        )
        names = [name for name in self.candidates if name in profile.compressors]
        varies = self.plan.search
        schedules = self.schedules
        return Space(
            own=plan,
            splits=splits,
            micro_batches=self.counts,
            compressions=names,
            varies=varies,
            schedules=schedules,
            allows=lambda strategy, compression, schedule: (
                not self._refusal(
                    cluster=self.cluster,
                    strategy=self.arranged[strategy].strategy,
                    compression=self.candidates[compression],
                    schedule=schedule,
                )
            ),
        )

    @property
    def _model_blocks(self) -> list[int]:
        """The blocks of each stage; empty for a model that is not cut freely."""
        model = self.job.model
        length = self.job.task.max_length
        own = self.job.strategy.name
        if not isinstance(model, FreelyCut) or not model.num_blocks(length):
            return []
        return model.block_counts(self.arranged[own].num_stages, max_length=length)

    def _refusal(self, **changed: Any) -> str:
        """Return why the job cannot be run so; empty if it can."""
        try:
            # All checks of a job run where it is made, so making one is asking.
            replace(self.job, plan=None, **changed)
        except ConfigError as error:
            return str(error)
        return ""

    def _schedules(self) -> list[Schedule]:
        """Return the schedules beside the job's own that the job allows."""
        allowed = list[Schedule]()
        m = self.job.schedule.num_micro_batches
        for name, schedule in self.plan.schedules.items():
            if why := self._refusal(schedule=with_micro_batches(schedule, number=m)):
                self.not_planned[f"schedule={name}"] = why
            else:
                allowed.append(schedule)
        return allowed

    def _arranged(self) -> dict[str, Arranged]:
        """Return every strategy that the cluster, the task and who may see what allow."""
        own = self.job.strategy
        found = dict[str, Arranged]()
        fields = {cloud: self.job.fields_of_cloud(cloud) for cloud in self.job.cluster.clouds}
        # Labels do not count. Texts that only one cloud has would have to cross.
        texts = [of - {LABEL} for of in fields.values()]
        apart = any(a - b and b - a for a, b in combinations(texts, 2))
        others = self.plan.strategies if "strategy" in self.plan.search else {}
        for name, strategy in {**others, own.name: own}.items():
            try:
                layout = strategy.arrange(self.cluster)
                fewest = layout.min_micro_batches()
                # A strategy is refused for itself, not because the job's schedule does not suit
                # it: GPipe suits every cluster with enough micro-batches.
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
            elif apart and any(other.fields_of_cloud(cloud) - of for cloud, of in fields.items()):
                self.not_planned[name] = (
                    "each of two clouds has texts that the other has not, and would need these"
                )
            else:
                found[name] = Arranged(strategy, layout)
        return found or {own.name: Arranged(strategy=own, layout=self.job.cluster)}

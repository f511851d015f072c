"""OneWayExperiment: the one frozen object that describes a one-way job, in which several clouds
feed one with integers. Its file is read and checked like any experiment's (job/config.py).

How the figures of its summary are made, beside those of any run (record/summary.py):
- A step is the consumer's; its time and the waiting of the consumer (starvation) are of its ranks.
- A producer's seconds are per consumer step and rank; its waiting is back-pressure: nothing was
  ordered. They are reported about once a second and attributed to the next complete step, so sums
  are exact and single steps are not.
- `sent.forward` of a step counts the whole frames of the batches it used; `other` is everything
  else that crossed meanwhile. `bytes_per_token` = those frames / the tokens in them.
- `finished`: every rank of the producer has finished, so its model is exported.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, ClassVar

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Positive, settings
from xcloud.contracts.one_way import OneWayModel
from xcloud.feature_settings import OfJob
from xcloud.features.one_way.feed import Feed
from xcloud.features.one_way.figures import PRODUCERS
from xcloud.features.one_way.layout import OneWayLayout
from xcloud.job.job import Job, Labels, Roster
from xcloud.job.leaving import REPORTS, Outbound
from xcloud.pipeline.settings import Checkpoints, OnDivergence
from xcloud.pretrained import check_checkpoints
from xcloud.record.events import TIMES, Event, StepCollector, StepTotals, add_to
from xcloud.record.feature_figures import FeatureFigure
from xcloud.record.summary import RunStatistics, Summary, ratio


@settings("training")
class OneWayTraining:
    """The settings of training in a one-way job.

    max_steps: the number of updates of the consumer.
    batches_per_step: the number of producers' batches in one update, over all ranks of the
        consumer. The model determines how large a batch is.
    on_divergence, max_skips_in_a_row: the same settings as in a pipeline's Training, for the
        consumer's updates and each producer's own. A producer whose forward is not finite has no
        batch to send: it stops.
    checkpoint: the schedule of checkpoints, in steps of the consumer.
    """

    max_steps: Positive
    batches_per_step: Positive
    on_divergence: OnDivergence = "stop"
    max_skips_in_a_row: Positive = 10
    checkpoint: Checkpoints = field(default_factory=Checkpoints)


@settings(kw_only=True)
class OneWayExperiment(Job):
    """A one-way job: who feeds whom, how it trains and what is written down.

    model: the generators and the model that they feed.
    feed: the settings by which the consumer takes batches from its producers.
    follow_up: the overrides of an experiment that runs after this one has finished, in its run
        folder, and starts from its result; none if empty. Points of a sweep have none.
    """

    model: OneWayModel
    cluster: OneWayLayout
    training: OneWayTraining
    feed: Feed = field(default_factory=Feed)
    follow_up: Sequence[str] = ()

    figures: ClassVar[Sequence[FeatureFigure]] = (PRODUCERS,)

    def __post_init__(self) -> None:
        for feature in fields(OfJob):
            if getattr(self, feature.name) is not None:
                raise ConfigError(
                    f"{feature.name} is for a model split into stages; a one-way job has none, so "
                    f"set {feature.name}=off"
                )
        fitted = self.feed.fitted(self.cluster, batches_per_step=self.training.batches_per_step)
        object.__setattr__(self, "feed", fitted)

    def statistics(self) -> OneWayStatistics:
        return OneWayStatistics(self.cluster)

    @property
    def labels(self) -> Labels:
        """The names of the job. Nothing is compressed: only packed integers cross."""
        schedule = f"order fixed, run-ahead {self.feed.run_ahead}"
        return Labels(
            variant="fixed",
            compression="ids" if self.cluster.crosses_clouds else "off",
            schedule=schedule,
            described=(self.model.describe(), self.cluster.describe(), schedule),
        )

    # Ids cross as they are: a defence would have to change the text itself, and what they reveal
    # is no matter of measuring (docs/pretraining.md). So no defences and no leak meter.

    @property
    def roster(self) -> Roster:
        layout = self.cluster
        everyone = super().roster.saving
        consumers = frozenset(range(layout.num_consumers))
        nobody = frozenset[int]()
        essential = frozenset(layout.ranks_in(layout.consumer))
        return Roster(
            essential=everyone if self.feed.on_dead == "stop" else essential,
            saving=everyone,
            may_report={
                "loss": nobody,
                "quality": nobody,
                "step": consumers,
                "fed": everyone - consumers,
            },
        )

    def leaving(self) -> Iterable[Outbound]:
        consumer = self.cluster.consumer
        often = f"{self.training.batches_per_step} in a step of all producers together"
        most = self.model.max_payload_bytes
        for cloud in self.cluster.producers:
            text = "token ids and labels, packed: text that anyone with the tokenizer can read"
            yield Outbound(
                sender=cloud, to=consumer, kind="batch", what=text, how_often=often, max_bytes=most
            )
            yield Outbound(
                sender=cloud,
                to=consumer,
                kind="report",
                what=REPORTS,
                how_often="in every step and between steps",
            )
            yield Outbound(
                sender=consumer,
                to=cloud,
                kind="order",
                what="how many batches to send",
                how_often="once a step",
            )

    def check(self) -> None:
        self.model.check(self.cluster.producers)
        check_checkpoints(self.model)

    def next_command(self, run_dir: Path) -> str | None:
        return None if self.follow_up else self.model.next_command(run_dir)


class FeedCollector(StepCollector):
    """A collector of the consumer's steps, with the producers' seconds since the step before."""

    def __init__(self, layout: OneWayLayout) -> None:
        super().__init__(layout.num_consumers)
        self.group_sizes = {name: layout.clouds[name].num_ranks for name in layout.producers}
        self.pending = defaultdict[tuple[str, str], float](float)  # seconds by kind and producer

    def feed(self, event: Event) -> StepTotals | None:
        if event["event"] == "resume":  # what was fed to steps that are done again
            self.pending.clear()
        if event["event"] == "fed":
            for kind in TIMES:
                self.pending[kind, event["cloud"]] += event.get(kind, 0.0)
        totals = super().feed(event)
        if totals is not None:
            for name, size in self.group_sizes.items():
                add_to(totals.numbers, more={("num_ranks", name): size})
                # Every producer in every step: all means and curves have the same length.
                totals.numbers |= {(kind, name): self.pending[kind, name] for kind in TIMES}
            self.pending.clear()
        return totals


class OneWayStatistics(RunStatistics):
    """The figures of a run, and what each producer had in it."""

    def __init__(self, layout: OneWayLayout) -> None:
        self._feed = FeedCollector(layout)
        super().__init__(self._feed, (PRODUCERS,), layout.prices)
        self._shares = dict(zip(layout.producers, layout.shares, strict=True))
        self._made = defaultdict[tuple[str, str], float](float)  # batches, seconds, by producer
        self._loss: dict[str, float | None] = {}

    def feed(self, event: Event) -> StepTotals | None:
        if event["event"] == "fed":
            name = event["cloud"]
            for kind in ("num_batches", *TIMES):
                self._made[kind, name] += event.get(kind, 0)
            self._loss[name] = event.get("loss", self._loss.get(name))  # absent: all were skipped
        return super().feed(event)

    def seconds(self, kind: str, first: int) -> dict[str, float]:
        sums = super().seconds(kind, first)
        if self.num_steps:  # what was reported after the last step counts, too
            add_to(sums, more={name: self._feed.pending[kind, name] for name in self._shares})
        return sums

    def num_skipped(self) -> int:
        """Return how many updates the consumer skipped; a producer's are its own."""
        return sum(event["cloud"] not in self._shares for event in self.events("skipped_update"))

    def summary(self, **facts: Any) -> Summary:
        summary = super().summary(**facts)
        steps = self.steps
        line_s = steps.sums("line_s")
        elapsed_s = sum(steps["step_s"])
        use = {name: ratio(line_s.get(name) or None, below=elapsed_s) for name in self._shares}
        busiest = max((u for u in use.values() if u is not None), default=None)
        summary["link_utilisation"] = {"forward": busiest, "backward": None}
        taken = Counter(steps.sums("taken"))
        skipped = Counter(steps.sums("skipped"))
        num_bytes = sum(steps.sums("fed_bytes").values())
        summary["feed"] = {
            "bytes_per_token": ratio(num_bytes or None, below=steps.sum("tokens")),
            "num_batches": int(taken.total()),
            "num_skipped": int(skipped.total()),
            "producers": {
                name: {
                    "share": share,
                    "share_taken": ratio(taken[name] or None, below=taken.total()),
                    "num_batches": int(taken[name]),
                    "num_skipped": int(skipped[name]),
                    "link_utilisation": use[name],
                    **self._producer(name),
                }
                for name, share in self._shares.items()
            },
        }
        return summary

    def _producer(self, name: str) -> dict[str, Any]:
        made = int(self._made["num_batches", name])
        states = [e["state"] for e in self.events("producer") if e["producer"] == name]
        ended = self.events("skipped_update", "finish")
        own = Counter(event["event"] for event in ended if event["cloud"] == name)
        return {
            "num_made": made,
            "num_skipped_updates": own["skipped_update"],
            "loss": self._loss.get(name),
            **{
                f"{kind}_per_batch": ratio(self._made[kind, name] or None, below=made)
                for kind in ("compute_s", "waiting_s")
            },
            "state": states[-1] if states else "absent",
            "num_slow": states.count("slow"),
            "num_dead": states.count("dead"),
            "finished": own["finish"] == self._feed.group_sizes[name],
        }

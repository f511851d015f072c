"""A rank of a pipeline: load what its cloud may see, build its stages, train them with the other
ranks, export, evaluate. `train` is the loop over updates; features.py lists the features.

What the rank measures of each step is here too: its times, its loss, and what it sent between
clouds by the counters of its links, which only grow.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from xcloud.contracts.model import TaskData
from xcloud.experiment import Experiment
from xcloud.net.frame import Kind
from xcloud.pipeline.batch_plan import Feed
from xcloud.pipeline.control import Signal
from xcloud.pipeline.ends import Ends
from xcloud.pipeline.hook import Hook, Hooks, StepReport
from xcloud.pipeline.trainer import LossReport, Trainer
from xcloud.pipeline.wiring import Wiring
from xcloud.rank.export import export_stage, whole
from xcloud.rank.role import RankContext, Role
from xcloud.rank.task_data import Evaluator, context_of, note_data, token_pads
from xcloud.record.events import AVERAGING, TENSORS, TRAFFIC
from xcloud.record.reporter import Reporter
from xcloud.train.features import Features, step_clock


class StageRank(Role[Experiment]):
    """A rank that holds one or more stages."""

    def __init__(self, context: RankContext[Experiment]) -> None:
        super().__init__(context)
        job = context.job
        layout = job.cluster
        self.placement = layout.placement(self.rank)
        self.clock = step_clock(job, self.rank, device=context.device)
        ends = Ends(
            context.transport, layout, run_dir=context.run_dir, messages=self.clock.messages
        )
        self.features = Features(context, ends, clock=self.clock)
        self.wiring = self.features.wiring
        self.records = ends.records
        self.lives = ends.lives
        self.control = self.wiring.control

    def close(self) -> None:
        self.wiring.close()

    def run(self) -> None:
        self.reporter.event("phase", now=True, name="loading")
        data = self.features.load()
        note_data(self.context, data)
        trainer, hooks, evaluator = self.build(data)
        if self.train(trainer, hooks, evaluator):
            self.finish(data, trainer, hooks, evaluator)
        else:
            self.stop(trainer, hooks)

    def build(self, data: TaskData) -> tuple[Trainer, Hooks, Evaluator]:
        """Build the stages and what trains them; restore its state if the run goes on."""
        job = self.job
        layout = job.cluster
        features = self.features
        device = self.context.device
        wiring = self.wiring
        note = self.reporter.remark
        stages = {
            stage: features.stage(
                stage,
                context_of(job, data, device=device, report=note, group=wiring.groups[stage]),
            )
            for stage in self.placement.stages
        }
        leaks = features.leaks(stages, data)
        pipeline = features.pipeline(stages, leaks)
        bases = features.meet(stages, data)
        features.hand_over(pipeline)
        replica = self.placement.replica
        trains_locally = job.strategy.traits.trains_locally
        feed = Feed(
            job.batch_plan(data.num_samples("train")),
            pipeline.turns.values(),
            fetch=partial(data.batch, "train"),
            weigh=data.weight if layout.num_stages - 1 in stages else None,
            token_pads=token_pads(job, data, stages=stages),
            device=device,
            of_replica=(replica, layout.num_replicas) if trains_locally else (0, 1),
        )
        exchange = features.exchange(stages, leaks)
        is_private = job.security.privacy is not None and layout.num_replicas > 1
        trainer = Trainer(
            pipeline,
            job.schedule,
            settings=job.training,
            feed=feed,
            groups=wiring.groups,
            exchange=exchange,
            sums=wiring.sums,
            losses=LossReport(
                is_silent=replica > 0 and (is_private or not trains_locally),
                is_private=is_private,
            ),
        )
        meter = WanMeter(wiring, self.reporter, tells_skips=self._reports_skips)

        def meet() -> None:
            wiring.meet()
            meter.forget()

        evaluator = Evaluator(self.context, pipeline, groups=wiring.groups, data=data, meet=meet)
        facts = {"data": data.own_digests(), "base": bases}
        hooks = features.hooks(trainer, leaks, evaluator, meter, facts)
        features.resume(trainer)
        meter.forget()
        wiring.start_failure_detection()
        self.reporter.event("phase", now=True, name="training")
        features.enter(trainer)
        return trainer, hooks, evaluator

    def train(self, trainer: Trainer, hooks: Hooks, evaluator: Evaluator) -> bool:
        """Make all updates that are left. Return whether the run has come to its end; False if it
        was asked to stop."""
        if self.job.scores_first and not trainer.num_updates:  # what training is to improve on
            evaluator.evaluate("test", 0)
        for step in range(trainer.num_updates + 1, self.job.max_steps + 1):
            with self.clock.paused():
                hooks.before_update(step)
            report = trainer.update(step, hooks)
            hooks.after_update(step, report)
            if report.signal is Signal.STOP:
                return False
        with self.clock.paused():
            hooks.finish()
        return True

    def finish(self, data: TaskData, trainer: Trainer, hooks: Hooks, evaluator: Evaluator) -> None:
        """Export, evaluate through the same links, and close the hooks."""
        for stage, module in trainer.pipeline.stages.items():
            leads = self.placement.replica == 0 and self.wiring.groups[stage].leads
            tensors = whole(module.exported(), keep=leads)
            if leads:
                export_stage(
                    self.context.run_dir, stage, module=module, tensors=tensors, data=data
                )
        hooks.settle()
        self.wiring.meet()  # an evaluation that fails ends all ranks; all have exported now
        self.context.asked.is_armed = False
        if self.context.asked.was_asked:  # while the last step was saved
            return self.stop(trainer, hooks)
        self.reporter.event("phase", now=True, name="evaluation")
        evaluator.evaluate("test", trainer.num_updates)
        hooks.close(is_finished=True)
        self.reporter.event("finish", num_steps=trainer.num_updates)

    def stop(self, trainer: Trainer, hooks: Hooks) -> None:
        """End early, as asked, with a checkpoint of the last step."""
        hooks.settle()
        self.wiring.meet()
        hooks.close(is_finished=False)
        self.reporter.event("stop", step=trainer.num_updates)
        self.is_stopped = True

    @property
    def _reports_skips(self) -> bool:
        """Every rank that shares an update knows; the first of them reports it."""
        leaders = self.job.cluster.leaders(self.placement.replica)
        return self.rank == (leaders[0] if self.job.strategy.traits.trains_locally else 0)


class WanMeter(Hook):
    """A rank's meter of what it sent to other clouds since it last looked.

    tells_skips: it reports the updates that were skipped; every rank that shares one knows.
    """

    def __init__(self, wiring: Wiring, reporter: Reporter, tells_skips: bool) -> None:
        self._wiring = wiring
        self._reporter = reporter
        self._tells_skips = tells_skips
        self._last = self._read()

    def after_update(self, step: int, report: StepReport) -> None:
        self._reporter.event("step", **self.describe(report))
        if report.skipped is not None and self._tells_skips:
            self._reporter.event("skipped_update", step=step)
            self._reporter.note(report.skipped)

    def forget(self) -> None:
        """Forget what crossed since the last step: it belongs to no step (an evaluation)."""
        self._last = self._read()

    def describe(self, report: StepReport) -> dict[str, Any]:
        """Return the step's event: seconds, bytes on the wire with headers, FP32 bytes meant."""
        now = self._read()
        sent, raw, line_s = (
            {name: value - before[name] for name, value in after.items()}
            for before, after in zip(self._last, now, strict=True)
        )
        self._last = now
        event: dict[str, Any] = {
            "step": report.step,
            "step_s": round(report.step_s, 6),
            **{name: round(seconds, 6) for name, seconds in report.clock.seconds.items()},
            "sent": sent,
            "raw": raw,
            "samples": report.num_samples,
            "tokens": report.num_tokens,
            "learned": report.num_learned,
        }
        if self._wiring.ends.is_emulated:
            event["line_busy_s"] = {
                name: {to: round(s, 6) for (kind, to), s in line_s.items() if kind == name and s}
                for name in raw
            }
        if report.loss is not None:
            event["loss"] = report.loss
            event["learning_rate"] = report.learning_rate
            if report.grad_norm is not None:
                event["grad_norm"] = report.grad_norm
        return event

    def _read(self) -> tuple[Counter[Any], Counter[Any], Counter[Any]]:
        """Return bytes sent and FP32 bytes of the tensors in them, by the name of the traffic,
        which for a boundary's tensors is the direction of their channel; and seconds on the
        emulated line to each cloud, by (name, cloud)."""
        averaging = self._wiring.averaging
        more = (AVERAGING,) if averaging else ()
        sent = Counter(dict.fromkeys((*TRAFFIC, *more), 0))
        raw = Counter(dict.fromkeys((*TENSORS, *more), 0))
        line_s: Counter[tuple[str, str]] = Counter()
        for record in self._wiring.ends.records:
            for kind in Kind:  # other threads may add to what has been sent
                if (name := kind.traffic) is not None and name in sent:
                    sent[name] += record.num_bytes[kind]
                    line_s[name, str(record.to)] += record.line_s[kind]
        for channel in self._wiring.boundaries.wan_sends:
            raw[channel.identity.direction] += channel.raw_bytes
        for links in averaging:
            raw[AVERAGING] += links.raw_bytes
        return sent, raw, line_s

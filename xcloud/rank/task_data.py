"""The task's data in one rank: it loads what its cloud may see, checks that all clouds have the
same, gives models what they need of it to build a stage, and scores a split through the pipeline,
and so through the compressed link."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from xcloud.base.errors import DataError
from xcloud.base.terminal import say
from xcloud.contracts.model import (
    SPLITS,
    Batch,
    BuildContext,
    DataSplit,
    NumCut,
    Scores,
    Stage,
    Task,
    TaskData,
)
from xcloud.job.config import this_clouds_policy
from xcloud.job.job import PipelineJob
from xcloud.net.transport import Rendezvous
from xcloud.pipeline.control import Signal
from xcloud.pipeline.exchange import RankGroup
from xcloud.pipeline.hook import Hook, StepReport
from xcloud.pipeline.pipeline import Pipeline
from xcloud.pipeline.settings import Training
from xcloud.rank.agreement import agree_on
from xcloud.rank.role import RankContext
from xcloud.record.files import SAMPLES_FILE, SCORES_FILE, note_trackable
from xcloud.record.reporter import Reporter

log = logging.getLogger(__name__)

DATA = "the task's data"
ANSWERING_S = 5.0  # for each of the samples that are shown
SAMPLES = {split: f"samples of {split}" for split in SPLITS}


def load(
    experiment: PipelineJob,
    rendezvous: Rendezvous,
    more: Callable[[TaskData], Mapping[str, str]] = lambda data: {},
    left_out: Mapping[int, Collection[str]] = {},
    task: Task | None = None,
) -> TaskData:
    """Load exactly the fields that this rank's stages read.

    more: returns further facts that the ranks compare.
    left_out: see agree_on.
    task: a task that replaces the experiment's, such as one with the tokenizers that this run has
        kept. None: the experiment's task.

    Raises DataError for missing or extra fields, ConfigError if ranks differ.
    """
    fields = experiment.fields_of(rendezvous.rank)
    data = (task or experiment.task).load(fields, experiment.seed)
    check_fields(data, fields)
    # Only now is known what the labels are like; a defence that cannot protect them ends the run
    # before anything has crossed.
    for defence in filter(None, experiment.security.defences.values()):
        if data.head is not None:
            defence.check_labels(data.head.kind, num_outputs=data.head.num_outputs)
        elif "label" in fields:  # for each token
            defence.check_labels("tokens", num_outputs=1)
    # Sizes are compared first: they say more than a digest.
    facts = {SAMPLES[split]: str(data.num_samples(split)) for split in SPLITS}
    facts = {**facts, DATA: data.fingerprint(), **more(data)}
    agree_on("data", rendezvous, facts, left_out=left_out)
    return data


def note_data(context: RankContext[PipelineJob], data: TaskData) -> None:
    """Say which data these are and what of them did not fit. What a cloud's texts are like is
    nobody else's matter: only rank 0 reports it, others write it to their own log."""
    job = context.job
    reporter = context.reporter
    if context.rank != 0:
        say(data.describe())
        for line in cuts_in_words(data.num_cut):
            log.warning(line)
        return
    reporter.note(data.describe())
    rows = {split: data.num_samples(split) for split in SPLITS}
    digest = shown_digest(job, data)
    reporter.event("data", name=job.task.describe(), digest=digest, rows=rows)
    report_cuts(reporter, num_cut=data.num_cut)


def report_cuts(reporter: Reporter, num_cut: NumCut) -> None:
    """Report what of a cloud's texts did not fit, for the user and for the summary; a rank of
    another owner's cloud only says it in its own log."""
    for line in cuts_in_words(num_cut):
        reporter.remark(line)
    if not reporter.is_abroad:
        for what, by_split in num_cut.items():
            for split, cut in by_split.items():
                reporter.event("cut", field=what, split=split, num=cut.num, of=cut.of)


def cuts_in_words(num_cut: NumCut) -> list[str]:
    """Return what did not fit, a line a split, such as "train: 3 of 120 chats left out, 2 of 120
    chats cut (task.max_length)"."""
    told: dict[DataSplit, dict[str, list[str]]] = {}
    for what, by_split in num_cut.items():
        for split, cut in by_split.items():
            of_setting = told.setdefault(split, {}).setdefault(cut.setting, [])
            of_setting.append(f"{cut.num:,} of {cut.of:,} {what}")
    return [
        f"{split}: " + "; ".join(f"{', '.join(of)} ({setting})" for setting, of in lines.items())
        for split, lines in told.items()
    ]


def shown_digest(job: PipelineJob, data: TaskData) -> str:
    """Return what a record knows the data by: with the contents that this rank has read, unless a
    rule keeps a field in some cloud. The digest of few labels would tell them."""
    described = data.fingerprint()
    if not is_held(job):
        described += json.dumps(dict(data.own_digests()), sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def is_held(job: PipelineJob) -> bool:
    """Return whether the job, or the policy of this cloud, keeps a field in some clouds."""
    return bool(job.security.holders or this_clouds_policy().holders)


def context_of(
    job: PipelineJob,
    data: TaskData,
    device: torch.device,
    report: Callable[[str], None],
    group: RankGroup = RankGroup.alone(),  # noqa: B008
) -> BuildContext:
    """Return what the stages of a rank are built with.

    group: the ranks that hold the same stage.
    """
    return BuildContext(
        seed=job.seed,
        device=device,
        cache_dir=job.cache_path,
        vocabularies=data.vocabularies,
        sentences=data.sentences,
        samples=partial(_spread, data),
        max_length=job.task.max_length,
        group_rank=group.group_rank,
        barrier=group.barrier,
        report=report,
        head=data.head,
    )


def _spread(data: TaskData, count: int) -> Batch:
    """Return `count` training samples from all over the file, which may be sorted."""
    num_samples = data.num_samples("train")
    # Not drawn: all ranks of a stage measure on the same samples, whatever torch drew before.
    ids = torch.arange(0, num_samples, max(1, num_samples // count))[:count]
    return data.batch("train", ids)


def check_fields(data: TaskData, fields: frozenset[str]) -> None:
    """Raise DataError, before anything is computed, for a task that reads more than it was asked
    for."""
    if data.num_samples("train"):
        extra = data.batch("train", torch.zeros(1, dtype=torch.int64)).keys() - fields - {"ids"}
        if extra:
            raise DataError(
                f"the task gave {', '.join(sorted(extra))}, which no stage of this rank reads; "
                "its load() must keep to the fields it is given: "
                f"{', '.join(sorted(fields)) or 'none'}"
            )


@dataclass(eq=False)
class Evaluator(Hook):
    """A part that scores a split through the pipeline of replica 0.

    All ranks take part; the last stage's leader reports the scores to rank 0. What it says of
    single samples it writes only to its own run folder: a few as text, of the test set all
    (write_scores).

    barrier: waits for all ranks, and returns whether any of them has a claim.
    """

    context: RankContext[PipelineJob]
    pipeline: Pipeline
    groups: Mapping[int, RankGroup]
    data: TaskData
    barrier: Callable[[bool], bool]
    is_over: bool = False

    def after_update(self, step: int, report: StepReport) -> None:
        """Score the dev split where that is due. The run is over if it reaches its target."""
        training = self.context.job.training
        if not training.is_evaluated(step) or report.signal is Signal.STOP:
            return
        with self.pipeline.clock.paused():
            reached = self.evaluate("dev", step)
        until = training.until
        if until is not None and step % until.every == 0 and reached:
            self.is_over = True
            if self.context.rank == 0:
                self.context.reporter.event("target", step=step, target=until.in_words)

    def evaluate(self, split: DataSplit, step: int) -> bool:
        """Score a split. Every rank calls it, and returns once all are done: else the next step
        would wait for another cloud's decoding. Return whether the scores reach the target."""
        reaches = False
        if self.pipeline.layout.placement(self.pipeline.rank).replica == 0:
            # Replicas hold the same parameters here, so one of them scores.
            reaches = self._score(split, step=step)
        return self.barrier(reaches)

    def _score(self, split: DataSplit, step: int) -> bool:
        """Return whether this rank knows that the scores reach the target."""
        started = time.perf_counter()
        data = self.data
        pipeline = self.pipeline
        pieces = scored_pieces(self.context.job.training, num_samples=data.num_samples(split))
        # In all ranks of replica 0: the stages before the last compute what it decodes from.
        predictions = predicted(
            pipeline, groups=self.groups, data=data, split=split, pieces=pieces, step=step
        )
        last = pipeline.num_stages - 1
        if last not in pipeline.stages or not self.groups[last].leads:
            return False
        scores = data.score(split, predictions)
        self._write_samples(split, step, scores)
        report_scores(
            self.context.reporter,
            split,
            step,
            scores=scores,
            signature=data.signature(),
            started_s=started,
        )
        until = self.context.job.training.until
        return until is not None and until.is_reached(scores.values)

    def _write_samples(self, split: DataSplit, step: int, scores: Scores) -> None:
        """Write what is said of single samples, and whether a tracker may have it: texts of public
        corpora that no rule keeps in a cloud, and figures without texts."""
        reporter = self.context.reporter
        run_dir = self.context.run_dir
        held = is_held(self.context.job)
        may_show = self.context.job.has_public_texts and not held
        with reporter.may_lose(SAMPLES_FILE):
            # Before the file is there, as only what its writer has allowed may go to a tracker.
            note_trackable(run_dir, **{SAMPLES_FILE: may_show})
            # Only a rank that holds a full model alone writes text: of several ranks, each would
            # have to see it.
            is_alone = self.pipeline.num_stages == 1 and len(self.groups[0].ranks) == 1
            writes = is_alone and type(self.pipeline.stages[0]).follow is not Stage.follow
            if split == "test" and step and writes:
                samples = self.data.sample_outputs(split, scores, count=5, follow=self._follow)
            else:
                samples = self.data.sample_outputs(split, scores, count=5)
            (run_dir / SAMPLES_FILE).write_text(samples, encoding="utf-8")
        if split == "test" and step:
            with reporter.may_lose(SCORES_FILE):
                note_trackable(run_dir, **{SCORES_FILE: may_show or held})
                write_scores(run_dir / SCORES_FILE, scores, shows_text=not held)

    def _follow(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield what the model writes after these tokens, for at most ANSWERING_S: the barrier
        behind the evaluation waits meanwhile."""
        pipeline = self.pipeline
        deadline_s = time.perf_counter() + ANSWERING_S
        stage = pipeline.stages[0]
        stage.eval()
        try:
            with pipeline.autocast():
                for token in stage.follow(tokens):
                    yield token
                    if time.perf_counter() > deadline_s:
                        return
        finally:
            stage.train()


def scored_pieces(settings: Training, num_samples: int) -> list[Tensor]:
    """Return the ids of the samples of a split that are scored, by micro-batch."""
    count = num_samples
    if settings.eval_samples is not None:
        count = min(count, settings.eval_samples)
    return list(torch.split(torch.arange(count), settings.eval_batch_size))


def predicted(
    pipeline: Pipeline,
    groups: Mapping[int, RankGroup],
    data: TaskData,
    split: DataSplit,
    pieces: Sequence[Tensor],
    step: int,
) -> dict[int, list[int]]:
    """Return the predictions of samples by their id in every rank of the last stage, and none in
    others. All ranks of replica 0 call it.

    groups: the ranks of each stage of this rank.
    pieces: ids by micro-batch.
    """
    # Ranks that compute in step take the last one again, to fill up.
    fill = [pieces[-1]] * (-len(pieces) % pipeline.layout.lanes_in_step)
    found = pipeline.predict([*pieces, *fill], partial(data.batch, split), step)
    last = pipeline.num_stages - 1
    if last not in pipeline.stages:
        return {}
    return gather_predictions(found, group=groups[last])


def report_scores(
    reporter: Reporter,
    split: DataSplit,
    step: int,
    scores: Scores,
    signature: Mapping[str, str],
    started_s: float,
) -> None:
    """Report the scores of a split to rank 0.

    started_s: value of time.perf_counter() when the evaluation began.
    """
    reporter.event(
        "quality",
        now=True,
        split=split,
        step=step,
        values=dict(scores.values),
        errors=dict(scores.errors),
        signature=dict(signature),
        evaluation_s=round(time.perf_counter() - started_s, 3),
    )


def write_scores(path: Path, scores: Scores, shows_text: bool) -> None:
    """Write a line of JSON for each sample: its id, figures and texts.

    shows_text: false where a text may not leave this cloud. It is left out then: a digest of it,
        salted or not, would still say which samples have the same of few labels.
    """
    with open(path, "w", encoding="utf-8") as file:
        for ident, sample in scores.samples.items():
            line: dict[str, object] = {"id": ident}
            for name, value in sample.items():
                if shows_text or not isinstance(value, str):
                    line[name] = value
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def token_pads(job: PipelineJob, data: TaskData, stages: Collection[int]) -> dict[str, int]:
    """Return the padding id of each field of tokens that one of these stages is the first to read,
    so that every token of a batch is counted once over the ranks."""
    num_stages = job.cluster.num_stages
    pads = {}
    for name, vocabulary in data.vocabularies.items():
        reads = (
            stage
            for stage in range(num_stages)
            if name in job.model.fields(stage, num_stages=num_stages)
        )
        if next(reads, None) in stages:
            pads[name] = vocabulary.pad
    return pads


def gather_predictions(mine: Mapping[int, list[int]], group: RankGroup) -> dict[int, list[int]]:
    """Return the predictions of all ranks of a stage, which each sends as a flat integer
    tensor."""
    flat = [n for ident, tokens in mine.items() for n in (ident, len(tokens), *tokens)]
    sizes = group.gather(torch.tensor([len(flat)]))
    # A gather moves tensors of one shape, so the lengths are gathered first.
    padded = torch.zeros(max(int(s) for s in sizes), dtype=torch.int64)
    padded[: len(flat)] = torch.tensor(flat, dtype=torch.int64)
    everyone = group.gather(padded)
    predictions: dict[int, list[int]] = {}
    for length, numbers in zip(sizes, everyone, strict=True):
        # Flat: id, how many tokens follow, the tokens.
        values = numbers[: int(length)].tolist()
        at = 0
        while at < len(values):
            until = at + 2 + values[at + 1]
            predictions[values[at]] = values[at + 2 : until]
            at = until
    return predictions

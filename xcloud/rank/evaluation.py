"""Score a split through the pipeline, and so through the compressed link."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from xcloud.contracts.model import Batch
from xcloud.contracts.task import Scores, Split, TaskData
from xcloud.job.config import this_clouds_policy
from xcloud.job.experiment import Experiment
from xcloud.parallel.control import Signal
from xcloud.parallel.exchange import RankGroup
from xcloud.parallel.part import Part, StepReport
from xcloud.parallel.pipeline import Pipeline
from xcloud.record.files import SAMPLES_FILE, SCORES_FILE
from xcloud.record.reporter import Reporter


class Evaluator(Part):
    """Scores a split through the pipeline of replica 0. All ranks take part; the last stage's
    leader reports the scores to rank 0. What it says of single samples it writes only to its own
    run folder: a few as text, of the test set all (write_scores). meet: waits for all ranks."""

    def __init__(
        self,
        pipeline: Pipeline,
        groups: Mapping[int, RankGroup],
        data: TaskData,
        job: Experiment,
        reporter: Reporter,
        run_dir: Path,
        meet: Callable[[], None],
    ) -> None:
        self._pipeline, self._groups, self._data = pipeline, groups, data
        self._settings, self._reporter, self._meet = job.training, reporter, meet
        self._run_dir = run_dir
        self._shows_text = not job.security.holders and not this_clouds_policy().holders

    def after_update(self, step: int, report: StepReport) -> None:
        every = self._settings.evaluate_every
        if every and step % every == 0 and report.signal is not Signal.STOP:
            with self._pipeline.clock.paused():
                self.evaluate("dev", step)

    def evaluate(self, split: Split, step: int) -> None:
        """Every rank calls it, and returns once all are done: else the next step would wait for
        another cloud's decoding."""
        if self._pipeline.layout.placement(self._pipeline.rank).replica == 0:
            self._score(split, step)
        self._meet()

    def _score(self, split: Split, step: int) -> None:
        started = time.perf_counter()
        data, pipeline = self._data, self._pipeline
        count = data.num_samples(split)
        if self._settings.eval_samples is not None:
            count = min(count, self._settings.eval_samples)
        pieces = list(torch.split(torch.arange(count), self._settings.eval_batch_size))
        # Ranks that compute in step score the last one again, to fill up.
        pieces += pieces[-1:] * (-len(pieces) % pipeline.layout.lanes_in_step)
        predictions = pipeline.predict(pieces, fetcher(data, split, pipeline.device), step)
        last = pipeline.num_stages - 1
        if last not in pipeline.stages:
            return
        group = self._groups[last]
        predictions = gather_predictions(predictions, group)
        if group.leads:
            scores = data.score(split, predictions)
            samples = data.sample_outputs(split, scores, 5)
            with self._reporter.may_lose(SAMPLES_FILE):
                (self._run_dir / SAMPLES_FILE).write_text(samples, encoding="utf-8")
            if split == "test" and step:
                with self._reporter.may_lose(SCORES_FILE):
                    write_scores(self._run_dir / SCORES_FILE, scores, self._shows_text)
            report_scores(self._reporter, split, step, scores, data.signature(), started)


def report_scores(
    reporter: Reporter,
    split: Split,
    step: int,
    scores: Scores,
    signature: Mapping[str, str],
    started_s: float,
) -> None:
    """started_s: of time.perf_counter, when the evaluation began."""
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
    """A line of JSON for each sample: its id, figures and texts. shows_text: false where a text
    may not leave this cloud: its SHA-256 digest stands for it."""
    with open(path, "w", encoding="utf-8") as file:
        for ident, sample in scores.samples.items():
            line: dict[str, object] = {"id": ident}
            for name, value in sample.items():
                if isinstance(value, str) and not shows_text:
                    name, value = f"{name}_sha256", hashlib.sha256(value.encode()).hexdigest()
                line[name] = value
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def fetcher(data: TaskData, split: Split, device: torch.device) -> Callable[[Tensor], Batch]:
    """Gives the visible fields of samples on the device; their ids stay where Python reads
    them."""

    def fetch(ids: Tensor) -> Batch:
        batch = data.batch(split, ids)
        return {name: v if name == "ids" else v.to(device) for name, v in batch.items()}

    return fetch


def gather_predictions(mine: Mapping[int, list[int]], group: RankGroup) -> dict[int, list[int]]:
    """Predictions of all ranks of a stage, as one flat integer tensor from each (no pickle)."""
    flat = [n for ident, tokens in mine.items() for n in (ident, len(tokens), *tokens)]
    sizes = group.gather(torch.tensor([len(flat)]))
    padded = torch.zeros(max(int(s) for s in sizes), dtype=torch.int64)
    padded[: len(flat)] = torch.tensor(flat, dtype=torch.int64)
    everyone = group.gather(padded)
    predictions: dict[int, list[int]] = {}
    for length, numbers in zip(sizes, everyone, strict=True):
        values, at = numbers[: int(length)].tolist(), 0
        while at < len(values):
            until = at + 2 + values[at + 1]
            predictions[values[at]] = values[at + 2 : until]
            at = until
    return predictions

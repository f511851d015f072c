"""Score a split through the pipeline, and so through the compressed link."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from xcloud.contracts.model import Batch
from xcloud.contracts.task import Split, TaskData
from xcloud.parallel.pipeline import Pipeline
from xcloud.parallel.rank_group import RankGroup
from xcloud.record.rank_state import SAMPLES_FILE
from xcloud.record.reporter import Reporter
from xcloud.training.settings import Training


class Evaluator:
    """Scores a split through the pipeline. All ranks take part; the last stage's leader reports
    the scores to rank 0 and writes samples, which are text, only to its own run folder."""

    def __init__(
        self,
        training: Training,
        rank: int,
        pipeline: Pipeline,
        lanes: Mapping[int, RankGroup],
        data: TaskData,
        fetch: Callable[[Split, Tensor], Batch],
        reporter: Reporter,
        run_dir: Path,
        multiple: int = 1,
    ) -> None:
        """multiple: of micro-batches, for ranks that compute in step; the last is scored again to
        fill up."""
        self._multiple = multiple
        self._samples_file = run_dir / SAMPLES_FILE
        self._training, self._rank, self._pipeline = training, rank, pipeline
        self._lanes, self._data, self._fetch, self._reporter = lanes, data, fetch, reporter

    def evaluate(self, split: Split, step: int) -> None:
        started = time.perf_counter()
        count = self._data.num_samples(split)
        if self._training.eval_samples is not None:
            count = min(count, self._training.eval_samples)
        pieces = list(torch.split(torch.arange(count), self._training.eval_batch_size))
        pieces += pieces[-1:] * (-len(pieces) % self._multiple)
        predictions = self._pipeline.predict(pieces, lambda ids: self._fetch(split, ids), step)
        last = self._pipeline.num_stages - 1
        if last not in self._pipeline.stages:
            return
        lanes = self._lanes[last]
        predictions = gather_predictions(predictions, lanes)
        if lanes.leads:
            values = self._data.score(split, predictions)
            samples = self._data.sample_outputs(split, predictions, 5)
            with self._reporter.may_lose(SAMPLES_FILE):
                self._samples_file.write_text(samples, encoding="utf-8")
            self._reporter.event(
                "quality",
                now=True,
                split=split,
                step=step,
                values=values,
                signature=self._data.signature(),
                evaluation_s=round(time.perf_counter() - started, 3),
            )


def gather_predictions(mine: Mapping[int, list[int]], lanes: RankGroup) -> dict[int, list[int]]:
    """Predictions of all ranks of a stage, as one flat integer tensor from each (no pickle)."""
    flat = [n for ident, tokens in mine.items() for n in (ident, len(tokens), *tokens)]
    sizes = lanes.gather(torch.tensor([len(flat)]))
    padded = torch.zeros(max(int(s) for s in sizes), dtype=torch.int64)
    padded[: len(flat)] = torch.tensor(flat, dtype=torch.int64)
    everyone = lanes.gather(padded)
    found: dict[int, list[int]] = {}
    for length, numbers in zip(sizes, everyone, strict=True):
        values, at = numbers[: int(length)].tolist(), 0
        while at < len(values):
            until = at + 2 + values[at + 1]
            found[values[at]] = values[at + 2 : until]
            at = until
    return found

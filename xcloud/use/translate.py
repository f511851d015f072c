"""Translate lines with a trained run: python -m xcloud translate RUN "Una línea." ["Otra."]

RUN is a run's output folder. All stages run in this process; the message between two clouds goes
through the run's compressors, as in training (--uncompressed omits them).
With no text, lines are read from standard input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from xcloud.base.errors import ConfigError, XcloudError
from xcloud.base.project import MODEL_DIR
from xcloud.comm.boundary import Message
from xcloud.contracts.model import Stage
from xcloud.job.config import EXPERIMENT_FILE, read_job
from xcloud.job.experiment import Experiment
from xcloud.rank.export import fill, read_stage
from xcloud.record.segments import check_is_run
from xcloud.tasks.translation import Translation, TranslationText
from xcloud.use.trained_boundaries import TrainedBorders


class Translator:
    """All stages of a trained run in one process."""

    def __init__(self, run_dir: Path, *, compressed: bool = True) -> None:
        """Raises ConfigError or DataError if the folder holds no finished translation run."""
        check_is_run(run_dir, EXPERIMENT_FILE)
        job = read_job(run_dir / EXPERIMENT_FILE)
        if not isinstance(job, Experiment) or not isinstance(job.task, Translation):
            raise ConfigError(f"{run_dir} is no run of a translation task: {job.headline}")
        self.experiment, task = job, job.task
        self.text = TranslationText.load(run_dir / MODEL_DIR, task.max_length)
        self.stages = [self._stage(run_dir, i) for i in range(self.experiment.cluster.num_stages)]
        self.boundaries = TrainedBorders(self.experiment, compressed)

    def _stage(self, run_dir: Path, number: int) -> Stage:
        architecture, path = read_stage(run_dir, number)
        stage = self.experiment.model.empty_stage(
            number,
            self.experiment.cluster.num_stages,
            self.text.vocabularies,
            self.experiment.task.max_length,
            architecture,
        )
        fill(stage, path)
        return stage.eval()

    @torch.no_grad()
    def translate(self, lines: Sequence[str]) -> list[str]:
        ids = torch.arange(len(lines))
        batch = {"ids": ids, "source": self.text.source_batch(lines)}
        message: Message | None = None
        for number, stage in enumerate(self.stages[:-1]):
            message = stage(message, batch).send
            assert message is not None
            message = self.boundaries.carry(number, message)
        return [self.text.decode(tokens) for tokens in self.stages[-1].predict(message, batch)]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m xcloud translate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="output folder of a finished run")
    parser.add_argument("text", nargs="*", help="lines to translate; none = standard input")
    parser.add_argument("--uncompressed", action="store_true", help="omit the compressors")
    arguments = parser.parse_args(words)
    try:
        translator = Translator(arguments.run, compressed=not arguments.uncompressed)
    except XcloudError as error:
        sys.exit(f"xcloud: {error}")
    if arguments.text:
        print("\n".join(translator.translate(arguments.text)))
        return
    for line in sys.stdin:
        print(translator.translate([line.strip()])[0], flush=True)

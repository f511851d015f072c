"""A finished run, opened for use: its text, and all its stages in this process. Nothing is sent;
what would cross two clouds goes through the compressors that the run ended with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.project import MODEL_DIR, project_root
from xcloud.cluster.frame import TensorSpec
from xcloud.comm.boundary import Message
from xcloud.contracts.model import BuildContext, Stage
from xcloud.contracts.task import SavedText, SavesText, UsedAs
from xcloud.job.config import EXPERIMENT_FILE, read_job
from xcloud.job.experiment import Experiment
from xcloud.record.segments import check_is_run


@dataclass(frozen=True)
class TrainedRun:
    """text: what the run's task left for use without its corpus."""

    folder: Path
    experiment: Experiment
    text: SavedText

    @staticmethod
    def open(folder: Path, used_as: UsedAs) -> TrainedRun:
        """Raises ConfigError or DataError if the folder holds no finished run of that kind."""
        check_is_run(folder, EXPERIMENT_FILE)
        job = read_job(folder / EXPERIMENT_FILE)
        task = getattr(job, "task", None)  # a one-way job has none
        if not isinstance(task, SavesText) or task.used_as != used_as:
            raise ConfigError(f"{folder} is no run of a {used_as}: {job.headline}")
        return TrainedRun(folder, cast(Experiment, job), task.saved_text(folder / MODEL_DIR))

    @property
    def num_stages(self) -> int:
        return self.experiment.cluster.num_stages

    def context(self) -> BuildContext:
        """Builds on the CPU; a base of our own comes from the cache, or is made anew."""
        cache_dir = Path(self.experiment.cache_dir)
        return BuildContext(
            seed=self.experiment.seed,
            device=torch.device("cpu"),
            cache_dir=cache_dir if cache_dir.is_absolute() else project_root() / cache_dir,
            vocabularies=self.text.vocabularies,
            sentences=lambda name: [],
            max_length=self.experiment.task.max_length,
            group_rank=0,
            barrier=lambda: None,
            report=lambda line: print(line, file=sys.stderr),
        )

    def part(self, stage: int) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
        """A stage's architecture and tensors as exported. DataError if its file is missing."""
        path = self.folder / MODEL_DIR / f"stage{stage}.safetensors"
        if not path.is_file():
            raise DataError(
                f"there is no {path}: did that run finish? Of a run on several machines, copy "
                f"every cloud's {MODEL_DIR} files into one folder"
            )
        with safe_open(path, "pt") as file:
            architecture = json.loads((file.metadata() or {}).get("architecture", "null"))
        if architecture is None:
            raise DataError(f"{path} does not say what it is a part of")
        return architecture, load_file(path)

    def stages(self) -> list[Stage]:
        """Each as it was trained, for evaluation."""
        stages = []
        for number in range(self.num_stages):
            architecture, tensors = self.part(number)
            model = self.experiment.model
            stage = model.empty_stage(number, self.num_stages, self.context(), architecture)
            try:
                stage.load_exported(tensors)
            except RuntimeError as error:
                where = f"{self.folder / MODEL_DIR}, stage {number}"
                raise DataError(f"{where} does not fit this experiment: {error}") from error
            stages.append(stage.eval())
        return stages

    def carry(self, stage: int, message: Message, compressed: bool = True) -> Message:
        """What arrives behind `stage` of what it sends. compressed: False leaves the compressors
        out."""
        layout = self.experiment.cluster
        crosses = layout.stage_cloud(stage) != layout.stage_cloud(stage + 1)
        compression = self.experiment.compression.at_boundary(stage)
        compressor = compression.at(self.experiment.training.max_steps).forward
        if compressor is None or not (crosses and compressed):
            return message

        def arrived(tensor: Tensor) -> Tensor:
            return compressor.decompress(compressor.compress(tensor), TensorSpec.of(tensor))

        fields = self.experiment.boundaries[stage].fields
        floating = {field.name for field in fields if field.dtype.is_floating_point}
        return {n: arrived(t) if n in floating else t for n, t in message.items()}


def parser_of(command: str, description: str | None) -> argparse.ArgumentParser:
    """With the run's folder as its first argument."""
    parser = argparse.ArgumentParser(
        prog=f"python -m xcloud {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="output folder of a finished run")
    return parser

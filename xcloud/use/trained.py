"""A finished run, opened for use: its text, and all its stages in this process, to translate with,
or to be joined. Nothing is sent; what would cross two clouds goes through the compressors that
the run ended with. Writing on is in generate.py.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
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
from xcloud.models.causal import CausalLM
from xcloud.rank.export import exporting
from xcloud.record.segments import check_is_run
from xcloud.tasks.causal_text import CausalTokenizer
from xcloud.tasks.translation import TranslationText


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
        description=inspect.cleandoc(description or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="output folder of a finished run")
    return parser


class Translator:
    """All stages of a trained run in one process. Raises ConfigError or DataError if the folder
    holds no finished translation run."""

    def __init__(self, run_dir: Path, *, compressed: bool = True) -> None:
        self.run = TrainedRun.open(run_dir, "translation task")
        self.text = cast(TranslationText, self.run.text)
        self.stages, self.compressed = self.run.stages(), compressed

    @torch.no_grad()
    def translate(self, lines: Sequence[str]) -> list[str]:
        batch = {"ids": torch.arange(len(lines)), "source": self.text.source_batch(lines)}
        message: Message | None = None
        for number, stage in enumerate(self.stages[:-1]):
            message = stage(message, batch).send
            assert message is not None
            message = self.run.carry(number, message, self.compressed)
        return [self.text.decode(tokens) for tokens in self.stages[-1].predict(message, batch)]


def translate(words: Sequence[str]) -> None:
    """Translate lines with a trained run: python -m xcloud translate RUN "Una línea." ["Otra."]

    RUN is a run's output folder. All stages run in this process; the message between two clouds
    goes through the run's compressors, as in training (--uncompressed omits them).
    With no text, lines are read from standard input.
    """
    parser = parser_of("translate", translate.__doc__)
    parser.add_argument("text", nargs="*", help="lines to translate; none = standard input")
    parser.add_argument("--uncompressed", action="store_true", help="omit the compressors")
    arguments = parser.parse_args(words)
    translator = Translator(arguments.run, compressed=not arguments.uncompressed)
    if arguments.text:
        print("\n".join(translator.translate(arguments.text)))
        return
    for line in sys.stdin:
        print(translator.translate([line.strip()])[0], flush=True)


def join(run_dir: Path, out: Path) -> None:
    """Raises ConfigError or DataError if `run_dir` holds no finished run of a causal language
    model, or one of which a part is missing."""
    run = TrainedRun.open(run_dir, "causal language model")
    parts = [run.part(number) for number in range(run.num_stages)]
    tensors = {name: tensor for _, part in parts for name, tensor in part.items()}
    model = cast(CausalLM, run.experiment.model)
    with exporting(out):
        for folder in model.join(tensors, parts[-1][0], run.context(), out):
            cast(CausalTokenizer, run.text).save(folder)


def export(words: Sequence[str]) -> None:
    """Join the parts of a trained causal language model: python -m xcloud export RUN [--out DIR]

    RUN is a run's output folder. Every cloud writes its own part (RUN/model/stageN.safetensors);
    of a run on several machines copy all parts into one folder first. Adapters become a folder
    that peft loads, with the base beside them if the run made it; all weights one that
    transformers loads.
    """
    parser = parser_of("export", export.__doc__)
    parser.add_argument("--out", type=Path, help="where to write (default: RUN/joined)")
    arguments = parser.parse_args(words)
    out: Path = arguments.out or arguments.run / "joined"
    join(arguments.run, out)
    print(out)

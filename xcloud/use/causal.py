"""Join the parts of a trained causal language model: python -m xcloud export RUN [--out DIR]

RUN is a run's output folder. Every cloud writes its own part (RUN/model/stageN.safetensors); of a
run on several machines copy all parts into one folder first. Adapters become a folder that peft
loads, with the base beside them if the run made it; all weights one that transformers loads.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from xcloud.base.errors import ConfigError, DataError, XcloudError
from xcloud.base.project import MODEL_DIR, project_root
from xcloud.contracts.model import BuildContext, Stage
from xcloud.job.config import EXPERIMENT_FILE, read_job
from xcloud.job.experiment import Experiment
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import (
    Part,
    config_of,
    depth,
    network_of,
    write_checkpoint,
)
from xcloud.models.stages import TEXT
from xcloud.rank.export import exporting, fill, read_stage
from xcloud.record.segments import check_is_run
from xcloud.tasks.causal_text import CausalTokenizer
from xcloud.tasks.language_modelling import FOLDER_NAME

ADAPTER_FILE = "adapter_model.safetensors"


class TrainedCausal:
    """The parts of a finished run. Raises ConfigError or DataError if the folder holds none."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        check_is_run(run_dir, EXPERIMENT_FILE)
        job = read_job(run_dir / EXPERIMENT_FILE)
        if not isinstance(job, Experiment) or not isinstance(job.model, CausalLM):
            raise ConfigError(f"{run_dir} is no run of a causal language model: {job.headline}")
        self.experiment, self.model = job, job.model
        self.num_stages = self.experiment.cluster.num_stages
        self.tokenizer = CausalTokenizer.load(run_dir / MODEL_DIR / FOLDER_NAME)

    def context(self) -> BuildContext:
        """Builds on the CPU; a base of our own comes from the cache, or is made anew."""
        cache_dir = Path(self.experiment.cache_dir)
        return BuildContext(
            seed=self.experiment.seed,
            device=torch.device("cpu"),
            cache_dir=cache_dir if cache_dir.is_absolute() else project_root() / cache_dir,
            vocabularies={TEXT: self.tokenizer.token_ids},
            sentences=lambda name: [],
            max_length=self.experiment.task.max_length,
            lane=0,
            barrier=lambda: None,
            report=lambda line: print(line, file=sys.stderr),
        )

    def stages(self) -> list[Stage]:
        """Whole, each as it was trained."""
        made = []
        for number in range(self.num_stages):
            architecture, path = read_stage(self.run_dir, number)
            assert architecture is not None
            stage = self.model.empty_stage(number, self.num_stages, self.context(), architecture)
            fill(stage, path)
            made.append(stage.eval())
        return made

    def export(self, out: Path) -> None:
        """Join the parts into `out`: adapters as peft loads them, with the base in out/base if it
        is our own; or all weights as transformers loads them."""
        if self.model.split is not None and self.model.split.is_low_rank:
            raise ConfigError(
                "model.split has put projections into this model that transformers and peft do "
                "not know; try it with python -m xcloud generate"
            )
        tensors: dict[str, Tensor] = {}
        architecture: Any = None
        for number in range(self.num_stages):
            architecture, path = read_stage(self.run_dir, number)
            tensors |= load_file(path)
        if architecture is None:
            raise DataError(f"{self.run_dir / MODEL_DIR}: the parts do not say what they are of")
        config = config_of(architecture["config"])
        with exporting(out):
            out.mkdir(parents=True, exist_ok=True)
            if self.model.lora is not None:
                base = self._base(out)
                save_file(tensors, out / ADAPTER_FILE, {"format": "pt"})
                self.model.lora.adapter_config(config, base).save_pretrained(out)
            else:
                self._write_whole(config, tensors, out)
            self.tokenizer.save(out)

    def _base(self, out: Path) -> str:
        if self.model.own is None:
            assert self.model.checkpoint is not None
            return self.model.checkpoint
        base = out / "base"
        shutil.copytree(self.model.own.folder(self.context()), base, dirs_exist_ok=True)
        self.tokenizer.save(base)
        return str(base.resolve())

    def _write_whole(self, config: Any, tensors: dict[str, Tensor], out: Path) -> None:
        network = network_of(config, Part(range(depth(config)), True, True))
        missing = set(network.state_dict()) - set(tensors)
        if missing:
            raise DataError(f"{self.run_dir / MODEL_DIR}: no part holds {sorted(missing)[0]}")
        network.load_state_dict(tensors)
        network.config.use_cache = True
        write_checkpoint(network, out)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m xcloud export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="output folder of a finished run")
    parser.add_argument("--out", type=Path, help="where to write (default: RUN/joined)")
    arguments = parser.parse_args(words)
    out: Path = arguments.out or arguments.run / "joined"
    try:
        TrainedCausal(arguments.run).export(out)
    except XcloudError as error:
        sys.exit(f"xcloud: {error}")
    print(out)

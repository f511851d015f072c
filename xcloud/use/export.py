"""Join the parts of a trained causal language model: python -m xcloud export RUN [--out DIR]

RUN is a run's output folder. Every cloud writes its own part (RUN/model/stageN.safetensors); of a
run on several machines copy all parts into one folder first. Adapters become a folder that peft
loads, with the base beside them if the run made it; all weights one that transformers loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from xcloud.models.causal import CausalLM
from xcloud.rank.export import exporting
from xcloud.tasks.causal_text import CausalTokenizer
from xcloud.use.trained import TrainedRun, parser_of


def export(run_dir: Path, out: Path) -> None:
    """Raises ConfigError or DataError if `run_dir` holds no finished run of a causal language
    model, or one of which a part is missing."""
    run = TrainedRun.open(run_dir, "causal language model")
    parts = [run.part(number) for number in range(run.num_stages)]
    tensors = {name: tensor for _, part in parts for name, tensor in part.items()}
    model = cast(CausalLM, run.experiment.model)
    with exporting(out):
        for folder in model.join(tensors, parts[-1][0], run.context(), out):
            cast(CausalTokenizer, run.text).save(folder)


def main(words: Sequence[str] | None = None) -> None:
    parser = parser_of("export", __doc__)
    parser.add_argument("--out", type=Path, help="where to write (default: RUN/joined)")
    arguments = parser.parse_args(words)
    out: Path = arguments.out or arguments.run / "joined"
    export(arguments.run, out)
    print(out)

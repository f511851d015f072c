"""`python -m xcloud COMMAND`: what can be done beside running an experiment (run.py does that).

Knows the commands' names and one example of each. A command's module is imported when it is
called, so the list appears at once.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from xcloud.base.errors import XcloudError


class Command(NamedTuple):
    """function: of (arguments) in the module, which returns an exit code or None."""

    module: str
    summary: str
    example: str
    function: str = "main"


COMMANDS = {
    "ui": Command(
        "xcloud.report.ui",
        "show the recorded runs in the browser (MLflow)",
        "ui",
    ),
    "report": Command(
        "xcloud.sweep.report",
        "make tables and pictures of sweeps again, or compare sweeps",
        "report table2 other_sweep",
    ),
    "claims": Command(
        "xcloud.claims.pages",
        "list what is claimed, published and own, with its state; write docs/paper.md",
        "claims",
    ),
    "reproduce": Command(
        "xcloud.claims.reproduce",
        "run one claim, judge it by its rule, write a record",
        "reproduce demo --quick",
    ),
    "site": Command(
        "xcloud.claims.pages",
        "write the records as a static site",
        "site --out site",
        "site",
    ),
    "translate": Command(
        "xcloud.use",
        "translate lines with a trained run",
        'translate outputs/DATE/TIME "El gato duerme."',
        "translate",
    ),
    "torchrun": Command(
        "xcloud.launch.torchrun",
        "start this cloud's ranks of a run over several machines",
        "torchrun --nnodes 2 --node-rank 0 ... -m xcloud worker experiment.yaml",
    ),
    "worker": Command(
        "xcloud.launch.worker",
        "one rank of a run over several machines; torchrun starts it in each cloud",
        "worker experiment.yaml --cloud cloud_a --run-dir runs/first",
    ),
    "monitor": Command(
        "xcloud.watch.following",
        "follow a run over several machines, or write the record that a killed monitor did not",
        "monitor runs/first --experiment experiment.yaml --again",
    ),
    "status": Command(
        "xcloud.watch.status",
        "say what every rank of a run does, and who waits for whom",
        "status outputs/DATE/TIME",
    ),
    "generate": Command(
        "xcloud.use",
        "let a trained causal language model write on",
        'generate outputs/DATE/TIME "The doctor"',
        "generate",
    ),
    "export": Command(
        "xcloud.use",
        "join the clouds' parts of a trained causal language model",
        "export outputs/DATE/TIME",
        "export",
    ),
    "train-tokenizer": Command(
        "xcloud.tasks.train_tokenizer",
        "make the tokenizer that the clouds of a one-way job share",
        "train-tokenizer FOLDER --languages es en --out tokenizer.json",
    ),
    "wire-audit": Command(
        "xcloud.security.wire_audit",
        "join the clouds' records of what left them",
        "wire-audit outputs/DATE/TIME",
    ),
    "leak-meter": Command(
        "xcloud.security.leak_meter",
        "measure what other clouds could recover, from the notes of a run",
        "leak-meter outputs/DATE/TIME",
    ),
}
HELP = ("-h", "--help", "help")


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in HELP:
        if len(words) < 2:
            print(overview())
            return 0
        words = [words[1], "--help"]
    name, *rest = words
    if name not in COMMANDS:
        near = difflib.get_close_matches(name.replace("_", "-"), COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        print(f"xcloud: unknown command {name!r}{hint}\n\n{overview()}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    run = getattr(importlib.import_module(command.module), command.function)
    try:
        return int(run(rest) or 0)
    except XcloudError as error:
        print(f"xcloud: {error}", file=sys.stderr)
        return 1


def overview() -> str:
    lines = [
        "usage: python -m xcloud COMMAND [...]",
        "",
        "  python -m xcloud COMMAND --help   explains a command",
        "  python run.py +exp=NAME           runs an experiment (python run.py --help)",
        "",
    ]
    for name, command in COMMANDS.items():
        lines += [
            f"{name:<16} {command.summary}",
            f"{'':<16}   python -m xcloud {command.example}",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m xcloud COMMAND`, or `xcloud COMMAND` where the package is installed.

A command's module is imported when it is called, so that the list appears at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from xcloud.base.errors import XcloudError
from xcloud.base.terminal import prepare_process, say
from xcloud.features import COMMANDS as OF_FEATURES


class Listed(NamedTuple):
    """function: the name, in xcloud or in a clone's experiments, of a function of (arguments) that
    returns an exit code or None."""

    function: str
    example: str
    summary: str


TABLE = """
entry.main | run +exp=abnet_iwslt | run an experiment, as python run.py does
job.catalogue.main | settings training | list what may be set, with defaults and meanings
tracking.mlflow_store.main | ui | show the recorded runs in the browser (MLflow)
study.report.main | report table2 other_sweep | make tables and pictures of sweeps, or compare them
experiments.claims.pages.main | claims \
    | list what is claimed with its state; write docs/paper.md (from a clone)
experiments.claims.reproduce.main | reproduce demo --quick \
    | run one claim, judge it, write a record (from a clone)
experiments.claims.pages.site | site --out site | write the records as a static site (from a clone)
use.translate | translate outputs/DATE/TIME "El gato duerme." | translate lines with a trained run
use.generate | generate outputs/DATE/TIME "The doctor" \
    | let a trained causal language model write on
evaluate.command.evaluate | evaluate outputs/DATE/TIME --texts FILE \
    | score a trained causal language model on other texts, or by tasks of lm-evaluation-harness
use.export | export outputs/DATE/TIME | join the clouds' parts of a trained causal language model
launch.torchrun.torchrun \
    | torchrun --nnodes 2 --node-rank 0 ... -m xcloud worker experiment.yaml \
    | start this cloud's ranks of a run over several machines
launch.worker.main | worker experiment.yaml --cloud cloud_a --run-dir runs/first \
    | one rank of a run; run.py starts it, and over several machines torchrun
launch.join.main | join experiment.yaml --cloud cloud_a \
    | start this cloud's ranks of a run with another owner's cloud
job.strict_policy.main | policy --new experiment.yaml --cloud cloud_a \
    | write a policy under which this cloud runs that file and no other
launch.relay.main | relay | carry sealed lines between owners who both dial this machine
job.invitation.invite | invite experiment.yaml --cloud cloud_a \
    | give the other owner this file and certificate by a code told over the phone
job.invitation.accept | accept 7-guitar-orbit --relay HOST:7100 \
    | get the file and certificate of the owner who told the code, and give yours
line.keys.main | keys new cloud_a | make the key of this cloud, or show whose a key is
job.approval.main | approve experiment.yaml \
    | show what an experiment file asks of this cloud and its number; approve it
doctor.command.main | doctor experiment.yaml --cloud cloud_a \
    | look whether this cloud can take part in a run, before it is started
show.following.main | monitor runs/first --experiment experiment.yaml --again \
    | follow a run over several machines, or write the record that a killed monitor did not
show.status.main | status outputs/DATE/TIME | say what every rank does, and who waits for whom
tasks.multilingual_text.train_tokenizer \
    | train-tokenizer FOLDER --languages es en --out tokenizer.json \
    | make the tokenizer that the clouds of a one-way job share
show.wire_audit.main | wire-audit outputs/DATE/TIME \
    | join the clouds' records of what left them; of two folders, whether they agree
"""
ROWS = (
    Listed(*map(str.strip, row.split("|"))) for row in (TABLE + OF_FEATURES).strip().splitlines()
)
OF_A_CLONE = "experiments."  # wheels have no such folder
COMMANDS = {row.example.split()[0]: row for row in ROWS}


def main(arguments: Sequence[str] | None = None) -> int:
    # Before torch is imported: its C++ code warns of what is no fault (a host without a name).
    # The same for a call from Python, which has prepared itself.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if arguments is None:  # a process of its own
        prepare_process()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        if len(words) < 2:
            say(overview())
            return 0
        words = [words[1], "--help"]
    name, *rest = words
    if name not in COMMANDS:
        from xcloud.base.wording import meant  # which takes a while

        # "train_tokenizer" is near "train-tokenizer" only once it is written alike.
        hint = meant(name.replace("_", "-"), known=[*COMMANDS])
        say(f"xcloud: unknown command {name!r}{hint}\n\n{overview()}", error=True)
        return 2
    module, _, function = COMMANDS[name].function.rpartition(".")
    try:
        if module.startswith(OF_A_CLONE):
            from xcloud.base.project import checkout

            # Folders of a clone are no packages of the wheel, so they are found by path.
            sys.path.insert(
                0, str(checkout(f"`xcloud {name}` works on its claims.toml and records"))
            )
        else:
            module = f"xcloud.{module}"
        return int(getattr(importlib.import_module(module), function)(rest) or 0)
    except (XcloudError, OSError) as error:
        # An OSError without a file is a fault of the program, of which the traceback tells more.
        if isinstance(error, OSError) and error.filename is None:
            raise
        say(f"xcloud: {error}", error=True)
        return 1
    except KeyboardInterrupt:
        say("xcloud: interrupted", error=True)
        return 130


def overview() -> str:
    lines = [
        "usage: python -m xcloud COMMAND [...]",
        "",
        "  python -m xcloud COMMAND --help   explains a command",
        "  python -m xcloud run --help       explains the settings of an experiment",
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

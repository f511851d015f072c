"""Translate lines with a trained run: python -m xcloud translate RUN "Una línea." ["Otra."]

RUN is a run's output folder. All stages run in this process; the message between two clouds goes
through the run's compressors, as in training (--uncompressed omits them).
With no text, lines are read from standard input.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from xcloud.comm.boundary import Message
from xcloud.tasks.translation import TranslationText
from xcloud.use.trained import TrainedRun, parser_of


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


def main(words: Sequence[str] | None = None) -> None:
    parser = parser_of("translate", __doc__)
    parser.add_argument("text", nargs="*", help="lines to translate; none = standard input")
    parser.add_argument("--uncompressed", action="store_true", help="omit the compressors")
    arguments = parser.parse_args(words)
    translator = Translator(arguments.run, compressed=not arguments.uncompressed)
    if arguments.text:
        print("\n".join(translator.translate(arguments.text)))
        return
    for line in sys.stdin:
        print(translator.translate([line.strip()])[0], flush=True)

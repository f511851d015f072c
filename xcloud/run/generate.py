"""Try a trained causal language model: python -m xcloud generate RUN "Once upon" ["A question?"]

RUN is a run's output folder, with the parts of all clouds in it. It writes on greedily; the
message between two clouds goes through the run's compressors, as it did in training
(--uncompressed leaves them out). A model with a chat template takes the text as a question.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from xcloud.comm.border import Message
from xcloud.errors import DataError, XcloudError
from xcloud.models.causal_stage import TEXT, TYPES, CausalStage
from xcloud.run.causal import TrainedCausal
from xcloud.run.trained_borders import TrainedBorders


class Generator:
    """All stages of a trained run in one process."""

    def __init__(self, trained: TrainedCausal, compressed: bool = True) -> None:
        self._trained, self._stages = trained, trained.stages()
        self._borders = TrainedBorders(trained.experiment, compressed)

    def write_on(self, prompt: str, max_new_tokens: int) -> str:
        """What follows the prompt, up to the end token. Every token goes through the whole text
        again, as in an evaluation: nothing is kept between tokens."""
        tokenizer = self._trained.tokenizer
        ids = tokenizer.prompt(prompt)
        num_given = len(ids)
        last = self._stages[-1]
        assert isinstance(last, CausalStage)
        longest = int(last.architecture["config"]["max_position_embeddings"])
        if num_given >= longest:
            raise DataError(
                f"the prompt has {num_given} tokens; the model has {longest} positions"
            )
        for _ in range(min(max_new_tokens, longest - num_given)):
            token = int(self._next(torch.tensor([ids])).argmax())
            if token == tokenizer.token_ids.eos:
                break
            ids.append(token)
        return tokenizer.decode(ids[num_given:])

    @torch.no_grad()
    def _next(self, text_BS: Tensor) -> Tensor:
        batch = {"ids": torch.arange(1), TEXT: text_BS, TYPES: torch.zeros_like(text_BS)}
        message: Message | None = None
        for number, stage in enumerate(self._stages[:-1]):
            message = stage(message, batch).send
            assert message is not None
            message = self._borders.carry(number, message)
        last = self._stages[-1]
        assert isinstance(last, CausalStage)
        return last.next_words(message, batch)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m xcloud generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="output folder of a finished run")
    parser.add_argument("text", nargs="+", help="what to go on from")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--uncompressed", action="store_true", help="leave the compressors out")
    arguments = parser.parse_args(words)
    if arguments.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be 1 or more, got {arguments.max_new_tokens}")
    try:
        generator = Generator(TrainedCausal(arguments.run), not arguments.uncompressed)
        for text in arguments.text:
            print(generator.write_on(text, arguments.max_new_tokens), flush=True)
    except XcloudError as error:
        sys.exit(f"xcloud: {error}")

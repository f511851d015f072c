"""A finished run, opened for use: all its stages in this process, to translate or to write on; or
joined for peft and transformers. Nothing is sent; what would cross two clouds goes through what an
evaluation of the run has there (pipeline/crossing.py).
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import ConfigError, DataError
from xcloud.base.placeholders import check_is_safetensors
from xcloud.base.project import MODEL_DIR, project_root
from xcloud.base.run_folder import owned
from xcloud.base.settings import NotNegativeFloat, Positive, Rate
from xcloud.base.terminal import say
from xcloud.base.wording import check
from xcloud.comm.channel import Message
from xcloud.contracts.architecture import checked_architecture, tensors_of
from xcloud.contracts.model import Batch, BuildContext
from xcloud.experiment import Experiment
from xcloud.job.config import EXPERIMENT_FILE
from xcloud.job.given import check_is_run, read_settings
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import positions_of
from xcloud.models.following import Choice, following
from xcloud.models.frozen_weights import PACKED
from xcloud.pipeline.crossing import Crossing
from xcloud.pipeline.settings import autocast_for, is_emulated
from xcloud.rank.export import exporting, learned_file, read_learned
from xcloud.tasks.language_modelling import LanguageModelling, read_chats

OWN_CHATS = "the run's test chats"
NUM_OWN_CHATS = 5
T = TypeVar("T")
UNFINISHED = "\ufffd"  # a tokenizer's word for bytes that are no character yet


class TrainedRun:
    """A finished run of a task that is used as `used_as`. compressed: False leaves out defence and
    compressors. text: what the task left for use without its corpus. Raises ConfigError or
    DataError if the folder holds no such run."""

    used_as: ClassVar[str]

    def __init__(self, folder: Path, compressed: bool = True) -> None:
        check_is_run(folder, EXPERIMENT_FILE)
        # A run's folder may come from elsewhere: its file names what is built.
        job = read_settings(folder / EXPERIMENT_FILE).job
        task: Any = getattr(job, "task", None)  # a one-way job has none
        if getattr(task, "used_as", None) != self.used_as:
            raise ConfigError(f"{folder} is no run of a {self.used_as}: {job.headline}")
        self.experiment = cast(Experiment, job)
        self.folder = folder / MODEL_DIR
        self.text = task.saved_text(self.folder)
        self._compressed = compressed

    def context(self) -> BuildContext:
        return BuildContext(
            seed=self.experiment.seed,
            # All on the CPU: stages of several clouds need not fit into one GPU.
            device=torch.device("cpu"),
            cache_dir=project_root() / self.experiment.cache_dir,  # or absolute
            vocabularies=self.text.vocabularies,
            sentences=lambda name: [],
            max_length=self.experiment.task.max_length,
            report=lambda line: say(line, error=True),
        )

    def parts(self) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
        """Architecture and tensors of each stage."""
        for stage in range(self.experiment.cluster.num_stages):
            path = self.folder / f"stage{stage}.safetensors"
            if not path.is_file():
                raise DataError(
                    f"there is no {path}: did that run finish? If on several machines, copy every "
                    f"cloud's {MODEL_DIR} files into one folder"
                )
            check_is_safetensors(path)
            with safe_open(path, "pt") as file:
                try:
                    written = parsed_json((file.metadata() or {}).get("architecture", "null"))
                    # Written by whoever trained the stage, so it is held to bounds before anything
                    # is built of it.
                    architecture = checked_architecture(written)
                except (DataError, ValueError) as error:
                    raise DataError(f"{path}: {error}") from None
                yield architecture, load_file(path)

    @cached_property
    def stages(self) -> list[Any]:
        stages = []
        # All of them first: a missing part is said before one is built.
        parts = list(self.parts())
        for number, (architecture, tensors) in enumerate(parts):
            context = replace(self.context(), architecture=architecture)
            stage = self.experiment.model.build_stage(
                number, num_stages=len(parts), context=context
            )
            try:
                # torch raises this for names or shapes that differ.
                stage.load_exported(tensors)
            except RuntimeError as error:
                raise DataError(
                    f"{self.folder}, stage {number} does not fit this experiment: {error}"
                ) from error
            stages.append(stage.eval())
        if is_emulated(self.experiment.training.precision, device=torch.device("cpu")):
            said = "this processor multiplies bf16 in software, some 50 times slower than fp32"
            say(f"training.precision=bf16, in which the run was measured: {said}", error=True)
        return stages

    @property
    def longest(self) -> int:
        """Return how many tokens a text may have."""
        return int(self.experiment.task.max_length)

    @cached_property
    def _crossings(self) -> dict[int, Crossing]:
        """Defence and compressors of messages to another cloud, by the stage that sends them."""
        job = self.experiment
        layout = job.cluster
        found = {}
        for stage in range(layout.num_stages - 1):
            # Only what left a cloud was compressed in the run.
            if self._compressed and layout.stage_cloud(stage) != layout.stage_cloud(stage + 1):
                boundary = job.model.boundary(
                    stage, num_stages=layout.num_stages, max_length=self.longest
                )
                learned = read_learned(self.folder, stage)
                # What compressors have learned belongs to the model: with empty state other values
                # pass.
                try:
                    found[stage] = Crossing(
                        job, stage, boundary, last_step=job.training.max_steps, learned=learned
                    )
                # The file comes with the run, perhaps from elsewhere.
                except (ValueError, KeyError) as error:  # a key is missing, or one too many
                    raise DataError(f"{self.folder / learned_file(stage)}: {error}") from None
                if learned is None and found[stage].learns:
                    said = f"{self.folder / learned_file(stage)} is missing (earlier releases "
                    said += "did not write it): messages cross as at the start of training"
                    say(f"{said}, not as they were measured", error=True)
        return found

    def carry(self, stage: int, message: Message, batch: Batch) -> Message:
        """Return what arrives of what `stage` sends, as in an evaluation of the run."""
        crossing = self._crossings.get(stage)
        if crossing is None:
            return message
        try:
            return crossing.arrived(message, samples=batch)
        except RuntimeError as error:  # torch's, for a tensor of another shape
            if not crossing.learns:
                raise
            file = self.folder / learned_file(stage)
            raise DataError(f"{file} does not fit the messages of this run: {error}") from None

    @cached_property
    def autocast(self) -> Callable[[], AbstractContextManager[object]]:
        """Return a maker of the context that stages compute in: the run's precision."""
        return autocast_for(self.experiment.training.precision, device=torch.device("cpu"))

    @property
    def compressor(self) -> str:
        """Return the label of what messages between clouds go through; "none" if nothing does."""
        if not self._crossings:
            return "none"
        defence = self.experiment.security.defences.get("forward")
        noise = "" if defence is None else f", {defence.label}"
        return self.experiment.compression.label + noise

    @torch.no_grad()
    def ask_last(self, batch: Batch, ask: Callable[[Any, Message | None, Batch], T]) -> T:
        """Return what `ask` makes of the last stage, of what arrives there (None if there is one
        stage) and of the batch, computed in the run's precision."""
        message: Message | None = None
        for number, stage in enumerate(self.stages[:-1]):
            with self.autocast():  # of the stage alone, as in the run
                sent = stage(message, batch).send
            message = self.carry(number, sent, batch)
        with self.autocast():
            return ask(self.stages[-1], message, batch)


class Translator(TrainedRun):
    used_as = "translation task"

    def translate(self, lines: Sequence[str]) -> list[str]:
        table = self.text.table("source", lines)
        ids = torch.arange(len(lines))
        # Told and not refused: the rest of the line is translated.
        if table.num_cut:
            most = f"{self.experiment.task.max_length} tokens (task.max_length)"
            say(f"{table.num_cut} of {len(lines)} lines cut to {most}", error=True)
        batch = {"ids": ids, "source": table.padded(ids)}
        found = self.ask_last(batch, lambda last, *given: last.predict(*given))
        return [self.text.decode(tokens) for tokens in found]


class TextGenerator(TrainedRun):
    """A trained causal language model, which writes on."""

    used_as = "causal language model"

    @cached_property
    def stages(self) -> list[Any]:
        if said := self.text.not_followed:
            say(said, error=True)
        return super().stages

    @property
    def longest(self) -> int:
        """Return how many tokens the model can have before it."""
        return positions_of(self.stages[-1].network.config)

    def pieces(
        self, prompt: str, max_new_tokens: int, choice: Choice, cached: bool = True
    ) -> Iterator[str]:
        """Yield what follows the prompt, up to an end token, as it comes."""
        return self.after(self.text.prompt(prompt), max_new_tokens, choice, cached)

    def after(
        self, given: Sequence[int], max_new_tokens: int, choice: Choice, cached: bool = True
    ) -> Iterator[str]:
        """Yield what follows these tokens, up to an end token, as it comes."""
        ids = list(given)
        # What has been yielded is a prefix of the text, as it grows.
        written = text = self.text.decode(ids, as_written=True)
        for token in self.tokens_after(given, max_new_tokens, choice, cached):
            ids.append(token)
            text = self.text.decode(ids, as_written=True)
            # Later tokens may change what the last ones mean: a character of several bytes.
            if text.startswith(written) and not text.endswith(UNFINISHED):
                yield text[len(written) :]
                written = text
        # What was held back at the end.
        yield text[len(written) :]

    def tokens_after(
        self,
        given: Sequence[int],
        max_new_tokens: int,
        choice: Choice,
        cached: bool = True,
        ends: Collection[int] = (),
    ) -> Iterator[int]:
        """Yield the tokens that follow these, up to an end token or one of `ends`, or as many as
        the model has positions for."""
        # The prompt takes positions, too.
        longest = self.longest
        if len(given) >= longest:
            raise DataError(
                f"the prompt has {len(given)} tokens; the model has {longest} positions"
            )
        tokens = following(self.stages, self.carry, given, choice, cached, self.autocast)
        for token in islice(tokens, min(max_new_tokens, longest - len(given))):
            # The end token itself is not shown.
            if token in self.text.ends or token in ends:
                break
            yield token

    def merge(self, out: Path) -> None:
        """Write the model with its adapters added to its weights, for transformers."""
        model = cast(CausalLM, self.experiment.model)
        with exporting(out):
            for folder in model.merge(self.stages, context=self.context(), out=out):
                self.text.save(folder)

    def join(self, out: Path) -> None:
        """Write all stages' parts as one folder for peft or transformers."""
        parts = list(self.parts())
        tensors = tensors_of((part for _, part in parts), are_equal=torch.equal)
        model = cast(CausalLM, self.experiment.model)
        # Only whole: an interrupted export leaves nothing that looks like a model.
        with exporting(out):
            for folder in model.join(tensors, parts[-1][0], self.context(), out):
                self.text.save(folder)


def parser_of(command: Callable[..., None]) -> argparse.ArgumentParser:
    name = f"python -m xcloud {command.__name__}"
    parser = argparse.ArgumentParser(
        name,
        description=inspect.getdoc(command),
        formatter_class=argparse.RawDescriptionHelpFormatter,  # lines of usage stay lines
    )
    parser.add_argument("run", type=Path, help="output folder of a finished run")
    return parser


def translate(words: Sequence[str]) -> None:
    """Translate lines with a trained run: python -m xcloud translate RUN "Una línea." ["Otra."]

    RUN is a run's output folder. All stages run in this process; the message between two clouds
    goes through the run's defence and compressors, as in its evaluations (--uncompressed omits
    them).
    With no text, lines are read from standard input.
    """
    parser = parser_of(translate)
    parser.add_argument("text", nargs="*", help="lines to translate; none = standard input")
    parser.add_argument("--uncompressed", action="store_true", help="omit noise and compressors")
    arguments = parser.parse_args(words)
    translator = Translator(folder=arguments.run, compressed=not arguments.uncompressed)
    for lines in [arguments.text] if arguments.text else ([line.strip()] for line in sys.stdin):
        say("\n".join(translator.translate(lines)))


def export(words: Sequence[str]) -> None:
    """Join the parts of a trained causal language model: python -m xcloud export RUN [--out DIR]

    RUN is a run's output folder. Every cloud writes its own part (RUN/model/stageN.safetensors);
    of a run on several machines copy all parts into one folder first. Adapters become a folder
    that peft loads, with the base beside them if the run made it; all weights one that
    transformers loads. --merge adds adapters to the weights that they were trained beside, as
    those were kept (model.weights), and writes one that transformers loads.
    """
    parser = parser_of(export)
    parser.add_argument("--out", type=Path, help="default: RUN/joined or RUN/merged")
    parser.add_argument("--merge", action="store_true", help="add adapters to the weights")
    arguments = parser.parse_args(words)
    run: Path = arguments.run
    out: Path = arguments.out or run / ("merged" if arguments.merge else "joined")
    generator = TextGenerator(run)
    with contextlib.ExitStack() as held:
        # Below the run's own folder nobody else may write meanwhile.
        if out.resolve().is_relative_to(run.resolve()):
            held.enter_context(owned(run))
        if arguments.merge:
            generator.merge(out)
        else:
            generator.join(out)
    say(out)


def generate(words: Sequence[str]) -> None:
    """Try a trained causal language model: python -m xcloud generate RUN "Once upon" ["Who?"]

    RUN is a run's output folder, with the parts of all clouds in it. It writes on as it goes: the
    most probable token each time, or one drawn (--temperature, --top-p, --seed). The message
    between two clouds goes through the run's defence and compressors, as in its evaluations
    (--uncompressed leaves them out). A model that has learned chats takes the text as a question,
    behind a system message if --system gives one; --plain takes it as plain text. --chats answers
    the last question of the first test chats of the run, or of all chats of a .jsonl file
    ({"messages": [...]} a line).

    Keys and values of earlier tokens are kept, so after the prompt one row crosses for each token.
    A compressor that looks at all rows together (low rank, top-k) sees another matrix then than in
    training; --no-cache sends the whole text for each token, as an evaluation does.
    """
    parser = parser_of(generate)
    parser.add_argument("text", nargs="*", help="the beginnings to continue")
    parser.add_argument("--system", metavar="TEXT", help="the chat's system message")
    parser.add_argument("--plain", action="store_true", help="no chat, whatever was learned")
    parser.add_argument(
        "--chats",
        nargs="?",
        const=OWN_CHATS,
        metavar="FILE",
        help=f"chats to answer, in place of text (default: {NUM_OWN_CHATS} of the run's test)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: no drawing (default)")
    parser.add_argument("--top-p", type=float, help="of what share it is drawn from (default: 1)")
    parser.add_argument("--seed", type=int, help="of drawing (default: 0)")
    parser.add_argument("--no-cache", action="store_true", help="send the whole text each time")
    parser.add_argument(
        "--uncompressed", action="store_true", help="leave noise and compressors out"
    )
    arguments = parser.parse_args(words)
    check("--max-new-tokens", value=arguments.max_new_tokens, annotation=Positive)
    check("--temperature", value=arguments.temperature, annotation=NotNegativeFloat)
    check("--top-p", value=arguments.top_p, annotation=Rate | None)
    # Without drawing both would do nothing.
    if not arguments.temperature and (arguments.top_p is not None or arguments.seed is not None):
        raise ConfigError(
            "--top-p, --seed: only with --temperature above 0; else the most probable token is "
            "taken each time"
        )
    if bool(arguments.text) == (arguments.chats is not None):
        raise ConfigError("generate needs either texts to continue or --chats")
    if arguments.chats is not None and (arguments.system is not None or arguments.plain):
        raise ConfigError("--chats has full chats: remove --system and --plain")
    # Arguments are checked before the model is read, which takes a minute.
    generator = TextGenerator(folder=arguments.run, compressed=not arguments.uncompressed)
    prompts = prompts_of(generator, arguments)
    _ = generator.stages  # what is said while they are read stands before the text
    weights = getattr(generator.experiment.model, "weights", None)
    if weights in PACKED:
        say(
            f"model.weights={weights}: each matrix is made dense again for every token; to write "
            f"much, merge first: python -m xcloud export {arguments.run} --merge",
            error=True,
        )
    is_chat = generator.text.learns_chats and not arguments.plain
    for shown, given in prompts:
        # Each prompt begins with the same draws, so their order does not count.
        choice = Choice(
            temperature=arguments.temperature,
            top_p=1.0 if arguments.top_p is None else arguments.top_p,
            seed=arguments.seed or 0,
        )
        say(shown, end="\n" if is_chat else "")
        cached = not arguments.no_cache
        for piece in generator.after(given, arguments.max_new_tokens, choice, cached):
            say(piece, end="")
        say("")


def prompts_of(
    generator: TextGenerator, arguments: argparse.Namespace
) -> list[tuple[str, list[int]]]:
    """Return what is shown of each prompt, and its tokens."""
    text = generator.text
    if arguments.chats is None:
        of = {"system": arguments.system, "plain": arguments.plain}
        return [(prompt, text.prompt(prompt, **of)) for prompt in arguments.text]
    if not text.learns_chats:
        raise ConfigError("--chats needs a model that has learned chats; this one has plain texts")
    if arguments.chats == OWN_CHATS:
        task = cast(LanguageModelling, generator.experiment.task)
        chats = task.test_chats(NUM_OWN_CHATS)
    else:
        chats = read_chats(Path(arguments.chats))
    found = []
    for number, (messages, given) in enumerate(chats, start=1):
        asked = messages
        expected = ""
        # A chat that ends with a question is asked as it is.
        if messages[-1]["role"] == "assistant":
            asked = messages[:-1]
            expected = f"expected   {messages[-1]['content']}\n"
        if not asked:
            raise DataError(f"chat {number} of {arguments.chats}: there is no question in it")
        shown = f"question   {asked[-1]['content']}\n{expected}generated"
        found.append((shown, text.asked(asked, f"chat {number}", given)))
    return found

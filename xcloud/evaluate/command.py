"""`python -m xcloud evaluate RUN`: score a run on other data, and write what came of it."""

from __future__ import annotations

import argparse
import importlib.util
import logging
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import Any

from xcloud.base.errors import ConfigError, DataError, XcloudError
from xcloud.base.run_folder import owned
from xcloud.base.settings import NotNegative, Positive
from xcloud.base.terminal import say
from xcloud.base.units import score_name, score_with_error
from xcloud.base.wording import check, listed, meant, quoted
from xcloud.evaluate.texts import read_texts, score_texts
from xcloud.job.config import EXPERIMENT_FILE
from xcloud.job.given import check_is_run
from xcloud.rank.task_data import cuts_in_words
from xcloud.record.evaluation import EVALUATION, evaluation_metrics
from xcloud.record.summary import SUMMARY_FILE, read_summary, write_summary
from xcloud.tracking.tracker import add_figures
from xcloud.use import TextGenerator, parser_of

RESULTS_DIR = "lm_eval"  # in the run folder, with the harness's own result files
NUM_RESAMPLES = 1000  # for a standard error, as of the run's own scores
UNCOMPRESSED = "_uncompressed"
NOT_WHOLE = {  # by the key in summary.json
    "num_cut": "the question does not fit into {positions} positions: its beginning was left out",
    "num_short": "beside the question, {positions} positions leave fewer tokens for the answer "
    "than the task allows",
}


def evaluate(words: Sequence[str]) -> None:
    """Score a trained causal language model on other texts, or by the tasks of
    lm-evaluation-harness: python -m xcloud evaluate RUN --texts FILE, or
    python -m xcloud evaluate RUN --tasks my_task.yaml lambada_openai

    RUN is a run's output folder, with the parts of all clouds in it. All stages run in this
    process; the message between two clouds goes through the run's defence and compressors, as in
    its own evaluations (--uncompressed leaves them out). FILE is plain text (.txt) or has a row a
    line (.jsonl), as the files of task.data.path; its perplexity is
    that of a run whose test set it is.

    A task is a name that the harness knows or a YAML file of its form; such a file may run Python
    code of its author. A model that has learned chats is asked through its chat template, unless
    --plain. Needs the extra `evaluate`.
    """
    parser = parser_of(evaluate)
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--texts", type=Path, metavar="FILE", help="texts or chats, .txt or .jsonl")
    data.add_argument("--tasks", nargs="+", help="names or YAML files")
    parser.add_argument(
        "--uncompressed", action="store_true", help="leave noise and compressors out"
    )
    of_tasks = parser.add_argument_group("with --tasks")
    of_tasks.add_argument("--include", type=Path, metavar="DIR", help="a folder of further tasks")
    of_tasks.add_argument("--num-fewshot", type=int, help="examples before each question")
    of_tasks.add_argument("--limit", type=int, help="only the first samples of each task")
    of_tasks.add_argument("--plain", action="store_true", help="no chat, whatever was learned")
    of_tasks.add_argument("--no-cache", action="store_true", help="send the whole text each time")
    arguments = parser.parse_args(words)
    if arguments.texts is not None:
        _check_no_task_options(arguments)
    if arguments.num_fewshot is not None:
        check("--num-fewshot", value=arguments.num_fewshot, annotation=NotNegative)
    if arguments.limit is not None:
        check("--limit", value=arguments.limit, annotation=Positive)
    run: Path = arguments.run
    check_is_run(run, EXPERIMENT_FILE)
    # Two evaluations of one run would each write the summary that they have read.
    with owned(run):
        generator = TextGenerator(folder=run, compressed=not arguments.uncompressed)
        if arguments.texts is not None:
            scores, table = _on_texts(generator, file=arguments.texts)
        else:
            scores, table = _on_tasks(generator, arguments=arguments)
        if arguments.uncompressed:
            scores = {f"{name}{UNCOMPRESSED}": of for name, of in scores.items()}
        summary = read_summary(run)
        # Scores of other data stay; the same data scored again is replaced.
        summary[EVALUATION] = {**summary.get(EVALUATION, {}), **scores}
        write_summary(run / SUMMARY_FILE, summary=summary)
        figures = dict(evaluation_metrics({EVALUATION: scores}))
        # The scores are in the run's summary by now, whatever becomes of the tracker.
        if trouble := add_figures(run, tracker=generator.experiment.tracker, figures=figures):
            say(f"MLflow lacks these scores: {trouble}", error=True)
    say(table)
    say(f"between clouds through: {generator.compressor}")
    say(run / SUMMARY_FILE)


def _check_no_task_options(arguments: argparse.Namespace) -> None:
    """Refuse options that mean nothing to plain perplexity."""
    given = {
        "--include": arguments.include is not None,
        "--num-fewshot": arguments.num_fewshot is not None,
        "--limit": arguments.limit is not None,
        "--plain": arguments.plain,
        "--no-cache": arguments.no_cache,
    }
    if wrong := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(f"{listed(wrong)}: only with --tasks; leave out beside --texts")


def _on_texts(generator: TextGenerator, file: Path) -> tuple[dict[str, Any], str]:
    """Return what summary.json has of a file of texts or chats, and the lines to print."""
    data = read_texts(generator, file=file)
    say(f"{file}: {data.describe()}")
    for line in cuts_in_words(data.num_cut):
        say(line)
    found = score_texts(generator, data=data)
    metrics = {
        name: {"value": value, "stderr": found.errors.get(name)}
        for name, value in found.values.items()
    }
    scores = {
        "metrics": metrics,
        "num_samples": data.num_samples("test"),
        "compressor": generator.compressor,
    }
    lines = [
        f"{score_name(name)}  {score_with_error(name, value=value, error=found.errors.get(name))}"
        for name, value in found.values.items()
    ]
    known = read_summary(generator.folder.parent).get(EVALUATION, {})
    scores["file"] = str(file.resolve())
    return {key_of(file.resolve(), known=known): scores}, "\n".join(lines)


def key_of(file: Path, known: Mapping[str, Any]) -> str:
    """Return what the scores of a file are called: folder and file, and more of the path where
    another file is called so already.

    known: earlier scores, by their keys.
    """
    name = file.name.removesuffix(".gz")
    stem, _, ending = name.rpartition(".")
    folders = file.parts[1:-1] or ("",)
    # The shortest name that is free, or is this file's own already. With the ending, as text.txt
    # and text.jsonl may lie side by side.
    keys = [f"{folders[-1]}_{stem}"]
    keys += [f"{'_'.join(folders[-n:])}_{stem}_{ending}" for n in range(1, len(folders) + 1)]
    names = {key.removesuffix(UNCOMPRESSED): of.get("file") for key, of in known.items()}
    return next((key for key in keys if names.get(key) in (None, str(file))), keys[-1])


def _on_tasks(
    generator: TextGenerator, arguments: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    """Return what summary.json has of the harness's tasks, and the harness's own table."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "evaluate --tasks needs the package lm-eval: pip install -c constraints.txt -e "
            '".[evaluate]"; --texts FILE needs nothing more'
        )
    manager, tasks = _tasks(arguments.tasks, include=arguments.include)
    # What is said while they are read stands before the harness's progress.
    _ = generator.stages
    chats = generator.text.learns_chats and not arguments.plain
    results, not_whole = _results(
        generator,
        tasks=tasks,
        manager=manager,
        chats=chats,
        cached=not arguments.no_cache,
        limit=arguments.limit,
        num_fewshot=arguments.num_fewshot,
    )
    from lm_eval.utils import make_table

    scores = scores_of(results, not_whole, compressor=generator.compressor, chats=chats)
    for name, of_task in scores.items():
        for what, said in NOT_WHOLE.items():
            if num := of_task.get(what, 0):
                samples = f"{num} of {of_task['num_samples']} samples"
                say(f"{name}: {samples}: {said.format(positions=generator.longest)}", error=True)
    return scores, str(make_table(results))


def _tasks(names: Sequence[str], include: Path | None) -> tuple[Any, list[Any]]:
    """Return the harness's task manager, and the tasks and groups of these names.

    Raises ConfigError for a name or file that is not there, DataError for a task that cannot be
    loaded.
    """
    from lm_eval.tasks import TaskManager

    if include is not None and not include.is_dir():
        raise ConfigError(f"--include: there is no folder {include}")
    files = [name for name in names if Path(name).is_file()]
    # The harness's own are several thousand files: read where one of them may be meant.
    manager = TaskManager(
        include_path=None if include is None else str(include),
        include_defaults=len(files) < len(names),
    )
    for name in names:
        if name in files or name in manager.task_index:
            continue
        if name.endswith((".yaml", ".yml")):
            raise ConfigError(f"--tasks: there is no file {name}")
        hint = meant(name, known=manager.all_tasks)
        raise ConfigError(f"--tasks: lm-eval has no task {name!r}{hint}")
    chosen = []
    for name in names:
        try:
            found = manager.load([name])
        except Exception as error:  # whatever a task's file or data set may raise
            why = f"{type(error).__name__}: {quoted(str(error))}"
            raise DataError(f"--tasks: {name} cannot be loaded: {why}") from error
        # A group brings its tasks along: taken once more by themselves they would be scored twice.
        inner = {child for children in found.get("group_map", {}).values() for child in children}
        groups = [group for key, group in found.get("groups", {}).items() if key not in inner]
        grouped = {task.task_name for group in groups for task in group.get_all_tasks()}
        chosen += [*groups, *(t for key, t in found["tasks"].items() if key not in grouped)]
    return manager, chosen


def _results(
    generator: TextGenerator,
    tasks: Sequence[Any],
    manager: Any,
    chats: bool,
    cached: bool,
    limit: int | None,
    num_fewshot: int | None,
) -> tuple[dict[str, Any], Mapping[str, Mapping[str, Collection[int]]]]:
    """Return the harness's own results, which are written into the run folder, too, and of which
    samples not all was computed (HarnessModel.not_whole)."""
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker

    from xcloud.evaluate.harness import HarnessModel

    def refuse_unknown_labels(record: logging.LogRecord) -> bool:
        # lm-eval counts such a sample as wrong and only warns: every score would be 0.
        if (text := record.getMessage()).startswith("Label index"):
            raise DataError(
                f"lm-eval finds the expected answer of a sample not among its choices; in the "
                f"task's file doc_to_target must be the answer's place, from 0, or one of "
                f"doc_to_choice. It said: {quoted(text)}"
            )
        return True

    run = generator.folder.parent
    files = run / RESULTS_DIR
    tracker = EvaluationTracker(output_path=str(files / "results.json"))
    # The harness names its files by the time; new ones show that it has written.
    before = set(files.glob("*"))
    model = HarnessModel(generator=generator, chats=chats, cached=cached)
    log = logging.getLogger("lm_eval.api.task")
    log.addFilter(refuse_unknown_labels)
    try:
        results: dict[str, Any] = simple_evaluate(
            model=model,
            model_args={"model": str(run), "compressor": generator.compressor},
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            num_fewshot=num_fewshot,
            apply_chat_template=chats,
            bootstrap_iters=NUM_RESAMPLES,
            log_samples=False,
            evaluation_tracker=tracker,
        )
    except XcloudError:
        raise
    except (ValueError, LookupError, TypeError) as error:  # what a task's file can cause
        why = f"{type(error).__name__}: {quoted(str(error))}"
        raise DataError(f"lm-eval cannot run these tasks: {why}") from error
    finally:
        log.removeFilter(refuse_unknown_labels)
    tracker.save_results_aggregated(results=results)
    if set(files.glob("*")) == before:  # the harness only warns
        raise DataError(f"lm-eval could not write its results into {files}")
    return results, model.not_whole


def scores_of(
    results: Mapping[str, Any],
    not_whole: Mapping[str, Mapping[str, Collection[int]]],
    compressor: str,
    chats: bool,
) -> dict[str, Any]:
    """Return by task and group what summary.json has of the harness's results.

    not_whole: see HarnessModel.
    """
    scores: dict[str, Any] = {}
    for name, found in results["results"].items():
        metrics = {}
        for key, value in found.items():
            # The harness writes "metric,filter", and beside it "metric_stderr,filter" or "N/A".
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            of = metric if chosen == "none" else f"{metric}_{chosen}"
            # A number of numpy is one, too.
            if not isinstance(value, Real):
                say(
                    f"{name}: {of} is no number, so it is in no summary: {value!r:.200}",
                    error=True,
                )
                continue
            stderr = found.get(f"{metric}_stderr,{chosen}")
            is_known = isinstance(stderr, Real)
            metrics[of] = {"value": float(value), "stderr": float(stderr) if is_known else None}
        scores[name] = {
            "metrics": metrics,
            "num_samples": results["n-samples"].get(name, {}).get("effective"),
            "num_fewshot": results["n-shot"].get(name),
            "task_version": results["versions"].get(name),
            "harness": f"lm-eval {version('lm-eval')}",
            "compressor": compressor,
            "chat_template": chats,
        }
        if name in results["n-samples"]:  # no group of tasks
            scores[name] |= {what: len(of.get(name, ())) for what, of in not_whole.items()}
    return scores

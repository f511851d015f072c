"""`python -m xcloud follow`: keep a folder current with a run that trains elsewhere."""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.run_folder import owned
from xcloud.base.terminal import say
from xcloud.base.units import human_bytes, human_seconds
from xcloud.contracts.model import BuildContext
from xcloud.features.weight_patches.feature import URL, name_of
from xcloud.features.weight_patches.follower import FollowedFolder, Follower, News
from xcloud.features.weight_patches.reload import FORMS, server_of
from xcloud.features.weight_patches.store import PatchStore, Protect, opening, plain
from xcloud.job.config import EXPERIMENT_FILE, this_clouds_keys
from xcloud.job.given import check_is_run, read_settings
from xcloud.job.job import PipelineJob
from xcloud.line.mailbox import ObjectStore, pause_after

END_WITHIN_S = 60.0
"""How long another way to the last weights of a run is waited for, once they are refused."""


def follow(words: Sequence[str]) -> None:
    """Keep a folder of transformers current: python -m xcloud follow RUN --as FOLDER

    RUN is the folder of a run with training.patches.every=N, or, in another cloud, a folder with
    its experiment.yaml. FOLDER is what the run's export would be after each N updates, in BF16: a
    checkpoint, or adapters. Its file of weights is replaced as a whole. It ends with the last
    update of the run.
    """
    parser = argparse.ArgumentParser(
        "python -m xcloud follow",
        description=inspect.getdoc(follow),
        formatter_class=argparse.RawDescriptionHelpFormatter,  # lines of usage stay lines
    )
    parser.add_argument("run", type=Path, help="a folder with the experiment.yaml of the run")
    parser.add_argument("--as", type=Path, required=True, dest="folder", help="is kept current")
    parser.add_argument("--from", dest="url", help=f"where the weights are (default: {URL})")
    parser.add_argument("--once", action="store_true", help="end when the folder is current")
    parser.add_argument("--reload", type=server_of, help=f"tell what serves the folder: {FORMS}")
    arguments = parser.parse_args(words)
    check_is_run(arguments.run, EXPERIMENT_FILE)
    job = read_settings(arguments.run / EXPERIMENT_FILE).job
    if not (isinstance(job, PipelineJob) and job.training.patches.every):
        raise ConfigError(
            f"{arguments.run} writes no weights for followers: start it with "
            "training.patches.every=N"
        )
    url: str = arguments.url or job.training.patches.url or str(arguments.run)
    objects = ObjectStore(url, setting="--from" if arguments.url else URL, writes=False)
    store = PatchStore(objects, protect=protection(job))
    follower = Follower(
        store, run=name_of(job), num_stages=job.cluster.num_stages, last_step=job.max_steps
    )
    folder = FollowedFolder(arguments.folder, name_of(job), cast(Any, job.model), job.task)
    context = BuildContext(
        seed=job.seed,
        device=torch.device("cpu"),
        cache_dir=job.cache_path,
        vocabularies={},
        sentences=lambda name: [],
        max_length=job.task.max_length,
        report=lambda line: say(line, error=True),
    )
    # Two followers of one folder would replace each other's weights.
    with owned(arguments.folder, advice="another command writes there; give --as another folder"):
        keep_current(follower, folder, arguments, context, url=url)


def protection(job: PipelineJob) -> Protect:
    reader = job.training.patches.reader
    if reader is None:
        return plain
    keys = this_clouds_keys()
    if keys.own.cloud != reader:
        raise ConfigError(
            f"the weights are sealed to {reader} (training.patches.reader), and the policy of "
            f"this machine has the key of {keys.own.cloud}"
        )
    return opening(keys, job.cluster.stage_cloud)


def keep_current(
    follower: Follower,
    folder: FollowedFolder,
    arguments: argparse.Namespace,
    context: BuildContext,
    url: str,
) -> None:
    """Keep a folder at the newest weights of a run until its last update."""
    num_said = 0
    news_at_s = time.monotonic()
    while True:
        since_s = time.monotonic()
        news = follower.look()
        for problem in follower.problems[num_said:]:
            say(f"xcloud: {problem}; a later snapshot would do", error=True)
        num_said = len(follower.problems)
        if news is not None:
            folder.update(follower, news, context)
            say(_in_words(news, took_s=time.monotonic() - since_s))
            news_at_s = time.monotonic()
            if arguments.reload is not None:
                _reload(arguments, step=news.step, must=news.is_last or arguments.once)
            if news.is_last:
                say("that was the last update of the run")
                return
        # Nothing will come after the last update; a snapshot of it may still be on its way.
        elif follower.has_lost_the_end and time.monotonic() - news_at_s > END_WITHIN_S:
            raise DataError(f"the run's last weights are refused: {follower.problems[-1]}")
        elif arguments.once:
            if follower.is_behind:
                raise DataError(f"{follower.problems[-1]}")
            if not follower.weights:
                raise DataError(f"there are no weights in {url} yet")
            return
        else:
            # The longer nothing came, the longer the pause: buckets charge for each listing.
            time.sleep(pause_after(time.monotonic() - news_at_s))


def _reload(arguments: argparse.Namespace, step: int, must: bool) -> None:
    """Let the server read the folder; say why it has not done so. must: raise DataError then, as
    no later weights will repair it."""
    since_s = time.monotonic()
    try:
        arguments.reload.reload(arguments.folder)
    except DataError as error:
        if must:
            raise DataError(f"the server does not have step {step}: {error}") from error
        say(f"xcloud: the server does not have step {step}: {error}", error=True)
    else:
        say(f"step {step}: the server has it, {human_seconds(time.monotonic() - since_s)}")


def _in_words(news: News, took_s: float) -> str:
    kinds = {"snapshot": news.num_snapshots, "patch": news.num_patches}
    counted = [
        f"{num} {kind}{'' if num == 1 else 'es' if kind == 'patch' else 's'}"
        for kind, num in kinds.items()
        if num
    ]
    size = human_bytes(news.num_bytes)
    return f"step {news.step}: {size} in {' and '.join(counted)}, {human_seconds(took_s)}"

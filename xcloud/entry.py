"""From a command line or a call to a run: compose, plan if asked, run, run what follows.

`run.py`, `xcloud run` and `xcloud.run(...)` all end in `carry_out`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xcloud.base.overrides import for_hydra, groups_of
from xcloud.base.project import conf_dir, run_command
from xcloud.base.terminal import say

# Before hydra looks for plugins: our launcher of sweeps.
sys.path.append(str(Path(__file__).parent / "_hydra"))

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

if TYPE_CHECKING:
    from xcloud.job.config import Settings

RESUME = "resume="
ANEW = "resume_anew=true"
MULTIRUN_FLAGS = ("-m", "--multirun")
COMPLETION_FLAGS = ("-sc", "--shell-completion")
FLAGS_WITH_A_VALUE = (
    "--cfg", "-c", "--package", "-p", "--info", "-i", "--config-path", "-cp",
    "--config-name", "-cn", "--config-dir", "-cd", "--experimental-rerun",
)  # fmt: skip
FOLDER_FLAGS = ("--config-path", "-cp", "--config-dir", "-cd")
composed = False  # whether Hydra has composed a config: until then its errors are the user's


def main(words: Sequence[str]) -> None:
    """Run what a command line asks for, and exit with its code.

    1: failed. 75: stopped, start it again (EX_TEMPFAIL). 130: interrupted.
    """
    # A resume composes nothing: its settings are those of the run's own file.
    if any(word.startswith(RESUME) for word in words):
        with exit_codes():
            resume(words)
        sys.exit()
    # Hydra completes words in a shell and reads them as it likes.
    if not {*COMPLETION_FLAGS}.isdisjoint(words):  # its words are Hydra's, and no settings
        sys.argv[1:] = words
        run_composed()
        return
    flags = [word for word in words if word in MULTIRUN_FLAGS]
    others = [word for word in words if word not in MULTIRUN_FLAGS]
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # it raises what is said better here
    overrides, options = split_words(others)
    try:
        known = for_hydra(overrides, is_group=groups_of(conf_dir(), *own_folders(options)))
        sys.argv[1:] = [*flags, *known, *options]  # argparse knows flags at either end only
        run_composed()
    except (HydraException, OmegaConfBaseException) as error:
        # Until Hydra has composed, an error of its is about the user's words; after that it is
        # ours.
        if composed:
            raise
        from xcloud.job.given import explained

        for line in explained(error, overrides, is_sweep=bool(flags)):
            say(f"xcloud: {line}", error=True)
        sys.exit(1)
    except OSError as error:  # such as a folder that Hydra cannot make
        if composed or not error.filename:
            raise
        say(f"xcloud: {error}", error=True)
        sys.exit(1)
    except KeyboardInterrupt:  # before a run began, or after a sweep's last
        say("xcloud: interrupted; nothing was running", error=True)
        sys.exit(130)


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the settings of a command line, and its flags with their values."""
    overrides: list[str] = []
    options: list[str] = []
    for before, word in pairwise(["", *words]):
        is_option = word.startswith("-") or before in FLAGS_WITH_A_VALUE
        # A flag's value looks like any other word, so the word before it decides.
        (options if is_option else overrides).append(word)
    return overrides, options


def own_folders(options: Sequence[str]) -> list[Path]:
    """Return the folders of options that flags of Hydra name beside conf/."""
    found: list[Path] = []
    # --config-dir=DIR or --config-dir DIR.
    for flag, value in pairwise([*options, ""]):
        name, is_joined, joined = flag.partition("=")
        if name in FOLDER_FLAGS:
            found.append(Path(joined if is_joined else value))
    return found


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn what a run may raise into one line and an exit code (see `main`)."""
    from xcloud.base.errors import XcloudError
    from xcloud.launch.failures import EXIT_START_AGAIN
    from xcloud.launch.processes import RunStopped

    try:
        yield
    except (XcloudError, OSError) as error:
        # An OSError without a file is a fault of the program, of which the traceback tells more.
        if isinstance(error, OSError) and not error.filename:
            raise
        for line in str(error).splitlines():
            say(f"xcloud: {line}", error=True)
        sys.exit(1)
    except RunStopped as stopped:
        say(f"xcloud: {stopped}", error=True)
        sys.exit(EXIT_START_AGAIN)
    except KeyboardInterrupt:
        say("xcloud: interrupted; every rank has ended", error=True)
        sys.exit(130)


@hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")
def run_composed(config: DictConfig) -> float | None:
    """Run the config that Hydra has composed from sys.argv.

    Returns what a sweeper of Hydra reads of a point: its main score, of which less is better.
    """
    global composed
    composed = True
    from xcloud.job.config import Settings

    run_dir = Path(HydraConfig.get().runtime.output_dir)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        from xcloud.features.checkpoints.resume import check_can_go_on
        from xcloud.launch.local import run
        from xcloud.record.summary import main_score

        # check_can_go_on: a point that was interrupted goes on where it was.
        # Hydra's own launcher; ours starts a process for each point (xcloud/study/runner.py).
        summary = run(Settings.of(config), run_dir, resumes=check_can_go_on, more_follows=True)
        return main_score(summary)
    with exit_codes():
        try:
            chosen = with_plan(Settings.of(config), run_dir)
            # None: the plans were to be shown and nothing is run.
            if chosen is not None:
                carry_out(chosen, run_dir)
        finally:
            # Hydra has made the folder. Where the job was refused, nothing stands in it.
            with suppress(OSError):
                run_dir.rmdir()
    return None


def with_plan(settings: Settings, run_dir: Path) -> Settings | None:
    """Return the settings with the best plan put in, if `plan` asks for one; None if the plans
    were only to be shown."""
    # Planning imports the simulator and torch, which most runs do not need here.
    if settings.job.plan is None:
        return settings
    from xcloud.planner.planning import planned

    return planned(settings, run_dir)


def resume(words: Sequence[str]) -> None:
    """Resume a run, and the one that follows it. words: resume=FOLDER and changed settings."""
    from xcloud.base.errors import ConfigError
    from xcloud.features.checkpoints.resume import check_can_go_on
    from xcloud.job.given import resumed

    asked = [word for word in words if word.startswith(RESUME)]
    # What is left are changed settings.
    overrides = [word for word in words if word not in (*asked, ANEW)]
    if len(asked) > 1 or any(word.startswith("-") for word in overrides):
        raise ConfigError(f"to resume a run: {run_command()} resume=FOLDER [key=value ...]")
    run_dir = Path(asked[0].removeprefix(RESUME)).expanduser()
    settings, has_more = resumed(run_dir, overrides, conf_dir=conf_dir())
    carry_out(
        settings, run_dir, resumes=partial(check_can_go_on, anew=ANEW in words), has_more=has_more
    )


def carry_out(
    settings: Settings, run_dir: Path, resumes: Any = None, has_more: bool = True
) -> None:
    """Run what the settings describe, or the rest of it, and the run that follows it.

    resumes: the same object as for `launch.local.run`.
    has_more: true if the first run has steps left.
    """
    from xcloud.base.errors import ConfigError
    from xcloud.launch.local import run

    # Composed before the first run starts, so that a mistake in it does not cost that run.
    following = None
    if settings.plain.get("follow_up"):
        from xcloud.job.given import compose_follow_up

        # resumes is None for an experiment that was composed here, which may follow up as it
        # likes.
        following = compose_follow_up(
            settings, conf_dir=conf_dir(), run_dir=run_dir, own=resumes is None
        )
    if has_more:
        run(settings, run_dir, resumes=resumes, more_follows=following is not None)
    # Finished, and nothing follows: only more steps would give it something to do.
    elif following is None:
        raise ConfigError(
            f"the run in {run_dir} has finished; to train it longer give training.max_steps=N"
        )
    if following is not None:
        run(following, run_dir / "follow_up", resumes=resumes)

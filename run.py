"""Compose the config, check it, run the experiment: python run.py +exp=abnet_iwslt
Go on with one that was interrupted: python run.py resume=outputs/DATE/TIME [training.max_steps=N]
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

# Before hydra looks for plugins: our launcher of sweeps.
sys.path.append(str(Path(__file__).parent / "xcloud" / "_hydra"))

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

CONF = Path(__file__).parent / "conf"
RESUME, ANEW = "resume=", "resume_anew=true"
composed = False


@contextmanager
def exit_codes() -> Iterator[None]:
    """1: failed, 75: start me again (EX_TEMPFAIL), 130: interrupted."""
    from xcloud.base.errors import XcloudError
    from xcloud.launch.failures import EXIT_START_AGAIN
    from xcloud.launch.processes import RunStopped

    try:
        yield
    except (XcloudError, OSError) as error:
        if isinstance(error, OSError) and not error.filename:
            raise
        print(f"xcloud: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except RunStopped as stopped:
        print(f"xcloud: {stopped}", file=sys.stderr, flush=True)
        sys.exit(EXIT_START_AGAIN)
    except KeyboardInterrupt:
        print("xcloud: interrupted; every rank has ended", file=sys.stderr, flush=True)
        sys.exit(130)


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(config: DictConfig) -> None:
    global composed
    composed = True
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        from xcloud.launch.local import run
        from xcloud.survive.resume import check_can_go_on

        # Hydra's own launcher; ours starts a process for each point (xcloud/sweep/runner.py).
        run(config, run_dir, resumes=check_can_go_on, more_follows=True)
        return
    with exit_codes():
        chosen: DictConfig | None = config
        if not str(config.plan._target_).endswith(".nothing"):
            from xcloud.planner.planning import planned

            chosen = planned(config, run_dir)
        if chosen is not None:  # else it was only to be shown
            carry_out(chosen, run_dir)


def carry_out(
    config: DictConfig, run_dir: Path, resumes: Any = None, has_more: bool = True
) -> None:
    """A run, or the rest of one, and the run that follows it. resumes: see launch.local.run."""
    from xcloud.base.errors import ConfigError
    from xcloud.launch.local import run

    following = None
    if config.get("follow_up"):
        from xcloud.job.given import compose_follow_up

        following = compose_follow_up(config, CONF, run_dir, own=resumes is None)
    if has_more:
        run(config, run_dir, resumes, more_follows=following is not None)
    elif following is None:
        raise ConfigError(
            f"the run in {run_dir} has finished; to train it longer give training.max_steps=N"
        )
    if following is not None:
        run(following, run_dir / "follow_up", resumes)


def go_on(words: list[str]) -> None:
    """The rest of a run, and of the one that follows it."""
    with exit_codes():
        from xcloud.base.errors import ConfigError
        from xcloud.job.given import resumed
        from xcloud.survive.resume import check_can_go_on

        asked = [word for word in words if word.startswith(RESUME)]
        overrides = [word for word in words if word not in (*asked, ANEW)]
        if len(asked) > 1 or any(word.startswith("-") for word in overrides):
            raise ConfigError("to go on with a run: python run.py resume=FOLDER [key=value ...]")
        run_dir = Path(asked[0].removeprefix(RESUME))
        config, has_more = resumed(run_dir, overrides, CONF)
        carry_out(config, run_dir, partial(check_can_go_on, anew=ANEW in words), has_more)


if __name__ == "__main__":
    for flag in {"-m", "--multirun"} & {*sys.argv}:  # argparse knows it at either end only
        sys.argv.remove(flag)
        sys.argv.insert(1, flag)
    if any(word.startswith(RESUME) for word in sys.argv[1:]):
        go_on(sys.argv[1:])
        sys.exit()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # it raises what is said better here
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        if composed:
            raise
        from xcloud.job.given import explained

        for line in explained(error, [w for w in sys.argv[1:] if not w.startswith("-")], CONF):
            print(f"xcloud: {line}", file=sys.stderr, flush=True)
        sys.exit(1)
    except OSError as error:  # such as a folder that Hydra cannot make
        if composed or not error.filename:
            raise
        print(f"xcloud: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:  # before a run began, or after a sweep's last
        print("xcloud: interrupted; nothing was running", file=sys.stderr, flush=True)
        sys.exit(130)

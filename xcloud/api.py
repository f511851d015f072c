"""The functions of xcloud for a script or a notebook; `xcloud/__init__.py` names those that
`import xcloud` offers.

    import xcloud

    result = xcloud.run("abnet_iwslt", "compression=int8", "training.max_steps=200")
    print(result.scores["bleu"], result.step_s, result.bytes_per_step)

    for point in xcloud.sweep("abnet_iwslt", "compression=none,int8", "seed=1,2"):
        print(point.folder, point.scores, point.compression_ratio)

Settings are the words of the command line, each a string. What a setting means and which values it
takes is in its class; a wrong one raises ConfigError, which names the key and what is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xcloud.base.errors import ConfigError as ConfigError
from xcloud.base.errors import RunFailed as RunFailed
from xcloud.base.errors import XcloudError as XcloudError
from xcloud.base.project import MODEL_DIR, conf_dir
from xcloud.comm.compression import CompressionPlan
from xcloud.entry import carry_out, with_plan
from xcloud.job.config import Settings
from xcloud.job.given import Composer, check_is_run, composed, grid, option
from xcloud.record.summary import SUMMARY_FILE, read_summary

if TYPE_CHECKING:
    from torch import nn

    from xcloud.features.replicas.gradient_averaging import CompressedAveraging


@dataclass(frozen=True)
class Result:
    """The results of a run that has ended.

    folder: its run folder, with the curves, the timeline, the model and the logs of its ranks.
    summary: all its metrics, as `summary.json` has them (docs/commands.md lists the files).
    """

    folder: Path
    summary: Mapping[str, Any]

    @property
    def status(self) -> str:
        """ "finished", or how the run ended otherwise."""
        return str(self.summary["status"])

    @property
    def scores(self) -> dict[str, float]:
        """The scores of the test split, measured through the compressed link: {"bleu": 41.9}."""
        return dict(self.summary.get("quality") or {})

    @property
    def step_s(self) -> float | None:
        """The median time of a step in seconds, waiting included; None if no step was timed."""
        step_s: float | None = self.summary["step_time_s"]["median"]
        return step_s

    @property
    def bytes_per_step(self) -> int:
        """Bytes that crossed between clouds in a step, in both directions, headers included."""
        return sum(num or 0 for num in self.summary["wan_bytes_per_step"].values())

    @property
    def compression_ratio(self) -> float | None:
        """FP32 bytes of what crossed, divided by the bytes that crossed; both are counted. None if
        nothing crossed."""
        ratio: float | None = self.summary["compression_ratio"]["total"]
        return ratio

    @property
    def model_dir(self) -> Path:
        """The folder of the trained parts."""
        return self.folder / MODEL_DIR


def run(experiment: str, *settings: str, folder: str | Path | None = None) -> Result:
    """Run an experiment and return its result, as `python run.py +exp=EXPERIMENT SETTINGS` does.

    experiment: a file of `conf/exp`, such as "abnet_iwslt".
    settings: "key=value" or "group=option", as on the command line.
    folder: the run folder, which must not hold a run; a new one below `outputs/` by default.

    Progress and the closing table are printed. Raises ConfigError before anything starts if the
    settings cannot run, and RunFailed, naming the first cause, if the run fails. Ctrl+C saves the
    step under way and raises KeyboardInterrupt.
    """
    # Composed in this process, as by a command line; nothing has started yet.
    asked = Settings.of(composed([f"+exp={experiment}", *settings], conf_dir()))
    # Microseconds: two runs may begin in one second.
    run_dir = Path(folder) if folder else Path("outputs", f"{datetime.now():%Y-%m-%d/%H-%M-%S-%f}")
    chosen = with_plan(asked, run_dir)
    if chosen is None:
        raise ConfigError("plan=show starts no run; give plan=best, or leave it out")
    carry_out(chosen, run_dir)
    return load(run_dir)


def load(folder: str | Path) -> Result:
    """Return the result of a run that has ended. Raises ConfigError if the folder holds none."""
    run_dir = Path(folder)
    check_is_run(run_dir, SUMMARY_FILE)
    return Result(folder=run_dir, summary=read_summary(run_dir))


def sweep(
    experiment: str,
    *settings: str,
    name: str | None = None,
    also: Mapping[str, Any] | None = None,
    parallel: int = 1,
) -> list[Result]:
    """Run every combination of the given values and return the results of the finished points.

    settings: settings as for `run`; "compression=none,int8" and "seed=1,2" together are four
        points.
    name: the sweep's folder below `multirun/` and its tag in MLflow. A sweep of the same name is
        continued: finished points are kept.
    also: other settings with which to run every point again, such as {"compression": "none"}.
    parallel: the number of points that run at once. Above 1 they disturb each other's step times.

    The closing table and the pictures are in `multirun/NAME`. Raises ConfigError if a point cannot
    run (nothing is started then) and RunFailed if one has failed; the others have run.
    """
    from xcloud.study.points import read_points, with_also
    from xcloud.study.runner import (
        FINISHED,
        INTERRUPTED,
        REFUSED,
        LauncherSettings,
        Processes,
        Sweep,
        check_name,
    )

    check_name(name)
    chosen = LauncherSettings(parallel=parallel, also=also)
    folder = Path("multirun", name or f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}").absolute()
    points = with_also(grid([f"+exp={experiment}", *settings]), also=also or {})
    # The call itself is what to type to go on with a sweep that was interrupted.
    words = [json.dumps(word, ensure_ascii=False) for word in (experiment, *settings)]
    words.append(f'name="{folder.name}"')
    if also is not None:
        words.append(f"also={dict(also)!r}")
    if parallel > 1:
        # Only what differs from the defaults.
        words.append(f"parallel={parallel}")
    one = Sweep(
        name=folder.name,
        folder=folder,
        settings=chosen,
        processes=Processes(parallel),
        again=f"xcloud.sweep({', '.join(words)})",
    )
    # run() says itself what is wrong; here its code becomes an exception.
    code = one.run(points, Composer.of(conf_dir()))
    if code == REFUSED:
        raise ConfigError("the sweep is refused; the reasons stand above")
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code != FINISHED:
        raise RunFailed(f"points failed: {', '.join(one.causes.values())}; see {folder}")
    return [load(folder / point) for point in read_points(folder)]


def compressions() -> list[str]:
    """Return the names of all compressions that ship: "fp16", "int4", "powersgd", …"""
    return sorted(path.stem for path in (conf_dir() / "compression").glob("*.yaml"))


def compression(name: str) -> CompressionPlan:
    """Return the compression of that name: what acts on activations, on their gradients and on
    what replicas average. Raises ConfigError if there is none."""
    plan = option("compression", name, conf_dir=conf_dir())
    assert isinstance(plan, CompressionPlan)
    return plan


def compress_ddp(model: nn.Module, name: str, *, feedback: bool = True) -> CompressedAveraging:
    """Compress the gradients that a DistributedDataParallel averages, in any training script.

    model: the DistributedDataParallel, over any backend with all_gather.
    name: one of `compressions()`; its compressor of averages acts.
    feedback: add the error of a message to the next one, where the compressor needs or allows it.

    Returns the state of the hook: `num_bytes` and `raw_bytes` count, `state_dict()` belongs into
    the checkpoint of every rank.

    Let go of the model (`del model`) before `dist.destroy_process_group()`: torch may wait for
    ever in the destructor of a model that outlives its group, with this hook or without.
    """
    from torch.nn.parallel import DistributedDataParallel

    from xcloud.features.replicas.gradient_averaging import (
        CompressedAveraging,
        compressed_averaging,
    )

    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"compress_ddp takes a DistributedDataParallel, got {type(model)}")
    chosen = compression(name).averaged.averaging_choice
    state = CompressedAveraging(model, compressor=chosen, feedback=feedback)
    model.register_comm_hook(state, compressed_averaging)
    return state

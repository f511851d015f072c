"""Experiment: the one frozen object that describes a run, and its file.

Hydra and OmegaConf end here: workers, tests and notebooks see only the object.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from xcloud.checks import check_int
from xcloud.cluster.layout import ClusterLayout
from xcloud.cluster.link_profile import LinkProfile
from xcloud.comm.border import Border
from xcloud.comm.per_border import PerBorder
from xcloud.comm.phases import Compression, Phased
from xcloud.errors import ConfigError, DataError
from xcloud.job.job import Job
from xcloud.models.split import SplitModel
from xcloud.parallel.schedule import Schedule
from xcloud.project import project_root
from xcloud.record.summary import RunStatistics
from xcloud.record.tracking import Tracker
from xcloud.report.progress import ProgressLine
from xcloud.security.defences import LABEL
from xcloud.security.observer import LeakMeter
from xcloud.security.visibility import Visibility
from xcloud.tasks.task import Task
from xcloud.training.batch_plan import BatchPlan, PinnedBatchPlan
from xcloud.training.settings import Training

EXPERIMENT_FILE = "experiment.yaml"


@dataclass(frozen=True)
class Experiment:
    """What runs where, how it trains and what is written down. Raises ConfigError for settings
    that do not fit together.

    profile: which size of data and model was asked for (demo, files, paper); it only names them.
    sweep: a name that runs share which belong together.
    label: what tells this run from others of its sweep, seeds apart; the launcher gives it.
    """

    name: str
    task: Task
    model: SplitModel
    cluster: ClusterLayout
    schedule: Schedule
    compression: Compression | Phased | PerBorder
    training: Training
    tracker: Tracker
    security: Visibility = field(default_factory=Visibility)
    seed: int = 1
    profile: str = "demo"
    sweep: str | None = None
    label: str | None = None
    cache_dir: str = ".cache"

    def __post_init__(self) -> None:
        check_int("seed", self.seed, 0)
        micro_batches = self.schedule.num_micro_batches
        fewest = self.cluster.min_micro_batches()
        if micro_batches < fewest:
            raise ConfigError(
                f"schedule.num_micro_batches is {micro_batches}, but a stage of this cluster has "
                f"{fewest} ranks, and each needs a micro-batch; set it to at least {fewest}"
            )
        pieces = micro_batches * self.training.accumulate_steps
        if self.training.batch_size < pieces:
            raise ConfigError(
                f"training.batch_size is {self.training.batch_size}, too few for "
                f"{micro_batches} micro-batches (schedule.num_micro_batches) times "
                f"{self.training.accumulate_steps} passes (training.accumulate_steps)"
            )
        layout = self.cluster
        if isinstance(self.compression, PerBorder):
            for border in self.compression.borders:
                if border >= layout.num_stages - 1:
                    raise ConfigError(
                        f"compression.border_{border}: there is no such border; this cluster has "
                        f"{layout.num_stages} stages, so borders 0 to {layout.num_stages - 2}"
                    )
        stages = range(layout.num_stages)
        fields = {stage: self.model.fields(stage, layout.num_stages) for stage in stages}
        stage_cloud = {stage: layout.stage_cloud(stage) for stage in stages}
        self.security.check(tuple(layout.clouds), fields, stage_cloud)
        if self.security.weights:
            parts = {stage: self.model.parts(stage, layout.num_stages) for stage in stages}
            self.security.check_weights(tuple(layout.clouds), parts, stage_cloud)
        self._check_defences(fields[layout.num_stages - 1])

    def _check_defences(self, last_reads: frozenset[str]) -> None:
        """A defence that reads labels must act in ranks that load them."""
        defences, layout = self.security.defences, self.cluster
        defences.check(last_reads)
        for stage in range(layout.num_stages - 1):
            acting = defences.at(stage, layout.stage_cloud, layout.num_stages - 1).get("backward")
            if acting is None or not acting.needs_labels:
                continue
            for rank in layout.ranks_of(stage + 1):
                if LABEL not in self.fields_of(rank):
                    raise ConfigError(
                        f"security.defences.backward: {acting.label} needs labels in rank {rank} "
                        f"of cloud {layout.placement(rank).cloud!r}, which sends gradients away "
                        f"but reads none; let its ranks hold the last stage too "
                        "(one_stage_per_rank: false)"
                    )

    @property
    def compression_in_force(self) -> str:
        """The compression's label; "off" where no border leaves a cloud, for there it acts."""
        if not self.cluster.crosses_clouds:
            return "off"
        return "none" if self.compression.is_identity else self.compression.label

    @property
    def defences_in_force(self) -> str:
        """The defences' label; "off" where no border is one that they act on, "none" if none."""
        defences = self.security.defences
        if not defences.label:
            return "none"
        last = self.cluster.num_stages - 1
        acts = any(defences.at(stage, self.cluster.stage_cloud, last) for stage in range(last))
        return defences.label if acts else "off"

    @property
    def leak_meter(self) -> LeakMeter | None:
        """Off in one cloud: nothing is seen by another."""
        return self.security.meter if self.cluster.crosses_clouds else None

    @property
    def run_name(self) -> str:
        """Tells runs apart: "abnet_iwslt two_clouds int8+int8 s1", in a sweep "int8+int8 s1"."""
        plain = f"{self.name} {self.cluster.name} {self.compression_in_force}"
        return f"{self.label or plain} s{self.seed}"

    @property
    def headline(self) -> str:
        """What this run is, in one line."""
        compression = self.compression_in_force
        if compression == "off" and not self.compression.is_identity:
            compression = (
                f"off (no border between clouds, so {self.compression.label} does not act)"
            )
        line = (
            f"{self.name} [{self.profile}]: {self.task.describe()}; {self.model.describe()}; "
            f"{self.cluster.describe()}; compression: {compression}"
        )
        if defences := self.security.defences.label:
            line += f"; defences: {defences}"
            if self.defences_in_force == "off":
                line += " (off: nothing they protect leaves its cloud)"
        if self.security.meter is not None and not self.cluster.crosses_clouds:
            line += "; leak meter: off (one cloud)"
        return line

    @property
    def follow_up(self) -> tuple[str, ...]:
        return ()

    def leaves(self, run_dir: Path) -> Mapping[str, str]:
        return {}

    def next_command(self, run_dir: Path) -> str | None:
        return None

    @property
    def facts(self) -> dict[str, str]:
        """For the pictures of a run."""
        return {
            "schedule": self.schedule.label,
            "link": self.cluster.describe_link(),
            "compression": self.compression_in_force,
        }

    @property
    def essential_ranks(self) -> frozenset[int]:
        """The run fails with any of these: here no rank can be spared."""
        return frozenset(range(self.cluster.num_ranks))

    def refused_with(self, ranks: frozenset[int]) -> frozenset[int]:
        return frozenset()  # no rank can be spared

    def check(self) -> None:
        """Raise DataError if data or a checkpoint are missing, ConfigError for a cut that the
        model cannot have."""
        asked, given = getattr(self.task, "answers", None), getattr(self.model, "output", None)
        if asked and given and asked != given:
            raise ConfigError(
                f"{self.task.describe()} needs model.output={asked}, and it is {given}"
            )
        self.task.check()
        _ = self.borders

    @property
    def _bandwidth_bits_per_s(self) -> float | None:
        """Of the emulated link; None where there is none."""
        wan = self.cluster.wan
        emulated = self.cluster.crosses_clouds and isinstance(wan, LinkProfile)
        return wan.bandwidth_bits_per_s if emulated else None  # type: ignore[union-attr]

    def new_statistics(self) -> RunStatistics:
        return RunStatistics(self.cluster.num_ranks, self._bandwidth_bits_per_s)

    def new_progress(self) -> ProgressLine:
        return ProgressLine(self.training.max_steps, self._bandwidth_bits_per_s)

    @property
    def borders(self) -> dict[int, Border]:
        """What crosses from each stage to the next."""
        return {
            stage: self.model.border(stage, self.cluster.num_stages, self.task.max_length)
            for stage in range(self.cluster.num_stages - 1)
        }

    @property
    def max_micro_batch(self) -> int:
        """Samples of the largest micro-batch, in training or evaluation."""
        pieces = self.schedule.num_micro_batches * self.training.accumulate_steps
        return max(-(-self.training.batch_size // pieces), self.training.eval_batch_size)

    def batch_plan(self, num_samples: int) -> BatchPlan:
        """The batches of training. A sample keeps its lanes where a memory is kept for it: both
        ends of a channel must meet it again."""
        layout, size = self.cluster, self.training.batch_size
        periods = [
            layout.lane_period(stage)
            for stage in range(layout.num_stages - 1)
            if layout.stage_cloud(stage) != layout.stage_cloud(stage + 1)
            and self.compression.at_border(stage).has_memory
        ]
        period, num_micro_batches = math.lcm(*periods), self.schedule.num_micro_batches
        if period == 1:
            return BatchPlan(num_samples, size, self.seed)
        lanes = [i % period for i in range(num_micro_batches)] * self.training.accumulate_steps
        return PinnedBatchPlan(num_samples, size, self.seed, lanes)

    def fields_of_cloud(self, cloud: str) -> frozenset[str]:
        """Batch fields that any rank of the cloud reads."""
        stages = self.cluster.clouds[cloud].stages or ()
        return frozenset[str]().union(
            *(self.model.fields(stage, self.cluster.num_stages) for stage in stages)
        )

    def fields_of(self, rank: int) -> frozenset[str]:
        """Batch fields that this rank reads, and so loads."""
        stages = self.cluster.placement(rank).stages
        return frozenset().union(
            *(self.model.fields(stage, self.cluster.num_stages) for stage in stages)
        )


def from_config(config: DictConfig) -> Experiment:
    """The Experiment that a composed config describes. Raises ConfigError naming the key."""
    return _pipelined(job_from_config(config), "this config")


def job_from_config(config: DictConfig) -> Job:
    """The job of any kind that a composed config describes. Raises ConfigError naming the key."""
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    try:
        OmegaConf.resolve(plain)
    except OmegaConfBaseException as error:
        raise ConfigError(_lines(error)[0]) from error
    missing = sorted(OmegaConf.missing_keys(plain))
    if missing:
        text = f"these settings have no value yet: {', '.join(missing)}; give them as key=value"
        if "name" in missing:  # nothing was chosen
            there = sorted(path.stem for path in (project_root() / "conf" / "exp").glob("*.yaml"))
            text += f", or choose an experiment: +exp= one of {', '.join(there)}"
        raise ConfigError(text)
    check_keys(OmegaConf.to_container(plain), "")
    try:
        return cast(Job, instantiate(plain, _convert_="all"))
    except InstantiationException as error:
        cause = error.__cause__ or error
        where = next((line[10:] for line in _lines(error) if line.startswith("full_key: ")), "")
        if isinstance(cause, ConfigError | DataError):
            named = not where or str(cause).startswith((f"{where}.", f"{where} "))
            raise type(cause)(str(cause) if named else f"{cause} (in {where})") from error
        raise ConfigError(f"{where or 'config'}: {_lines(cause)[0]}") from error


def check_keys(node: Any, path: str) -> None:
    """Refuse keys that the constructor they are meant for does not know.

    Hydra lets `+typo=1` through, and with an unknown keyword it names no alternative.
    """
    if isinstance(node, list):
        for index, entry in enumerate(node):
            check_keys(entry, f"{path}[{index}]")
    if not isinstance(node, Mapping):
        return
    if "_target_" in node:
        try:
            target = get_object(str(node["_target_"]))
        except Exception as error:
            raise ConfigError(f"{path or 'config'}._target_: {_lines(error)[0]}") from error
        parameters = inspect.signature(target).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for key in node:
            if key in parameters or open_ended or str(key).startswith("_"):
                continue
            near = difflib.get_close_matches(str(key), list(parameters), 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            where = f"{path}.{key}" if path else str(key)
            raise ConfigError(
                f"unknown setting {where!r}{hint} Allowed here: {', '.join(parameters)}"
            )
        for name, parameter in parameters.items():
            needed = parameter.default is parameter.empty and parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            )
            if needed and name not in node:
                raise ConfigError(f"setting {f'{path}.{name}' if path else name!r} is missing")
    for key, entry in node.items():
        check_keys(entry, f"{path}.{key}" if path else str(key))


def write(config: DictConfig, path: Path) -> None:
    """The resolved experiment file: everything a worker on another machine needs."""
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    OmegaConf.save(plain, path, resolve=True)


def read_config(path: Path) -> DictConfig:
    """Raises ConfigError if the file is missing or no experiment file."""
    if not path.is_file():
        raise ConfigError(f"there is no experiment file {path}")
    loaded = OmegaConf.load(path)
    if not isinstance(loaded, DictConfig) or "_target_" not in loaded:
        raise ConfigError(f"{path} is not an experiment file: it has no _target_")
    return loaded


def read(path: Path) -> Experiment:
    return _pipelined(read_job(path), str(path))


def read_job(path: Path) -> Job:
    return job_from_config(read_config(path))


def _pipelined(job: Job, where: str) -> Experiment:
    if not isinstance(job, Experiment):
        raise ConfigError(
            f"{where} describes a {type(job).__name__}; an Experiment, a model cut into stages, "
            "is wanted here"
        )
    return job


def plain_settings(config: DictConfig) -> dict[str, Any]:
    """The experiment as plain containers, resolved, without what belongs to Hydra."""
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    return cast(dict[str, Any], OmegaConf.to_container(plain, resolve=True))


def flatten(config: DictConfig) -> dict[str, object]:
    """Settings as dotted names, for a tracker; targets become the last part of their path."""
    flat: dict[str, object] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, Mapping):
            for key, entry in node.items():
                if key == "_target_":
                    flat[path or "experiment"] = str(entry).rsplit(".", 1)[-1]
                else:
                    walk(entry, f"{path}.{key}" if path else str(key))
        else:
            flat[path] = node

    walk(plain_settings(config), "")
    return flat


def _lines(error: BaseException) -> list[str]:
    return str(error).strip().splitlines() or [type(error).__name__]

"""From a composed config to a job, and the file that describes one.

Hydra and OmegaConf end here: workers, tests and notebooks see only the job.
"""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.project import project_root
from xcloud.base.wording import unknown_key
from xcloud.job.job import Job
from xcloud.security.policy import POLICY_FILE, Policy

EXPERIMENT_FILE = "experiment.yaml"
NOT_RUN = ("hydra", "plan")  # of a composed config what no run needs, and no file of one holds


MAX_BYTES = 128_000  # the largest experiment of conf/ has 7,000
MAX_VALUES = 4_000  # keys included; it has 500. OmegaConf takes 0.1 ms for each
MAX_LENGTH = 10_000  # characters of one value
MAX_DEPTH = 32  # it has 7


def job_from_config(config: DictConfig) -> Job:
    """The job of any kind that a composed config describes. Raises ConfigError naming the key."""
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    try:
        OmegaConf.resolve(plain)
    except InterpolationKeyError as error:
        raise ConfigError(_does_not_fit(plain, error)) from error
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
        return Job.of(instantiate(plain, _convert_="all"))
    except InstantiationException as error:
        cause = error.__cause__ or error
        where = next((line[10:] for line in _lines(error) if line.startswith("full_key: ")), "")
        if isinstance(cause, ConfigError | DataError):
            named = not where or str(cause).startswith((f"{where}.", f"{where} "))
            raise type(cause)(str(cause) if named else f"{cause} (in {where})") from error
        raise ConfigError(f"{where or 'config'}: {_lines(cause)[0]}") from error


def _does_not_fit(config: DictConfig, error: InterpolationKeyError) -> str:
    """For a setting that follows from one of another group, where the chosen option lacks it."""
    (message,) = _lines(error)
    source = message.split("'")[1] if "'" in message else ""
    raw = OmegaConf.to_container(config)
    taking = [key for key, value in dotted(raw, "") if f"${{{source}}}" in str(value)]
    group = source.split(".")[0]
    if not taking or group == source:
        return message
    chosen = str(OmegaConf.select(config, f"{group}._target_")).rsplit(".", 1)[-1]
    taker = taking[0].split(".")[0]
    return (
        f"{taking[0]} follows from {source}, which the chosen {group} ({chosen}) does not have: "
        f"this {taker} and this {group} do not fit together; choose another of the two"
    )


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
            raise ConfigError(unknown_key(path, str(key), list(parameters)))
        for name, parameter in parameters.items():
            needed = parameter.default is parameter.empty and parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            )
            if needed and name not in node:
                raise ConfigError(f"setting {f'{path}.{name}' if path else name!r} is missing")
    for key, entry in node.items():
        check_keys(entry, f"{path}.{key}" if path else str(key))


def read_plain(path: Path) -> Any:
    """A YAML file as plain containers. Raises ConfigError."""
    return OmegaConf.to_container(read_data(path))


def write(config: DictConfig, path: Path) -> None:
    """The resolved experiment file: everything a worker on another machine needs."""
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key not in NOT_RUN])
    OmegaConf.save(plain, path, resolve=True)


def read_config(path: Path) -> DictConfig:
    """As data: nothing in it is imported or resolved. Raises ConfigError if it is missing or no
    experiment file. Whoever builds it says whose it is: job_from_config, read_job, shared_job."""
    loaded = read_data(path)
    if not isinstance(loaded, DictConfig) or "_target_" not in loaded:
        raise ConfigError(f"{path} is not an experiment file: it has no _target_")
    return loaded


def this_clouds_policy() -> Policy:
    """Of the file that XCLOUD_POLICY names, else of policy.yaml in the project's folder; the
    defaults where there is none. Raises ConfigError."""
    named = os.environ.get("XCLOUD_POLICY")
    path = Path(named or project_root() / POLICY_FILE)
    return Policy.of(read_plain(path), path) if named or os.path.lexists(path) else Policy()


def read_job(path: Path) -> Job:
    """The job of a run folder's file, which may come from elsewhere: it names xcloud's
    constructors and those that this cloud's policy allows, or ConfigError says which else."""
    return job_from_config(read_checked(path))


def read_checked(path: Path) -> DictConfig:
    """As read_config, within the bounds of this cloud's policy on what is built."""
    config = read_config(path)
    this_clouds_policy().check_build(plain_settings(config, without=()))
    return config


def shared_job(config: DictConfig, run_dir: Path) -> Job:
    """The job of a file that several clouds share, within the bounds of this cloud's policy: also
    what is read, written, contacted and held. Raises ConfigError before anything is imported."""
    policy = this_clouds_policy()
    policy.check(plain_settings(config, without=()), run_dir)
    job = job_from_config(config)
    policy.check_held(job.cluster.clouds, job.held_by)
    return job


def plain_settings(config: DictConfig, without: Sequence[str] = NOT_RUN) -> dict[str, Any]:
    """The experiment as plain containers, resolved, without what is no part of a run."""
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key not in without])
    return cast(dict[str, Any], OmegaConf.to_container(plain, resolve=True))


def flatten(config: DictConfig) -> dict[str, object]:
    """Settings as dotted names, for a tracker; targets become the last part of their path."""
    flat: dict[str, object] = {}
    for path, value in dotted(plain_settings(config), ""):
        where, _, key = path.rpartition(".")
        if key == "_target_":
            flat[where or "experiment"] = str(value).rsplit(".", 1)[-1]
        else:
            flat[path] = value
    return flat


def dotted(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Dotted names of what is no mapping (a list is one value), with their values."""
    if isinstance(node, Mapping):
        for key, entry in node.items():
            yield from dotted(entry, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def _lines(error: BaseException) -> list[str]:
    return str(error).strip().splitlines() or [type(error).__name__]


def read_data(path: Path) -> Any:
    """Mappings, lists, strings and numbers of a YAML file that may come from elsewhere.

    No anchors and aliases (292 bytes can stand for a million values), no tags, no interpolation
    (which reads environment variables of this machine), and bounds that large experiments keep by
    far. Raises ConfigError naming the file and, where a value is the reason, its line.
    """
    if not path.is_file():  # a pipe might never end
        raise ConfigError(f"there is no file {path}")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path} is longer than {MAX_BYTES} bytes")
        text = data.decode()
        _check_data(text, path)
        return OmegaConf.load(io.StringIO(text))
    except ConfigError:
        raise
    except (OSError, yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None


def _check_data(text: str, path: Path) -> None:
    depth = num_values = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        num_values += isinstance(event, yaml.NodeEvent)
        value = event.value if isinstance(event, yaml.ScalarEvent) else ""
        for is_there, what in (
            (getattr(event, "anchor", None), "an anchor or alias (& or *)"),
            (getattr(event, "tag", None), "a tag (!)"),
            ("${" in value, "an interpolation (${...}; run.py --resolve writes without)"),
            (depth > MAX_DEPTH, f"more than {MAX_DEPTH} values in each other"),
            (num_values > MAX_VALUES, f"more than {MAX_VALUES} keys and values"),
            (len(value) > MAX_LENGTH, f"more than {MAX_LENGTH} characters in a value"),
        ):
            if is_there:
                line = event.start_mark.line + 1
                raise ConfigError(f"{path}, line {line}: {what} is not read; plain values are")

"""From a composed config to a job, and the file that describes one.

Hydra and OmegaConf end here: workers, tests and notebooks see only the job.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.project import project_root, this_owners_file
from xcloud.base.wording import NO_REFERENCE, does_not_fit, unknown_key
from xcloud.job.job import Job
from xcloud.line.keys import LineKeys, read_line_keys
from xcloud.record.files import replace_text
from xcloud.security.policy import POLICY_FILE, Policy, plain_text

EXPERIMENT_FILE = "experiment.yaml"
NOT_RUN = ("hydra", "plan")  # of a composed config what no run needs, and no file of one holds


def job_from_config(config: DictConfig, policy: Policy | None = None) -> Job:
    """Build the job that a config describes. Raises ConfigError naming the key.

    policy: of this cloud, where the settings come from elsewhere. It checks the very containers
        that are built, all of them, before anything that they name is imported.
    """
    plain = resolved(config)
    if policy is not None:
        policy.check_build(plain)
    check_keys(plain, "")
    try:
        return Job.of(instantiate(plain, _convert_="all"))
    except InstantiationException as error:
        cause = error.__cause__ or error
        where = next((line[10:] for line in _lines(error) if line.startswith("full_key: ")), "")
        if isinstance(cause, ConfigError | DataError):
            named = not where or str(cause).startswith((f"{where}.", f"{where} "))
            raise type(cause)(str(cause) if named else f"{cause} (in {where})") from error
        raise ConfigError(f"{where or 'config'}: {_lines(cause)[0]}") from error


def resolved(config: DictConfig) -> dict[str, Any]:
    """Return all that a job is built of as plain containers.

    Raises ConfigError for a setting without a value.
    """
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    try:
        OmegaConf.resolve(plain)
    except InterpolationKeyError as error:
        raw = OmegaConf.to_container(plain)
        raise ConfigError(does_not_fit(_lines(error)[0], dict(dotted(raw, "")))) from error
    except OmegaConfBaseException as error:
        raise ConfigError(_lines(error)[0]) from error
    settings = cast(dict[str, Any], OmegaConf.to_container(plain))
    for key, value in dotted(settings, ""):
        if "${" in str(value):  # it would be taken for one wherever the file is read
            raise ConfigError(f"{key} is {value!r}, but {NO_REFERENCE}")
    missing = sorted(OmegaConf.missing_keys(plain))
    if missing:
        text = f"these settings have no value yet: {', '.join(missing)}; give them as key=value"
        if "name" in missing:  # nothing was chosen
            there = sorted(path.stem for path in (project_root() / "conf" / "exp").glob("*.yaml"))
            text += f", or choose an experiment: +exp= one of {', '.join(there)}"
        raise ConfigError(text)
    return settings


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
            target = resolve_name(str(node["_target_"]))
        except Exception as error:
            raise ConfigError(
                f"{path or 'config'}._target_: there is no {node['_target_']}, or it cannot be "
                f"imported: {type(error).__name__}: {_lines(error)[0]}"
            ) from error
        parameters = inspect.signature(target).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for key in () if open_ended else node:
            if key not in parameters and not str(key).startswith("_"):
                raise ConfigError(unknown_key(path, str(key), known=list(parameters)))
        for name, parameter in parameters.items():
            is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if is_named and parameter.default is parameter.empty and name not in node:
                raise ConfigError(f"setting {f'{path}.{name}' if path else name!r} is missing")
    for key, entry in node.items():
        check_keys(entry, f"{path}.{key}" if path else str(key))


def _kept(config: DictConfig, without: Sequence[str] = NOT_RUN) -> DictConfig:
    """Return a copy of a config without the groups of `without`, and without the command of the
    user's, which no file, tracker or other rank is to have."""
    kept: DictConfig = OmegaConf.masked_copy(config, [str(k) for k in config if k not in without])
    if OmegaConf.select(kept, "launch.on_event") is not None:
        kept.launch = {**kept.launch, "on_event": None}
    return kept


def write(config: DictConfig, path: Path) -> None:
    """Write the resolved experiment file: everything a worker on another machine needs."""
    plain = _kept(config)
    replace_text(path, OmegaConf.to_yaml(plain, resolve=True))


def load(path: Path) -> DictConfig:
    """Read an experiment file that this machine's own `write` has just made."""
    return cast(DictConfig, OmegaConf.load(path))


def read_plain(path: Path, approve: Callable[[bytes, Path], None] | None = None) -> Any:
    """Read a YAML file that may come from elsewhere as plain containers (policy.plain_text).

    Raises ConfigError.
    """
    text = plain_text(path, approve)
    try:
        return OmegaConf.to_container(OmegaConf.create(text))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None


def this_clouds_policy() -> Policy:
    """Return the policy of this cloud; the defaults without a file.

    It stands in the file that XCLOUD_POLICY names, else in policy.yaml of the checkout or, where
    there is none, of ~/.config/xcloud. Raises ConfigError.
    """
    path = policy_file()
    is_there = os.environ.get("XCLOUD_POLICY") or os.path.lexists(path)
    return Policy.of(read_plain(path), path) if is_there else Policy()


def this_clouds_keys() -> LineKeys:
    """Return the key of this cloud and the certificates of its peers (`peers` of its policy).

    Raises ConfigError.
    """
    policy = this_clouds_policy()
    return read_line_keys(policy.me, policy.peers, policy_file=policy_file())


def policy_file() -> Path:
    """Return where the policy of this cloud stands, or would stand."""
    named = os.environ.get("XCLOUD_POLICY")
    return Path(named) if named else this_owners_file(POLICY_FILE)


def plain_settings(config: DictConfig, without: Sequence[str] = NOT_RUN) -> dict[str, Any]:
    """Return the experiment as plain containers, resolved, without what is not part of a run."""
    return cast(dict[str, Any], OmegaConf.to_container(_kept(config, without), resolve=True))


def flatten(config: DictConfig) -> dict[str, object]:
    """Return settings by dotted name, for a tracker; of targets the last part of their path."""
    flat: dict[str, object] = {}
    for path, value in dotted(plain_settings(config), ""):
        where, _, key = path.rpartition(".")
        if key == "_target_":
            flat[where or "experiment"] = str(value).rsplit(".", 1)[-1]
        else:
            flat[path] = value
    return flat


def dotted(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield what is no mapping (a list is one value), by dotted name."""
    if isinstance(node, Mapping):
        for key, entry in node.items():
            yield from dotted(entry, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def _lines(error: BaseException) -> list[str]:
    return str(error).strip().splitlines() or [type(error).__name__]

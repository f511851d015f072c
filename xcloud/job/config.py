"""`Settings`: what a run is to do, made once from a composed config or a file and passed on.

OmegaConf ends here: workers, tests and notebooks see only the job.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from xcloud.base.earlier import rename
from xcloud.base.errors import ConfigError, DataError
from xcloud.base.project import POLICY_FILE, project_root, this_owners_file
from xcloud.base.settings import DROPPED, with_defaults
from xcloud.base.walk import walk
from xcloud.base.wording import NO_REFERENCE, does_not_fit, unknown_key
from xcloud.base.yaml_text import from_yaml, to_yaml
from xcloud.job.compared import compared_settings
from xcloud.job.job import Job
from xcloud.line.keys import LineKeys, read_line_keys
from xcloud.record.files import replace_text
from xcloud.security.policy import Policy, plain_text

EXPERIMENT_FILE = "experiment.yaml"


@dataclass(frozen=True)
class Settings:
    """The settings of one run: the job that they describe, and the same as plain data.

    job: the job object, from which the tools around a run read.
    plain: every setting with its effective value, defaults of classes included. It also holds what
        no file of a run contains: a plan that is asked for, the user's command on an event.
    """

    job: Job
    plain: Mapping[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any] | DictConfig, policy: Policy | None = None) -> Settings:
        """Resolve a config, check its keys, fill in defaults and build its job.

        policy: this cloud's policy, given where the settings come from elsewhere. It checks the
            very containers that are built, all of them, before anything that they name is
            imported.
        Raises ConfigError that names the key.
        """
        plain = looked_up(config)
        if policy is not None:
            # Before all else: from here on what the file names is looked up, and by that imported.
            policy.check_build(plain)
        # Earlier keys go first, as the checks below would refuse them.
        drop_keys(plain)
        check_keys(plain)
        check_values(plain)
        # A file of this cloud may leave the class of a group to its key; one from elsewhere says
        # all classes, so that the policy has seen them.
        plain = fill_in(plain, by_position=policy is None)
        check_keys(plain)  # of groups that change a default
        return cls(Job.of(build(plain)), plain)

    @classmethod
    def load(cls, file: Path) -> Settings:
        """Read an experiment file that this machine's own `write` has just made."""
        return cls.of(from_yaml(file.read_text(encoding="utf-8")))

    def changed(self, changes: Mapping[str, Any]) -> Settings:
        """Return other settings, with these values by dotted name."""
        plain = copy.deepcopy(dict(self.plain))
        for key, value in changes.items():
            # Lists have no dotted names inside: they are replaced as a whole.
            node = plain
            *path, name = key.split(".")
            for part in path:
                node = node[part]
            node[name] = value
        return type(self).of(plain)

    @cached_property
    def kept(self) -> dict[str, Any]:
        """The settings that a file, the tracker and other ranks are given: without the plan that
        was asked for and without the user's command on an event."""
        # The plan has done its work when a run begins, and a command is a user's own.
        kept = {key: value for key, value in self.plain.items() if key != "plan"}
        if kept.get("launch"):
            kept["launch"] = {**kept["launch"], "on_event": None}
        return kept

    @cached_property
    def flat(self) -> dict[str, object]:
        """The kept settings by dotted name, for the tracker and to compare runs."""
        return flatten(self.kept)

    @cached_property
    def compared(self) -> dict[str, str]:
        """Return the settings that must be equal in all ranks, as JSON texts by dotted name."""
        return compared_settings(self.kept)

    def write(self, file: Path) -> None:
        """Write the experiment file: everything that a worker on another machine needs."""
        replace_text(file, text=to_yaml(self.kept))


def fill_in(settings: Any, by_position: bool = False) -> Any:
    """Return settings with the defaults of what their constructors leave out.

    by_position: a group without a `_target_` is of the class that its key takes, if that is one.
    """
    filled = copy.deepcopy(settings)
    # walk() comes to what was filled in here, too: defaults may be groups of their own.
    for node in walk(filled):
        if isinstance(node.value, dict) and "_target_" in node.value:
            made = _named(str(node.value["_target_"]))
            full = with_defaults(made, given=node.value, by_position=by_position)
            # The same dict stays where it hangs, so nodes that hold it see the defaults.
            node.value.clear()  # in place, and in the order of the constructor
            node.value.update(full)
    return filled


_named: Callable[[str], Any] = cache(resolve_name)


def build(node: Any, path: str = "") -> Any:
    """Build what plain settings describe: a mapping with `_target_` is one call, inner ones first.

    Raises ConfigError or DataError that names the key.
    """
    if isinstance(node, list):
        return [build(entry, path=f"{path}[{index}]") for index, entry in enumerate(node)]
    if not isinstance(node, Mapping):
        return node
    built = {
        key: build(entry, path=f"{path}.{key}" if path else str(key))
        # Inner ones first: a constructor gets objects, never plain data.
        for key, entry in node.items()
        if key != "_target_"
    }
    if "_target_" not in node:
        return built
    try:
        return _named(str(node["_target_"]))(**built)
    except (ConfigError, DataError) as error:
        # An error that names the key already, or one below it, is complete.
        named = not path or str(error).startswith((f"{path}.", f"{path} "))
        raise type(error)(str(error) if named else f"{error} (in {path})") from error
    # A constructor may raise anything; the first line says what, the rest is its traceback's
    # matter.
    except Exception as error:
        raise ConfigError(f"{path or 'config'}: {_lines(error)[0]}") from error


def resolved(config: Mapping[str, Any] | DictConfig) -> dict[str, Any]:
    """Return all that a job is built of as plain containers.

    Raises ConfigError for a setting without a value.
    """
    settings = looked_up(config)
    check_values(settings)
    return settings


def looked_up(config: Mapping[str, Any] | DictConfig) -> dict[str, Any]:
    """Return plain containers with every reference looked up, "???" where there is no value.

    Raises ConfigError for a reference to what is not there.
    """
    if not isinstance(config, DictConfig):
        given = {str(key): value for key, value in config.items() if key != "hydra"}
        settings = copy.deepcopy(given)  # names in it are replaced
    else:
        settings = {}
        try:
            for key in map(str, config):
                if key != "hydra":
                    value = "???" if OmegaConf.is_missing(config, key) else config[key]
                    if OmegaConf.is_config(value):
                        value = OmegaConf.to_container(value, resolve=True)
                    settings[key] = value
        except InterpolationKeyError as error:
            # To name the nearest keys the references stay as they were written.
            raw = OmegaConf.to_container(config)
            raise ConfigError(
                does_not_fit(_lines(error)[0], settings=dict(dotted(raw)))
            ) from error
        except OmegaConfBaseException as error:
            raise ConfigError(_lines(error)[0]) from error
    # Behind the references, which may still be written by their old names.
    rename(settings)
    # What was looked up holds no reference of its own: a value with one would be looked up where
    # the file is read next.
    for key, value in dotted(settings):
        if "${" in str(value):  # it would be taken for one wherever the file is read
            raise ConfigError(f"{key} is {value!r}, but {NO_REFERENCE}")
    return settings


def drop_keys(settings: Any) -> None:
    """Take keys that are no more out of settings of earlier releases. Raises ConfigError where
    such a key asks for what is no more."""
    for node in walk(settings):
        given = node.value
        if not isinstance(given, dict) or "_target_" not in given:
            continue
        with contextlib.suppress(Exception):  # check_keys refuses what cannot be had
            _named(str(given["_target_"]))  # its class says which keys
        for key, only in DROPPED.get(str(given["_target_"]), {}).items():
            asked = given.pop(key, only)
            if isinstance(asked, Mapping):
                names = [*only] if isinstance(only, Mapping) else ["_target_"]
                asked = {name: asked.get(name) for name in names}
            # None was written as a group of its own.
            if asked not in (only, {"_target_": "xcloud.base.settings.nothing"}):
                raise ConfigError(
                    f"{node.path}.{key} is no setting any more: it is {only!r} always. Take it "
                    "out, or run this experiment with the release that it was written for"
                )


def check_values(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that have no value yet."""
    if "???" not in str(settings):  # mostly not, and to ask takes longer
        return
    if missing := OmegaConf.missing_keys(OmegaConf.create(dict(settings))):
        text = f"these settings have no value yet: {', '.join(sorted(missing))}"
        text += "; give them as key=value"
        if "name" in missing:  # nothing was chosen
            there = sorted(path.stem for path in (project_root() / "conf" / "exp").glob("*.yaml"))
            text += f", or choose an experiment: +exp= one of {', '.join(there)}"
        raise ConfigError(text)


def check_keys(settings: Any, path: str = "") -> None:
    """Refuse keys that the constructor they are meant for does not know, and settings that it
    lacks.

    path: the dotted key of the settings in the config.
    Raises ConfigError with a line for each.
    """
    unknown: dict[str, tuple[str, str, list[str]]] = {}  # key: where, name, those that there are
    lacking: list[str] = []
    for node in walk(settings, path):
        if node.path in unknown:
            # What lies below an unknown key belongs to nobody, and one line for it is enough.
            node.is_closed = True
        elif isinstance(node.value, Mapping):
            here = f"{node.path}." if node.path else ""
            wrong, known, lacks = _wrong_keys(node.value, node.path)
            unknown |= {f"{here}{name}": (node.path, name, known) for name in wrong}
            lacking += [f"setting {f'{here}{name}'!r} is missing" for name in lacks]
    if unknown:
        lines = []
        for key, (where, name, known) in unknown.items():
            # Only for whole settings is there another place to look.
            like = _elsewhere(settings, key) if not path else ""
            lines.append(unknown_key(where, name, known, elsewhere=like))
        raise ConfigError("\n".join(lines))
    if lacking:
        raise ConfigError("\n".join(lacking))


def _wrong_keys(given: Mapping[str, Any], path: str) -> tuple[list[str], list[str], list[str]]:
    """Return the names in a mapping that are unknown, those that there are, and those that its
    constructor lacks."""
    lacking: list[str] = []
    if "_target_" in given:
        try:
            parameters = _parameters(str(given["_target_"]))
        except Exception as error:
            raise ConfigError(
                f"{path or 'config'}._target_: there is no {given['_target_']}, or it cannot be "
                f"imported: {type(error).__name__}: {_lines(error)[0]}"
            ) from error
        for name, parameter in parameters.items():
            is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if is_named and parameter.default is parameter.empty and name not in given:
                lacking.append(name)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            wrong = [str(key) for key in given if key not in parameters and key != "_target_"]
            return wrong, [*parameters], lacking
    # A mapping without a constructor: entries that a user names, such as clouds or hooks. If some
    # are constructor calls, one that is not is misspelled.
    groups = {str(key): "_target_" in e for key, e in given.items() if isinstance(e, Mapping)}
    known = [name for name, is_whole in groups.items() if is_whole]
    if not known:
        return [], [], lacking
    # A user names the entries; one is misspelled.
    return [name for name in groups if name not in known], known, lacking


@cache
def _parameters(target: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(_named(target)).parameters


def _elsewhere(settings: Mapping[str, Any], key: str) -> str:
    """Return the setting with nearly the last name of `key` that is most like it, if any."""
    # The defaults count, too: a key that nobody has written may be the one that was meant.
    names = [name for name, _ in dotted(fill_in(settings)) if name != key]
    last = {name: name.rpartition(".")[2] for name in names}
    # 0.85 lets one letter in seven differ: a key far away must be spelled nearly right to be
    # proposed.
    near = difflib.get_close_matches(key.rpartition(".")[2], {*last.values()}, 1, 0.85)
    found = [name for name in last if last[name] in near]
    return (difflib.get_close_matches(key, found, 1, 0.0) or [""])[0]


def read_plain(path: Path, approve: Callable[[bytes, Path], None] | None = None) -> Any:
    """Read a YAML file that may come from elsewhere as plain containers (policy.plain_text).

    Raises ConfigError.
    """
    # The text is read once, by whoever approves it, and parsed from these bytes.
    text = plain_text(path, approve)
    try:
        return from_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        # `from None`: the parser's own error shows lines of a file that is somebody else's.
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None


def this_clouds_policy() -> Policy:
    """Return the policy of this cloud; the defaults without a file.

    It stands in the file that XCLOUD_POLICY names, else in policy.yaml of the checkout or, where
    there is none, of ~/.config/xcloud. Raises ConfigError.
    """
    path = policy_file()
    # A link that leads nowhere is a policy that is missing, and must not count as none.
    is_there = os.environ.get("XCLOUD_POLICY") or os.path.lexists(path)
    return Policy.of(read_plain(path), path) if is_there else Policy()


def this_clouds_keys() -> LineKeys:
    """Return the key of this cloud and the certificates of its peers (`peers` of its policy).

    Raises ConfigError.
    """
    policy = this_clouds_policy()
    return read_line_keys(policy.me, peers=policy.peers, policy_file=policy_file())


def policy_file() -> Path:
    """Return where the policy of this cloud stands, or would stand."""
    named = os.environ.get("XCLOUD_POLICY")
    return Path(named) if named else this_owners_file(POLICY_FILE)


def flatten(plain: Mapping[str, Any]) -> dict[str, object]:
    """Return settings by dotted name; of targets the last part of their path."""
    flat: dict[str, object] = {}
    for path, value in dotted(plain):
        where, _, key = path.rpartition(".")
        if key == "_target_":
            # The class of a group is what tells two runs apart, and its module is not.
            flat[where or "experiment"] = str(value).rsplit(".", 1)[-1]
        else:
            flat[path] = value
    return flat


def dotted(settings: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is no mapping (a list is one value), by dotted name."""
    for node in walk(settings):
        if not isinstance(node.value, Mapping):
            node.is_closed = True
            yield node.path, node.value


def _lines(error: BaseException) -> list[str]:
    return str(error).strip().splitlines() or [type(error).__name__]

"""Read what a user gives: experiment files, command lines, changes to a run's file.

Files may come from elsewhere and are held against this cloud's policy. Of a command line that does
not compose it says what was meant. An experiment may continue from what another one leaves. Only
this module of the package composes.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.overrides import (
    as_override,
    for_hydra,
    groups_of,
    parsed,
    read,
    sets_value,
    unreadable,
)
from xcloud.base.run_folder import check_is_folder
from xcloud.base.walk import walk
from xcloud.base.wording import meant
from xcloud.contracts.one_way import OneWayModel
from xcloud.job.config import (
    EXPERIMENT_FILE,
    Settings,
    build,
    flatten,
    looked_up,
    policy_file,
    read_plain,
    resolved,
    this_clouds_policy,
)
from xcloud.job.job import PipelineJob
from xcloud.record.files import EVENTS_FILE
from xcloud.record.summary import read_summary
from xcloud.security.policy import Policy, Refusal


def read_config(
    path: Path, approve: Callable[[bytes, Path], None] | None = None
) -> dict[str, Any]:
    """Read an experiment file as data: nothing in it is imported, resolved or built.

    Only the functions below may build what it says. Raises ConfigError if it is missing or no
    experiment file.
    """
    loaded = read_plain(path, approve)
    if not isinstance(loaded, dict) or "_target_" not in loaded:
        raise ConfigError(f"{path} is not an experiment file: it has no _target_")
    return loaded


def settings_of(path: Path) -> dict[str, object]:
    """Read the settings of an experiment file, by dotted name, to compare or to show them."""
    return flatten(read_config(path))


def read_settings(path: Path, approve: Callable[[bytes, Path], None] | None = None) -> Settings:
    """Read a run folder's file, which may come from elsewhere, and build its job.

    approve: a function that is given the very bytes that are read.
    It may name xcloud's constructors and those that this cloud's policy allows. Raises ConfigError
    for any other.
    """
    return Settings.of(read_config(path, approve=approve), this_clouds_policy())


def read_shared(path: Path, run_dir: Path) -> Settings:
    """Read a file that several clouds share, if this cloud has approved it, and build its job.

    The bounds of this cloud's policy hold for what is read, written, contacted and held, too.
    Raises ConfigError with all that is refused.
    """
    policy = this_clouds_policy()
    # The bytes that are compared with the approved digest are those that are parsed: between two
    # readings the file could change.
    config = read_config(path, approve=partial(policy.check_approved, policy_file=policy_file()))
    settings, refusals = _refusals(config, policy, run_dir)
    policy.refuse(refusals)
    assert settings is not None
    return settings


class ToApprove(NamedTuple):
    """A shared file for a person who decides whether it may run in this cloud.

    plain: the content of the file.
    settings: the same content with its job, which is built only where the policy allows all that
        building it could call, read or fetch.
    digest: the SHA-256 of the very bytes that were read.
    refusal: the reason for which this cloud's policy would not let the file run, apart from
        `approved`; None if it would.
    """

    plain: Mapping[str, Any]
    settings: Settings | None
    digest: str
    refusal: ConfigError | None


def read_to_approve(path: Path) -> ToApprove:
    """Read a shared file for a person, and all that this cloud's policy refuses of it.

    Raises ConfigError for what is no experiment file.
    """
    found: list[str] = []
    config = read_config(
        path, approve=lambda data, _: found.append(hashlib.sha256(data).hexdigest())
    )
    policy = this_clouds_policy()
    settings, refusals = _refusals(config, policy, run_dir=path.absolute().parent)
    refusal = None
    # Here a refusal is to be shown beside all else, not to end it.
    try:
        policy.refuse(refusals)
    except ConfigError as error:
        refusal = error
    return ToApprove(resolved(config), settings, digest=found[0], refusal=refusal)


def _refusals(
    config: Mapping[str, Any], policy: Policy, run_dir: Path
) -> tuple[Settings | None, list[Refusal]]:
    """Return a file's settings with its job, if this cloud may build it, and all that the policy
    refuses.

    Where the file would read what it may not, a job that reads nothing there is asked what else is
    refused, so that it comes in the same round.
    """
    plain = resolved(config)
    found = policy.refused(plain, run_dir)
    # Building contacts nobody and writes nothing, so with only these refused the job can be built,
    # to be asked what else is.
    if all(one.key in ("addresses", "write", "clouds", "require") for one in found):
        try:
            settings = Settings.of(config, policy)
        except (ConfigError, DataError):
            # A refused address, say, may be the cause of the error.
            if not found:
                raise
            return None, found  # what is refused comes first: its lines say what to allow
        return settings, [*found, *_refused_job(settings, policy)]
    other, replaced = policy.without_refused_places(plain, run_dir)
    # Building calls constructors, so the policy looks at this second config as at any other.
    try:
        policy.check_build(other)
        found += _refused_job(Settings.of(other, policy), policy, instead=replaced)
    except (ConfigError, DataError):  # what was refused is needed: the rest has to come later
        pass
    return None, found


def _refused_job(
    settings: Settings, policy: Policy, instead: Mapping[str, Any] = {}
) -> list[Refusal]:
    """instead: the values of settings whose places were replaced, by dotted name."""
    job = settings.job
    refusals = [*policy.refused_job(job, job.cluster.clouds, job.held_by, instead)]
    if job.plan is not None:
        refusals.append(
            Refusal(
                "plan= needs all clouds on one machine, and this file is run by several: take "
                "plan= out of it, and choose what run.py proposes with plan=show"
            )
        )
    return refusals


@contextlib.contextmanager
def _composing(conf_dir: Path) -> Iterator[None]:
    """Let `compose` take groups and options from conf_dir; a Hydra in use rests meanwhile."""
    # Hydra has one instance in a process; run.py may be inside of it.
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir.absolute()), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().clear()
        if outer is not None:
            GlobalHydra.instance().hydra = outer


def with_overrides(path: Path, overrides: Sequence[str], conf_dir: Path) -> DictConfig:
    """Return an experiment file with settings changed as on a command line.

    overrides: settings as key=value, or as group=option like the files in conf_dir.
    Raises ConfigError.
    """
    if wrong := unreadable(overrides):
        raise ConfigError("\n".join(wrong))
    for word in overrides:
        # Hydra's own settings are about composing, which a run that resumes does not do.
        if word.startswith("~") or re.match(r"\+*hydra[./]", word):
            raise ConfigError(f"{word}: give settings of the run as key=value to resume it")
    config = OmegaConf.create(read_config(path))
    # Before anything is composed into it: the file may come from elsewhere.
    this_clouds_policy().check_build(resolved(config))
    is_group = groups_of(conf_dir)
    try:
        for found in parsed(for_hydra(overrides, is_group)):
            # A value is set in the file as it is. An option of a group is composed alone, then put
            # in its place.
            if found.is_delete() or sets_value(found, is_group):
                set_values(config, words=[found])
            else:
                key = found.key_or_group.replace("/", ".")
                chosen = composed([str(found.input_line)], conf_dir)
                # Resolved by itself: references of an option would else look into a config that
                # has none of its defaults.
                value = OmegaConf.to_container(OmegaConf.select(chosen, key), resolve=True)
                # merge=False: the option before leaves nothing behind.
                OmegaConf.update(config, key, value, merge=False)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(in_one_line(error)) from error
    return config


def set_values(config: DictConfig, words: Sequence[Override]) -> None:
    """Set or delete what words say in a composed config, as Hydra does. Raises as Hydra."""
    ConfigLoaderImpl._apply_overrides_to_config(list(words), config)


def resumed(run_dir: Path, overrides: Sequence[str], conf_dir: Path) -> tuple[Settings, bool]:
    """Return the settings with which a run resumes, and whether anything is left to do.

    overrides: the settings that differ from the run's own config.
    Raises ConfigError.
    """
    check_is_run(run_dir, f"{EVENTS_FILE}*", "events.*.jsonl*")
    file = run_dir / EXPERIMENT_FILE
    settings = Settings.of(with_overrides(file, overrides, conf_dir))
    # A run that was finished has something left to do only if it got more steps.
    if read_summary(run_dir).get("status") == "finished":
        return settings, settings.job.max_steps > read_settings(file).job.max_steps
    return settings, True


def composed(words: Sequence[str], conf_dir: Path) -> DictConfig:
    """Compose a config from the words of a command line.

    Raises ConfigError with one line for each word that is wrong.
    """
    try:
        with _composing(conf_dir):
            return compose("config", overrides=for_hydra(words, is_group=groups_of(conf_dir)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError("\n".join(explained(error, overrides=words))) from error


class Composer:
    """Composes the points of a sweep. Points that choose the same options of groups share what
    Hydra composes of these; then the values of each are set, as Hydra does.

    load: a function that composes what words choose. Raises as Hydra.
    """

    def __init__(
        self, load: Callable[[Sequence[str]], DictConfig], is_group: Callable[[str], bool]
    ) -> None:
        self._load = load
        self._is_group = cache(is_group)
        self._shared: dict[tuple[str, ...], SharedChoices] = {}

    @classmethod
    def of(cls, conf_dir: Path) -> Composer:
        """Return the composer of what stands in conf_dir."""
        return cls(lambda words: composed(words, conf_dir), is_group=groups_of(conf_dir))

    def __call__(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the settings of a point as plain data, "???" where there is no value.

        Raises ConfigError with one line for each word that is wrong.
        """
        choices: list[str] = []
        values: list[Override] = []
        for word in for_hydra(words, is_group=self._is_group):
            found = read(word)
            if found is None:
                raise ConfigError("\n".join(unreadable(words)))
            # A deleted group is a choice, too: what Hydra composes then is without it.
            of_group = self._is_group(found.key_or_group) and found.is_delete()
            if of_group or not (found.is_delete() or sets_value(found, is_group=self._is_group)):
                choices.append(word)
            else:
                values.append(found)
        try:
            # Hydra takes up to 0.2 s for a config, and the points of a sweep share few choices.
            if tuple(choices) not in self._shared:
                self._shared[tuple(choices)] = SharedChoices(self._load(choices))
            return self._shared[tuple(choices)].with_values(values)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError("\n".join(explained(error, overrides=words))) from error


class SharedChoices:
    """The configs of the options that points choose, composed once by Hydra. A value that no other
    setting refers to is set in plain data, which takes a hundredth of the time."""

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self._plain = looked_up(config)
        # Settings that are referred to decide others, so Hydra has to set them.
        raw = str(OmegaConf.to_container(config))
        inside = re.findall(r"\$\{([^${}]*)\}", raw)
        self._referred = {f"{name}." for text in inside for name in re.findall(r"[\w.]+", text)}

    def with_values(self, words: Sequence[Override]) -> dict[str, Any]:
        """Return plain settings with these values. Raises as Hydra."""
        settings = copy.deepcopy(self._plain)
        if all(self._is_set(settings, word) for word in words):
            # All of them in plain data, or all by Hydra: words may overwrite each other, and their
            # order counts.
            return settings
        config = self._config.copy()
        set_values(config, words)
        return looked_up(config)

    def _is_set(self, settings: dict[str, Any], word: Override) -> bool:
        """Set a plain value; return False for what Hydra is to set."""
        key = word.key_or_group
        value = word.value()
        is_plain = value is None or isinstance(value, bool | int | float | str)
        # What may become a reference, and escapes, mean what Hydra says.
        if word.is_delete() or not is_plain or "${" in str(value) or "\\" in str(value):
            return False
        # A name that begins with a point is relative, so it may mean this key.
        below = f"{key}."
        if any(n.startswith((below, ".")) or below.startswith(n) for n in self._referred):
            return False
        *path, last = key.split(".")
        node: Any = settings
        for part in path:
            if not isinstance(node.get(part), dict):
                return False
            node = node[part]
        # A plain value in place of a group deletes what stands in it.
        if isinstance(node.get(last), dict | list):
            return False
        node[last] = value
        return True


def grid(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the words of every point of a sweep: "seed=1,2" stands for "seed=1" and "seed=2"."""
    if wrong := unreadable(words, is_sweep=True):
        raise ConfigError("\n".join(wrong))
    choices = []
    for override in parsed(words):
        if override.is_sweep_override():
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([str(override.input_line)])
    return list(product(*choices))


def option(group: str, name: str, conf_dir: Path) -> Any:
    """Build what an option of a group in conf_dir describes. Raises ConfigError if unknown."""
    config = composed([f"{group}={name}"], conf_dir)
    return build(resolved(OmegaConf.select(config, group)))


def explained(error: Exception, overrides: Sequence[str], is_sweep: bool = False) -> list[str]:
    """Say why a command line does not compose, a line for each word that cannot be read."""
    return unreadable(overrides, is_sweep) or [in_one_line(error)]


def in_one_line(error: Exception) -> str:
    """Return Hydra's words; where a group lacks an option, the nearest one and all there are."""
    # The line that says where a default list went wrong comes second.
    lines = str(error).strip().splitlines()[: 1 + ("your default list" in str(error))]
    lines += str(error.__cause__ or "").strip().splitlines()[:1]
    message = " ".join(dict.fromkeys(lines))
    # Hydra names the group and the two options, not what to do.
    if twice := re.match(r"Multiple values for ([^.]+)\.", message):
        return f"{twice[1]} is chosen already; to choose another write {twice[1]}=OPTION"
    # Options stand one a line behind a tab, up to the providers of Hydra's plugins.
    _, found, below = str(error).partition("Available options in ")
    options = [line.strip() for line in below.splitlines()[1:] if line.startswith("\t")]
    options = [option for option in options if not option.startswith("_")]  # parts of others
    options = list(takewhile(lambda option: "provider=" not in option, options))
    if not found or not options:
        return message
    # 'group/option' is the last text in quotes.
    wrong = message.split("'")[-2]  # group/option
    near = meant(wrong.rpartition("/")[2], known=options)
    return f"there is no {wrong}{near} There are: {', '.join(options)}"


def compose_follow_up(
    settings: Settings, conf_dir: Path, run_dir: Path, own: bool = True
) -> Settings | None:
    """Compose what `follow_up` of this experiment asks for; None if it asks for nothing.

    It runs after the first one, has its seed, tracker and cache, and reads what its run will have
    left in run_dir, but for settings that its overrides name. Raises ConfigError, before anything
    runs, if it cannot be composed or what it reads beside that is missing.

    own: the settings were composed here. Else its overrides may choose from conf_dir and set
        values, and what they compose is checked as by read_settings.
    """
    if not settings.plain.get("follow_up"):
        return None
    # An experiment that was composed here is the user's own, what a file asks to follow is not.
    policy = None if own else this_clouds_policy()
    # A one-way job: no other has a follow_up.
    experiment: Any = settings.job
    model: OneWayModel = experiment.model
    follow_up: Sequence[str] = experiment.follow_up
    try:
        leaves = model.leaves(run_dir)
        # What the first run leaves goes in front, so that follow_up may overrule it.
        first = {"seed": experiment.seed, "cache_dir": experiment.cache_dir, **leaves}
        given = [as_override(f"++{key}", text=value) for key, value in first.items()]
        with _composing(conf_dir):  # what follow_up names itself comes later, and counts
            if wrong := unreadable(follow_up):
                raise ConfigError(wrong[0])
            named = parsed(follow_up)
            if policy is not None:
                # Before anything is composed, as composing reads files that words name.
                _check_words(named, is_group=groups_of(conf_dir))
            words = for_hydra([*given, *follow_up], is_group=groups_of(conf_dir))
            config = compose("config", overrides=words)
        # A tracker may have keys that the composed one has not.
        OmegaConf.set_struct(config, False)
        # The same tracker, unless follow_up chooses one: both runs are shown together.
        if not any(word.key_or_group.split(".")[0] == "tracker" for word in named):
            config.tracker = settings.plain["tracker"]
        if policy is not None:
            # Behind composing and before resolving: here every reference can be seen, and none has
            # been looked up.
            _check_interpolations(config, conf_dir)
        following = Settings.of(config, policy)
        # Only where it reads what the first run will leave: that is not there yet, so its files
        # can't be checked.
        if any(OmegaConf.select(config, key) == value for key, value in leaves.items()):
            _check_reading(following.job.pipeline, first=model)
        else:
            following.job.check()
    except (HydraException, OmegaConfBaseException, ConfigError, DataError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"follow_up={list(follow_up)} makes no experiment that can run: "
            f"{lines[0]}; [] runs none"
        ) from error
    return following


def _check_words(words: Sequence[Override], is_group: Callable[[str], bool]) -> None:
    """Refuse overrides from elsewhere that lead out of conf/ or read this machine.

    These are Hydra's own settings (its search path), an option that is a path, and whatever is
    more than a plain value: Hydra's escapes and functions can make an interpolation of one, which
    reads the environment.
    """
    for word in words:
        key = word.key_or_group
        value = word.value()
        # Hydra reads an option by its path, "../../x" included.
        leads_out = is_group(key) and not re.fullmatch(r"[\w-]+(/[\w-]+)*", str(value))
        is_own = key.split("/")[0].split(".")[0] in ("hydra", "defaults")
        values = value if isinstance(value, list) else [value]
        is_plain = all(one is None or isinstance(one, str | int | float) for one in values)
        is_plain = is_plain and not (word.is_sweep_override() or word.is_delete())
        # Brackets call Hydra's functions, backslash and $ write references.
        is_plain = is_plain and not re.search(r"[\\${}()]", f"{word.input_line}{value}")
        if is_own or leads_out or not is_plain:
            raise ConfigError(
                f"{word.input_line}: an experiment from elsewhere may not ask this; it may give "
                "group=option and key=value with plain values"
            )


def _check_interpolations(config: DictConfig, conf_dir: Path) -> None:
    """Raise ConfigError for an interpolation that stands in no file of conf_dir.

    It looks at what was composed, before anything is resolved, so that no way to write one past
    the words is a way past this.
    """
    # A reference that stands in conf/ was written here, however it came into this config.
    known = "".join(file.read_text("utf-8") for file in sorted(conf_dir.rglob("*.yaml")))
    for node in walk(OmegaConf.to_container(config)):
        for text in (node.name, node.value):
            if isinstance(text, str) and "${" in text and text not in known:
                raise ConfigError(
                    f"{node.path} of the experiment that follows would be {text!r}: an experiment "
                    "from elsewhere may not read this machine"
                )


def _check_reading(job: PipelineJob, first: OneWayModel) -> None:
    """Check a job that reads what the model `first` will leave, which is not there yet."""
    # The task's files are there; the model's are what `first` will write.
    job.task.check()
    most = first.max_positions
    if most is not None and job.task.max_length > most:
        raise ConfigError(
            f"task.max_length is {job.task.max_length}, but the pre-trained encoder will "
            f"have {most} positions (model.text.max_length)"
        )


def check_is_run(folder: Path, *files: str) -> None:
    """Raise ConfigError unless the folder has one of these files (patterns), which runs have."""
    check_is_folder(folder)
    if not any(any(folder.glob(file)) for file in files):
        # The first pattern is the usual file; the others only ranks of other clouds have.
        raise ConfigError(f"{folder} holds no run: there is no {files[0].rstrip('*')} in it")

"""Decide which cloud may hold what.

`security` of an experiment (Visibility) restricts batch fields and parts of the model to named
clouds; policy.yaml of one cloud (Policy) sets bounds that a file from elsewhere cannot widen,
checked before what it names is imported (docs/security.md).

A rank loads exactly the fields that its stages read, so text that a stage does not need never
enters its cloud; a layout with a stage that reads or holds a restricted one elsewhere is refused.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import yaml  # type: ignore[import-untyped]
from pydantic import Field

from xcloud.base.earlier import key_of
from xcloud.base.errors import ConfigError
from xcloud.base.project import POLICY_FILE, conf_dir, project_root
from xcloud.base.settings import MOVED, PACKAGED, Positive, settings
from xcloud.base.walk import walk
from xcloud.base.yaml_text import events
from xcloud.feature_settings import IN_NO_FILE, OfSecurity
from xcloud.security.defences import Defence
from xcloud.security.places import Lead, covers, is_place, leads_of, lies_below, link_out

ONLY_GIVEN = """
comm.memory.NoMemory features.one_way.feed.Feed features.replicas.outer_optimizer.OuterOptimizer
job.job.Launch layout.Price net.link_profile.Liveness pipeline.settings.Checkpoints
"""
"""Classes of settings that no file of conf/ names, since they are what a setting is by default."""


@cache
def constructors() -> frozenset[str]:
    """Return xcloud's own constructors, which any file may call: all that conf/ names, and what
    their settings are by default."""
    # Found in the text of the files: nothing is composed or imported to know what may be called.
    named = r"_target_: *(xcloud\.[\w.]+)"
    files = conf_dir().rglob("*.yaml")
    found = {name for file in files for name in re.findall(named, file.read_text("utf-8"))}
    found |= {f"xcloud.{name}" for name in ONLY_GIVEN.split()}
    # Settings of features that no file names.
    return frozenset(found | {f"{kind.__module__}.{kind.__qualname__}" for kind in IN_NO_FILE})


HeldBy = Callable[[str, str], frozenset[str] | None]
"""Of a job: what a cloud holds, of "holders" or "weights"; None where it has no such names."""
_WORDS = {
    "holders": ("reads", "no stage reads that field; the fields are"),
    "weights": ("holds the weights of", "the model has no such part; its parts are"),
}


_WEEK_S = 7 * 86_400
MAX_SETTINGS: Mapping[str, float] = {
    "max_restarts": 100,
    "keep": 100,
    "link_budget_bytes": 2**30,
    "activation_cache_mb": 16_384,
    "last_steps": 1_000,
    "max_rows": 100_000,
    "minutes": _WEEK_S // 60,
    "s": _WEEK_S,
}
"""What a file from elsewhere may ask for at most, by the last name of a setting or the last word
of it: it costs this cloud memory, disk or time that training itself does not."""
MIN_SETTINGS: Mapping[str, float] = {"interval_s": 0.01}
"""What it may ask for at least: a heartbeat costs time of both ends."""
MAX_NUMBER = 1_000_000_000
"""Any other whole number, but for those that only begin random numbers or are bits a second."""


def bound_of(key: str) -> float | None:
    """Return what a setting of a file from elsewhere may be at most, by its last name."""
    if key in MAX_SETTINGS:
        return MAX_SETTINGS[key]
    # A seed only begins random numbers, and rates, moments and a trace of rates are large by
    # nature.
    if key == "seed" or key.endswith(("_per_s", "_at_s")) or key == "trace":
        return None
    # A unit at the end decides: minutes and seconds have bounds of their own.
    return MAX_SETTINGS.get(key.rpartition("_")[2] if "_" in key else "", MAX_NUMBER)


@runtime_checkable
class Meter(Protocol):
    """A measurement of what other clouds could recover (features/leak_meter/meter.py)."""

    @property
    def last_steps(self) -> int:
        """The number of updates, the last of training, whose messages are kept."""

    @property
    def max_rows(self) -> int:
        """The number of rows kept of each kind of message, the newest."""

    def measure(self, run_dir: Path) -> dict[str, Any]:
        """Return the figures of a finished run for its summary."""


@settings("security")
class Visibility(OfSecurity):
    """The settings of `security`.

    holders: the clouds that may hold each field, by field name. Unnamed fields may be held
        wherever a stage reads them.
    weights: the clouds that may hold each part of the model, such as embeddings, layers, head.
    may_keep_rows: a cloud may keep what crossed from another for later epochs
        (training.activation_cache_mb).
    defences: the noise on what crosses a boundary, by direction.
    meter: the measurement, after training, of what others could recover.
    """

    holders: Mapping[str, Sequence[str]] = field(default_factory=dict)
    weights: Mapping[str, Sequence[str]] = field(default_factory=dict)
    may_keep_rows: bool = True
    defences: Mapping[Literal["forward", "backward"], Defence | None] = field(default_factory=dict)
    meter: Meter | None = None

    @property
    def defences_label(self) -> str:
        """The defences in words: "gaussian(0.1)+marvell(4)", forward first; "" without any."""
        both = [self.defences.get(way) for way in ("forward", "backward")]
        if any(both):
            return "+".join(d.label if d else "none" for d in both)
        return ""

    def check(self, clouds: Sequence[str], held_by: HeldBy) -> None:
        """Raise ConfigError where a cloud reads a field, or holds a part of the model, against the
        rules.

        held_by: the clouds that hold each field and part of the model in the job.
        """
        for what, (verb, unknown) in _WORDS.items():
            rule: Mapping[str, Sequence[str]] = getattr(self, what)
            # Without a rule nobody is asked what it holds, which not every model can say.
            held = {cloud: held_by(cloud, what) or frozenset() for cloud in clouds if rule}
            known = frozenset[str]().union(*held.values())
            for name, holders in rule.items():
                where = f"security.{what}.{name}"
                only = ", ".join(holders) or "no cloud"
                # A misspelled field would restrict nothing.
                if name not in known:
                    raise ConfigError(f"{where}: {unknown} {', '.join(sorted(known))}")
                for other in [holder for holder in holders if holder not in clouds]:
                    there = ", ".join(clouds)
                    raise ConfigError(f"{where} names cloud {other!r}; the clouds are {there}")
                for cloud in clouds:
                    if name in held[cloud] and cloud not in holders:
                        raise ConfigError(
                            f"cloud {cloud!r} {verb} {name!r}, but {where} allows it only in "
                            f"{only}. Move the stage (cluster.clouds, strategy) or the rule."
                        )


@dataclass(frozen=True)
class Refusal:
    """A thing that a policy does not let a file do. What is said tells two apart, as the same one
    may come by two ways.

    said: a sentence for the owner of the file.
    key: the key of policy.yaml that could allow it; "" if none does.
    allow: the addition that this key would need: items of a list, entries of a mapping, or the new
        value.
    """

    said: str
    key: str = field(default="", compare=False)
    allow: Any = field(default=None, compare=False)


_SHA256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@settings()
class Policy:
    """The bounds of what an experiment file may ask of this cloud.

    Folders are relative to the project's.

    me: the name of this cloud. Its ranks belong to no other cloud, whatever a file or --cloud
        says.
    peers: the certificates by which this cloud knows others on a line between owners, by name of
        the cloud: its file, or two of them on the day of a change. Paths are relative to the
        policy's folder, which also holds this cloud's own, as {me}.key and {me}.pem (`python -m
        xcloud keys new`).
    approved: the SHA-256 of the experiment files that may run here. It is checked before anything
        in a file is read. None: any file that keeps to the other rules.
    constructors: the full names of constructors that a file may call besides xcloud's own.
    read: the folders below which a file may name inputs. The run folder is always one of them.
    write: the folders below which a file may place cache_dir and the tracker's folder.
    hub: the names on the hub that may be fetched, with this machine's token: owner/name, or
        owner/name@revision where the file names a revision.
    addresses: the tracking servers, mailboxes and places for weights that a file may name, as
        written there, and HOST:PORT or HOST:FIRST-LAST at which clouds listen on sealed lines.
    clouds: the names of the clouds that may take part; None: any.
    holders, weights: the same rules as security.holders and security.weights, applied beside those
        of the file.
    require: the value that each dotted setting of the job must have, or its bounds as {min: …,
        max: …}. For an object, the name of its class is compared; "job" is the job itself.
        MAX_SETTINGS are bounds of every policy that does not name them here.
    max_ranks: the largest number of ranks of all clouds together.
    """

    me: str | None = None
    peers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    approved: Sequence[_SHA256] | None = None
    constructors: Sequence[str] = ()
    read: Sequence[str] = ()
    write: Sequence[str] = (".cache", "mlruns")
    hub: Sequence[str] = ()
    addresses: Sequence[str] = ()
    clouds: Sequence[str] | None = None
    holders: Mapping[str, Sequence[str]] = field(default_factory=dict)
    weights: Mapping[str, Sequence[str]] = field(default_factory=dict)
    require: Mapping[str, Any] = field(default_factory=dict)
    max_ranks: Positive = 1024

    def __post_init__(self) -> None:
        for key, wanted in self.require.items():
            # Bounds may lack one side, but not both.
            if isinstance(wanted, Mapping) and not (wanted and wanted.keys() <= {"min", "max"}):
                raise ConfigError(
                    f"require.{key} must be a value, or bounds as {{min: 1, max: 2}}, got {wanted}"
                )

    @classmethod
    def of(cls, content: object, file: Path) -> Policy:
        """Build the policy that a file holds. Raises ConfigError."""
        known = [one.name for one in fields(cls)]
        # An unknown key is an error: a rule that is misspelled would hold nothing.
        if not isinstance(content, Mapping) or not content.keys() <= set(known):
            raise ConfigError(f"{file} may have these keys: {', '.join(known)}; got {content!r}")
        try:
            return cls(**content)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None

    def check_approved(self, data: bytes, file: Path, policy_file: Path) -> None:
        """Refuse a file whose content nobody here has approved, before it is parsed.

        policy_file: the file of this policy, for the message.
        """
        # Of the bytes, before they are parsed: what nobody has read here is not looked at.
        digest = hashlib.sha256(data).hexdigest()
        if self.approved is not None and digest not in self.approved:
            raise ConfigError(
                f"{file} is not approved in this cloud: its SHA-256 is {digest}, which is none "
                f"of `approved` in {policy_file}. Read what it asks for, and approve it, with "
                f"python -m xcloud approve {file}"
            )

    def check_build(self, settings: Mapping[str, Any]) -> None:
        """Refuse what building the job would call or make that it may not."""
        self.refuse(self._refused_to_build(settings))

    def refused(self, settings: Mapping[str, Any], run_dir: Path) -> list[Refusal]:
        """Return what check_build refuses, what running the job would read, write or contact that
        it may not, and numbers that cost this machine too much.

        Imports no constructor that is refused.
        """
        # Constructors first: what they lead to is known only from those that may be imported.
        found = [*self._refused_to_build(settings), *self._refused_clouds(settings)]
        for lead in leads_of(settings, may_import=self._is_known):
            found += self._refused_lead(lead, str(run_dir.absolute()))
        return [*found, *self._refused_numbers(settings)]

    def check(self, settings: Mapping[str, Any], run_dir: Path) -> None:
        """Raise ConfigError with all that `refused` returns."""
        self.refuse(self.refused(settings, run_dir))

    def without_refused_places(
        self, settings: Mapping[str, Any], run_dir: Path
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return these settings with a file of the run folder, which is not there, in place of
        each file and name of the hub that is refused; and what stood there, by dotted name."""
        # The caller's settings are still to be shown as they are.
        changed = copy.deepcopy(dict(settings))
        replaced: dict[str, str] = {}
        folder = run_dir.absolute()
        for lead in leads_of(settings, may_import=self._is_known):
            # A command has no place that could stand for it, and an address none that is harmless.
            is_place = lead.to not in ("command", "address", "line")
            if not is_place or not any(self._refused_lead(lead, str(folder))):
                continue
            # Dotted names with [index] for entries of lists.
            *path, last = re.findall(r"[^.\[\]]+", lead.where)
            node: Any = changed
            for part in path:
                node = node[int(part)] if isinstance(node, list) else node[part]
            # A file in the run folder is allowed to every job, and there is none of this name.
            missing = str(folder / "refused")
            node[last] = [missing] if isinstance(node.get(last), list) else missing
            replaced[lead.where] = lead.value
        return changed, replaced

    def refuse(self, refusals: Iterable[Refusal]) -> None:
        """Raise ConfigError for all of these at once, with the lines that would allow them."""
        # Two settings may be refused for the same reason.
        found = list(dict.fromkeys(refusals))
        if not found:
            return
        # Lines for all refusals at once, so that the owner changes the policy a single time.
        lines = self.lines_for(found)
        ask = f"If you want this, put it into {POLICY_FILE} of this cloud: "
        if len(found) == 1:
            more = f". {ask}{lines[0]}" if lines else ""
            raise ConfigError(f"{found[0].said}{more}")
        said = "".join(f"\n- {one.said}" for one in found)
        more = f"\n{ask.strip()}\n" + "\n".join(lines) if lines else ""
        raise ConfigError(f"{len(found)} things are refused:{said}{more}")

    def lines_for(self, refusals: Iterable[Refusal]) -> list[str]:
        """Return the lines of YAML that replace keys of this policy, so that these are allowed."""
        keys: dict[str, Any] = {}
        for one in refusals:
            if not one.key:
                continue
            # Refusals of one key add up in one line.
            before = keys.get(one.key, getattr(self, one.key))
            if isinstance(one.allow, Mapping):
                merged = {**(before or {})}
                for name, value in one.allow.items():
                    merged[name] = value
                    if isinstance(value, list):
                        # What the policy allows already stays allowed.
                        names = [*(getattr(self, one.key).get(name, ())), *value]
                        merged[name] = list(dict.fromkeys(names))
                keys[one.key] = merged
            elif isinstance(one.allow, list):
                keys[one.key] = list(dict.fromkeys([*(before or ()), *one.allow]))
            else:
                keys[one.key] = one.allow
        return [_in_yaml(key, value) for key, value in keys.items()]

    def _is_known(self, target: object) -> bool:
        if not isinstance(target, str):
            return False
        # An old file names classes as they were called.
        name = MOVED.get(target, target)
        return name in constructors() or name in self.constructors

    def _refused_to_build(self, settings: Mapping[str, Any]) -> Iterator[Refusal]:
        num_ranks = 0
        first: tuple[str, int] | None = None
        # All nodes of the file, also those below a constructor that is refused.
        for node in walk(settings):
            where = node.path
            key = node.name
            value = node.value
            if key == "_target_":
                allowed = "xcloud's and this cloud's constructors"
                if where.endswith("]"):
                    continue  # an entry of a list that is refused as a whole
                if not isinstance(value, str):
                    yield Refusal(
                        f"{where} is {value!r}; it must be a text: {POLICY_FILE} names {allowed}"
                    )
                elif not self._is_known(value):
                    yield _refusal(where, value, allowed, "constructors", [value])
            # `_args_` and the like would call a constructor in another way.
            elif key.startswith("_"):
                yield Refusal(f"{where}: an experiment file has no such key")
            elif key == "num_ranks" and isinstance(value, int):
                num_ranks += max(value, 0)
                # Negative numbers are refused where the layout is made; here they must not make
                # room for others.
                if num_ranks > self.max_ranks and first is None:
                    first = where, value
        if first is not None:
            # Once, with the cloud at which the sum goes beyond.
            allowed = f"{self.max_ranks} ranks in all"
            yield _refusal(*first, allowed, "max_ranks", num_ranks)
        for lead in leads_of(settings, may_import=self._is_known):
            if lead.to == "command":
                yield Refusal(
                    f"{lead.where} is {lead.value!r}, but no experiment file may name a command "
                    "that this machine runs, and no policy allows it: remove it from the file, "
                    "and give one of your own on the command line"
                )

    def _refused_clouds(self, settings: Mapping[str, Any]) -> Iterator[Refusal]:
        names = []
        cluster = settings.get("cluster")
        if isinstance(cluster, Mapping) and isinstance(cluster.get("clouds"), Mapping):
            names = list(map(str, cluster["clouds"]))
        # None: any cloud may take part.
        allowed = names if self.clouds is None else self.clouds
        for name in names:
            if name not in allowed:
                yield _refusal("cluster.clouds", name, ", ".join(allowed), "clouds", [name])
        # Who runs this file is one of its clouds.
        if self.me is not None and names and self.me not in names:
            yield Refusal(
                f"cluster.clouds are {', '.join(names)}, but this cloud is {self.me!r} "
                f"({POLICY_FILE}, me): it takes no part in this experiment"
            )

    def _refused_numbers(self, settings: Mapping[str, Any]) -> Iterator[Refusal]:
        for node in walk(settings):
            where = node.path
            value = node.value
            # True is no number.
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            setting = where.partition("[")[0]
            most = bound_of(node.name)
            least = MIN_SETTINGS.get(node.name)
            # The owner has given bounds of its own.
            if setting in self.require:
                continue
            if most is not None and value > most:
                allow = {setting: {"max": value}}
                yield _refusal(where, value, f"at most {most:.10g}", "require", allow)
            elif least is not None and value < least:
                allow = {setting: {"min": value}}
                yield _refusal(where, value, f"at least {least:g}", "require", allow)

    def _refused_lead(self, lead: Lead, run_dir: str) -> Iterator[Refusal]:
        where = lead.where
        value = lead.value
        if lead.to == "command":
            # Refused already, and nothing allows it.
            return
        if lead.to in ("address", "line"):
            # Of a sealed line all ports of a cloud's ranks must be allowed.
            if not any(covers(allowed, value) for allowed in self.addresses):
                allowed = ", ".join(self.addresses) or "no address"
                yield _refusal(where, value, allowed, "addresses", [value])
        # A name that means a folder here is read, not fetched.
        elif lead.to == "hub" and not is_place(value):
            name = f"{value}@{lead.revision}" if lead.revision else value
            if name not in (*self.hub, *PACKAGED):
                allowed = f"of the hub {', '.join(self.hub) or 'nothing'}"
                yield _refusal(where, name, allowed, "hub", [name])
        else:
            use = "write" if lead.to == "write" else "read"
            # The run folder is always allowed: a run writes and reads there.
            folders = [*getattr(self, use), run_dir]
            allowed = f"files below {', '.join(folders)} (in {project_root()})"
            if not lies_below(value, folders):
                yield _refusal(where, value, allowed, use, [value])
            # A folder may hold links to files that the policy does not allow.
            elif use == "read" and (link := link_out(value, folders)) is not None:
                target = os.path.realpath(link)
                yield _refusal(f"{link}, in {where},", target, allowed, "read", [target])

    def refused_job(
        self, job: object, clouds: Iterable[str], held_by: HeldBy, instead: Mapping[str, Any] = {}
    ) -> Iterator[Refusal]:
        """Yield what a job lacks that this cloud asks of every one, and what its clouds would hold
        that they may not.

        instead: values by dotted name that count in place of the job's.
        """
        for asked_key, wanted in self.require.items():
            # Names of an earlier release, as policies live longer than files.
            key = key_of(asked_key, job)
            # Where a place was replaced, to build the job, the file's own value counts.
            value = job if key == "job" else instead.get(key, value_at(job, key))
            if not _meets(value, wanted):
                asked = wanted
                if isinstance(wanted, Mapping):
                    asked = " and ".join(f"{name} {bound}" for name, bound in wanted.items())
                plain = value
                # A requirement on an object names its class.
                if not isinstance(value, str | int | float | None):
                    plain = type(value).__name__
                yield Refusal(
                    f"{key} is {plain!r}, but {POLICY_FILE} of this cloud requires {asked}"
                )
        for what, cloud in product(_WORDS, clouds):
            rule: Mapping[str, Sequence[str]] = getattr(self, what)
            held = held_by(cloud, what) if rule else frozenset()
            # A job whose parts have no names can't be held to a rule on them.
            if held is None:
                yield Refusal(
                    f"{POLICY_FILE} of this cloud has {what}, and a job of this kind has no "
                    "fields or parts that it could restrict; without that rule it can run"
                )
                continue
            for name in sorted(held & rule.keys()):
                if cloud not in rule[name]:
                    allowed = f"{name!r} only in {', '.join(rule[name]) or 'no cloud'}"
                    where = f"a cloud that holds {name!r}"
                    allow = {name: [cloud]}
                    yield _refusal(where, cloud, allowed, what, allow)


def bounded_settings(settings: Mapping[str, Any]) -> list[str]:
    """Return the dotted names of the numbers whose bound is not that of any number."""
    return [
        node.path
        for node in walk(settings)
        if isinstance(node.value, int | float) and not isinstance(node.value, bool)
        if "[" not in node.path
        # What costs time, memory or disk, and any number beyond what all may have.
        if bound_of(node.name) not in (None, MAX_NUMBER) or node.value > MAX_NUMBER
    ]


def targets_of(settings: Mapping[str, Any]) -> set[str]:
    """Return all constructors that these settings name."""
    return {str(node.value) for node in walk(settings) if node.name == "_target_"}


def _in_yaml(key: str, value: object) -> str:
    """Return a key of a policy in one line. Whatever the words of a file are, they stay words."""
    # One line, however long: a text is shown to be copied.
    text: str = yaml.safe_dump(
        as_plain(value), default_flow_style=True, sort_keys=False, width=math.inf
    )
    text = text.removesuffix("...\n").strip()
    # A text with a line feed, say, which YAML writes over several lines.
    if "\n" in text:  # JSON is YAML whose texts never end a line
        text = json.dumps(as_plain(value))
    return f"{key}: {text}"


def as_plain(node: Any) -> Any:
    """Return mappings and sequences as dicts and lists."""
    if isinstance(node, Mapping):
        return {key: as_plain(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [as_plain(value) for value in node]
    return node


def _refusal(where: str, came: object, allowed: str, key: str, allow: Any) -> Refusal:
    said = f"{where} is {came!r}, but an experiment file from elsewhere is allowed {allowed}"
    return Refusal(said, key, allow)


def value_at(node: Any, key: str) -> Any:
    """Return what a job has under a dotted name; None where it has nothing."""
    for part in key.split("."):
        if isinstance(node, Mapping):
            node = node.get(part)
        else:
            # A policy asks for settings, and no attribute of Python's own.
            node = None if part.startswith("_") else getattr(node, part, None)
    return node


def _meets(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        # A bound that is missing holds by itself.
        return bool(wanted.get("min", value) <= value <= wanted.get("max", value))
    return bool(value == wanted) or (isinstance(wanted, str) and type(value).__name__ == wanted)


MAX_BYTES = 128_000  # the largest experiment of conf/ has 7,000
MAX_VALUES = 4_000  # keys included; it has 500. OmegaConf takes 0.1 ms for each
MAX_LENGTH = 10_000  # characters of one value
MAX_DEPTH = 32  # it has 7


def plain_text(path: Path, approve: Callable[[bytes, Path], None] | None = None) -> str:
    """Read a YAML file that may come from elsewhere, if it holds mappings, lists, texts and
    numbers.

    approve: a function that is given the content before it is parsed.

    No anchors and aliases (292 bytes can stand for a million values), no tags, no interpolation
    (which reads environment variables of this machine), and bounds that large experiments keep by
    far. Raises ConfigError naming the file and, where a value is the reason, its line.
    """
    if not path.is_file():  # a pipe might never end
        raise ConfigError(f"there is no file {path}")
    try:
        with path.open("rb") as file:
            # One byte more than is allowed tells a longer file.
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path} is longer than {MAX_BYTES} bytes")
        # The bytes that are approved are those that are parsed.
        if approve is not None:
            approve(data, path)
        text = data.decode()
        _check_data(text, path)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    return text


def _check_data(text: str, path: Path) -> None:
    depth = num_values = 0
    # Events come one by one, before any value is built.
    for event in events(text):
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

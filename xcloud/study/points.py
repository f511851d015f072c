"""The points of a study, which is a sweep or a claim: which experiment each one is, what it is
called, and what has become of it, as sweep.json and the folders of points say. Runs and prints
nothing.

The *settings* of a point are all of them with their effective values, by dotted name. Its
identity ignores names and output places: two points with the same identity give the same result,
in any sweep.

    multirun/NAME/sweep.json          requested overrides and code version, by point folder
    multirun/NAME/<point>/            the run folder of a point; summary.json says how it ended
    multirun/NAME/earlier/            run folders of points that were run again; nothing is deleted

Whether a point is finished follows from its summary.json alone, so a killed sweep can continue.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, TypeGuard

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import ConfigError
from xcloud.base.overrides import as_override
from xcloud.base.project import code_digests, commit
from xcloud.base.run_folder import LOCK_FILE, file_name, owned
from xcloud.job import config as configs
from xcloud.job.config import EXPERIMENT_FILE
from xcloud.job.given import settings_of
from xcloud.job.inputs import inputs_of
from xcloud.job.job import Job
from xcloud.record.files import CheckpointSteps
from xcloud.record.summary import read_summary, write_summary
from xcloud.tracking.tracker import REPLACED_FILE, TRACKED_FILE

PointSettings = Mapping[str, object]
Overrides = tuple[str, ...]

STATE_FILE = "sweep.json"
EARLIER_DIR = "earlier"
# Code that arranges and shows runs; it cannot change what a run computes.
BESIDE_CODE = ("study", "_hydra", "show", "api.py", "__main__.py")
# Where a run is written and what it is called, not what it computes.
BESIDE = ("sweep", "label", "tracker")
# Not part of the label: the seed is appended, the sweep's name is left out.
UNLABELLED = {"seed", "sweep"}
# A low-rank split. With `layer: null` the model is unsplit and the other keys are ignored.
SPLIT = "model.split"
CUT_LAYER = "model.split.layer"
_UNSAFE = {ord(mark): None for mark in "$`"}  # which no label may have
UNCOMPRESSED = "none"  # the label of the reference among compressions


@dataclass
class Point:
    """One experiment of a study.

    sweep: the sweep that the point belongs to; "" in a claim.
    label: a text that distinguishes the point, in a sweep, from points that differ in more than
        their seed.
    row: the name of the point's row and folder in a claim, whatever its settings are.
    """

    overrides: Overrides
    config: configs.Settings
    settings: PointSettings
    experiment: Job
    label: str = ""
    row: str = ""
    sweep: str = ""

    @classmethod
    def of(cls, overrides: Overrides, config: Any) -> Point:
        """Raises ConfigError for an invalid experiment."""
        made = configs.Settings.of(config)
        return cls(overrides, made, settings=made.flat, experiment=made.job)

    @cached_property
    def identity(self) -> str:
        return identity(self.settings)

    @property
    def named(self) -> configs.Settings:
        """Its settings with the names that the sweep gave it, as its run reads them."""
        if self.sweep:
            return self.config.changed({"sweep": self.sweep, "label": self.label})
        return self.config

    @cached_property
    def inputs(self) -> dict[str, str]:
        """Digests of the files that it reads here, by setting."""
        return inputs_of(self.settings, cache_dir=self.experiment.cache_path)

    @property
    def name(self) -> str:
        """Display name, unique in the study: "int8+int8 s1"."""
        return self.row or f"{self.label} s{self.experiment.seed}"

    @property
    def folder(self) -> str:
        """The name as a shell-safe folder name: "fp16-svd-0.6+int8_s1"."""
        safe = re.sub(r"[^\w.+=,-]+", "-", self.label.replace(")", "")).strip("-.")
        return self.row or file_name(safe, end=f"_s{self.experiment.seed}")


def identity(settings: PointSettings, *without: str) -> str:
    """A short hash of the settings that decide the result, except `without` and keys below: equal
    without "seed" for points that differ only in their seed."""
    # `without` takes whole groups: "compression" leaves out all its settings.
    kept = {
        key: value for key, value in deciding(settings).items() if not _below(key, heads=without)
    }
    # Files and trackers give the same settings in different orders.
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def differences(one: PointSettings, other: PointSettings) -> dict[str, tuple[object, object]]:
    """Deciding settings that differ, as (one, other); a missing one is None."""
    one = deciding(one)
    other = deciding(other)
    both = {key: (one.get(key), other.get(key)) for key in sorted({*one, *other})}
    return {key: pair for key, pair in both.items() if pair[0] != pair[1]}


def varying(many: Sequence[PointSettings]) -> list[str]:
    """Deciding settings that are not equal in all, in order of first appearance."""
    many = [deciding(settings) for settings in many]
    keys = dict.fromkeys(key for settings in many for key in settings)
    # repr: 1 and True are different settings, and lists are not hashable.
    return [key for key in keys if len({repr(s.get(key)) for s in many}) > 1]


def is_unsplit(settings: PointSettings) -> bool:
    """Return whether a splittable model is left unsplit."""
    # The unsplit model is written as a layer of null, or as no split at all.
    return any(key in settings and settings[key] is None for key in (CUT_LAYER, SPLIT))


def with_also(asked: Sequence[Overrides], also: Mapping[str, object]) -> list[Overrides]:
    """The requested points, and each again with `also` replacing what it covers.

    {"compression": "none"} for rates of compression times seeds gives one "none" for each seed;
    {"model.split.layer": None} gives the unsplit model, to which its other settings do not apply.
    """
    # Leaving out the layer alone would leave the rank and its like of a split that is none.
    covered = [
        SPLIT if pair == (CUT_LAYER, None) else pair[0].replace("/", ".") for pair in also.items()
    ]
    added = tuple(_word(key, value=value) for key, value in also.items())
    again = [
        # In the words' own place nothing of the group is left that is replaced.
        (*(o for o in overrides if not _below(_key(o).replace("/", "."), heads=covered)), *added)
        for overrides in asked
    ]
    # A point that is the reference already is not run twice.
    return list(dict.fromkeys([*asked, *again]))


def name_points(points: Sequence[Point], earlier: Sequence[Overrides] = ()) -> None:
    """Label each point with the settings in which the points differ, except the seed.

    earlier: the points of the same sweep that other commands requested.
    """
    # With the words of earlier commands, so that points of one folder have names that differ.
    every = [_by_key(overrides) for overrides in (*(p.overrides for p in points), *earlier)]
    keys = [
        key
        for key in dict.fromkeys(key for given in every for key in given)
        if key not in UNLABELLED and len({given.get(key) for given in every}) > 1
    ]
    # The last part of a key is enough, unless two keys end alike.
    ends = {key: re.split(r"[./]", key)[-1] for key in keys}
    alone = [end for end in ends.values() if [*ends.values()].count(end) == 1]
    shorts = {key: end if end in alone else key.replace("/", ".") for key, end in ends.items()}
    for point in points:
        point.label = _label(point, keys, shorts)
    # Points that differ in their seed alone share a label; others with the same one are told
    # apart.
    labels = [label for label, _ in {(p.label, identity(p.settings, "seed")) for p in points}]
    for point in points:
        # Compressors are labelled by what they do, so two choices may read alike.
        if labels.count(point.label) > 1:  # compressors whose labels are ambiguous
            given = _by_key(point.overrides)
            own = [key for key in keys if key in given and _below(key, heads=["compression"])]
            point.label = " ".join([point.label, *(f"{shorts[k]}={given[k]}" for k in own)])


def same_overrides(one: Sequence[str], other: Sequence[str]) -> bool:
    """Return whether two points have the same overrides but for the sweep's name, in any order."""
    return {**_by_key(one), "sweep": ""} == {**_by_key(other), "sweep": ""}


def _label(point: Point, keys: Sequence[str], shorts: Mapping[str, str]) -> str:
    given = _by_key(point.overrides)
    settings = point.settings
    parts: list[str] = []
    for key in keys:
        dotted = key.replace("/", ".")
        # Of a group the chosen option is shown, of a setting its name as well.
        is_value = dotted in settings and not any(k.startswith(f"{dotted}.") for k in settings)
        if _below(dotted, heads=["compression"]):
            # What a compression is in force says more than the words that chose it.
            parts.append(point.experiment.labels.compression)
        # Its rank, say, means nothing without a split.
        elif _below(dotted, heads=[SPLIT]) and is_unsplit(settings):
            parts.append("unsplit")
        elif key in given:
            is_named = is_value and key != "exp"
            parts.append(f"{shorts[key]}=" * is_named + given[key])
    # Two settings of one group give the same label twice.
    return " ".join(dict.fromkeys(parts)).translate(_UNSAFE) or (
        point.experiment.labels.compression
    )


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Return the values by key; numbers of one value as one text."""
    return {_key(override): _spelled(override.partition("=")[2]) for override in overrides}


@cache
def _spelled(value: str) -> str:
    """Return a value as it is written shortest: 0 for 0.0, 0.001 for 1e-3."""
    try:
        # A file says 1e-3 where a command line says 0.001.
        return str(_one_kind(float(value))) if re.match(r"[-+.\d]", value) else value
    except (ValueError, OverflowError):
        return value


def _one_kind(value: object) -> object:
    """Return a number that is whole as an int, however a file or a command line spells it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_one_kind(entry) for entry in value]
    return value


def _key(override: str) -> str:
    # Hydra's signs in front, and a package behind, are no part of the key.
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def _word(key: str, value: object) -> str:
    """Return the value as an override: key=null, key=true, key=0.5, key="a text (of any
    characters)"."""
    # Quoted where Hydra would read a text as something else.
    if isinstance(value, str):
        return as_override(key, text=value)
    return f"{key}={json.dumps(value) if value is None or isinstance(value, bool) else value}"


def deciding(settings: PointSettings) -> PointSettings:
    """The settings that decide the result."""
    # Settings of a split that is not made decide nothing.
    silent = [SPLIT] if is_unsplit(settings) else []
    return {
        key: _one_kind(value)
        for key, value in settings.items()
        if not _below(key, heads=BESIDE)
        and not key.endswith("cache_dir")
        and (key in (SPLIT, CUT_LAYER) or not _below(key, heads=silent))
    }


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _below(key: str, heads: Sequence[str]) -> bool:
    return any(key == head or key.startswith(f"{head}.") for head in heads)


PointAction = Literal["run", "skip", "again", "resume", "follow"]
Changed = Mapping[str, tuple[object, object]]  # by setting: before and now


@dataclass(frozen=True)
class Decision:
    """A decision about a point: run it, keep what it left, run it again from the start or from its
    last checkpoint, or follow the job that runs it. why: the reason, if worth printing."""

    point: Point
    verdict: PointAction
    folder: str
    why: str = ""


class SweepState:
    """The file of one study. One process at a time: hold `lock()` around everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.code = code_fingerprint()
        self.commit = commit()
        self.points = read_points(folder)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Own the folder of the study. Raises ConfigError if another process does."""
        advice = "another process runs it; wait for that one, or choose another name or folder"
        with owned(self.folder, advice):
            yield

    def decide(
        self,
        points: Sequence[Point],
        accept_changes: bool,
        is_running: Callable[[Path], bool] = lambda run_dir: False,
    ) -> list[Decision]:
        """Skip finished, unchanged points; follow those that a job runs; resume interrupted,
        unchanged ones; run failed and changed ones again."""
        # What each recorded point ran with, as its own file says.
        ran = {}
        for name in self.points:
            with suppress(ConfigError):  # its settings were never written
                ran[name] = settings_of(self.folder / name / EXPERIMENT_FILE)
        by_identity = {identity(own): name for name, own in ran.items()}
        # Folders of points that are asked for now are not given to others.
        wanted = {by_identity.get(point.identity) for point in points}
        taken = {*self.points}
        decisions = list[Decision]()
        for point in points:
            # A folder that ran the same words with other settings (a default has changed since):
            # its point runs again there.
            alike = (name for name, entry in self.points.items()
                     if name not in wanted
                     and same_overrides(entry["overrides"], other=point.overrides))  # fmt: skip
            folder = by_identity.get(point.identity) or next(alike, None)
            # A row of a claim has one folder, whatever its settings are.
            if point.row:
                folder = point.row if point.row in self.points else None
            if folder is None:
                folder = free_name(point.folder, taken)
                taken.add(folder)
                decisions.append(Decision(point, verdict="run", folder=folder))
            else:
                # A job may outlive the command that submitted it.
                if is_running(self.folder / folder):
                    why = "a job runs it"
                    decisions.append(Decision(point, verdict="follow", folder=folder, why=why))
                    continue
                # Without its file nothing is known of how it ran, so nothing has changed.
                changed = differences(ran.get(folder) or point.settings, other=point.settings)
                decisions.append(
                    self._judge(point, folder, changed, accept_changes=accept_changes)
                )
        return decisions

    def begin(self, decision: Decision, parallel: int) -> Path:
        """Make an empty folder for the point, unless it resumes in its own; an existing one moves
        to `earlier/`, and its run in MLflow to the deleted ones: a point is one row."""
        run_dir = self.folder / decision.folder
        if decision.verdict == "follow":
            return run_dir
        with owned(run_dir):  # else it is a point that somebody has resumed by hand
            return self._emptied(run_dir, decision, parallel)

    def _emptied(self, run_dir: Path, decision: Decision, parallel: int) -> Path:
        if decision.verdict == "resume":
            return run_dir
        # A point that ran before is kept beside the others; nothing is deleted.
        if {*os.listdir(run_dir)} - {LOCK_FILE}:
            earlier = self.folder / EARLIER_DIR
            # The run in MLflow that this one replaces is named here, for its tracker.
            earlier.mkdir(exist_ok=True)
            left = run_dir.rename(earlier / free_name(run_dir.name, taken=os.listdir(earlier)))
            run_dir.mkdir()
            if (left / TRACKED_FILE).exists():
                shutil.copyfile(left / TRACKED_FILE, run_dir / REPLACED_FILE)
        run_dir.mkdir(exist_ok=True)
        self.points[decision.folder] = {
            "label": decision.point.label,
            "seed": decision.point.experiment.seed,
            "overrides": list(decision.point.overrides),
            "commit": self.commit,
            "code": self.code,
            "inputs": decision.point.inputs,
            "at_once": parallel,
            "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        # Written before the run starts, so that a killed sweep knows its point.
        write_summary(
            self.folder / STATE_FILE, summary={"name": self.folder.name, "points": self.points}
        )
        return run_dir

    def _judge(
        self, point: Point, folder: str, changed: Changed, accept_changes: bool
    ) -> Decision:
        summary = read_summary(self.folder / folder)
        entry = self.points.get(folder, {})
        parts = [f"{key} {old} -> {new}" for key, (old, new) in changed.items()]
        shown = ", ".join(parts[:3]) + f" and {len(parts) - 3} more" * (len(parts) > 3)
        changes = [f"config changed since: {shown}"] if changed else []
        # The commit is for the reader, the fingerprint decides.
        if entry.get("code") != self.code:
            changes.append(f"code changed since: {entry.get('commit')} -> {self.commit}")
        # What lies elsewhere now is the same if it has the same contents.
        before = entry.get("inputs", {})
        keys = sorted(before.keys() | point.inputs.keys())
        if other := [key for key in keys if before.get(key) != point.inputs.get(key)]:
            changes.append(f"other contents since: {', '.join(other)}")
        status = summary.get("status", "unfinished")
        # A run that was interrupted goes on only if nothing has changed: its first steps would be
        # of another experiment.
        if status != "finished":
            why = ": ".join(filter(None, (status, summary.get("cause"))))
            if changes or not (steps := CheckpointSteps(self.folder / folder).agreed_steps()):
                return Decision(point, verdict="again", folder=folder, why=why)
            return Decision(
                point, verdict="resume", folder=folder, why=f"from step {steps[0]}; {why}"
            )
        # A finished point with changes is run again, unless the user says that they do not matter.
        is_kept = accept_changes or not changes
        return Decision(
            point, verdict="skip" if is_kept else "again", folder=folder, why="; ".join(changes)
        )


def read_points(folder: Path) -> dict[str, dict[str, Any]]:
    """The entries of sweep.json by point folder; empty without that file."""
    path = folder / STATE_FILE
    if not path.exists():
        return {}
    try:
        return dict(parsed_json(path.read_text(encoding="utf-8"))["points"])
    except (ValueError, KeyError, TypeError) as error:
        why = f"{path} is damaged ({error}); move it away and its points count as new"
        raise ConfigError(f"{why}, or choose another name or folder") from error


def code_fingerprint() -> str:
    """A short hash of the sources that decide what a run computes. The commit is no substitute:
    it changes with a README and does not change with an uncommitted edit."""
    # Folders and files of the package that only arrange and show.
    files = [pair for pair in code_digests().items() if pair[0].split("/")[0] not in BESIDE_CODE]
    return hashlib.sha256(repr(files).encode()).hexdigest()[:12]


def free_name(name: str, taken: Collection[str]) -> str:
    """Return the name itself, or NAME-2, NAME-3 and so on where it is taken."""
    # Names are taken by folders of other points, also of earlier commands.
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(free for free in names if free not in taken)

"""What ranks compare before the start (join/agreement.py), and what may differ between a run and
its continuation: TABLE, by which going on is decided (resume.py); docs/surviving.md shows it.

Compared, and a difference is an error:
  settings   every key of the resolved experiment file, as dotted name and value
  release    xcloud.__version__
  code       a digest of every .py file of xcloud, and of each module outside it that the
             experiment names as a _target_ (line ends do not count)
  draws      a digest of numbers from torch's CPU generator: the order of the samples is drawn in
             every cloud, so it must be the same everywhere
Compared, and a difference is only noted:
  torch      its version: clouds with and without GPUs need different builds, and nothing but the
             draws above must be bit-equal across clouds

Neither compared nor sent, because it may differ without changing results:
  - names: name, sweep, label, profile, cluster.name; the tracker; follow_up, which runs
    afterwards; launch, which starts the ranks of one machine
  - the machine: hydra, every cache_dir, the device of a cloud
  - places of files: path, paths, folder, files, *_path, *_file, *_dir, and any value that looks
    like a path (/..., ~..., ./...). name_or_path is compared as long as it is the name of a
    checkpoint in both clouds. Of a tokenizer's file the contents are compared, by digest.
  - task.sizes, which only clouds that read no data give (loading.py compares the sizes)
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

import xcloud
from xcloud.base.project import code_digests, commit, file_digest
from xcloud.job.places import Places

PATH = "(a path)"
"""In place of a value that is a path: not sent, and equal to anything."""

_UNCOMPARED = {
    "name", "sweep", "label", "profile", "tracker", "follow_up", "hydra", "launch", "cache_dir",
    "cluster.name", "task.sizes",
}  # fmt: skip
MAX_VALUE = 160
"""Characters; a longer value is cut and followed by its digest."""

_DEVICE = re.compile(r"cluster\.clouds\.[^.]+\.device")
_PLACE = re.compile(r"(.*_)?(path|paths|file|files|folder|folders|dir|dirs)")
_LOOKS_LIKE_PATH = re.compile(r"[/~\\]|\.\.?[/\\]|[A-Za-z]:[/\\]|file:")


def make_table(settings: Mapping[str, Any]) -> dict[str, str]:
    """This rank's table, with everything that is compared: section ("setting", "fact",
    "code", "info"), a space, dotted key or file -> value as JSON text. All of it is ASCII.

    settings: the resolved experiment file as plain containers.
    """
    table = {f"setting {key}": value for key, value in compared_settings(settings).items()}
    table |= {f"code {file}": digest for file, digest in _code(settings).items()}
    table["fact release of xcloud"] = _text_of(xcloud.__version__)
    generator = torch.Generator().manual_seed(1)
    draws = torch.randperm(1000, generator=generator)
    table["fact digest of torch's random numbers"] = _digest(repr(draws.tolist()).encode())
    table["info torch"] = _text_of(torch.__version__)
    table["info commit"] = _text_of(commit())
    return table


def compared_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> value as JSON text, of every setting that must be equal in all ranks."""
    found: dict[str, str] = {}

    def walk(node: Any, key: str) -> None:
        leaf = key.rsplit(".", 1)[-1]
        if key in _UNCOMPARED or leaf == "cache_dir" or _DEVICE.fullmatch(key):
            return
        if key.endswith("tokenizer.path"):
            found[key] = _contents(node)
        elif leaf == "name_or_path":
            found[key] = PATH if _is_place(node) else _text_of(node)
        elif _PLACE.fullmatch(leaf):
            return
        elif isinstance(node, Mapping) and node:
            if key and "_target_" not in node:  # the order of members may count
                found[key] = _text_of(list(node))
            for name, entry in node.items():
                walk(entry, f"{key}.{name}" if key else str(name))
        elif isinstance(node, list | tuple) and node:
            for index, entry in enumerate(node):
                walk(entry, f"{key}[{index}]")
        elif isinstance(node, str) and _LOOKS_LIKE_PATH.match(node):
            found[key] = PATH
        else:
            found[key] = _text_of(node)

    walk(settings, "")
    return {json.dumps(key)[1:-1]: value for key, value in found.items()}


def _is_place(value: object) -> bool:
    """A folder or file, not the name of a checkpoint ("minilm", "owner/name")."""
    if not isinstance(value, str):
        return False
    return (
        bool(_LOOKS_LIKE_PATH.match(value))
        or value.count("/") > 1
        or "\\" in value
        or Path(value).exists()
    )


def _contents(path: object) -> str:
    """Digest of a file; PATH where this machine has none."""
    file = Path(path) if isinstance(path, str) else None
    if file is None or not file.is_file():
        return PATH
    return f'"(contents {_digest(file.read_bytes())})"'


def _code(settings: Mapping[str, Any]) -> dict[str, str]:
    """Digest of every file of the package, and of each other module that a _target_ is of."""
    found = {f"xcloud/{file}": digest for file, digest in code_digests().items()}
    for target in sorted(_targets(settings)):
        module = sys.modules.get(target.rsplit(".", 1)[0])
        file_name = getattr(module, "__file__", None)
        if target.startswith("xcloud.") or not file_name or not Path(file_name).is_file():
            continue
        found[f"module {target.rsplit('.', 1)[0]}"] = file_digest(Path(file_name))
    return found


def _targets(node: Any) -> set[str]:
    if isinstance(node, Mapping):
        own = {str(node["_target_"])} if "_target_" in node else set()
        return own.union(*(_targets(entry) for entry in node.values()))
    if isinstance(node, list | tuple):
        return set[str]().union(*(_targets(entry) for entry in node))
    return set()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _text_of(value: object) -> str:
    """JSON, in ASCII; 2 and 2.0 are one number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = json.dumps(value, default=str)
    if len(text) > MAX_VALUE:
        text = f"{text[: MAX_VALUE - 40]}... (digest {_digest(text.encode())})"
    return text


_REMEMBERED = "what compression remembers of earlier steps"
_SINCE_MERGE = "what other clouds did since the last merge"


@dataclass(frozen=True)
class Outcome:
    """lost: by going on. refused: why it does not go on. is_equal: to the bits of a run that was
    not interrupted. needs_merge: goes on only from a step after which all replicas were equal."""

    lost: tuple[str, ...] = ()
    refused: str = ""
    is_equal: bool = False
    needs_merge: bool = False

    def __str__(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        words = "equal bits" if self.is_equal else "goes on"
        words += f", losing {'; '.join(self.lost)}" if self.lost else ""
        return words + (", from a merge of all parameters only" if self.needs_merge else "")


EQUAL, GOES_ON = Outcome(is_equal=True), Outcome()
FORGETS = Outcome((_REMEMBERED,))
OTHER_RUN = Outcome(refused="that would be another run")
COLUMNS = ("pipeline", "data parallel", "local updates", "streaming", "elastic", "one-way")


class Row(NamedTuple):
    """keys: the settings, as one pattern; "" where it is decided by who holds what (Places).
    others: of columns that differ from `usual`; None where a job has no such setting."""

    keys: str
    usual: Outcome
    others: Mapping[str, Outcome | None] = {}


def _elastic(lost: str = "") -> Outcome:
    return Outcome((lost, _SINCE_MERGE) if lost else (_SINCE_MERGE,))


_NONE = {"one-way": None}
_AFTER_MERGE = Outcome((_REMEMBERED,), needs_merge=True)
NOTHING, CUT = "link, liveness, slowdown, evaluation, checkpoints", "number of stages"
LANES, SHARD = "cluster: which ranks hold a stage", "cluster: parts of a sharded stage"
TABLE: Mapping[str, Row] = {
    NOTHING: Row(
        r"cluster\.(wan|links|liveness|carrier|bandwidth|link_budget)|cluster\.clouds\.[^.]+\.slowdown|"
        r"training\.(evaluate_every|eval_|checkpoint)|launch|feed\.(slow_after_s|min_producers)",
        EQUAL, {"elastic": _elastic()},
    ),
    "steps, optimizer, precision, divergence, decoding, security but privacy": Row(
        r"training\.(max_steps|optimizer\.|on_divergence|max_skips_in_a_row|precision)|"
        r"security(?!\.privacy)|model\.decoding|feed\.on_(slow|dead)",
        GOES_ON, {"elastic": _elastic()},
    ),
    "compression": Row("compression", FORGETS, {"elastic": _elastic(_REMEMBERED), **_NONE}),
    "schedule, accumulation": Row(
        r"schedule|training\.accumulate_steps", FORGETS,
        {"elastic": _elastic(_REMEMBERED), **_NONE},
    ),
    LANES: Row(
        "", FORGETS,
        {
            "local updates": _AFTER_MERGE, "streaming": _AFTER_MERGE, "elastic": _AFTER_MERGE,
            "one-way": Outcome(refused="its ranks cannot change places"),
        },
    ),
    SHARD: Row("", Outcome(refused="each rank has a part, and parts are not joined"), _NONE),
    CUT: Row("", Outcome(refused="stages hold other layers then"), _NONE),
    "security.privacy": Row(
        r"security\.privacy", Outcome(refused="one epsilon is of one noise and clip"), _NONE
    ),
    "model, task, data, seed, batch size, strategy, release": Row("", OTHER_RUN),
}  # fmt: skip


def outcome_of(row: str, column: str) -> Outcome:
    return TABLE[row].others.get(column, TABLE[row].usual) or OTHER_RUN


def markdown() -> str:
    """TABLE as docs/surviving.md has it."""
    lines = ["| changed since | what happens | but |", "| --- | --- | --- |"]
    for name, row in TABLE.items():
        others: dict[str, list[str]] = {}
        for column, outcome in row.others.items():
            others.setdefault(str(outcome or "has none"), []).append(column)
        but = "; ".join(f"{', '.join(columns)}: {said}" for said, columns in others.items())
        lines.append(f"| {name} | {row.usual} | {but} |")
    return "\n".join(lines)


def _moved(before: Places, now: Places) -> str | None:
    """The row of TABLE that says what it means to go on with other ranks; None if nobody moves."""
    if list(before.ranks) == list(now.ranks):
        return None
    if before.num_stages != now.num_stages:
        return CUT
    return LANES if before.sharded_parts == now.sharded_parts else SHARD


@dataclass
class Changes:
    """What differs from the run that a checkpoint is of. said: the settings, in words. refused:
    why it does not go on, and what to set back."""

    said: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    moves: bool = False
    needs_merge: bool = False

    @property
    def forgets(self) -> bool:
        return _REMEMBERED in self.lost

    def price(self, has_memory: bool) -> str:
        """What going on costs, for the user. has_memory: whether compression remembers any."""
        lost = [what for what in self.lost if what != _REMEMBERED or has_memory]
        return f"lost by this: {'; '.join(lost)}" if lost else "nothing is lost by this"

    def take(self, outcome: Outcome, what: str, back: str) -> None:
        if outcome.refused:
            self.refused.append(f"{what}: {outcome.refused}; {back}, or start a new run")
        self.lost += [lost for lost in outcome.lost if lost not in self.lost]
        self.needs_merge |= outcome.needs_merge


def changes(
    saved: Mapping[str, str], now: Mapping[str, str], before: Places, after: Places
) -> Changes:
    """saved, now: settings as compared.compared_settings gives them, and who holds what."""
    found = Changes()
    keys = [key for key in sorted(saved.keys() | now.keys()) if saved.get(key) != now.get(key)]
    found.said = _in_words(keys, saved, now, before.labels, after.labels)
    moved = _moved(before, after)
    found.moves = moved is not None
    for key in keys:
        row = next((name for name, r in TABLE.items() if r.keys and re.match(r.keys, key)), None)
        if row is None and key.startswith("cluster."):
            row = NOTHING if before.ranks else LANES  # else `moved` says what it means
        old = saved.get(key)
        back = f"leave {key} out" if old is None else f"set {key} back to {old}"
        outcome = OTHER_RUN if row is None else outcome_of(row, after.column)
        found.take(outcome, f"{key} is {now.get(key, 'not set')}", back)
    if moved is not None:
        found.take(outcome_of(moved, after.column), moved, f"undo {', '.join(found.said)}")
    return found


def _in_words(
    keys: Sequence[str], saved: Mapping[str, str], now: Mapping[str, str],
    before: Mapping[str, str], after: Mapping[str, str],
) -> list[str]:  # fmt: skip
    """Of each group that has a label and more than one key in `keys`, the labels."""
    said: dict[str, None] = {}
    for key in keys:
        group = key.partition(".")[0]
        many = sum(other.partition(".")[0] == group for other in keys) > 1
        if many and before.get(group, "") != after.get(group, ""):
            said[f"{group} {before.get(group)} -> {after.get(group)}"] = None
        else:
            said[f"{key} {saved.get(key, 'not set')} -> {now.get(key, 'not set')}"] = None
    return list(said)

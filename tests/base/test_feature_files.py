"""To change or delete a feature is to open its folder, its YAML, its tests, its page and the one
list (of features, their settings, their commands), and the few files that are named here."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.import_walk import PACKAGE
from xcloud.feature_list import all_features

LISTS = {"feature_list.py", "feature_settings.py", "features/__init__.py"}
MAX_FILES = 5

# The keys of a feature: its settings, what it defines, the kinds of its events. With them the
# files outside its folder that have one of these or import from the folder.
NAMED: dict[str, tuple[set[str], set[str]]] = {
    "autopilot": ({"autopilot", "Autopilot"}, set()),
    "privacy": ({"privacy", "Privacy", "security.privacy"}, set()),
    "sharding": (
        {".shard", "Sharder", "Sharding"},
        {
            "layout.py",  # the setting
            "job/needs.py",
            "job/strategy.py",  # what a checkpoint says of who held what
            "planner/trial.py",  # cuts no stages anew that are sharded
        },
    ),
    "tied": (
        {"ties_ends", "TiedGradients", "TiedEnds", "tied()", "embeddings=tie"},
        {
            "contracts/model.py",  # a stage's `tied`
            "models/causal.py",  # the setting
            "models/causal_stage.py",
            "job/needs.py",
        },
    ),
    "activation_cache": (
        {"activation_cache_mb", "cached_boundaries", "ActivationCaching"},
        {
            "pipeline/settings.py",  # the setting
            "job/approval.py",  # what stays on this machine
            "job/job.py",  # a sample keeps its ranks
            "rank/switching.py",  # changes no numbers of micro-batches then
            "security/policy.py",  # may_keep_rows
        },
    ),
    "leak_meter": (
        {"security.meter", "Meter", "LeakMeter", "LeakMeasurement"},
        {
            "security/policy.py",  # the setting
            "job/approval.py",
        },
    ),
    "preferences": (
        {"document_loss", "DocumentLoss", "PreferenceTuning", "PreferenceLoss"},
        {
            "contracts/model.py",  # what a last stage may learn by
            "models/causal.py",
            "models/causal_stage.py",
        },
    ),
    "sentinel": ({"on_departure", "departure", "DepartureWatch"}, set()),
    "weight_patches": (
        {"patches", "Patches", "weights_written", "WeightPatches", "PatchWriter"},
        set(),
    ),
    "until": (
        {".until", "Until", "RunUntil", "training.until"},
        {
            "pipeline/settings.py",  # the setting
            "features/preferences/feature.py",  # asks about the dev split, too
            "planner/trial.py",  # leaves it out
            "rank/task_data.py",
            "train/stage_rank.py",
        },
    ),
    "two_buffered": ({"TwoBuffered", "OverlappedUpdates"}, set()),
    # Kinds of work of their own, with settings in the core: who imports them.
    "checkpoints": (
        set(),
        {
            "entry.py",
            "launch/one_rank.py",  # whatever the role of a rank
            "study/runner.py",
            "train/building.py",
        },
    ),
    "replicas": (
        set(),
        {
            "api.py",  # the hook for DistributedDataParallel
            "planner/averaging_timer.py",
            "security/policy.py",
        },
    ),
    "one_way": (
        {"OneWayExperiment"},
        {
            "launch/one_rank.py",  # its roles
            "security/policy.py",
        },
    ),
}


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return what a file's code names: identifiers, attributes and functions (also as .x and
    x()), whole texts, and dotted names in texts with their last part."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Attribute(attr=name):
                found |= {name, f".{name}"}
            case ast.Name(id=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.FunctionDef(name=name):
                found |= {name, f"{name}()"}
            case ast.keyword(arg=str(name)) | ast.arg(arg=name):
                found.add(name)
            case ast.Constant(value=str(text)):
                dotted = re.findall(r"\w+(?:\.\w+)+", text)
                found |= {text, *dotted, *(name.rpartition(".")[2] for name in dotted)}
            case ast.ImportFrom(module=str(module)):
                found.add(module)
            case ast.alias(name=name):
                found.add(name)
    return frozenset(found)


def files_that_name(feature: str, keys: set[str]) -> set[str]:
    """Return the files outside the folder that import from it, or have one of its keys."""
    found = set[str]()
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        if file in LISTS or file.startswith(f"features/{feature}/"):
            continue
        names = names_in(path)
        home = f"features.{feature}"
        if names & keys or any(f"{home}." in f"{name}." for name in names):
            found.add(file)
    return found


@pytest.mark.parametrize("feature", NAMED)
def test_a_feature_is_named_in_its_folder_and_few_other_files(feature: str) -> None:
    keys, allowed = NAMED[feature]

    assert files_that_name(feature, keys) == allowed
    assert len(allowed) <= MAX_FILES


def test_every_folder_of_features_is_counted_and_stands_in_the_list() -> None:
    folders = {path.parent.name for path in (PACKAGE / "features").glob("*/__init__.py")}
    listed = {type(feature).__module__.split(".")[2] for feature in all_features()}

    assert folders == NAMED.keys()
    # Every run has checkpoints; a one-way job is a kind of job, not a feature of a pipeline.
    assert folders - listed == {"checkpoints", "one_way"}


def test_a_planner_needs_no_autopilot() -> None:
    for path in (PACKAGE / "planner").glob("*.py"):
        assert not any("features.autopilot" in name for name in names_in(path)), path

"""To change or delete a feature is to open its folder, its YAML, its tests, its page and the one
list (of features, their settings, their commands), and the few files that are named here. Its
tests are tests/features/test_NAME*.py, and NAME_rows.py, what shared tests know of it."""

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
            "security/audit.py",  # says what measures it
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
        {
            *(".patches", "training.patches", "Patches", "weights_written"),
            *("WeightPatches", "PatchWriter"),
        },
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


# The other tests that name a feature. What tests of all features need stands in its NAME_rows.py.
# Replicas, one-way jobs and checkpoints are kinds of work, of which tests everywhere are made.
IN_TESTS: dict[str, set[str]] = {
    "sentinel": set(),
    "autopilot": set(),
    "privacy": set(),
    "weight_patches": {"features/test_privacy.py"},  # which refuses both
    "until": {"job/test_policy_fuzz.py", "models/test_protocol_gpt.py"},
    "two_buffered": {"combinations.py", "trainers.py"},
    "preferences": {"models/test_far_device.py", "tasks/test_preferences.py"},
    "tied": {
        *("combinations.py", "features/test_sharding.py", "pipelines.py", "runs/test_changes.py"),
        "trainers.py",
    },
    "sharding": {"planner/test_planning.py", "planner/test_trial.py", "runs/test_causal_run.py"},
    "leak_meter": {
        *("features/test_owners_features.py", "runs/test_changes.py"),
        *("features/test_two_buffered.py", "runs/test_causal_run.py"),
        *("security/test_defences.py", "security/test_visibility.py"),
    },
    "activation_cache": {
        *("combinations.py", "features/test_autopilot.py", "features/test_owners_features.py"),
        *("job/test_conf.py", "pipelines.py", "rank/test_switching.py", "runs/test_causal_run.py"),
        *("runs/test_changes.py", "security/test_policy.py", "simulator/test_pricing.py"),
    },
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
                # An override: key=value, group/key=choice.
                dotted += [word.replace("/", ".") for word in re.findall(r"([\w./]+)=", text)]
                # a.b.c names a.b as well, unless it is a file.
                names = [n.split(".") for n in dotted if not n.endswith((".md", ".py"))]
                dotted = [".".join(n[:end]) for n in names for end in range(1, len(n) + 1)]
                found |= {text, *dotted, *(name.rpartition(".")[2] for name in dotted)}
            case ast.ImportFrom(module=str(module)):
                found.add(module)
            case ast.alias(name=name):
                found.add(name)
    return frozenset(found)


@cache
def named_homes(path: Path) -> str:
    """Return the names of a file that may lie in a feature's folder, a line each."""
    return "".join(f"{name}.\n" for name in names_in(path) if "features." in name)


def files_that_name(feature: str, keys: set[str], root: Path = PACKAGE) -> set[str]:
    """Return the files outside the folder that import from it, or have one of its keys."""
    found = set[str]()
    own = (f"features/{feature}/", f"features/test_{feature}", f"features/{feature}_rows.py")
    for path in root.rglob("*.py"):
        file = path.relative_to(root).as_posix()
        if file in LISTS or file.startswith(own):
            continue
        if names_in(path) & keys or f"features.{feature}." in named_homes(path):
            found.add(file)
    return found


@pytest.mark.parametrize("feature", NAMED)
def test_a_feature_is_named_in_its_folder_and_few_other_files(feature: str) -> None:
    keys, allowed = NAMED[feature]

    assert files_that_name(feature, keys) == allowed
    assert len(allowed) <= MAX_FILES


@pytest.mark.parametrize("feature", IN_TESTS)
def test_a_feature_is_named_in_its_own_tests_and_few_others(feature: str) -> None:
    keys, _ = NAMED[feature]
    tests = Path(__file__).parents[1]
    found = files_that_name(feature, keys, root=tests) - {"base/test_feature_files.py"}
    # Those of a feature that is deleted go with it.
    assert found == {file for file in IN_TESTS[feature] if (tests / file).exists()}


def test_every_folder_of_features_is_counted_and_stands_in_the_list() -> None:
    folders = {path.parent.name for path in (PACKAGE / "features").glob("*/__init__.py")}
    listed = {type(feature).__module__.split(".")[2] for feature in all_features()}

    assert folders == NAMED.keys()
    # Every run has checkpoints; a one-way job is a kind of job, not a feature of a pipeline.
    assert folders - listed == {"checkpoints", "one_way"}

"""To change or delete a feature is to open its folder, its YAML, its tests, its page and the one
list, and the few files that are named here."""

import re

import pytest

from tests.import_walk import PACKAGE
from xcloud.feature_list import all_features

LIST = "feature_list.py"
MAX_FILES = 4

# What names a feature: the keys of its settings, its classes and functions, the kinds of its
# events. With it the files that name it outside its folder.
NAMED = {
    "autopilot": (
        r"(?i)autopilot",
        {
            "job/job.py",  # the setting
            "features/one_way/job.py",  # a kind of job that has none
            "planner/trial.py",  # goes through the choices of a Tour
            "security/policy.py",  # what a file from elsewhere may build
        },
    ),
    "privacy": (
        r"(?<!docs/)\bprivacy\b|\bPrivacy|PrivateGradients",
        {
            "security/policy.py",  # the setting
            "security/defences.py",  # the mathematics
            "job/needs.py",  # what it does not go together with
            "features/checkpoints/resume.py",  # what a changed setting means for a resumed run
        },
    ),
    "sharding": (
        r"\.shard\b|\bshard: bool|Sharder\b|Sharding\b",
        {
            "layout.py",  # the setting
            "job/needs.py",
            "job/strategy.py",  # what a checkpoint says of who held what
            "planner/trial.py",  # cuts no stages anew that are sharded
        },
    ),
    "tied": (
        r"ties_ends|[Tt]ied_?[Gg]radients|TiedEnds|\btied\(|embeddings=tie|\"tied\"",
        {
            "contracts/model.py",  # a stage's `tied`
            "models/causal.py",  # the setting
            "models/causal_stage.py",
            "job/needs.py",
        },
    ),
    "activation_cache": (
        r"activation_cache|cached_boundaries|CachingPipeline|Activation(Cache|Caching)",
        {
            "pipeline/settings.py",  # the setting
            "job/job.py",  # a sample keeps its ranks
            "features/autopilot/feature.py",  # changes no numbers of micro-batches then
            "security/policy.py",  # may_keep_rows
        },
    ),
    "leak_meter": (
        r"leak_meter|Leak(Meter|Measurement|Observers)|leak_observers|security\.meter|\bMeter\b",
        {
            "security/policy.py",  # the setting
            "__main__.py",  # a command
        },
    ),
    "preferences": (
        r"features\.preferences|PreferenceTuning|PreferenceLoss|document_loss|DocumentLoss",
        {
            "contracts/model.py",  # what a last stage may learn by
            "models/causal.py",
            "models/causal_stage.py",
        },
    ),
    "sentinel": (
        r"(?i)sentinel|DepartureWatch|on_departure|\"departure\"",
        {
            "security/policy.py",  # the setting
            "record/intake.py",  # the fields of its event
            "show/monitor.py",  # calls launch.on_event
        },
    ),
    "weight_patches": (
        r"weight_patches|WeightPatches|PatchWriter|\bPatches\b|\"weights_written\"",
        {
            "pipeline/settings.py",  # the setting
            "security/policy.py",  # what a file from elsewhere may build
            "record/intake.py",  # the fields of its event
            "__main__.py",  # a command
        },
    ),
    "two_buffered": (r"(?i)two_?buffered|OverlappedUpdates", {"security/policy.py"}),
    # Kinds of work of their own, with settings in the core: who imports them.
    "checkpoints": (
        r"features\.checkpoints",
        {
            "entry.py",
            "launch/one_rank.py",  # whatever the role of a rank
            "study/runner.py",
            "train/building.py",
        },
    ),
    "replicas": (
        r"features\.replicas",
        {
            "api.py",  # the hook for DistributedDataParallel
            "planner/averaging_timer.py",
            "security/policy.py",
        },
    ),
    "one_way": (
        r"features\.one_way|OneWayExperiment",
        {
            "launch/one_rank.py",  # its roles
            "security/policy.py",
        },
    ),
}


def files_that_name(feature: str, words: str) -> set[str]:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        is_own = file == LIST or file.startswith(f"features/{feature}/")
        if not is_own and re.search(words, path.read_text(encoding="utf-8")):
            found.add(file)
    return found


@pytest.mark.parametrize("feature", NAMED)
def test_a_feature_is_named_in_its_folder_and_few_other_files(feature: str) -> None:
    words, allowed = NAMED[feature]

    assert files_that_name(feature, words) == allowed
    assert len(allowed) <= MAX_FILES


def test_every_folder_of_features_is_counted_and_stands_in_the_list() -> None:
    folders = {path.parent.name for path in (PACKAGE / "features").glob("*/__init__.py")}
    listed = {type(feature).__module__.split(".")[2] for feature in all_features()}

    assert folders == NAMED.keys()
    # Every run has checkpoints; a one-way job is a kind of job, not a feature of a pipeline.
    assert folders - listed == {"checkpoints", "one_way"}

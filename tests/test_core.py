"""The core is what a plain pipeline over two clouds executes, apart from its task, model and
codecs. It imports no feature. `benchmarks/files_visited.py` traces such a run.
"""

import ast
from pathlib import Path

from tests.import_walk import MODULES, PACKAGE, own_imports

CORE = tuple(
    """
__main__
base.errors base.project base.settings
cluster.frame cluster.gloo_link cluster.layout cluster.link
cluster.link_end cluster.link_profile cluster.transport
comm.channel comm.compression comm.state comm.step_clock
contracts.model
job.config job.experiment job.job
join.agreement
launch.local launch.processes launch.rank_process
parallel.control parallel.exchange parallel.part parallel.pipeline
parallel.schedule
rank.export rank.parts rank.role rank.stage_rank rank.task_data
record.events record.files record.intake record.reporter
record.summary
training.batch_plan training.settings training.trainer
watch.monitor wire.ends wire.wiring
""".split()
)
COMPOSED = (
    "rank.parts", "launch.rank_process", "job.experiment", "job.job", "wire.wiring",
)  # fmt: skip
"""The lists of what there is: parts, kinds of job, settings and what they need, ways to
join, links."""

FEATURES = (
    "cluster.one_way_layout", "parallel.activation_cache", "comm.compression_plans",
    "comm.tensor_codec", "contracts.one_way_parts", "electra", "job.needs", "job.one_way",
    "join.restarts", "parallel.averaging", "parallel.gradient_averaging",
    "parallel.one_forward_one_backward", "parallel.hub",
    "parallel.local_updates", "parallel.merging", "parallel.one_way",
    "parallel.within_cloud", "parallel.strategy", "rank.gradient_parts", "plan", "planner",
    "rank.autopilot", "rank.leaks", "rank.one_way", "rank.told_sizes", "launch.ranks_in_threads",
    "rank.reports", "record.checkpoints", "record.further_figures",
    "security.defences", "security.leak_meter",
    "survive.checkpointing", "survive.common_step", "survive.resume", "sweep",
    "training.pinned_batches", "use", "watch.following", "wire.further_ends",
)  # fmt: skip


def is_feature(module: str) -> bool:
    return any(module == feature or module.startswith(f"{feature}.") for feature in FEATURES)


def test_files_of_the_core_exist() -> None:
    assert set(CORE) <= MODULES.keys(), "renamed or merged: put the new name into CORE"


def test_features_named_here_exist_and_are_not_of_the_core() -> None:
    for feature in FEATURES:
        assert any(name == feature or name.startswith(f"{feature}.") for name in MODULES), feature
    assert not [name for name in CORE if is_feature(name)]


def feature_imports() -> set[str]:
    return {
        f"{name} -> {module}"
        for name in CORE
        if name in MODULES and name not in COMPOSED
        for module in own_imports(MODULES[name])
        if is_feature(module)
    }


def test_no_file_of_the_core_imports_a_feature() -> None:
    assert feature_imports() == set()


KINDS = {
    "Experiment", "OneWayExperiment", "Job", "GradientAveraging", "LocalUpdates", "Averaging",
    "GPipe", "OneForwardOneBackward", "ZeroBubble", "StageRank", "ConsumerRank", "ProducerRank",
}  # fmt: skip


def asked_kinds(path: Path) -> set[str]:
    """What a file tells apart by isinstance and does not define itself."""
    tree = ast.parse(path.read_text())
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return (KINDS - own) & {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        for name in ast.walk(node.args[1])
        if isinstance(name, ast.Name)
    }


def test_kinds_of_job_and_strategy_are_told_apart_in_their_own_files() -> None:
    assert [str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if asked_kinds(p)] == []

"""The core is what a plain pipeline over two clouds executes, apart from its task, model and
codecs: small enough to be held by one engineer, and without any feature.
`benchmarks/files_visited.py` traces such a run.
"""

import ast
from collections.abc import Iterable, Iterator
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
SERVICES = tuple(
    """
parallel.strategy rank.checkpoints record.tracking
security.policy security.wire_audit survive.checkpointing survive.saving
watch.display
""".split()
)
"""What such a run goes through besides, and could do without: checkpoints, a tracker, what is
shown and recorded, a cloud's policy."""

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


def num_lines(names: Iterable[str]) -> int:
    return sum(len(MODULES[name].read_text().splitlines()) for name in names)


def definitions(kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[tuple[str, ast.AST]]:
    for name in sorted(MODULES.keys() & set(CORE)):
        for node in ast.walk(ast.parse(MODULES[name].read_text())):
            if isinstance(node, kind):
                yield f"{name}.{node.name}", node  # type: ignore[attr-defined]


def too_many(found: dict[str, int], most: int) -> dict[str, int]:
    return {name: number for name, number in found.items() if number > most}


def test_the_core_can_be_held_by_one_engineer() -> None:
    assert len(CORE) <= 44
    assert num_lines(CORE) <= 9_000


def test_what_a_run_could_do_without_stays_small() -> None:
    assert not set(SERVICES) & set(CORE)
    assert len(SERVICES) <= 8
    assert num_lines(SERVICES) <= 2_076


def is_feature(module: str) -> bool:
    return any(module == feature or module.startswith(f"{feature}.") for feature in FEATURES)


def test_files_of_the_core_exist() -> None:
    assert {*CORE, *SERVICES} <= MODULES.keys(), "renamed or merged: put the new name into CORE"


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


def test_functions_of_the_core_fit_a_screen() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    lengths = {}
    for name, node in definitions(kinds):
        assert isinstance(node, kinds) and node.end_lineno is not None
        lengths[name] = node.end_lineno - node.lineno + 1

    assert too_many(lengths, 50) == {}


def test_nothing_of_the_core_takes_more_than_8_parameters() -> None:
    counts = {}
    for name, node in definitions(ast.FunctionDef):
        assert isinstance(node, ast.FunctionDef)
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        counts[name] = len([n for n in names if n not in ("self", "cls")])

    assert too_many(counts, 8) == {}


def test_no_class_of_the_core_has_more_than_10_fields() -> None:
    counts = {}
    for name, node in definitions(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        fields = {
            entry.target.id
            for entry in node.body
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
        }
        for target in ast.walk(node):
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                if isinstance(target.value, ast.Name) and target.value.id == "self":
                    fields.add(target.attr)
        counts[name] = len(fields)

    assert too_many(counts, 10) == {}


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

"""Who may import whom (docs/architecture.md): every file, no cycles, libraries in their places."""

import ast
import re
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.import_walk import (
    FILES,
    MODULES,
    PACKAGE,
    SCRIPTS,
    imports,
    missing_imports,
    own_imports,
    parsed,
)

EVERYWHERE = {"base"}
LEVELS = (  # a room may import itself, what stands in a lower line, and EVERYWHERE
    {"", "__main__"},  # "": the package's own functions
    {"api"},
    {"study", "entry", "evaluate"},
    {"planner", "use", "doctor"},
    {"launch"},
    {"train"},
    {"show"},
    {"experiment"},
    {"feature_list"},
    {"features"},  # each folder of it is a room: features never import each other
    {"rank"},
    {"simulator"},
    {"job"},
    {"models"},
    {"tasks"},
    {"pretrained", "demo"},
    {"pipeline"},
    {"contracts"},
    {"security"},
    {"feature_settings"},  # with the settings.py of each feature
    {"comm"},
    {"tracking"},
    {"record"},
    {"layout"},
    {"line"},
    {"net"},
)
HYDRA = {
    *("job/config.py", "job/given.py", "launch/local.py"),
    "planner/trial.py",
    "job/catalogue.py",
    "entry.py",
    "base/overrides.py",
}
MLFLOW = {"tracking/tracker.py", "tracking/mlflow_store.py"}


def room_of(module: str) -> str:
    """Return the room of a module: its first name, of a feature its folder. The settings of
    features stand lower than features do, so that a job may have them."""
    names = module.split(".")
    if names[0] == "features" and module in own_imports(MODULES["feature_settings"]):
        return "feature_settings"
    return ".".join(names[:2]) if names[0] == "features" else names[0]


def level(room: str) -> int:
    return next(i for i, rooms in enumerate(LEVELS) if room.split(".")[0] in rooms)


def upward() -> set[tuple[str, str]]:
    """Return (module, imported module) of every import against the arrows."""
    found = set()
    for module, path in MODULES.items():
        room = room_of(module)
        for name in own_imports(path):
            target = room_of(name)
            if target in EVERYWHERE or target == room or name == "":
                continue
            if room in EVERYWHERE or level(target) <= level(room):
                found.add((module, name))
    return found


def test_every_room_has_its_place() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    rooms -= {"__init__"}
    assert rooms - EVERYWHERE == set().union(*LEVELS) - {""}


def test_arrows_go_one_way() -> None:
    assert upward() == set()


def test_no_module_imports_itself_over_others() -> None:
    TopologicalSorter({name: own_imports(path) for name, path in MODULES.items()}).prepare()


def test_libraries_stay_where_they_belong() -> None:
    for path in FILES:
        check_libraries(path)


def check_libraries(path: Path) -> None:
    relative = path.relative_to(PACKAGE).as_posix()
    room = relative.split("/")[0]
    used = {name.split(".")[0] for name in imports(path)}
    if relative not in HYDRA:
        assert not used & {"hydra", "omegaconf"}, relative
    if room not in ("models", "tasks", "pretrained.py"):
        assert not used & {"transformers", "datasets"}, relative
    if relative not in MLFLOW:
        assert "mlflow" not in used, relative
    assert not used & {"pickle", "dill", "cloudpickle"}, relative
    if room == "comm":
        assert "torch.distributed" not in imports(path), relative


def test_a_layout_needs_no_torch() -> None:
    for name in ("layout", "features.one_way.layout", "net.link_profile"):
        assert "torch" not in {n.split(".")[0] for n in imports(MODULES[name])}


def test_benchmarks_and_experiments_import_what_exists() -> None:
    assert SCRIPTS
    assert [name for path in SCRIPTS for name in missing_imports(path)] == []


def test_an_import_of_what_does_not_exist_is_seen(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import xcloud.gone\nfrom xcloud.comm import precision\nfrom xcloud.gone import a\n"
        "def inside():\n    from xcloud.comm.precision import Cast, Gone\n"
    )
    assert missing_imports(script) == [
        "script.py:1: xcloud.gone",
        "script.py:3: xcloud.gone.a",
        "script.py:5: xcloud.comm.precision.Gone",
    ]


def test_every_form_of_import_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import torch.nn as nn\nfrom xcloud import base\nfrom xcloud.comm import frame\n"
        "def inside():\n    from xcloud.record.events import Event\n"
    )
    assert own_imports(file) == {"base", "comm", "record.events"}
    assert "torch.nn" in imports(file)
    relative = tmp_path / "relative.py"
    relative.write_text("from . import base\n")
    with pytest.raises(AssertionError, match="imports are absolute here"):
        imports(relative)


def test_an_import_by_name_is_seen_as_well(tmp_path: Path) -> None:
    """A circle of modules stays one, however they import each other."""
    file = tmp_path / "module.py"
    file.write_text(
        "import importlib\nfrom importlib import import_module\n"
        "def inside(name):\n    importlib.import_module('xcloud.record.events')\n"
        "    import_module('xcloud.comm.channel').Channel\n    import_module(name)\n"
        "    __import__('xcloud.net.frame')\n"
    )
    assert own_imports(file) == {"record.events", "comm.channel", "net.frame"}


def targets_of(folder: Path) -> dict[str, str]:
    """Return what the YAML files of a folder build, by full name, with the file that names it."""
    return {
        name: str(path.relative_to(folder))
        for path in sorted(folder.rglob("*.yaml"))
        for name in re.findall(r"_target_:\s*([\w.]+)", path.read_text(encoding="utf-8"))
    }


def test_settings_name_classes_of_the_package_only() -> None:
    targets = targets_of(PACKAGE.parent / "conf")
    assert len(targets) > 50
    for name, file in targets.items():
        assert name.startswith(("xcloud.", "hydra_plugins.xcloud_")), f"conf/{file} names {name}"


def test_a_class_from_outside_is_seen_in_settings(tmp_path: Path) -> None:
    (tmp_path / "meter").mkdir()
    (tmp_path / "meter" / "own.yaml").write_text("a: 1\nb: {_target_: experiments.one.Own}\n")
    assert targets_of(tmp_path) == {"experiments.one.Own": "meter/own.yaml"}


def test_nothing_is_imported_from_a_test() -> None:
    """What two files use lies in a helper file (tests/README.md)."""
    tests = Path(__file__).parents[1]
    found = [
        f"{path.name}: {line}"
        for path in sorted(tests.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r"(from|import) tests\.(\w+\.)?test_|from tests\S* import .*\btest_", line)
    ]
    assert found == []


KINDS = {
    "Experiment", "OneWayExperiment", "Job", "GradientAveraging", "LocalUpdates", "Averaging",
    "GPipe", "OneForwardOneBackward", "ZeroBubble", "StageRank", "ConsumerRank", "ProducerRank",
}  # fmt: skip


def asked_kinds(path: Path) -> set[str]:
    """What a file tells apart by isinstance and does not define itself."""
    text = path.read_text()
    if not any(kind in text for kind in KINDS):
        return set()
    tree = parsed(path)
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


def depths(files: Iterable[Path], base: str) -> dict[str, int]:
    """Return how many classes of these files stand above each class that inherits from `base`."""
    bases: dict[str, set[str]] = {}
    for path in files:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(one).partition("[")[0] for one in node.bases}

    def depth(name: str) -> int:
        """Return how far below `base` a class stands at most; -1 if it does not."""
        if name == base:
            return 0
        above = [depth(one) for one in bases.get(name, ())]
        return 1 + max([one for one in above if one >= 0], default=-2)

    return {name: depth(name) for name in bases if depth(name) > 0}


def test_classes_of_jobs_and_tasks_inherit_from_two_at_most() -> None:
    jobs = depths([path for path in FILES if path.parent.name != "tasks"], base="Job")
    assert jobs == {"PipelineJob": 1, "Experiment": 2, "OneWayExperiment": 1}
    files = [path for path in FILES if path.parent.name == "tasks"]
    tasks = depths(files, base="TextTask")
    assert {name for name, depth in tasks.items() if depth == 2} == {"CrossLingual", "Preferences"}
    assert max([*tasks.values(), *depths(files, base="Source").values()]) == 2


def test_depth_of_inheritance_is_counted_over_all_bases(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "class A(ABC): ...\nclass B(A): ...\nclass C(Generic[T], B): ...\n"
        "class D(A, C[int]): ...\nclass Other(ABC): ...\n"
    )
    assert depths([file], base="A") == {"B": 1, "C": 2, "D": 3}

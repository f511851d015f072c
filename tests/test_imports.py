"""Who may import whom (docs/architecture.md): every file, no cycles, libraries in their places."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "xcloud"
EVERYWHERE = {"errors", "checks", "project"}
LEVELS = (  # a room may import itself, what stands in a lower line, and EVERYWHERE
    {"__main__"},
    {"sweep"},
    {"run"},
    {"job", "report"},  # what is to run, and what is shown of it, know nothing of each other
    {"tasks", "models", "electra", "training", "plan"},
    {"demo_corpus", "hub", "parallel"},
    {"comm", "record"},
    {"security"},
    {"cluster"},
)
SIDE_BY_SIDE = {
    "electra": {"models", "tasks", "training"}
}  # rooms of one line that another may use
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "_hydra" not in path.parts)
HYDRA = {"job/config.py", "job/follow_up.py", "run/local.py"}
MLFLOW = {"record/tracking.py", "record/mlflow_store.py"}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_of(path): path for path in FILES}


def imports(path: Path) -> Iterator[str]:
    """Absolute names of everything imported anywhere in a file, functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            name = node.module or ""
            for alias in node.names:
                inner = f"{name}.{alias.name}"
                yield inner if inner.removeprefix("xcloud.") in MODULES else name


def own_imports(path: Path) -> set[str]:
    """Modules of this package that a file imports, without `xcloud.`."""
    names = {n.removeprefix("xcloud.") for n in imports(path) if n.startswith("xcloud.")}
    return {name for name in names if name in MODULES}


def level(room: str) -> int:
    return next(i for i, rooms in enumerate(LEVELS) if room in rooms)


def test_every_room_has_its_place() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert rooms - {"__init__"} - EVERYWHERE == set().union(*LEVELS) & rooms


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_go_one_way(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in own_imports(path):
        target = name.split(".")[0]
        if target in EVERYWHERE or target == room or name == "":
            continue
        assert room not in EVERYWHERE, f"{room} is for every room and imports {name}"
        beside = target in SIDE_BY_SIDE.get(room, ())
        assert beside or level(target) > level(room), f"{room} imports {name}"


def test_no_module_imports_itself_over_others() -> None:
    TopologicalSorter({name: own_imports(path) for name, path in MODULES.items()}).prepare()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_libraries_stay_where_they_belong(path: Path) -> None:
    relative = path.relative_to(PACKAGE).as_posix()
    room = relative.split("/")[0]
    used = {name.split(".")[0] for name in imports(path)}
    if relative not in HYDRA:
        assert not used & {"hydra", "omegaconf"}
    if room not in ("models", "tasks", "hub"):
        assert not used & {"transformers", "datasets"}
    if relative not in MLFLOW:
        assert "mlflow" not in used
    assert not used & {"pickle", "dill", "cloudpickle"}
    if room == "comm":
        assert "torch.distributed" not in set(imports(path))


def test_a_layout_needs_no_torch() -> None:
    for name in ("clouds", "layout", "one_way_layout", "link_profile"):
        assert "torch" not in {n.split(".")[0] for n in imports(MODULES[f"cluster.{name}"])}

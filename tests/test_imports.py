"""Who may import whom (docs/architecture.md): arrows go one way only."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "xcloud"
# A package may import those behind it, itself, and the plain modules below.
ORDER = ("models", "tasks", "training", "parallel", "comm", "security", "cluster")
SIBLINGS = {"models", "tasks", "training"}  # these do not import each other
ANYWHERE = {"errors", "checks", "project", "demo_corpus", "hub_access", "packaged_checkpoint"}
HYDRA = {"experiment.py", "follow_up.py", "local_run.py", "unknown_keys.py"}
# What happened, and what a person sees of it; beside these only what may be used anywhere.
ROOMS = {
    "record": {"record", "reporter", "comm", "cluster"},
    "report": {"report", "record"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_go_one_way(path: Path) -> None:
    parts = path.relative_to(PACKAGE).parts
    if parts[0] not in ORDER:
        return
    layer = parts[0]
    for name in imports(path):
        if not name.startswith("xcloud."):
            continue
        target = name.split(".")[1]
        if target in ANYWHERE or target == layer:
            continue
        assert target in ORDER, f"{layer} imports {name}, which uses every layer"
        assert ORDER.index(target) > ORDER.index(layer), f"{layer} imports {name}"
        assert not (layer in SIBLINGS and target in SIBLINGS), f"{layer} imports {name}"


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.parent.name in ROOMS], ids=lambda p: p.name
)
def test_what_records_knows_neither_what_shows_nor_what_runs(path: Path) -> None:
    room = path.parent.name
    used = {name.split(".")[1] for name in imports(path) if name.startswith("xcloud.")}

    assert used <= ROOMS[room] | ANYWHERE, f"{room} imports {used - ROOMS[room] - ANYWHERE}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_libraries_stay_where_they_belong(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    used = {name.split(".")[0] for name in imports(path)}
    if relative.name not in HYDRA and relative.parts[0] != "_hydra":
        assert not used & {"hydra", "omegaconf"}
    if relative.parts[0] not in ("models", "tasks"):
        assert not used & {"transformers", "datasets"}
    if relative.name not in ("tracking.py", "mlflow_store.py"):
        assert "mlflow" not in used
    assert not used & {"pickle", "dill", "cloudpickle"}
    assert not any(name.startswith("hydra._internal") for name in imports(path))
    if relative.parts[0] == "comm":
        assert "torch.distributed" not in imports(path)


def test_a_layout_needs_no_torch() -> None:
    for name in ("layout.py", "link_profile.py"):
        assert "torch" not in {n.split(".")[0] for n in imports(PACKAGE / "cluster" / name)}

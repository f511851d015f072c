"""Who may import whom (docs/architecture.md): every file, no cycles, libraries in their places."""

import re
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
)

EVERYWHERE = {"base"}
LEVELS = (  # a room may import itself, what stands in a lower line, and EVERYWHERE
    {"", "__main__"},  # "": the package's own functions
    {"api"},
    {"claims"},
    {"sweep", "entry"},
    {"planner", "use"},
    {"launch"},
    {"watch", "rank"},
    {"join"},
    {"survive"},
    {"wire"},
    {"job", "report"},  # what is to run, and what is shown of it, know nothing of each other
    {"tasks", "models", "electra", "training", "plan"},
    {"demo", "hub", "parallel"},
    {"contracts"},
    {"comm", "record"},
    {"security"},
    {"cluster"},
)
SIDE_BY_SIDE = {  # rooms of one line that another may use
    "electra": {"models", "tasks", "training"},
    "models": {"training"},  # its optimizer, to pretrain a backbone
}
HYDRA = {
    *("job/config.py", "job/given.py", "launch/local.py"),
    "planner/trial.py",
    "job/catalogue.py",
    "entry.py",
    "base/overrides.py",
}
MLFLOW = {"record/tracking.py", "record/mlflow_store.py"}


def level(room: str) -> int:
    return next(i for i, rooms in enumerate(LEVELS) if room in rooms)


def test_every_room_has_its_place() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert rooms - {"__init__"} - EVERYWHERE == set().union(*LEVELS) & rooms


def test_arrows_go_one_way() -> None:
    for path in FILES:
        check_arrows(path)


def check_arrows(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py").removeprefix("__init__")
    for name in own_imports(path):
        target = name.split(".")[0]
        if target in EVERYWHERE or target == room or name == "":
            continue
        assert room not in EVERYWHERE, f"{room} is for every room and imports {name}"
        beside = target in SIDE_BY_SIDE.get(room, ())
        assert beside or level(target) > level(room), f"{room} imports {name} in {path}"


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
    if room not in ("models", "tasks", "hub.py"):
        assert not used & {"transformers", "datasets"}, relative
    if relative not in MLFLOW:
        assert "mlflow" not in used, relative
    assert not used & {"pickle", "dill", "cloudpickle"}, relative
    if room == "comm":
        assert "torch.distributed" not in imports(path), relative


def test_a_layout_needs_no_torch() -> None:
    for name in ("layout", "one_way_layout", "link_profile"):
        assert "torch" not in {n.split(".")[0] for n in imports(MODULES[f"cluster.{name}"])}


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


def test_nothing_is_imported_from_a_test() -> None:
    """What two files use lies in a helper file (tests/README.md)."""
    tests = Path(__file__).parent
    found = [
        f"{path.name}: {line}"
        for path in sorted(tests.glob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r"(from tests\.test_|import tests\.test_|from tests import .*\btest_)", line)
    ]
    assert found == []

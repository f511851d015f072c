"""Finding the project and its commit, and how the tests themselves run."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from xcloud import __version__
from xcloud.base import project


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the project, with the package in it."""
    (tmp_path / "xcloud").mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(project, "__file__", str(tmp_path / "xcloud" / "base" / "project.py"))
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def test_root_is_beside_the_package() -> None:
    assert (project.project_root() / "xcloud" / "base" / "project.py").is_file()


def test_root_is_the_current_folder_when_installed_elsewhere(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert project.project_root() == checkout
    (checkout / "pyproject.toml").unlink()
    monkeypatch.chdir(checkout / "xcloud")
    assert project.project_root() == checkout / "xcloud"
    assert project.commit() == "unknown"


def test_commit_is_unknown_outside_git_and_without_git(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert project.commit() == "unknown"
    monkeypatch.setenv("PATH", "")
    assert project.commit() == "unknown"


def test_commit_says_when_the_tree_is_dirty(checkout: Path) -> None:
    git(checkout, "init", "-q")
    assert project.commit() == "unknown"  # no commit yet
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "first")
    clean = project.commit()
    assert len(clean) >= 7 and int(clean, 16) >= 0

    (checkout / "new.py").touch()
    assert project.commit() == f"{clean}-dirty"


def test_the_citation_names_the_version_of_the_package() -> None:
    root = project.project_root()
    citation = yaml.safe_load((root / "CITATION.cff").read_text("utf-8"))
    packaging = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    assert citation["version"] == packaging["project"]["version"] == __version__


def test_the_lock_has_a_hash_for_each_constraint_but_torch() -> None:
    def lines(name: str) -> list[str]:
        text = (project.project_root() / name).read_text("utf-8")
        return [line for line in text.splitlines() if not line.startswith("#")]

    locked = [line.split(" --hash=sha256:") for line in lines("requirements.lock")]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for _, digest in locked)
    pinned = {name for name, _ in locked}
    constraints = {line for line in lines("constraints.txt") if not line.startswith("torch==")}
    assert {name.lower() for name in pinned} == {name.lower() for name in constraints}


def test_the_build_is_pinned_as_the_constraints_are() -> None:
    root = project.project_root()
    [needed] = tomllib.loads((root / "pyproject.toml").read_text())["build-system"]["requires"]
    assert needed in (root / "constraints.txt").read_text().splitlines()


def test_every_process_knows_which_tests_belong_together(request: pytest.FixtureRequest) -> None:
    """Otherwise they are spread one by one: module fixtures are made in each process, and tests
    that measure run side by side."""
    if hasattr(request.config, "workerinput"):
        assert request.node.nodeid.endswith("@test_project")

"""Finding the project and its commit."""

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

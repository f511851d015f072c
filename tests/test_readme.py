"""Commands of README and docs/commands.md are real: each `run.py` line builds, and files exist."""

import re
import shlex
from pathlib import Path

import pytest

from tests.configs import composed
from xcloud.job.config import job_from_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SHOWN = README + (ROOT / "docs" / "commands.md").read_text()
COMMANDS = sorted(
    {
        match.split("#")[0].strip()
        for match in re.findall(r"(?:^|`)(python run\.py [^`\n]*)", SHOWN, re.MULTILINE)
        if "resume=" not in match
    }
)


def test_the_readme_shows_commands() -> None:
    assert len(COMMANDS) > 12


@pytest.mark.parametrize("command", COMMANDS)
def test_every_run_command_builds_its_experiments(command: str) -> None:
    words = [word for word in shlex.split(command)[2:] if word != "-m"]
    choices = [
        word.split("=", 1)[1].split(",")
        if "," in word and "[" not in word
        else [word.split("=", 1)[1]]
        for word in words
    ]
    keys = [word.split("=", 1)[0] for word in words]
    for number in range(max(map(len, choices))):
        pairs = zip(keys, choices, strict=True)
        overrides = (f"{k}={c[min(number, len(c) - 1)]}" for k, c in pairs)
        job_from_config(composed(*overrides))


def test_every_page_that_the_readme_names_exists() -> None:
    pages = set(re.findall(r"`((?:docs|experiments|conf)/[\w./-]*)`", README))
    assert [page for page in pages if not (ROOT / page).exists()] == []


def test_ci_runs_the_readmes_test_command() -> None:
    command = next(line for line in README.splitlines() if "pytest -q" in line and "venv" in line)

    assert command in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"^([a-z_./]+\.py|[a-z_]+/) ", README, re.MULTILINE)))
)
def test_every_file_of_the_tree_exists(name: str) -> None:
    assert (ROOT / name).exists()

"""What README and docs show is real, and the pages build as a site."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import xcloud
from experiments.claims.archive import RunArchive
from tests.configs import composed
from tests.nightly import first_daily
from xcloud.feature_list import FIGURES
from xcloud.job.config import Settings
from xcloud.record.run_record import RunRecord

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *DOCS]
ELSEWHERE = re.compile(
    r"resume=|\bRUN/|mine\.json|majority_vote|one_at_a_time|'\$|\$T|--cfg|<|NAME|TASK"
)


def commands_in(pages: Iterable[Path]) -> set[str]:
    shown = "\n".join(page.read_text() for page in pages)
    return {
        match.split(" #")[0].split("   ")[0].strip()
        for match in re.findall(r"(?:^|`)(python run\.py [^`\n]*)", shown, re.MULTILINE)
        if not ELSEWHERE.search(match) and not match.endswith("\\") and "..." not in match
    }


OF_README = sorted(commands_in([ROOT / "README.md"]))
COMMANDS = [*OF_README, *sorted(commands_in(DOCS).difference(OF_README))]


def test_the_docs_show_commands() -> None:
    assert len(COMMANDS) > 30


@pytest.mark.parametrize("command", first_daily(COMMANDS, count=len(OF_README)))
def test_every_run_command_builds_its_experiments(command: str) -> None:
    words = [word for word in shlex.split(command)[2:] if word != "-m"]
    words = [word for word in words if not word.startswith(("hydra.", "plan=", "plan."))]
    choices = [
        word.split("=", 1)[1].split(",")
        if "," in word and "[" not in word and "{" not in word
        else [word.split("=", 1)[1]]
        for word in words
    ]
    keys = [word.split("=", 1)[0] for word in words]
    for number in {0, max(map(len, choices)) - 1}:
        pairs = zip(keys, choices, strict=True)
        overrides = (f"{k}={c[min(number, len(c) - 1)]}" for k, c in pairs)
        Settings.of(composed(*overrides))


def test_the_readmes_table_is_what_the_demo_printed_and_what_a_run_prints_today() -> None:
    shown = README.split("abnet_iwslt: finished", 1)[1].split("```", 1)[0]
    lines = ["abnet_iwslt: finished" + shown.splitlines()[0], *shown.splitlines()[1:]]
    run = RunArchive(ROOT / "records" / "demo").read()["AB-Net-seed1"]
    printed = {" ".join(line.split()) for line in run["run.log"].splitlines()}
    rows = RunRecord(json.loads(run["summary.json"]), FIGURES).markdown
    names = re.findall(r"^\| ([^|]+?) \|", rows, re.MULTILINE)
    assert [line for line in lines if line.strip() and " ".join(line.split()) not in printed] == []
    figures = shown.split(" cloud ")[0].splitlines()[1:]
    assert [f for f in figures if f.strip() and not f.strip().startswith(tuple(names))] == []


def test_the_functions_of_the_readmes_python_exist() -> None:
    code = README.split("```python\n", 1)[1].split("```", 1)[0]
    called = {
        node.attr
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "xcloud"
    }
    assert called == {"run", "sweep", "compress_ddp"} and called <= set(xcloud.__all__)
    read = set(re.findall(r"(?:result|point)\.(\w+)", code))
    assert read and [name for name in read - {"folder"} if not hasattr(xcloud.Result, name)] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        is_there = link.startswith("http") or (
            target.exists() and (not anchor or anchor in anchors(target))
        )
        broken += [] if is_there else [link]
    assert broken == []


OF_THE_READER = re.compile(r"NAME|TASK|majority_vote|one_at_a_time")  # that a page has written
NAMED = re.compile(
    r"(?<![\w/.])((?:docs|experiments|conf|records|tests|benchmarks|xcloud)/[\w./-]*\w)"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    """Full paths from the project's folder, and modules by their path below xcloud/."""
    quoted = re.findall(
        r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    )
    named = {path for text in quoted for path in NAMED.findall(text)}
    modules = {text for text in quoted if re.fullmatch(r"[a-z_]+(?:/[a-z_]+)*/[a-z_]+\.py", text)}
    named = {path for path in named if not OF_THE_READER.search(path)}
    modules = {path for path in modules if not OF_THE_READER.search(path)}
    missing = [path for path in named if not (ROOT / path).exists()]
    missing += [
        path
        for path in modules - named
        if not (ROOT / path).exists() and not (ROOT / "xcloud" / path).exists()
    ]
    assert sorted(missing) == []


CALLERS = [
    path
    for folder in ("xcloud", "conf", "tests", "experiments", "benchmarks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".yaml", ".md", ".toml"}
]


def test_every_page_that_code_and_settings_name_exists() -> None:
    missing = []
    for path in [*CALLERS, ROOT / "claims.toml", ROOT / "mkdocs.yml"]:
        for page, anchor in re.findall(
            r"docs/([\w-]+\.md)(?:#([\w-]+))?", path.read_text("utf-8")
        ):
            target = ROOT / "docs" / page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                missing.append(f"{path.relative_to(ROOT)}: {page}#{anchor}")
    assert missing == []


def test_ci_runs_the_readmes_test_command() -> None:
    command = next(line for line in README.splitlines() if "pytest -q" in line and "venv" in line)

    assert command in (ROOT / ".ci" / "run").read_text()


NOTEBOOK = json.loads((ROOT / "docs" / "first_hour.ipynb").read_text("utf-8"))


def test_the_notebook_is_ten_cells_without_outputs() -> None:
    assert len(NOTEBOOK["cells"]) == 10
    assert not any(cell.get("outputs") for cell in NOTEBOOK["cells"])


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_notebook_runs_from_its_first_cell_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, cell in enumerate(NOTEBOOK["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)

    assert names["result"].status == "finished" and len(names["points"]) == 3
    assert "bytes of gradients became" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.slow
def test_the_pages_build_as_a_site_without_a_warning(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert built.returncode == 0, built.stderr
    assert (tmp_path / "strategies" / "index.html").exists()

"""`python -m xcloud reproduce CLAIM`: run it, judge it by its rule, write the record: a folder
with everything that one reproduction of a claim was and came to.

OUT/record.json   claim, verdict, rows, commit, environment, digests of data
OUT/README.md     the same to read: question, command, table, verdict, what is missing
OUT/rows.jsonl    what has run; a command that was interrupted goes on with the other rows
OUT/runs.tar.gz   ROW-seedN/ (or ROW-roundN/): experiment.yaml, summary.json, run.log of each run

The project's own records, which docs/paper.md and the site show, are in records/CLAIM.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import pandas as pd

from xcloud.base.errors import ConfigError, DataError, RunFailed
from xcloud.base.overrides import readable
from xcloud.base.project import checkout, commit, module_paths, project_root, python_command
from xcloud.base.terminal import say, signals_to_stop
from xcloud.base.wording import meant
from xcloud.record.summary import read_summary
from xcloud.show.tables import cell_text, rendered
from xcloud.study.archive import RunArchive, figures_of, run_name
from xcloud.study.claims import (
    FILE,
    Claim,
    ResultRow,
    judge,
    read_claims,
    repeats_of,
)

FOLDER = "records"
RECORD_FILE = "record.json"
README = Path(__file__).with_name("record.md")
LIBRARIES = ("torch", "transformers", "tokenizers", "sacrebleu", "numpy")
KEPT_FILES = ("experiment.yaml", "summary.json", "run.log")


def main(words: Sequence[str] | None = None) -> int:
    about = "Run one claim, judge it by its rule, and write a record of all that it came to."
    parser = argparse.ArgumentParser("python -m xcloud reproduce", description=about)
    parser.add_argument("claim", help=f"a name in {FILE}")
    parser.add_argument("--quick", action="store_true", help="a run of minutes; judges nothing")
    parser.add_argument("--data", type=Path, help="the folder that holds the claim's data sets")
    places = "outputs/reproduced/CLAIM, with --quick outputs/quick/CLAIM"
    parser.add_argument("--out", type=Path, help=f"folder of the record; default: {places}")
    given = parser.parse_args(words)
    claims = read_claims(checkout("it runs the commands that claims.toml names") / FILE)
    if given.claim not in claims:
        there = f"{meant(given.claim, [*claims])} There are: {', '.join(claims)}"
        raise ConfigError(f"no claim {given.claim!r} in {FILE}{there}")
    claim = claims[given.claim]
    folder = given.data and given.data.resolve()  # runs begin in the project's folder
    data = _data(claim, folder)
    usual = Path("outputs", "quick" if given.quick else "reproduced", claim.name)
    out = (given.out or project_root() / usual).absolute()
    before = len(Rows(out).read())
    earlier = Record.read(out)
    if earlier and earlier.is_quick != given.quick:
        kind = "quick" if earlier.is_quick else "whole"
        raise ConfigError(f"{out} holds a {kind} run of {earlier.claim}; give another --out")
    if before and earlier and earlier.data != digests(data):
        raise ConfigError(f"{out} holds rows of other data than these; give another --out")
    note = earlier.note if before and earlier else ""

    def write() -> Record:
        now = datetime.now(UTC).isoformat(timespec="minutes")
        rows = Rows(out).read()
        record = made(claim, rows, data=data, at=now, quick=given.quick, note=note)
        if rows or not earlier:
            record.write(out, claim)
        return record

    write()  # so that whatever ends the run, its rows are known as those of a quick one
    minutes = "minutes" if given.quick else f"about {claim.machine_minutes} minutes"
    say(f"{claim.title}: {minutes} on two idle cores")
    try:
        _run(claim, folder, out=out, quick=given.quick)
    except SystemExit:
        say("\ninterrupted; the same command goes on with what is missing", error=True)
        raise
    finally:
        record = write()
    shutil.rmtree(out / "made", ignore_errors=True)
    say((out / "README.md").read_text(encoding="utf-8"))
    say(f"record: {out}")
    if before:
        say(f"{before} rows were there before and did not run now (another --out: all do)")
    return 0 if given.quick or record.verdict == "reproduced" else 1


def _data(claim: Claim, folder: Path | None) -> list[Path]:
    paths = [Path(folder or ".", name) for name in claim.needs]
    if lacking := [path.name for path in paths if folder is None or not path.exists()]:
        needed = f"claim {claim.name} needs {', '.join(lacking)}"
        where = f"not in {folder}" if folder else "not given"
        raise DataError(f"{needed}, {where}: give the folder that holds them with --data DIR")
    return paths


def _run(claim: Claim, data: Path | None, out: Path, quick: bool) -> None:
    more = claim.quick if quick else ()
    rows = Rows(out, data)
    if claim.module:
        given = {"DATA": str(data), "OUT": str(out)}
        words = [*(given.get(word, word) for word in claim.module), *more]
        if code := ended(python_command(*words)):
            raise RunFailed(f"python -m {' '.join(words)} ended with code {code}")
        return
    for seed in claim.seeds[:1] if quick else claim.seeds:
        for row, settings in claim.runs.items():
            words = [*claim.common, *settings, *more, f"seed={seed}"]
            for name, value in {"DATA": data, "OUT": out, "SEED": seed}.items():
                words = [word.replace(name, str(value)) for word in words]
            rows.add({"row": row, "seed": seed}, words)


def ended(command: Sequence[str], output: IO[str] | None = None) -> int:
    """Run a command in the project's folder and return its exit code.

    Raises SystemExit at Ctrl+C, which reaches it as well, or another signal to stop, which is
    passed on as SIGTERM, once it has saved what it can.
    """
    ends = [one for one in signals_to_stop() if one is not signal.SIGINT]
    usual = {one: signal.signal(one, lambda number, _: sys.exit(128 + number)) for one in ends}
    with subprocess.Popen(
        command, cwd=project_root(), stdout=output, stderr=output,
        env={**os.environ, **module_paths()},
    ) as process:  # fmt: skip
        try:
            return process.wait()
        except KeyboardInterrupt:
            with suppress(KeyboardInterrupt):  # a second one ends the run at once
                process.wait()
            raise SystemExit(130) from None
        except SystemExit:
            process.terminate()
            raise
        finally:
            for one, handler in usual.items():
                signal.signal(one, handler)


class Rows:
    """OUT/rows.jsonl, a line of JSON for each run of a study, and OUT/runs.tar.gz, what is kept of
    these runs. OUT/made is for what a study makes on its way; a record does not keep it."""

    def __init__(self, out: Path, data: Path | None = None) -> None:
        self._out = out.resolve()
        self._file = out.resolve() / "rows.jsonl"
        self._folders = {"OUT": self._out, **({"DATA": data.resolve()} if data else {}),
                         "PROJECT": project_root()}  # fmt: skip
        self.work = self._out / "made"

    def read(self) -> list[dict[str, Any]]:
        text = self._file.read_text(encoding="utf-8") if self._file.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def write(self, row: ResultRow) -> None:
        self._out.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "commit": commit()}, ensure_ascii=False) + "\n")

    def has(self, about: ResultRow) -> bool:
        return any(about.items() <= row.items() for row in self.read())

    def add(
        self, about: ResultRow, words: Sequence[str], figures: Sequence[str] | None = None
    ) -> None:
        """Run run.py with these words, unless there is such a row already. figures: those that
        mean something here, all by default. Raises RunFailed."""
        if self.has(about):
            return
        folder = self.work / run_name(about)
        say(f"{folder.name}: {' '.join(words)}\n  what it says: {folder}.log")
        self.keep(words, folder)
        found = figures_of(read_summary(folder))
        self.keep_files(about, folder)
        self.write({**about, **{name: found[name] for name in figures or found if name in found}})

    def keep_files(self, about: ResultRow, folder: Path) -> None:
        """Keep the files of a finished run, without the machine's folders in them, and remove its
        folder."""
        texts = {}
        for file in KEPT_FILES:
            if (folder / file).exists():
                text = (folder / file).read_text(encoding="utf-8")
                for word, path in {"RUN": folder.resolve(), **self._folders}.items():
                    text = text.replace(str(path), word)
                texts[file] = text
        RunArchive(self._out).add(run_name(about), texts)
        shutil.rmtree(folder)

    def keep(self, words: Sequence[str], folder: Path) -> None:
        """Run run.py into this folder, unless a run has finished there. Raises RunFailed."""
        if read_summary(folder).get("status") == "finished":
            return
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "run.py", *map(readable, [*words, f"hydra.run.dir={folder}"])]
        command += ["tracker=none"]
        said = folder.with_name(f"{folder.name}.log")
        said.parent.mkdir(parents=True, exist_ok=True)
        with said.open("w") as file:
            code = ended(command, file)
        if code:
            end = said.read_text("utf-8", errors="replace").strip()[-2000:]
            raise RunFailed(f"{' '.join(command)}\n{end}")
        said.replace(folder / "run.log")  # Hydra's own holds warnings only


@dataclass(frozen=True)
class Record:
    """is_quick: of the short run, which judges nothing. data: digests by file name. note: what
    must be known of this record, such as rows older than the rule."""

    claim: str
    made_at: str
    commit: str
    is_quick: bool
    verdict: str
    rows: Sequence[ResultRow]
    environment: Mapping[str, Any]
    data: Mapping[str, str]
    note: str = ""

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """Read the record; None where there is none. Raises DataError if it cannot be read."""
        path = folder / RECORD_FILE
        if not path.exists():
            return None
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise DataError(f"{path} is no record: {error}") from None

    @property
    def where(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.environment.items())

    def write(self, folder: Path, claim: Claim) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(vars(self), indent=1, ensure_ascii=False)
        (folder / RECORD_FILE).write_text(text + "\n", encoding="utf-8")
        (folder / "README.md").write_text(page(claim, self), encoding="utf-8")


def verdict_of(claim: Claim, rows: Sequence[ResultRow], *, is_quick: bool) -> str:
    """Say "reproduced" only if every rule is met by a whole run of every seed."""
    if is_quick:
        return "quick run: judges nothing"
    judged = judge(claim, rows)
    kinds = {"not reproduced": "no", "undecided": "undecided", "not run": "not run"}
    found = {what: [one.says for one in judged if one.met == met] for what, met in kinds.items()}
    said = (f"{what}: {'; '.join(says)}" for what, says in found.items() if says)
    fewest = min((one.found.num for one in judged if one.found), default=0)
    asked = len(claim.seeds)
    few = f", by {fewest} of {asked} {repeats_of(rows)}s" if fewest < asked else ""
    return "; ".join(said) or f"reproduced{few}"


def page(claim: Claim, record: Record) -> str:
    """Return the README of a record, with a column for each figure that any of its rows has."""
    cells = pd.DataFrame(record.rows, dtype=object).map(cell_text)
    judged = judge(claim, record.rows)
    return rendered(README, claim=claim, record=record, judged=judged, cells=cells)


def environment() -> dict[str, Any]:
    """Describe this machine: what a figure may depend on, rounding too."""
    from xcloud.planner.trial import processor  # torch takes a second

    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in LIBRARIES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count(),
    }


def digests(paths: Sequence[Path]) -> dict[str, str]:
    """Return the SHA-256 of every file in these folders, by its name there."""
    files = ((path, file) for path in paths for file in sorted(path.rglob("*")) if file.is_file())
    return {
        str(file.relative_to(path.parent)): hashlib.sha256(file.read_bytes()).hexdigest()
        for path, file in files
    }


def made(
    claim: Claim, rows: Sequence[ResultRow], data: Sequence[Path], at: str, quick: bool,
    note: str = "",
) -> Record:  # fmt: skip
    verdict = verdict_of(claim, rows, is_quick=quick)
    commits = {row["commit"] for row in rows}
    of = commits.pop() if len(commits) == 1 else "of each row: below"
    return Record(
        claim.name,
        at,
        commit=of,
        is_quick=quick,
        verdict=verdict,
        rows=rows,
        environment=environment(),
        data=digests(data),
        note=note,
    )

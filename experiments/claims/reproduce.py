"""`python -m xcloud reproduce CLAIM`: run it, judge it by its rule, write the record: a folder
with everything that one reproduction of a claim was and came to.

OUT/record.json   claim, verdict, rows, commit, environment, digests of data
OUT/README.md     the same to read: question, command, table, verdict, what is missing
OUT/rows.jsonl    what has run; a command that was interrupted goes on with the other rows
OUT/runs.tar.xz   ROW-seedN/ (or ROW-roundN/): experiment.yaml, summary.json, run.log of each run
OUT/made/         run folders until they are in the archive, and what a study makes on its way

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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.claims.archive import RunArchive, figures_of, run_name
from experiments.claims.claims import (
    FILE,
    Claim,
    ResultRow,
    judge,
    read_claims,
    repeats_of,
)
from xcloud.base.bounded import parsed_json
from xcloud.base.errors import ConfigError, DataError, RunFailed
from xcloud.base.overrides import readable
from xcloud.base.project import (
    commit,
    conf_dir,
    module_paths,
    project_root,
    python_command,
)
from xcloud.base.terminal import say, signals_to_stop
from xcloud.base.wording import meant
from xcloud.job.config import EXPERIMENT_FILE
from xcloud.job.given import composed
from xcloud.record.summary import SUMMARY_FILE, read_summary
from xcloud.show.tables import cell_text, rendered
from xcloud.study.point_process import OUTPUT_FILE
from xcloud.study.points import Point, SweepState
from xcloud.study.runner import (
    LauncherSettings,
    Processes,
    Runner,
    composed_points,
    reasons_of,
    say_verdicts,
    signals_as_ctrl_c,
)

FOLDER = "records"
RECORD_FILE = "record.json"
README = Path(__file__).with_name("record.md")
LIBRARIES = ("torch", "transformers", "tokenizers", "sacrebleu", "numpy")
KEPT_FILES = (EXPERIMENT_FILE, SUMMARY_FILE, OUTPUT_FILE)


def main(words: Sequence[str] | None = None) -> int:
    about = "Run one claim, judge it by its rule, and write a record of all that it came to."
    parser = argparse.ArgumentParser("python -m xcloud reproduce", description=about)
    parser.add_argument("claim", help=f"a name in {FILE}")
    parser.add_argument("--quick", action="store_true", help="a run of minutes; judges nothing")
    parser.add_argument("--data", type=Path, help="the folder that holds the claim's data sets")
    parser.add_argument(
        "--row", action="append", help="only this row of a claim that has several; may be repeated"
    )
    places = "outputs/reproduced/CLAIM, with --quick outputs/quick/CLAIM"
    parser.add_argument("--out", type=Path, help=f"folder of the record; default: {places}")
    given = parser.parse_args(words)
    claims = read_claims(project_root() / FILE)
    if given.claim not in claims:
        there = f"{meant(given.claim, known=[*claims])} There are: {', '.join(claims)}"
        raise ConfigError(f"no claim {given.claim!r} in {FILE}{there}")
    claim = claims[given.claim]
    if unknown := {*(given.row or ())} - {*claim.runs}:
        there = f"it has {', '.join(claim.runs)}" if claim.runs else "its study chooses them"
        raise ConfigError(f"--row: claim {claim.name} has no row {min(unknown)!r}; {there}")
    folder = given.data and given.data.resolve()  # runs begin in the project's folder
    data = _data(claim, folder=folder)
    usual = Path("outputs", "quick" if given.quick else "reproduced", claim.name)
    out = (given.out or project_root() / usual).absolute()
    earlier = Record.read(out)
    if earlier and earlier.is_quick != given.quick:
        kind = "quick" if earlier.is_quick else "whole"
        raise ConfigError(f"{out} holds a {kind} run of {earlier.claim}; give another --out")
    if earlier:
        StudyRows(out).take_over(earlier.rows)
    before = len(StudyRows(out).read())
    if before and earlier and earlier.data != digests(data):
        raise ConfigError(f"{out} holds rows of other data than these; give another --out")
    note = earlier.note if before and earlier else ""

    def write() -> Record:
        now = datetime.now(UTC).isoformat(timespec="minutes")
        rows = StudyRows(out).read()
        record = made(claim, rows=rows, data=data, at=now, quick=given.quick, note=note)
        if rows or not earlier:
            record.write(out, claim)
        return record

    write()  # so that whatever ends the run, its rows are known as those of a quick one
    minutes = "minutes"
    if not given.quick:
        minutes = f"about {claim.machine_minutes} minutes"
    say(f"{claim.title}: {minutes} on two idle cores")
    try:
        with chdir(project_root()):  # which commands and relative paths of claims.toml are below
            chosen = given.row or [*claim.runs]
            _run(claim, data=folder, out=out, quick=given.quick, chosen=chosen)
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
    if given.quick or given.row or record.verdict == "reproduced":
        return 0
    return 1


def _data(claim: Claim, folder: Path | None) -> list[Path]:
    paths = [Path(folder or ".", name) for name in claim.needs]
    if lacking := [path.name for path in paths if folder is None or not path.exists()]:
        needed = f"claim {claim.name} needs {', '.join(lacking)}"
        where = f"not in {folder}" if folder else "not given"
        raise DataError(f"{needed}, {where}: give the folder that holds them with --data DIR")
    return paths


def _run(claim: Claim, data: Path | None, out: Path, quick: bool, chosen: Collection[str]) -> None:
    more = claim.quick if quick else ()
    rows = StudyRows(out=out, data=data)
    if claim.module:
        given = {"DATA": str(data), "OUT": str(out)}
        words = [*(given.get(word, word) for word in claim.module), *more]
        if code := ended(python_command(*words)):
            raise RunFailed(f"python -m {' '.join(words)} ended with code {code}")
        return
    asked = []
    for seed in claim.seeds[:1] if quick else claim.seeds:
        for row, settings in claim.runs.items():
            if row not in chosen:
                continue
            words = [*claim.common, *settings, *more, f"seed={seed}"]
            for name, value in {"DATA": data, "OUT": out, "SEED": seed}.items():
                words = [word.replace(name, str(value)) for word in words]
            asked.append(({"row": row, "seed": seed}, words))
    rows.add_all(asked)


def ended(command: Sequence[str]) -> int:
    """Run a command in the project's folder and return its exit code.

    Raises SystemExit at Ctrl+C, which reaches it as well, or another signal to stop, which is
    passed on as SIGTERM, once it has saved what it can.
    """
    ends = [one for one in signals_to_stop() if one is not signal.SIGINT]
    usual = {one: signal.signal(one, lambda number, _: sys.exit(128 + number)) for one in ends}
    environment = {**os.environ, **module_paths()}
    with subprocess.Popen(command, cwd=project_root(), env=environment) as process:
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


class StudyRows:
    """OUT/rows.jsonl, a line of JSON for each run of a study, and OUT/runs.tar.xz, what is kept of
    these runs. OUT/made is for what a study makes on its way; a record does not keep it."""

    def __init__(self, out: Path, data: Path | None = None) -> None:
        self._out = out.resolve()
        self._file = out.resolve() / "rows.jsonl"
        self._folders = {"OUT": self._out, **({"DATA": data.resolve()} if data else {}),
                         "PROJECT": project_root()}  # fmt: skip
        self.work = self._out / "made"

    def read(self) -> list[dict[str, Any]]:
        text = ""
        if self._file.exists():
            text = self._file.read_text(encoding="utf-8")
        return [parsed_json(line) for line in text.splitlines()]

    def take_over(self, rows: Sequence[ResultRow]) -> None:
        """Begin with the rows of a record, which a clone has without OUT/rows.jsonl."""
        if not self._file.exists():
            lines = [json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows]
            self._file.write_text("".join(lines), encoding="utf-8")

    def write(self, row: ResultRow) -> None:
        self._out.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "commit": commit()}, ensure_ascii=False) + "\n")

    def has(self, about: ResultRow) -> bool:
        return any(about.items() <= row.items() for row in self.read())

    def add(
        self, about: ResultRow, words: Sequence[str], figures: Sequence[str] | None = None
    ) -> None:
        """Run an experiment with these words of a command line and write its row, unless there is
        such a row already; an interrupted run resumes from its checkpoint.

        figures: the names of the metrics that mean something here, by default all.
        Raises ConfigError for words that make no experiment, RunFailed if the run fails, and
        SystemExit at Ctrl+C, once the run has saved the step under way.
        """
        self.add_all([(about, words)], figures=figures)

    def add_all(
        self,
        asked: Sequence[tuple[ResultRow, Sequence[str]]],
        figures: Sequence[str] | None = None,
    ) -> None:
        """Add several rows, one after the other. Nothing starts if one of them is wrong; one that
        fails stops none of the others."""
        rows = {run_name(about): about for about, _ in asked}

        def keep_row(point: Point, folder: Path) -> None:
            about = rows[point.row]
            found = figures_of(read_summary(folder))
            self.keep_files(about, folder=folder)
            wanted = {name: found[name] for name in figures or found if name in found}
            self.write({**about, **wanted})

        missing = {run_name(about): words for about, words in asked if not self.has(about)}
        self._run(missing, keep_row)

    def keep(self, words: Sequence[str], folder: Path) -> None:
        """Run an experiment into this folder of `work`, for other rows to use what it leaves.

        Nothing is done if it has finished there and neither it nor the code has changed since.
        Raises as `add`.
        """
        self._run({folder.name: words})

    def _run(
        self,
        asked: Mapping[str, Sequence[str]],
        on_finished: Callable[[Point, Path], None] | None = None,
    ) -> None:
        if not asked:
            return
        words = [(*map(readable, given), "tracker=none") for given in asked.values()]
        points, wrong = composed_points(
            words, compose=lambda given: composed(given, conf_dir=conf_dir())
        )
        if wrong:
            raise ConfigError("\n".join(reasons_of(wrong, asked=words)))
        for point, name in zip(points, asked, strict=True):
            point.row = name
        state = SweepState(self.work)
        with state.lock():
            runner = Runner(
                state=state,
                settings=LauncherSettings(),
                processes=Processes(1),
                on_finished=on_finished,
            )
            say_verdicts(runner.decide(points))
            try:
                with signals_as_ctrl_c():
                    runner.run()
            except KeyboardInterrupt:
                raise SystemExit(130) from None
        if runner.causes:
            failed = "; ".join(dict.fromkeys(runner.causes.values()))
            raise RunFailed(f"{len(runner.causes)} of {len(points)} runs failed: {failed}")

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
        RunArchive(self._out).add(run_name(about), files=texts)
        shutil.rmtree(folder)


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
            return cls(**parsed_json(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise DataError(f"{path} is no record: {error}") from None

    @property
    def where(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.environment.items())

    def write(self, folder: Path, claim: Claim) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in self.rows)
        text = json.dumps({**vars(self), "rows": []}, indent=1, ensure_ascii=False)
        text = text.replace('"rows": []', f'"rows": [\n{rows}\n ]')  # a line for each run
        (folder / RECORD_FILE).write_text(text + "\n", encoding="utf-8")
        (folder / "README.md").write_text(page(claim, record=self), encoding="utf-8")


def verdict_of(claim: Claim, rows: Sequence[ResultRow], *, is_quick: bool) -> str:
    """Say "reproduced" only if every rule is met by a whole run of every seed."""
    if is_quick:
        return "quick run: judges nothing"
    judged = judge(claim, rows=rows)
    kinds = {"not reproduced": "no"} | {o: o for o in ("undecided", "not reached", "not run")}
    found = {what: [one.says for one in judged if one.met == met] for what, met in kinds.items()}
    said = (f"{what}: {'; '.join(says)}" for what, says in found.items() if says)
    fewest = min((one.found.num for one in judged if one.found), default=0)
    asked = len(claim.seeds)
    few = ""
    if fewest < asked:
        few = f", by {fewest} of {asked} {repeats_of(rows)}s"
    return "; ".join(said) or f"reproduced{few}"


def page(claim: Claim, record: Record) -> str:
    """Return the README of a record, with a column for each figure that any of its rows has."""
    cells = pd.DataFrame(record.rows, dtype=object).map(cell_text)
    judged = judge(claim, rows=record.rows)
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
    verdict = verdict_of(claim, rows=rows, is_quick=quick)
    commits = {row["commit"] for row in rows}
    of = "of each row: below"
    if len(commits) == 1:
        of = commits.pop()
    return Record(
        claim=claim.name,
        made_at=at,
        commit=of,
        is_quick=quick,
        verdict=verdict,
        rows=rows,
        environment=environment(),
        data=digests(data),
        note=note,
    )

"""Claims: what is judged by which rule, what a record holds, and the pages made of records."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.collections import LineCollection

from benchmarks import machine
from experiments.claims import pages, reproduce
from experiments.claims.archive import RunArchive, figures_of, mismatches
from experiments.claims.board import BOARD, DENSE, LINES, WIDTH_RATIO, board_page, step_s
from experiments.claims.claims import (
    FILE,
    Cell,
    Claim,
    ClaimRule,
    Figure,
    Quote,
    judge,
    read_claims,
)
from experiments.claims.reproduce import Record, made, page, verdict_of
from tests.sweep_runs import compose
from tests.toy import toy_config
from xcloud.base.errors import ConfigError, DataError, RunFailed, XcloudError
from xcloud.base.project import project_root
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.summary import SUMMARY_FILE, read_summary, write_summary
from xcloud.study.points import Point

ROWS: list[dict[str, Any]] = [
    {
        "row": row,
        "seed": seed,
        "corpus": "a",
        "commit": "1a2b3c4",
        "bleu": bleu + seed,
        "step_s": 1.0 + seed,
    }
    for row, bleu in (("ours", 30.0), ("theirs", 26.5))
    for seed in (1, 2, 3)
]


RECORDS = sorted((project_root() / "records").glob("*/record.json"))
DOCS = sorted(f"docs/{path.name}" for path in (project_root() / "docs").glob("*.md"))
SUMMARY = {
    "wan_bytes_per_step": {"forward": 1, "backward": 1}, "compression_ratio": {"total": 2.0},
    "step_time_s": {"median": 0.1}, "final_loss": 1.0, "wall_s": 3.0, "status": "finished",
}  # fmt: skip


def claim(**changed: Any) -> Claim:
    rule = ClaimRule("3 BLEU in front", Figure("ours", "bleu", minus="theirs"), at_least=3.0)
    given: dict[str, Any] = {
        "name": "front", "title": "Ours is in front", "source": "somebody", "means": "More BLEU.",
        "human_minutes": 1, "machine_minutes": 5, "rules": [rule], "runs": {"ours": []},
        "leaves_out": "everything but one seed",
    }  # fmt: skip
    return Claim(**(given | changed))


def test_a_figure_is_paired_by_seed() -> None:
    found = Figure("ours", "bleu", minus="theirs").of(ROWS)
    assert found is not None and (found.mean, found.error, found.num) == (3.5, 0.0, 3)
    share = Figure("ours", "step_s", over="theirs").of(ROWS[:4])  # one seed of theirs
    assert share is not None and (share.mean, share.error) == (1.0, None)


def test_the_error_of_a_single_seed_is_over_its_samples() -> None:
    row = {"row": "ours", "seed": 1, "bleu": 30.0, "bleu_error": 0.8, "chrf": 50.0}
    assert str(Figure("ours", "bleu").of([row])) == "30.00 ± 0.80 (one seed)"
    assert str(Figure("ours", "chrf").of([row])) == "50.00 (one seed)"
    assert str(Figure("ours", "bleu").of([row, {**row, "seed": 2}])).endswith(" (two seeds)")
    theirs = {"row": "theirs", "seed": 1, "bleu": 27.0, "bleu_error": 0.6, "chrf": 49.0}
    ahead = Figure("ours", "bleu", minus="theirs").of([row, theirs])
    assert str(ahead) == "3.00 ± 1.00 (one seed)"
    assert str(Figure("ours", "chrf", minus="theirs").of([row, theirs])) == "1.000 (one seed)"


def test_rows_of_another_corpus_do_not_count() -> None:
    assert Figure("ours", "bleu", where={"corpus": "b"}).of(ROWS) is None
    assert Figure("ours", "chrf").of(ROWS) is None


def test_a_seed_that_diverged_counts_against_the_claim() -> None:
    diverged = [*ROWS[:2], {**ROWS[2], "bleu": None}, *ROWS[3:]]
    (found,) = judge(claim(), diverged)
    assert (found.met, str(found.found)) == ("no", "not finite")
    assert verdict_of(claim(), diverged, is_quick=False) == "not reproduced: 3 BLEU in front"


def test_a_claim_is_reproduced_only_by_a_whole_run_that_meets_every_rule() -> None:
    harder = ClaimRule("4 BLEU in front", Figure("ours", "bleu", minus="theirs"), at_least=4.0)
    both = claim(rules=[*claim().rules, harder])
    assert verdict_of(claim(), ROWS, is_quick=False) == "reproduced"
    assert verdict_of(both, ROWS, is_quick=False) == "not reproduced: 4 BLEU in front"
    assert verdict_of(claim(), ROWS[:3], is_quick=False) == "not run: 3 BLEU in front"
    assert verdict_of(claim(), ROWS[:5], is_quick=False) == "reproduced, by 2 of 3 seeds"
    assert verdict_of(claim(), ROWS, is_quick=True) == "quick run: judges nothing"
    assert [one.met for one in judge(both, ROWS)] == ["yes", "no"]


def test_a_run_that_misses_its_target_is_neither_left_out_nor_taken_for_none() -> None:
    """Two seeds that reach it would else reproduce what the third denies."""
    figure = Figure("ours", "steps_to_target", over="theirs")
    ours = claim(rules=[ClaimRule("1.5 times the steps", figure, at_most=1.5)])
    rows = [
        {"row": name, "seed": seed, "steps_to_target": 100}
        for name in ("ours", "theirs")
        for seed in (1, 2, 3)
    ]
    assert verdict_of(ours, rows, is_quick=False) == "reproduced"
    for missed in (0, 5):  # of ours, or of what it is measured by
        some = [*rows[:missed], {"row": rows[missed]["row"], "seed": 9}, *rows[missed + 1 :]]
        assert verdict_of(ours, some, is_quick=False) == "not reached: 1.5 times the steps"
    assert verdict_of(ours, rows[:3], is_quick=False) == "not run: 1.5 times the steps"


LEADS = {  # of three seeds; a rule asks for 3 at least, and for 9 at most
    "clearly above": ([3.2, 3.3, 3.4], "yes"),
    "just above": ([2.8, 3.1, 3.4], "undecided"),
    "just below": ([2.6, 2.8, 3.3], "undecided"),
    "clearly below": ([2.7, 2.8, 2.9], "no"),
    "just under the upper bound": ([8.6, 8.9, 9.3], "undecided"),
    "above the upper bound": ([9.3, 9.4, 9.5], "no"),
    "on the bound, without spread": ([3.0, 3.0, 3.0], "yes"),
    "one seed, its error over samples": ([3.5], "undecided"),
}


@pytest.mark.parametrize("lead", LEADS)
def test_a_mean_within_its_error_of_the_bound_is_undecided(lead: str) -> None:
    values, met = LEADS[lead]
    rows = [
        {"row": row, "seed": seed, "bleu": bleu, "bleu_error": 0.5, "commit": "1"}
        for seed, value in enumerate(values, 1)
        for row, bleu in (("ours", 20.0 + value), ("theirs", 20.0))
    ]
    rule = ClaimRule(
        "3 in front", Figure("ours", "bleu", minus="theirs"), at_least=3.0, at_most=9.0
    )
    mine = claim(rules=[rule], seeds=[*range(1, len(values) + 1)])

    assert [one.met for one in judge(mine, rows)] == [met]
    said = {"yes": "reproduced", "no": "not reproduced: 3 in front"}
    assert verdict_of(mine, rows, is_quick=False) == said.get(met, "undecided: 3 in front")


def test_rounds_are_paired_and_named_as_rounds() -> None:
    rows = [{**row, "round": row["seed"]} for row in ROWS]
    for row in rows:
        del row["seed"]
    found = Figure("ours", "bleu", minus="theirs").of(rows)
    assert str(found) == "3.50 ± 0.00 (three rounds)"
    assert verdict_of(claim(), rows[:5], is_quick=False) == "reproduced, by 2 of 3 rounds"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rules": []}, "needs at least one rule"),
        ({"runs": {}}, "give either runs or module"),
        ({"machine_minutes": 0}, r"claim\.machine_minutes must be a whole number >= 1, got 0"),
    ],
)
def test_a_claim_that_shows_nothing_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        claim(**changed)


def test_the_projects_claims_can_be_read_and_every_record_is_of_one() -> None:
    claims = read_claims(project_root() / FILE)
    records = pages.read_records(claims)
    folders = {path.parent.name for path in (project_root() / "records").glob("*/record.json")}
    assert folders == set(records)
    for name, record in records.items():
        assert record.verdict == verdict_of(claims[name], record.rows, is_quick=record.is_quick)
        assert f"**Verdict.** {record.verdict[:1].upper()}" in page(claims[name], record)


@pytest.mark.parametrize("name", [path.parent.name for path in RECORDS])
def test_every_row_of_a_record_is_what_its_run_came_to(name: str) -> None:
    folder = project_root() / "records" / name
    record = Record.read(folder)
    assert record is not None
    assert mismatches(name, record.rows, record.note, folder) == []


def test_every_archived_summary_is_written_again_byte_for_byte(tmp_path: Path) -> None:
    file = tmp_path / SUMMARY_FILE
    num = 0
    for record in RECORDS:
        for files in RunArchive(record.parent).read().values():
            if kept := files.get(SUMMARY_FILE):
                file.write_text(kept, encoding="utf-8")
                write_summary(file, read_summary(tmp_path))
                assert file.read_text(encoding="utf-8") == kept
                num += 1
    assert num > 500


def test_a_row_that_its_run_does_not_bear_out_is_named(tmp_path: Path) -> None:
    summary = {**SUMMARY, "quality": {"bleu": 30.0}, "seed": 1, "commit": "1a2b3c4"}
    for name in ("ours-seed1", "theirs-seed1"):
        RunArchive(tmp_path).add(name, {"summary.json": json.dumps(summary), "run.log": "é"})
    rows = [
        {"row": "ours", "seed": 1, "bleu": 31.0, "ratio": 2.0, "commit": "1a2b3c4"},
        {"row": "ours", "seed": 2, "bleu": 30.0, "ratio": 2.0, "commit": "1a2b3c4"},
    ]
    assert mismatches("front", rows, "", tmp_path) == [
        "ours-seed1: bleu is 31.0, its summary has 30.0",
        "theirs-seed1 is the run of no row",
        "1 rows have no run, and the note does not say so",
    ]
    assert RunArchive(tmp_path).read()["theirs-seed1"]["run.log"] == "é"


def test_an_archive_of_equal_files_has_equal_bytes_in_whatever_order_they_came(
    tmp_path: Path,
) -> None:
    for folder, names in (("a", ("x-seed1", "y-seed1")), ("b", ("y-seed1", "x-seed1"))):
        for name in names:
            RunArchive(tmp_path / folder).add(name, {"run.log": name})
    first, second = (RunArchive(tmp_path / folder).file.read_bytes() for folder in "ab")
    assert first == second
    (tmp_path / "a" / "runs.tar.xz").write_bytes(first[:20])
    with pytest.raises(DataError, match="is no archive of runs"):
        RunArchive(tmp_path / "a").read()


def test_rows_and_rules_have_the_same_losses() -> None:
    """A training loss never stands beside the error of a test loss."""
    summary = {**SUMMARY, "quality": {"loss": 3.5}, "quality_error": {"loss": 0.1}}
    figures = figures_of(summary)
    assert (figures["loss"], figures["loss_error"], figures["final_loss"]) == (3.5, 0.1, 1.0)


def test_a_claim_that_was_taken_back_counts_as_not_reproduced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = claim(name="gone", title="Gone", withdrawn="taken back: 1.5 in front with seed 1")
    monkeypatch.setattr(pages, "read_claims", lambda path: {"front": claim(), "gone": gone})
    record = made(claim(), ROWS, [], "2026-01-01", False)
    monkeypatch.setattr(pages, "read_records", lambda claims: {"front": record})
    assert pages.main([]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("gone"))
    assert " not reproduced " in line
    paper = pages.paper_page({"front": claim(), "gone": gone}, {"front": record})
    assert "- Gone (`gone`)\n" in paper
    front = pages.front_page({"front": claim(), "gone": gone}, {"front": record}, {})
    ((_, state),) = front.facts
    assert state.startswith("1 of 2 claims are reproduced") and "1 not reproduced" in state


def test_no_claim_that_was_taken_back_has_a_record() -> None:
    claims = read_claims(project_root() / FILE)
    assert not {n for n in pages.read_records(claims) if claims[n].withdrawn}


def test_the_papers_page_is_what_the_records_say() -> None:
    claims = read_claims(project_root() / FILE)
    written = (project_root() / pages.PAPER).read_text("utf-8")
    assert written == pages.paper_page(claims, pages.read_records(claims))


def test_the_board_is_what_its_record_says() -> None:
    record = pages.read_records(read_claims(project_root() / FILE))["board"]
    assert (project_root() / BOARD).read_text("utf-8") == board_page(record.rows)


def test_the_board_takes_times_from_the_clock_of_the_benchmark() -> None:
    line = LINES["200 Mbit/s, 50 ms"]
    assert step_s(2048, line) == pytest.approx(101.0, abs=0.1)
    assert step_s(322, line) == pytest.approx(19.8, abs=0.1)

    def row(name: str, num_bytes: float, *steps: int) -> list[dict[str, Any]]:
        reached = [{"steps_to_target": one} if one else {} for one in steps]
        of_twin = 14 * num_bytes / WIDTH_RATIO
        return [{"row": name, "bytes_per_token": of_twin, **one} for one in reached]

    rows = [*row("few", 322, 200, 220), *row(DENSE, 2048, 100, 110), *row("none", 16, 300, 0)]
    lines = [
        line for line in board_page(rows).splitlines() if line[:4] in ("| BF", "| fe", "| no")
    ]
    assert [line.split(" | ")[0] for line in lines] == ["| BF16", "| few", "| none"]
    assert lines[1].startswith("| few | 20.1 | 200, 220 | ") and " | 0.393 | " in lines[1]
    assert lines[2] == "| none | 1.0 | 300, not reached | – | – | – |"


def test_a_rule_may_stand_for_several(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("""
[grid]
title = "x"
source = "y"
means = "z"
human_minutes = 1
machine_minutes = 1
runs = { a = [] }

[[grid.rules]]
for = { block = [0, 5], r = [8] }
says = "block {block}, r = {r}"
figure = { row = "r{r} {block}", column = "bleu", where = { task = "t{block}" } }
at_least = 1
""")
    first, second = read_claims(tmp_path / FILE)["grid"].rules
    assert first == ClaimRule("block 0, r = 8", Figure("r8 0", "bleu", where={"task": "t0"}), 1)
    assert second.figure == Figure("r8 5", "bleu", where={"task": "t5"})


def test_a_malformed_claim_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('[odd]\ntitle = "x"\nrules = []\n')
    with pytest.raises(ConfigError, match=r"claims\.toml: claim 'odd'"):
        read_claims(tmp_path / FILE)


def test_a_record_says_all_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "train.tsv").write_text("a\tb\n")
    record = made(claim(), ROWS, [tmp_path / "corpus"], "2026-01-01", False)
    record.write(tmp_path / "out", claim())
    assert Record.read(tmp_path / "out") == Record(**json.loads(json.dumps(vars(record))))
    text = (tmp_path / "out" / "README.md").read_text("utf-8")
    for part in (
        "3 BLEU in front",
        "3.50 ± 0.00",
        "**Verdict.** Reproduced.",
        "torch 2.",
        "processor ",
    ):
        assert part in text
    assert list(record.data) == ["corpus/train.tsv"]
    (tmp_path / "out" / "record.json").write_text("{}")
    with pytest.raises(DataError, match="is no record"):
        Record.read(tmp_path / "out")


class FakeProcesses:
    """Stands in for the processes of rows, which end as `ends` says, else well."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, tuple[str, ...]]] = []
        self.ends: dict[str, BaseException] = {}
        self.goes_on: list[str] = []

    def run(self, point: Point, folder: Path) -> None:
        self.ran.append((point.name, point.overrides[:-1]))
        if CheckpointFolder(folder).agreed_steps():
            self.goes_on.append(point.name)
        point.config.write(folder / "experiment.yaml")
        (folder / "run.log").write_text(f"{folder}/model, {folder.parents[1]}, {project_root()}/c")
        if end := self.ends.pop(point.name, None):
            saved = CheckpointFolder(folder)
            saved.write(40, 0, {"step": 40}, {})
            saved.mark_agreed(40, 0, {})
            raise end
        bleu = 30.0 if "training.max_steps=9" in point.overrides else 26.0
        (folder / "summary.json").write_text(json.dumps({**SUMMARY, "quality": {"bleu": bleu}}))

    def end(self) -> None: ...

    def is_running(self, run_dir: Path) -> bool:
        return False


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> FakeProcesses:
    fake = FakeProcesses()
    monkeypatch.setattr(reproduce, "Processes", lambda parallel: fake)
    monkeypatch.setattr(reproduce, "composed", lambda words, conf_dir: compose(words))
    mine = claim(
        runs={"ours": ["training.max_steps=9"], "theirs": []},
        common=["training.batch_size=4"],
        quick=["training.eval_samples=4"],
    )
    monkeypatch.setattr(reproduce, "read_claims", lambda path: {"front": mine})
    return fake


def test_reproducing_runs_each_row_and_seed_and_keeps_their_files(
    tmp_path: Path, processes: FakeProcesses, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = processes.ran
    assert reproduce.main(["front", "--out", str(tmp_path)]) == 0
    words = ("training.batch_size=4", "training.max_steps=9", "seed=1")
    assert len(ran) == 6 and ran[0] == ("ours-seed1", words)
    assert "**Verdict.** Reproduced." in capsys.readouterr().out
    kept = RunArchive(tmp_path).read()["ours-seed1"]
    assert sorted(kept) == ["experiment.yaml", "run.log", "summary.json"]
    assert kept["run.log"] == "RUN/model, OUT, PROJECT/c"
    assert not (tmp_path / "made").exists()
    (tmp_path / "rows.jsonl").unlink()  # a clone has the record alone
    assert reproduce.main(["front", "--out", str(tmp_path)]) == 0
    assert len(ran) == 6, "rows that there are were made again"
    assert "6 rows were there before and did not run now" in capsys.readouterr().out
    assert reproduce.main(["front", "--quick", "--out", str(tmp_path / "quick")]) == 0
    quick = ("training.batch_size=4", "training.eval_samples=4", "seed=1")
    assert len(ran) == 8 and ran[-1] == ("theirs-seed1", quick)
    assert "**Left out by --quick.** everything but one seed" in capsys.readouterr().out
    of_one_row = ["front", "--row", "theirs", "--out", str(tmp_path / "row")]
    assert reproduce.main(of_one_row) == 0
    assert [name for name, _ in ran[8:]] == [f"theirs-seed{seed}" for seed in (1, 2, 3)]
    with pytest.raises(ConfigError, match="has no row 'thiers'; it has ours, theirs"):
        reproduce.main(["front", "--row", "thiers"])
    for given, kind in ((["--quick"], "whole"), ([], "quick")):
        folder = tmp_path / "quick" if kind == "quick" else tmp_path
        with pytest.raises(ConfigError, match=f"holds a {kind} run of front"):
            reproduce.main(["front", *given, "--out", str(folder)])


@pytest.mark.slow
@pytest.mark.nightly
def test_an_interrupted_row_goes_on_from_its_checkpoint(
    tmp_path: Path, processes: FakeProcesses, capsys: pytest.CaptureFixture[str]
) -> None:
    processes.ends["theirs-seed1"] = KeyboardInterrupt()
    with pytest.raises(SystemExit):
        reproduce.main(["front", "--out", str(tmp_path)])
    said = capsys.readouterr()
    assert "the same command goes on with what is missing" in said.err
    record = Record.read(tmp_path)
    assert record is not None
    assert ("theirs", 1) not in [(row["row"], row["seed"]) for row in record.rows]

    assert reproduce.main(["front", "--out", str(tmp_path)]) == 0
    assert processes.goes_on == ["theirs-seed1"]
    assert sorted(RunArchive(tmp_path).read()) == sorted({name for name, _ in processes.ran})
    assert "theirs-seed1 resumes; from step 40" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.nightly
def test_a_row_that_fails_stops_no_other_and_one_that_is_wrong_stops_all(
    tmp_path: Path, processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.ends["ours-seed1"] = RunFailed("out of paper")
    with pytest.raises(RunFailed, match="1 of 6 runs failed: out of paper"):
        reproduce.main(["front", "--out", str(tmp_path)])
    record = Record.read(tmp_path)
    assert record is not None and len(record.rows) == 5

    wrong = claim(runs={"ours": [], "theirs": ["training.max_steps=0"]})
    monkeypatch.setattr(reproduce, "read_claims", lambda path: {"front": wrong})
    with pytest.raises(ConfigError, match=r"3 of 6 points:\n.*and 2 more.*max_steps must be"):
        reproduce.main(["front", "--out", str(tmp_path / "other")])
    assert len(processes.ran) == 6


def test_rows_of_equal_settings_are_runs_of_their_own(
    tmp_path: Path, processes: FakeProcesses
) -> None:
    """Rounds of timing have one seed."""
    rows = reproduce.StudyRows(tmp_path)
    for number in (1, 2):
        rows.add({"row": "ours", "round": number}, ["seed=1"], ["step_s"])
    rows.keep(["seed=1"], rows.work / "encoder")
    rows.keep(["seed=1"], rows.work / "encoder")
    assert [name for name, _ in processes.ran] == ["ours-round1", "ours-round2", "encoder"]
    assert [row["round"] for row in rows.read()] == [1, 2] and "bleu" not in rows.read()[0]
    assert (rows.work / "encoder" / "summary.json").exists()


def test_a_study_gets_whole_paths_and_a_record_keeps_its_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def run(command: list[str]) -> int:
        ran.append(command[3:])
        reproduce.StudyRows(Path(command[4])).write({"row": "ours", "seed": 1, "bleu": 1.0})
        return 0

    monkeypatch.chdir(tmp_path)
    Path("data", "corpus").mkdir(parents=True)
    mine = claim(runs={}, module=["DATA", "OUT"], needs=["corpus"])
    monkeypatch.setattr(reproduce, "read_claims", lambda path: {"front": mine})
    monkeypatch.setattr(reproduce, "ended", run)
    for note in ("", "seeds 2 and 3 are of later"):
        assert reproduce.main(["front", "--data", "data", "--out", "out"]) == 1
        record = Record.read(Path("out"))
        assert record is not None and record.note == note
        replace(record, note="seeds 2 and 3 are of later").write(Path("out"), mine)
    assert ran == [[str(tmp_path / "data"), str(tmp_path / "out")]] * 2
    (tmp_path / "data" / "corpus" / "another").write_text("row")
    with pytest.raises(ConfigError, match="holds rows of other data than these"):
        reproduce.main(["front", "--data", "data", "--out", "out"])


def test_rows_of_an_interrupted_quick_run_never_become_a_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str]) -> int:
        reproduce.StudyRows(tmp_path).write({"row": "ours", "seed": 1, "bleu": 99.0})
        raise SystemExit(130)

    mine = claim(runs={}, module=["study"])
    monkeypatch.setattr(reproduce, "read_claims", lambda path: {"front": mine})
    monkeypatch.setattr(reproduce, "ended", run)
    with pytest.raises(SystemExit):
        reproduce.main(["front", "--quick", "--out", str(tmp_path)])
    record = Record.read(tmp_path)
    assert record is not None and record.is_quick and len(record.rows) == 1
    with pytest.raises(ConfigError, match="holds a quick run"):
        reproduce.main(["front", "--out", str(tmp_path)])


CHILD = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    (folder / "runs").touch()
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)  # longer than subprocess.run gives it
    (folder / "saved").touch()
"""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_whoever_stops_a_reproduction_stops_its_run_which_saves_what_it_has(
    tmp_path: Path, stop: signal.Signals
) -> None:
    said = [sys.executable, "-c", CHILD, str(tmp_path)]
    parent = f"from experiments.claims.reproduce import ended; ended({said!r})"
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    while not (tmp_path / "runs").exists():
        assert process.poll() is None
        time.sleep(0.05)
    if stop == signal.SIGINT:  # as a terminal does
        os.killpg(process.pid, stop)
    else:
        process.terminate()
    assert process.wait(60) == 128 + stop and (tmp_path / "saved").exists()


def test_missing_data_and_unknown_claims_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        reproduce, "read_claims", lambda path: {"front": claim(needs=["multi30k"])}
    )
    for words, said in (
        (["front"], "needs multi30k, not given: give the folder that holds them with --data DIR"),
        (["front", "--data", str(tmp_path)], f"needs multi30k, not in {tmp_path}: give"),
        (["frnt"], r"no claim 'frnt' in claims.toml; did you mean .front.\? There are: front"),
    ):
        with pytest.raises(XcloudError, match=said):
            reproduce.main(words)


def quotes() -> Iterator[tuple[str, str, str]]:
    claims = read_claims(project_root() / FILE)
    for name, record in pages.read_records(claims).items():
        for quote in claims[name].quotes:
            yield name, quote.file, quote.filled(record.rows)


@pytest.mark.parametrize(("name", "file", "text"), list(quotes()))
def test_readme_and_docs_quote_what_the_record_says(name: str, file: str, text: str) -> None:
    assert text in (project_root() / file).read_text("utf-8")


MEASURED = re.compile(
    r"± ?\d|\d (?:BLEU|chrF|F1|EM|points)\b|\d ?(?:times|%) (?:fewer|faster|slower|more|less)"
    r"|(?:perplexity|accuracy|BLEU|F1|[Mm]easured|took)\b[^.;|]*\d\.\d"
)
PROSE = ["README.md", *(path for path in DOCS if path != "docs/paper.md")]


@pytest.mark.parametrize("file", PROSE)
def test_no_measured_figure_of_readme_and_docs_is_without_a_record(file: str) -> None:
    """Code, commands and quotes of records taken away, none is left."""
    text = (project_root() / file).read_text("utf-8")
    for _, where, quoted in quotes():
        text = text.replace(quoted, "") if where == file else text
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    assert [line for line in text.splitlines() if MEASURED.search(line)] == []


@pytest.mark.parametrize("file", ["README.md", "docs/translation.md"])
def test_every_figure_of_a_comparison_is_of_a_record_or_published(file: str) -> None:
    text = (project_root() / file).read_text("utf-8")
    for _, where, quoted in quotes():
        text = text.replace(quoted, "") if where == file else text
    text = re.sub(r"```.*?```|`[^`\n]*`|\]\(.*?\)", "", text, flags=re.DOTALL)
    text = text.replace("Python 3.11", "")
    assert re.findall(r"\d+\.\d+", text) == []


@pytest.mark.parametrize(
    ("form", "expected"),
    [("mean", "32.0"), ("each", "31.0, 32.0, 33.0"), ("deviation", "32.0 ± 1.0"),
     ("error", "32.0 ± 0.6"), ("more", "+3100.0 %")],
)  # fmt: skip
def test_a_quote_is_worded_as_it_says(form: Any, expected: str) -> None:
    assert Quote("a.md", "<{}>", Figure("ours", "bleu"), form=form).filled(ROWS) == f"<{expected}>"


@pytest.mark.usefixtures("pictures")
def test_the_site_has_a_page_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.tsv").touch()
    record = made(claim(), ROWS, [tmp_path], "2026-01-01", False)
    other = ClaimRule("3 chrF in front", Figure("ours", "chrf", minus="theirs"), at_least=3.0)
    ours, theirs = (Figure(name, "bleu") for name in ("ours", "theirs"))
    cells = [Cell("T", "row", "by heart", ours=ours), Cell("T", "other", theirs, better=ours)]
    mine = claim(rules=[*claim().rules, other], cells=cells)
    monkeypatch.setattr(pages, "read_claims", lambda path: {"front": mine})
    monkeypatch.setattr(pages, "read_records", lambda claims: {"front": record})
    assert pages.site(["--out", str(tmp_path)]) == 0
    index = (tmp_path / "index.html").read_text("utf-8")
    study = (tmp_path / "front.html").read_text("utf-8")
    assert 'href="front.html"' in index and "reproduced" in index
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert "<td>3 chrF in front</td><td>–</td><td>not run</td>" in study
    assert study.index("Every run") < study.index("corpus.tsv")
    for part in ("3 BLEU in front", "reproduce front", "front.png", "corpus.tsv", empty):
        assert part in study
    paper = (tmp_path / "paper.html").read_text("utf-8")
    assert 'href="paper.html"' in index and '<a href="front.html">row</a>' in paper
    assert ">by heart</td>" in paper and "28.5 (the formula)" in paper and "32.00 ± 0.58" in paper
    assert (tmp_path / "front.png").stat().st_size > 1000
    assert "http" not in study + index  # nothing is fetched


def test_a_picture_has_a_panel_for_each_task_of_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(
        pages, "save", lambda figure, path: drawn.extend(a.get_title() for a in figure.axes)
    )
    rows = [{**row, "corpus": corpus} for row in ROWS for corpus in "abc"]
    rules = [
        ClaimRule("in front", Figure("ours", "bleu", where={"corpus": corpus}), at_least=1.0)
        for corpus in ("c", "a", "b", "a", "none")
    ]
    record = made(claim(), rows, [], "2026-01-01", False)
    assert pages.draw(claim(rules=rules), record, tmp_path / "a.png")
    assert drawn == ["c", "a", "b"]
    assert not pages.draw(claim(rules=rules[-1:]), record, tmp_path / "b.png")


def test_a_figure_of_one_seed_is_drawn_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One seed of a row tells nothing of the spread; three tell the standard error."""
    widths: list[float] = []

    def noted(figure: Any, path: Path) -> None:
        (errors,) = (c for c in figure.axes[0].collections if isinstance(c, LineCollection))
        widths.extend(line[1][0] - line[0][0] for line in errors.get_segments())

    monkeypatch.setattr(pages, "save", noted)
    rows = [row for row in ROWS if row["row"] == "ours" or row["seed"] == 1]
    rule = ClaimRule("in front", Figure("ours", "bleu", where={"corpus": "a"}), at_least=1.0)
    record = made(claim(), rows, [], "2026-01-01", False)
    assert pages.draw(claim(rules=[rule]), record, tmp_path / "a.png")
    assert widths == pytest.approx([2 * 1 / math.sqrt(3), 0.0])


def test_a_picture_is_as_high_as_the_longest_list_of_names_in_a_panel_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heights: list[float] = []
    monkeypatch.setattr(
        pages, "save", lambda figure, path: heights.append(figure.get_size_inches()[1])
    )
    rules = [
        ClaimRule("in front", Figure("0 rows", "bleu", where={"corpus": corpus}), at_least=1.0)
        for corpus in "ab"
    ]
    for longest in (2, 32):
        counts = {"a": longest, "b": 2}
        rows: list[dict[str, Any]] = [
            {**ROWS[0], "row": f"{number} rows", "corpus": corpus}
            for corpus, count in counts.items()
            for number in range(count)
        ]
        record = made(claim(), rows, [], "2026-01-01", False)
        assert pages.draw(claim(rules=rules), record, tmp_path / "a.png")
    assert heights[1] == 2 * heights[0], "twice the sixteen names that fit"


def test_a_study_that_was_interrupted_makes_its_run_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: Any, folder: Path) -> None:
        assert not (folder / "events.jsonl").exists()
        (folder / "events.jsonl").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "run", run)
    for _ in range(2):
        with pytest.raises(SystemExit):
            machine.run_quietly(toy_config("two_clouds"), tmp_path / "run")

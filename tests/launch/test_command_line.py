"""`python -m xcloud`: the list teaches, every command explains itself and prints JSON if asked."""

import argparse
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.errors import HydraException
from hydra.types import RunMode

from experiments.claims import pages
from tests import as_written
from xcloud import entry
from xcloud.__main__ import COMMANDS, OF_A_CLONE, main
from xcloud.base import project
from xcloud.base.errors import ConfigError, RunFailed
from xcloud.features.checkpoints import resume
from xcloud.job import given
from xcloud.job.config import Settings
from xcloud.launch import local
from xcloud.launch.processes import RunStopped
from xcloud.planner import planning
from xcloud.record.files import rank_file
from xcloud.security.audit import audit_file


@pytest.mark.parametrize("words", [[], ["--help"], ["help"]])
def test_the_list_has_every_command_with_an_example(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    said = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"\n{name} " in said and f"python -m xcloud {command.example}\n" in f"{said}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_under_the_name_it_is_called_by(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    said = capsys.readouterr().out
    usage = "usage: python -m xcloud " if name != "run" else "Run an experiment: "  # Hydra's help
    assert ended.value.code == 0 and usage in said
    with pytest.raises(SystemExit):
        main(["help", name])
    assert capsys.readouterr().out == said


def test_every_command_names_a_function_that_exists() -> None:
    for command in COMMANDS.values():
        module, _, function = command.function.rpartition(".")
        if not module.startswith(OF_A_CLONE):
            module = f"xcloud.{module}"
        assert callable(getattr(importlib.import_module(module), function))


def test_a_command_of_a_clone_says_so_where_there_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project, "_checkout", lambda: None)
    assert main(["claims"]) == 1
    said = capsys.readouterr().err
    assert "a clone of xcloud" in said and "`xcloud claims`" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("wrong", "near"), [("tanslate", "translate"), ("train_tokenizer", "train-tokenizer")]
)
def test_an_unknown_command_is_answered_with_the_nearest_and_the_list(
    wrong: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([wrong]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"xcloud: unknown command {wrong!r}; did you mean {near!r}?")
    assert "usage: python -m xcloud COMMAND" in said


def test_a_folder_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert main(["site", "--out", str(tmp_path / "file" / "site")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("xcloud: ") and str(tmp_path / "file") in said
    assert said.count("\n") == 1


def test_ctrl_c_in_a_command_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pages, "read_claims", interrupted)
    assert main(["claims"]) == 130
    assert capsys.readouterr().err == "xcloud: interrupted\n"


def test_the_list_imports_no_command() -> None:
    code = """
import sys
from xcloud.__main__ import main
main(["--help"])
heavy = {"torch", "mlflow", "rich", "hydra", "matplotlib", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def folder(run_dir: Path) -> None:
    """Write what a run of one rank would leave, which waits for another."""
    now = time.time()
    waits = [{"rank": 1, "message": "gradient of step 8", "since": now - 12}]
    state = {
        "rank": 0, "pid": os.getpid(), "host": socket.gethostname(), "written": now,
        "ended": False, "phase": "training", "phase_since": now - 60, "waits_for": waits,
        "step": 7, "step_at": now - 13,
    }  # fmt: skip
    rank_file(run_dir, 0, "state.json").write_text(json.dumps(state))
    audit = {
        "rank": 0, "cloud": "a", "num_ranks": 1, "crosses_clouds": True, "messages": [],
        "received": [], "unframed": [], "reports": {},
    }  # fmt: skip
    audit_file(run_dir, 0).write_text(json.dumps(audit))


@pytest.mark.parametrize(
    ("words", "holds"),
    [
        (["status", "RUN"], lambda found: found["ranks"][0]["waits_for"][0]["rank"] == 1),
        (["status", "RUN"], lambda found: found["waited_for_by"] == {"1": [0]}),
        (["claims"], lambda found: {"name", "verdict", "claim"} <= found[0].keys()),
        (["settings", "training"], lambda found: any("batch_size" in one["key"] for one in found)),
        (["wire-audit", "RUN"], lambda found: isinstance(found, dict)),
        (["report"], lambda found: found == []),
    ],
)
def test_a_command_that_prints_facts_prints_them_as_json(
    words: list[str],
    holds: Callable[[Any], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path)
    assert main([*(str(tmp_path) if word == "RUN" else word for word in words), "--json"]) == 0
    assert holds(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("a is wrong\nb too"), 1, "xcloud: a is wrong\nxcloud: b too\n"),
        (RunFailed("rank 1 failed"), 1, "xcloud: rank 1 failed\n"),
        (FileNotFoundError(2, "No such file", "x.tsv"), 1,
         "xcloud: [Errno 2] No such file: 'x.tsv'\n"),
        (RunStopped("stopped at step 3"), 75, "xcloud: stopped at step 3\n"),
        (KeyboardInterrupt(), 130, "xcloud: interrupted; every rank has ended\n"),
    ],
)  # fmt: skip
def test_what_ends_a_run_is_a_line_and_an_exit_code(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, entry.exit_codes():
        raise error
    assert ended.value.code == code and capsys.readouterr().err == said


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    for fault in (OSError(5, "no file of anybody"), ValueError("a defect")):
        with pytest.raises(type(fault)), entry.exit_codes():
            raise fault


def test_flags_of_hydra_are_told_from_settings_with_their_values() -> None:
    words = ["a=1", "-cd", "mine=x", "--info", "all", "b=2", "--config-dir=other", "-m"]
    settings, options = entry.split_words(words)
    assert settings == ["a=1", "b=2"]
    assert options == ["-cd", "mine=x", "--info", "all", "--config-dir=other", "-m"]
    assert entry.own_folders(options) == [Path("mine=x"), Path("other")]


@pytest.mark.parametrize(
    ("error", "composed", "ends"),
    [
        (PermissionError(13, "Permission denied", "/x"), False, 1),
        (PermissionError(13, "Permission denied", "/x"), True, PermissionError),
        (OSError(5, "no file of anybody"), False, OSError),
        (HydraException("no such group"), False, 1),
        (HydraException("a defect"), True, HydraException),
        (KeyboardInterrupt(), False, 130),
    ],
)
def test_what_hydra_cannot_make_of_the_words_is_the_users_and_what_comes_later_is_not(
    error: BaseException, composed: bool, ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["xcloud"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(entry, "run_composed", run)
    monkeypatch.setattr(entry, "composed", composed)
    with pytest.raises(SystemExit if isinstance(ends, int) else ends) as ended:
        entry.main(["task=translation", "-m", "--config-dir", "mine"])
    if isinstance(ends, int):
        assert ended.value.code == ends  # type: ignore[attr-defined]
    assert sys.argv == ["xcloud", "-m", "task=translation", "--config-dir", "mine"]


@pytest.mark.parametrize("follows", [None, "the next"])
@pytest.mark.parametrize("has_more", [True, False])
def test_a_run_and_the_one_that_follows_it_are_carried_out_in_turn(
    follows: str | None, has_more: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    asked: list[Any] = []
    monkeypatch.setattr(local, "run", lambda *given, **named: ran.append((*given, named)))
    monkeypatch.setattr(
        given, "compose_follow_up", lambda *of, own, **named: asked.append(own) or follows
    )
    first: Any = SimpleNamespace(plain={"follow_up": follows})
    if follows is None and not has_more:
        with pytest.raises(ConfigError, match=r"has finished; to train it longer give"):
            entry.carry_out(first, tmp_path, has_more=False)
        return
    entry.carry_out(first, tmp_path, resumes="check", has_more=has_more)
    runs = [(first, tmp_path, {"resumes": "check", "more_follows": follows is not None})]
    after = [(follows, tmp_path / "follow_up", {"resumes": "check"})]
    assert ran == runs * has_more + after * (follows is not None)
    assert asked == [False] * (follows is not None)
    entry.carry_out(first, tmp_path)
    assert asked[1:] == [True] * (follows is not None), "one's own experiment"


def test_a_resume_takes_changed_settings_and_no_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(
        given,
        "resumed",
        lambda folder, words, conf_dir: found.append((folder, words)) or ("it", 7),
    )
    monkeypatch.setattr(entry, "carry_out", lambda *of, **named: found.append((*of, named)))
    for words, anew in (
        (["a=1", f"resume={tmp_path}", entry.ANEW], True),
        ([f"resume={tmp_path}"], False),
    ):
        with pytest.raises(SystemExit) as ended:
            entry.main(words)
        assert ended.value.code is None
        (asked, changed), (settings, folder, named) = found
        assert (asked, changed, settings, folder) == (tmp_path, words[:1] * anew, "it", tmp_path)
        assert named["has_more"] == 7 and named["resumes"].keywords == {"anew": anew}
        found.clear()
    for words in (["resume=a", "resume=b"], ["resume=a", "--info"]):
        with pytest.raises(SystemExit) as ended:
            entry.main(words)
        assert ended.value.code == 1
        assert "resume=FOLDER [key=value ...]" in capsys.readouterr().err


@pytest.mark.parametrize("plan", [None, "show"])
def test_what_hydra_composed_is_planned_run_and_leaves_no_empty_folder(
    plan: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    settings: Any = SimpleNamespace(job=SimpleNamespace(plan=plan))
    hydra: Any = SimpleNamespace(
        runtime=SimpleNamespace(output_dir=str(tmp_path / "run")), mode=RunMode.RUN
    )
    monkeypatch.setattr(entry.HydraConfig, "get", lambda: hydra)
    monkeypatch.setattr(Settings, "of", lambda config: settings)
    monkeypatch.setattr(planning, "planned", lambda *of: ran.append(of))
    monkeypatch.setattr(entry, "carry_out", lambda *of: ran.append(of))
    monkeypatch.setattr(entry, "composed", False)
    (tmp_path / "run").mkdir()
    entry.run_composed.__wrapped__("config")
    assert ran == [(settings, tmp_path / "run")] and entry.composed
    assert not (tmp_path / "run").exists()
    # A sweeper of Hydra's reads the score of a point.
    hydra.mode = RunMode.MULTIRUN
    monkeypatch.setattr(
        local, "run", lambda *of, **named: ran.append(named) or {"quality": {"bleu": 3.0}}
    )
    assert entry.run_composed.__wrapped__("config") == -3.0
    assert ran[1]["more_follows"] and ran[1]["resumes"] is resume.check_can_go_on


class ParserMade(Exception):
    pass


def arguments_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return what a parser takes, by the first name of each argument, and what it says of it."""
    found: dict[str, Any] = {}
    for action in parser._actions:
        name = (action.option_strings or [action.metavar or action.dest])[0]
        if isinstance(action, argparse._SubParsersAction):
            found |= {f"{word} ...": arguments_of(one) for word, one in action.choices.items()}
        elif name != "-h":
            kind = getattr(action.type, "__name__", None)
            about = {
                "is": [*action.option_strings[1:], action.dest, kind, action.metavar],
                "nargs": action.nargs, "choices": action.choices and [*map(str, action.choices)],
                "default": None if action.default is None else str(action.default),
                "const": action.const, "required": bool(action.option_strings) and action.required,
            }  # fmt: skip
            said = [f"{key} {value}" for key, value in about.items() if value not in (None, False)]
            found[str(name)] = [action.help, *said]
    return found


def test_the_arguments_of_every_command_are_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts of others rely on them."""
    made: list[argparse.ArgumentParser] = []

    def parse(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        made.append(parser)
        raise ParserMade

    for name in ("parse_args", "parse_known_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, parse)
    found = {}
    for name in COMMANDS:
        if name in ("run", "torchrun"):  # Hydra's and torchrun's
            continue
        with pytest.raises(ParserMade):
            main([name])
        found[name] = arguments_of(made.pop())
    as_written.check("arguments of commands", found)

"""What is typed as key=value is read as it is meant, or one line says what to type."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from hydra.errors import HydraException
from hypothesis import given
from hypothesis import strategies as some
from omegaconf import OmegaConf

from tests.configs import composed
from xcloud import entry
from xcloud.base.errors import ConfigError
from xcloud.base.overrides import as_override, for_hydra, parsed, readable, unreadable, with_home
from xcloud.base.project import conf_dir
from xcloud.job import config as configs
from xcloud.job import given as job_given
from xcloud.job.given import composed as composed_words
from xcloud.job.given import explained, grid, with_overrides
from xcloud.study.points import with_also

# A path and the character in it that cannot stand there unquoted.
PATHS = {
    "/data/corpus (v2)": "(",
    "/data/a,b": ",",
    "/data/epoch=3": "=",
    "/data/it's": "'",
    '/data/"new"': '"',
    "/data/a#b": "#",
    "/data/a;b": ";",
    "/data/a&b": "&",
    "/data/[x]": "[",
    "/data/{x}": "{",
    "/data/corpus!": "!",
    "/data/日本": "日",
    "/data/año": "ñ",
    "/data/a~b": "~",
    "/data/<x>": "<",
}


def value_of(word: str) -> object:
    (override,) = parsed([word])
    return override.value()


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_cannot_be_read_is_told_with_its_character_and_what_to_type(
    path: str,
) -> None:
    (line,) = unreadable([f"task.data.path={path}"])
    assert line.startswith(f"task.data.path={path}: {PATHS[path]!r} is not allowed")
    typed = re.search(r"type (task\.data\.path=.*?)(; several values.*)?$", line)
    assert typed is not None
    (word,) = shlex.split(typed[1])  # as a shell passes it on
    assert value_of(word) == path


PLACES = {
    "run.py": lambda words: explained(HydraException("what Hydra says"), words),
    "xcloud.run": lambda words: composed_words(["+exp=abnet_iwslt", *words], conf_dir()),
    "run.py resume=": lambda words: with_overrides(Path("experiment.yaml"), words, conf_dir()),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("path", ["/data/corpus (v2)", "/data/a,b", "/data/epoch=3", "/it's"])
def test_wherever_overrides_are_taken_the_same_line_answers(place: str, path: str) -> None:
    words = [f"task.data.path={path}"]
    try:
        said = "\n".join(PLACES[place](words))
    except ConfigError as error:
        said = str(error)
    assert said == unreadable(words)[0]


def test_in_a_sweep_commas_are_meant_and_other_characters_are_told() -> None:
    assert unreadable(["seed=1,2", "task.data.path=/a,/b"], is_sweep=True) == []
    assert grid(["seed=1,2", "name=x"]) == [("seed=1", "name=x"), ("seed=2", "name=x")]
    with pytest.raises(ConfigError, match=r"'\(' is not allowed"):
        grid(["seed=1,2", "task.data.path=/corpus (v2)"])


@pytest.mark.parametrize("word", ["task.data.path", "a b=1", "seed=range(3)", "seed=choice(1,2)"])
def test_what_is_no_setting_of_one_run_is_one_line(word: str) -> None:
    (line,) = unreadable([word])
    assert line.startswith(f"{word}: ")
    assert "add -m" in line or "expected key=value" in line
    assert "quotes" not in line, "a function of sweeps is no text with a comma"


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("rate=1,5e-4", "a number is written with a point: rate=1.5e-4"),
        ("rate=-0,5", "rate=-0.5"),
        ("betas=[0.9,0.98,]", "as a list"),
        ("heads={a:1", "as a mapping"),
    ],
)
def test_a_number_list_or_mapping_that_is_miswritten_is_not_made_a_text(
    word: str, answer: str
) -> None:
    (line,) = unreadable([word])
    assert answer in line
    assert "for this text" not in line


def test_what_can_be_read_is_not_complained_of() -> None:
    fine = ["seed=1", "~task.tokenizer", "+a={b: [1, 2]}", "a=[x,y]", "a='/b (c)'", "a=${seed}"]
    assert unreadable([*fine, "task.data.path=/data/two words", "a=", "compression@b=int8"]) == []


def test_the_users_folder_can_be_written_as_in_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/an (odd) name")
    assert value_of("task.data.path=~/corpus") == "/home/an (odd) name/corpus"
    assert value_of("task.data.path=~") == "/home/an (odd) name"
    assert unreadable(["task.data.path=~/corpus"]) == []
    points = grid(["task.data.path=~/a,~/b"])
    assert [value_of(word) for (word,) in points] == [
        "/home/an (odd) name/a",
        "/home/an (odd) name/b",
    ]
    for same in ("~task.tokenizer", "a=b~/c", "a='~/c'", "a=[~/c]"):
        assert with_home(same) == same


@given(some.text(some.characters(exclude_categories=["Cs"]), max_size=12))
def test_any_text_can_be_written_so_that_it_is_read_again(text: str) -> None:
    assert str(value_of(as_override("key", text))) == text
    assert unreadable([as_override("key", text)]) == []


def test_words_put_together_with_a_path_are_read_as_they_were_meant() -> None:
    """Rows of claims, points with `also`, the command after pre-training, a follow-up."""
    for path in PATHS:
        assert value_of(readable(f"task.data.path={path}")) == path
        ((_, word),) = with_also([("seed=1",)], {"task.data.path": path})[1:]
        assert value_of(word) == path
        assert value_of(as_override("++task.data.path", path)) == path
    assert readable("task.languages=[en,es]") == "task.languages=[en,es]"


@pytest.mark.parametrize("path", ["/data/${x}", r"/data/\${x}"])
def test_a_path_with_a_reference_in_it_is_refused_before_anything_starts(path: str) -> None:
    config = composed("+exp=abnet_iwslt")
    OmegaConf.update(config, "cache_dir", path)
    with pytest.raises(ConfigError, match=r"cache_dir is '.*\$\{x\}', but .*'\$\{' begins a ref"):
        configs.Settings.of(config)


def test_no_module_writes_an_override_by_json() -> None:
    """json.dumps escapes what Hydra's grammar does not read back: é became \\u00e9."""
    source = Path(job_given.__file__).read_text("utf-8")
    assert not re.search(r"=\{json\.dumps", source)
    assert value_of(as_override("a", "é")) == "é" != value_of(f"a={json.dumps('é')}")


def test_words_that_set_a_value_are_written_so_that_hydra_takes_them_wherever_it_stands() -> None:
    """And no word that chooses an option, deletes, or sets a key of Hydra's own."""
    written = {
        "a.new=1": ["++a.new=1"],
        "+a.new=1": ["++a.new=1"],
        "++a.new=1": ["++a.new=1"],
        "a.new=1,2": ["++a.new=1,2"],
        "a={b: 1}": ["++a={b: 1}"],
        "a={_target_: x.Y}": ["++a=null", "++a={_target_: x.Y}"],
        "group=x": ["group=x"],
        "+group=x": ["+group=x"],
        "group={b: 1}": ["++group={b: 1}"],
        "group={_target_: x.Y}": ["~group", "++group={_target_: x.Y}"],
        "group/inner=x": ["group/inner=x"],
        "group@a=x": ["group@a=x"],
        "~a.new": ["~a.new"],
        "hydra.sweep.dir=x": ["hydra.sweep.dir=x"],
        "a=(": ["a=("],
    }
    for word, expected in written.items():
        assert for_hydra([word], {"group"}.__contains__) == expected
    assert for_hydra(["+group=x", "a=1", "+group=y"], {"group"}.__contains__) == [
        "++a=1", "+group=y",
    ]  # fmt: skip


def test_the_value_of_a_flag_is_not_taken_for_a_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise HydraException("this does not compose")

    monkeypatch.setattr(entry, "run_composed", refuse)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.setattr(entry, "composed", False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # main sets it

    with pytest.raises(SystemExit):
        entry.main(["--config-dir", "tests/conf", "training.nonsense=("])

    said = capsys.readouterr().err
    assert "training.nonsense" in said and "tests/conf" not in said
    assert sys.argv[1:] == ["training.nonsense=(", "--config-dir", "tests/conf"]


def test_null_in_place_of_an_option_is_named_with_the_word() -> None:
    for word in ("group=null", "+group=null"):
        with pytest.raises(HydraException, match="group=null: a group takes the name of one"):
            for_hydra([word], {"group"}.__contains__)

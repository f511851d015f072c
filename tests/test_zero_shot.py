"""Pre-train here, fine-tune there: the command that one run ends with starts the other."""

import shlex
from pathlib import Path

import pytest

from tests.test_conf import composed
from xcloud.local_run import run

SMALL = ("tracker=none", "cluster=local")
TEXTS = ("model.text.source.num_texts=400", "model.text.tokenizer.vocab_size=400")
PAIRS = ("task.num_train=64", "task.num_dev=16", "task.num_test=32")


@pytest.mark.slow
def test_what_was_pretrained_is_fine_tuned_by_the_command_that_the_run_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = f"cache_dir={tmp_path / 'cache'}"
    config = composed("+exp=electra_multilingual", *SMALL, *TEXTS, cache, "training.max_steps=2")
    run(config, tmp_path / "there")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("next"))
    command = shlex.split(line)[1:]
    assert command[:2] == ["python", "run.py"]

    config = composed(*command[2:], *SMALL, *PAIRS, cache, "training.max_steps=2")
    summary = run(config, tmp_path / "here")

    assert list(summary["quality"]) == ["accuracy", "accuracy_en", "accuracy_es"]
    scores = summary["quality"]
    assert scores["accuracy"] == (scores["accuracy_en"] + scores["accuracy_es"]) / 2

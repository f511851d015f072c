"""A run on a file of other texts: no run is needed, and no harness."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.causal_models import build, saved, through, where
from tests.corpora import given
from tests.small_tokenizer import write_chat_tokenizer
from xcloud.base.errors import ConfigError, DataError
from xcloud.evaluate import command
from xcloud.evaluate.command import evaluate, key_of, scores_of
from xcloud.evaluate.texts import read_texts, score_texts
from xcloud.models.causal import CausalLM
from xcloud.tasks.chat_template import DATE
from xcloud.tasks.language_modelling import FOLDER_NAME, CausalTokenizer, LanguageModelling
from xcloud.tasks.sources import Folder
from xcloud.use import TextGenerator

LENGTH = 32
TEXTS = ["Ana came on Monday.", "Who came?", "When? On Monday, she said."]
CHATS = [
    [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    for asked, answered in (("Who?", "Ana."), ("When?", "On Monday."))
]


def generator_of(folder: Path, stages: Any = ()) -> TextGenerator:
    """What of a finished run is asked for."""
    task = SimpleNamespace(max_length=LENGTH, cache_dir=str(folder), date=DATE, data=None)
    training = SimpleNamespace(eval_batch_size=2)
    found = SimpleNamespace(
        folder=folder,
        stages=stages,
        experiment=SimpleNamespace(task=task, training=training),
        ask_last=lambda batch, ask: ask(stages[-1], through(stages, batch), batch),
    )
    return cast(TextGenerator, found)


@pytest.mark.parametrize("ending", ["txt", "jsonl", "chats"])
def test_perplexity_of_a_file_is_that_of_transformers_over_its_documents(
    ending: str, tmp_path: Path
) -> None:
    """Each document on its own there, packed here; of chats the answers alone count."""
    write_chat_tokenizer(tmp_path / FOLDER_NAME)
    tokenizer = CausalTokenizer.load(tmp_path / FOLDER_NAME)
    network = saved("llama", tmp_path, vocab_size=len(tokenizer.pretrained))
    stages = [s.eval() for s in build(CausalLM(str(tmp_path)), 2, where(tmp_path))]
    documents = tokenizer.texts(TEXTS)
    if ending == "chats":
        documents = [tokenizer.chat(chat, "here") for chat in CHATS]
        rows = "".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS)
    elif ending == "txt":
        rows = "\n\n".join(TEXTS)
    else:
        rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (file := tmp_path / f"mine.{ending.replace('chats', 'jsonl')}").write_text(rows)
    generator = generator_of(tmp_path, stages)

    found = score_texts(generator, data=read_texts(generator, file=file))

    nats = []
    for document in documents:
        with torch.no_grad():
            logits_SV = network(torch.tensor([document.ids])).logits[0, :-1]
        losses = F.cross_entropy(logits_SV, torch.tensor(document.ids[1:]), reduction="none")
        nats += losses[torch.tensor(document.learned[1:])].tolist()
    assert found.values["loss"] == pytest.approx(sum(nats) / len(nats), rel=1e-4)
    assert found.values["perplexity"] == pytest.approx(math.exp(found.values["loss"]), rel=1e-3)


def test_texts_are_cut_into_documents_as_the_run_was_told(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path / FOLDER_NAME)
    (file := tmp_path / "mine.txt").write_text("Ana came.\nWho?\n\nWhen?\n")
    generator = generator_of(tmp_path)
    found = {}
    for document in ("line", "blank_line", "file"):
        trained = given(
            LanguageModelling, Folder, path=str(tmp_path), max_length=LENGTH, document=document
        )
        generator.experiment.task = trained
        data = read_texts(generator, file=file)
        found[document] = sum(map(len, data.documents["test"]))
    assert found == {"line": 3, "blank_line": 2, "file": 1}


def test_every_number_of_the_harness_is_kept_and_what_is_none_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "version", lambda name: "0.4")
    found = {
        "alias": "own",
        "f1,none": np.float32(0.5),
        "f1_stderr,none": np.float64(0.1),
        "acc,strict": 1,
        "acc_stderr,strict": "N/A",
        "by_class,none": {"yes": 0.5},
    }
    results = {"results": {"own": found}, "n-samples": {}, "n-shot": {}, "versions": {}}
    metrics = scores_of(results, {}, compressor="none", chats=False)["own"]["metrics"]
    assert metrics == {
        "f1": {"value": 0.5, "stderr": 0.1},
        "acc_strict": {"value": 1.0, "stderr": None},
    }
    assert "own: by_class is no number, so it is in no summary" in capsys.readouterr().err


@pytest.mark.parametrize("known", [{}, {"data_test": {"file": "/a/data/test.txt"}}])
def test_files_of_one_name_have_scores_of_their_own(known: dict[str, Any]) -> None:
    scores = dict(known)
    files = ["/a/data/test.txt", "/a/data/test.jsonl", "/b/data/test.jsonl.gz", "/a/data/test.txt"]
    keys = []
    for file in files:
        key = key_of(Path(file), known=scores)
        scores[key] = {"file": file}
        keys.append(key)
    assert keys == ["data_test", "data_test_jsonl", "b_data_test_jsonl", "data_test"]


def test_a_file_of_another_form_or_none_is_named(tmp_path: Path) -> None:
    generator = generator_of(tmp_path)
    with pytest.raises(DataError, match=r"--texts: there is no file .*none\.jsonl"):
        read_texts(generator, file=tmp_path / "none.jsonl")
    (tmp_path / "mine.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"mine\.csv must end in \.txt or \.jsonl"):
        read_texts(generator, file=tmp_path / "mine.csv")
    (tmp_path / "mine.jsonl").write_text('{"instruction": "Add", "output": "2"}\n')
    with pytest.raises(DataError, match="its keys are instruction, output"):
        read_texts(generator, file=tmp_path / "mine.jsonl")


def test_keys_of_a_file_that_are_not_used_are_named(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path / FOLDER_NAME)
    generator = generator_of(tmp_path)
    (tmp_path / "mine.jsonl").write_text('{"text": "Ana came.", "label": 1}\n' * 2)
    described = read_texts(generator, file=tmp_path / "mine.jsonl").describe()
    assert "mine.jsonl: not used: 'label' of 2 rows" in described


def test_options_of_the_harness_are_refused_beside_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path), "--texts", "mine.txt"]
    with pytest.raises(ConfigError, match="--limit, --plain: only with --tasks"):
        evaluate([*words, "--limit", "3", "--plain"])
    for option, value in (("--limit", "0"), ("--num-fewshot", "-1")):
        with pytest.raises(ConfigError, match=f"{option} must be .*{value}"):
            evaluate([str(tmp_path), "--tasks", "arc", option, value])
    with pytest.raises(SystemExit):
        evaluate([str(tmp_path)])
    assert "one of the arguments --texts --tasks is required" in capsys.readouterr().err

"""A run under tasks of lm-evaluation-harness, which is an extra (`evaluate`)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.causal_models import KINDS, SMALL
from tests.configs import composed
from tests.harness_models import asked, opened
from xcloud.base.errors import ConfigError, DataError
from xcloud.job.config import Settings
from xcloud.launch.local import run
from xcloud.record.evaluation import evaluation_metrics
from xcloud.study.results import PointResult, Results
from xcloud.use import TextGenerator

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.xdist_group("causal_run")]
pytest.importorskip("lm_eval", reason='needs lm-eval: pip install -e ".[evaluate]"')

from xcloud.evaluate.command import evaluate  # noqa: E402
from xcloud.evaluate.harness import HarnessModel  # noqa: E402

ROWS = [
    {"question": "The doctor has", "choices": ["a plan", "the the of it"], "answer": 0},
    {"question": "", "choices": ["Ana is late.", "zqx"], "answer": 0},
]
CHOICE = {
    "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_target": "answer",
    "doc_to_choice": "{{choices}}", "metric_list": [{"metric": "acc"}], "metadata": {"version": 2},
}  # fmt: skip
ROLLING = {
    "output_type": "loglikelihood_rolling", "doc_to_text": "",
    "doc_to_target": "{{question}} {{choices[0]}}", "metric_list": [{"metric": "bits_per_byte"}],
}  # fmt: skip
GENERATION = {
    "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["e"], "max_gen_toks": 12},
    "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose messages go through a compressor; its compressor is coarse enough to see."""
    folder = tmp_path_factory.mktemp("run")
    words = [word for word in SMALL if word not in ("compression=none", "tracker=none")]
    words += [f"cache_dir={folder}/cache", f"tracker.root={folder}/mlruns", "cluster/wan=free"]
    run(Settings.of(composed(*words, "compression=int4")), folder / "run")
    return folder / "run"


def write_task(
    folder: Path, name: str, about: dict[str, Any], rows: list[dict[str, Any]] = ROWS
) -> str:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cached")}
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(task | about))  # JSON is YAML
    return str(file)


def test_scores_go_into_summary_tracker_table_and_the_harness_own_file(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [
        write_task(tmp_path, f"toy_{name}", about)
        for name, about in (("choice", CHOICE), ("rolling", ROLLING), ("written", GENERATION))
    ]
    evaluate([str(finished), "--tasks", *tasks])
    evaluate([str(finished), "--tasks", tasks[1], "--uncompressed", "--limit", "1"])

    summary = json.loads((finished / "summary.json").read_text())
    found = summary["evaluation"]
    assert found.keys() == {
        "toy_choice", "toy_rolling", "toy_written", "toy_rolling_uncompressed"
    }  # fmt: skip
    choice = found["toy_choice"]
    assert choice["num_samples"] == 2 and choice["task_version"] == 2
    assert choice["compressor"] == "int4+int4" and choice["harness"].startswith("lm-eval 0.4")
    assert found["toy_rolling_uncompressed"]["compressor"] == "none"
    assert found["toy_rolling_uncompressed"]["num_samples"] == 1
    files = [json.loads(path.read_text()) for path in finished.glob("lm_eval/results_*.json")]
    assert len(files) == 2
    theirs = next(one for one in files if "toy_choice" in one["results"])
    assert theirs["results"]["toy_choice"]["acc,none"] == choice["metrics"]["acc"]["value"]
    assert theirs["config"]["model_args"]["compressor"] == "int4+int4"
    assert "toy_written" in capsys.readouterr().out

    figures = dict(evaluation_metrics(summary))
    assert figures["eval_toy_choice_acc"] == choice["metrics"]["acc"]["value"]
    tracker = TextGenerator(finished).experiment.tracker
    named = json.loads((finished / "mlflow_run.json").read_text())["run_id"]
    tracked = tracker.store.client().get_run(named).data.metrics
    assert figures.items() <= tracked.items()
    result = PointResult("sweep", finished, {"seed": 0}, summary)
    assert result.scores[0] == "perplexity" and "eval_toy_choice_acc" in result.scores
    row = Results([result]).rows.iloc[0]
    assert row["eval_toy_choice_acc"] == figures["eval_toy_choice_acc"]


# peft asks transformers under a name that is going away.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_likelihoods_and_texts_are_those_of_transformers(finished: Path, tmp_path: Path) -> None:
    """Of the joined model, uncompressed. The compressor's are others."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    generator = TextGenerator(finished, compressed=False)
    generator.join(tmp_path)
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(about["base_model_name_or_path"])
    network = PeftModel.from_pretrained(base, tmp_path).eval()
    model = HarnessModel(generator, chats=False, cached=True)
    pairs = [("The doctor has", " a plan"), ("", "Ana is late."), ("Ana", " is " + "late " * 9)]
    long = "The train has left, and the doctor has a plan. " * 30
    assert len(model.tok_encode(long)) > 2 * model.max_length

    def likelihood(ids: list[int], num_scored: int) -> float:
        with torch.no_grad():
            logits_SV = network(torch.tensor([ids[:-1]])).logits[0].log_softmax(1)
        labels = torch.tensor(ids[1:])
        return float(logits_SV.gather(1, labels[:, None])[-num_scored:].double().sum())

    expected = []
    for context, text in pairs:
        whole = model.tok_encode(context + text)
        if not context:
            whole = [model.prefix_token_id, *whole]
        expected.append(likelihood(whole, len(whole) - len(model.tok_encode(context))))
    found = model.loglikelihood([asked(*pair) for pair in pairs])
    assert [nats for nats, _ in found] == pytest.approx(expected, rel=1e-5)

    ids = [model.prefix_token_id, *model.tok_encode(long)]
    size = model.max_length
    total = likelihood(ids[: size + 1], size)
    for end in range(2 * size, len(ids) + size - 1, size):
        last = min(end, len(ids) - 1)
        total += likelihood(ids[last - size : last + 1], last - (end - size))
    assert model.loglikelihood_rolling([asked(long)]) == pytest.approx([total], rel=1e-5)

    coarse = HarnessModel(TextGenerator(finished), chats=False, cached=True)
    crossed = coarse.loglikelihood([asked(*pair) for pair in pairs])
    assert [nats for nats, _ in crossed] != pytest.approx(expected, rel=1e-4)

    how = {"until": ["e"], "max_gen_toks": 12}
    [written] = model.generate_until([asked("The doctor", how)])
    ids = model.tok_encode("The doctor")
    theirs = network.generate(
        input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False,
        max_new_tokens=12, pad_token_id=model.eot_token_id,
    )[0, len(ids) :]  # fmt: skip
    whole = generator.text.decode([*ids, *theirs])[len(generator.text.decode(ids)) :]
    assert written == whole.split("e")[0]


POSITIONS = 64
LONG = "The train has left, and the doctor has a plan. " * 3
SCORED = [
    ("The doctor", " has a plan"), ("The doctor", " has no"), ("", "Ana is late."),
    ("Who? ", "Ana"),
    (LONG, " and so on"), ("x", LONG[:POSITIONS]),
]  # fmt: skip
ASKED = [
    ("Who came?", {"until": ["e"], "max_gen_toks": 12}),
    ("Who came?", {"until": "</s>", "max_new_tokens": 20, "do_sample": False}),
    ("Ana", {"until": [], "max_gen_toks": 20}),
    (LONG, {"until": ["e", " "], "max_gen_toks": 12}),
]
CHAT = [
    {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who came?"},
    {"role": "assistant", "content": "The one who came "},
]  # fmt: skip


def both_models(kind: str, folder: Path, begins: bool, learns_chats: bool) -> tuple[Any, Any]:
    """A checkpoint in a folder as this package and lm-eval's own model for transformers open it.

    begins: the tokenizer writes a begin token itself.
    """
    from lm_eval.models.huggingface import HFLM

    ours, _ = opened(kind, folder, POSITIONS, begins=begins, learns_chats=learns_chats)
    theirs = HFLM(pretrained=str(folder), device="cpu", batch_size=1, dtype="float32")
    return HarnessModel(ours, chats=learns_chats, cached=True), theirs


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_request_is_answered_as_by_the_harness_own_model(
    kind: str, begins: bool, tmp_path: Path
) -> None:
    """Scores, whole texts and texts written on: with and without a context, too long ones, with
    and without a begin token of the tokenizer's own."""
    ours, theirs = both_models(kind, tmp_path, begins=begins, learns_chats=False)
    assert ours.max_length == theirs.max_length == POSITIONS
    assert ours.prefix_token_id == theirs.prefix_token_id
    for text in ("Ana came.", "", "<user>Ana"):
        assert ours.tok_encode(text) == theirs.tok_encode(text)

    requests = [asked(*pair) for pair in SCORED]
    found = ours.loglikelihood(requests)
    expected = theirs.loglikelihood(requests)
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in expected], rel=1e-4)
    assert [best for _, best in found] == [best for _, best in expected]
    assert ours.not_whole["num_cut"] == {"": {0}}
    whole = [asked(LONG), asked("Ana"), asked(LONG[: POSITIONS + 1])]
    found = ours.loglikelihood_rolling(whole)
    assert found == pytest.approx(theirs.loglikelihood_rolling(whole), rel=1e-4)

    requests = [asked(text, dict(how)) for text, how in ASKED]
    assert ours.generate_until(requests) == theirs.generate_until(requests)


def test_what_the_harness_own_model_refuses_is_refused_before_anything_is_computed(
    tmp_path: Path,
) -> None:
    """An answer that does not fit; a question and an answer of which only one fits."""
    ours, theirs = both_models("llama", tmp_path, begins=False, learns_chats=False)
    for model, error in ((ours, DataError), (theirs, AssertionError)):
        with pytest.raises(error):
            model.loglikelihood([asked("x", " y"), asked("x", "y" * (POSITIONS + 1))])
        with pytest.raises(error):
            model.generate_until([asked(LONG, {"max_gen_toks": POSITIONS})])


def test_a_question_that_fits_stays_whole_and_its_answer_gets_what_is_left(tmp_path: Path) -> None:
    """Where the harness's own model leaves out the question's beginning, or all but refuses."""
    ours, theirs = both_models("gpt2", tmp_path, begins=False, learns_chats=False)
    question = "x" * (POSITIONS - 6)
    [text] = ours.generate_until([asked(question, {"until": []})])  # the harness's usual 256
    [expected] = theirs.generate_until([asked(question, {"until": [], "max_gen_toks": 6})])
    assert text == expected
    assert ours.not_whole == {"num_cut": {}, "num_short": {"": {0}}}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_chat_is_asked_and_an_answer_begun_as_by_the_harness_own_model(
    kind: str, tmp_path: Path
) -> None:
    ours, theirs = both_models(kind, tmp_path, begins=False, learns_chats=True)
    for chat, asks in ((CHAT[:2], True), (CHAT, False), (CHAT[1:], False)):
        text = ours.apply_chat_template(chat, add_generation_prompt=asks)
        assert text == theirs.apply_chat_template(chat, add_generation_prompt=asks)
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        how = {"until": ["</s>"], "max_gen_toks": 5}
        asked_both = [asked(text[-40:], dict(how))]
        assert ours.generate_until(asked_both) == theirs.generate_until(asked_both)
    assert text.endswith("The one who came "), "nothing ends the turn"


def test_what_does_not_fit_is_counted_by_sample_and_said(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A question of two choices is one sample."""
    (tmp_path / "long").mkdir()
    rows = [*ROWS, {"question": LONG * 9, "choices": ["a plan", "no plan"], "answer": 0}]
    tasks = [write_task(tmp_path / "long", "long_choice", CHOICE, rows)]
    kwargs = {"until": ["e"], "max_gen_toks": 60}
    (tmp_path / "short").mkdir()
    about = GENERATION | {"generation_kwargs": kwargs}
    tasks.append(write_task(tmp_path / "short", "short_answer", about))
    evaluate([str(finished), "--tasks", *tasks])
    found = json.loads((finished / "summary.json").read_text())["evaluation"]
    said = capsys.readouterr().err
    assert found["long_choice"]["num_cut"] == 1 and found["long_choice"]["num_short"] == 0
    assert "long_choice: 1 of 3 samples: the question does not fit into 64 positions" in said
    assert found["short_answer"]["num_cut"] == 0 and found["short_answer"]["num_short"] >= 1
    assert "short_answer: " in said and "leave fewer tokens" in said


def test_the_runs_own_test_set_has_the_runs_own_perplexity(finished: Path) -> None:
    """Within what the compressor's blocks change, which other batches cut elsewhere."""
    generator = TextGenerator(finished)
    task = generator.experiment.task
    rows = task.read(frozenset({"text", "label"})).splits["test"]
    samples, _ = generator.text.samples(rows, task.max_length, "test")
    pieces = [(None, piece.ids[:1], piece.ids[1:]) for sample in samples for piece in sample]
    model = HarnessModel(generator, chats=False, cached=True)
    nats = sum(nats for nats, _ in model._loglikelihood_tokens(pieces, disable_tqdm=True))
    perplexity = math.exp(-nats / sum(len(ids) for _, _, ids in pieces))

    quality = json.loads((finished / "summary.json").read_text())["quality"]
    assert perplexity == pytest.approx(quality["perplexity"], rel=2e-3)


def test_what_cannot_be_run_is_named(finished: Path, tmp_path: Path) -> None:
    def refused(error: type[Exception], said: str, *tasks: str) -> None:
        with pytest.raises(error, match=said):
            evaluate([str(finished), "--tasks", *tasks])

    refused(ConfigError, "there is no file .*none.yaml", str(tmp_path / "none.yaml"))
    lost = write_task(tmp_path, "lost", CHOICE | {"dataset_kwargs": {"data_files": "no.jsonl"}})
    refused(DataError, "lost.yaml cannot be loaded: FileNotFoundError", lost)
    how = {"until": ["e"], "num_beams": 4}
    beams = write_task(tmp_path, "beams", GENERATION | {"generation_kwargs": how})
    refused(ConfigError, "num_beams cannot be followed here", beams)
    broken = write_task(tmp_path, "broken", CHOICE | {"doc_to_text": "{{question"})
    refused(DataError, "broken.yaml cannot be loaded: TemplateSyntaxError", broken)
    unsafe = write_task(tmp_path, "unsafe", CHOICE | {"unsafe_code": True})
    refused(DataError, "cannot run these tasks: ValueError.*marked as unsafe", unsafe)
    letters = [row | {"answer": "ab"[row["answer"]]} for row in ROWS]
    named = write_task(tmp_path, "named", CHOICE, rows=letters)
    refused(DataError, "not among its choices; .* must be the answer's place", named)

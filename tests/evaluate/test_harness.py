"""What lm-evaluation-harness is answered, request by request, without that package, and what
becomes of its results. test_evaluate.py holds the same beside the package's own model."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness_models import asked, opened, stand_in
from tests.small_tokenizer import write_chat_tokenizer
from xcloud.base.errors import ConfigError, DataError
from xcloud.evaluate import command
from xcloud.job.config import EXPERIMENT_FILE
from xcloud.tasks.language_modelling import FOLDER_NAME

POSITIONS = 16
HARNESS = "xcloud.evaluate.harness"


@pytest.fixture(scope="module")
def lm_eval() -> Iterator[dict[str, ModuleType]]:
    modules = stand_in()
    names = [*modules, HARNESS]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules.update(modules)
    yield modules
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return opened("llama", tmp_path_factory.mktemp("model"), positions=POSITIONS)


@pytest.fixture
def model(lm_eval: object, checkpoint: tuple[Any, Any]) -> Any:
    return importlib.import_module(HARNESS).HarnessModel(checkpoint[0], chats=False, cached=True)


@pytest.fixture
def network(checkpoint: tuple[Any, Any]) -> Any:
    return checkpoint[1]


@torch.no_grad()
def nats_of(network: Any, ids: list[int], num_scored: int) -> float:
    """The log-likelihood of the last so many tokens."""
    logits_SV = network(torch.tensor([ids[:-1]])).logits[0].log_softmax(1)
    found = logits_SV.gather(1, torch.tensor(ids[1:])[:, None])
    return float(found[-num_scored:].double().sum())


@torch.no_grad()
def greedy(network: Any, ids: list[int], num: int) -> list[int]:
    found = list(ids)
    for _ in range(num):
        found.append(int(network(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(ids) :]


def test_an_answer_has_its_likelihood_and_is_the_best_if_each_of_its_tokens_is(
    model: Any, network: Any
) -> None:
    pairs = [("Who", " came"), ("", "Ana"), ("Who?  ", "Ana"), ("x", "y")]
    found = model.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True)
    for (context, answer), (nats, _) in zip(pairs, found, strict=True):
        ids = model.tok_encode(context + answer)
        num = len(ids) - len(model.tok_encode(context.rstrip()))
        expected = nats_of(network, [model.prefix_token_id] * (not context) + ids, num)
        assert nats == pytest.approx(expected, rel=1e-5)
    context = model.tok_encode("Who")
    best = greedy(network, context, 3)
    answers = [best, best[:1], [*best[:2], (best[2] + 1) % 259], [(best[0] + 1) % 259, *best[1:]]]
    found = model._loglikelihood_tokens([(None, context, ids) for ids in answers])
    assert [is_best for _, is_best in found] == [True, True, False, False]


def test_a_context_without_room_loses_its_beginning_and_its_sample_is_counted_once(
    model: Any, network: Any
) -> None:
    texts = ["a" * (POSITIONS - 1), "b" * POSITIONS, "c" * 40]
    requests = [
        asked(text, answer, task="toy", sample=number)
        for number, text in enumerate(texts)
        for answer in ("no", "it")
    ]
    found = model.loglikelihood(requests)
    for request, (nats, _) in zip(requests, found, strict=True):
        ids = model.tok_encode("".join(request.args))[-POSITIONS - 1 :]
        assert nats == pytest.approx(nats_of(network, ids, 2), rel=1e-5)
    assert model.not_whole == {"num_cut": {"toy": {1, 2}}, "num_short": {}}
    model.loglikelihood([asked("a", "b", task="other")])
    assert model.not_whole == {"num_cut": {"toy": {1, 2}}, "num_short": {}}


def test_an_answer_that_is_empty_or_longer_than_the_model_is_refused_unasked(
    model: Any, network: Any
) -> None:
    longest = [7] * POSITIONS
    [(nats, _)] = model._loglikelihood_tokens([(None, [5, 9], longest)])
    assert nats == pytest.approx(nats_of(network, [9, *longest], POSITIONS), rel=1e-5)
    model.generator = None  # nobody may be asked
    with pytest.raises(DataError, match="an answer of 17 tokens does not fit into the 16"):
        model._loglikelihood_tokens([(("x", "y"), [5], [7]), (("x", "z"), [5], [7, *longest])])
    with pytest.raises(DataError, match="nothing to score"):
        model._loglikelihood_tokens([(("x", "y"), [5], [])])


def test_texts_are_scored_the_longest_first_as_many_as_fit_into_a_batch(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two times 16 tokens fit; each text gets its own score, whatever lies beside it."""
    shapes = []
    ask_last = model.generator.ask_last

    def asks(batch: Any, ask: Any) -> Any:
        shapes.append(tuple(batch["text"].shape))
        return ask_last(batch, ask)

    lengths = [5, 16, 5, 4, 16, 5, 5, 5, 5, 5]
    requests = [(None, [n + 3], [40 + n] * length) for n, length in enumerate(lengths)]
    alone = [model._loglikelihood_tokens([one])[0] for one in requests]
    monkeypatch.setattr(model.generator, "ask_last", asks)
    found = model._loglikelihood_tokens(requests)
    assert shapes == [(2, 16), (6, 5), (2, 5)]
    for (nats, best), (expected, is_best) in zip(found, alone, strict=True):
        assert nats == pytest.approx(expected, rel=1e-5) and best == is_best


def test_a_whole_text_is_scored_in_windows_from_the_begin_token_on(
    model: Any, network: Any
) -> None:
    texts = ["The doctor has a plan, and the train has left.", "", "Ana"]
    expected = []
    for text in texts:
        ids = [model.prefix_token_id, *model.tok_encode(text)]
        total = 0.0
        for start in range(0, len(ids) - 1, POSITIONS):
            last = min(start + POSITIONS, len(ids) - 1)
            window = ids[max(0, last - POSITIONS) : last + 1]
            total += nats_of(network, window, last - start)
        expected.append(total)
    assert len(model.tok_encode(texts[0])) % POSITIONS and expected[1] == 0
    found = model.loglikelihood_rolling([asked(text) for text in texts])
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("cached", [True, False])
def test_a_question_is_written_on_with_the_most_probable_tokens(
    model: Any, network: Any, cached: bool
) -> None:
    """However drawing is forbidden."""
    model.cached = cached
    text = model.generator.text
    expected = text.decode(greedy(network, text.encode("Who", begins=False), 6))
    for how in (
        {"max_gen_toks": 6, "until": []},
        {"max_new_tokens": 6, "do_sample": False, "temperature": 1.0},
        {"max_gen_toks": 6, "do_sample": True, "temperature": 1e-6},
        {"max_gen_toks": 6, "do_sample": True, "top_p": 1e-9},
        {"max_gen_toks": 6, "until": ["", "</s>"]},
    ):
        assert model.generate_until([asked("Who", how)]) == [expected]
    assert model.not_whole == {"num_cut": {}, "num_short": {}}


def test_samples_of_one_question_differ_and_come_again_in_another_evaluation(model: Any) -> None:
    how = {"until": [], "max_gen_toks": 8, "do_sample": True}
    found = model.generate_until([asked("Who?", how)] * 5)
    assert len(set(found)) == 5
    again = type(model)(model.generator, chats=False, cached=True)
    assert again.generate_until([asked("Who?", how)] * 5) == found


def test_a_text_ends_at_the_first_stop_in_it_and_at_a_special_token(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = model.generator.text
    follows = text.encode("bananas", begins=False) + list(text.special_ids(["<assistant>"]))
    given = []

    def tokens_after(ids: Any, most: int, choice: Any, cached: bool, ends: Any) -> Any:
        for token in [*follows, *text.encode(" and more", begins=False)]:
            if token in ends:
                return
            given.append(token)
            yield token

    monkeypatch.setattr(model.generator, "tokens_after", tokens_after)

    def written(*until: str) -> str:
        given.clear()
        [found] = model.generate_until([asked("x", {"until": [*until]})])
        return str(found)

    assert written("n", "a") == written("a", "n") == "b"
    assert len(given) == 2, "nothing more is asked for"
    assert written("s", "nan") == "ba" and len(given) == 5
    assert written("<assistant>") == "bananas"
    assert written() == "bananas and more"


def test_a_question_keeps_its_end_and_an_answer_gets_what_room_there_is(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that fits stays whole; one that does not leaves the answer its length."""
    prompts = []

    def tokens_after(ids: Any, most: int, choice: Any, cached: bool, ends: Any) -> Any:
        prompts.append((len(ids), most, model.generator.text.decode(ids)))
        return iter(())

    monkeypatch.setattr(model.generator, "tokens_after", tokens_after)
    letters = "abcdefghijklmnopqrst"
    table = [(12, 4), (12, 5), (15, 256), (16, 15), (20, 3)]
    for number, (length, most) in enumerate(table):
        how = {"max_gen_toks": most}
        request = asked(letters[:length], how, task="toy", sample=number)
        assert model.generate_until([request]) == [""]
    model.generate_until([asked("", {"max_gen_toks": 2})])
    assert [(num, most) for num, most, _ in prompts] == [
        (12, 4), (12, 5), (15, 256), (1, 15), (13, 3), (1, 2)
    ]  # fmt: skip
    assert prompts[4][2] == letters[-13:]
    assert model.not_whole == {"num_cut": {"toy": {3, 4}}, "num_short": {"toy": {1, 2}}}
    with pytest.raises(DataError, match="a prompt of 16 tokens and an answer of 16"):
        model.generate_until([asked(letters[:16], {"max_gen_toks": 16})])
    with pytest.raises(ConfigError, match="min_p, num_beams cannot be followed here; do_sample"):
        model.generate_until([asked("x", {"num_beams": 4, "min_p": 0.1})])


def test_texts_begin_as_the_tokenizer_begins_them_and_chats_as_their_template_does(
    lm_eval: object, tmp_path: Path
) -> None:
    generator, _ = opened("llama", tmp_path, POSITIONS, begins=True, learns_chats=True)
    harness = importlib.import_module(HARNESS)
    plain = harness.HarnessModel(generator, chats=False, cached=True)
    chats = harness.HarnessModel(generator, chats=True, cached=True)
    text = generator.text
    begin = plain.prefix_token_id
    assert (begin, plain.eot_token_id) == (text.token_ids.bos, text.token_ids.eos)
    assert plain.tokenizer_name == str(tmp_path) and plain.max_length == POSITIONS
    bare = text.encode("Ana", begins=False)
    assert plain.tok_encode("Ana") == [begin, *bare]
    assert plain.tok_encode("<user>Ana") == [begin, *bare]
    assert plain.tok_encode("Ana", add_special_tokens=False) == bare
    assert plain.tok_encode("Ana", add_special_tokens=True) == [begin, *bare]
    assert chats.tok_encode("Ana") == chats.tok_encode("Ana", add_special_tokens=True) == bare

    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The one "}]
    asks = chats.apply_chat_template(chat[:1])
    assert asks == "<user>Who?</s><assistant>"
    begun = chats.apply_chat_template(chat, add_generation_prompt=False)
    assert begun == f"{asks}The one ", "nothing ends the turn"


RESULTS = {
    "results": {
        "toy": {
            "alias": "toy", "acc,none": 0.5, "acc_stderr,none": 0.1,
            "f1,strict": 1, "f1_stderr,strict": "N/A", "said,none": "much",
        },
        "several": {"acc,none": 0.25},
    },
    "n-samples": {"toy": {"original": 9, "effective": 3}},
    "n-shot": {"toy": 2}, "versions": {"toy": 4, "several": 1},
}  # fmt: skip


@pytest.fixture
def harness(
    lm_eval: dict[str, ModuleType], checkpoint: tuple[Any, Any],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> SimpleNamespace:  # fmt: skip
    """A finished run, and a harness that notes what it was asked. Its tasks are `solo`, and those
    of a group `g`: the task `a`, and the group `h` of the task `b`."""
    generator, _ = checkpoint
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / EXPERIMENT_FILE).write_text("")
    (run / "summary.json").write_text('{"evaluation": {"old": {"metrics": {}}}}')
    seen = SimpleNamespace(run=run, asked={}, error=None, writes=True, warning="")
    a, b, solo = (SimpleNamespace(task_name=name) for name in ("a", "b", "solo"))
    outer = SimpleNamespace(name="g", get_all_tasks=lambda: [a, b])
    inner = SimpleNamespace(name="h", get_all_tasks=lambda: [b])
    loaded = {
        "g": {
            "tasks": {"a": a, "b": b}, "groups": {"g": outer, "h": inner},
            "group_map": {"g": ["h", "a"], "h": ["b"]},
        },
        "solo": {"tasks": {"solo": solo}},
    }  # fmt: skip

    class TaskManager:
        task_index = all_tasks = (*loaded, "broken")

        def __init__(self, include_path: str | None, include_defaults: bool) -> None:
            seen.manager = (include_path, include_defaults)

        def load(self, names: list[str]) -> Any:
            if names == ["broken"]:
                raise RuntimeError("its data is gone")
            return loaded[Path(names[0]).stem]

    class EvaluationTracker:
        def __init__(self, output_path: str) -> None:
            self.folder = Path(output_path).parent

        def save_results_aggregated(self, results: Any) -> None:
            if seen.writes:
                self.folder.mkdir(exist_ok=True)
                number = len([*self.folder.iterdir()])
                (self.folder / f"results_{number}.json").write_text(json.dumps(results))

    def simple_evaluate(model: Any, **given: Any) -> Any:
        seen.asked = given
        seen.model = model
        logging.getLogger("lm_eval.api.task").warning(seen.warning)
        if seen.error:
            raise seen.error
        model.not_whole["num_cut"] = {"toy": {4, 7}, "other": {1}}
        return RESULTS

    def open_run(folder: Path, compressed: bool) -> Any:
        seen.compressed = compressed
        about = vars(generator) | {
            "folder": folder / "model", "compressor": "int4+int4", "longest": POSITIONS,
            "text": SimpleNamespace(learns_chats=True), "ask_last": generator.ask_last,
        }  # fmt: skip
        return SimpleNamespace(**about)

    monkeypatch.setattr(lm_eval["lm_eval"], "simple_evaluate", simple_evaluate, raising=False)
    for name, what in (("tasks", TaskManager), ("loggers", EvaluationTracker)):
        monkeypatch.setattr(lm_eval[f"lm_eval.{name}"], what.__name__, what, raising=False)
    table = lambda results: f"table of {len(results['results'])}"  # noqa: E731
    monkeypatch.setattr(lm_eval["lm_eval.utils"], "make_table", table, raising=False)
    monkeypatch.setattr(command, "TextGenerator", open_run)
    monkeypatch.setattr(command, "version", lambda name: "0.4")
    return seen


def test_results_of_tasks_go_into_the_summary_beside_those_of_before(
    harness: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    command.evaluate([str(harness.run), "--tasks", "g", "solo", "--limit", "3"])
    found = json.loads((harness.run / "summary.json").read_text())["evaluation"]
    both = {"harness": "lm-eval 0.4", "compressor": "int4+int4", "chat_template": True}
    toy = {
        "metrics": {
            "acc": {"value": 0.5, "stderr": 0.1}, "f1_strict": {"value": 1.0, "stderr": None}
        },
        "num_samples": 3, "num_fewshot": 2, "task_version": 4, "num_cut": 2, "num_short": 0,
    }  # fmt: skip
    several = {
        "metrics": {"acc": {"value": 0.25, "stderr": None}},
        "num_samples": None, "num_fewshot": None, "task_version": 1,
    }  # fmt: skip
    assert found == {"old": {"metrics": {}}, "toy": toy | both, "several": several | both}
    said = capsys.readouterr()
    assert "toy: 2 of 3 samples: the question does not fit into 16 positions" in said.err
    assert "several:" not in said.err and "leave fewer tokens" not in said.err
    assert "table of 2\nbetween clouds through: int4+int4\n" in said.out


def test_the_harness_is_asked_what_the_command_was_asked(harness: SimpleNamespace) -> None:
    """A group is run as one, with the groups in it."""
    command.evaluate([str(harness.run), "--tasks", "g", "solo", "--limit", "3"])
    given = harness.asked
    assert [getattr(one, "name", None) or one.task_name for one in given["tasks"]] == ["g", "solo"]
    assert harness.manager == (None, True) and harness.compressed
    assert (given["limit"], given["num_fewshot"]) == (3, None)
    assert given["apply_chat_template"] and not given["log_samples"]
    assert given["bootstrap_iters"] == 1000
    assert given["model_args"] == {"model": str(harness.run), "compressor": "int4+int4"}
    assert harness.model.chats and harness.model.cached

    (file := harness.run.parent / "solo.yaml").write_text("{}")
    words = ["--tasks", str(file), "--include", str(harness.run.parent), "--num-fewshot", "0"]
    command.evaluate([str(harness.run), *words, "--plain", "--no-cache", "--uncompressed"])
    given = harness.asked
    assert harness.manager == (str(harness.run.parent), False) and not harness.compressed
    assert (given["limit"], given["num_fewshot"]) == (None, 0)
    assert not given["apply_chat_template"]
    assert not harness.model.chats and not harness.model.cached
    found = json.loads((harness.run / "summary.json").read_text())["evaluation"]
    assert [*found] == ["old", "toy", "several", "toy_uncompressed", "several_uncompressed"]


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (["solo", "--include", "nowhere"], ConfigError, "--include: there is no folder nowhere"),
        (["none.yaml"], ConfigError, "--tasks: there is no file none.yaml"),
        (["none.yml"], ConfigError, "--tasks: there is no file none.yml"),
        (["sol"], ConfigError, "lm-eval has no task 'sol'.*solo"),
        (["broken"], DataError, "--tasks: broken cannot be loaded: RuntimeError: .*gone"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_had_is_named(
    harness: SimpleNamespace, words: list[str], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        command.evaluate([str(harness.run), "--tasks", *words])
    assert not harness.asked


def test_what_the_harness_cannot_do_or_write_is_an_error_and_leaves_the_summary(
    harness: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (harness.run / "summary.json").read_text()
    words = [str(harness.run), "--tasks", "solo"]
    harness.warning = "Label index was not in within range of available choices,Sample: {}"
    with pytest.raises(DataError, match="not among its choices; in the task's file doc_to_target"):
        command.evaluate(words)
    harness.warning = ""
    for error, kind, said in (
        (ValueError("unsafe"), DataError, "cannot run these tasks: ValueError: 'unsafe'"),
        (KeyError("x"), DataError, "cannot run these tasks: KeyError"),
        (TypeError("x"), DataError, "cannot run these tasks: TypeError"),
        (ConfigError("as it is"), ConfigError, "^as it is$"),
        (RuntimeError("of its own"), RuntimeError, "of its own"),
    ):
        harness.error = error
        with pytest.raises(kind, match=said):
            command.evaluate(words)
    harness.error = None
    harness.writes = False
    with pytest.raises(DataError, match="could not write its results"):
        command.evaluate(words)
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as where it is not installed
    with pytest.raises(ConfigError, match="needs the package lm-eval"):
        command.evaluate(words)
    assert (harness.run / "summary.json").read_text() == before


def test_scores_of_a_file_of_texts_go_into_the_summary(
    harness: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_chat_tokenizer(harness.run / "model" / FOLDER_NAME)
    (file := tmp_path / "mine.txt").write_text("Ana came.\n\nWho?\n\nA much longer text.\n")
    command.evaluate([str(harness.run), "--texts", str(file), "--uncompressed"])
    assert not harness.compressed
    found = json.loads((harness.run / "summary.json").read_text())["evaluation"]
    scores = found[f"{tmp_path.name}_mine_uncompressed"]
    assert {**scores, "metrics": None} == {
        "metrics": None, "num_samples": 3, "compressor": "int4+int4", "file": str(file)
    }  # fmt: skip
    assert scores["metrics"].keys() == {"perplexity", "loss"}
    for of in scores["metrics"].values():
        assert of["value"] > 0 and of["stderr"] >= 0
    said = capsys.readouterr().out
    assert f"{file}: " in said and "perplexity  " in said
    assert said.endswith(f"between clouds through: int4+int4\n{harness.run}/summary.json\n")

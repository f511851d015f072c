"""Preference tuning: pairs as samples, the score, the loss, whole runs beside transformers and
peft, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf

from tests.causal_models import batch_of, loss_of, saved, through, where, words
from tests.causal_models import build as built_stages
from tests.configs import build, composed
from tests.corpora import given
from tests.nightly import first_daily
from tests.runs import in_threads, losses, weights
from tests.small_tokenizer import write_chat_tokenizer
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.model import NO_LABEL, NO_TOKEN
from xcloud.demo import NUM_ROWS, reviews
from xcloud.features.preferences.feature import PreferenceTuning, PreferenceTuningAtRank
from xcloud.features.preferences.loss import PreferenceLoss, trained_pieces
from xcloud.job.config import Settings
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Lora
from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.tasks import preferences
from xcloud.tasks.language_modelling import CausalTokenizer, Chat
from xcloud.tasks.preferences import DemoAnswers, PreferenceData, Preferences, review_pairs
from xcloud.tasks.sources import Folder, Hub
from xcloud.tasks.tokenizer import PretrainedTokenizer

ALL = frozenset({"text", "types", "label"})
ASKED = {"role": "user", "content": "Who came?"}
GREETED = {"role": "assistant", "content": "Hello."}
ANA = {"role": "assistant", "content": "Ana."}
NOBODY = {"role": "assistant", "content": "No idea."}
TEXTS = {"prompt": "Who came?", "chosen": " Ana.", "rejected": " No idea."}
CHATS = {"prompt": [GREETED, ASKED], "chosen": [ANA], "rejected": [NOBODY]}
RENDERED = "<assistant>Hello.</s><user>Who came?</s><assistant>"
ADAPTERS = {"_target_": "xcloud.models.causal_network.Lora", "r": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with drawn weights and a tokenizer of bytes, as a folder."""
    folder = tmp_path_factory.mktemp("checkpoint")
    saved("llama", folder, vocab_size=259, max_position_embeddings=128)
    write_chat_tokenizer(folder)
    return folder


def written(folder: Path, rows: Sequence[object], *splits: str) -> None:
    for split in splits or ("train", "dev", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def load(
    folder: Path, tokenizer: Path, fields: frozenset[str] = ALL, **settings: Any
) -> PreferenceData:
    task = given(
        Preferences,
        Folder,
        path=str(folder),
        tokenizer=PretrainedTokenizer(str(tokenizer)),
        **settings,
    )
    task.check()
    data = task.load(fields, seed=0)
    assert isinstance(data, PreferenceData)
    return data


def documents(data: PreferenceData, tokenizer: Path) -> list[tuple[str, str]]:
    """Of the first pair: each answer's whole text, and what of it is to be guessed."""
    read = CausalTokenizer.load(tokenizer).pretrained
    batch = data.batch("train", torch.tensor([0]))
    text, types, label = (batch[name][0] for name in ("text", "types", "label"))
    assert sorted(set(types.tolist())) == [0, 1]
    found = []
    for number in (0, 1):
        guessed = label[types == number]
        found.append(
            (read.decode(text[types == number]), read.decode(guessed[guessed != NO_LABEL]))
        )
    return found


@pytest.mark.parametrize(
    ("row", "prompt", "answers"),
    first_daily([
        (TEXTS, "Who came?", (" Ana.</s>", " No idea.</s>")),
        (CHATS, RENDERED, ("Ana.</s>", "No idea.</s>")),
        (
            {"chosen": [GREETED, ASKED, ANA], "rejected": [GREETED, ASKED, NOBODY]},
            RENDERED,
            ("Ana.</s>", "No idea.</s>"),
        ),
        (
            {"prompt": "Who came?", "chosen": [GREETED, ASKED, ANA],
             "rejected": [GREETED, ASKED, NOBODY]},
            RENDERED,
            ("Ana.</s>", "No idea.</s>"),
        ),
    ], count=2),
    ids=["texts", "chats", "chats with the prompt inside", "chats beside the prompt as a text"],
)  # fmt: skip
def test_a_pair_is_two_documents_of_which_the_answers_are_guessed(
    row: dict[str, Any], prompt: str, answers: tuple[str, str], tmp_path: Path, checkpoint: Path
) -> None:
    """Earlier turns of the assistant belong to the prompt."""
    written(tmp_path, [row])
    found = documents(load(tmp_path, checkpoint), checkpoint)
    assert found == [(prompt + answer, answer) for answer in answers]


CHATS_TWICE = {
    "prompt": CHATS["prompt"],
    "chosen": [GREETED, ASKED, ANA],
    "rejected": [GREETED, ASKED, NOBODY],
}
TEXTS_TWICE = {"prompt": "Who?", "chosen": "Who? Ana.", "rejected": "Who? No idea."}


@pytest.mark.parametrize(
    ("row", "prompt", "answers"),
    [
        (CHATS_TWICE, RENDERED, ("Ana.</s>", "No idea.</s>")),
        (TEXTS_TWICE, "Who?", (" Ana.</s>", " No idea.</s>")),
    ],
)
def test_a_prompt_that_both_answers_repeat_is_learned_from_once(
    row: dict[str, Any], prompt: str, answers: tuple[str, str], tmp_path: Path, checkpoint: Path
) -> None:
    written(tmp_path, [row])
    found = documents(load(tmp_path, checkpoint), checkpoint)
    assert found == [(prompt + answer, answer) for answer in answers]


def test_the_system_message_of_a_row_begins_both_chats(tmp_path: Path, checkpoint: Path) -> None:
    written(tmp_path, [{**CHATS, "system": "Be brief."}])
    found = documents(load(tmp_path, checkpoint), checkpoint)
    assert [text for text, _ in found] == [
        f"<system>Be brief.</s>{RENDERED}{answer}" for answer in ("Ana.</s>", "No idea.</s>")
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**TEXTS, "system": "Be brief."}, "its key 'system' belongs to chats"),
        ({**TEXTS, "tools": [{"name": "clock"}]}, "its key 'tools' belongs to chats"),
        ({**CHATS, "tools": [{"name": "clock"}]}, "never writes 'tools'"),
        ({**CHATS, "images": ["a.png"]}, "its key 'images' is not read"),
        (
            {**CHATS_TWICE, "chosen": [ANA]},
            "one answer repeats the prompt, and ",
        ),
        ({**CHATS_TWICE, "prompt": "Other?"}, "prompt 'Other.' is none of the messages"),
    ],
)
def test_what_a_pair_would_lose_is_refused(
    row: dict[str, Any], said: str, tmp_path: Path, checkpoint: Path
) -> None:
    written(tmp_path, [row])
    with pytest.raises(DataError, match=said):
        load(tmp_path, checkpoint)


def test_scores_of_pairs_that_nobody_reads_are_told(tmp_path: Path, checkpoint: Path) -> None:
    written(tmp_path, [{**TEXTS, "score_chosen": 1.0, "score_rejected": 2.0}])
    said = load(tmp_path, checkpoint).describe()
    assert "not used: 'score_chosen' of 3 rows, 'score_rejected' of 3 rows" in said


USELESS: dict[str, tuple[list[dict[str, Any]], str, int]] = {
    "equal": ([{**TEXTS, "rejected": " Ana. "}], preferences.EQUAL, 1),
    "equal chats": ([{**CHATS, "rejected": [ANA]}], preferences.EQUAL, 1),
    "empty": ([{**TEXTS, "rejected": " "}], preferences.EMPTY, 1),
    "an empty chat": ([{**CHATS, "chosen": [{**ANA, "content": ""}]}], preferences.EMPTY, 1),
    "both ways round": (
        [{**TEXTS, "chosen": "a", "rejected": "b"}, {**TEXTS, "chosen": "b", "rejected": "a"}],
        preferences.MIRRORED,
        2,
    ),
    "no answer": ([{**CHATS, "rejected": [ASKED]}], preferences.UNANSWERED, 1),
}


@pytest.mark.parametrize("case", USELESS)
def test_pairs_that_teach_nothing_are_left_out_and_counted_and_refused_where_all_are(
    case: str, tmp_path: Path, checkpoint: Path
) -> None:
    """They are left out before dev and test are held out of train: chance would else fill a dev
    set of one pair with one of them."""
    rows, reason, num = USELESS[case]
    good = CHATS if isinstance(rows[0]["prompt"], list) else TEXTS
    written(tmp_path, [good, *rows, good])
    data = load(tmp_path, checkpoint)
    assert data.num_samples("train") == 2, "the same pair twice is learned twice"
    cut = data.num_cut[f"pairs left out: {reason}"]["train"]
    assert (cut.num, cut.of) == (num, num + 2)
    for split in ("dev", "test"):
        (tmp_path / f"{split}.jsonl").unlink()
    written(tmp_path, [*20 * rows, *3 * [good]], "train")
    data = load(tmp_path, checkpoint)
    assert [data.num_samples(split) for split in ("train", "dev", "test")] == [1, 1, 1]
    cut = data.num_cut[f"pairs left out: {reason}"]["train"]
    assert (cut.num, cut.of) == (20 * num, 20 * num + 3)
    written(tmp_path, rows, "train")
    with pytest.raises(DataError, match=f"none of {num} rows of train can be learned: .*{reason}"):
        load(tmp_path, checkpoint)


def test_the_error_of_a_score_is_that_of_a_mean_over_pairs(
    tmp_path: Path, checkpoint: Path
) -> None:
    rows = [{**TEXTS, "chosen": f" {n}"} for n in range(4)]
    written(tmp_path, rows)
    data = load(tmp_path, checkpoint)
    data.reference["test"] = {n: [20_000_000, 1, 0, 1] for n in range(4)}
    gains = [1, 2, 4, 9]  # nats by which the chosen answer became more probable
    predictions = {n: [(20 - gain) * 1_000_000, 1, 0, 1] for n, gain in enumerate(gains)}
    scores = data.score("test", predictions)
    assert scores.values["chosen_reward"] == pytest.approx(0.1 * np.mean(gains))
    assert scores.errors["chosen_reward"] == pytest.approx(0.1 * np.std(gains) / 2, abs=1e-6)


def test_a_pair_fits_by_both_its_documents_together(tmp_path: Path, checkpoint: Path) -> None:
    written(tmp_path, [TEXTS])
    lengths = [len(text.encode()) for text in ("Who came? Ana.", "Who came? No idea.")]
    needed = sum(lengths) + 2  # with an end token each
    assert load(tmp_path, checkpoint, max_length=needed).num_samples("train") == 1
    with pytest.raises(DataError, match=f"1 do not fit into task.max_length={needed - 1}"):
        load(tmp_path, checkpoint, max_length=needed - 1)


def test_a_special_token_that_stands_in_a_pair_is_cut_like_any_other_word(
    tmp_path: Path, checkpoint: Path
) -> None:
    written(tmp_path, [{**TEXTS, "prompt": "</s>?", "chosen": "a</s>"}])
    batch = load(tmp_path, checkpoint).batch("train", torch.tensor([0]))
    end = CausalTokenizer.load(checkpoint).token_ids.eos
    assert (batch["text"] == end).sum() == 2, "one at the end of each answer"


def test_a_pair_that_does_not_fit_whole_is_left_out_and_counted(
    tmp_path: Path, checkpoint: Path
) -> None:
    long = {**TEXTS, "rejected": "x" * 60}
    written(tmp_path, [long, TEXTS])
    data = load(tmp_path, checkpoint, max_length=64)
    assert data.num_samples("train") == 1
    assert documents(data, checkpoint)[0][0] == "Who came? Ana.</s>"
    cut = data.num_cut["pairs left out"]["train"]
    assert (cut.num, cut.of, cut.setting) == (1, 2, "task.max_length")
    written(tmp_path, [long], "test")
    with pytest.raises(DataError, match=r"none of 1 pairs can .* task\.max_length=64"):
        load(tmp_path, checkpoint, max_length=64)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Who?", "completion": "Ana."},
        {"chosen": " Ana.", "rejected": " No idea."},
        {"prompt": [ASKED], "chosen": " Ana.", "rejected": " No idea."},
        {"prompt": "Who came?", "chosen": [ANA], "rejected": [NOBODY]},
        {"prompt": [ASKED], "chosen": [ANA], "rejected": [{"from": "gpt", "value": "Ana."}]},
    ],
)
def test_rows_of_another_form_are_refused_before_anything_starts(
    row: dict[str, Any], tmp_path: Path, checkpoint: Path
) -> None:
    written(tmp_path, [row])
    with pytest.raises(DataError, match=r"train\.jsonl.*A line is {\"prompt\""):
        load(tmp_path, checkpoint)


def test_a_later_row_of_another_form_is_named(tmp_path: Path, checkpoint: Path) -> None:
    written(tmp_path, [TEXTS, {**TEXTS, "chosen": [ANA]}])
    with pytest.raises(DataError, match=r"train\.jsonl, row 2: it is of another form"):
        load(tmp_path, checkpoint)


def test_a_data_set_in_the_form_of_the_hub_has_the_same_samples(
    tmp_path: Path, checkpoint: Path
) -> None:
    written(tmp_path, [CHATS, CHATS])
    task = given(
        Preferences, Hub, dataset=str(tmp_path), tokenizer=PretrainedTokenizer(str(checkpoint))
    )
    found = task.load(ALL, seed=0)
    own = load(tmp_path, checkpoint)
    for name, column in own.batch("train", torch.arange(2)).items():
        assert torch.equal(found.batch("train", torch.arange(2))[name], column)


def test_a_cloud_sees_its_own_fields_and_all_clouds_have_one_fingerprint(
    tmp_path: Path, checkpoint: Path
) -> None:
    written(tmp_path, [TEXTS, CHATS][:1])
    parts = [frozenset({"label"}), frozenset({"text", "types"}), ALL]
    views = [load(tmp_path, checkpoint, part) for part in parts]
    assert len({view.fingerprint() for view in views}) == 1
    assert load(tmp_path, checkpoint, max_length=70).fingerprint() != views[0].fingerprint()
    for view, part in zip(views, parts, strict=True):
        assert view.batch("train", torch.tensor([0])).keys() == {"ids", *part}
    labels, text, _ = views
    assert labels.weight(torch.tensor([0, 0])) == 2, "pairs"
    with pytest.raises(DataError, match="no field visible"):
        text.weight(torch.tensor([0]))
    for view in (labels, views[2]):
        view.reference["test"] = {0: [9, 2, 9, 2]}
        said = view.sample_outputs("test", view.score("test", {0: [7, 2, 9, 2]}), 1)
        lines = dict(line.split(maxsplit=1) for line in said.strip().splitlines())
        if view is labels:
            assert not lines, "answers without their prompt say nothing"
        else:
            assert [*lines] == ["prompt", "chosen", "rejected"] and "came" in lines["prompt"]
            assert lines["chosen"] == "Ana." and lines["rejected"] == "No idea."


def test_chats_of_the_test_set_are_shown_with_the_chosen_answer(
    tmp_path: Path, checkpoint: Path
) -> None:
    written(tmp_path, [CHATS, CHATS])
    task = given(
        Preferences, Folder, path=str(tmp_path), tokenizer=PretrainedTokenizer(str(checkpoint))
    )
    assert task.test_chats(1) == [Chat([GREETED, ASKED, ANA])]


def test_rewards_are_gains_in_log_probability_since_the_start(
    tmp_path: Path, checkpoint: Path
) -> None:
    """Worked out by hand: nats 4 and 6 at the start, then (2, 7), (5, 9) and as before."""
    written(tmp_path, [TEXTS] * 3)
    data = load(tmp_path, checkpoint, beta=0.5)
    start = [4_000_000, 2, 6_000_000, 3]
    data.reference["test"] = dict.fromkeys(range(3), start)
    now = {0: [2_000_000, 2, 7_000_000, 3], 1: [5_000_000, 2, 6_500_000, 3], 2: start}
    scores = data.score("test", now)

    margins = [0.5 * (2 + 1), 0.5 * (-1 + 0.5), 0.0]
    assert list(scores.values) == ["reward_accuracy", "reward_margin", "chosen_reward", "loss"]
    assert scores.values["reward_accuracy"] == pytest.approx((100 + 0 + 50) / 3)
    assert scores.values["reward_margin"] == pytest.approx(sum(margins) / 3, abs=1e-6)
    assert scores.values["chosen_reward"] == pytest.approx((1 - 0.5 + 0) / 3, abs=1e-6)
    loss = sum(math.log(1 + math.exp(-margin)) for margin in margins) / 3
    assert scores.values["loss"] == pytest.approx(loss, abs=1e-6)
    assert [scores.samples[i]["margin"] for i in range(3)] == pytest.approx(margins)
    assert scores.errors.keys() == scores.values.keys() == data.signature().keys()


def test_the_loss_of_a_micro_batch_is_the_sum_over_its_pairs() -> None:
    loss = PreferenceLoss(beta=0.1)
    loss.reference = {7: [3_000_000, 1, 5_000_000, 1], 2: [4_000_000, 1, 4_000_000, 1]}
    nats = torch.tensor([2.0, 6.0, 5.0, 3.0], dtype=torch.float64, requires_grad=True)
    found = loss(nats, torch.tensor([7, 2]))
    found.backward()

    margins = [(3 - 2) - (5 - 6), (4 - 5) - (4 - 3)]
    assert found.item() == pytest.approx(sum(math.log1p(math.exp(-0.1 * m)) for m in margins))
    falls = [0.1 / (1 + math.exp(0.1 * m)) for m in margins]
    expected = [falls[0], -falls[0], falls[1], -falls[1]]
    assert nats.grad is not None and nats.grad.tolist() == pytest.approx(expected)


def test_the_loss_of_a_model_is_equation_7_of_the_paper(tmp_path: Path) -> None:
    """Rafailov et al., arXiv:2305.18290, from log-probabilities that transformers computes of each
    answer alone: -log s(beta ((log p - log p_0)(chosen) - (log p - log p_0)(rejected)))."""
    beta = 0.3
    network = saved("llama", tmp_path / "start")
    batch = batch_of([words(9, 1), words(7, 2)], [words(6, 3), words(8, 4)])
    batch["label"][:, :2] = NO_LABEL  # prompts
    start = summed_logs(network, batch)
    plain = CausalLM(checkpoint=str(tmp_path / "start"))
    loss = PreferenceLoss(beta)
    stages = built_stages(plain, 2, where(tmp_path))
    predicted = stages[-1].predict(through(stages, batch), batch)
    loss.reference = dict(zip(batch["ids"].tolist(), predicted, strict=True))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    network.save_pretrained(tmp_path / "now")
    now = summed_logs(network, batch)

    trained = CausalLM(checkpoint=str(tmp_path / "now"))
    stages = built_stages(trained, 2, where(tmp_path, document_loss=loss))
    found = loss_of(stages, batch).item()

    gained_B2 = now - start
    margins_B = beta * (gained_B2[:, 0] - gained_B2[:, 1])
    assert margins_B.abs().min() > 1e-3, "the model has moved"
    expected = sum(math.log1p(math.exp(-margin)) for margin in margins_B.tolist())
    assert found == pytest.approx(expected, abs=1e-4)


def summed_logs(network: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probability of each answer, [B, 2]: the sum over its tokens."""
    logs = torch.zeros(len(batch["text"]), 2, dtype=torch.float64)
    for sample, answer in product(range(len(logs)), range(2)):
        here = (batch["types"][sample] == answer) & (batch["text"][sample] != NO_TOKEN)
        tokens, labels = (batch[name][sample][here] for name in ("text", "label"))
        with torch.no_grad():
            logs_SV = network(tokens[None]).logits[0].double().log_softmax(-1)
        for place, label in enumerate(labels.tolist()):
            if label != NO_LABEL:
                logs[sample, answer] += logs_SV[place, label]
    return logs


def test_routers_of_experts_weigh_as_much_as_the_loss_of_the_pairs(tmp_path: Path) -> None:
    """Beside texts their loss counts once for each guessed token, here once for each pair."""
    routed = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    saved("qwen3_moe", tmp_path, **routed)
    model = CausalLM(checkpoint=str(tmp_path), lora=Lora(r=2))
    batch = batch_of([words(5, 1), words(4, 2)], [words(6, 3), words(3, 4)])

    def total(nats: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return nats.sum().float()

    by_token = built_stages(model, 2, where(tmp_path))
    by_pair = built_stages(model, 2, where(tmp_path, document_loss=total))
    num_tokens = int((batch["label"] != NO_LABEL).sum())
    predicted = by_token[-1].predict(through(by_token, batch), batch)
    nats = sum(sum(sample[::2]) for sample in predicted) / 1e6
    routers = (loss_of(by_token, batch).item() - nats) / num_tokens
    assert routers > 0.1
    assert loss_of(by_pair, batch).item() == pytest.approx(nats + 2 * routers, rel=1e-4)


@pytest.mark.parametrize(("num_samples", "size"), [(50, 4), (50, 3), (7, 4), (7, 16)])
def test_a_longer_run_asks_the_model_of_the_start_in_the_same_pieces(
    num_samples: int, size: int
) -> None:
    plan = BatchPlan(num_samples, batch_size=6, seed=3)
    longest = trained_pieces(plan, num_steps=30, size=size)
    assert sorted(torch.cat(longest).tolist()) == list(range(num_samples)), "each once"
    for num_steps in range(1, 12):
        pieces = trained_pieces(plan, num_steps=num_steps, size=size)
        for piece, same in zip(pieces, longest, strict=False):
            assert torch.equal(piece, same)
        met = {i for step in range(1, num_steps + 1) for i in plan.ids(step).tolist()}
        asked = {*torch.cat(pieces).tolist()}
        assert met <= asked and len(asked) < len(met) + size


def test_praise_and_blame_of_the_demo_begin_alike_and_are_reviews() -> None:
    pairs = review_pairs()
    assert len(set(pairs)) == len(pairs) and len(pairs) > DemoAnswers().total
    labels = dict(reviews(NUM_ROWS["reviews"]))
    for beginning, praise, blame in pairs:
        assert len(beginning.split()) == 3
        assert labels[beginning + praise] and not labels[beginning + blame]
    with pytest.raises(ConfigError, match=r"pairs of reviews, and 9,000 are asked for"):
        given(Preferences, DemoAnswers, num_train=8_400).load(ALL, seed=0)


# Whole runs, with their ranks in threads.

ROWS = [
    {"prompt": f"Question {n}?", "chosen": f" Yes, {n % 5}.", "rejected": f" No, {n % 7}."}
    for n in range(24)
]


def config_of(folder: Path, checkpoint: Path, *overrides: str) -> DictConfig:
    written(folder, ROWS, "train")
    written(folder, ROWS[:9], "dev", "test")
    config = composed(
        "+exp=dpo_reviews", "tracker=none", "cluster/wan=free", "training.precision=fp32",
        "training.batch_size=8", "training.eval_batch_size=4", "training.max_steps=5",
        "training.optimizer.learning_rate=0.01", "training.optimizer.warmup_steps=1",
        "training.evaluate_every=2", *overrides,
    )  # fmt: skip
    tokenizer = {
        "_target_": "xcloud.tasks.tokenizer.PretrainedTokenizer",
        "name_or_path": str(checkpoint),
    }
    config.task = {
        "_target_": "xcloud.tasks.preferences.Preferences",
        "data": {"_target_": "xcloud.tasks.sources.Folder", "path": str(folder)},
        "tokenizer": tokenizer, "max_length": 64
    }  # fmt: skip
    config.model = {
        "_target_": "xcloud.models.causal.CausalLM",
        "checkpoint": str(checkpoint), "lora": ADAPTERS,
    }  # fmt: skip
    return OmegaConf.create(OmegaConf.to_container(config))


def by_peft(config: DictConfig, checkpoint: Path, cache: Path) -> tuple[list[float], Any]:
    """The same training in one process, with the whole model of transformers and peft."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM, AutoTokenizer

    job = Settings.of(config).job.pipeline
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(checkpoint),
        LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"]),
    )
    own = CausalLM(checkpoint=str(checkpoint), lora=Lora(r=4))
    drawn = {
        name: tensor
        for stage in built_stages(own, 2, where(cache, seed=job.seed))
        for name, tensor in stage.exported().items()
    }
    set_peft_model_state_dict(model, drawn)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], betas=(0.9, 0.999), weight_decay=0.0
    )
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    plan = job.batch_plan(len(ROWS))

    def log_probability(prompt: str, answer: str) -> torch.Tensor:
        given = tokenizer.encode(prompt)
        ids = torch.tensor([[*given, *tokenizer.encode(answer), tokenizer.eos_token_id]])
        words = model(ids).logits[0, :-1].log_softmax(-1)
        return words.gather(1, ids[0, 1:, None])[len(given) - 1 :].sum()

    found = []
    for step in range(1, job.max_steps + 1):
        loss = torch.zeros(())
        for row in (ROWS[i] for i in plan.ids(step).tolist()):
            gained = []
            for answer in (row["chosen"], row["rejected"]):
                with torch.no_grad(), model.disable_adapter():
                    start = log_probability(row["prompt"], answer)
                gained.append(log_probability(row["prompt"], answer) - start)
            loss = loss - F.logsigmoid(0.1 * (gained[0] - gained[1])) / len(plan.ids(step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = job.training.optimizer.learning_rate_at(step, job.max_steps)
        optimizer.step()
        found.append(loss.item())
    return found, model


# peft asks transformers under a name that is going away.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_losses_and_adapters_are_those_of_one_process_with_peft(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import get_peft_model_state_dict

    config = config_of(tmp_path, checkpoint, "compression=none")
    in_threads(tmp_path / "run", config, monkeypatch)
    expected, model = by_peft(config, checkpoint, tmp_path)

    found = losses(tmp_path / "run")
    assert found == pytest.approx(expected, abs=5e-6)
    assert found[0] == pytest.approx(math.log(2), abs=5e-6), "nothing is learned yet"
    assert found[-1] < found[0] - 0.05
    theirs = get_peft_model_state_dict(model)
    ours = {name.split(".", 1)[1]: value for name, value in weights(tmp_path / "run").items()}
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name].detach(), rtol=0, atol=2e-5)


AT_NIGHT = [pytest.mark.slow, pytest.mark.nightly]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("trained", ["adapters", pytest.param("all weights", marks=AT_NIGHT)])
def test_a_run_that_goes_on_is_equal_to_one_that_was_not_interrupted(
    trained: str, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit; the model of the start is asked again, not the one that was saved."""
    more = ("training.checkpoint.every_steps=1", "compression=int8")
    config = config_of(tmp_path, checkpoint, *more)
    if trained == "all weights":
        config.model.lora = None
    config.training.optimizer.decay = "constant"
    in_threads(tmp_path / "whole", config, monkeypatch)
    config.training.max_steps = 2
    in_threads(tmp_path / "part", config, monkeypatch)
    config.training.max_steps = 5
    in_threads(tmp_path / "part", config, monkeypatch)

    assert losses(tmp_path / "part") == losses(tmp_path / "whole")
    ours = weights(tmp_path / "part")
    theirs = weights(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "cluster",
    [
        "two_clouds_dp",
        *(pytest.param(other, marks=AT_NIGHT) for other in ("two_clouds", "u_shape")),
    ],
)
def test_chosen_answers_win_through_a_compressed_boundary(
    cluster: str, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where two ranks share a stage, and each asks the model of the start about half."""
    config = config_of(
        tmp_path, checkpoint, "compression=int8", f"cluster={cluster}", "training.max_steps=12"
    )
    summary = in_threads(tmp_path / "run", config, monkeypatch)

    found = losses(tmp_path / "run")
    assert found[0] == pytest.approx(math.log(2), abs=1e-5)
    assert summary["quality"]["reward_accuracy"] == 100.0
    assert summary["quality"]["reward_margin"] > 0.1
    assert summary["quality"]["loss"] < math.log(2)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["strategy=local_updates"], r"task=preferences.*strategy=local_updates makes 2 of it"),
        (["plan=show"], r"task=preferences.*but plan= tries.*task=language_modelling"),
        (["model=transformer"], r"task=preferences.*this model gives none: choose model=causal"),
    ],
)
def test_a_job_in_which_the_model_of_the_start_could_not_be_asked_is_refused(
    overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        build("+exp=dpo_reviews", *overrides)


def test_clouds_that_feed_one_other_have_no_task_and_so_no_preferences() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'task'\. Allowed here: .*feed"):
        build("+exp=electra_multilingual", "task=preferences")


@pytest.mark.parametrize(
    ("overrides", "said"),
    first_daily(
        [
            (["compression=delta_int4"], r"forward_memory \(delta.*changes rows.*leave it out"),
            (["compression=phased_example"], r"compression changes during the run"),
            (["compression=svd_fp16_int8"], r"compression\.forward=.*svd.*take none, fp16"),
            (
                ["security/defences/forward=gaussian_noise"],
                r"security\.defences\.forward=.*other noise to every message.*leave it out",
            ),
        ],
        count=3,
    ),
)
def test_a_boundary_that_would_change_rows_between_start_and_training_is_refused(
    overrides: list[str], said: str
) -> None:
    job = build("+exp=dpo_reviews", *overrides)
    with pytest.raises(ConfigError, match=f"task=preferences asks the model of the start.*{said}"):
        job.check()


def test_rows_that_stay_in_one_cloud_are_not_compressed_and_so_not_refused() -> None:
    build("+exp=dpo_reviews", "compression=svd_fp16_int8", "cluster=one_cloud").check()


def test_the_headline_says_what_the_answers_are_judged_against() -> None:
    said = build("+exp=dpo_reviews").headline
    assert "preferences against the model of the start, beta 0.1" in said


@dataclass
class Built:
    document_loss: Any = None


def test_the_last_stage_alone_learns_from_the_loss_of_pairs() -> None:
    job = SimpleNamespace(cluster=SimpleNamespace(num_stages=3), task=SimpleNamespace(beta=0.25))
    context: Any = SimpleNamespace(job=job)
    at_rank = PreferenceTuningAtRank(context, PreferenceTuning())
    made: list[Any] = [at_rank.build_context(n, group=None, context=Built()) for n in range(3)]  # type: ignore[arg-type]
    assert [one.document_loss for one in made[:2]] == [None, None]
    assert made[2].document_loss is at_rank.loss and at_rank.loss.beta == 0.25


def test_a_table_of_both_answers_alone_is_read() -> None:
    table = Mock(columns=lambda: ["chosen", "rejected"], rows=lambda *names, **given: [[1, 2]])
    with mock.patch.object(preferences, "CHAT_KEYS", ()):
        assert [*preferences._cells(table)] == [{"chosen": 1, "rejected": 2}]
    table.columns = lambda: ["prompt", "chosen"]
    with pytest.raises(DataError, match="its keys are"):
        [*preferences._cells(table)]

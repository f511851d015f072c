"""Chat templates run in a child process that has little time and memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.corpora import given
from tests.nightly import NIGHTLY
from tests.small_tokenizer import TEMPLATE, write_chat_tokenizer
from xcloud.base.errors import ConfigError, DataError
from xcloud.tasks import chat_template
from xcloud.tasks.language_modelling import CausalTokenizer, LanguageModelling
from xcloud.tasks.sources import Folder
from xcloud.tasks.tokenizer import PretrainedTokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "¿Qué\n hay?"},
    {"role": "assistant", "content": "{{ nothing }} 😀"},
]
USUAL = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "special": "{{ bos_token }}{% for m in messages %}{% if loop.first %}[{% endif %}"
    "{{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
    "blocks": "{%- for m in messages %}\n    {%- if m.role == 'system' %}{% continue %}"
    "{%- endif %}\n    {{- m.content | tojson }}\n{%- endfor %}\n",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
}


def tokenizer_with(template: str) -> Any:
    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")),
        bos_token="[CLS]", eos_token="[SEP]", unk_token="[UNK]", pad_token="[PAD]",
    )  # fmt: skip
    made.chat_template = template
    return made


@pytest.mark.parametrize("ask", [False, True])
@pytest.mark.parametrize("template", USUAL.values(), ids=USUAL)
def test_a_template_writes_what_transformers_has_it_write(template: str, ask: bool) -> None:
    made = tokenizer_with(template)
    found = CausalTokenizer(made, "toy").render(CHAT, ask, "here")
    wanted = made.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=ask)
    assert found == wanted and "hay?" in found.encode().decode("unicode_escape")


DATED = (
    "{{ strftime_now('%d %b %Y %H:%M:%S.%f %s') }}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati"])
def test_a_template_that_writes_the_day_writes_the_runs(
    zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    # A process that an earlier test has started would keep the zone of that test.
    chat_template.template_process().close()
    tokenizer = CausalTokenizer(tokenizer_with(DATED), "toy")
    assert tokenizer.render(CHAT[:1], False, "here").startswith(
        "01 Jan 2026 00:00:00.000000 1767225600"
    )
    tokenizer.date = "2024-02-29"
    assert tokenizer.render(CHAT[:1], False, "here").startswith(
        "29 Feb 2024 00:00:00.000000 1709164800"
    )
    assert tokenizer.writes_date
    other = CausalTokenizer(tokenizer_with(USUAL["chatml"]), "toy")
    other.render(CHAT, False, "here")
    assert not other.writes_date


def test_a_run_says_its_date_and_is_another_run_with_another(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    write_chat_tokenizer(folder, template="{{ strftime_now('%d %b %Y') }}" + TEMPLATE)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "train.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 4)

    def loaded(**settings: str) -> Any:
        task = given(
            LanguageModelling,
            Folder,
            path=str(tmp_path),
            tokenizer=PretrainedTokenizer(str(folder)),
            **settings,
        )
        return task.load(frozenset(task.fields), 0)

    first, same, other = loaded(), loaded(), loaded(date="2026-01-02")
    assert "the chat template writes the date 2026-01-01 (task.date)" in first.describe()
    assert first.fingerprint() == same.fingerprint() != other.fingerprint()
    assert first.own_digests() == same.own_digests()
    name = "tokens of text of train"
    assert first.own_digests()[name] != other.own_digests()[name]
    task = given(LanguageModelling, Folder, path=str(tmp_path), date="2026-01-02")
    first.save_tokenizers(tmp_path / "model")
    assert task.saved_text(tmp_path / "model").date == "2026-01-02"
    with pytest.raises(ConfigError, match=r"task\.date"):
        given(LanguageModelling, Folder, path=str(tmp_path), date="today")


TOO_MUCH = {
    "loop": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "more than 1 s of the processor",
    ),
    "memory": ("{{ ('x' * 2**30) | length }}", "MiB"),
    "padded": ("{{ 'x'.ljust(2**30) | length }}", "MiB"),
    "text": ("{{ 'x' * (17 * 2**20) }}", "it writes 17,825,792 characters"),
    "calls": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}", "more than 1 s of the processor",
    ),
    "escape": ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    "error": ("{{ raise_exception('no system message') }}", "no system message"),
    "syntax": ("{% for %}", "Expected an expression"),
}  # fmt: skip


@pytest.fixture(scope="module")
def limited() -> Iterator[chat_template.TemplateProcess]:
    made = chat_template.TemplateProcess(processor_s=1)
    yield made
    made.close()


def test_a_chat_is_not_charged_for_what_was_written_before(
    limited: chat_template.TemplateProcess,
) -> None:
    """To import transformers takes more than the second that each chat has here."""
    for _ in range(3):
        assert limited.render("x", messages=CHAT, settings={}) == ("x", False)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        # Of two that take the same way out one waits for the night.
        pytest.param(*row, id=name, marks=NIGHTLY if name in ("calls", "padded") else ())
        for name, row in TOO_MUCH.items()
    ],
)
def test_a_template_that_takes_too_much_is_an_error_and_the_next_one_is_written(
    template: str,
    said: str,
    limited: chat_template.TemplateProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("xcloud.tasks.language_modelling.template_process", lambda: limited)

    with pytest.raises(DataError, match=f"here: the chat template of toy cannot write.*{said}"):
        CausalTokenizer(tokenizer_with(template), "toy").render(CHAT, False, "here")
    assert CausalTokenizer(tokenizer_with("x"), "toy").render(CHAT, False, "here") == "x"


NOT_REPEATABLE = {
    "random": ("{{ range(100000) | random }}", "it draws at random"),
    "map": ("{{ [[1, 2], [3, 4]] | map('random') | list }}", "it draws at random"),
    "lipsum": ("{{ lipsum(n=1) }}", "it draws at random"),
    "object": ("{{ cycler(1) }}", "an address in memory"),
    "function": ("{{ raise_exception }}", "an address in memory"),
    "method": ("{{ messages[0].content.upper }}", "an address in memory"),
}


@pytest.mark.parametrize(("template", "said"), NOT_REPEATABLE.values(), ids=NOT_REPEATABLE)
def test_a_template_that_would_write_other_texts_in_another_process_is_refused(
    template: str, said: str
) -> None:
    with pytest.raises(DataError, match=f"here: the chat template of toy cannot write.*{said}"):
        CausalTokenizer(tokenizer_with(template), "toy").render(CHAT, False, "here")


def test_a_chat_may_speak_of_addresses_itself() -> None:
    chat = [{"role": "user", "content": "what is <function f at 0x7f3a5ce02fc0>?"}]
    template = "{{ messages[0].content }}"
    found = CausalTokenizer(tokenizer_with(template), "toy").render(chat, False, "here")
    assert found == chat[0]["content"]


def test_a_folder_s_template_is_read_and_kept(tmp_path: Path) -> None:
    tokenizer_with("kept {{ messages[0].content }}").save_pretrained(tmp_path)
    assert CausalTokenizer.load(tmp_path).render(CHAT, False, "here") == "kept Be brief."

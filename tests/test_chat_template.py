"""Chat templates run in a child process that has little time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.nightly import NIGHTLY
from xcloud.base.errors import DataError
from xcloud.tasks import chat_template
from xcloud.tasks.language_modelling import CausalTokenizer

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


def test_a_folder_s_template_is_read_and_kept(tmp_path: Path) -> None:
    tokenizer_with("kept {{ messages[0].content }}").save_pretrained(tmp_path)
    assert CausalTokenizer.load(tmp_path).render(CHAT, False, "here") == "kept Be brief."

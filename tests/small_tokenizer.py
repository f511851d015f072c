"""A tokenizer made in milliseconds, for tests of tasks. BERT's pair form, or RoBERTa's."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from xcloud.demo import pairs as demo_pairs
from xcloud.tasks.tokenizer import Tokenizer, TokenizerChoice, TrainedTokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_chat_tokenizer(folder: Path, template: str = TEMPLATE) -> None:
    """Write a tokenizer of transformers, of single bytes, with a chat template: 259 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["</s>", "<user>", "<assistant>"]
    trainer = trainers.BpeTrainer(
        vocab_size=259, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", additional_special_tokens=special[1:]
    )
    made.chat_template = template
    made.save_pretrained(folder)


@cache
def small_tokenizer(num_separators: int = 1) -> Tokenizer:
    texts = [en for _, en in demo_pairs(300)]
    texts += ["abcdefghijklmnopqrstuvwxyz .,!?'0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZáéíóúñ"]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = TrainedTokenizer(600, "wordpiece", lowercase=True).prepare(texts, Path(folder))
    tokenizer.num_separators = num_separators
    return tokenizer


@dataclass(frozen=True)
class SmallTokenizer(TokenizerChoice):
    """TokenizerChoice."""

    num_separators: int = 1

    def prepare(self, texts: Sequence[str], cache_dir: Path) -> Tokenizer:
        return small_tokenizer(self.num_separators)

"""Importing this makes the texts of public tokenizers, which every fork then has."""

from xcloud.tasks import text_task

text_task.kept_sentences(text_task.TOKENIZER_TEXTS, text_task.TOKENIZER_SEED)

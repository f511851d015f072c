"""A trained causal language model on a file of texts or chats: the loss that a run reports of its
test set, measured on other data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from xcloud.base.errors import DataError
from xcloud.contracts.model import Scores
from xcloud.tasks.language_modelling import FOLDER_NAME, LanguageData, LanguageModelling
from xcloud.tasks.rows import Corpus, unread_keys
from xcloud.tasks.sources import Folder
from xcloud.tasks.tokenizer import PretrainedTokenizer
from xcloud.use import TextGenerator


def read_texts(generator: TextGenerator, file: Path) -> LanguageData:
    """Return the documents of a file as the test set of a run: cut by the run's tokenizer, and
    packed as its samples are. Raises DataError for a file of another form."""
    trained: Any = generator.experiment.task
    folder = Folder(path=str(file.parent), document=getattr(trained.data, "document", None))
    task = LanguageModelling(
        data=folder,
        tokenizer=PretrainedTokenizer(str(generator.folder / FOLDER_NAME)),
        max_length=trained.max_length,
        cache_dir=trained.cache_dir,
        date=trained.date,
    )
    if not file.is_file():
        raise DataError(f"--texts: there is no file {file}")
    for table in folder.files(task.form):
        # The folder's own list of files says which forms can be read; only this one is.
        if table.path == file:
            table.check()
            rows = task.rows_of(table)
            corpus = Corpus({"test": rows}, remarks=unread_keys([table], used=task.used_keys))
            return task.view(corpus, fields=frozenset(task.fields))
    raise DataError(f"--texts: {file} must end in .txt or .jsonl, or in one of both and .gz")


def score_texts(generator: TextGenerator, data: LanguageData) -> Scores:
    """Return perplexity and loss of the test set of `data`."""
    predictions: dict[int, list[int]] = {}
    numbers = torch.arange(data.num_samples("test"))
    for ids in torch.split(numbers, generator.experiment.training.eval_batch_size):
        batch = data.batch("test", ids)
        found = generator.ask_last(batch, lambda last, *given: last.predict(*given))
        predictions |= zip(ids.tolist(), found, strict=True)
    return data.score("test", predictions=predictions)

"""Pairs learned in one language and tested in others, by name: XNLI and PAWS-X.

Sources: Conneau et al., arXiv:1809.05053 (XNLI); Yang et al., arXiv:1908.11828 (PAWS-X).
The score is the mean accuracy over the tested languages, then that of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xcloud.checks import check_choice
from xcloud.errors import ConfigError
from xcloud.tasks.classification import Classification
from xcloud.tasks.corpus.by_language import FilesByLanguage, HubByLanguage
from xcloud.tasks.corpus.demo_labelled import DemoInference, DemoSizes
from xcloud.tasks.corpus.files import Names
from xcloud.tasks.corpus.labelled import ColumnChoice, LabelledCorpus, sampling_of
from xcloud.tasks.sizes import Sizes
from xcloud.tasks.tokenizer import PretrainedTokenizer, TokenizerChoice


@dataclass(frozen=True)
class PairTask:
    classes: tuple[str, ...]
    columns: tuple[str, str]
    hub: str
    languages: tuple[str, ...]


TASKS: Mapping[str, PairTask] = {
    "xnli": PairTask(
        ("entailment", "neutral", "contradiction"), ("premise", "hypothesis"), "facebook/xnli",
        ("en", "ar", "bg", "de", "el", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh"),
    ),
    "pawsx": PairTask(
        ("different", "paraphrase"), ("sentence1", "sentence2"), "google-research-datasets/paws-x",
        ("en", "de", "es", "fr", "ja", "ko", "zh"),
    ),
}  # fmt: skip


def _task(name: str) -> PairTask:
    check_choice("task.name", name, TASKS)
    return TASKS[name]


def cross_lingual_from_demo(
    name: str = "xnli",
    train_language: str = "en",
    languages: Sequence[str] | None = None,
    num_train: int = 8_000,
    num_dev: int = 500,
    num_test: int = 1_000,
    corpus_seed: int = 7,
    tokenizer: TokenizerChoice | None = None,
    max_length: int = 64,
    sizes: Sizes = None,
    cache_dir: str = ".cache",
) -> Classification:
    """Embedded inference pairs in English and Spanish; num_test pairs in each language."""
    if name != "xnli":
        raise ConfigError(f"task.name={name}: the demo has xnli only; take profile=files")
    corpus = DemoInference(
        DemoSizes(num_train, num_dev, num_test, corpus_seed), train_language, languages
    )
    return _built(name, corpus, tokenizer, max_length, sizes, cache_dir)


def cross_lingual_from_files(
    name: str = "xnli",
    path: str = "",
    train_language: str = "en",
    languages: Sequence[str] | None = None,
    text_columns: Names = None,
    label_column: str | None = None,
    dev_share: int | float = 0.02,
    max_train_samples: int | None = None,
    max_eval_samples: int | None = None,
    split_seed: int = 0,
    tokenizer: TokenizerChoice | None = None,
    max_length: int = 128,
    sizes: Sizes = None,
    cache_dir: str = ".cache",
) -> Classification:
    """The task from files in the folder `path`; see FilesByLanguage. max_eval_samples: of dev,
    and of each language of the test."""
    _task(name)
    sampling = sampling_of(dev_share, 0.02, max_train_samples, max_eval_samples, split_seed)
    columns = ColumnChoice(text_columns, label_column, 2)
    corpus = FilesByLanguage(path, train_language, languages, columns, sampling)
    return _built(name, corpus, tokenizer, max_length, sizes, cache_dir)


def cross_lingual_from_hub(
    name: str = "xnli",
    path: str | None = None,
    train_language: str = "en",
    languages: Sequence[str] | None = None,
    revision: str | None = None,
    max_train_samples: int | None = None,
    max_eval_samples: int | None = None,
    split_seed: int = 0,
    tokenizer: TokenizerChoice | None = None,
    max_length: int = 128,
    sizes: Sizes = None,
    cache_dir: str = ".cache",
) -> Classification:
    """The task from the hub, in all its languages unless some are named."""
    task = _task(name)
    sampling = sampling_of(0.02, 0.02, max_train_samples, max_eval_samples, split_seed)
    columns = ColumnChoice(list(task.columns), "label", 2)
    tested = task.languages if languages is None else languages
    corpus = HubByLanguage(path or task.hub, train_language, tested, columns, revision, sampling)
    return _built(name, corpus, tokenizer, max_length, sizes, cache_dir)


def _built(
    name: str,
    corpus: LabelledCorpus,
    tokenizer: TokenizerChoice | None,
    max_length: int,
    sizes: Sizes,
    cache_dir: str,
) -> Classification:
    return Classification(
        corpus, name, "classes", _task(name).classes, ("accuracy",),
        tokenizer or PretrainedTokenizer("minilm"), max_length, sizes, cache_dir,
    )  # fmt: skip

"""The tasks of GLUE by name, and labelled texts of one's own: what `task=` configs call.

Source: Wang et al., arXiv:1804.07461 (GLUE). Its test labels are kept back, so its scores here are
of the dev sets, as those of most papers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xcloud.checks import check_choice
from xcloud.errors import ConfigError
from xcloud.tasks.classification import Classification
from xcloud.tasks.corpus.demo_labelled import DemoAnswers, DemoReviews, DemoSizes
from xcloud.tasks.corpus.files import Names
from xcloud.tasks.corpus.labelled import ColumnChoice, Kind, LabelledCorpus, sampling_of
from xcloud.tasks.corpus.labelled_files import LabelledFiles
from xcloud.tasks.corpus.labelled_hub import LabelledHub
from xcloud.tasks.sizes import Sizes
from xcloud.tasks.task import Split
from xcloud.tasks.tokenizer import PretrainedTokenizer, TokenizerChoice

HUB = "nyu-mll/glue"


@dataclass(frozen=True)
class GlueTask:
    """classes: None for a value. columns: of the hub. files, hub_splits: sets that make up a
    split, with the name of their part; see LabelledFiles and LabelledHub."""

    classes: tuple[str, ...] | None
    metrics: tuple[str, ...]
    columns: tuple[str, ...]
    files: Mapping[Split, Mapping[str, str]] = field(default_factory=dict)
    hub_splits: Mapping[Split, Mapping[str, str]] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        return "value" if self.classes is None else "classes"


ENTAILMENT = ("entailment", "not_entailment")
TASKS: Mapping[str, GlueTask] = {
    "sst2": GlueTask(("negative", "positive"), ("accuracy",), ("sentence",)),
    "cola": GlueTask(
        ("unacceptable", "acceptable"), ("matthews", "accuracy"), ("sentence",),
        {"train": {"in_domain_train": ""}, "dev": {"in_domain_dev": "", "out_of_domain_dev": ""}},
    ),
    "mrpc": GlueTask(
        ("not_equivalent", "equivalent"), ("f1", "accuracy"), ("sentence1", "sentence2")
    ),
    "qnli": GlueTask(ENTAILMENT, ("accuracy",), ("question", "sentence")),
    "qqp": GlueTask(
        ("not_duplicate", "duplicate"), ("f1", "accuracy"), ("question1", "question2")
    ),
    "stsb": GlueTask(None, ("pearson", "spearman"), ("sentence1", "sentence2")),
    "mnli": GlueTask(
        ("entailment", "neutral", "contradiction"), ("accuracy",), ("premise", "hypothesis"),
        {"dev": {"dev_matched": "matched", "dev_mismatched": "mismatched"}},
        {"dev": {"validation_matched": "matched", "validation_mismatched": "mismatched"}},
    ),
    "rte": GlueTask(ENTAILMENT, ("accuracy",), ("sentence1", "sentence2")),
    "wnli": GlueTask(("not_entailment", "entailment"), ("accuracy",), ("sentence1", "sentence2")),
}  # fmt: skip


def glue_task(name: str) -> GlueTask:
    check_choice("task.name", name, TASKS)
    return TASKS[name]


def glue_from_demo(
    name: str = "sst2",
    num_train: int = 8_000,
    num_dev: int = 500,
    num_test: int = 1_000,
    corpus_seed: int = 7,
    tokenizer: TokenizerChoice | None = None,
    max_length: int = 64,
    sizes: Sizes = None,
    cache_dir: str = ".cache",
) -> Classification:
    """Embedded stand-ins for SST-2 (film reviews) and QNLI (does the sentence answer?)."""
    task, sizes_ = glue_task(name), DemoSizes(num_train, num_dev, num_test, corpus_seed)
    corpora: Mapping[str, LabelledCorpus] = {
        "sst2": DemoReviews(sizes_), "qnli": DemoAnswers(sizes_)
    }  # fmt: skip
    if name not in corpora:
        raise ConfigError(
            f"task.name={name}: the demo has {' and '.join(corpora)} only; for {name} take "
            "profile=files with task.path=DIR, or profile=paper"
        )
    return _glue(name, task, corpora[name], tokenizer, max_length, sizes, cache_dir)


def glue_from_files(
    name: str = "sst2",
    path: str = "",
    train_file: Names = None,
    dev_file: Names = None,
    test_file: Names = None,
    text_columns: Names = None,
    label_column: str | None = None,
    language: str = "en",
    dev_share: int | float = 0.02,
    test_share: int | float = 0.02,
    max_train_samples: int | None = None,
    max_eval_samples: int | None = None,
    split_seed: int = 0,
    tokenizer: TokenizerChoice | None = None,
    max_length: int = 128,
    sizes: Sizes = None,
    cache_dir: str = ".cache",
) -> Classification:
    """A GLUE task from files in the folder `path`; see LabelledFiles and Sampling."""
    task = glue_task(name)
    sampling = sampling_of(dev_share, test_share, max_train_samples, max_eval_samples, split_seed)
    columns = ColumnChoice(text_columns, label_column, len(task.columns), task.kind)
    corpus = LabelledFiles(
        path, train_file, dev_file, test_file, columns, language, task.files, sampling
    )
    return _glue(name, task, corpus, tokenizer, max_length, sizes, cache_dir)


def glue_from_hub(
    name: str = "sst2",
    path: str = HUB,
    revision: str | None = None,
    dev_share: int | float = 0.02,
    max_train_samples: int | None = None,
    max_eval_samples: int | None = None,
    split_seed: int = 0,
    tokenizer: TokenizerChoice | None = None,
    max_length: int = 128,
    sizes: Sizes = None,
    cache_dir: str = ".cache",
) -> Classification:
    """A GLUE task from the hub. Its dev set is the test; dev is held out of train."""
    task = glue_task(name)
    sampling = sampling_of(dev_share, 0.02, max_train_samples, max_eval_samples, split_seed)
    columns = ColumnChoice(list(task.columns), "label", len(task.columns), task.kind)
    corpus = LabelledHub(
        path, name, columns=columns, own_names=task.hub_splits, hidden_test=True,
        revision=revision, sampling=sampling,
    )  # fmt: skip
    return _glue(name, task, corpus, tokenizer, max_length, sizes, cache_dir)


def _glue(
    name: str,
    task: GlueTask,
    corpus: LabelledCorpus,
    tokenizer: TokenizerChoice | None,
    max_length: int,
    sizes: Sizes,
    cache_dir: str,
) -> Classification:
    return Classification(
        corpus, name, task.kind, task.classes, task.metrics,
        tokenizer or PretrainedTokenizer("minilm"), max_length, sizes, cache_dir,
    )  # fmt: skip


def classification_from_files(
    path: str = "",
    kind: Kind = "classes",
    classes: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    train_file: Names = None,
    dev_file: Names = None,
    test_file: Names = None,
    text_columns: Names = None,
    label_column: str | None = None,
    language: str = "en",
    dev_share: int | float = 0.02,
    test_share: int | float = 0.02,
    max_train_samples: int | None = None,
    max_eval_samples: int | None = None,
    split_seed: int = 0,
    tokenizer: TokenizerChoice | None = None,
    max_length: int = 128,
    sizes: Sizes = None,
    cache_dir: str = ".cache",
) -> Classification:
    """Your own labelled texts in the folder `path`; see Classification and LabelledFiles."""
    sampling = sampling_of(dev_share, test_share, max_train_samples, max_eval_samples, split_seed)
    corpus = LabelledFiles(
        path, train_file, dev_file, test_file,
        ColumnChoice(text_columns, label_column, None, kind), language, sampling=sampling,
    )  # fmt: skip
    return Classification(
        corpus, "classification", kind, classes, metrics or _usual_metrics(kind),
        tokenizer or PretrainedTokenizer("minilm"), max_length, sizes, cache_dir,
    )  # fmt: skip


def classification_from_hub(
    path: str = "",
    config: str | None = None,
    kind: Kind = "classes",
    classes: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    train: str | None = None,
    dev: str | None = None,
    test: str | None = None,
    text_columns: Names = None,
    label_column: str | None = None,
    revision: str | None = None,
    dev_share: int | float = 0.02,
    test_share: int | float = 0.02,
    max_train_samples: int | None = None,
    max_eval_samples: int | None = None,
    split_seed: int = 0,
    tokenizer: TokenizerChoice | None = None,
    max_length: int = 128,
    sizes: Sizes = None,
    cache_dir: str = ".cache",
) -> Classification:
    """A labelled data set of the hub, or a folder in the same form; see LabelledHub."""
    sampling = sampling_of(dev_share, test_share, max_train_samples, max_eval_samples, split_seed)
    columns = ColumnChoice(text_columns, label_column, None, kind)
    corpus = LabelledHub(
        path, config, train, dev, test, columns, revision=revision, sampling=sampling
    )
    return Classification(
        corpus, "classification", kind, classes, metrics or _usual_metrics(kind),
        tokenizer or PretrainedTokenizer("minilm"), max_length, sizes, cache_dir,
    )  # fmt: skip


def _usual_metrics(kind: Kind) -> Sequence[str]:
    return ("accuracy",) if kind == "classes" else ("pearson", "spearman")

"""Text pairs trained in one language and tested in others: XNLI and PAWS-X.

Sources: Conneau et al., arXiv:1809.05053 (XNLI); Yang et al., arXiv:1908.11828 (PAWS-X).
Scores: mean accuracy over the tested languages, then accuracy per language.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xcloud.base.checks import check_choice
from xcloud.base.errors import ConfigError
from xcloud.tasks.classification import Classification
from xcloud.tasks.corpus.demo_labelled import DemoInference
from xcloud.tasks.corpus.folder import FolderByLanguage
from xcloud.tasks.corpus.hub import HubByLanguage
from xcloud.tasks.corpus.labelled import ColumnChoice, Labelled, LabelledCorpus
from xcloud.tasks.settings import DEMO, Group, samples_without, settings_of


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


TEXT = Group(Classification, ("corpus", "name", "kind", "classes", "metrics"))
LANGUAGES = Group(DemoInference, ("sizes",))
FOLDER = Group(FolderByLanguage)
COLUMNS = Group(ColumnChoice, ("num_texts", "kind"))
FILE_SAMPLES = samples_without("test_share")
HUB_SAMPLES = samples_without("dev_share", "test_share")


@settings_of(LANGUAGES, DEMO, TEXT, max_length=64)
def cross_lingual_from_demo(name: str = "xnli", **settings: Any) -> Classification:
    """Embedded inference pairs in English and Spanish; num_test pairs in each language."""
    if name != "xnli":
        raise ConfigError(f"task.name={name}: the demo has xnli only; use profile=files")
    return _built(name, LANGUAGES.make(settings, sizes=DEMO.make(settings)), settings)


@settings_of(FOLDER, COLUMNS, FILE_SAMPLES, TEXT)
def cross_lingual_from_files(name: str = "xnli", **settings: Any) -> Classification:
    """The task from files in the folder `path`. max_eval_samples: of dev and of each test
    language."""
    _task(name)
    sampling, columns = FILE_SAMPLES.make(settings), COLUMNS.make(settings, num_texts=2)
    return _built(name, Labelled(FOLDER.make(settings), columns, sampling), settings)


@settings_of(HUB_SAMPLES, TEXT)
def cross_lingual_from_hub(
    name: str = "xnli",
    path: str | None = None,
    train_language: str = "en",
    languages: Sequence[str] | None = None,
    revision: str | None = None,
    **settings: Any,
) -> Classification:
    """The task from the hub; `languages` None: all of its languages."""
    task, sampling = _task(name), HUB_SAMPLES.make(settings)
    tested = task.languages if languages is None else languages
    source = HubByLanguage(path or task.hub, train_language, tested, revision)
    columns = ColumnChoice(list(task.columns), "label", 2)
    return _built(name, Labelled(source, columns, sampling), settings)


def _built(name: str, corpus: LabelledCorpus, settings: Mapping[str, Any]) -> Classification:
    return TEXT.make(
        settings, corpus=corpus, name=name, classes=_task(name).classes, metrics=("accuracy",)
    )

"""GLUE tasks: classes, scores and columns.

Source: Wang et al., arXiv:1804.07461 (GLUE). Its test labels are not public, so scores here are
dev scores, as in most papers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xcloud.base.checks import check_choice
from xcloud.base.errors import ConfigError
from xcloud.tasks.classification import Classification
from xcloud.tasks.corpus.demo_labelled import DemoAnswers, DemoReviews
from xcloud.tasks.corpus.hub import HubSet
from xcloud.tasks.corpus.labelled import ColumnChoice, Kind, Labelled, LabelledCorpus
from xcloud.tasks.corpus.source import OwnNames
from xcloud.tasks.settings import DEMO, FOLDER, SAMPLES, Group, samples_without, settings_of


@dataclass(frozen=True)
class GlueTask:
    """classes: None for regression. columns: on the hub. files, hub_splits: the sets that make up
    a split, with their part names; see LabelledFolder and HubSet."""

    classes: tuple[str, ...] | None
    metrics: tuple[str, ...]
    columns: tuple[str, ...]
    files: OwnNames = field(default_factory=dict)
    hub_splits: OwnNames = field(default_factory=dict)

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


TEXT = Group(Classification, ("corpus", "name", "kind", "classes", "metrics"))
NAMED = Group(ColumnChoice, ("num_texts", "kind"))
HUB_SAMPLES = samples_without("test_share")
HUB_SET = Group(HubSet, ("config", "train", "dev", "test", "own_names", "hidden_test"))


@settings_of(DEMO, TEXT, max_length=64)
def glue_from_demo(name: str = "sst2", **settings: Any) -> Classification:
    """Embedded stand-ins for SST-2 (film reviews) and QNLI (does the sentence answer?)."""
    task, sizes = glue_task(name), DEMO.make(settings)
    corpora: Mapping[str, LabelledCorpus] = {
        "sst2": DemoReviews(sizes),
        "qnli": DemoAnswers(sizes),
    }
    if name not in corpora:
        raise ConfigError(
            f"task.name={name}: the demo has {' and '.join(corpora)} only; for {name} use "
            "profile=files with task.path=DIR, or profile=paper"
        )
    return _glue(name, task, corpora[name], settings)


@settings_of(FOLDER, NAMED, SAMPLES, TEXT)
def glue_from_files(name: str = "sst2", **settings: Any) -> Classification:
    """A GLUE task from files in the folder `path`."""
    task, sampling = glue_task(name), SAMPLES.make(settings)
    columns = NAMED.make(settings, num_texts=len(task.columns), kind=task.kind)
    source = FOLDER.make(settings, own_names=task.files)
    return _glue(name, task, Labelled(source, columns, sampling), settings)


@settings_of(HUB_SET, HUB_SAMPLES, TEXT, path="nyu-mll/glue")
def glue_from_hub(name: str = "sst2", **settings: Any) -> Classification:
    """A GLUE task from the hub. Its dev set becomes test; dev is held out of train."""
    task, sampling = glue_task(name), HUB_SAMPLES.make(settings)
    columns = ColumnChoice(list(task.columns), "label", len(task.columns), task.kind)
    source = HUB_SET.make(settings, config=name, own_names=task.hub_splits, hidden_test=True)
    return _glue(name, task, Labelled(source, columns, sampling), settings)


def _glue(
    name: str, task: GlueTask, corpus: LabelledCorpus, settings: Mapping[str, Any]
) -> Classification:
    return TEXT.make(
        settings, corpus=corpus, name=name, kind=task.kind, classes=task.classes,
        metrics=task.metrics,
    )  # fmt: skip

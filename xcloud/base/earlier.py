"""Names of classes and keys of earlier releases. They work for one release more, and each is said
once with the name that it has now."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from xcloud.base.settings import MOVED
from xcloud.base.terminal import say
from xcloud.base.walk import walk

_DEMOS = {
    "classification.Classification": "DemoReviews",
    "language_modelling.LanguageModelling": "DemoStories",
    "preferences.Preferences": "DemoAnswers",
    "question_answering.QuestionAnswering": "DemoQuestions",
    "translation.Translation": "DemoPairs",
}
_OTHERS = {
    "classification.FolderCrossLingual": ("classification.CrossLingual", "LanguageFolder"),
    "classification.HubCrossLingual": ("classification.CrossLingual", "LanguageHub"),
    "classification.DemoCrossLingual": ("classification.CrossLingual", "DemoInference"),
    "wit3.Wit3Translation": ("translation.Translation", "Wit3"),
}


def _tasks() -> dict[str, tuple[str, str]]:
    found = {}
    for task, demo in _DEMOS.items():
        room, _, name = f"xcloud.tasks.{task}".rpartition(".")
        # Each of these tasks had three classes, one for each kind of source.
        for kind, source in (
            ("Folder", "xcloud.tasks.sources.Folder"),
            ("Hub", "xcloud.tasks.sources.Hub"),
            ("Demo", f"{room}.{demo}"),
        ):
            found[f"{room}.{kind}{name}"] = (f"{room}.{name}", source)
    for earlier, (task, source) in _OTHERS.items():
        room = f"xcloud.tasks.{earlier.partition('.')[0]}"
        found[f"xcloud.tasks.{earlier}"] = (f"xcloud.tasks.{task}", f"{room}.{source}")
    return found


TASKS = _tasks()
"""Classes that were a task and a source in one, and the two that they are now."""
NOW = frozenset(TASKS.values())
KEYS = (
    "path", "train_file", "dev_file", "test_file", "language", "document", "dataset", "revision",
    "config", "train", "dev", "test", "num_train", "num_dev", "num_test", "num_pairs",
    "num_monolingual"
)  # fmt: skip
"""Settings of sources, which stood beside those of their task. No task has one of that name."""
_WIT3 = {"source": "FacebookAI/xlm-roberta-base", "target": "google-bert/bert-base-cased"}
"""The tokenizers that Wit3Translation had by default."""
_PRETRAINED = "xcloud.tasks.tokenizer.PretrainedTokenizer"
_said = set[str]()


def name_of(key: str, source: str) -> str:
    """Return what a setting of a source is called now."""
    # A folder of the hub's form was called path like any other.
    return "dataset" if key == "path" and source.endswith("Hub") else key


def key_of(key: str, job: Any) -> str:
    """Return what a setting of a job is called now, by its dotted name."""
    data = getattr(getattr(job, "task", None), "data", None)
    name = key.removeprefix("task.")
    if data is None or name == key or name not in KEYS:
        return key
    return f"task.data.{name_of(name, type(data).__name__)}"


def rename(settings: Any) -> None:
    """Replace the names of classes and keys of earlier releases in plain containers."""
    for node in walk(settings):
        if isinstance(node.value, dict) and isinstance(target := node.value.get("_target_"), str):
            node.value["_target_"] = MOVED.get(target, target)
            # Its keys are renamed below; nested settings come in the walk by themselves.
            _give_source(node.value, node.path)


def _give_source(node: dict[str, Any], path: str) -> None:
    """Give a task the source that it was, and the source its settings."""
    earlier = node["_target_"]
    if earlier in TASKS:
        node["_target_"], source = TASKS[earlier]
        node["data"] = {"_target_": source}
        # Settings that this class had by default, and that its task has otherwise.
        for side, name in _WIT3.items() if source.endswith("Wit3") else ():
            node.setdefault(f"{side}_tokenizer", {"_target_": _PRETRAINED, "name_or_path": name})
        _say(f"{earlier} is now {node['_target_']} with data={{_target_: {source}, …}}")
    data = node.get("data")
    # Keys are moved only for pairs that were one class: of others nobody wrote them before.
    if not isinstance(data, dict) or (node["_target_"], data.get("_target_")) not in NOW:
        return
    for key in (key for key in KEYS if key in node):
        name = name_of(key, data["_target_"])
        value = node.pop(key)
        # null was the default of a task that had none of it; a default of the source counts then.
        if value is not None or name not in data:
            data[name] = value
        # A class that was renamed has said it already.
        if earlier not in TASKS:
            _say(f"{path}.{key} is now {path}.data.{name}")


def _say(text: str) -> None:
    if text not in _said:
        _said.add(text)
        say(f"{text}; the earlier name works in this release only", error=True)


def renamed(saved: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of an earlier attempt, as ranks compare them (job/compared.py), by their
    names of today."""
    # Values are JSON texts here, as ranks compare them.
    names = {json.dumps(earlier): json.dumps(name) for earlier, name in MOVED.items()}
    found = {key: names.get(value, value) for key, value in saved.items()}
    both = {json.dumps(earlier): now for earlier, now in TASKS.items()}
    earlier = found.get("task._target_", "")
    if earlier not in both:
        return found
    task, source = both[earlier]
    now = {"task._target_": json.dumps(task), "task.data._target_": json.dumps(source)}
    if source.endswith("sources.Folder"):
        now["task.data.document"] = "null"  # not every task had this one
    for key in sorted(found):
        # What follows the name is a list's index, say, and stays.
        match = re.fullmatch(r"task\.(\w+)(.*)", key)
        if match is not None and match[1] in KEYS:
            value = found.pop(key)
            name = f"task.data.{name_of(match[1], source)}{match[2]}"
            if value != "null" or name not in now:
                now[name] = value
    return found | now

"""The configs of the understanding tasks compose, build, and refuse wrong settings by name."""

from __future__ import annotations

import pytest
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from tests.configs import composed
from xcloud.base.errors import ConfigError
from xcloud.contracts.task import Task
from xcloud.job.config import check_keys


def build(*overrides: str) -> Task:
    """The task alone: whichever model goes with it."""
    return built(composed("name=x", "recipe=abnet_demo", *overrides))


def built(config: DictConfig) -> Task:
    OmegaConf.resolve(config.task)
    check_keys(OmegaConf.to_container(config.task), "task")
    task: Task = instantiate(config.task, _convert_="all")
    return task


@pytest.mark.parametrize("profile", ["demo", "files", "paper"])
@pytest.mark.parametrize("task", ["glue", "classification", "squad", "xnli"])
def test_every_task_builds_in_every_profile(task: str, profile: str) -> None:
    needs = profile == "files" or (profile == "paper" and task == "classification")
    path = ["task.path=somewhere"] if needs else []
    found = build(f"task={task}", f"profile={profile}", *path)

    assert found.describe().startswith("sst2" if task == "glue" else task)
    assert found.max_length == {"demo": 64, "files": 128, "paper": 128}[profile] * (
        3 if task == "squad" and profile != "demo" else 1
    )


@pytest.mark.parametrize(
    "name", ["sst2", "cola", "mrpc", "qnli", "qqp", "stsb", "mnli", "rte", "wnli"]
)
def test_every_glue_task_builds_by_its_name(name: str) -> None:
    for profile in ("files", "paper"):
        where = ("name=x", "recipe=abnet_demo", "task=glue", f"profile={profile}")
        config = composed(*where, "task.path=x")
        config.task.name = name
        found = built(config)
        assert found.describe().startswith(name)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("task=glue", "task.name=sst3"), "task.name must be one of sst2"),
        (("task=glue", "task.name=mrpc"), "the demo has sst2 and qnli only"),
        (("task=glue", "+task.max_train_pairs=3"), "unknown setting 'task.max_train_pairs'"),
        (("task=squad", "task.stride=0"), "task.stride must be"),
        (("task=xnli", "task.languages=[de]"), "one of en, es, got 'de'"),
        (("task=classification", "task.metrics=[bleu]"), "'bleu' is not a score for classes"),
    ],
)
def test_a_wrong_setting_is_named(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(Exception) as raised:
        build(*overrides)
    cause = raised.value if isinstance(raised.value, ConfigError) else raised.value.__cause__
    assert isinstance(cause, ConfigError) and said in str(cause)

"""Experiment files of earlier releases; old_experiments/ has two that commit 1026ef2 wrote."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_object
from omegaconf import OmegaConf

from xcloud.errors import ConfigError
from xcloud.job.config import flatten, read_config, read_job
from xcloud.job.experiment import Experiment
from xcloud.job.moved_names import ADDED, GONE, MOVED, with_names_of_today
from xcloud.job.one_way import OneWayExperiment
from xcloud.sweep.points import differences

OLD = Path(__file__).parent / "old_experiments"
CONF = Path(__file__).parent.parent / "conf"


@pytest.mark.parametrize(
    ("name", "kind", "overrides", "differing"),
    [
        ("bert_split_sst2", Experiment, ["cluster/wan=free"], set()),
        # The name of a cluster is a user's own, and is not changed.
        ("electra_multilingual", OneWayExperiment, [], {"cluster.name"}),
    ],
)
def test_an_old_file_gives_the_experiment_of_today(
    name: str, kind: type, overrides: list[str], differing: set[str]
) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        today = compose("config", overrides=[f"+exp={name}", *overrides])
    old = OLD / f"{name}.yaml"

    assert isinstance(read_job(old), kind)
    assert differences(flatten(read_config(old)), flatten(today)).keys() == differing


def test_a_setting_that_had_an_effect_and_is_gone_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    text = (OLD / "bert_split_sst2.yaml").read_text()
    assert "warm_start_steps: 0" in text
    file.write_text(text.replace("warm_start_steps: 0", "warm_start_steps: 50"))

    with pytest.raises(
        ConfigError, match=r"model\.split\.warm_start_steps is 50, but there is no"
    ):
        read_config(file)


def test_what_a_file_says_wins_over_a_default_added_since() -> None:
    node: dict[str, Any] = {"training": {"_target_": next(iter(ADDED)), "on_divergence": "skip"}}

    assert with_names_of_today(node)["training"]["on_divergence"] == "skip"


def test_every_name_in_the_tables_leads_to_something_that_exists() -> None:
    for name in (*MOVED.values(), *GONE, *ADDED):
        assert callable(get_object(name))
    for name in MOVED:
        with pytest.raises(Exception, match=name.rsplit(".", 1)[0].rsplit(".", 1)[-1]):
            get_object(name)


def test_files_of_today_are_left_alone() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", overrides=["+exp=abnet_iwslt"])
    plain = OmegaConf.to_container(config)

    assert with_names_of_today(plain) == plain

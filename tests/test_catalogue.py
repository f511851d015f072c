"""`python -m xcloud settings`: what may be set, read from the classes."""

from __future__ import annotations

import json

import pytest

from tests.configs import composed
from xcloud.base.errors import ConfigError
from xcloud.job.catalogue import main, settings_of


def test_a_setting_has_its_type_its_default_its_value_and_what_it_means() -> None:
    found = {s.key: s for s in settings_of(composed("+exp=abnet_iwslt"), "training")}

    batch = found["training.batch_size"]
    assert batch.takes == "int, at least 1"
    assert batch.default == "64"
    assert batch.means == "samples of one update, over all ranks and accumulation steps together."
    assert found["training.max_steps"].default == ""  # must be given
    assert found["training.checkpoint.keep"].takes == "int, at least 1"
    assert found["training.optimizer.decay"].takes == "inverse_sqrt or linear or constant"


def test_a_part_of_a_group_can_be_asked_for_and_an_unknown_one_is_answered_with_the_nearest() -> (
    None
):
    config = composed("+exp=abnet_iwslt")
    keys = [s.key for s in settings_of(config, "cluster.clouds")]
    assert "cluster.clouds.cloud_a.num_ranks" in keys
    assert "cluster.clouds.cloud_b.num_ranks" in keys
    with pytest.raises(ConfigError, match="did you mean 'training'"):
        settings_of(config, "trainin")


def test_the_command_prints_groups_settings_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "\ntraining     Training\n" in capsys.readouterr().out
    assert main(["compression"]) == 0
    assert "compression=  one of bf16, " in capsys.readouterr().out
    assert main(["training", "training.batch_size=32", "+exp=abnet_iwslt", "--json"]) == 0
    found = {entry["key"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found["training.batch_size"]["value"] == "32"
    assert found["training.batch_size"]["default"] == "64"

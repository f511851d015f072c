"""What docs/compatibility.md says of files of 0.2.0; `release_0_2_0` has them as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import xcloud
from xcloud.base.errors import ConfigError
from xcloud.base.yaml_text import from_yaml
from xcloud.feature_list import FIGURES
from xcloud.job.config import Settings
from xcloud.record.run_record import RunRecord
from xcloud.security.policy import Policy
from xcloud.show.tables import markdown_of

OLD = Path(__file__).parent / "release_0_2_0"


def test_an_experiment_of_0_2_0_is_read_and_keeps_every_value() -> None:
    written = from_yaml((OLD / "experiment.yaml").read_text())
    read = Settings.of(written)

    def lost(old: object, new: object, path: str) -> list[str]:
        if isinstance(old, dict):
            assert isinstance(new, dict), path
            found = [lost(value, new.get(key), f"{path}.{key}") for key, value in old.items()]
            return [name for names in found for name in names]
        return [] if old == new else [f"{path}: {old!r} became {new!r}"]

    assert lost(written, dict(read.kept), "") == []
    assert read.job.max_steps == 6


def test_an_experiment_with_an_unknown_key_is_refused_by_its_name() -> None:
    written = from_yaml((OLD / "experiment.yaml").read_text())
    written["training"]["from_the_future"] = 1
    with pytest.raises(ConfigError, match="from_the_future"):
        Settings.of(written)


def test_a_summary_of_0_2_0_is_shown_and_loaded() -> None:
    result = xcloud.load(OLD)
    assert result.status == "finished" and result.summary["xcloud_version"] == "0.2.0"
    assert set(result.scores) == {"bleu", "chrf"}
    assert result.step_s is not None and result.bytes_per_step > 0
    assert result.compression_ratio is not None and result.compression_ratio > 3
    table = markdown_of(RunRecord(json.loads((OLD / "summary.json").read_text()), FIGURES))
    assert "step time, median" in table and "compression ratio" in table


def test_a_policy_of_0_2_0_is_read_and_allows_what_it_did() -> None:
    file = OLD / "policy.yaml"
    policy = Policy.of(from_yaml(file.read_text()), file)
    assert policy.me == "cloud_b" and policy.max_ranks == 1024
    experiment = from_yaml((OLD / "experiment.yaml").read_text())
    assert policy.refused(experiment, Path("runs/first")) == []
    experiment["model"]["_target_"] = "somebody.else.Model"
    assert [one.key for one in policy.refused(experiment, Path("runs/first"))] == ["constructors"]

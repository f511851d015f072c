"""What docs/compatibility.md says of files of 0.2.0; `release_0_2_0` has them as they were."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from pkgutil import resolve_name

import pytest

import xcloud
from xcloud.base.earlier import TASKS, name_of, rename, renamed
from xcloud.base.errors import ConfigError
from xcloud.base.yaml_text import from_yaml
from xcloud.feature_list import FIGURES
from xcloud.job.compared import compared_settings
from xcloud.job.config import Settings, build, drop_keys, fill_in, resolved
from xcloud.record.run_record import RunRecord
from xcloud.security.policy import Policy

OLD = Path(__file__).parents[1] / "release_0_2_0"


def test_an_experiment_of_0_2_0_is_read_and_keeps_every_value() -> None:
    written = from_yaml((OLD / "experiment.yaml").read_text())
    read = Settings.of(written)

    def lost(old: object, new: object, path: str) -> list[str]:
        if isinstance(old, dict):
            assert isinstance(new, dict), path
            found = [lost(value, new.get(key), f"{path}.{key}") for key, value in old.items()]
            return [name for names in found for name in names]
        return [] if old == new else [f"{path}: {old!r} became {new!r}"]

    rename(written)  # of those that have other names now
    drop_keys(written)  # which have the one value that is left
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
    table = RunRecord(json.loads((OLD / "summary.json").read_text()), FIGURES).markdown
    assert "step time, median" in table and "compression ratio" in table


def test_a_policy_of_0_2_0_is_read_and_allows_what_it_did() -> None:
    file = OLD / "policy.yaml"
    policy = Policy.of(from_yaml(file.read_text()), file)
    assert policy.me == "cloud_b" and policy.max_ranks == 1024
    experiment = resolved(from_yaml((OLD / "experiment.yaml").read_text()))
    assert policy.refused(experiment, Path("runs/first")) == []
    experiment["model"]["_target_"] = "somebody.else.Model"
    assert [one.key for one in policy.refused(experiment, Path("runs/first"))] == ["constructors"]


OF_SOURCES: dict[str, object] = {
    "path": "some/name", "train_file": "a.tsv", "dev_file": "b.tsv", "test_file": "c.tsv",
    "language": "de", "document": "line", "revision": "v1", "config": "de-en", "train": "t",
    "dev": "d", "test": "e", "num_train": 9, "num_dev": 5, "num_test": 6, "num_pairs": 30,
    "num_monolingual": 1
}  # fmt: skip


@pytest.mark.parametrize("earlier", TASKS)
def test_a_task_of_an_earlier_release_has_the_source_that_it_was(
    earlier: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built, and compared with what a checkpoint keeps of it."""
    monkeypatch.setattr("xcloud.base.earlier._said", set())  # each is said once in a process
    task, source = TASKS[earlier]
    values = dict(OF_SOURCES)
    if "LanguageModelling" not in earlier:
        del values["document"]
    if "Wit3" in earlier:
        values |= {"dev": ["d"], "test": ["e"]}
    keys = inspect.signature(resolve_name(source)).parameters
    node = {key: value for key, value in values.items() if name_of(key, source) in keys}
    plain = fill_in(resolved({"task": {"_target_": earlier, **node}}))
    made = build(plain)["task"]
    assert [f"{type(one).__module__}.{type(one).__qualname__}" for one in (made, made.data)] == [
        task, source
    ]  # fmt: skip
    assert {key: getattr(made.data, name_of(key, source)) for key in node} == node
    beside = fill_in(resolved({"task": {"_target_": task, "data": {"_target_": source}, **node}}))
    assert beside["task"]["data"] == plain["task"]["data"]
    said = capsys.readouterr().err
    for key in node:
        assert f"task.{key} is now task.data.{name_of(key, source)}; " in said

    now = compared_settings(plain)
    saved = {key.replace("task.data.", "task."): value for key, value in now.items()}
    if "document" not in node:
        saved.pop("task.document", None)
    assert renamed({**saved, "task._target_": f'"{earlier}"'}) == now

"""What a rank loads: nothing where it reads nothing, and all ranks the same data."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.configs import build
from xcloud.base.errors import ConfigError, DataError, FrameError
from xcloud.contracts.model import SPLITS
from xcloud.job.experiment import Experiment
from xcloud.parallel.control import NOTHING, compare_facts
from xcloud.rank.task_data import load


class Line:
    """Both ends of what two ranks agree on, one after the other."""

    def __init__(self) -> None:
        self.facts: list[Mapping[str, str]] = []

    def agree(
        self, facts: Mapping[str, str], left_out: Mapping[int, Collection[str]] = NOTHING
    ) -> Mapping[str, str]:
        self.facts.append(facts)
        self.left_out = left_out
        return self.facts[0]


def experiment(task: str, *overrides: str) -> Experiment:
    small = [f"+exp=bert_split_{task}", "recipe=lowrank_small", "task.num_train=60",
             f"data={'squad' if task == 'squad' else 'glue'}_small", "task.num_dev=10",
             "task.num_test=10", "task.tokenizer.vocab_size=400"]  # fmt: skip
    return build(*small, *overrides)


@pytest.mark.parametrize("task", ["sst2", "squad"])
def test_a_rank_that_reads_nothing_opens_no_file(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line: Any = Line()
    owner = load(experiment(task), 0, line)

    def read(*_: object) -> None:
        raise DataError("a rank without fields has opened the corpus")

    monkeypatch.setattr(type(experiment(task).task), "find", read)
    with pytest.raises(DataError, match="has opened"):
        load(experiment(task), 0, line)
    other = load(experiment(task), 1, line)

    for split in SPLITS:
        assert other.num_samples(split) == owner.num_samples(split) > 0
    assert "the task's data" in line.facts[0] and line.facts[1] == {}
    compare_facts(line.facts[0], line.facts[1], 1, line.left_out[1])
    with pytest.raises(ConfigError, match=r"disagree about samples of dev: [0-9]+ here, nothing"):
        compare_facts(line.facts[0], line.facts[1], 1)


def test_other_settings_are_noticed_all_the_same() -> None:
    line: Any = Line()
    load(experiment("sst2"), 0, line)
    with pytest.raises(ConfigError, match="disagree about the task's settings and sizes"):
        load(experiment("sst2", "task.max_length=24"), 1, line)


def test_sizes_that_are_none_are_refused() -> None:
    line: Any = Line()
    line.facts.append({f"samples of {split}": "-1" for split in SPLITS})
    with pytest.raises(FrameError, match=r"rank 0 told .*-1"):
        load(experiment("sst2"), 1, line)


def test_a_defence_of_two_classes_is_refused_for_labels_of_tokens(tmp_path: Path) -> None:
    small = ["task.num_train=20", "task.num_dev=5", "task.num_test=5", f"cache_dir={tmp_path}",
             "task.tokenizer.vocab_size=400", "security/defences/backward=marvell"]  # fmt: skip
    line: Any = Line()
    with pytest.raises(ConfigError, match="this task's are of kind 'tokens'"):
        load(build("+exp=lora_clm", *small), 1, line)

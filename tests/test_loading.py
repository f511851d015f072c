"""What a rank loads: nothing where it reads nothing, and all ranks the same data."""

import json
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from tests.configs import build
from xcloud.base.errors import ConfigError, DataError, FrameError
from xcloud.cluster.transport import Meeting
from xcloud.contracts.model import SPLITS
from xcloud.job.experiment import Experiment
from xcloud.join.agreement import agree_on, decode_facts
from xcloud.rank.task_data import load


def meetings() -> tuple[Meeting, Meeting]:
    """Of two ranks that may begin at any time, so that they can come one after the other."""
    store = HashStore()
    return Meeting(0, 2, store, 1.0, is_open=True), Meeting(1, 2, store, 1.0, is_open=True)


def experiment(task: str, *overrides: str) -> Experiment:
    small = [f"+exp=bert_split_{task}", "recipe=lowrank_small", "task.num_train=60",
             f"data={'squad' if task == 'squad' else 'glue'}_small", "task.num_dev=10",
             "task.num_test=10", "task.tokenizer.vocab_size=400"]  # fmt: skip
    return build(*small, *overrides)


@pytest.mark.parametrize("task", ["sst2", "squad"])
def test_a_rank_that_reads_nothing_opens_no_file(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = meetings()
    owner = load(experiment(task), first)

    def read(*_: object) -> None:
        raise DataError("a rank without fields has opened the corpus")

    monkeypatch.setattr(type(experiment(task).task), "find", read)
    with pytest.raises(DataError, match="has opened"):
        load(experiment(task), first)
    other = load(experiment(task), second)

    for split in SPLITS:
        assert other.num_samples(split) == owner.num_samples(split) > 0
    closed = Meeting(0, 2, first.store, 1.0)
    told = decode_facts(first.read("data.0", 0), 0)
    assert "the task's data" in told and decode_facts(first.read("data.1", 1), 1) == {}
    assert agree_on("data", closed, told, {1: told.keys()}) == told
    with pytest.raises(ConfigError, match=r"disagree about samples of dev: [0-9]+ here, nothing"):
        agree_on("data", closed, told, {1: told.keys() - {"samples of dev"}})


def test_other_settings_are_noticed_all_the_same() -> None:
    first, second = meetings()
    load(experiment("sst2"), first)
    with pytest.raises(ConfigError, match="disagree about the task's settings and sizes"):
        load(experiment("sst2", "task.max_length=24"), second)


def test_sizes_that_are_none_are_refused() -> None:
    first, second = meetings()
    first.write("data.0", json.dumps({f"samples of {split}": "-1" for split in SPLITS}))
    with pytest.raises(FrameError, match=r"rank 0 told .*-1"):
        load(experiment("sst2"), second)


def test_a_defence_of_two_classes_is_refused_for_labels_of_tokens(tmp_path: Path) -> None:
    small = ["task.num_train=20", "task.num_dev=5", "task.num_test=5", f"cache_dir={tmp_path}",
             "task.tokenizer.vocab_size=400", "security/defences/backward=marvell"]  # fmt: skip
    with pytest.raises(ConfigError, match="this task's are of kind 'tokens'"):
        load(build("+exp=lora_clm", *small), meetings()[1])

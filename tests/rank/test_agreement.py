"""Ranks compare what they run before the first step: equal runs start, others are told why not."""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from omegaconf import OmegaConf
from torch.distributed import HashStore

from tests.configs import composed
from tests.nightly import NIGHTLY, each_once
from tests.one_way_toy import cloud, feed_config
from tests.pipelines import in_threads
from tests.small_tokenizer import small_tokenizer
from tests.toy import toy_config
from xcloud import __version__
from xcloud.base.errors import ConfigError, DataError, FrameError
from xcloud.features.checkpoints.common_step import newest_common
from xcloud.job.compared import PATH, compared_settings
from xcloud.job.config import fill_in
from xcloud.job.job import Job
from xcloud.launch import processes as launch
from xcloud.launch.failures import EXIT_COMES_AGAIN
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.transport import Rendezvous
from xcloud.rank import agreement
from xcloud.rank.agreement import (
    MAX_BYTES,
    MAX_LINE,
    ComparedTable,
    Verdict,
    agree,
    decode_table,
    encode_table,
    rank_name,
)


def table_of(plain: Mapping[str, Any]) -> ComparedTable:
    return agreement.table_of(compared_settings(plain))


def verdicts(*tables: ComparedTable) -> list[Verdict]:
    """Of each rank, by what they write into a store: a thread for each."""
    store = HashStore()
    num_ranks = len(tables)
    layout = ClusterLayout({name: Cloud() for name in "abc"[:num_ranks]}, "free")
    job = cast(Job, SimpleNamespace(cluster=layout))

    def one(rank: int) -> Verdict:
        rendezvous = Rendezvous(rank, num_ranks, store, within_s=20.0)
        try:
            held = tables[rank].get("held", {})
            return agree(job, rendezvous, tables[rank], held, newest_common)
        except ConfigError as error:
            return Verdict("stop", str(error))

    found = in_threads([partial(one, rank) for rank in range(num_ranks)])
    assert len({verdict.attempt for verdict in found if verdict.kind != "stop"}) <= 1
    return [replace(verdict, attempt=0) for verdict in found]


def settings(**changed: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "seed": 1,
        "training": {"_target_": "xcloud.pipeline.settings.Training", "clip_norm": 1.0},
    }
    return plain | changed


def base(name: str) -> dict[str, str]:
    return {"_target_": "xcloud.models.backbone.PretrainedBackbone", "name_or_path": name}


def tokenizer(path: str) -> dict[str, str]:
    return {"_target_": "xcloud.tasks.tokenizer.FileTokenizer", "path": path}


def changed(table: ComparedTable, **sections: dict[str, str]) -> ComparedTable:
    return {**table, **{name: {**table.get(name, {}), **new} for name, new in sections.items()}}


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ({"seed": 1}, {"seed": 2}, "seed is 1 in rank 0 (cloud a), 2 in rank 1 (cloud b)"),
        (
            {"training": {"clip_norm": None}},
            {"training": {"clip_norm": 0.5}},
            "training.clip_norm is null in rank 0 (cloud a), 0.5 in rank 1 (cloud b)",
        ),
        ({}, {"extra": "x"}, 'extra is not set in rank 0 (cloud a), "x" in rank 1 (cloud b)'),
        (
            {"cluster": {"clouds": {"a": {"num_ranks": 1}, "b": {"num_ranks": 1}}}},
            {"cluster": {"clouds": {"b": {"num_ranks": 1}, "a": {"num_ranks": 1}}}},
            'cluster.clouds is ["a", "b"] in rank 0 (cloud a), ["b", "a"] in rank 1 (cloud b)',
        ),
    ],
    ids=["seed", "clip_norm", "absent", "order of the clouds"],
)
def test_a_difference_is_named_with_both_values_in_every_rank(
    mine: dict[str, Any], theirs: dict[str, Any], said: str
) -> None:
    found = verdicts(table_of(settings(**mine)), table_of(settings(**theirs)))

    assert [verdict.kind for verdict in found] == ["stop", "stop"]
    assert found[0] == found[1]
    assert said in found[0].text
    assert "is not that of" not in found[0].text


def test_of_three_ranks_the_one_that_differs_is_named_and_all_hear_it() -> None:
    same = table_of(settings())
    found = verdicts(same, same, table_of(settings(seed=7)))

    assert {verdict.kind for verdict in found} == {"stop"}
    assert "seed is 1 in rank 0 (cloud a), 7 in rank 2 (cloud c)" in found[1].text
    assert "rank 1" not in found[1].text


def test_folders_caches_trackers_devices_and_names_may_differ() -> None:
    def of(cloud: str) -> dict[str, Any]:
        return settings(
            name=cloud, sweep=cloud, label=cloud, tracker={"_target_": cloud, "uri": cloud},
            _target_="xcloud.experiment.Experiment",
            cache_dir=f"/home/{cloud}", follow_up=[f"task.data.path=/{cloud}"],
            task={"_target_": "xcloud.tasks.classification.Classification",
                  "data": {"_target_": "xcloud.tasks.sources.Folder", "path": cloud,
                           "train_file": f"train.{cloud}"},
                  "cache_dir": cloud,
                  "sizes": None if cloud == "a" else {"train": 3}},
            model={"_target_": "collections.UserDict", "tape": f"/secret/{cloud}",
                   "encoder": base(f"./bert/{cloud}")},
            cluster={"name": cloud, "clouds": {"a": {"device": cloud}}},
        )  # fmt: skip

    tables = table_of(of("a")), table_of(of("b"))

    assert verdicts(*tables) == [Verdict(), Verdict()]
    for secret in ("/home", "/secret", "./bert", "train.a"):  # no local path leaves the machine
        assert secret not in encode_table(tables[0])


PLACES = re.compile(r"(.*_)?(path|paths|file|files|folder|folders|dir|dirs|checkpoint|profile)")
PROFILES = ("demo", "files", "paper")
TASKS = ("abnet_iwslt", "bert_split_qnli", "bert_split_squad", "bert_split_sst2", "lora_clm",
         "dpo_reviews", "xnli_zero_shot", "electra_multilingual")  # fmt: skip
WORDS = ("profile",)  # that lead to no file
GIVEN = {"lora_clm files": ["model.checkpoint=somewhere"],
         "dpo_reviews files": ["model.checkpoint=somewhere"],
         "xnli_zero_shot": ["task.tokenizer.name_or_path=minilm"]}  # fmt: skip


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("experiment", "profile"), each_once(TASKS, PROFILES))
def test_every_setting_of_conf_that_names_a_place_may_differ_between_clouds(
    experiment: str, profile: str
) -> None:
    """By their names, which the comparison does not look at: a place that is not declared as one
    would be sent to other clouds."""
    given = GIVEN.get(experiment, []) + GIVEN.get(f"{experiment} {profile}", [])
    config = composed(f"+exp={experiment}", f"profile={profile}", *given)
    plain = fill_in(OmegaConf.to_container(config, resolve=True))

    def moved(node: Any, key: str = "", there: str = "") -> Any:
        if isinstance(node, dict):
            inner = {name: f"{key}.{name}".strip(".") for name in node}
            return {name: moved(node[name], where, there) for name, where in inner.items()}
        leaf = key.rpartition(".")[2]
        if isinstance(node, str) and PLACES.fullmatch(leaf) and key not in WORDS:
            return f"/srv/{there}/{leaf}"
        return node

    ours, theirs = (table_of(moved(plain, there=cloud)) for cloud in "ab")
    assert verdicts(ours, theirs)[0].kind == "go"
    assert "/srv/" not in encode_table(ours)


@pytest.mark.parametrize(
    ("target", "key", "is_compared"),
    [
        ("xcloud.tasks.sources.Hub", "dataset", True),
        ("xcloud.tasks.sources.Folder", "path", False),
        ("xcloud.tasks.sources.Folder", "dev_file", False),
        ("xcloud.models.causal.CausalLM", "checkpoint", True),
        ("xcloud.tasks.text_sources.HubText", "name", True),
        ("xcloud.planner.settings.Planning", "profile", False),
        ("collections.UserDict", "path", True),
    ],
)
def test_a_name_is_compared_where_it_is_declared_as_one(
    target: str, key: str, is_compared: bool
) -> None:
    ours, theirs = (
        table_of({"part": {"_target_": target, key: name}}) for name in ("owner/one", "owner/two")
    )
    assert (verdicts(ours, theirs)[0].kind == "stop") == is_compared


def test_the_name_of_a_checkpoint_is_compared_and_a_path_equals_any() -> None:
    def table(name: str) -> ComparedTable:
        return table_of(settings(encoder=base(name)))

    bert = table("google-bert/bert-base-cased")
    assert "encoder.name_or_path is" in verdicts(bert, table("minilm"))[0].text
    assert verdicts(bert, table("/models/bert"))[0].kind == "go"
    assert compared_settings({"base": base("~/bert")})["base.name_or_path"] == PATH


def test_a_tokenizer_s_file_is_compared_by_its_contents(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.json", "two.json", "same.json")]
    for file, separators in zip(files, (1, 2, 1), strict=True):
        replace(small_tokenizer(), num_separators=separators).save(file)
    one, two, same = (
        table_of(settings(text={"tokenizer": tokenizer(str(file))})) for file in files
    )

    assert "text.tokenizer.path is" in verdicts(one, two)[0].text
    assert verdicts(one, same)[0].kind == "go"
    assert str(tmp_path) not in str(one)


def test_a_file_that_is_no_tokenizer_is_not_even_digested(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("TOKEN=1234")
    with pytest.raises(DataError, match="no xcloud tokenizer 1 file"):
        table_of(settings(text={"tokenizer": tokenizer(str(secret))}))


def test_other_code_is_named_by_file_and_commit_and_another_release_by_number() -> None:
    mine = table_of(settings())
    theirs = changed(
        mine, code={"xcloud/comm/channel.py": "0"}, fact={"release of xcloud": '"9.9"'},
        info={"commit": '"abc"'},
    )  # fmt: skip

    text = verdicts(mine, theirs)[1].text

    assert "code of rank 1 (cloud b) is not that of rank 0 (cloud a), in xcloud/comm/chan" in text
    assert '"abc" in rank 1 (cloud b)' in text
    assert f'release of xcloud is "{__version__}" in rank 0 (cloud a), "9.9" in rank 1' in text


def test_the_modules_of_targets_outside_the_package_are_code_too() -> None:
    assert "module tests.toy" not in table_of(settings())["code"]
    target = {"_target_": "tests.toy.ToyTask"}
    assert "module tests.toy" in table_of(settings(task=target))["code"]


def test_another_torch_is_noted_and_another_commit_of_the_same_code_is_not() -> None:
    mine = table_of(settings())

    found = verdicts(mine, changed(mine, info={"torch": '"1.0+cpu"'}))
    assert [verdict.kind for verdict in found] == ["go", "go"]
    assert '"1.0+cpu" in rank 1 (cloud b)' in found[0].text

    assert verdicts(mine, changed(mine, info={"commit": '"abc"'})) == [Verdict(), Verdict()]


def test_a_rank_with_another_seed_or_layout_ends_all() -> None:
    other = table_of(settings(seed=2, cluster={"clouds": {"a": {"num_ranks": 2}}}))
    found = verdicts(table_of(settings()), table_of(settings()), other)

    assert {verdict.kind for verdict in found} == {"stop"}
    assert all("seed is 1 in rank 0 (cloud a), 2 in rank 2 (cloud c)" in v.text for v in found)


@pytest.mark.parametrize(
    "data",
    [
        "", "3", "[" * 100_000, '{"setting": {"a": {"b": "c"}}}', '{"setting": {"a": 1}}',
        '{"other": {"a": "b"}}', '{"setting": "a"}',
        json.dumps({"setting": {"a": "\x1b[2J"}}), json.dumps({"setting": {"a": "two\nlines"}}),
        json.dumps({"setting": {"\xff": "b"}}),
        json.dumps({"setting": {"a": "x" * (MAX_LINE + 1)}}),
        json.dumps({"setting": {"a": "b"}}) + " " * MAX_BYTES,
    ],
)  # fmt: skip
def test_nonsense_is_refused(data: str) -> None:
    with pytest.raises(FrameError, match="rank 1"):
        decode_table(data, "rank 1")


def test_a_rank_that_sends_nonsense_is_named_to_all() -> None:
    mine = table_of(settings())
    found = verdicts(mine, mine, {"nonsense": {"x": "y"}})

    assert {verdict.kind for verdict in found} == {"stop"}
    assert "rank 2 (cloud c) sent no table of settings" in found[1].text


def test_long_values_are_cut_and_still_compared_and_too_many_are_refused() -> None:
    mine, theirs = (table_of(settings(text="x" * 5000 + end)) for end in "ab")
    assert decode_table(encode_table(mine), "rank 1") == mine
    text = verdicts(mine, theirs)[0].text
    assert "text is" in text and len(text) < 2000

    with pytest.raises(ConfigError, match="too many to compare"):
        encode_table(table_of(settings(many=list(range(10_000)))))


def test_a_long_reason_why_a_rank_has_no_part_of_a_checkpoint_is_cut_and_told_to_all() -> None:
    mine = table_of(settings())
    remedy = "set it back to 8, or start a new run"
    good, bad = "ok agreed 7", f"bad agreed model.size is {'9' * 300}; {remedy}; {'x' * 300}"

    found = verdicts(changed(mine, held={"4": good}), changed(mine, held={"4": bad}))

    assert {verdict.kind for verdict in found} == {"stop"}
    assert "step 4: rank 1 (cloud b): model.size is 9999" in found[0].text
    assert remedy in found[0].text and len(found[0].text) < 1000


# --- real ranks, each with a folder and a file of its own


def run_ranks(folder: Path, configs: list[dict[str, Any]]) -> tuple[list[int], float]:
    """Exit codes, and seconds until the last rank had ended. Rank r's folder is folder/r."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    started_s = time.monotonic()
    for rank, config in enumerate(configs):
        run_dir = folder / str(rank)
        run_dir.mkdir()
        (run_dir / "experiment.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(configs)), "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "xcloud", "worker", str(run_dir)]
        ranks.append(launch.start_process(command, environment, run_dir / "log"))
    try:
        return [rank.wait(120) for rank in ranks], time.monotonic() - started_s
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def said_by(folder: Path, rank: int) -> str:
    return str(json.loads((folder / str(rank) / f"rank{rank}.error.json").read_text())["message"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=2", "seed is 1 in rank 0 (cloud cloud_a), 2 in rank 1 (cloud cloud_b)"),
        pytest.param(
            "training.optimizer.clip_norm=0.5",
            "training.optimizer.clip_norm is 0 in rank 0",
            marks=NIGHTLY,
        ),
        pytest.param(
            "cluster.clouds.cloud_b.num_ranks=2",
            "cluster.clouds.cloud_b.num_ranks is 1 in rank 0",
            marks=NIGHTLY,
        ),
    ],
    ids=["seed", "clip_norm", "num_ranks"],
)
def test_clouds_with_other_files_end_at_once_and_say_why(
    tmp_path: Path, override: str, said: str
) -> None:
    configs = [toy_config("two_clouds", more) for more in ([], [f"++{override}"])]
    if "clip_norm" in override:  # the toy config sets its own
        for config, clip_norm in zip(configs, (0.0, 0.5), strict=True):
            config["training"]["optimizer"]["clip_norm"] = clip_norm  # type: ignore[index]

    codes, _ = run_ranks(tmp_path, configs)

    assert codes == [EXIT_COMES_AGAIN] * 2  # no time-out ends in this code
    assert said_by(tmp_path, 0) == said_by(tmp_path, 1)
    assert said in said_by(tmp_path, 0)
    assert not (tmp_path / "0" / "events.jsonl").exists()  # nothing was loaded yet


@pytest.mark.slow
def test_clouds_with_the_same_experiment_in_other_folders_start(tmp_path: Path) -> None:
    configs = [toy_config("two_clouds", ["training.max_steps=2"]) for _ in range(2)]
    configs[1]["cache_dir"] = str(tmp_path / "1" / "cache")  # in its run folder
    configs[1]["name"] = "other"
    configs[1]["cluster"]["clouds"]["cloud_a"]["device"] = "cpu"  # type: ignore[index]

    codes, _ = run_ranks(tmp_path, configs)

    assert codes == [0, 0], (tmp_path / "0" / "log").read_text()
    # By the monitor that rank 0 starts.
    assert json.loads((tmp_path / "0" / "summary.json").read_text())["status"] == "finished"


@pytest.mark.slow
@pytest.mark.nightly
def test_a_producer_with_another_seed_ends_all_with_one_message(tmp_path: Path) -> None:
    configs = []
    for seed in (1, 1, 2):
        clouds = {"disc": cloud(1), "one": cloud(1, 2.0), "two": cloud(1, 1.0)}
        configs.append({**feed_config(clouds, "clouds"), "seed": seed})

    codes, _ = run_ranks(tmp_path, configs)

    assert codes == [EXIT_COMES_AGAIN] * 3
    assert "seed is 1 in rank 0" in said_by(tmp_path, 2)
    assert said_by(tmp_path, 0) == said_by(tmp_path, 1) == said_by(tmp_path, 2)


def test_a_rank_is_named_with_its_cloud_if_this_clouds_file_knows_it() -> None:
    layout = ClusterLayout({"a": Cloud(2, [0]), "b": Cloud(1, [1])}, "free")
    job: Any = SimpleNamespace(cluster=layout)
    names = ["rank 0 (cloud a)", "rank 1 (cloud a)", "rank 2 (cloud b)", "rank 3", "rank 4"]
    assert [rank_name(job, rank) for rank in range(5)] == names


def test_settings_and_files_of_both_sections_count_together() -> None:
    half = {f"k{n}": "v" for n in range(4096)}
    assert decode_table(encode_table({"setting": half, "code": half}), "rank 1") == {
        "setting": half,
        "code": half,
    }
    with pytest.raises(ConfigError, match="8193 settings and files"):
        encode_table({"setting": half, "code": half | {"one more": "v"}})

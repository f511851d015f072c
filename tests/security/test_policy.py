"""Experiment files that come from elsewhere: read as data, and held against this cloud's policy.
docs/security.md says what such a file cannot do."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml  # type: ignore[import-untyped]
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from tests.configs import CONF, composed
from tests.nightly import each_once, first_daily
from tests.one_way_toy import cloud, feed_config
from tests.runs import command, start
from tests.toy import toy_config
from xcloud.base import project
from xcloud.base.errors import ConfigError
from xcloud.base.settings import ReadPath
from xcloud.base.yaml_text import from_yaml
from xcloud.job import approval, given, strict_policy
from xcloud.job import config as configs
from xcloud.job.given import compose_follow_up, with_overrides
from xcloud.launch.failures import EXIT_COMES_AGAIN
from xcloud.launch.several_machines import TorchrunProcess
from xcloud.security import places
from xcloud.security.policy import (
    MAX_NUMBER,
    MAX_SETTINGS,
    Policy,
    bound_of,
    bounded_settings,
    constructors,
)
from xcloud.show.monitor import Monitor

ROOT = project.project_root()
Reader = Callable[[Path], object]


def approved(file: Path) -> None:
    """Raise what `approve` says, which asks nothing of a file that it would refuse."""
    asked = given.read_to_approve(file)
    assert approval.main([str(file), "--yes"]) == (asked.refusal is not None)
    if asked.refusal is not None:
        raise asked.refusal


READERS: dict[str, Reader] = {
    "translate, generate, export, evaluate": given.read_settings,
    "resume": lambda file: with_overrides(file, [], CONF),
    "approve": lambda file: approved(file),
    "policy --new": lambda file: strict_policy.strict_policy(file, "cloud_a"),
    "worker": lambda file: given.read_shared(file, file.parent),
    "monitor": lambda file: Monitor(given.read_shared(file, file.parent), file.parent),
}
SHARING = {name: READERS[name] for name in ("worker", "monitor")}


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives this cloud a policy; the defaults until it is called."""

    def give(**settings: object) -> None:
        file = tmp_path / "policy of this cloud.yaml"
        file.write_text(OmegaConf.to_yaml(OmegaConf.create(settings)))
        monkeypatch.setenv("XCLOUD_POLICY", str(file))

    give()
    return give


def written(folder: Path, config: DictConfig | None = None, **changed: object) -> Path:
    """An experiment file with settings changed, by dotted name with __ for the dot."""
    config = composed("+exp=abnet_iwslt") if config is None else config
    settings = {key.replace("__", "."): value for key, value in changed.items()}
    file = folder / "experiment.yaml"
    changed_config = OmegaConf.create(OmegaConf.to_container(config))
    for key, value in settings.items():
        OmegaConf.update(changed_config, key, value, merge=False)
    OmegaConf.save(changed_config, file, resolve=True)
    return file


def refused(read: Reader, file: Path) -> str:
    with pytest.raises(ConfigError) as error:
        read(file)
    return str(error.value)


CALLS = [
    ("pathlib.Path.write_text", {"self": "OWNED", "data": "x"}),
    ("distutils.spawn.spawn", {"cmd": ["touch", "OWNED"]}),
    ("torch.load", {"f": "OWNED", "weights_only": False}),
    ("xcloud.record.files.Path.write_text", {"self": "OWNED", "data": "x"}),
    ("xcloud.comm.precision.Cast.__init__", {}),
    ("evil_module.Anything", {}),
    (["os.system"], {}),
    ({"_target_": "os.getcwd"}, {}),
]


@pytest.mark.parametrize(("reader", "call"), each_once(READERS, CALLS))
def test_attacks_1_to_3_a_target_that_is_no_constructor_is_neither_imported_nor_called(
    reader: str,
    call: tuple[object, dict[str, object]],
    tmp_path: Path,
    policy: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owned = tmp_path / "owned"
    (tmp_path / "evil_module.py").write_text(f"open({str(owned)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    target, more = call
    spelled = {k: str(owned) if v == "OWNED" else v for k, v in more.items()}
    file = written(tmp_path, tracker={"_target_": target, **spelled})

    message = refused(READERS[reader], file)

    assert "tracker._target_ is " in message and "policy.yaml" in message
    assert not owned.exists() and "evil_module" not in sys.modules


@pytest.mark.parametrize("key", ["_partial_", "_args_", "_recursive_", "_convert_"])
def test_a_file_cannot_change_how_a_constructor_is_called(
    key: str, tmp_path: Path, policy: object
) -> None:
    file = written(tmp_path, **{f"tracker__{key}": True})
    assert refused(given.read_settings, file).startswith(f"tracker.{key}: ")


def test_a_constructor_that_the_policy_names_is_called(
    tmp_path: Path, policy: Callable[..., None]
) -> None:
    file = written(tmp_path, OmegaConf.create(toy_config("local")))
    message = refused(given.read_settings, file)
    assert message.startswith("2 things are refused:\n- task._target_ is 'tests.toy.ToyTask'")

    policy(**yaml.safe_load(message[message.index("constructors: ") :]))

    assert given.read_settings(file).job.name == "toy"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_class_of_the_users_own_runs_on_one_machine_without_a_policy(
    tmp_path: Path, policy: object
) -> None:
    assert start(tmp_path, toy_config("two_clouds"))["status"] == "finished"


@pytest.mark.slow
def test_a_worker_under_torchrun_refuses_before_it_joins(tmp_path: Path, policy: object) -> None:
    owned = tmp_path / "owned"
    target = {"_target_": "pathlib.Path.write_text", "self": str(owned), "data": "x"}
    file = written(tmp_path, tracker=target)
    words = ("-m", "xcloud", "worker", str(file), "--run-dir", str(tmp_path))
    worker = command(*words, log=tmp_path / "log", RANK="0", WORLD_SIZE="2")
    assert worker.wait(120) == EXIT_COMES_AGAIN
    assert "tracker._target_ is 'pathlib.Path.write_text'" in (tmp_path / "log").read_text()
    assert not owned.exists()


CODE = "_target_=pathlib.Path.write_text", "self=OWNED", "data=x"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tracker=none", *(f"++tracker.{word}" for word in CODE)], r"tracker\._target_ is 'path"),
        ([f"++plan.{word}" for word in CODE], r"plan\._target_ is 'pathlib"),
        ([f"++task.{word}" for word in CODE], r"task\._target_ is 'pathlib"),
        ([f"++parts.mine.{word}" for word in CODE], r"parts\.mine\._target_ is 'pathlib"),
        (["+plan._partial_=true"], "plan._partial_: an experiment file has no such key"),
        (["++hydra.searchpath=[file:OWNED]"], "may not ask this"),
        (["hydra/launcher=basic"], "may not ask this"),
        (["recipe=../../OWNED"], "may not ask this"),
        (["+exp=/OWNED"], "may not ask this"),
        (["+defaults=[exp/toy]"], "may not ask this"),
        ([r"tracker.experiment=$\{oc.env:A_SECRET\}"], "may not ask this"),
        ([r"tracker.experiment='$\{oc.env:A_SECRET\}'"], "may not ask this"),
        ([r"++training.x=[$\{oc.env:A_SECRET\}]"], "may not ask this"),
        (["++task.name={a: 1}"], "may not ask this"),
        (["++task.name=str(1)"], "may not ask this"),
        (["seed=1,2"], "makes no experiment"),
        (["~tracker"], "may not ask this"),
    ],
    ids=str,
)
def test_what_follows_a_run_that_was_read_may_call_no_more_than_the_run(
    words: list[str], said: str, tmp_path: Path, policy: object
) -> None:
    owned = tmp_path / "owned"
    config = composed("+exp=electra_multilingual")
    spelled = [word.replace("OWNED", str(owned)) for word in words]
    config.follow_up = ["+exp=xnli_zero_shot", *spelled]

    with pytest.raises(ConfigError, match=said):
        compose_follow_up(configs.Settings.of(config), CONF, tmp_path, own=False)
    assert not owned.exists()


def test_no_interpolation_of_another_owner_is_resolved_however_it_came_to_be_one(
    tmp_path: Path, policy: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second check, behind that of the words: of what was composed."""
    monkeypatch.setenv("A_SECRET", "s3cr3t")
    monkeypatch.setattr(given, "_check_words", lambda words, is_group: None)
    config = composed("+exp=electra_multilingual")
    for word in (r"tracker.experiment=$\{oc.env:A_SECRET\}", r"++task.x=[{a: $\{oc.env:HOME\}}]"):
        config.follow_up = ["+exp=xnli_zero_shot", "tracker=mlflow", word]
        settings = configs.Settings.of(config)
        with pytest.raises(ConfigError, match="may not read this machine"):
            compose_follow_up(settings, CONF, tmp_path, own=False)


def test_what_follows_is_what_was_checked(tmp_path: Path, policy: object) -> None:
    config = composed("+exp=electra_multilingual")
    following = compose_follow_up(configs.Settings.of(config), CONF, tmp_path, own=False)
    assert following is not None and "${" not in str(following.plain)


def test_only_the_checked_readers_build_what_a_file_says() -> None:
    """A file is read as data by read_config, and a job is built by Settings: who uses both
    has let an unchecked file through."""
    sources = [*ROOT.glob("xcloud/**/*.py"), *ROOT.glob("experiments/**/*.py")]
    both = {
        path.relative_to(ROOT).as_posix()
        for path in [*sources, *ROOT.glob("benchmarks/*.py"), ROOT / "run.py"]
        if {"read_config", "Settings"} <= names_in(path)
    }
    looks_up_names = {p.name for p in sources if {"resolve_name", "instantiate"} & names_in(p)}
    assert both == {"xcloud/job/given.py"}
    assert looks_up_names == {"config.py", "catalogue.py"}  # the latter lists, and builds nothing


@functools.cache
def names_in(path: Path) -> set[str]:
    """Return the names of a file that builds or looks up something, and none of any other one."""
    text = path.read_text("utf-8")
    if not re.search(r"\b(Settings|resolve_name|instantiate)\b", text):
        return set()
    tree = ast.parse(text)
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return found | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("spelled", ["${oc.env:A_SECRET}", '"\\x24{oc.env:A_SECRET}"'])
def test_attack_4_no_interpolation_is_resolved(
    read: Reader, spelled: str, tmp_path: Path, policy: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "of company B")
    file = written(tmp_path)
    text = file.read_text()
    assert "name: pipeline" in text
    file.write_text(text.replace("name: pipeline", f"name: {spelled}"))

    message = refused(read, file)

    assert "an interpolation" in message and "of company B" not in message


@pytest.mark.parametrize("read", SHARING.values(), ids=SHARING)
def test_attack_5_a_file_outside_is_not_even_digested(
    read: Reader, tmp_path: Path, policy: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads(path: Path) -> bytes:
        raise AssertionError(f"{path} was read")

    secret = tmp_path.parent / "secret.json"
    secret.write_text("{}")
    tokenizer = {"_target_": "xcloud.tasks.tokenizer.FileTokenizer", "path": str(secret)}
    file = written(tmp_path, task__source_tokenizer=tokenizer)
    monkeypatch.setattr(Path, "read_bytes", reads)

    assert refused(read, file).startswith(f"task.source_tokenizer.path is '{secret}'")


ALIASES = "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{chr(ord(name) - 1)}'] * 10)}]\n" for name in "bcdef"
)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{ALIASES}_target_: x\n", "line 1: an anchor or alias"),
        ("_target_: x\na: " + "[" * 100_000, "more than 32 values in each other"),
        ("_target_: x\n" + "a:\n" + " - 1\n" * 10_000, "more than 4000 keys and values"),
        (f"_target_: x\na: {'b' * 20_000}\n", "more than 10000 characters in a value"),
        ("#" * 300_000, "longer than 128000 bytes"),
        ("_target_: !!python/name:os.system x\n", "a tag (!)"),
        ("_target_: x\n_target_: y\n", "duplicate key"),
    ],
    ids=["aliases", "deep", "many", "long", "large", "tag", "twice"],
)
def test_attack_6_nothing_is_built_of_a_file_that_would_take_long(
    read: Reader,
    text: str,
    said: str,
    tmp_path: Path,
    policy: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(text)

    def create(given: object, *more: Any, make: Any = OmegaConf.create, **how: Any) -> object:
        assert given != text
        return make(given, *more, **how)

    if said != "duplicate key":
        monkeypatch.setattr(configs.OmegaConf, "create", create)
    assert said in refused(read, file)


def test_a_plan_on_paper_is_read_as_data_too(tmp_path: Path) -> None:
    file = tmp_path / "clouds.yaml"
    file.write_text("clouds: ${oc.env:HOME}\n")
    assert "an interpolation" in refused(configs.read_plain, file)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "no file" in refused(configs.read_plain, tmp_path / "pipe")


PLACES = [
    ("cluster.clouds.cloud_a.num_ranks", 10**9),
    ("cache_dir", "/"),
    ("cache_dir", "xcloud"),
    ("cache_dir", ".cache/../conf"),
    ("tracker.root", "/srv/other"),
    ("tracker.uri", "http://inside:5000"),
    ("task.data.path", "/srv/other_department"),
    ("task.data.path", "~root/corpus"),
    ("task.data.path", "../../elsewhere"),
    ("task.data.path", "a\0b"),
    ("task.data.path", "tests"),  # nothing of the project is, by itself
    ("task.data.path", ".cache"),
    ("task.source_monolingual_file", "/etc/passwd"),
    ("task.source_tokenizer.name_or_path", "/srv/model"),
    ("task.source_tokenizer.name_or_path", "company-b/private-model"),
    ("task.source_tokenizer.name_or_path", "tests"),
]


@pytest.mark.parametrize(("reader", "setting"), each_once(SHARING, PLACES, count=10))
def test_attack_9_folders_addresses_and_ranks_are_bounded(
    reader: str, setting: tuple[str, object], tmp_path: Path, policy: object
) -> None:
    key, value = setting
    folder = {
        "task___target_": "xcloud.tasks.translation.Translation",
        "task__data": {"_target_": "xcloud.tasks.sources.Folder", "path": str(tmp_path)},
    }
    tokenizer = {"_target_": "xcloud.tasks.tokenizer.PretrainedTokenizer"}
    given = {"task__source_tokenizer": tokenizer, **folder, key.replace(".", "__"): value}
    message = refused(SHARING[reader], written(tmp_path, **given))
    assert f"{key} is " in message and "policy.yaml" in message


BOUNDED = {
    "launch.max_restarts": 101,
    "training.checkpoint.keep": 101,
    "training.checkpoint.every_minutes": 1e5,
    "training.activation_cache_mb": 20_000,
    "training.max_steps": 10**12,
    "cluster.liveness.join_within_s": 8 * 86_400,
    "cluster.liveness.overdue_after_s": 9e8,
    "cluster.liveness.lost_after_s": 9e8,
    "cluster.liveness.interval_s": 1e-6,
    "cluster.reconnect_s": 8e8,
    "cluster.link_budget_bytes": 10**17,
}


@pytest.mark.parametrize(("reader", "bound"), each_once(SHARING, [*BOUNDED.items()]))
def test_attack_12_what_costs_this_machine_itself_is_bounded_without_a_requirement(
    reader: str, bound: tuple[str, float], tmp_path: Path, policy: Callable[..., None]
) -> None:
    key, value = bound
    config = composed("+exp=abnet_iwslt", "cluster.wan=sealed")
    OmegaConf.update(config, key, value, force_add=True)
    file = written(tmp_path, config)
    message = refused(SHARING[reader], file)
    assert f"{key} is {value}" in message and re.search("at (most|least) [0-9]", message)

    allowed = Policy(**yaml.safe_load(message[message.index("require: ") :]))
    assert not allowed.refused(from_yaml(file.read_text()), tmp_path)


def test_a_link_in_the_project_leads_nowhere_else(
    tmp_path: Path, policy: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    project, other = tmp_path / "project", tmp_path / "other"
    project.mkdir()
    other.mkdir()
    (project / "link").symlink_to(other)
    monkeypatch.setattr("xcloud.security.places.project_root", lambda: project)
    settings = {"task": {"path": "link"}}

    with pytest.raises(ConfigError, match=r"task\.path is 'link'"):
        Policy(read=["."]).check(settings, tmp_path / "run")
    Policy(read=[".", str(other)]).check(settings, tmp_path / "run")


def test_a_relative_path_is_looked_up_where_the_process_runs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corpus").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"task\.path is 'corpus'"):
        Policy(read=["."]).check({"task": {"path": "corpus"}}, tmp_path / "run")
    Policy().check({"task": {"path": str(tmp_path / "corpus")}}, tmp_path)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A corpus that a policy may allow, and what is not to be read."""
    corpus, secret = tmp_path / "corpus", tmp_path / "hr"
    for folder in (corpus / "inner", secret / "inner"):
        folder.mkdir(parents=True)
    (secret / "salaries.txt").write_text("Ann earns 91000")
    return corpus, secret


@pytest.mark.parametrize("link", ["train.txt", "inner/train.txt", "all", "chain"])
def test_a_folder_that_is_read_holds_no_link_that_leads_out(
    link: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    corpus, secret = folders
    target = {"all": secret, "chain": corpus / "second"}.get(link, secret / "salaries.txt")
    (corpus / "second").symlink_to(
        secret / "salaries.txt" if link == "chain" else corpus / "inner"
    )
    (corpus / link).symlink_to(target)
    settings = {"task": {"path": str(corpus)}}

    with pytest.raises(ConfigError, match=r"in task\.path, is .*hr"):
        Policy(read=[str(corpus)]).check(settings, tmp_path / "run")
    Policy(read=[str(corpus), str(secret)]).check(settings, tmp_path / "run")


def test_links_in_a_circle_are_looked_at_once(folders: tuple[Path, Path], tmp_path: Path) -> None:
    corpus, _ = folders
    (corpus / "inner" / "again").symlink_to(corpus)
    Policy(read=[str(corpus)]).check({"task": {"path": str(corpus)}}, tmp_path / "run")


def test_a_folder_that_holds_too_much_to_look_through_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its links would be looked at for days before a run is refused."""
    corpus, _ = folders
    for name in ("a.txt", "b.txt", "c.txt", "inner/d.txt", "inner/e.txt"):
        (corpus / name).touch()
    policy, settings = Policy(read=[str(corpus)]), {"task": {"path": str(corpus)}}
    monkeypatch.setattr(places, "MAX_ENTRIES", 6)  # five files and a folder
    policy.check(settings, tmp_path / "run")
    monkeypatch.setattr(places, "MAX_ENTRIES", 5)
    with pytest.raises(ConfigError, match=r"inner, in task\.path"):
        policy.check(settings, tmp_path / "run")


def test_a_name_on_the_hub_is_named_by_the_policy_with_its_revision(tmp_path: Path) -> None:
    def check(policy: Policy, name: str, revision: str | None = None) -> None:
        tokenizer = "xcloud.tasks.tokenizer.PretrainedTokenizer"
        if revision is None:
            policy.check({"a": {"_target_": tokenizer, "name_or_path": name}}, tmp_path)
        data = {"_target_": "xcloud.tasks.sources.Hub", "dataset": name, "revision": revision}
        policy.check({"task": {"data": data, "cache_dir": str(tmp_path)}}, tmp_path)

    for name, revision in (("gpt2", None), ("b/private", None), ("b/public", "refs/pr/7")):
        with pytest.raises(ConfigError, match="of the hub "):
            check(Policy(hub=["b/public"]), name, revision)
    check(Policy(hub=["b/public"]), "b/public")
    check(Policy(hub=["b/public@refs/pr/7"]), "b/public", "refs/pr/7")
    with pytest.raises(ConfigError, match=r"hub: \[b/public@1a2b, b/public\]"):
        check(Policy(hub=["b/public@1a2b"]), "b/public")


def test_a_class_of_ones_own_may_mark_its_paths_and_unmarked_texts_are_guessed(
    tmp_path: Path,
) -> None:
    policy = Policy(constructors=["tests.security.test_policy.Own"])
    for settings, to in (({"word": "a/b"}, "word"), ({"place": "corpus"}, "place")):
        with pytest.raises(ConfigError, match=f"own.{to} is '"):
            policy.check(
                {"own": {"_target_": "tests.security.test_policy.Own", **settings}}, tmp_path
            )
    policy.check({"own": {"_target_": "tests.security.test_policy.Own", "word": "gelu"}}, tmp_path)


@dataclasses.dataclass
class Own:
    word: str = ""
    place: ReadPath | None = None


def test_only_an_approved_file_is_parsed(
    tmp_path: Path, policy: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    policy(approved=[digest])
    given.read_shared(file, tmp_path)
    policy(approved=[])
    said = refused(SHARING["worker"], file)
    assert digest in said and os.environ["XCLOUD_POLICY"] in said
    assert f"python -m xcloud approve {file}" in said
    file.write_text("a: [" * 9)  # would not parse
    for read in SHARING.values():
        assert "is not approved in this cloud" in refused(read, file)


def test_a_cloud_requires_what_every_job_must_have(
    tmp_path: Path, policy: Callable[..., None]
) -> None:
    noise = {
        "_target_": "xcloud.security.defences.GaussianNoise",
        "sigma": 0.3,
        "clip": 1.0,
    }
    file = written(tmp_path, security__defences={"forward": noise})
    read = SHARING["worker"]
    for key, wanted, said in (
        ("job", "OneWayExperiment", "job is 'Experiment', but"),
        ("security.defences.forward", "Marvell", "is 'GaussianNoise', but"),
        ("security.defences.forward.sigma", {"min": 0.5}, "is 0.3, but policy.yaml of this cloud"),
        ("security.defences.backward.sigma", {"min": 0.5}, "is None, but"),
        ("strategy.averaging.every", {"min": 1}, "requires min 1"),
        ("training.checkpoint.keep", {"max": 1}, "keep is 2, but"),
        ("cluster.liveness.join_within_s", {"min": 1, "max": 60}, "requires min 1 and max 60"),
        ("seed", 7, "seed is 1, but"),
    ):
        policy(require={key: wanted})
        assert said in refused(read, file)
    policy(require={
        "job": "Experiment", "security.defences.forward": "GaussianNoise", "seed": 1,
        "security.defences.forward.sigma": {"min": 0.3, "max": 1}, "strategy.averaging": None,
    })  # fmt: skip
    read(file)


def test_this_cloud_is_no_other_one(
    tmp_path: Path, policy: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path)

    def start(rank: int, said: str | None) -> None:
        process = TorchrunProcess.__new__(TorchrunProcess)
        process.file, process.run_dir = file, tmp_path
        process.rank, process.cloud = rank, said
        process.read()

    policy(me="cloud_b")
    start(1, None)
    start(1, "cloud_b")
    for rank, named, said in (
        (0, None, "belongs to cloud 'cloud_a', not 'cloud_b'"),
        (1, "cloud_a", "--cloud is 'cloud_a', but the policy of this cloud says me: cloud_b"),
    ):
        with pytest.raises(ConfigError, match=said):
            start(rank, named)
    policy(me="cloud_c")
    assert "takes no part in this experiment" in refused(SHARING["monitor"], file)


@pytest.mark.slow
def test_a_file_is_run_only_with_a_run_folder(tmp_path: Path, policy: object) -> None:
    words = ("-m", "xcloud", "worker", str(written(tmp_path)))
    worker = command(*words, log=tmp_path / "log", RANK="0", WORLD_SIZE="2")
    assert worker.wait(120) == 2
    assert "give --run-dir" in (tmp_path / "log").read_text()


def test_a_policy_may_allow_less_than_the_defaults(tmp_path: Path) -> None:
    narrow = Policy(read=["docs"], clouds=["a"], max_ranks=4)
    narrow.check({"task": {"path": "docs/plans", "kind": "a word"}}, tmp_path)
    for settings, said in (
        ({"task": {"path": "tests"}}, r"task\.path is 'tests'.*read: \[docs, tests\]"),
        ({"cluster": {"clouds": {"a": {}, "b": {}}}}, r"cluster\.clouds is 'b'.*clouds: \[a, b\]"),
        ({"a": {"num_ranks": 3}, "b": [{"num_ranks": 2}]}, r"b\[0\]\.num_ranks.*max_ranks: 5"),
    ):
        with pytest.raises(ConfigError, match=said):
            narrow.check(settings, tmp_path)


def test_all_that_a_policy_refuses_comes_in_one_round(
    tmp_path: Path, policy: Callable[..., None]
) -> None:
    """Also what only a job can tell, where the job may not be built: the rule on a path that is
    refused sees that path, not what stands in for it."""
    config = composed("+exp=abnet_iwslt", "profile=files", "task.path=/srv/pairs")
    file = written(tmp_path, config, tracker__uri="http://inside:5000")
    policy(
        holders={"source": ["cloud_b"]},
        weights={"head": ["cloud_a"]},
        require={"training.max_steps": {"max": 1}, "task.path": "/srv/others"},  # earlier name
    )
    for reader in ("worker", "approve"):
        said = refused(READERS[reader], file)
        for each in (
            "task.data.path is '/srv/pairs', but",
            "tracker.uri is 'http://inside:5000'",
            "requires max 1",
            "task.data.path is '/srv/pairs', but policy.yaml of this cloud requires /srv/others",
            "a cloud that holds 'source' is 'cloud_a'",
            "read: [/srv/pairs]",
            "holders: {source: [cloud_b, cloud_a]}",
            "weights: {head: [cloud_a, cloud_b]}",
        ):
            assert each in said


def test_what_a_policy_allows_is_read_written_and_contacted(
    tmp_path: Path, policy: Callable[..., None]
) -> None:
    changed = {
        "cache_dir": "/srv/cache",
        "tracker__root": "/srv/cache/mlflow",
        "tracker__uri": "http://inside:5000",
        "task__cache_dir": "/srv/cache",
    }
    file = written(tmp_path, **changed)
    for key, line in (
        ("write", "write: [.cache, mlruns, /srv/cache/mlflow, /srv/cache]"),
        ("addresses", "addresses: ['http://inside:5000']"),
    ):
        assert line in refused(READERS["worker"], file)
        policy(
            write=["/srv/cache"],
            **({"addresses": ["http://inside:5000"]} if key == "addresses" else {}),
        )

    READERS["worker"](file)


def test_the_file_cannot_widen_who_may_hold_what(
    tmp_path: Path, policy: Callable[..., None]
) -> None:
    file = written(tmp_path)
    policy(holders={"source": ["cloud_a"], "labels": []}, weights={"head": ["cloud_b"]})
    READERS["worker"](file)

    policy(holders={"source": ["cloud_b"]})
    assert "a cloud that holds 'source' is 'cloud_a'" in refused(READERS["worker"], file)
    policy(weights={"head": ["cloud_a"]})
    assert refused(READERS["worker"], file).endswith("weights: {head: [cloud_a, cloud_b]}")


def test_a_rule_that_a_one_way_job_cannot_keep_refuses_it(
    tmp_path: Path, policy: Callable[..., None]
) -> None:
    clouds = {"d": cloud(1), "a": cloud(1, 1.0)}
    file = written(tmp_path, OmegaConf.create(feed_config(clouds, "local")))
    own = ["tests.one_way_toy.ToyFeed"]
    policy(constructors=own)
    READERS["worker"](file)
    policy(constructors=own, holders={"text": ["d"]})
    assert "has holders, and a job of this kind" in refused(READERS["worker"], file)


EXPERIMENTS = sorted(path.stem for path in (CONF / "exp").glob("*.yaml"))


@pytest.mark.parametrize("exp", first_daily(EXPERIMENTS, count=2))
def test_a_file_that_we_write_is_read_by_a_cloud_that_reads_nothing(
    exp: str, tmp_path: Path, policy: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a folder is called as each word of it: a word is no path."""
    name = ["task.tokenizer.name_or_path=minilm"] if exp == "xnli_zero_shot" else []
    config = composed(f"+exp={exp}", *name)
    words = [
        value for value in configs.Settings.of(config).flat.values() if isinstance(value, str)
    ]
    here = tmp_path / "here"
    for word in words:
        if word != "minilm" and "/" not in word:
            (here / word[:100]).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(here)
    for place in (".cache", "mlruns"):
        (here / place).rmdir()
    file = written(tmp_path, config)
    job = given.read_shared(file, tmp_path).job
    assert job.headline == configs.Settings.of(config).job.headline


WORDS = """
choices classes clouds column compressors config date dev experiment follow_up generators
holders hooks
label label_column language languages links metrics name names pairs pairs_config profile
reader revision
schedules source source_column split strategies sweep target target_column targets test
text_columns text_key train train_language weights metric
"""


def test_every_text_of_a_constructor_is_a_word_or_says_where_it_leads() -> None:
    """A new setting that is a text stands in this list, once somebody has seen that nothing is
    opened by it, or is marked where it is declared (base.settings.Leads)."""
    unmarked = set[str]()
    for target in constructors():
        made = get_object(target)
        if not dataclasses.is_dataclass(made):
            continue
        hints = get_type_hints(made, include_extras=True)
        for field in dataclasses.fields(made):
            hint = repr(hints[field.name])
            if re.search(r"\bstr\b", hint) and "Leads(" not in hint:
                unmarked.add(field.name)
    assert unmarked == set(WORDS.split())


COSTS_WHAT_TRAINING_COSTS = """
gb_out hour
accumulate_steps adapter_size alpha batch_size batch_tokens batches_per_step block blocks_per_stage
calibration_texts check_every clip clip_norm confirm cross_attention_heads dev_share dwell
encoder_layers_per_stage eps eval_batch_size eval_samples evaluate_every every every_steps factor
feed_forward fragments head_rank hidden in_flight iterations layer layers layer_norm_eps
learning_rate legs length length_extra length_penalty length_ratio loss_weight max_answer_tokens
max_epochs max_eval_samples max_length max_skips_in_a_row max_steps max_tokens max_train_samples
micro_batches min_count noise num_dev num_heads num_in_flight num_in_memory
num_kv_heads num_layers num_decoder_layers num_encoder_layers num_micro_batches num_pairs num_ranks
num_test num_texts num_train overlap power r rank replica replicas router_loss rows share sigma
size sizes stages steps test_share trial_steps type_vocab_size until_step vocab_size
vocabulary_chunk warmup_steps weight_decay whole_every worth max_texts
at_most at_least num_monolingual stride beta outages max_question
"""


def test_every_number_of_a_constructor_is_bounded_or_costs_what_training_costs() -> None:
    """A new setting that is a number has bounds in its annotation or in MAX_SETTINGS, or stands in
    this list once somebody has seen what a huge one costs the machine itself."""
    unbounded = set[str]()
    for target in constructors():
        made = get_object(target)
        if not dataclasses.is_dataclass(made):
            continue
        hints = get_type_hints(made, include_extras=True)
        for field in dataclasses.fields(made):
            for kind, meta in leaves_of(hints[field.name]):
                has_end = any(re.search(r"\b(le|lt)=", repr(one)) for one in meta)
                if kind in (int, float) and not has_end and bound_of(field.name) == MAX_NUMBER:
                    unbounded.add(field.name)
    assert unbounded <= set(COSTS_WHAT_TRAINING_COSTS.split())


def leaves_of(hint: Any, meta: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the types that an annotation is made of, each with what is annotated around it."""
    if get_origin(hint) is Annotated:
        inner, *around = get_args(hint)
        yield from leaves_of(inner, (*meta, *around))
    elif get_args(hint) and get_origin(hint) is not Literal:
        for one in get_args(hint):
            yield from leaves_of(one, meta)
    else:
        yield hint, meta


def test_what_is_refused_is_told_at_once_with_the_lines_that_allow_it(
    tmp_path: Path, policy: Callable[..., None]
) -> None:
    (tmp_path / "corpus").mkdir()
    given_here = {
        "tracker__uri": "http://mlflow.here:5000",
        "cache_dir": "/srv/cache",
        "launch__max_restarts": 500,
    }
    file = written(
        tmp_path,
        composed(
            "+exp=abnet_iwslt", "cluster/wan=sealed", "cluster.clouds.cloud_a.address=h:7000"
        ),
        **given_here,
    )
    for read in (READERS["worker"], READERS["approve"]):
        message = refused(read, file)
        for key in (*given_here, "cluster__clouds__cloud_a__address"):
            assert f"- {key.replace('__', '.')} is " in message
    lines = message.partition("put it into policy.yaml of this cloud:\n")[2]
    policy(**yaml.safe_load(lines))
    for read in (READERS["worker"], READERS["approve"]):
        read(file)


def test_a_line_to_paste_writes_no_other_key(tmp_path: Path) -> None:
    evil = "http://x]\npeers: {cloud_b: [evil.pem]}\n#"
    policy = Policy(addresses=["a"])
    for one in policy.refused({"tracker": {"uri": evil}}, tmp_path):
        (line,) = policy.lines_for([one])
        assert yaml.safe_load(line) == {"addresses": ["a", evil]} and "\n" not in line


@pytest.mark.parametrize(
    ("allowed", "address", "num_ranks", "is_allowed"),
    [
        ([], "10.0.0.5:22", 1, False),
        (["10.0.0.5:22"], "10.0.0.5:22", 1, True),
        (["10.0.0.5:22"], "10.0.0.5:23", 1, False),
        (["10.0.0.5:7000"], "10.0.0.5:7000", 4, False),
        (["10.0.0.5:7000-7003"], "10.0.0.5:7000", 4, True),
        (["10.0.0.5:7000-7002"], "10.0.0.5:7000", 4, False),
        (["10.0.0.5:7000-7100"], "10.0.0.5:7040", 4, True),
        (["10.0.0.6:7000-7100"], "10.0.0.5:7040", 4, False),
        (["h:1", "i:1"], ["h:1", "i:1"], 2, True),
        (["h:1"], ["h:1", "i:1"], 2, False),
        (["h:1"], "0.0.0.0:1", 1, False),
    ],
)
def test_where_a_cloud_listens_and_is_dialled_is_named_by_the_policy(
    allowed: list[str], address: object, num_ranks: int, is_allowed: bool, tmp_path: Path
) -> None:
    cloud = {"_target_": "xcloud.layout.Cloud", "address": address, "num_ranks": num_ranks}
    settings = {"cluster": {"clouds": {"cloud_b": cloud}}}
    found = Policy(addresses=allowed).refused(settings, tmp_path)
    assert (not found) == is_allowed
    if found:
        lines = "\n".join(Policy(addresses=allowed).lines_for(found))
        assert not Policy(**yaml.safe_load(lines)).refused(settings, tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("constructor: [a.B]", "may have these keys: me, peers, approved, .* got {'constructor'"),
        (
            "clouds: cloud_a",
            "clouds must be a list of which each is a text or null, got 'cloud_a'",
        ),
        ("holders: {source: a}", "holders.source must be a list of which each is a text, got 'a'"),
        ("weights: [head]", "weights must be a mapping, got"),
        ("max_ranks: 0", "max_ranks must be a whole number >= 1, got 0"),
        ("- a", "may have these keys"),
        ("read: ['${oc.env:HOME}']", "an interpolation"),
    ],
)
def test_a_wrong_policy_is_refused_by_its_key(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    monkeypatch.setenv("XCLOUD_POLICY", str(file))
    with pytest.raises(ConfigError, match=said):
        configs.this_clouds_policy()
    monkeypatch.setenv("XCLOUD_POLICY", str(tmp_path / "missing.yaml"))
    with pytest.raises(ConfigError, match="no file"):
        configs.this_clouds_policy()


@pytest.mark.parametrize("kind", ["checkout", "installed"])
def test_the_policy_of_this_machines_owner_is_taken_where_none_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, checkout, here = (tmp_path / name for name in ("home", "checkout", "bundle"))
    folder = {"checkout": checkout, "installed": home / ".config" / "xcloud"}[kind]
    for made in (folder, here):
        made.mkdir(parents=True)
    monkeypatch.delenv("XCLOUD_POLICY")
    monkeypatch.setattr(project, "_checkout", lambda: checkout if kind == "checkout" else None)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    (here / "policy.yaml").write_text("max_ranks: 9\n")  # lies beside the file that came

    assert configs.this_clouds_policy() == Policy()
    (folder / "policy.yaml").write_text("max_ranks: 7\n")
    assert configs.this_clouds_policy() == Policy(max_ranks=7)


def imported() -> set[str]:
    """By our files. Some of the standard library Python imports before any of them."""
    return {
        name.partition(".")[0]
        for path in ROOT.glob("xcloud/**/*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        )
    } - {"xcloud", "tests", *sys.stdlib_module_names}  # fmt: skip


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [["status", "."], ["worker", "x.yaml"]],
    ids=lambda words: words[0],
)
def test_a_command_imports_no_module_of_the_folder_it_runs_in(
    words: list[str], tmp_path: Path
) -> None:
    for name in imported():
        (tmp_path / f"{name}.py").write_text("open('owned', 'w').close()\nraise SystemExit(9)\n")
    done = subprocess.run(
        [sys.executable, "-m", "xcloud", *words], cwd=tmp_path, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120,
    )  # fmt: skip
    assert not (tmp_path / "owned").exists(), done.stderr


def test_every_child_process_of_ours_ignores_the_current_folder() -> None:
    text = "".join(path.read_text("utf-8") for path in ROOT.glob("xcloud/**/*.py"))
    assert 'sys.executable, "-m"' not in text


@pytest.mark.slow
@pytest.mark.nightly
def test_a_child_finds_the_users_own_modules_of_the_checkout(tmp_path: Path) -> None:
    command = project.python_command("tests.toy")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)} | project.module_paths()
    assert subprocess.run(command, cwd=tmp_path, env=env, timeout=120).returncode == 0
    assert "-P" in command


@pytest.mark.parametrize("exp", first_daily(["abnet_iwslt", "electra_multilingual"], 1))
def test_a_strict_policy_allows_this_experiment_and_no_other(
    exp: str, tmp_path: Path, policy: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = written(tmp_path, composed(f"+exp={exp}")), tmp_path / "strict.yaml"
    new = tmp_path / "new.yaml"
    cloud = next(iter(given.read_settings(file).job.cluster.clouds))

    assert strict_policy.main(["--new", str(file), "--cloud", cloud, "--out", str(out)]) == 0
    monkeypatch.setenv("XCLOUD_POLICY", str(out))
    given.read_shared(file, tmp_path)
    assert configs.this_clouds_policy().me == cloud

    written(tmp_path, composed(f"+exp={exp}"), seed=2)
    assert "is not approved in this cloud" in refused(SHARING["worker"], file)
    with pytest.raises(ConfigError, match="is there already"):
        strict_policy.main(["--new", str(file), "--cloud", cloud, "--out", str(out)])
    with pytest.raises(ConfigError, match="--cloud is 'nobody'"):
        strict_policy.strict_policy(file, "nobody")
    monkeypatch.setattr(strict_policy, "strict_policy", lambda file, cloud: {"me": 3})
    with pytest.raises(ConfigError, match=f"{new.name}.* me"):
        strict_policy.main(["--new", str(file), "--cloud", cloud, "--out", str(new)])
    assert not new.exists(), "what is no policy is not written"


def test_a_strict_policy_is_not_made_by_running_what_a_file_names(
    tmp_path: Path, policy: object
) -> None:
    owned = tmp_path / "owned"
    target = {"_target_": "pathlib.Path.write_text", "self": str(owned), "data": "x"}
    file = written(tmp_path, tracker=target)
    with pytest.raises(ConfigError, match=r"tracker\._target_ is 'pathlib"):
        strict_policy.strict_policy(file, "cloud_a")
    assert not owned.exists()


def test_a_strict_policy_names_what_its_experiment_leads_to(tmp_path: Path) -> None:
    task = {
        "_target_": "xcloud.tasks.translation.Translation",
        "data": {"_target_": "xcloud.tasks.sources.Folder", "path": str(tmp_path)},
        "source_tokenizer": {
            "_target_": "xcloud.tasks.tokenizer.PretrainedTokenizer", "name_or_path": "owner/name"
        }
    }  # fmt: skip
    tracker = {"_target_": "xcloud.tracking.tracker.MlflowTracker", "uri": "http://here:5000"}
    found = strict_policy.strict_policy(written(tmp_path, task=task, tracker=tracker), "cloud_b")
    assert found["read"] == [str(tmp_path)] and found["hub"] == ["owner/name"]
    assert found["addresses"] == ["http://here:5000"] and found["max_ranks"] == 2
    assert found["holders"]["source"] == ["cloud_a"]


def test_numbers_with_a_bound_of_their_own_or_beyond_any_number_are_named_and_flags_are_not() -> (
    None
):
    some = next(key for key, most in MAX_SETTINGS.items() if most != MAX_NUMBER)
    most = MAX_NUMBER
    found = {
        some: 1, "a": {some: 2.0, "list": [{some: 3}], "b": most, "c": most + 1, "seed": most},
        "d": {some: True}, "e": {some: "4"}, "f": {"seed": most + 1},
    }  # fmt: skip
    assert bounded_settings(found) == [some, f"a.{some}", "a.c", "f.seed"]

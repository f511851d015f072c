"""Who may hold what: refused before anything runs, and not loaded where nothing is read."""

import builtins
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch._C._distributed_c10d import HashStore

from experiments.gradient_leaks.meter import AveragesMeter
from tests.configs import CONF, build, composed
from tests.corpora import SPLIT_SIZES, corpus, given
from tests.nightly import first_daily
from tests.small_tokenizer import SmallTokenizer
from tests.toy_text import ToyTextModel, ToyTextTask, text_config
from xcloud.base.errors import ConfigError, DataError, FrameError, RunFailed
from xcloud.contracts.model import SPLITS
from xcloud.experiment import Experiment
from xcloud.features.leak_meter.observers import meter_of
from xcloud.job import config as configs
from xcloud.launch.local import run
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.transport import Rendezvous
from xcloud.rank.agreement import agree_on, decode_facts
from xcloud.rank.row_counts import load_or_be_told as load
from xcloud.tasks.classification import Classification, CrossLingual, LanguageFolder
from xcloud.tasks.language_modelling import LanguageModelling
from xcloud.tasks.multilingual_text import MultilingualText
from xcloud.tasks.question_answering import QuestionAnswering
from xcloud.tasks.sources import Folder
from xcloud.tasks.text_sources import FolderText
from xcloud.tasks.translation import Translation
from xcloud.tasks.wit3 import Wit3

FITTING = [
    ("u_shape", "owner_keeps_text_and_labels"),
    ("weak_device", "owner_keeps_text_and_labels"),
    ("bottom_only", "owner_keeps_text"),
    ("two_owners", "two_owners"),
]


def built(cluster: str, *overrides: str) -> Experiment:
    return configs.Settings.of(OmegaConf.create(text_config(cluster, list(overrides)))).job


@pytest.mark.parametrize(("cluster", "security"), first_daily(FITTING, count=2))
def test_every_layout_goes_with_its_rules(cluster: str, security: str) -> None:
    found = built(cluster, f"security={security}")

    assert found.cluster.name == cluster
    for rank in range(found.cluster.num_ranks):
        cloud = found.cluster.placement(rank).cloud
        for name in found.fields_of(rank):
            assert cloud in found.security.holders.get(name, [cloud])


@pytest.mark.parametrize(("cluster", "security"), FITTING)
def test_prompts_and_answers_of_chats_are_read_where_the_rules_allow(
    cluster: str, security: str
) -> None:
    """Prompts (with the answers that are written on from) in the first stage, answers to guess in
    the last; the upper half of the model in a cloud of its own sees neither."""
    chats = ["+exp=lora_clm", f"cluster={cluster}", f"security={security}"]
    found = configs.Settings.of(composed(*chats)).job
    assert isinstance(found, Experiment)
    for rank in range(found.cluster.num_ranks):
        place, last = found.cluster.placement(rank), found.cluster.num_stages - 1
        read = {"text", "types"} if 0 in place.stages else set()
        assert found.fields_of(rank) == read | ({"label"} if last in place.stages else set())
        for name in found.fields_of(rank):
            assert place.cloud in found.security.holders.get(name, [place.cloud])
    with pytest.raises(
        ConfigError, match=r"Move the stage|name their stages"
    ):  # a copy for each cloud
        configs.Settings.of(composed(*chats, "strategy=data_parallel"))


@pytest.mark.parametrize(
    ("cluster", "security", "said"),
    [
        ("bottom_only", "owner_keeps_text_and_labels", "cloud 'other' reads 'label', but"),
        ("u_shape", "two_owners", "names cloud 'text_owner'; the clouds are owner, other"),
        ("two_clouds", "owner_keeps_text", "the clouds are cloud_a, cloud_b"),
    ],
)
def test_a_layout_that_breaks_the_rules_is_refused(cluster: str, security: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        built(cluster, f"security={security}")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+security.weights.head=[owner]", "cloud 'other' holds the weights of 'head', but"),
        ("+security.weights.heads=[other]", "no such part; its parts are embeddings, head, layer"),
        (
            "+security.weights.head=owner",
            "security.weights.head must be a list of which each is a text, got",
        ),
        ("+security.weights.head=[cloud_x]", "the clouds are owner, other"),
        ("+security.holders.label=[owner]", "cloud 'other' reads 'label', but"),
        (
            "security.defences.forward=3",
            "security.defences.forward must be a Defence or null",
        ),
        ("security.meter=true", "security.meter must be a Meter or null"),
        ("security/meter=attack security.meter.last_steps=0", "security.meter.last_steps"),
    ],
)
def test_a_wrong_rule_is_named(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        built("bottom_only", *override.split())
    assert "\n" not in str(raised.value)


def test_an_owner_of_both_ends_may_keep_both_ends_of_the_model() -> None:
    rule = "+security.weights={embeddings: [owner], head: [owner], layers: [owner, other]}"
    built("u_shape", rule.replace(": [", ":[").replace(", ", ","))


def test_a_rank_is_given_its_own_fields_only() -> None:
    """Also the label: what it does not load it cannot lose."""
    two = built("two_owners", "security=two_owners")
    u_shape = built("u_shape")

    assert two.fields_of(0) == {"text", "types"} and two.fields_of(1) == {"label"}
    assert u_shape.fields_of(0) == {"text", "types", "label"} and u_shape.fields_of(1) == set()
    assert u_shape.fields_of_cloud("other") == set()
    for experiment, rank in ((two, 0), (two, 1), (u_shape, 1)):
        fields = experiment.fields_of(rank)
        data = ToyTextTask().load(fields, 1)
        assert data.batch("train", torch.arange(3)).keys() == fields | {"ids"}
        assert (data.classes is not None) == ("label" in fields)


@pytest.mark.slow
def test_a_task_that_reads_what_it_may_not_is_stopped_before_the_first_step(
    tmp_path: Path,
) -> None:
    config = text_config("two_owners", ["security=two_owners"])
    config["task"] = {"_target_": "tests.toy_text.GreedyTextTask"}

    with pytest.raises(RunFailed, match="rank 0 of cloud 'text_owner': the task gave label"):
        run(configs.Settings.of(config), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["num_steps"] == 0


def test_translation_models_name_their_parts() -> None:
    for model in ("abnet", "transformer"):
        rule = "+security.weights={source_embeddings:[cloud_a],head:[cloud_b]}"
        found = build("+exp=abnet_iwslt", f"model={model}", rule)
        assert found.model.parts(0, 2) == {"source_embeddings", "encoder"}
        assert found.model.parts(1, 2) == {"target_embeddings", "decoder", "head"}
        assert found.model.parts(1, 3) == {"encoder"}
    assert ToyTextModel().parts(1, 3) == {"layers"}


def test_defences_and_meter_are_chosen_by_name() -> None:
    found = built(
        "two_owners", "security=two_owners", "security/defences/backward=marvell",
        "security.defences.backward.power=2", "security/defences/forward=gaussian_noise",
        "security/meter=attack",
    )  # fmt: skip

    assert found.security.defences_label == "gaussian(0.1)+marvell(2)"
    assert found.labels.defences == found.security.defences_label
    assert "defences: gaussian(0.1)+marvell(2)" in found.headline
    assert found.security.meter is not None and found.security.meter.last_steps == 50


@pytest.mark.parametrize("group", ["defences/forward", "defences/backward", "meter"])
def test_every_option_of_security_builds(group: str) -> None:
    options = sorted(path.stem for path in (CONF / "security" / group).glob("*.yaml"))
    assert "none" in options and len(options) > 1
    for option in options:
        built("two_owners", "security=two_owners", f"security/{group}={option}")


def test_a_defence_that_reads_labels_needs_them_in_the_rank_that_sends() -> None:
    """Both upper stages lie with the labels' owner, but the rank behind the boundary has none."""
    config = text_config("two_owners", ["security/defences/backward=marvell"])
    owner = config["cluster"]["clouds"]["label_owner"]
    owner |= {"num_ranks": 2, "stages": [1, 2], "one_stage_per_rank": True}

    with pytest.raises(ConfigError, match="none in rank 1 of cloud 'label_owner'"):
        configs.Settings.of(config)
    owner["one_stage_per_rank"] = False
    configs.Settings.of(config)


def test_the_meter_of_averages_is_a_leak_meter_of_its_own() -> None:
    meter = "experiments.gradient_leaks.meter.AveragesMeter"
    found = built(
        "two_owners",
        "security=two_owners",
        "security/meter=attack",
        f"security.meter._target_={meter}",
    )

    assert isinstance(meter_of(found), AveragesMeter)
    assert meter_of(found).averaging_steps == 3 and not meter_of(found).keep


def test_defences_that_nothing_crosses_for_are_said_to_be_off() -> None:
    found = built("local", "security/defences/backward=max_norm", "security/meter=attack")

    assert found.labels.defences == "off"
    assert "defences: none+max_norm (off" in found.headline
    assert "leak meter: off (one cloud)" in found.headline


def test_a_weak_device_is_slower_and_says_so() -> None:
    layout = built("weak_device").cluster

    assert layout.clouds["owner"].slowdown == 4 and layout.clouds["other"].slowdown == 1
    assert layout.ranks_of(0) == layout.ranks_of(2) == (0,)
    assert "owner: 1 rank, stages 0+2, 4x slower, other: 1 rank, stage 1" in layout.describe()
    assert ClusterLayout({"a": Cloud(slowdown=2.5)}).clouds["a"].slowdown == 2.5
    for wrong in (0.5, "fast"):
        with pytest.raises(ConfigError, match=r"cloud\.slowdown"):
            Cloud(slowdown=wrong)


SOURCE, TARGET = frozenset({"source"}), frozenset({"target"})
TEXT, LABEL, NONE = frozenset({"text", "types"}), frozenset({"label"}), frozenset[str]()
SMALL = {"tokenizer": SmallTokenizer(), "max_length": 40}
SIDES = {f"{side}_tokenizer": SmallTokenizer() for side in ("source", "target")}


def meetings() -> tuple[Rendezvous, Rendezvous]:
    """Of two ranks that may begin at any time, so that they can come one after the other."""
    store = HashStore()
    return Rendezvous(0, 2, store, 1.0, is_open=True), Rendezvous(1, 2, store, 1.0, is_open=True)


def experiment(task: str, *overrides: str) -> Experiment:
    small = [f"+exp=bert_split_{task}", "recipe=lowrank_small", "task.data.num_train=60",
             f"data={'squad' if task == 'squad' else 'glue'}_small", "task.data.num_dev=10",
             "task.data.num_test=10", "task.tokenizer.vocab_size=400"]  # fmt: skip
    return build(*small, *overrides)


@pytest.mark.parametrize("task", first_daily(["sst2", "squad"], count=1))
def test_a_rank_that_reads_nothing_opens_no_file(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = meetings()
    owner = load(experiment(task), first)

    def read(*_: object) -> None:
        raise DataError("a rank without fields has opened the corpus")

    monkeypatch.setattr(type(experiment(task).task.data), "find", read)
    with pytest.raises(DataError, match="has opened"):
        load(experiment(task), first)
    other = load(experiment(task), second)

    for split in SPLITS:
        assert other.num_samples(split) == owner.num_samples(split) > 0
    closed = Rendezvous(0, 2, first.store, 1.0)
    told = decode_facts(first.read("data", 0), 0)
    assert "the task's data" in told and decode_facts(first.read("data", 1), 1) == {}
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
    first.write("data", json.dumps({f"samples of {split}": "-1" for split in SPLITS}))
    with pytest.raises(FrameError, match=r"rank 0 sent .*-1"):
        load(experiment("sst2"), second)


def test_a_defence_of_two_classes_is_refused_for_labels_of_tokens(tmp_path: Path) -> None:
    small = ["task.data.num_train=20", "task.data.num_dev=5", "task.data.num_test=5",
             f"cache_dir={tmp_path}",
             "task.tokenizer.vocab_size=400", "security/defences/backward=marvell"]  # fmt: skip
    with pytest.raises(ConfigError, match="this task's are of kind 'tokens'"):
        load(build("+exp=lora_clm", *small), meetings()[1])


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the files below tmp_path / "corpus" that were opened since, in whatever way."""
    names = set[str]()

    def watched(module: object, way: object) -> None:
        def opening(path: object, *more: object, **how: object) -> object:
            if isinstance(path, str | Path) and (tmp_path / "corpus") in Path(path).parents:
                names.add(Path(path).name)
            return way(path, *more, **how)  # type: ignore[operator]

        monkeypatch.setattr(module, "open", opening)

    for module in (builtins, io, os):
        watched(module, module.open)
    return names


def reachable(start: object) -> Iterator[object]:
    held, todo = set[int](), [start]
    while todo:
        item = todo.pop()
        if id(item) not in held:
            held.add(id(item))
            yield item
            if isinstance(item, dict):
                todo += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple | set | frozenset):
                todo += [*item]
            else:
                todo += [*getattr(item, "__dict__", {}).values()]


def named(*endings: str) -> set[str]:
    return {f"{split}.{ending}" for split in SPLIT_SIZES for ending in endings}


WIT3 = [f"IWSLT14.TED.{name}.es-en" for name in ("dev2010", "tst2010", "tst2011", "tst2012")]
READERS = {
    "one side of lines": ("lines", (Translation, Folder), SIDES, SOURCE, named("es"), "hidden"),
    "the other side": ("lines", (Translation, Folder), SIDES, TARGET, named("en"), "secret"),
    "one column of a table": ("table", (Translation, Folder), SIDES, SOURCE, named("tsv"),
                              "hidden"),
    "one side of an archive": (
        "wit3", (Translation, Wit3), SIDES, SOURCE,
        {"train.tags.es-en.es", *(f"{name}.es.xml" for name in WIT3)}, "en 1",
    ),
    "texts": ("pairs", (Classification, Folder), SMALL, TEXT, named("en.tsv"), "hidden"),
    "labels": ("pairs", (Classification, Folder), SMALL, LABEL, named("en.tsv"), "secret"),
    "labels of languages": ("pairs", (CrossLingual, LanguageFolder), SMALL, LABEL,
                            named("en.tsv"), "secret"),
    "no text": ("pairs", (Classification, Folder), SMALL, NONE, set[str](), "secret"),
    "no question": ("json", (QuestionAnswering, Folder), {**SMALL, "max_question": 8}, NONE,
                    set[str](), "secret"),
    "answers to guess": ("json", (LanguageModelling, Folder), SMALL, LABEL, named("jsonl"),
                         "secret"),
    "no document": ("json", (LanguageModelling, Folder), SMALL, NONE, set[str](), "secret")
}  # fmt: skip


@pytest.mark.parametrize("case", READERS)
def test_a_rank_opens_and_keeps_what_its_cloud_may_see(
    case: str, tmp_path: Path, opened: set[str]
) -> None:
    kind, (task, source), settings, fields, files, unseen = READERS[case]
    corpus(kind, folder := tmp_path / "corpus")
    if task is CrossLingual:
        for path in folder.iterdir():
            relations = path.read_text().replace("hidden0", "neutral")
            path.write_text(relations.replace("hidden1", "entailment"))
    if fields == NONE:
        settings = {**settings, "sizes": SPLIT_SIZES}
    if kind == "lines":
        ends = {"source": "es", "target": "en"}
        more = {f"{side}_monolingual_file": f"{folder}/more.{end}" for side, end in ends.items()}
        settings, files = {**settings, **more}, files | {f"more.{ends[next(iter(fields))]}"}
    opened.clear()
    made = given(task, source, path=str(folder), cache_dir=str(tmp_path), **settings)
    view = made.load(fields, 1)

    assert opened == files
    assert view.batch("train", torch.arange(2)).keys() == fields | {"ids"}
    texts = [item for item in reachable(view) if isinstance(item, str)]
    assert not [text for text in texts if unseen in text]


def test_a_generator_reads_the_files_of_its_languages(tmp_path: Path, opened: set[str]) -> None:
    (folder := tmp_path / "corpus").mkdir()
    for name in ("train.es.txt", "train.en.txt", "wiki.es", "wiki.en", "test.es", "dev-1.es.txt"):
        (folder / name).write_text("secret\n" * 9)
    opened.clear()
    text = MultilingualText(FolderText(str(folder)), SmallTokenizer(), 16)
    text.table("es", text.load_tokenizer(tmp_path), tmp_path, print)
    assert opened == {"train.es.txt", "wiki.es"}


def test_a_table_of_texts_cut_off_in_the_middle_is_made_again(tmp_path: Path) -> None:
    (folder := tmp_path / "corpus").mkdir()
    (path := folder / "train.es.txt").write_text("uno dos\n" * 9)
    text = MultilingualText(FolderText(str(folder)), SmallTokenizer(), 16)
    tokenizer = text.load_tokenizer(tmp_path)
    made = [list(text.table("es", tokenizer, tmp_path, print)) for _ in range(2)]
    (cut,) = (tmp_path / "tokens").glob("*.tokens")
    cut.write_bytes(cut.read_bytes()[:7])
    cut.with_suffix(".offsets").unlink()  # it is written last, so it was not there
    assert made[0] == made[1] == list(text.table("es", tokenizer, tmp_path, print))
    path.write_text("seis ah\n" * 9)  # as long, under the same name
    assert list(text.table("es", tokenizer, tmp_path, print)) != made[0]

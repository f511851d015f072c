"""Every config composes and builds; wrong ones die at once, naming the key."""

import re
from itertools import zip_longest
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import OmegaConf

from tests.configs import CONF, MERGED_BY_HYDRA, SHARED_FOLDER, build, by_hydra, composed
from tests.nightly import each_once, first_daily
from xcloud.base.errors import ConfigError
from xcloud.base.settings import with_defaults
from xcloud.contracts.model import Task
from xcloud.job import config as configs
from xcloud.job import given
from xcloud.models.electra.model import MultilingualElectra
from xcloud.net.link_profile import Liveness


def options(group: str) -> list[str]:
    return sorted(p.stem for p in (CONF / group).glob("*.yaml") if not p.stem.startswith("_"))


# Models that can do an experiment's task: those of translation, or the one it names itself.
MODELS = {
    "abnet_iwslt": ("abnet", "transformer"),
    "abnet_table2": ("abnet",),
    "bert_split": ("lowrank",),
    "dpo_reviews": ("causal",),
    "electra": ("electra",),
    "lora_clm": ("causal",),
    "protocol_gpt": ("protocol_gpt",),
    "xnli": ("lowrank",),
}


def models_of(exp: str) -> tuple[str, ...]:
    return next(models for start, models in MODELS.items() if exp.startswith(start))


EXPERIMENTS = [(exp, model) for exp in options("exp") for model in models_of(exp)]


@pytest.mark.parametrize(("experiment", "profile"), each_once(EXPERIMENTS, options("profile")))
def test_every_experiment_builds_in_every_profile(
    experiment: tuple[str, str], profile: str
) -> None:
    exp, model = experiment
    path = [] if profile == "demo" else ["task.path=somewhere"]  # its earlier name
    if model == "electra":
        path = ["model.text.source.path=somewhere"] if profile == "files" else []
        path += ["model.text.tokenizer.path=somewhere"] if profile == "files" else []
    path += ["model.checkpoint=somewhere"] if model == "causal" and profile == "files" else []
    path += ["task.tokenizer.name_or_path=minilm"] if exp == "xnli_zero_shot" else []
    config = composed(f"+exp={exp}", f"model={model}", f"profile={profile}", *path)
    found = configs.Settings.of(config).job

    assert found.profile == profile
    assert found.name == exp


def data_of(name: str) -> Any:
    """A file of conf/data, with those it extends."""
    config = OmegaConf.load(CONF / "data" / f"{name}.yaml")
    extended = config.pop("defaults", [])  # type: ignore[union-attr]
    return OmegaConf.merge(*map(data_of, extended), config)


def task_of(task: str, data: str, **settings: object) -> Task:
    """The files of conf/task and conf/data without Hydra: whichever model goes with them."""
    parts = [OmegaConf.load(CONF / "task" / f"{task}.yaml"),
             data_of(data), settings]  # fmt: skip
    shared = {"cache_dir": ".cache", "model": {"checkpoint": "some/model"}}
    config = OmegaConf.create({**shared, "task": OmegaConf.merge(*parts)})
    plain = configs.resolved(config)["task"]
    configs.check_keys(plain, "task")
    made: Task = configs.build(plain)
    return made


@pytest.mark.parametrize("data", options("data"))
def test_every_data_set_builds(data: str) -> None:
    task, _, profile = data.rpartition("_")
    made = task_of(task, data, **({} if profile in ("demo", "small") else {"path": "some/name"}))
    assert made.describe() and made.max_length in (64, 128, 384, 512, 1024)


@pytest.mark.parametrize("name", ["sst2", "cola", "mrpc", "qnli", "qqp", "stsb", "mnli", "rte",
                                  "wnli"])  # fmt: skip
def test_every_glue_task_builds_by_its_name(name: str) -> None:
    for profile in ("files", "paper"):
        assert task_of("glue", f"glue_{profile}", path="x", name=name).describe().startswith(name)


@pytest.mark.parametrize(
    ("task", "settings", "said"),
    [
        ("glue", {"name": "sst3"}, "task.name must be one of sst2"),
        ("glue", {"name": "mrpc"}, "must be one of sst2, qnli in this profile"),
        ("glue", {"max_train_pairs": 3}, "unknown setting 'task.max_train_pairs'"),
        ("squad", {"stride": 0}, "task.stride must be"),
        ("xnli", {"languages": ["de"]}, "one of en, es in this profile; got 'de'"),
        ("classification", {"metrics": ["bleu"]}, "'bleu' is not a score for classes"),
    ],
)
def test_a_wrong_setting_of_a_task_is_named(
    task: str, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(Exception) as raised:
        task_of(task, f"{task}_demo", **settings)
    cause = raised.value if isinstance(raised.value, ConfigError) else raised.value.__cause__
    assert isinstance(cause, ConfigError) and said in str(cause)


def test_no_key_changes_how_a_constructor_is_called() -> None:
    node = {"_target_": "xcloud.comm.precision.Cast", "dtype": "float16", "_partial_": True}
    with pytest.raises(ConfigError, match=r"unknown setting 'x\._partial_'"):
        configs.check_keys(node, path="x")


def test_the_generators_of_electra_share_no_language() -> None:
    config = composed("+exp=electra_multilingual", "model=electra", "profile=demo")
    model = configs.build(configs.resolved(config)["model"])

    assert isinstance(model, MultilingualElectra)
    assert list(model.generators) == ["cloud_a", "cloud_b"]
    assert model.discriminator.loss_weight == 50.0
    first, second = model.generators.values()
    assert not set(first.languages) & set(second.languages)
    assert model.max_payload_bytes < 100_000


@pytest.mark.parametrize(
    ("batch_size", "micro_batches", "passes", "evaluated", "most"),
    [(32, 4, 2, 3, 4), (33, 4, 2, 3, 5), (33, 4, 1, 3, 9), (32, 4, 2, 64, 64)],
)
def test_the_room_for_a_message_is_that_of_the_largest_micro_batch(
    batch_size: int, micro_batches: int, passes: int, evaluated: int, most: int
) -> None:
    job = build(
        "+exp=abnet_iwslt",
        f"training.batch_size={batch_size}",
        f"schedule.num_micro_batches={micro_batches}",
        f"training.accumulate_steps={passes}",
        f"training.eval_batch_size={evaluated}",
    )
    assert job.max_micro_batch == most


def test_every_cluster_builds() -> None:
    for option in options("cluster"):
        if option != "one_way":  # of one-way jobs, below
            build("+exp=abnet_iwslt", f"cluster={option}")


def test_every_option_of_the_other_groups_builds() -> None:
    """One of each group at a time: composing takes longer than building. Each compression is built
    by tests/comm/test_compression_plans.py, and one of those that needs another model here."""
    groups = ("cluster/wan", "schedule", "tracker")
    for chosen in zip_longest(*map(options, groups)):
        pairs = zip(groups, chosen, strict=True)
        overrides = [f"{group}={option}" for group, option in pairs if option]
        if "cluster/wan=sealed" in overrides:
            overrides.append("+cluster.clouds.cloud_b.address=192.0.2.7:7000")
        if "cluster/wan=mailbox" in overrides:
            overrides += ["cluster.wan.url=s3://bucket/first", "strategy=local_updates"]
        build("+exp=abnet_iwslt", *overrides)
    build("+exp=abnet_iwslt", "compression=low_rank_few_bits_u_shape", "cluster=three_clouds")
    build("+exp=lora_clm", "compression=transform_tokens", "model.text_everywhere=true")


@pytest.mark.parametrize("cluster", first_daily(["one_way", "one_cloud", "local"], count=2))
def test_a_one_way_job_builds_in_every_form(cluster: str) -> None:
    """Its experiment lies beside the tests, for its parts are toys."""
    toys = f"hydra.searchpath=[file://{Path(__file__).parents[1] / 'conf'}]"
    config = composed(toys, "+exp=toy_one_way", f"cluster={cluster}")
    found = configs.Settings.of(config).job

    assert "one (1 rank, 50 %), two (1 rank, 50 %) feed discriminator" in found.headline
    assert found.cluster.crosses_clouds == (cluster == "one_way")


@pytest.mark.parametrize("task", first_daily(["glue", "squad"], count=1))
def test_the_small_encoder_takes_the_place_of_the_packaged_one(task: str) -> None:
    exp = {"glue": "bert_split_sst2", "squad": "bert_split_squad"}[task]
    found = build(f"+exp={exp}", f"data={task}_small", "recipe=lowrank_small")

    assert "own 4 x 128, pretrained on public sentences" in found.headline


@pytest.mark.parametrize(
    ("exp", "override", "said"),
    [
        ("bert_split_sst2", "model.output=span", "needs model.output=sample, and it is span"),
        ("bert_split_squad", "model.output=sample", "needs model.output=span, and it is sample"),
    ],
)
def test_a_model_that_answers_another_kind_of_task_is_refused_before_a_run(
    exp: str, override: str, said: str
) -> None:
    data = {"bert_split_squad": "squad_small", "bert_split_sst2": "glue_small"}[exp]
    found = build(f"+exp={exp}", f"data={data}", "recipe=lowrank_small", override)

    with pytest.raises(ConfigError, match=said):
        found.check()


def test_the_encoder_follows_the_tokenizer_of_the_task() -> None:
    found = build("+exp=bert_split_sst2", "task.tokenizer.name_or_path=some/encoder")

    assert "some/encoder, cut in block 3, rank 8 by svd" in found.headline
    assert "some/encoder" in repr(found.model.public_text)  # type: ignore[attr-defined]


def test_what_the_tests_merge_as_dictionaries_is_what_hydra_merges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Key by key, in the same order."""
    others = [["+exp=lora_clm", "strategy=streaming", "compression=delta_int4", "cluster=u_shape"]]
    rows = [*([f"+exp={name}"] for name in options("exp")), *others]
    found = [OmegaConf.to_yaml(by_hydra.__wrapped__(*row)) for row in rows]
    monkeypatch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", MERGED_BY_HYDRA)
    monkeypatch.delenv(SHARED_FOLDER, raising=False)
    assert found == [OmegaConf.to_yaml(by_hydra.__wrapped__(*row)) for row in rows]


def test_what_a_user_sets_arrives() -> None:
    """By way of Hydra; what the other tests set on a composed config is the same."""
    overrides = (
        "+exp=abnet_iwslt",
        "cluster.wan.bandwidth_bits_per_s=5e6",
        "schedule.num_micro_batches=7",
        "training.max_steps=11",
        "training.optimizer.learning_rate=1e-3",
        "training.precision=bf16",
        "compression.forward.svd.rate=0.3",
        "seed=9",
    )
    assert composed(*overrides) == by_hydra(*overrides)
    found = configs.Settings.of(by_hydra(*overrides)).job

    assert found.cluster.wan.bandwidth_bits_per_s == 5e6  # type: ignore[union-attr]
    assert found.schedule.num_micro_batches == 7
    assert found.training.max_steps == 11
    assert found.compression.label == "fp16(svd(0.3))+int8"
    assert found.seed == 9
    assert build("+exp=abnet_iwslt", "cluster.wan=real").cluster.wan == "real"
    assert build("+exp=abnet_iwslt", "cluster/wan=real").cluster.wan == "real"


def test_headline_says_corpus_models_and_link() -> None:
    line = build("+exp=abnet_iwslt").headline

    for part in ("demo", "es→en", "100 Mbit/s", "20 ms round trip", "fp16(svd(0.6))+int8"):
        assert part in line, line
    assert "\n" not in line


def test_compression_is_said_to_be_off_where_no_boundary_leaves_a_cloud() -> None:
    found = build("+exp=abnet_iwslt", "cluster=local")

    assert "compression: off" in found.headline
    assert found.labels.compression == "off"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("+typo=1", "unknown setting 'typo'"),
        ("+training.max_step=3", "'training.max_step'; did you mean 'max_steps'"),
        ("+cluster.clouds.cloud_a.ranks=2", "cluster.clouds.cloud_a.ranks"),
        ("+compression.forward.svd.rat=0.1", "did you mean 'rate'"),
        ("schedule.num_micro_batches=lots", "schedule.num_micro_batches must be a whole number"),
        ("training.max_steps=0", "training.max_steps"),
        ("training.precision=fp8", "fp32, bf16, auto"),
        ("training.activation_cache_mb=-1", "training.activation_cache_mb"),
        ("security.may_keep_rows=never", "security.may_keep_rows"),
        ("seed=-1", "seed must be"),
        ("compression.forward.svd.rate=2", "compression.forward.svd"),
        ("cluster.wan=oregon_tokyo", "cluster/wan=oregon_tokyo"),
        ("cluster.clouds.cloud_a.num_ranks=0", "num_ranks"),
        ("training.batch_size=2", "passes (training.accumulate_steps); raise it"),
        (
            "+security.holders.source=[cloud_b]",
            "'cloud_a' reads 'source', but security.holders.source allows it only in cloud_b",
        ),
        ("+security.holders.source=[cloud_x]", "the clouds are cloud_a, cloud_b"),
        ("+security.holders.sauce=[cloud_a]", "no stage reads that field"),
        ("model.encoder._target_=xcloud.models.nothing", "model.encoder._target_"),
    ],
)
def test_a_wrong_setting_is_named(override: str, named: str) -> None:
    config = composed("+exp=abnet_iwslt")
    OmegaConf.set_struct(config, False)
    config.merge_with_dotlist([override.removeprefix("+")])
    with pytest.raises(ConfigError) as raised:
        configs.Settings.of(config)

    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_setting_without_a_value_is_named() -> None:
    with pytest.raises(ConfigError) as raised:
        build("+exp=abnet_iwslt", "profile=files")
    assert str(raised.value) == (
        "these settings have no value yet: task.data.path; give them as key=value"
    )
    with pytest.raises(ConfigError) as raised:
        configs.check_values({"name": "???", "seed": "???", "task": {"name": "mt"}})
    said, _, experiments = str(raised.value).partition(": +exp= one of ")
    assert said == (
        "these settings have no value yet: name, seed; give them as key=value, or choose an "
        "experiment"
    )
    assert experiments.split(", ") == sorted(options("exp"))


def test_the_line_may_be_chosen_whatever_the_cluster() -> None:
    """So a sweep over clusters and lines can be written."""
    chosen = [("local", "free"), ("one_cloud", "real"), ("local", "office_100m"),
              ("two_clouds", "free")]  # fmt: skip
    for cluster, wan in chosen:
        built = build("+exp=abnet_iwslt", f"cluster={cluster}", f"cluster/wan={wan}")
        assert built.cluster.name == cluster
        if wan != "office_100m":
            assert built.cluster.wan == wan
        assert built.cluster.crosses_clouds == (cluster == "two_clouds")


def test_liveness_can_be_set_whatever_the_cluster() -> None:
    for cluster in options("cluster"):
        chosen = ("+exp=abnet_iwslt", f"cluster={cluster}")  # composed above
        config = composed(*chosen, "cluster.liveness.lost_after_s=30")
        assert configs.build(configs.resolved(config)["cluster"]["liveness"]) == Liveness(
            lost_after_s=30
        )


FOUR = [f"+cluster.clouds.{c}._target_=xcloud.layout.Cloud" for c in ("c", "d")]


def test_a_strategy_deals_the_clouds_to_replicas() -> None:
    found = {
        arguments: {
            name: (cloud.replica, cloud.stages)
            for name, cloud in build("+exp=abnet_iwslt", *arguments).cluster.clouds.items()
        }
        for arguments in (
            ("strategy=data_parallel",),
            (
                "strategy=data_parallel",
                "cluster=one_cloud",
                "cluster.clouds.cloud.one_stage_per_rank=false",
            ),
            ("strategy=hybrid", "strategy.replicas=1"),
            ("strategy=hybrid", *FOUR),
        )
    }
    whole = (0, 1)
    assert list(found.values()) == [
        {"cloud_a": (0, whole), "cloud_b": (1, whole)},
        {"cloud": (0, whole)},
        {"cloud_a": (0, (0,)), "cloud_b": (0, (1,))},
        {"cloud_a": (0, (0,)), "cloud_b": (0, (1,)), "c": (1, (0,)), "d": (1, (1,))},
    ]


def test_the_headline_says_what_a_strategy_does() -> None:
    said = {
        cluster: build("+exp=abnet_iwslt", "strategy=data_parallel", f"cluster={cluster}").headline
        for cluster in ("two_clouds", "local")
    }
    assert said["two_clouds"].endswith("strategy: data_parallel, 2 replicas")
    assert "compression: averaging int8;" in said["two_clouds"]
    assert said["local"].endswith("strategy: data_parallel (one replica, so nothing is averaged)")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["strategy=hybrid", "strategy.replicas=3", *FOUR], "cannot be spread evenly over the 4"),
        (["strategy=hybrid", "cluster=u_shape", "+cluster.clouds.c._target_="
          "xcloud.layout.Cloud", "+cluster.clouds.d.stages=[3]",
          "+cluster.clouds.d._target_=xcloud.layout.Cloud",
          "cluster.clouds.owner.stages=[0,4]", "cluster.clouds.other.stages=[1]"],
         "its clouds name their stages"),
        (["+cluster.clouds.cloud_b.replica=1", "+cluster.clouds.cloud_b.stages=[0]"],
         "strategy=pipeline never averages"),
        (["strategy=data_parallel", "+security.holders.source=[cloud_a]"],
         r"cloud 'cloud_b' reads 'source'.*Move the stage"),
        (["strategy=data_parallel", "schedule.num_micro_batches=1"], "set it to at least 2"),
        (["strategy=data_parallel", "compression=phased_example",
          "+compression.rest.compression.averaging._target_=xcloud.comm.compressor.Chain"],
         "the same `averaging`"),
        (["strategy=data_parallel", "+strategy/averaging/merge=median"],
         "needs 3 replicas or more"),
        (["strategy=pipeline", "strategy.replicas=null"], "nothing would bring the replicas"),
    ],
)  # fmt: skip
def test_strategies_that_do_not_fit_are_refused_in_words(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build("+exp=abnet_iwslt", *arguments)


def test_a_model_and_a_task_that_do_not_fit_are_both_named() -> None:
    with pytest.raises(ConfigError) as raised:
        build("+exp=abnet_iwslt", "model=lowrank")

    assert str(raised.value) == (
        "model.backbone.name_or_path follows from task.tokenizer.name_or_path, which the chosen "
        "task (Translation) does not have: this model and this task do not fit "
        "together; choose another of the two"
    )


def test_an_experiment_file_gives_the_same_experiment(tmp_path: Path) -> None:
    config = composed("+exp=abnet_iwslt", "seed=4")
    configs.Settings.of(config).write(tmp_path / "experiment.yaml")

    assert given.read_settings(tmp_path / "experiment.yaml").job.headline == (
        configs.Settings.of(config).job.headline
    )
    assert given.read_settings(tmp_path / "experiment.yaml").job.seed == 4


def test_a_file_that_is_no_experiment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: 1\n")

    for name, said in (("x.yaml", "no _target_"), ("y.yaml", "no file")):
        with pytest.raises(ConfigError, match=said):
            given.read_settings(tmp_path / name)


def test_flat_parameters_have_dotted_names() -> None:
    flat = configs.Settings.of(composed("+exp=abnet_iwslt")).flat

    assert flat["schedule"] == "GPipe"
    assert flat["schedule.num_micro_batches"] == 4
    assert flat["compression.forward.svd.rate"] == 0.6
    assert not any(key.startswith("hydra") for key in flat)
    assert OmegaConf.create(flat)


_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)")
REFERRED_TO = {
    match[1] for file in CONF.rglob("*.yaml") for match in _REFERENCE.finditer(file.read_text())
}


def test_no_file_repeats_a_default() -> None:
    """But where another file refers to the value by its name."""
    repeated: list[str] = []

    def walk(node: Any, where: str) -> None:
        for entry in node if isinstance(node, list) else ():
            walk(entry, where)
        if not isinstance(node, dict):
            return
        target = str(node.get("_target_"))
        defaults: dict[str, Any] = {}
        if target.startswith("xcloud."):
            defaults = with_defaults(resolve_name(target), {})
        for key, value in node.items():
            name = f"{where}.{key}".strip(".")
            if key in defaults and configs.fill_in(value) == defaults[key]:
                if not is_referred_to(name):
                    repeated.append(f"{file.relative_to(CONF)}: {name}")
            walk(value, name)

    for file in sorted(CONF.rglob("*.yaml")):
        walk(OmegaConf.to_container(OmegaConf.load(file)), "")
    assert repeated == []


def is_referred_to(name: str) -> bool:
    return any(f".{other}".endswith(f".{name}") for other in REFERRED_TO)

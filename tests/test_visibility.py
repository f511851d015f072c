"""Who may hold what: fields, labels, weights; refused before anything runs, and not loadable."""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from experiments.gradient_leaks.meter import AveragesMeter
from tests.configs import CONF, build, composed
from tests.toy_text import ToyTextModel, ToyTextTask, text_config
from xcloud.base.errors import ConfigError, RunFailed
from xcloud.experiment import Experiment
from xcloud.features.leak_meter.observers import meter_of
from xcloud.job import config as configs
from xcloud.launch.local import run
from xcloud.layout import Cloud, ClusterLayout

FITTING = [
    ("u_shape", "owner_keeps_text_and_labels"),
    ("weak_device", "owner_keeps_text_and_labels"),
    ("bottom_only", "owner_keeps_text"),
    ("two_owners", "two_owners"),
]


def built(cluster: str, *overrides: str) -> Experiment:
    return configs.Settings.of(OmegaConf.create(text_config(cluster, list(overrides)))).job


@pytest.mark.parametrize(("cluster", "security"), FITTING)
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

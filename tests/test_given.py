"""What is said of a key that no chosen group has."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from tests.configs import composed
from tests.nightly import each_once
from xcloud.base.errors import ConfigError
from xcloud.base.wording import WISHED
from xcloud.job import config as configs
from xcloud.job.config import Settings, check_keys
from xcloud.job.given import composed as composed_words
from xcloud.job.given import explained, hints, with_overrides

CONF = Path(__file__).parent.parent / "conf"


def hint(*overrides: str) -> str:
    (line,) = hints(["+exp=bert_split_sst2", *overrides], CONF)
    return line


def test_the_nearest_key_and_all_beside_it_are_named() -> None:
    line = hint("cluster=local", "seed=3", "training.optimizer.learning_rat=3")
    assert line.startswith(
        "unknown setting 'training.optimizer.learning_rat'; did you mean 'learning_rate'?"
    )
    assert "Allowed here: learning_rate, warmup_steps, decay" in line
    assert "did you mean 'seed'? Allowed here: name, seed" in hint("sed=3")
    assert hint("model.splot.rank=3").startswith("unknown setting 'model.splot'; did you mean")


def test_a_right_key_beside_a_wrong_one_is_not_accused() -> None:
    words = ["+exp=abnet_iwslt", "profile=files", "task.path=DIR", "compresion=int8"]
    (line,) = hints(words, CONF)  # task.path has no value before this line gives it one
    assert line.startswith("unknown setting 'compresion'; did you mean 'compression'?")


def test_a_corpus_without_its_profile_is_told_so() -> None:
    assert hint("task.path=DIR").endswith("; with profile=files it is the folder of your corpus")


def test_a_key_of_another_part_of_the_config_is_found() -> None:
    assert "did you mean 'training.optimizer.learning_rate'?" in hint("training.learning_rate=3")
    assert "did you mean 'training.max_steps'?" in hint("max_step=3")


def test_optional_keys_are_listed() -> None:
    assert "did you mean 'slowdown'" in hint("cluster.clouds.owner.slowdwn=3")


def test_a_key_below_an_optional_one_needs_a_plus() -> None:
    """A class names its settings, and not what a user calls the entries of a mapping."""
    assert hint("hooks.mine._target_=X").endswith("write +hooks.mine._target_=VALUE")


# Of classes, beside what the YAML of each sets.
OPTIONAL = {
    "task.num_dev": 10,
    "cluster.clouds.cloud_b.slowdown": 2.0,
    "training.optimizer.eps": 1e-6,
    "training.checkpoint.every_steps": 7,  # of a group that no YAML names
    "compression.backward.int8.block": 32,
}


@pytest.mark.parametrize(("key", "plus"), each_once(OPTIONAL, ["", "+", "++"]))
def test_an_optional_key_is_set_with_a_plus_and_without(key: str, plus: str) -> None:
    config = composed_words(["+exp=abnet_iwslt", f"{plus}{key}={OPTIONAL[key]}"], CONF)
    assert OmegaConf.select(config, key) == OPTIONAL[key]


@pytest.mark.parametrize("plus", ["", "+"])
def test_a_run_that_goes_on_takes_an_optional_key(tmp_path: Path, plus: str) -> None:
    configs.Settings.of(composed("+exp=abnet_iwslt")).write(tmp_path / "experiment.yaml")
    slower = f"{plus}cluster.clouds.cloud_b.slowdown=2.0"
    config = with_overrides(tmp_path / "experiment.yaml", [slower], CONF)
    assert configs.Settings.of(config).job.cluster.clouds["cloud_b"].slowdown == 2.0


def test_a_wrong_key_is_told_and_an_optional_one_beside_it_is_not() -> None:
    words = ["+exp=abnet_iwslt", "task.num_dev=10", "task.num_dv=10"]
    with pytest.raises(
        ConfigError, match=r"unknown setting 'task\.num_dv'; did you mean"
    ) as error:
        composed_words(words, CONF)
    assert "\n" not in str(error.value)


def test_names_that_a_class_takes_as_any_are_no_settings() -> None:
    """compression.forward is a chain of members, each by a name of its own."""
    assert "Allowed here" not in hint("compression.forward.members=3")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compression=in8"], "there is no compression/in8; did you mean 'int8'? There are: bf16"),
        (["model=transformer", "model.encoder.pretraining.steps=2"], "unknown setting 'model.enc"),
        (["cluster/wan=mars"], "there is no cluster/wan/mars. There are: free, line_10m_100ms,"),
        (["seed=["], "seed=[: '[' cannot stand in a value"),
    ],
)
def test_hydras_own_words_are_one_line_without_its_dump(words: list[str], said: str) -> None:
    words = ["+exp=abnet_iwslt", *words]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        with pytest.raises(HydraException) as raised:
            compose("config", overrides=words)
    (line,) = explained(raised.value, words, CONF)
    assert line.startswith(said) and "\n" not in line and "To append" not in line


def test_a_group_without_its_plus_is_told_so() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        with pytest.raises(HydraException) as raised:
            compose("config", overrides=["exp=abnet_iwslt"])
    (line,) = explained(raised.value, ["exp=abnet_iwslt"], CONF)
    assert line.endswith("use +exp=abnet_iwslt") and "\n" not in line


def test_each_wrong_key_has_a_line() -> None:
    wrong = hints(["+exp=abnet_iwslt", "trainin.batch_size=3", "model.spit=3"], CONF)
    assert [line.split("'")[1] for line in wrong] == ["trainin", "model.spit"]


def test_no_key_is_accused_where_hydra_names_the_cause() -> None:
    assert hints(["+exp=no_such", "sed=3"], CONF) == []
    assert hints(["+exp=abnet_iwslt", "training.batch_size=3", "hydra.nothing=3"], CONF) == []
    assert hints(["what is this"], CONF) == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.dtype=bfloat16", "model.weights is what the frozen weights"),
        ("model.dtype=bfloat16", "and training.precision=bf16 computes"),
        ("model.load_in_4bit=true", "it is model.weights=nf4, of"),
        ("model.load_in_8bit=true", "it is model.weights=int8, of"),
        ("model.qlora=true", "it is model.weights=nf4, of"),
        ("task.dpo=true", "it is task=preferences, as in +exp=dpo_reviews"),
        ("training.gradient_checkpointing=true", "it is model.activation_checkpointing=true, of"),
    ],
)
def test_what_one_may_know_from_other_programs_is_answered(override: str, said: str) -> None:
    """The name that is nearest is of something else."""
    (answer,) = hints(["+exp=lora_clm", override], CONF)
    assert said in answer and "did you mean" not in answer
    assert f"unknown setting '{override.partition('=')[0]}'" in answer


def test_what_these_answers_name_is_accepted() -> None:
    """An answer that was true when it was written would send a user to what is gone."""
    named = {word for answer in WISHED.values() for word in re.findall(r"[+a-z_.]+=\w+", answer)}
    assert {"model.weights=nf4", "task=preferences", "+exp=dpo_reviews"} <= named
    for word in sorted(named):
        experiment = [] if word.startswith("+exp=") else ["+exp=lora_clm"]
        Settings.of(composed(*experiment, word))


@pytest.mark.parametrize("target", ["nowhere.Part", "xcloud.comm.NoSuch", "json.nothing"])
def test_a_part_that_does_not_exist_is_one_line_of_ours(
    target: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Hydra's own look-up logs an error before it raises one."""
    with pytest.raises(ConfigError, match=rf"x._target_: there is no {target}, or it cannot"):
        check_keys({"hooks": {"x": {"_target_": target}}}, "")
    assert not caplog.records

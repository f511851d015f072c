"""What is said of a key that no chosen group has."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from tests.configs import composed
from tests.logged import Log
from tests.nightly import each_once, first_daily
from tests.toy import toy_config
from xcloud.base.errors import ConfigError
from xcloud.base.settings import settings
from xcloud.base.wording import WISHED
from xcloud.base.yaml_text import to_yaml
from xcloud.features.one_way.feed import Feed
from xcloud.job import config as configs
from xcloud.job import given
from xcloud.job.config import Settings, check_keys, drop_keys, fill_in, looked_up
from xcloud.job.given import Composer, explained, with_overrides
from xcloud.job.given import composed as composed_words

CONF = Path(__file__).parents[2] / "conf"


def hints(words: list[str]) -> list[str]:
    """The lines that refuse a command line."""
    with pytest.raises(ConfigError) as error:
        Settings.of(composed_words(words, CONF))
    return str(error.value).splitlines()


def hint(*overrides: str) -> str:
    (line,) = hints(["+exp=bert_split_sst2", *overrides])
    return line


def test_the_nearest_key_and_all_beside_it_are_named() -> None:
    line = hint("cluster=local", "seed=3", "training.optimizer.learning_rat=3")
    assert line.startswith(
        "unknown setting 'training.optimizer.learning_rat'; did you mean 'learning_rate'?"
    )
    assert "Allowed here: learning_rate, warmup_steps, decay" in line
    line = hint("sed=3")
    assert "did you mean 'seed'? Allowed here: " in line and "name, seed" in line
    assert hint("model.splot.rank=3").startswith("unknown setting 'model.splot'; did you mean")
    words = ["+exp=abnet_iwslt", "model=transformer", "model.encoder.pretraining.steps=2"]
    assert hints(words)[0].startswith("unknown setting 'model.encoder'")


def test_a_right_key_beside_a_wrong_one_is_not_accused() -> None:
    words = ["+exp=abnet_iwslt", "profile=files", "task.data.path=DIR", "compresion=int8"]
    (line,) = hints(words)  # task.data.path has no value before this line gives it one
    assert line.startswith("unknown setting 'compresion'; did you mean 'compression'?")


def test_a_corpus_without_its_profile_is_told_so() -> None:
    said = "; with profile=files task.data.path is the folder of your corpus"
    assert hint("task.data.path=DIR").endswith(said) and hint("task.path=DIR").endswith(said)


def test_a_key_of_another_part_of_the_config_is_found() -> None:
    assert "did you mean 'training.optimizer.learning_rate'?" in hint("training.learning_rate=3")
    assert "did you mean 'training.max_steps'?" in hint("max_step=3")


def test_optional_keys_are_listed() -> None:
    assert "did you mean 'slowdown'" in hint("cluster.clouds.owner.slowdwn=3")


# Of classes, beside what the YAML of each sets.
OPTIONAL = {
    "task.data.num_dev": 10,
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
    words = ["+exp=abnet_iwslt", "task.data.num_dev=10", "task.num_dv=10"]
    (line,) = hints(words)
    assert line.startswith("unknown setting 'task.num_dv'; did you mean")


@pytest.mark.parametrize(
    ("words", "key", "value"),
    first_daily(
        [
            (["task.dev_share=3", "task.dev_share=4"], "task.dev_share", 4),
            (["+task.dev_share=3", "task.dev_share=4", "+task.dev_share=5"], "task.dev_share", 5),
            (["training.max_steps=3", "+training.max_steps=4"], "training.max_steps", 4),
            (["training={max_steps: 7}", "training.batch_size=3"], "training.max_steps", 7),
            (["compression=int4", "compression=int8"], "compression.forward.int8.bits", 8),
            (["model.lora={r: 16}"], "model.lora.r", 16),
            (["model.lora={r: 16}", "model.lora={alpha: 3}"], "model.lora.r", 16),
            (["model.lora=null", "model.lora={r: 16}"], "model.lora.r", 16),
            (["model.lora=null", "model.lora.r=16"], "model.lora.r", 16),
            (["training.checkpoint={every_steps: 3}"], "training.checkpoint.every_steps", 3),
            (["training.optimizer={learning_rate: 0.5}"], "training.optimizer.learning_rate", 0.5),
            (
                ["cluster.clouds=null", "cluster.clouds={a: {num_ranks: 1}, b: {num_ranks: 2}}"],
                "cluster.clouds.b._target_",
                "xcloud.layout.Cloud",
            ),
            (
                ["schedule={_target_: xcloud.pipeline.schedule.GPipe}"],
                "schedule._target_",
                "xcloud.pipeline.schedule.GPipe",
            ),
        ],
        count=4,
    ),
)
def test_the_last_value_counts_and_a_group_may_be_given_whole(
    tmp_path: Path, words: list[str], key: str, value: object
) -> None:
    """Its class is known by where it stands, on a command line and where a run goes on."""
    config = composed_words(["+exp=lora_clm", *words], CONF)
    filled = fill_in(looked_up(config), by_position=True)
    assert OmegaConf.select(OmegaConf.create(filled), key) == value
    (tmp_path / "experiment.yaml").write_text(
        to_yaml(fill_in(looked_up(composed_words(["+exp=lora_clm"], CONF))))
    )
    changed = with_overrides(tmp_path / "experiment.yaml", words, CONF)
    filled = fill_in(looked_up(changed), by_position=True)
    assert OmegaConf.select(OmegaConf.create(filled), key) == value


def test_an_entry_that_a_user_names_is_not_made_by_a_wrong_name() -> None:
    """A third cloud, or a further compressor, because of a letter."""
    line = hint("cluster=two_clouds", "cluster.clouds.cloud_c.slowdown=3")
    assert line.startswith("unknown setting 'cluster.clouds.cloud_c'; did you mean 'cloud_")
    assert "Allowed here: cloud_a, cloud_b" in line
    line = hint("compression=int8", "compression.forward.int9.block=3")
    assert line.startswith("unknown setting 'compression.forward.int9'; did you mean 'int8'?")


def test_names_that_a_class_takes_as_any_are_no_settings() -> None:
    """compression.forward is a chain of members, each by a name of its own."""
    assert "Allowed here" not in hint("compression.forward.members=3")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compression=in8"], "there is no compression/in8; did you mean 'int8'? There are: bf16"),
        (["cluster/wan=mars"], "there is no cluster/wan/mars. There are: free, line_10m_100ms,"),
        (["seed=("], "seed=(: '(' is not allowed in a value"),
    ],
)
def test_hydras_own_words_are_one_line_without_its_dump(words: list[str], said: str) -> None:
    words = ["+exp=abnet_iwslt", *words]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        with pytest.raises(HydraException) as raised:
            compose("config", overrides=words)
    (line,) = explained(raised.value, words)
    assert line.startswith(said) and "\n" not in line and "To append" not in line


def test_a_group_without_its_plus_is_told_so() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        with pytest.raises(HydraException) as raised:
            compose("config", overrides=["exp=abnet_iwslt"])
    (line,) = explained(raised.value, ["exp=abnet_iwslt"])
    assert line.endswith("use +exp=abnet_iwslt") and "\n" not in line


def test_each_wrong_key_has_a_line() -> None:
    wrong = hints(["+exp=abnet_iwslt", "trainin.batch_size=3", "model.spit=3"])
    assert [line.split("'")[1] for line in wrong] == ["trainin", "model.spit"]


def test_where_hydra_names_the_cause_no_key_is_accused() -> None:
    (line,) = hints(["+exp=no_such", "sed=3"])
    assert line.startswith("there is no exp/no_such")
    (line,) = hints(["+exp=abnet_iwslt", "hydra.nothing=3"])
    assert "hydra.nothing" in line


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
    (answer,) = hints(["+exp=lora_clm", override])
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
def test_a_part_that_does_not_exist_is_one_line_of_ours(target: str, caplog: Log) -> None:
    """Hydra's own look-up logs an error before it raises one."""
    with pytest.raises(ConfigError, match=rf"x._target_: there is no {target}, or it cannot"):
        check_keys({"hooks": {"x": {"_target_": target}}}, "")
    assert not caplog.records


POINTS = [
    ["+exp=abnet_iwslt", "compression=int8", "seed=3", "training.optimizer.weight_decay=0"],
    ["+exp=abnet_iwslt", "compression=int8", "seed=4", "task.data.num_dev=7", "name='a (b)'"],
    ["+exp=abnet_iwslt", "compression=int8", "cache_dir=/other"],  # others refer to it
    ["+exp=lora_clm", "model.checkpoint=null", "model.lora={r: 16}", "model.lora.alpha=3"],
    ["+exp=lora_clm", "model.checkpoint=some/model", "~model.lora", "model.lora.r=4"],
    ["+exp=bert_split_sst2", "task.tokenizer.name_or_path=x", "model.split.rank=16"],
    ["+exp=bert_split_sst2", "model.split.layer=null", "training={max_steps: 3}"],
]


def test_points_that_share_their_options_are_composed_as_each_by_itself() -> None:
    composer = Composer.of(CONF)
    for words in [*POINTS, *reversed(POINTS)]:
        assert composer(words) == looked_up(composed_words(words, CONF)), words
    with pytest.raises(ConfigError, match="there is no compression/in8"):
        composer(["+exp=abnet_iwslt", "compression=in8"])
    with pytest.raises(ConfigError, match="is not allowed in a value"):
        composer(["+exp=abnet_iwslt", "name=a (b)"])


def test_a_key_that_is_no_more_is_taken_with_its_old_value_alone() -> None:
    """Experiment files hold every setting, also those that a release has dropped since."""
    kind = f"{Feed.__module__}.Feed"
    dropped = {"order": "fixed", "on_slow": "wait", "min_producers": None}
    plain = {"feed": {"_target_": kind, **dropped, "run_ahead": 9}}
    drop_keys(plain)
    assert plain == {"feed": {"_target_": kind, "run_ahead": 9}}
    with pytest.raises(ConfigError, match=r"feed\.order is no setting any more: .* 'fixed'"):
        drop_keys({"feed": {"_target_": kind, "order": "arrival"}})


@settings(kw_only=True, dropped={"alarm": None, "group": {"every": 0}})
class OfFeatures:
    """As feature_settings.py has one, of two features that are no more."""


@settings("whole")
class Whole(OfFeatures):
    own: int = 1


def test_what_was_a_features_is_taken_out_of_the_settings_that_it_was_added_to() -> None:
    kind = f"{Whole.__module__}.{Whole.__qualname__}"
    off = {"_target_": "somewhere.Gone", "every": 0, "url": None}
    for alarm in (None, {"_target_": "xcloud.base.settings.nothing"}):
        node = {"_target_": kind, "own": 2, "alarm": alarm, "group": off}
        drop_keys({"whole": node})
        assert node == {"_target_": kind, "own": 2}
    for key, value in {"alarm": "stop", "group": {**off, "every": 2}}.items():
        with pytest.raises(ConfigError, match=rf"whole\.{key} is no setting any more"):
            drop_keys({"whole": {"_target_": kind, key: value}})


@pytest.mark.parametrize("value", ["x", {"_target_": "xcloud.tasks.tokenizer.TrainedTokenizer"}])
def test_what_is_none_of_its_kind_is_refused_by_its_key(value: object) -> None:
    """Or another owner's file is approved, and the run ends in Python's words."""
    for key in ("task", "model", "schedule", "tracker", "hooks.own", "cluster.carrier"):
        config = OmegaConf.create(toy_config("local"))
        OmegaConf.update(config, key, value, force_add=True, merge=False)
        with pytest.raises(ConfigError, match=f"^{key.split('.')[0]}.* must be an? "):
            Settings.of(config)


@pytest.mark.parametrize(
    ("status", "steps", "has_more"),
    [("finished", 9, True), ("finished", 8, False), ("failed", 8, True), (None, 7, True)],
)
def test_a_finished_run_resumes_only_for_more_steps(
    status: str | None,
    steps: int,
    has_more: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of(max_steps: int) -> Any:
        return SimpleNamespace(job=SimpleNamespace(max_steps=max_steps))

    asked: list[Any] = []
    monkeypatch.setattr(given, "check_is_run", lambda *of: asked.append(of))
    monkeypatch.setattr(given, "with_overrides", lambda *of: asked.append(of) or of[1])
    monkeypatch.setattr(given.Settings, "of", lambda words: of(steps) if words == ["w"] else None)
    monkeypatch.setattr(given, "read_settings", lambda file: of(8))
    monkeypatch.setattr(given, "read_summary", lambda folder: {"status": status} if status else {})
    settings, more = given.resumed(tmp_path, ["w"], Path("conf"))
    assert settings.job.max_steps == steps and more is has_more
    assert asked[0][0] == tmp_path
    assert asked[1] == (tmp_path / "experiment.yaml", ["w"], Path("conf"))

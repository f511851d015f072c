"""Pre-train here, fine-tune there: one command does both, or says how to go on."""

import json
import re
import shlex
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.checkpoints import saved
from tests.configs import CONF, composed
from tests.nightly import first_daily
from tests.runs import completed
from xcloud.base.errors import ConfigError
from xcloud.job.config import Settings
from xcloud.job.given import compose_follow_up
from xcloud.launch.local import run

SMALL = ("tracker=none", "cluster=local")
TEXTS = ("model.text.source.num_texts=400", "model.text.tokenizer.vocab_size=400")
PRETRAINED = "model.{}.backbone.num_texts=400", "model.{}.backbone.pretraining.steps=2"
NETWORKS = tuple(
    setting.format(name)
    for name in ("generators.cloud_a", "generators.cloud_b", "discriminator")
    for setting in PRETRAINED
)
PAIRS = ("task.data.num_train=64", "task.data.num_dev=16", "task.data.num_test=32")


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_without_follow_up_prints_the_command_that_goes_on(
    tmp_path: Path, suite_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ("+exp=electra_multilingual", *SMALL, *TEXTS, *NETWORKS, "training.max_steps=2")
    asked = composed(*first, f"cache_dir={suite_cache}", "follow_up=[]")
    run(Settings.of(asked), tmp_path / "there")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("next"))
    command = shlex.split(line)[1:]
    assert command[:2] == ["python", "run.py"]

    config = composed(*command[2:], *SMALL)
    encoder = tmp_path / "there" / "model" / "discriminator"
    assert config.task.tokenizer.name_or_path == str(encoder)
    assert (encoder / "model.safetensors").is_file()


def following(tmp_path: Path, follow_up: str) -> DictConfig | None:
    config = composed("+exp=electra_multilingual", "seed=5")
    config.merge_with_dotlist([f"follow_up={follow_up}"])
    found = compose_follow_up(Settings.of(config), CONF, tmp_path)
    return None if found is None else OmegaConf.create(dict(found.plain))


def test_a_follow_up_reads_what_the_first_run_leaves_with_its_seed(tmp_path: Path) -> None:
    found = following(tmp_path, "['+exp=xnli_zero_shot','training.max_steps=7']")
    assert found is not None
    assert found.task.tokenizer.name_or_path == str(tmp_path / "model" / "discriminator")
    assert (found.name, found.seed, found.training.max_steps) == ("xnli_zero_shot", 5, 7)
    assert following(tmp_path, "[]") is None
    assert composed("+exp=electra_multilingual").follow_up == ["+exp=xnli_zero_shot"]


@pytest.mark.slow
@pytest.mark.nightly
def test_what_a_follow_up_names_itself_is_left_as_it_is(tmp_path: Path) -> None:
    named = "'seed=9','cache_dir=elsewhere','tracker=none'"
    found = following(tmp_path, f"['+exp=xnli_zero_shot',{named}]")
    assert found is not None
    assert (found.seed, found.cache_dir, found.task.cache_dir) == (9, "elsewhere", "elsewhere")
    assert found.tracker == composed("+exp=xnli_zero_shot", "tracker=none").tracker
    encoder = str(tmp_path / "model" / "discriminator")
    assert found.task.tokenizer.name_or_path == encoder

    own = tmp_path / "own"
    saved(own, "bert", max_position_embeddings=64)
    (own / "tokenizer.json").write_text("{}")
    for other in (f"task.tokenizer.name_or_path={own}", f"task.tokenizer={{name_or_path: {own}}}"):
        found = following(tmp_path, f"['+exp=xnli_zero_shot','{other}']")
        assert found is not None
        assert (found.task.tokenizer.name_or_path, found.seed) == (str(own), 5)


def test_a_chosen_file_of_settings_is_not_a_named_setting(tmp_path: Path) -> None:
    found = following(tmp_path, "['+exp=xnli_zero_shot','task=xnli']")
    assert found is not None
    assert found.task.tokenizer.name_or_path == str(tmp_path / "model" / "discriminator")


@pytest.mark.parametrize(
    ("follow_up", "said"),
    first_daily(
        [
            ("['+exp=xnli_zero_shit']", "Could not find 'exp/xnli_zero_shit'"),
            ("['+exp=xnli_zero_shot','training.max_stepz=7']", "training.max_stepz"),
            ("['+exp=xnli_zero_shot','training.max_steps=-7']", "training.max_steps"),
            ("['+exp=abnet_iwslt']", "task.tokenizer"),
            (
                "['+exp=xnli_zero_shot','profile=files','task.data.path=/does/not/exist','task.max_length=64']",
                "makes no experiment that can run: /does/not/exist does not exist; task.data.path",
            ),
            (
                "['+exp=xnli_zero_shot','task.max_length=65']",
                "task.max_length is 65, but the pre-trained encoder will have 64 positions",
            ),
            ("xnli_zero_shot", "follow_up must be a list of which each is a text"),
            ("[1]", "follow_up[0] must be a text, got 1"),
        ],
        count=5,
    ),
)
def test_a_wrong_follow_up_is_refused_before_anything_runs(
    tmp_path: Path, follow_up: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        following(tmp_path, follow_up)


@pytest.mark.nightly
@pytest.mark.slow
def test_one_command_pretrains_and_fine_tunes(tmp_path: Path, suite_cache: Path) -> None:
    follow_up = ["+exp=xnli_zero_shot", *PAIRS, "training.max_steps=2"]
    command = ["run.py", "+exp=electra_multilingual", *SMALL, *TEXTS, *NETWORKS]
    command += ["training.max_steps=2", f"cache_dir={suite_cache}"]
    command += [f"follow_up={follow_up}", f"hydra.run.dir={tmp_path / 'run'}"]
    done = completed(*command, log=tmp_path / "log")
    assert done.returncode == 0, done.stderr
    assert "\nnext" not in done.stdout
    found = json.loads((tmp_path / "run" / "follow_up" / "summary.json").read_text())
    scores = found["quality"]
    assert list(scores) == ["accuracy", "accuracy_en", "accuracy_es"]
    assert scores["accuracy"] == (scores["accuracy_en"] + scores["accuracy_es"]) / 2

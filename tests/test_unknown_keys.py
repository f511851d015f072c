"""What is said of a key that no chosen group has."""

from pathlib import Path

from xcloud.job.config import hints

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
    assert "did you mean 'seed'? Allowed here: task, model" in hint("sed=3")
    assert hint("model.splot.rank=3").startswith("unknown setting 'model.splot'; did you mean")


def test_a_key_that_has_no_value_yet_is_known() -> None:
    wrong = hints(["model=transformer", "name=t", "task.num_train=200"], CONF)
    assert [line.split("'")[1] for line in wrong] == ["task.num_train"]


def test_each_wrong_key_has_a_line() -> None:
    wrong = hints(["+exp=abnet_iwslt", "trainin.batch_size=3", "model.spit=3"], CONF)
    assert [line.split("'")[1] for line in wrong] == ["trainin", "model.spit"]


def test_nothing_is_said_where_hydra_has_said_it() -> None:
    assert hints(["+exp=no_such", "sed=3"], CONF) == []
    assert hints(["+exp=abnet_iwslt", "training.batch_size=3", "hydra.nothing=3"], CONF) == []
    assert hints(["what is this"], CONF) == []

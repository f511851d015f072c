"""Mutated experiment files: whatever they say, a worker refuses them with one of our errors or
builds a job within this cloud's policy. What it may build is what conf/ names."""

from __future__ import annotations

import copy
import random
import resource
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.utils import get_object
from omegaconf import OmegaConf

from tests.configs import CONF
from xcloud.base.errors import XcloudError
from xcloud.job import given
from xcloud.job.config import fill_in
from xcloud.job.job import Job
from xcloud.security.policy import constructors

FILE = """\
_target_: xcloud.experiment.Experiment
name: fuzzed
task: {_target_: tests.toy.ToyTask, num_samples: 40}
model: {_target_: tests.toy.ToyModel}
cluster:
  _target_: xcloud.layout.ClusterLayout
  clouds:
    a: {_target_: xcloud.layout.Cloud, num_ranks: 1, stages: [0]}
    b: {_target_: xcloud.layout.Cloud, num_ranks: 2}
  wan: real
schedule: {_target_: xcloud.pipeline.schedule.GPipe, num_micro_batches: 2}
compression:
  _target_: xcloud.comm.compression.Compression
  forward: {_target_: xcloud.comm.precision.BlockInt, bits: 4}
  backward: {_target_: xcloud.comm.low_rank.Svd, rate: 0.5}
training:
  _target_: xcloud.pipeline.settings.Training
  max_steps: 8
  batch_size: 8
  optimizer: {_target_: xcloud.pipeline.settings.Optimizer, learning_rate: 1.0e-3}
tracker: {_target_: xcloud.tracking.tracker.MlflowTracker, root: mlruns, uri: null}
cache_dir: .cache
"""
WORDS = [
    "null", "???", ".", "..", "../..", "/etc/passwd", "~root", "a\0b", "\x1b]0;x\a", "http://x",
    "os.system", "xcloud.", "xcloud.record.files.Path.write_text",
    "xcloud.comm.precision.Cast",
    "${oc.env:HOME}", "tests.toy.ToyTask", "free", "INT8", "a" * 300,
]  # fmt: skip
PIECES = [
    *WORDS, "*a", "&a ", "<<: ", "!!python/name:os.system ", "[", "]", "{", "}", "- ", "? ", ": ",
    "#", "'", '"', "|\n", "\t", "é", "---\n", "1e309", "0x7f", "1:59:59", ".nan", "-.inf", "true",
    "9" * 5000, "_partial_: true", "_args_: [1]", "[" * 300, "{a: " * 60, "\n  ", "_target_: ",
]  # fmt: skip
VALUES = [
    *WORDS, None, True, 0, -1, 1, 2, 255, 10**4, 10**9, 10**18, -(10**30), 0.5, 1e300, "",
    float("nan"), float("-inf"), [], {}, [1], [[0]], ["a", "b"], {"a": 1},
    {"_target_": "os.getcwd"}, {"_target_": "xcloud.comm.precision.Cast"}, {"_partial_": True},
    [None] * 50,
]  # fmt: skip


def changed(tree: Any, draw: random.Random) -> str:
    """Another value, a part of the tree in the place of another one, a key more or less."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.randint(1, 3)):
        nodes = [tree]
        for node in nodes:
            inner = node.values() if isinstance(node, dict) else node
            nodes += [entry for entry in inner if isinstance(entry, dict | list) and entry]
        node = draw.choice(nodes)
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key, what = draw.choice(keys), draw.randrange(8)
        if what == 0:
            del node[key]
        elif what == 1 and isinstance(node, dict):
            node[
                draw.choice(["num_ranks", "stages", "wan", "seed", "links", "a", "_args_", 1])
            ] = draw.choice(VALUES)
        elif what == 2:
            node[key] = copy.deepcopy(draw.choice(nodes))
        else:
            node[key] = copy.deepcopy(draw.choice(VALUES))
        tree = tree or {"a": 1}
    return yaml.safe_dump(tree)


def mutated(text: str, draw: random.Random) -> str:
    for _ in range(draw.randint(1, 2)):
        lines = text.split("\n")
        at, end = sorted(draw.sample(range(len(text)), 2))
        what = draw.randrange(7)
        if what == 0:
            text = text[:at] + draw.choice(PIECES) + text[at:]
        elif what == 1:
            text = text[:at] + text[min(end, at + draw.randint(1, 40)) :]
        elif what == 2:  # the value of a key
            line = draw.randrange(len(lines))
            lines[line] = lines[line].split(":")[0] + ": " + draw.choice(PIECES)
            text = "\n".join(lines)
        elif what == 3:
            draw.shuffle(lines)
            text = "\n".join(lines)
        elif what == 4:  # one word in the place of another
            words = text.split(" ")
            words[draw.randrange(len(words))] = draw.choice([*words, *PIECES])
            text = " ".join(words)
        elif what == 5:
            text = text[:at] + chr(draw.randrange(1, 0xD800)) + text[at + 1 :]
        else:
            text = text[:end] + text[at:end] * draw.choice([1, 1, 2, 50]) + text[end:]
        text = text or FILE
    return text


def check(seed: int, number: int, folder: Path) -> dict[str, int]:
    """Counts of files built and refused. Half of them are still YAML."""
    found = {"built": 0, "refused": 0}
    file, draw = folder / "experiment.yaml", random.Random(seed)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tree = yaml.safe_load(FILE)
    for index in range(number):
        text = changed(tree, draw) if index % 2 else mutated(FILE, draw)
        file.write_text(text)
        try:
            job = given.read_shared(file, folder).job
        except XcloudError:
            found["refused"] += 1
        except Exception as error:
            raise AssertionError(f"{error!r} from\n{text}") from error
        else:
            assert isinstance(job, Job) and job.cluster.num_ranks <= 1024
            found["built"] += 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 300_000
    assert list(folder.iterdir()) == [file]
    return found


def test_a_mutated_file_is_refused_by_one_of_our_errors(tmp_path: Path) -> None:
    found = check(1, 60, tmp_path)
    assert found["refused"] > 30 and found["built"] > 1  # the mutations reach the constructors


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 12))
def test_100_000_mutated_files_are_refused_by_one_of_our_errors(seed: int, tmp_path: Path) -> None:
    check(seed, 10_000, tmp_path)


def test_the_list_of_constructors_is_that_of_conf_and_of_defaults() -> None:
    found = set[str]()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            found.add(str(node.get("_target_")))
        for entry in node.values() if isinstance(node, dict) else node:
            if isinstance(entry, dict | list):
                walk(entry)

    for path in CONF.rglob("*.yaml"):
        walk(fill_in(OmegaConf.to_container(OmegaConf.load(path))))
    ours = {name for name in found if name.startswith("xcloud.")}
    # No file and no default has a price or a target.
    only_given = {"xcloud.layout.Price", "xcloud.features.until.settings.Until"}
    assert ours | only_given == constructors(), "xcloud/security/policy.py: ONLY_GIVEN"


def test_every_constructor_is_of_the_module_that_its_name_says() -> None:
    for name in constructors():
        found = get_object(name)
        assert f"{found.__module__}.{found.__qualname__}" == name

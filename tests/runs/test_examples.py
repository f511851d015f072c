"""Each script of examples/ runs, with tiny settings and from a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nightly import NIGHTLY
from tests.runs import ROOT

EXAMPLES = ROOT / "examples"
SHORT = ("training.max_steps=4", "training.optimizer.warmup_steps=1", "cluster/wan=free")
TRANSLATION = (
    *SHORT, "tracker=none", "model=transformer",
    "task.data.num_pairs=60", "+task.data.num_dev=10", "+task.data.num_test=10",
    "task.source_tokenizer.vocab_size=400", "task.target_tokenizer.vocab_size=400",
    "model.hidden=16", "model.feed_forward=32", "model.num_heads=2",
    "model.num_encoder_layers=1", "model.num_decoder_layers=1", "training.batch_size=8",
)  # fmt: skip
TEXTS = (
    "tracker=none", "training.batch_size=8", "model.own.pretraining.steps=2",
    "model.own.pretraining.warmup_steps=1", "+model.own.num_texts=200", "+model.own.hidden=64",
    "+model.own.num_layers=2", "+model.own.feed_forward=64", "task.tokenizer.vocab_size=400",
    "+task.data.num_train=60", "+task.data.num_dev=10", "+task.data.num_test=10"
)  # fmt: skip
MERGES = (
    "training.max_steps=4", "training.optimizer.warmup_steps=1", "strategy.averaging.every=2",
)  # fmt: skip
SETTINGS = {
    "translate.py": TRANSLATION,
    "lora_over_two_clouds.py": (*TEXTS, *SHORT),
    "dpo.py": (*TEXTS, *SHORT),
    "local_updates_over_a_mailbox.sh": ("box", *TEXTS, *MERGES),
    "own_compressor.py": (*TEXTS, *SHORT),
    "sweep_on_slurm.sh": (*TRANSLATION, "hydra.launcher.on=here", "hydra.launcher.job=null"),
}
ENDS = {
    "translate.py": "python -m xcloud translate outputs/",
    "lora_over_two_clouds.py": "merged",
    "dpo.py": "reward_margin",
    "local_updates_over_a_mailbox.sh": "lora_clm: finished, 4 steps",
    "own_compressor.py": "bytes a step",
    "sweep_on_slurm.sh": "int8",
}


def test_every_example_has_tiny_settings_and_a_line_in_the_readme() -> None:
    there = {path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".sh"}}
    assert there == set(SETTINGS) == set(ENDS)
    readme = (EXAMPLES / "README.md").read_text()
    assert [name for name in sorted(there) if f"`{name}`" not in readme] == []


@pytest.mark.parametrize("name", [pytest.param(name, marks=NIGHTLY) for name in SETTINGS])
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("XCLOUD_POLICY", None)
    shell = ["bash"] if name.endswith(".sh") else [sys.executable]
    words = [*shell, str(EXAMPLES / name), *SETTINGS[name]]
    if not name.startswith("local"):  # which has a place of its own
        words.append(f"cache_dir={tmp_path}/cache")
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert ENDS[name] in done.stdout, done.stdout[-3000:]

"""The main job from its command line, small: AB-Net over two clouds, then its exported model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import completed

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("main_job")]  # one run for all of them
ROOT = Path(__file__).parents[2]
TINY = [
    "+exp=abnet_iwslt", "tracker=none", "task.data.num_pairs=2600", "training.max_steps=6",
    "training.eval_samples=20", "model.encoder.pretraining.steps=3",
    "model.decoder.pretraining.steps=3", "training.optimizer.warmup_steps=2",
]  # fmt: skip


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return completed(*words, log=folder / "log")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, suite_cache: Path) -> tuple[Path, str]:
    """Started cold, as a user does; the commands below start warm."""
    folder = tmp_path_factory.mktemp("main")
    where = (f"cache_dir={suite_cache}", f"hydra.run.dir={folder}/run")
    done = subprocess.run(
        [sys.executable, "run.py", *TINY, *where], cwd=ROOT, capture_output=True, text=True,
        timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run", done.stdout


def test_output_begins_with_what_it_is_and_ends_with_the_summary(
    finished: tuple[Path, str],
) -> None:
    run_dir, output = finished
    lines = output.strip().splitlines()

    link = ("100 Mbit/s", "20 ms round trip")
    for said in ("demo texts", "AB-Net", *link, "fp16(svd(0.6))+int8"):
        assert said in lines[0]
    assert Path(lines[-1]) == run_dir / "summary.json"
    for said in ("BLEU", "chrF", "step time, median", "bubble ratio", "compression ratio"):
        assert said in output


def test_summary_has_the_names_that_other_tools_read(finished: tuple[Path, str]) -> None:
    summary = json.loads((finished[0] / "summary.json").read_text())

    assert summary["status"] == "finished"
    assert summary["num_steps"] == 6
    assert summary["quality"].keys() == {"bleu", "chrf"}
    assert summary["step_time_s"].keys() == {"median", "p90"}
    for key in ("compute_s", "codec_s", "waiting_s"):
        assert summary[key].keys() == {"cloud_a", "cloud_b"}
    assert summary["wan_bytes_per_step"].keys() == {"forward", "backward", "other"}
    assert summary["compression_ratio"].keys() == {"forward", "backward", "total"}
    # Rate 0.6 of small matrices in FP16 saves under half; INT8 with block scales nearly 4.
    assert 1.3 < summary["compression_ratio"]["forward"] < 2.2
    assert 3.6 < summary["compression_ratio"]["backward"] < 4.0
    for key in ("name", "seed", "commit", "profile", "final_loss", "bubble_ratio",
                "samples_per_s", "tokens_per_s"):  # fmt: skip
        assert summary[key] is not None
    assert "tok:13a" in summary["signatures"]["bleu"]


def test_each_cloud_exports_its_stage_and_the_tokenizer_of_its_side(
    finished: tuple[Path, str],
) -> None:
    run_dir, _ = finished

    assert {path.name for path in (run_dir / "model").iterdir()} == {
        "stage0.safetensors", "boundary0.safetensors", "stage1.safetensors",
        "source_tokenizer.json", "target_tokenizer.json",
    }  # fmt: skip


def test_the_exported_model_translates_a_line(finished: tuple[Path, str], tmp_path: Path) -> None:
    lines = ("El gato duerme.", "La casa.", "palabra " * 99)
    done = command(tmp_path, "-m", "xcloud", "translate", str(finished[0]), *lines)

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split("\n")) == 5  # a notice, three lines and the end
    assert "1 of 3 lines cut to" in done.stdout


def test_translating_with_an_unfinished_run_is_refused_in_words(tmp_path: Path) -> None:
    done = command(tmp_path, "-m", "xcloud", "translate", str(tmp_path), "x")

    assert done.returncode == 1
    assert done.stderr.endswith("holds no run: there is no experiment.yaml in it\n")
    assert "Traceback" not in done.stderr


def test_a_wrong_setting_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    where = f"hydra.run.dir={tmp_path}/run"
    wrong = "schedule.num_micro_batches=lots"
    done = command(tmp_path, "run.py", "+exp=abnet_iwslt", wrong, where)

    assert done.returncode == 1
    assert done.stderr.strip() == (
        "xcloud: schedule.num_micro_batches must be a whole number >= 1, got 'lots'"
    )
    assert not (tmp_path / "run").exists(), "nothing has begun"


def test_the_shell_is_told_how_to_complete_settings(tmp_path: Path) -> None:
    done = command(tmp_path, "run.py", "-sc", "install=bash")
    assert done.returncode == 0 and "complete -o nospace" in done.stdout


def test_a_key_that_does_not_exist_is_answered_with_those_that_do(tmp_path: Path) -> None:
    done = command(tmp_path, "run.py", "+exp=abnet_iwslt", "training.batch_siz=3")

    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "xcloud: unknown setting 'training.batch_siz'; did you mean 'batch_size'? Allowed here: "
    )


def test_without_an_experiment_those_there_are_are_named(tmp_path: Path) -> None:
    done = command(tmp_path, "run.py")

    assert done.returncode == 1
    assert "or choose an experiment: +exp= one of abnet_iwslt, " in done.stderr

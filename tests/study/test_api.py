"""The functions that `import xcloud` offers."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import xcloud
from xcloud.job.given import grid
from xcloud.record.summary import SUMMARY_FILE, write_summary
from xcloud.study import point_process, runner
from xcloud.study.points import STATE_FILE
from xcloud.study.runner import Sweep

SHOWN = "import os; print(os.environ.get('FORCE_COLOR'))"

TINY = (
    "model=transformer", "tracker=none",
    "task.data.num_pairs=60", "+task.data.num_dev=10", "+task.data.num_test=10",
    "task.source_tokenizer.vocab_size=400", "task.target_tokenizer.vocab_size=400",
    "model.hidden=16", "model.feed_forward=32", "model.num_heads=2", "model.num_encoder_layers=1",
    "model.num_decoder_layers=1", "training.batch_size=8", "training.max_steps=3",
    "training.optimizer.warmup_steps=1", "cluster/wan=free",
)  # fmt: skip


@pytest.mark.slow
def test_a_run_gives_the_figures_of_its_summary_and_can_be_loaded_again(tmp_path: Path) -> None:
    result = xcloud.run(
        "abnet_iwslt", *TINY, "compression=int8", f"cache_dir={tmp_path}", folder=tmp_path / "run"
    )

    assert result.status == "finished"
    assert set(result.scores) == {"bleu", "chrf"}
    assert result.step_s is not None and result.step_s > 0
    assert result.compression_ratio is not None and 2 < result.compression_ratio < 4
    assert result.bytes_per_step > result.summary["wan_bytes_per_step"]["forward"] > 0
    assert any(result.model_dir.iterdir())
    assert xcloud.load(result.folder) == result


def test_no_room_of_the_package_hides_a_function_of_its_face() -> None:
    """`import xcloud.sweep` would put a module where the function was."""
    for name in xcloud.__all__:
        assert importlib.util.find_spec(f"xcloud.{name}") is None, name


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        (runner.FINISHED, None, ""),
        (runner.SOME_FAILED, xcloud.RunFailed, "points failed: p2 died; see .*two"),
        (runner.REFUSED, xcloud.ConfigError, "the sweep is refused"),
        (runner.INTERRUPTED, KeyboardInterrupt, ""),
    ],
)
def test_a_sweep_from_python_is_continued_by_a_call_and_gives_what_finished(
    code: int,
    error: type[BaseException] | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    made: list[tuple[Sweep, list[tuple[str, ...]]]] = []

    def run(one: Sweep, points: list[tuple[str, ...]], composer: object) -> int:
        made.append((one, points))
        one.causes["p2",] = "p2 died"
        folder = one.folder / "p1"
        folder.mkdir(parents=True)
        write_summary(folder / SUMMARY_FILE, {"status": "finished"})
        write_summary(one.folder / STATE_FILE, {"points": {"p1": {"overrides": []}}})
        return code

    monkeypatch.setattr(Sweep, "run", run)
    also = {"compression": "none"}
    with pytest.raises(error, match=said or None) if error else contextlib.nullcontext():
        found = xcloud.sweep("abnet_iwslt", "seed=1,2", name="two", also=also, parallel=2)
        assert [result.status for result in found] == ["finished"]
        assert [result.folder for result in found] == [tmp_path / "multirun" / "two" / "p1"]
    [(sweep, points)] = made
    assert sweep.again == (
        'xcloud.sweep("abnet_iwslt", "seed=1,2", name="two", also={\'compression\': \'none\'}, '
        "parallel=2)"
    )
    assert (sweep.settings.parallel, sweep.settings.also) == (2, also)
    one = ("+exp=abnet_iwslt", "seed=1"), ("+exp=abnet_iwslt", "seed=2")
    assert points[:2] == [*one] and [point[:2] for point in points[2:]] == [*one]
    assert [point[2].lstrip("+") for point in points[2:]] == ["compression=none"] * 2


def test_a_sweep_of_no_name_gets_the_time_and_runs_its_points_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made: list[tuple[Sweep, list[tuple[str, ...]]]] = []
    monkeypatch.setattr(Sweep, "run", lambda one, points, _: made.append((one, points)))
    with pytest.raises(xcloud.RunFailed):  # a sweep that says nothing has not finished
        xcloud.sweep("abnet_iwslt", "seed=1,2")
    [(sweep, points)] = made
    assert points == [("+exp=abnet_iwslt", "seed=1"), ("+exp=abnet_iwslt", "seed=2")]
    assert (sweep.settings.parallel, sweep.settings.also) == (1, None)
    assert sweep.again == f'xcloud.sweep("abnet_iwslt", "seed=1,2", name="{sweep.name}")'
    assert sweep.folder == tmp_path / "multirun" / sweep.name


def test_a_result_says_what_its_summary_has() -> None:
    summary = {
        "status": "stopped",
        "step_time_s": {"median": None},
        "wan_bytes_per_step": {"forward": 7, "backward": None, "other": 2},
        "compression_ratio": {"total": 3.5},
    }
    result = xcloud.Result(Path("run"), summary)
    assert (result.status, result.scores, result.step_s) == ("stopped", {}, None)
    assert (result.bytes_per_step, result.compression_ratio) == (9, 3.5)
    assert result.model_dir == Path("run", "model")


def test_a_point_of_a_sweep_writes_a_log_without_colors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(
        point_process, "python_command", lambda *_: [sys.executable, "-c", SHOWN, "x"]
    )
    with point_process.start_point(tmp_path, threads="1") as process:
        said, _ = process.communicate()
    assert said.strip() == "None"


@pytest.mark.slow
@pytest.mark.nightly
def test_a_sweep_gives_the_result_of_every_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    results = xcloud.sweep("abnet_iwslt", *TINY, "compression=none,int8", name="two")

    assert [result.summary["compression"] for result in results] == ["none", "int8+int8"]
    assert {result.folder.parent for result in results} == {tmp_path / "multirun" / "two"}
    assert results[0].bytes_per_step > 2 * results[1].bytes_per_step


def test_a_wrong_word_is_refused_in_one_line_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(xcloud.ConfigError, match="did you mean 'compression'"):
        xcloud.run("abnet_iwslt", "compresion=int8", folder=tmp_path / "run")
    with pytest.raises(xcloud.ConfigError, match="there is no exp/abnet_iwsl; did you mean"):
        xcloud.run("abnet_iwsl", folder=tmp_path / "run")
    with pytest.raises(xcloud.ConfigError, match="holds no run"):
        xcloud.load(tmp_path)
    with pytest.raises(xcloud.ConfigError, match="did you mean 'int8'"):
        xcloud.compression("int5")
    assert not any(tmp_path.iterdir())


def test_the_points_of_a_sweep_are_every_combination() -> None:
    assert grid(["+exp=a", "compression=none,int8", "x=[1,2]", "seed=1,2", "~y"]) == [
        ("+exp=a", f"compression={name}", "x=[1,2]", f"seed={seed}", "~y")
        for name in ("none", "int8")
        for seed in (1, 2)
    ]


def test_a_compression_that_ships_can_be_had_by_name() -> None:
    """That each of them builds is tested in test_conf.py."""
    assert {"fp16", "int8", "int4", "none", "powersgd"} <= set(xcloud.compressions())
    for name in ("none", "int8", "powersgd"):
        assert xcloud.compression(name).label


def trained_by_ddp() -> tuple[Tensor, Tensor, float]:
    """Return a gradient that DistributedDataParallel averaged compressed, the one without, and by
    how many times fewer bytes were sent.

    The model is gone before its process group is: torch may wait for ever in the destructor of a
    model that outlives it, also without xcloud (`experiments/LOG.md`).
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    state = xcloud.compress_ddp(model, "int8")
    data = torch.randn(8, 64)
    model(data).square().sum().backward()
    plain = nn.Linear(64, 64)
    plain.load_state_dict(model.module.state_dict())
    plain(data).square().sum().backward()
    assert model.module.weight.grad is not None and plain.weight.grad is not None
    ratio = state.raw_bytes / state.num_bytes
    return model.module.weight.grad.clone(), plain.weight.grad, ratio


def test_gradients_of_ddp_are_compressed_by_name(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        compressed, expected, ratio = trained_by_ddp()
    finally:
        dist.destroy_process_group()

    error = (compressed - expected).abs().max()
    assert 0 < error < expected.abs().max() / 100
    assert 3.5 < ratio < 4
    with pytest.raises(xcloud.ConfigError, match="DistributedDataParallel"):
        xcloud.compress_ddp(nn.Linear(2, 2), "int8")


def test_importing_the_package_imports_no_torch_and_leaves_a_script_its_folder() -> None:
    """A script finds the modules beside it; only `python -m xcloud` looks nowhere else first."""
    program = "import sys; sys.path.insert(0, '/beside'); import xcloud; "
    program += "assert 'torch' not in sys.modules and sys.path[0] == '/beside'"
    subprocess.run([sys.executable, "-c", program], check=True)


PUBLIC = {
    "Result": ["folder", "summary"],
    "compress_ddp": ["model", "name", "feedback"],
    "compression": ["name"],
    "compressions": [],
    "load": ["folder"],
    "run": ["experiment", "settings", "folder"],
    "sweep": ["experiment", "settings", "name", "also", "parallel"],
}
OF_RESULT = {
    "bytes_per_step", "compression_ratio", "folder", "model_dir", "scores", "status", "step_s",
    "summary",
}  # fmt: skip
ERRORS = {"ConfigError", "RunFailed", "XcloudError"}


def test_public_names_and_their_parameters_stay() -> None:
    """What is taken away or renamed here breaks scripts (docs/compatibility.md)."""
    assert set(xcloud.__all__) == PUBLIC.keys() | ERRORS
    found = {name: list(inspect.signature(getattr(xcloud, name)).parameters) for name in PUBLIC}
    assert found == PUBLIC
    public = {name for name in dir(xcloud.Result) if not name.startswith("_")}
    assert public | set(xcloud.Result.__annotations__) == OF_RESULT
    assert all(issubclass(getattr(xcloud, name), xcloud.XcloudError) for name in ERRORS)

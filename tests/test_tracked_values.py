"""What a tracker is told: legal names, flat parameters, curves apart from final values."""

import pytest

from xcloud.record.events import StepTotals
from xcloud.tracking.mlflow_store import (
    final_metrics,
    legal_name,
    quality_metrics,
    step_metrics,
)

pytestmark = pytest.mark.xdist_group("mlflow")  # one process imports it, not each


def test_every_name_we_make_is_legal_in_mlflow() -> None:
    from mlflow.utils.validation import _validate_metric_name, _validate_param_name

    wild = ["a@b", "x(%)", "/abs", "../up", ".", "", "a//b", "a/", "año", "a:b", "y" * 300, "/"]
    for name in wild:
        _validate_metric_name(legal_name(name))
        _validate_param_name(legal_name(name))
    assert legal_name("train/loss") == "train/loss"
    assert legal_name("compute_s_cloud A-1.x") == "compute_s_cloud A-1.x"


def test_curves_and_final_values_do_not_share_a_name() -> None:
    totals = StepTotals(
        3,
        step_s=0.5,
        loss=2.0,
        numbers={
            ("num_ranks", "source"): 2,
            ("waiting_s", "source"): 0.4,
            ("sent", "forward"): 10,
            ("sent", "backward"): 0,
        },
        grad_norm=1.5,
    )
    curves = step_metrics(totals)
    assert curves == {
        "train/step_s": 0.5,
        "train/loss": 2.0,
        "update/grad_norm": 1.5,
        "wall_time/waiting_s_source": 0.2,
        "wan/bytes_forward": 10,
    }
    names = list(curves)
    assert (names[0], names[-1]) == ("train/loss", "train/step_s"), "as MLflow shows them"
    dev = quality_metrics({"split": "dev", "values": {"bleu": 30.0}})
    assert dev == {"dev/bleu": 30.0}

    final = final_metrics(
        {
            "quality": {"bleu": 41.92, "chrf": None},
            "quality_error": {"bleu": 0.81},
            "step_time_s": {"median": 0.4, "p90": 0.5},
            "compression_ratio": {"forward": 4.0, "backward": None, "total": 3.0},
            "waiting_s": {"source": 0.2},
            "wan_bytes_per_step": {"forward": 10, "backward": 0, "other": 2},
        }
    )
    assert final == {
        "bleu": 41.92,
        "bleu_error": 0.81,
        "step_time_s": 0.4,
        "step_time_p90_s": 0.5,
        "wan_bytes_per_step": 12.0,
        "compression_ratio": 3.0,
        "compression_ratio_forward": 4.0,
        "waiting_s_source": 0.2,
        "wan_bytes_per_step_forward": 10,
        "wan_bytes_per_step_backward": 0,
        "wan_bytes_per_step_other": 2,
    }
    assert not set(final) & (set(curves) | set(dev))

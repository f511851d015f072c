"""What MLflow knows beside a run's figures: the data sets that it read, the model that it made,
and the load of the machine that followed it. Public calls of MlflowClient only.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

import psutil

from xcloud.record.events import Event
from xcloud.record.tracking import TrackedRun, final_metrics

SYSTEM_EVERY_S = 10.0
MODEL_FIGURES = ("step_time_s", "wan_bytes_per_step", "compression_ratio")  # beside its scores
_MB = 1e6


def log_data(client: Any, run_id: str, run: TrackedRun, event: Event) -> None:
    """The splits of the corpus as the run's inputs: name, digest, source, and the split as the
    context. event: "data". The digest is of settings, sizes and what the corpus is known by, not
    of private text."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    if client.get_run(run_id).inputs.dataset_inputs:
        return  # an earlier attempt's
    source = json.dumps({"task": run.params.get("task")}, default=str)
    inputs = [
        DatasetInput(
            Dataset(
                f"{event['name']}, {split}"[:500], event["digest"], "xcloud", source,
                profile=json.dumps({"num_rows": rows}),
            ),
            [InputTag("mlflow.data.context", split)],
        )
        for split, rows in event["rows"].items()
    ]  # fmt: skip
    client.log_inputs(run_id, inputs)


def log_model(
    client: Any, experiment_id: str, run_id: str, run: TrackedRun, summary: Mapping[str, Any],
    at_s: float,
) -> None:  # fmt: skip
    """The finished model with its scores, what a step took, and where its record lies. at_s: of
    the run's final values, so that none is in the run twice."""
    from mlflow.entities import Metric

    data = summary.get("data") or {}
    about = {"run_folder": str(run.run_dir.absolute()), "corpus": data.get("name", "")}
    model = client.create_logged_model(
        experiment_id, re.sub(r"""[/:.%"'\s]+""", "_", run.name), source_run_id=run_id,
        tags={**run.tags, **about}, params={"corpus": about["corpus"][:500]}, model_type="xcloud",
    )  # fmt: skip
    found, at_ms = final_metrics(summary), int(1000 * at_s)
    scores = summary.get("quality", {})
    metrics = [
        Metric(
            name, found[name], at_ms, int(summary.get("num_steps") or 0), model.model_id,
            f"{data['name']}, test"[:500] if data and name in scores else None,
            data["digest"] if data and name in scores else None, run_id,
        )
        for name in (*scores, *MODEL_FIGURES)
        if name in found
    ]  # fmt: skip
    client.log_batch(run_id, metrics=metrics)
    client.finalize_logged_model(model.model_id, "READY")


class SystemMeter:
    """Load of the machine that follows the run, as MLflow's page of system metrics names it; a
    step is a second since its start."""

    def __init__(self) -> None:
        self._started_s, self._due_s = time.monotonic(), 0.0

    def figures(self) -> tuple[int, dict[str, float]]:
        """The second, and figures every SYSTEM_EVERY_S, else none."""
        second = time.monotonic() - self._started_s
        if second < self._due_s:
            return 0, {}
        self._due_s = second + SYSTEM_EVERY_S
        memory = psutil.virtual_memory()
        return int(second), {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_megabytes": memory.used / _MB,
            "system/system_memory_usage_percentage": memory.percent,
        }

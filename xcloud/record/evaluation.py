"""Scores in a run's summary that were measured after the run:

"evaluation": {TASK: {"metrics": {METRIC: {"value", "stderr"}}, "num_samples", "compressor"}}, and
of a task of lm-evaluation-harness "num_fewshot", "task_version", "harness", "chat_template", too.
TASK is NAME or NAME_uncompressed; of a file of texts NAME is FOLDER_FILE, without its ending.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from xcloud.base.units import EVALUATED
from xcloud.record.feature_figures import FeatureFigure

EVALUATION = "evaluation"


def evaluation_metrics(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (eval_TASK_METRIC, value), and the standard error as eval_TASK_METRIC_error."""
    for task, found in summary.get(EVALUATION, {}).items():
        for metric, score in found["metrics"].items():
            name = f"{EVALUATED}{task}_{metric}"
            yield name, score["value"]
            if score["stderr"] is not None:
                yield f"{name}_error", score["stderr"]


EVALUATION_FIGURE = FeatureFigure(metrics=evaluation_metrics)

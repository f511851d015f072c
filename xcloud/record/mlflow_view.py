"""Prepared views of MLflow's UI (columns, filter, charts) and links to them.
Pure; opens no store and does not import MLflow.

MLflow's table of runs shows no metrics until columns are selected by hand, and MLflow has no API
for that. A view stored in an experiment tag does it; the link's viewStateShareKey names it. That
is what the UI's "share" button writes; the format is private to MLflow 3.17.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xcloud.base.project import project_root
from xcloud.record.scores import LESS_IS_BETTER

UI_HOST, UI_PORT = "127.0.0.1", 5000  # where `python -m xcloud ui` serves by default
VIEW_KEY = "xcloud"  # of the view of all runs
VIEW_METRICS = (
    "bleu",
    "step_time_s",
    "compression_ratio",
    "bubble_ratio",
    "wan_bytes_per_step_forward",
    "wan_bytes_per_step_backward",
    "wan_bytes_per_step_averaging",
    "samples_per_s",
    "final_loss",
)
COSTS = ("step_time_s", "compression_ratio")
FIGURES, PARALLEL = "figures", "parallel"  # sections of charts


def view_tag(key: str) -> str:
    """The experiment tag under which MLflow looks up a view."""
    return f"mlflow.sharedViewState.{key}"


def sweep_key(sweep: str) -> str:
    return f"sweep-{sweep}"


def page(server: str, experiment_id: str, key: str | None = None, *, charts: bool = False) -> str:
    """Link to the runs of an experiment, shown with the view `key`.

    Without workflowType MLflow opens its page for chat applications, with a pop-up.
    """
    link = f"{server.rstrip('/')}/#/experiments/{experiment_id}/runs"
    link += "?workflowType=machine_learning"
    link += "&compareRunsMode=CHART" if charts else ""
    return link + (f"&viewStateShareKey={key}" if key else "")


def ui_command(root: Path) -> str:
    """The command that serves the store in the folder `root`."""
    is_usual = root == project_root() / "mlruns"
    return "python -m xcloud ui" + ("" if is_usual else f" --root {root}")


def artifacts_page(server: str, experiment_id: str, run_id: str) -> str:
    run = f"{server.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"
    return f"{run}/artifacts?workflowType=machine_learning"


def prepared_view(
    sweep: str | None = None,
    params: Sequence[str] = (),
    numbers: Sequence[str] = (),
    axes: Sequence[str] = (),
    score: str = "bleu",
) -> dict[str, Any]:
    """A view with metrics as columns, best score first, and charts of the score against its costs.

    sweep: only its runs. params: settings shown as columns. numbers: settings to plot the score
    against. axes: of the parallel coordinates, which omit a run that lacks one of them.
    """
    # MLflow sorts columns by name: in a sweep show only as many as fit into any window.
    metrics = [score, *COSTS] if sweep else list(dict.fromkeys([score, *VIEW_METRICS]))
    columns = [f"params.`{name}`" for name in params] + [f"metrics.`{name}`" for name in metrics]
    charts = [_scatter({"key": number, "type": "PARAM"}, score) for number in numbers]
    charts += [_scatter({"key": cost, "type": "METRIC"}, score) for cost in COSTS]
    sections = [_section(FIGURES, f"Sweep {sweep}" if sweep else "Quality and cost", columns=2)]
    if axes:
        sections.append(_section(PARALLEL, "All settings and figures", columns=1))
        charts.append(
            {
                "uuid": "parallel coordinates",
                "type": "PARALLEL",
                "selectedParams": list(axes),
                "selectedMetrics": ["compression_ratio", "step_time_s", score],
                **_shown(PARALLEL),
            }
        )
    return {
        "orderByKey": f"metrics.`{score}`",
        "orderByAsc": score in LESS_IS_BETTER,
        "searchFilter": f"tags.sweep = '{sweep}'" if sweep else "",
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": columns if sweep else [*columns, "tags.`sweep`"],
        "runsExpanded": {},
        "runsPinned": [],
        "runsHidden": [],
        "runsHiddenMode": "SHOW_ALL",  # else charts show the first 10
        "groupBy": None,
        "hideEmptyCharts": True,
        "useGroupedValuesInCharts": True,
        "globalLineChartConfig": {},
        "isAccordionReordered": True,
        "compareRunSections": sections,
        "compareRunCharts": charts,
    }


def _scatter(x: dict[str, str], score: str) -> dict[str, Any]:
    return {
        "uuid": f"{score} against {x['key']}",
        "type": "SCATTER",
        "xaxis": x,
        "yaxis": {"key": score, "type": "METRIC"},
        **_shown(FIGURES),
    }


def _shown(section: str) -> dict[str, Any]:
    return {
        "metricSectionId": section,
        "runsCountToCompare": 100,
        "deleted": False,
        "isGenerated": False,
    }


def _section(key: str, name: str, columns: int) -> dict[str, Any]:
    return {
        "uuid": key,
        "name": name,
        "columns": columns,
        "display": True,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
    }

"""Names and values of a run's metrics and parameters for a tracker. Pure; sends nothing.

Curves over steps are `train/…`, `wan/…`, `dev/…`, `test/…`; final values have plain names (`bleu`,
`step_time_s`), so a table of runs shows one value each and charts are grouped by prefix.
"""

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any

from xcloud.record.events import MEMORY, Event, StepTotals

# Limits of MLflow 3.17 (mlflow/utils/validation.py).
MAX_KEY_CHARACTERS = 250
MAX_VALUE_CHARACTERS = 6000


def step_metrics(totals: StepTotals) -> dict[str, float]:
    """The values of one step for the curves of training."""
    metrics: dict[str, float] = {"train/step_s": totals.step_s}
    for name in ("loss", "learning_rate", "grad_norm"):
        if (value := getattr(totals, name)) is not None:
            metrics[f"train/{name}"] = value
    for name, value in totals.values.items():
        metrics[f"train/{name}"] = value
    for kind in ("compute_s", "codec_s", "waiting_s"):
        for cloud, seconds in totals.mean_s(kind).items():
            metrics[f"train/{kind}_{cloud}"] = seconds
    for kind, num_bytes in totals.sent.items():
        if num_bytes:
            metrics[f"wan/bytes_{kind}"] = num_bytes
    return _legal(metrics)


def quality_metrics(event: Event) -> dict[str, float]:
    """The curve of a split's scores, from a "quality" event; its step is event["step"]."""
    return _legal({f"{event['split']}/{name}": value for name, value in event["values"].items()})


def is_score(key: str) -> bool:
    """Whether a curve is one of quality_metrics."""
    return "/" in key and not key.startswith(("train/", "wan/"))


def final_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The values of summary.json that a table of runs compares, without nulls."""
    step_time_s = summary.get("step_time_s", {})
    ratio = summary.get("compression_ratio", {})
    metrics = {
        **summary.get("quality", {}),
        "step_time_s": step_time_s.get("median"),
        "step_time_p90_s": step_time_s.get("p90"),
        "compression_ratio": ratio.get("total"),
        **{f"compression_ratio_{kind}": ratio[kind] for kind in ratio if kind != "total"},
    }
    for name in ("", "_gradient", "_activation"):
        metrics[f"label_leak_auc{name}"] = summary.get(f"label_leak_auc{name}")
    for name in ("token_recovery", "token_recovery_baseline"):
        metrics[name] = summary.get(name)
        metrics[f"averaging_{name}"] = summary.get(f"averaging_{name}")
    metrics |= ratio_metrics(summary)
    metrics["predicted_step_time_s"] = summary.get("predicted_step_time_s")
    metrics["epsilon"] = (summary.get("privacy") or {}).get("epsilon")
    metrics["averaging_order_recovery"] = summary.get("averaging_order_recovery")
    if summary.get("num_resumes"):
        for name in ("num_resumes", "num_steps_done_twice", "goodput"):
            metrics[name] = summary.get(name)
    for name in ("final_loss", "bubble_ratio", "samples_per_s", "tokens_per_s", "num_steps"):
        metrics[name] = summary.get(name)
    metrics["num_skipped_updates"] = summary.get("num_skipped_updates") or None
    for name in ("compute_s", "codec_s", "waiting_s", "wan_bytes_per_step", "link_utilisation"):
        for part, value in summary.get(name, {}).items():
            metrics[f"{name}_{part}"] = value
    for rank in summary.get("memory", ()):
        for name in MEMORY:
            metrics[f"memory_{name}_rank{rank['rank']}"] = rank.get(name)
    for name in ("precision", "recall", "bytes_per_token", "num_skipped"):
        metrics[name] = summary.get("feed", {}).get(name)
    return _legal({name: value for name, value in metrics.items() if value is not None})


def ratio_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Of a point that was timed together with others of its sweep; else empty."""
    found = summary.get("step_time_ratio") or {}
    names = {"ratio": "", "low": "_low", "high": "_high"}
    return {f"step_time_ratio{names[key]}": found[key] for key in names if key in found}


def flatten(params: Mapping[str, object]) -> dict[str, str]:
    """{"compression": {"forward": {"rate": 0.6}}} -> {"compression.forward.rate": "0.6"}.

    A list of plain values is one value, in JSON; a list of mappings (clouds) is numbered. Values
    are truncated to 6000 characters: the complete file is logged as an artifact.
    """
    return {legal_name(name): str(value)[:MAX_VALUE_CHARACTERS] for name, value in _leaves(params)}


def legal_name(name: str) -> str:
    """The closest name that MLflow accepts: letters, digits, `_ - . / space`, no path tricks.

    No colon either, which it refuses on Windows.
    """
    legal = posixpath.normpath(re.sub(r"[^\w\-. /]", "_", name)).strip("/ ")
    legal = re.sub(r"^\.+", "_", legal)  # "." and ".." would be folders
    return legal[:MAX_KEY_CHARACTERS].rstrip("/ ") or "_"


def _legal(metrics: Mapping[str, float]) -> dict[str, float]:
    return {legal_name(name): float(value) for name, value in metrics.items()}


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    prefix = f"{name}." if name else ""
    if isinstance(value, Mapping) and (value or not name):
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}{key}")
    elif isinstance(value, list | tuple):
        if any(isinstance(item, Mapping) for item in value):
            for index, item in enumerate(value):
                yield from _leaves(item, f"{prefix}{index}")
        else:
            yield name, json.dumps(value, ensure_ascii=False, default=str)
    else:
        yield name, value

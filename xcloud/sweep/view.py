"""Prepare a sweep's page in MLflow and print its links. Never fails a sweep."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from xcloud.record.mlflow_store import Store, prepare_environment
from xcloud.record.mlflow_view import artifacts_page, page, prepared_view, sweep_key, ui_command
from xcloud.record.tracking import Tracker
from xcloud.sweep.points import CUT_LAYER, CUT_RANK, Settings, varying

MOST_PARAMS = 6  # columns; more do not fit a window
TIMEOUT_S = 30.0

log = logging.getLogger(__name__)


def view_of(sweep: str, settings: Sequence[Settings], score: str = "bleu") -> dict[str, Any]:
    """Columns and charts of the settings that differ. A setting that only some points have is
    shown only if it is a number that varies (a compressor's rate); the label covers the rest."""
    shown, numbers = [], []
    for key in varying(settings):
        values = [s[key] for s in settings if s.get(key) is not None]
        is_number = all(_is_number(value) for value in values) and len(set(map(str, values))) > 1
        if key != "seed" and (is_number or len(values) == len(settings)):
            shown.append(key)
            numbers += [key] if is_number else []
    shown = shown[:MOST_PARAMS]
    seed = ["seed"] if "seed" in varying(settings) else []
    # The unsplit model has no cut layer, so it is not drawn in the parallel coordinates.
    cut = [key for key in (CUT_LAYER, CUT_RANK) if key in shown]
    everywhere = [key for key in shown if all(s.get(key) is not None for s in settings)]
    everywhere = [*cut, *(key for key in everywhere if key not in cut)]
    return prepared_view(
        sweep,
        params=["label", *shown, *seed],
        numbers=[key for key in numbers if key in shown],
        axes=[*([] if cut else ["label"]), *everywhere, *seed],
        score=score,
    )


def prepare(
    sweep: str,
    tracker: Tracker,
    settings: Sequence[Settings],
    score: str = "bleu",
    report: Sequence[Path] = (),
) -> Callable[[], list[str]]:
    """Start writing a sweep's page; call the result to wait for it and get its links.

    report: tables and pictures to log as artifacts.
    """
    store = tracker.store
    if store is None:
        return list
    links: list[str] = []

    def write() -> None:
        try:
            prepare_environment()
            experiment_id = store.write_view(sweep_key(sweep), view_of(sweep, settings, score))
            found = _links(store, sweep, experiment_id)
            if report:
                run_id = store.keep_report(sweep, report)
                place = artifacts_page(store.server, experiment_id, run_id)
                found.insert(2, f"MLflow report  {place}")
            links.extend(found)
        except Exception as error:  # MLflow may be down or refuse; the sweep goes on.
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            links.append(f"MLflow: no page could be prepared: {reason}")
            log.debug("no page for sweep %s", sweep, exc_info=True)

    thread = threading.Thread(target=write, name="sweep page", daemon=True)
    thread.start()

    def wait() -> list[str]:
        thread.join(TIMEOUT_S)
        return list(links) or [f"MLflow: no answer within {TIMEOUT_S:g} s"]

    return wait


def _links(store: Store, sweep: str, experiment_id: str) -> list[str]:
    server = store.server
    links = [
        f"MLflow table   {page(server, experiment_id, sweep_key(sweep))}",
        f"MLflow charts  {page(server, experiment_id, sweep_key(sweep), charts=True)}",
    ]
    if store.uri is None:
        links.append(f"served by      {ui_command(store.root)} --sweep {sweep}")
    return links


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

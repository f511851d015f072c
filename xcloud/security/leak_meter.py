"""Measure how much text and labels an honest-but-curious cloud recovers from what it saw: run
attacks.py on the observations of observer.py, after training (docs/privacy.md, section 3).

Labels, for every cloud that may not see them, from each kind of message it received or computed:
    norm, direction, spectral, probe -> AUC, 0.5 = nothing leaks. Several classes: mean of one
    against the rest. A numeric label: above its median or not. A cloud that holds the text is
    judged by gradients only: activations show it nothing that its text does not.
Text, for every cloud that may not see it, from activations it received:
    linear and network inverter guess each row's token -> fraction correct, without special
    tokens; the baseline is always the most frequent one.
Averaging, for every replica that sees gradients or weight changes of another one: which tokens and
    texts they were made from, guessed by gradient_attacks.py (F1 of distinct tokens, ROUGE-2).
    Also where all replicas may read all texts: it says what one without them would learn.
Attacks that learn are fitted on half of the samples (by sample, not by row) and judged on the
other half. Each figure is the largest over attacks and messages, so a little above 0.5 by chance
if samples are few. A low figure is no proof of privacy.

For a run on several machines, first copy the observations folders into one, then
    python -m xcloud leak-meter RUN_DIR
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from xcloud.base.errors import DataError
from xcloud.security.attacks import (
    auc,
    direction_attack,
    linear_inverter,
    network_inverter,
    norm_attack,
    probe,
    score,
    spectral_attack,
)
from xcloud.security.defences import LABEL
from xcloud.security.observer import GUESS, OBSERVATIONS_DIR, STEPS, TRUTH, Rows, Stream

SUMMARY_FILE = "summary.json"
MAX_SAMPLES = 4000
MAX_ROWS = 8000
FEWEST_SAMPLES = 20


Found = dict[str, dict[str, dict[str, float]]]  # cloud -> message -> attack or figure


@dataclass
class _Notes:
    """The observations of all ranks: what each cloud saw, and the truth; of each sample the rows
    of its newest message."""

    seen: dict[str, dict[Stream, dict[int, Tensor]]] = field(default_factory=dict)
    holds: dict[str, set[str]] = field(default_factory=dict)
    truth: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    special_ids: dict[str, list[int]] = field(default_factory=dict)
    guesses: dict[str, dict[str, Rows]] = field(default_factory=dict)  # cloud -> "replica.attack"
    batches: dict[tuple[int, int], set[int]] = field(default_factory=dict)  # replica, step -> ids
    covers: int = 1


def measure(run_dir: Path) -> dict[str, Any]:
    """For summary.json: the figures (None if there is nothing to recover), and under "leakage" the
    attacks that they come from, on labels, text and averaging, by cloud and message.

    Raises DataError if observations are missing, naming the ranks.
    """
    notes = _read(run_dir)
    label, text, averaging = _labels(notes), _texts(notes), _averaging(notes)

    def auc_of(kind: str) -> float | None:
        aucs = [value for by_message in label.values() for message, entry in by_message.items()
                if kind in message
                for name, value in entry.items() if name != "num_samples"]  # fmt: skip
        return max(aucs, default=None)

    recoveries = [(max(e["linear"], e["network"]), e["baseline"]) for e in _entries(text)]
    guessed = [(e["tokens"], e["baseline"]) for e in _entries(averaging)]
    recovery = max(recoveries, key=lambda pair: pair[0], default=(None, None))
    averaged = max(guessed, key=lambda pair: pair[0], default=(None, None))
    return {
        "label_leak_auc": auc_of(""),
        "label_leak_auc_gradient": auc_of(" gradient"),
        "label_leak_auc_activation": auc_of(" activation"),
        "token_recovery": recovery[0],
        "token_recovery_baseline": recovery[1],
        "averaging_token_recovery": averaged[0],
        "averaging_token_recovery_baseline": averaged[1],
        "averaging_order_recovery": max(
            (e["order"] for e in _entries(averaging) if "order" in e), default=None
        ),
        "leakage": {"label": label, "text": text, "averaging": averaging},
    }


def _entries(found: Found) -> Iterator[dict[str, float]]:
    return (entry for by_message in found.values() for entry in by_message.values())


def forget(run_dir: Path) -> None:
    """Delete the observations: they hold text and labels."""
    shutil.rmtree(run_dir / OBSERVATIONS_DIR, ignore_errors=True)


def _read(run_dir: Path) -> _Notes:
    notes, parts, texts = _Notes(), dict[tuple[str, str], list[Rows]](), dict[str, list[Rows]]()
    files = sorted((run_dir / OBSERVATIONS_DIR).glob("rank*.safetensors"))
    if not files:
        raise DataError(
            f"there are no observations in {run_dir / OBSERVATIONS_DIR}; run with "
            "security/meter=attack security.meter.keep=true, over more than one cloud"
        )
    found, num_ranks = set(), 0
    for path in files:
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["about"])
            found.add(about["rank"])
            num_ranks = about["num_ranks"]
            notes.holds.setdefault(about["cloud"], set()).update(about["holds"])
            notes.special_ids |= about["special_ids"]
            notes.covers = about["covers"]
            for name in sorted({key.rsplit("/", 1)[0] for key in file.keys()}):
                rows = Rows(*(file.get_tensor(f"{name}/{part}") for part in Rows._fields))
                kind, _, rest = name.partition(".")
                if kind == TRUTH:
                    texts.setdefault(rest, []).append(rows)
                elif kind == GUESS:
                    notes.guesses.setdefault(about["cloud"], {})[rest] = rows
                elif kind == STEPS:
                    for sample, step in zip(rows.ids.tolist(), rows.rows.tolist(), strict=True):
                        notes.batches.setdefault((about["replica"], step), set()).add(sample)
                else:
                    parts.setdefault((about["cloud"], name), []).append(rows)
    notes.truth = {name: dict(Rows.join(some).pieces()) for name, some in texts.items()}
    for (cloud, name), some in parts.items():
        newest = dict(Rows.join(some).pieces())
        notes.seen.setdefault(cloud, {})[Stream.parse(name)] = newest
    if missing := sorted(set(range(num_ranks)) - found):
        raise DataError(
            f"{run_dir / OBSERVATIONS_DIR} lacks the observations of rank "
            f"{', '.join(map(str, missing))}; copy the {OBSERVATIONS_DIR} folders of all machines "
            "into one and run python -m xcloud leak-meter RUN_DIR"
        )
    return notes


def _hidden(notes: _Notes, field: str) -> Iterator[tuple[str, Stream, dict[int, Tensor]]]:
    """Cloud, kind of message and its rows by sample, of clouds that may not see a field."""
    for cloud, streams in notes.seen.items():
        if field not in notes.holds[cloud]:
            for stream in sorted(streams):
                yield cloud, stream, streams[stream]


def _labels(notes: _Notes) -> Found:
    """attack -> AUC."""
    if LABEL not in notes.truth:
        return {}  # not known here, or spans or tokens, which are no classes
    truth, texts = notes.truth[LABEL], notes.truth.keys() - {LABEL}
    results: Found = {}
    for cloud, stream, samples in _hidden(notes, LABEL):
        if stream.direction == "forward" and notes.holds[cloud] & texts:
            continue
        if (aucs := _attack_labels(samples, truth)) is not None:
            results.setdefault(cloud, {})[str(stream)] = aucs
    return results


def _attack_labels(
    samples: dict[int, Tensor], truth: dict[int, Tensor]
) -> dict[str, float] | None:
    ids = _chosen([i for i in samples if i in truth], MAX_SAMPLES)
    if len(ids) < FEWEST_SAMPLES:
        return None
    labels = torch.cat([truth[i] for i in ids])
    if labels.is_floating_point():
        labels = (labels > labels.median()).long()
    values, classes = torch.unique(labels, return_inverse=True)
    if len(values) < 2:
        return None
    rows = [samples[i].double() for i in ids]
    norms = torch.stack([r.norm() for r in rows])
    # A classifier's gradient is in the first row or in the mean of all rows: try both.
    views = {"first": torch.stack([r[0] if len(r) else r.new_zeros(r.shape[1]) for r in rows]),
             "sum": torch.stack([r.sum(0) for r in rows])}  # fmt: skip
    features = torch.cat([*views.values(), norms[:, None], norms.log1p()[:, None]], 1)
    is_known = torch.arange(len(ids)) % 2 == 0
    scores = probe(features, classes, is_known, len(values))
    found: dict[str, list[float]] = {"norm": [], "direction": [], "spectral": [], "probe": []}
    for number in range(1 if len(values) == 2 else 0, len(values)):
        positive = classes == number
        found["norm"].append(norm_attack(norms, positive))
        found["direction"].append(max(direction_attack(v, positive) for v in views.values()))
        found["spectral"].append(max(spectral_attack(v, positive) for v in views.values()))
        margin = scores[:, number] - scores.logsumexp(1)
        found["probe"].append(auc(margin, positive[~is_known]))
    means = {name: _mean(values_of) for name, values_of in found.items()}
    return {**{k: round(v, 4) for k, v in means.items() if v == v}, "num_samples": len(ids)}


def _texts(notes: _Notes) -> Found:
    """linear, network, baseline: shares of tokens."""
    results: Found = {}
    for text in sorted(notes.truth.keys() - {LABEL}):
        truth = notes.truth[text]
        for cloud, stream, samples in _hidden(notes, text):
            if (stream.direction, stream.how) != ("forward", "received"):
                continue
            shares = _invert(samples, truth, notes.special_ids.get(text, []))
            if shares is not None:
                results.setdefault(cloud, {})[f"{text} from {stream}"] = shares
    return results


def _invert(
    samples: dict[int, Tensor], truth: dict[int, Tensor], special_ids: Sequence[int]
) -> dict[str, float] | None:
    """None if rows do not match the text's tokens one to one (another field, or pooled)."""
    ids = [i for i in samples if i in truth and len(samples[i]) == len(truth[i])]
    if len(ids) < FEWEST_SAMPLES or 2 * len(ids) < sum(i in truth for i in samples):
        return None
    ids = _chosen(ids, MAX_SAMPLES)
    tokens = torch.cat([truth[i] for i in ids])
    rows = torch.cat([samples[i] for i in ids])
    is_known = torch.cat([torch.full((len(truth[i]),), k % 2 == 0) for k, i in enumerate(ids)])
    wanted = ~torch.isin(tokens, torch.tensor(list(special_ids), dtype=tokens.dtype))
    tokens, rows, is_known = (x[wanted][:MAX_ROWS] for x in (tokens, rows, is_known))
    unknown = tokens[~is_known]
    if not len(unknown) or not bool(is_known.any()):
        return None

    def share(guessed: Tensor) -> float:
        return round(float((unknown == guessed).double().mean()), 4)

    return {
        "linear": share(linear_inverter(rows, tokens, is_known)),
        "network": share(network_inverter(rows, tokens, is_known)),
        "baseline": share(torch.bincount(tokens[is_known]).argmax()),  # who sees nothing
        "num_rows": len(unknown),
    }


def _averaging(notes: _Notes) -> Found:
    """By attack on which replica: scores."""
    results: Found = {}
    fields = [name for name in notes.truth if name in notes.special_ids]
    if len(fields) != 1:
        return results  # an averaging is attacked where one text is read
    (text,) = fields
    special = set(notes.special_ids[text])

    def words_in(tokens: Tensor) -> list[int]:
        return [token for token in tokens.tolist() if token not in special]

    words = {sample: words_in(rows) for sample, rows in notes.truth[text].items()}
    for cloud, guesses in notes.guesses.items():
        for name, rows in sorted(guesses.items()):
            replica, _, attack = name.partition(".")
            guessed: dict[int, list[list[int]]] = {}
            for step, tokens in rows.pieces():
                guessed.setdefault(step, []).append(words_in(tokens))
            batches = {step: _batch(notes, int(replica), step) for step in guessed}
            judged = set[int]().union(*batches.values())
            truth = {
                step: [words[i] for i in sorted(ids)]
                for step, ids in batches.items()
                if ids and ids <= words.keys()
            }
            others = [tokens for sample, tokens in words.items() if sample not in judged]
            if (found := score(attack, guessed, truth, others)) is not None:
                in_words = f"{attack} of replica {replica}"
                results.setdefault(cloud, {})[in_words] = found
    return results


def _batch(notes: _Notes, replica: int, step: int) -> set[int]:
    """The samples that the replica trained on in the updates that its contribution at `step` sums
    up; none where not all of them were noted."""
    steps = range(step - notes.covers + 1, step + 1)
    batches = [notes.batches.get((replica, number), set()) for number in steps]
    return set[int]().union(*batches) if all(batches) else set()


def _chosen(ids: Sequence[int], most: int) -> list[int]:
    """At most `most` ids, in an order independent of their content."""
    generator = torch.Generator().manual_seed(0)
    ordered = sorted(ids)
    order = torch.randperm(len(ordered), generator=generator)[:most]
    return [ordered[k] for k in order.tolist()]


def _mean(values: Sequence[float]) -> float:
    kept = [value for value in values if not math.isnan(value)]
    return sum(kept) / len(kept) if kept else math.nan


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m xcloud leak-meter")
    parser.add_argument("run_dir", type=Path, help="run folder with the observations of all ranks")
    run_dir: Path = parser.parse_args(arguments).run_dir
    try:
        leakage = measure(run_dir)
    except DataError as error:
        print(f"xcloud: {error}", file=sys.stderr)
        return 1
    print(json.dumps(leakage, indent=2, ensure_ascii=False))
    summary_path = run_dir / SUMMARY_FILE
    if summary_path.is_file():
        summary = json.loads(summary_path.read_text("utf-8"))
        text = json.dumps({**summary, **leakage}, indent=2, ensure_ascii=False)
        summary_path.write_text(text + "\n", encoding="utf-8")
    return 0

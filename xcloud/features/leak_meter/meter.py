"""Measure how much text and labels an honest-but-curious cloud recovers from what it saw: attack
the observations of observers.py, after training (docs/privacy.md). What replicas
average is attacked by experiments/gradient_leaks (meter.py there).

Shapes of attacks: N samples or rows, D features, C classes.

Labels, for every cloud that may not see them, from each kind of message it received or computed:
    norm, direction, spectral, probe -> AUC, 0.5 = nothing leaks. Several classes: mean of one
    against the rest. A numeric label: above its median or not. A cloud that holds the text is
    judged by gradients only.
Text, for every cloud that may not see it, from activations it received:
    linear and network inverter guess each row's token -> fraction correct, without special
    tokens; the baseline is always the most frequent one.
Attacks that learn are fitted on half of the samples and judged on the other half. Each figure is
the largest over attacks and messages. Deterministic.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from safetensors import safe_open
from torch import Tensor

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import DataError
from xcloud.base.run_folder import check_is_folder, owned
from xcloud.base.settings import Positive, settings
from xcloud.base.terminal import say
from xcloud.security.defences import LABEL

OBSERVATIONS_DIR = "observations"
TRUTH = "truth"
SUMMARY_FILE = "summary.json"
MAX_SAMPLES = 4000
MAX_ROWS = 8000
MIN_SAMPLES = 20  # with fewer an AUC says little
_NUM_KNOWN_POSITIVES = 16  # of which the attacker is told, one by one
_PROBE_PENALTY = 1e-2


@settings("security.meter")
class LeakMeter:
    """The settings of `security.meter`.

    last_steps: the number of updates whose messages are kept, the last ones of training.
    max_rows: the number of rows kept of each kind of message, the newest.
    keep: leave the observations, which hold plain text and labels, in each rank's run folder; by
        default they are deleted once measured.
    """

    last_steps: Positive = 50
    max_rows: Annotated[int, Field(ge=100)] = 20_000
    keep: bool = False

    def measure(self, run_dir: Path) -> dict[str, Any]:
        """Measure a finished run, and delete what was observed unless it is to be kept."""
        figures = measure(run_dir)
        if not self.keep:
            shutil.rmtree(run_dir / OBSERVATIONS_DIR, ignore_errors=True)
        return figures


class CrossedStream(NamedTuple):
    """One kind of message as one rank saw it.

    direction: forward or backward.
    boundary: the number of the stage before it.
    how: "received" from another cloud, or "sent" to it after it was computed here.
    """

    direction: str
    boundary: int
    how: str
    field: str

    @property
    def name(self) -> str:
        return ".".join(map(str, self))

    @classmethod
    def parse(cls, name: str) -> CrossedStream:
        direction, boundary, how, field = name.split(".", 3)
        return cls(direction=direction, boundary=int(boundary), how=how, field=field)

    def __str__(self) -> str:
        kind = "activation" if self.direction == "forward" else "gradient"
        return f"{self.field} {kind} of boundary {self.boundary}, {self.how}"


class CrossedRows(NamedTuple):
    """The rows that crossed, of several samples; a sample may come more than once.

    ids, counts: [N].
    rows: [sum(counts), ...].
    """

    ids: Tensor
    counts: Tensor
    rows: Tensor

    @classmethod
    def join(cls, parts: Iterable[CrossedRows]) -> CrossedRows:
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Return each sample's id and rows, in the order of messages."""
        split = torch.split(self.rows, self.counts.tolist())
        return zip(self.ids.tolist(), split, strict=True)


Found = dict[str, dict[str, dict[str, float]]]  # cloud -> message -> attack or figure


@dataclass
class Observations:
    """The rows that each cloud saw and the truth; of each sample those of its newest message."""

    seen: dict[str, dict[CrossedStream, dict[int, Tensor]]] = field(default_factory=dict)
    holds: dict[str, set[str]] = field(default_factory=dict)
    truth: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    special_ids: dict[str, list[int]] = field(default_factory=dict)


def measure(run_dir: Path) -> dict[str, Any]:
    """Return the figures for summary.json, and under "leakage" the attacks that they come from.

    A figure is None if there is nothing to recover. Raises DataError if observations are missing,
    naming the ranks.
    """
    notes = read_observations(run_dir)
    label = _labels(notes)
    text = _texts(notes)

    def auc_of(kind: str) -> float | None:  # of messages with this word in their name
        attacks = [e for by in label.values() for message, e in by.items() if kind in message]
        aucs = [auc for e in attacks for name, auc in e.items() if name != "num_samples"]
        return max(aucs, default=None)

    # The best attack counts, beside the baseline of the same message: which tokens are frequent
    # differs from text to text.
    recoveries = [(max(e["linear"], e["network"]), e["baseline"]) for e in entries(text)]
    recovery = max(recoveries, key=lambda pair: pair[0], default=(None, None))
    return {
        "label_leak_auc": auc_of(""),
        "label_leak_auc_gradient": auc_of(" gradient"),
        "label_leak_auc_activation": auc_of(" activation"),
        "token_recovery": recovery[0],
        "token_recovery_baseline": recovery[1],
        "leakage": {"label": label, "text": text},
    }


def entries(attacks: Found) -> Iterator[dict[str, float]]:
    return (entry for by_message in attacks.values() for entry in by_message.values())


def read_observations(run_dir: Path) -> Observations:
    notes = Observations()
    parts = dict[tuple[str, str], list[CrossedRows]]()
    files = sorted((run_dir / OBSERVATIONS_DIR).glob("rank*.safetensors"))
    if not files:
        raise DataError(
            f"there are no observations in {run_dir / OBSERVATIONS_DIR}; run with "
            "security/meter=attack security.meter.keep=true, over more than one cloud"
        )
    ranks = set()
    num_ranks = 0
    for path in files:
        with safe_open(path, "pt") as file:
            about = parsed_json(file.metadata()["about"])
            ranks.add(about["rank"])
            num_ranks = about["num_ranks"]
            # Ranks of one cloud share what they see: they are one attacker.
            notes.holds.setdefault(about["cloud"], set()).update(about["holds"])
            notes.special_ids |= about["special_ids"]
            for name in sorted({key.rsplit("/", 1)[0] for key in file.keys()}):
                rows = CrossedRows(
                    *(file.get_tensor(f"{name}/{part}") for part in CrossedRows._fields)
                )
                whose = about["cloud"] if not name.startswith(f"{TRUTH}.") else TRUTH
                parts.setdefault((whose, name), []).append(rows)
    for (cloud, name), some in parts.items():
        # A dict keeps the last: of a sample that crossed several times, its newest rows.
        newest = dict(CrossedRows.join(some).pieces())
        if name.startswith(f"{TRUTH}."):
            notes.truth[name.removeprefix(f"{TRUTH}.")] = newest
        else:
            notes.seen.setdefault(cloud, {})[CrossedStream.parse(name)] = newest
    if missing := sorted(set(range(num_ranks)) - ranks):
        raise DataError(
            f"{run_dir / OBSERVATIONS_DIR} lacks the observations of rank "
            f"{', '.join(map(str, missing))}; copy the {OBSERVATIONS_DIR} folders of all machines "
            "into one and run python -m xcloud leak-meter RUN_DIR"
        )
    return notes


def _hidden(
    notes: Observations, field: str
) -> Iterator[tuple[str, CrossedStream, dict[int, Tensor]]]:
    """Yield cloud, kind of message and its rows by sample, of clouds that may not see a field."""
    for cloud, streams in notes.seen.items():
        if field not in notes.holds[cloud]:
            for stream in sorted(streams):
                yield cloud, stream, streams[stream]


def _labels(notes: Observations) -> Found:
    if LABEL not in notes.truth:
        return {}  # not known here, or spans or tokens, which are no classes
    truth = notes.truth[LABEL]
    texts = notes.truth.keys() - {LABEL}
    results: Found = {}
    for cloud, stream, samples in _hidden(notes, field=LABEL):
        # Who holds the text could read the label off it without any message.
        if stream.direction == "forward" and notes.holds[cloud] & texts:
            continue
        if (aucs := _attack_labels(samples, truth)) is not None:
            results.setdefault(cloud, {})[str(stream)] = aucs
    return results


def _attack_labels(
    samples: dict[int, Tensor], truth: dict[int, Tensor]
) -> dict[str, float] | None:
    ids = _chosen([i for i in samples if i in truth], max_ids=MAX_SAMPLES)
    if len(ids) < MIN_SAMPLES:
        return None
    labels = torch.cat([truth[i] for i in ids])
    if labels.is_floating_point():
        # A numeric label: above the median or not.
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
    # `_chosen` has shuffled the ids, so every second one is a fair half.
    is_known = torch.arange(len(ids)) % 2 == 0
    scores = probe(features, classes_N=classes, is_known_N=is_known, num_classes=len(values))
    aucs_of: dict[str, list[float]] = {"norm": [], "direction": [], "spectral": [], "probe": []}
    # Of two classes one suffices: the other's AUC is the same.
    for number in range(1 if len(values) == 2 else 0, len(values)):
        positive = classes == number
        aucs_of["norm"].append(norm_attack(norms, is_positive_N=positive))
        aucs_of["direction"].append(
            max(direction_attack(v, is_positive_N=positive) for v in views.values())
        )
        aucs_of["spectral"].append(
            max(spectral_attack(v, is_positive_N=positive) for v in views.values())
        )
        # The log-probability of this class, normalized: scores of classes that were never seen are
        # -inf.
        margin = scores[:, number] - scores.logsumexp(1)
        # The other attacks learn nothing, or one sample: they are judged on all.
        aucs_of["probe"].append(auc(margin, is_positive_N=positive[~is_known]))
    kept = {name: [v for v in aucs if not math.isnan(v)] for name, aucs in aucs_of.items()}
    means = {name: fmean(aucs) for name, aucs in kept.items() if aucs}
    return {**means, "num_samples": len(ids)}


def _texts(notes: Observations) -> Found:
    """Return the shares of tokens that are recovered: linear, network, baseline."""
    results: Found = {}
    for text in sorted(notes.truth.keys() - {LABEL}):
        truth = notes.truth[text]
        for cloud, stream, samples in _hidden(notes, field=text):
            if (stream.direction, stream.how) != ("forward", "received"):
                continue
            shares = _invert(samples, truth, special_ids=notes.special_ids.get(text, []))
            if shares is not None:
                results.setdefault(cloud, {})[f"{text} from {stream}"] = shares
    return results


def _invert(
    samples: dict[int, Tensor], truth: dict[int, Tensor], special_ids: Sequence[int]
) -> dict[str, float] | None:
    """Return the shares of tokens that attacks on these rows recover.

    None if rows do not match the text's tokens one to one (another field, or pooled).
    """
    ids = [i for i in samples if i in truth and len(samples[i]) == len(truth[i])]
    # Rows that match in number for a few samples only do so by chance.
    if len(ids) < MIN_SAMPLES or 2 * len(ids) < sum(i in truth for i in samples):
        return None
    ids = _chosen(ids, max_ids=MAX_SAMPLES)
    tokens = torch.cat([truth[i] for i in ids])
    rows = torch.cat([samples[i] for i in ids])
    is_known = torch.cat([torch.full((len(truth[i]),), k % 2 == 0) for k, i in enumerate(ids)])
    # Begin and end stand in every sample, and whoever guesses them has read nothing.
    wanted = ~torch.isin(tokens, torch.tensor(list(special_ids), dtype=tokens.dtype))
    tokens, rows, is_known = (x[wanted][:MAX_ROWS] for x in (tokens, rows, is_known))
    unknown = tokens[~is_known]
    if not len(unknown) or not bool(is_known.any()):
        return None

    def share(guessed: Tensor) -> float:
        return float((unknown == guessed).double().mean())

    return {
        "linear": share(linear_inverter(rows, tokens_N=tokens, is_known_N=is_known)),
        "network": share(network_inverter(rows, tokens_N=tokens, is_known_N=is_known)),
        "baseline": share(torch.bincount(tokens[is_known]).argmax()),  # who sees nothing
        "num_rows": len(unknown),
    }


def _chosen(ids: Sequence[int], max_ids: int) -> list[int]:
    """Return at most `max_ids` ids, in an order independent of their content."""
    ordered = sorted(ids)
    # A fixed seed: the same run has the same figures again, whatever the order of its messages.
    order = torch.randperm(len(ordered), generator=torch.Generator().manual_seed(0))
    return [ordered[k] for k in order[:max_ids].tolist()]


def auc(scores_N: Tensor, is_positive_N: Tensor) -> float:
    """Return the probability that a positive scores above a negative (a tie counts half).

    It is nan if either class is missing.
    """
    from sklearn.metrics import roc_auc_score

    if bool(is_positive_N.all()) or not bool(is_positive_N.any()):
        return math.nan
    return float(roc_auc_score(is_positive_N.numpy(), scores_N.nan_to_num().numpy()))


def norm_attack(norms_N: Tensor, is_positive_N: Tensor) -> float:
    """Return the AUC of the gradient norm (arXiv:2102.08504, section 3); its sign is given."""
    area = auc(norms_N, is_positive_N)
    return max(area, 1 - area)


def direction_attack(vectors_ND: Tensor, is_positive_N: Tensor) -> float:
    """Return the AUC of the cosine to a sample known to be positive, the mean over 16 (ibid.)."""
    unit = F.normalize(vectors_ND.double(), dim=1)
    positives = torch.nonzero(is_positive_N).flatten()
    # Spread over the run, since directions turn while the model learns.
    spread = torch.linspace(0, len(positives) - 1, _NUM_KNOWN_POSITIVES).long()
    areas = []
    for known in sorted({*positives[spread].tolist()}):
        others = torch.arange(len(unit)) != known
        areas.append(auc(unit[others] @ unit[known], is_positive_N=is_positive_N[others]))
    return fmean(areas)


def spectral_attack(vectors_ND: Tensor, is_positive_N: Tensor) -> float:
    """Return the AUC of the projection on the direction of largest variance.

    It uses no labels; the sign is given (Sun et al., arXiv:2203.01451, use it on activations).
    """
    from sklearn.decomposition import PCA

    projected = PCA(1, svd_solver="covariance_eigh").fit_transform(vectors_ND.double().numpy())
    area = auc(torch.from_numpy(projected[:, 0]), is_positive_N)
    return max(area, 1 - area)


def probe(features_ND: Tensor, classes_N: Tensor, is_known_N: Tensor, num_classes: int) -> Tensor:
    """Return log-probabilities [unknown, C] by a logistic regression on the known samples."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    known = features_ND[is_known_N].double()
    unknown = features_ND[~is_known_N].double()
    scores = torch.full((len(unknown), num_classes), -math.inf, dtype=torch.float64)
    seen = torch.unique(classes_N[is_known_N])
    if len(seen) == 1:
        scores[:, seen] = 0.0
        return scores
    # scikit-learn's C weighs the summed loss; the penalty here is one on the mean loss.
    strength = 1 / (2 * _PROBE_PENALTY * len(known))
    model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))
    model.fit(known.numpy(), classes_N[is_known_N].numpy())
    scores[:, seen] = torch.from_numpy(model.predict_log_proba(unknown.numpy()))
    return scores


def linear_inverter(rows_ND: Tensor, tokens_N: Tensor, is_known_N: Tensor) -> Tensor:
    """Return the token guessed for each unknown row by a linear discriminant.

    It has the tokens' mean rows, with the known rows' shrunk covariance.
    """
    known = rows_ND[is_known_N].double()
    seen = tokens_N[is_known_N]
    tokens, index, counts = torch.unique(seen, return_inverse=True, return_counts=True)
    means = torch.zeros(len(tokens), known.shape[1], dtype=torch.float64)
    means.index_add_(0, index, known)
    means /= counts[:, None]
    inside = known - means[index]
    covariance = inside.T @ inside / len(known)
    overall = (known - known.mean(0)).square().mean()
    # A token seen once has no spread of its own, so part of the overall variance is added.
    shrunk = covariance + (1e-2 * overall + 1e-12) * torch.eye(known.shape[1], dtype=torch.float64)
    directions = torch.linalg.solve(shrunk, means.T)  # [D, tokens]
    # log p(token) - 1/2 m' S^-1 m, with x' S^-1 m below: the discriminant of Gaussians with one
    # covariance S.
    offsets = torch.log(counts / len(known)) - 0.5 * (means.T * directions).sum(0)
    guessed: Tensor = tokens[(rows_ND[~is_known_N].double() @ directions + offsets).argmax(1)]
    return guessed


def network_inverter(rows_ND: Tensor, tokens_N: Tensor, is_known_N: Tensor) -> Tensor:
    """Return the token guessed for each unknown row by a network with one hidden layer."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    settings = {"batch_size": 256, "learning_rate_init": 3e-3, "max_iter": 12, "random_state": 0}
    network = make_pipeline(StandardScaler(), MLPClassifier(256, **settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # so few epochs are meant
        network.fit(rows_ND[is_known_N].float().numpy(), tokens_N[is_known_N].numpy())
    return torch.from_numpy(network.predict(rows_ND[~is_known_N].float().numpy()))


def main(arguments: Sequence[str] | None = None, meter: LeakMeter | None = None) -> None:
    """Measure a run on several machines, once their observations folders are copied into one."""
    parser = argparse.ArgumentParser(prog="python -m xcloud leak-meter")
    parser.add_argument("run_dir", type=Path, help="run folder with the observations of all ranks")
    run_dir: Path = parser.parse_args(arguments).run_dir
    check_is_folder(run_dir)
    # The folder may belong to a run that still writes its summary.
    with owned(run_dir):
        leakage = (meter or LeakMeter(keep=True)).measure(run_dir)
        summary_path = run_dir / SUMMARY_FILE
        if summary_path.is_file():
            summary = parsed_json(summary_path.read_text("utf-8"))
            text = json.dumps({**summary, **leakage}, indent=2, ensure_ascii=False)
            summary_path.write_text(text + "\n", encoding="utf-8")
    say(json.dumps(leakage, indent=2, ensure_ascii=False))

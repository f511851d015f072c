"""Figures as a person reads them: seconds, durations, bytes and bits a second in three digits;
scores with their names and decimals."""

from __future__ import annotations

import math
from collections.abc import Iterable

UNKNOWN = "-"

SCORE_NAMES = {
    "bleu": "BLEU",
    "chrf": "chrF",
    "accuracy": "accuracy",
    "f1": "F1",
    "macro_f1": "macro F1",
    "exact_match": "exact match",
    "matthews": "Matthews corr.",
    "pearson": "Pearson corr.",
    "spearman": "Spearman corr.",
    "perplexity": "perplexity",
    "reward_accuracy": "reward accuracy",
    "reward_margin": "reward margin",
    "chosen_reward": "chosen reward",
    "label_leak_auc": "label leak AUC",
    "token_recovery": "token recovery",
    "averaging_token_recovery": "token recovery from averages",
}
EVALUATED = "eval_"  # before TASK_METRIC: a score of lm-evaluation-harness
LEAKS = ("label_leak_auc", "token_recovery", "averaging_token_recovery")
REWARDS = ("reward_margin", "chosen_reward")
LESS_IS_BETTER = (*LEAKS, "perplexity", "loss", "replaced_loss")
# Shown beside a task's first score; not chrF, nor single languages of a multilingual task.
BESIDE_THE_FIRST = ("f1", "exact_match", "spearman", *LEAKS)


def human_seconds(seconds: float | None) -> str:
    """0.21 ms, 412 ms, 1.57 s."""
    if seconds is None:
        return UNKNOWN
    # From here on three digits would be 1000 ms.
    if seconds < 0.9995:
        return f"{_three_digits(1000 * seconds)} ms"
    return f"{_three_digits(seconds)} s"


def human_duration(seconds: float) -> str:
    """42 s, 13 min, 2 h 05 min."""
    if not math.isfinite(seconds):
        return "?"
    # Below 99.5 s a count of seconds is shorter than minutes.
    if seconds < 99.5:
        return f"{max(0, seconds):.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def human_bytes(num_bytes: float | None) -> str:
    """812 B, 393 kB, 1.57 MB: powers of 1000."""
    if num_bytes is None:
        return UNKNOWN
    if abs(num_bytes) < 999.5:
        return f"{num_bytes:.0f} B"
    # Rounded to three digits 999.6 kB is 1 MB.
    power = min(int(math.log10(abs(num_bytes) * 1.0005) // 3), 4)
    return f"{_three_digits(num_bytes / 1000**power)} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def human_bandwidth(bits_per_s: float) -> str:
    """200 kbit/s, 2.5 Gbit/s."""
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        # So that 999.9 Mbit/s, which would be shown as 1e+03, is 1 Gbit/s.
        if bits_per_s >= 0.9995 * size:
            return f"{bits_per_s / size:.3g} {unit}"
    return f"{bits_per_s / 1e3:.3g} kbit/s"


def human_percent(share: float | None, digits: int = 0) -> str:
    return UNKNOWN if share is None else f"{100 * share:.{digits}f} %"


def human_number(value: float | None, form: str) -> str:
    """form: a format such as ".3f"."""
    return UNKNOWN if value is None else format(value, form)


def _three_digits(value: float) -> str:
    size = abs(value)
    if size >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def score_name(name: str) -> str:
    return SCORE_NAMES.get(name, name)


def score_text(name: str, value: float) -> str:
    """41.92 for a score out of 100, 0.5731 for a leak."""
    # Leaks and scores of the harness are fractions of 1, losses and rewards are in nats; every
    # other score is out of 100.
    is_small = name in (*LEAKS, *REWARDS) or name.startswith(EVALUATED) or name.endswith("loss")
    return f"{value:.{4 if is_small else 2}f}"


def score_with_error(name: str, value: float | None, error: float | None) -> str:
    """41.92 ± 0.81."""
    if value is None:
        return UNKNOWN
    text = score_text(name, value)
    return text if error is None else f"{text} ± {score_text(name, value=error)}"


def shown_scores(names: Iterable[str]) -> list[str]:
    """The first score, and those of the others that fit into a table."""
    known = list(dict.fromkeys(names))
    return known[:1] + [
        name for name in known[1:] if name in BESIDE_THE_FIRST or name.startswith(EVALUATED)
    ]

"""Display names and decimals of scores."""

from __future__ import annotations

from collections.abc import Iterable

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
    "label_leak_auc": "label leak AUC",
    "token_recovery": "token recovery",
    "averaging_token_recovery": "token recovery from averages",
}
LEAKS = ("label_leak_auc", "token_recovery", "averaging_token_recovery")
LESS_IS_BETTER = (*LEAKS, "perplexity", "loss", "replaced_loss")
# Shown beside a task's first score; not chrF, nor single languages of a multilingual task.
BESIDE_THE_FIRST = ("f1", "exact_match", "spearman", *LEAKS)


def score_name(name: str) -> str:
    return SCORE_NAMES.get(name, name)


def score_digits(name: str) -> int:
    """Leaks are fractions of 1, losses are in nats; every other score is out of 100."""
    return 4 if name in LEAKS or name.endswith("loss") else 2


def score_text(name: str, value: float) -> str:
    """41.92 for a score out of 100, 0.5731 for a leak."""
    return f"{value:.{score_digits(name)}f}"


def shown_scores(names: Iterable[str]) -> list[str]:
    """The first score, and those of the others that fit into a table."""
    known = list(dict.fromkeys(names))
    return known[:1] + [name for name in known[1:] if name in BESIDE_THE_FIRST]

"""What git says of this checkout, asked once for each process that starts others.

Every run asks two or three times for its commit, and asking takes ten milliseconds: together a
twentieth of the tests' time. Nothing in the checkout changes while tests run.
"""

from __future__ import annotations

from pathlib import Path

from xcloud.base import project

ROOT = Path(__file__).resolve().parent.parent
_ask = project._git
_answers = dict[tuple[str, ...], str | None]()


def remembered(root: Path, *arguments: str) -> str | None:
    """In place of `project._git`. Other folders than the checkout are asked each time."""
    if root != ROOT:
        return _ask(root, *arguments)
    if arguments not in _answers:
        _answers[arguments] = _ask(root, *arguments)
    return _answers[arguments]


def use() -> None:
    """From here on, in this process and in those that are forked from it."""
    project._git = remembered
    project.commit()

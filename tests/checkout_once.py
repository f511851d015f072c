"""What this checkout says of itself, asked once in each process that starts others.

Every run asks git two or three times for its commit, and every rank reads the whole package for
its digests: together a fifteenth of the tests' time. Nothing in the checkout changes while tests
run.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xcloud.base import project
from xcloud.rank import agreement

ROOT = Path(__file__).resolve().parent.parent
_ask = project._git
_answers = dict[tuple[str, ...], str | None]()
_digests = cache(project.code_digests)


def answer_of_git(root: Path, *arguments: str) -> str | None:
    """In place of `project._git`. Other folders than the checkout are asked each time."""
    if root != ROOT:
        return _ask(root, *arguments)
    if arguments not in _answers:
        _answers[arguments] = _ask(root, *arguments)
    return _answers[arguments]


def digests() -> dict[str, str]:
    """In place of the `code_digests` that ranks compare."""
    return dict(_digests())


def use() -> None:
    """From here on, in this process and in those that are forked from it."""
    project._git = answer_of_git
    agreement.code_digests = digests
    project.commit()
    digests()

"""What becomes of a run that resumes with another value of a setting.

A setting says so where it is declared, by an Outcome in its annotation, or in a row of
features/checkpoints/resume.py: TABLE.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The consequence of a change between two attempts at a run.

    lost: the things that are lost by resuming.
    refused: the reason why the run cannot resume; "" if it can.
    is_equal: the result equals that of a run that was not interrupted, to the bit.
    needs_merge: the run resumes only from a step after which all replicas were equal.
    """

    lost: tuple[str, ...] = ()
    refused: str = ""
    is_equal: bool = False
    needs_merge: bool = False

    def __str__(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        words = "equal bits" if self.is_equal else "resumes"
        words += f", losing {'; '.join(self.lost)}" if self.lost else ""
        return words + (", from a merge of all parameters only" if self.needs_merge else "")


EQUAL = Outcome(is_equal=True)
GOES_ON = Outcome()

"""Scores of what one-way pre-training has found."""

import pytest

from xcloud.contracts.one_way import COUNTS, precision_recall


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ((3, 1, 9), {"precision": 0.75, "recall": 0.25}),
        ((0, 4, 2), {"precision": 0.0, "recall": 0.0}),
        ((0, 0, 2), {"recall": 0.0}),  # nothing was found, so no share of it was right
        ((0, 2, 0), {"precision": 0.0}),
        ((0, 0, 0), {}),
    ],
)
def test_precision_and_recall_are_shares_of_what_was_found_and_of_what_was_there(
    counts: tuple[int, int, int], found: dict[str, float]
) -> None:
    assert precision_recall(dict(zip(COUNTS, map(float, counts), strict=True))) == found

"""How the trained parameters of a rank are cut: into fragments that are merged in turn, and these
into shares that the ranks of a cloud carry across. Arithmetic on sizes; no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from xcloud.base.errors import ConfigError


def contiguous(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Positions 0..len(sizes) - 1 in `count` runs of about equal sum, none of them empty.

    Raises ConfigError if there are fewer sizes than runs.
    """
    if len(sizes) < count:
        raise ConfigError(
            f"strategy.averaging.fragments is {count}, but a rank of this job trains "
            f"{len(sizes)} tensors; set it to at most {len(sizes)}"
        )
    whole, done = sum(sizes), 0
    runs: list[list[int]] = [[]]
    for position, size in enumerate(sizes):
        runs_left, positions_left = count - len(runs), len(sizes) - position
        # The next run begins where its boundary is nearer to this tensor's start than to its end.
        is_due = (done + size / 2) * count >= whole * len(runs)
        if runs[-1] and runs_left and (is_due or positions_left <= runs_left):
            runs.append([])
        runs[-1].append(position)
        done += size
    return runs


def dealt(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Positions in `count` hands of about equal sum, the largest first; a hand may be empty."""
    hands: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for position in sorted(range(len(sizes)), key=lambda p: -sizes[p]):
        lightest = sums.index(min(sums))
        hands[lightest].append(position)
        sums[lightest] += sizes[position]
    return [sorted(hand) for hand in hands]


def offsets(every: int, count: int) -> list[int]:
    """At which remainder of step / every each of `count` fragments is merged: evenly spread, the
    last one at 0."""
    return [(number + 1) * every // count % every for number in range(count)]

"""The paper's formulas for equal stages on ranks of their own, flush (GPipe) order.

p stages, m micro-batches; tf, tb: forward and backward time of a micro-batch; tt: one transfer;
l: latency. Bubble ratio R = idle time / ideal computing time m(tf+tb).
Source: Pan et al., ZTE Technology Journal 2023(4), section 1.1, (1) and (2); (2') is derived.
"""

from __future__ import annotations


def bubble_of_a_free_link(p: int, m: int) -> float:
    """(1): R = (p-1)/m."""
    return (p - 1) / m


def bubble_of_blocking_transfers(p: int, m: int, tf: float, tb: float, tt: float) -> float:
    """(2): R = [(p-1)(tf+tb+2tt) + 2(m-1)tt] / (m(tf+tb)): sender and receiver wait while a
    message crosses. Exact for two stages; a middle stage of three or more waits twice for each
    micro-batch, on both its boundaries."""
    return ((p - 1) * (tf + tb + 2 * tt) + 2 * (m - 1) * tt) / (m * (tf + tb))


def step_of_overlapped_transfers(
    p: int, m: int, tf: float, tb: float, tt: float = 0.0, latency_s: float = 0.0
) -> float:
    """(2'): T = p(tf+tb) + 2(p-1)(tt+l) + (m-1)[max(tf,tt) + max(tb,tt)], in seconds: transfers
    overlap with computing and are carried one after the other in each direction of a boundary.
    One stage has no boundary: m(tf+tb)."""
    if p == 1:
        return m * (tf + tb)
    steady = max(tf, tt) + max(tb, tt)
    return p * (tf + tb) + 2 * (p - 1) * (tt + latency_s) + (m - 1) * steady

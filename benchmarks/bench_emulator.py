"""The emulated link against a real line of the same bandwidth and round trip, side by side.

    python -m benchmarks.bench_emulator [--mbit 100] [--rtt-ms 0 20 100 200]
        [--micro-batches 4 16] [--rounds 3] [--steps 15] [--tcp reno] [--sleep] [--json FILE]

For each round trip two pairs of ranks (emulator_rank.py) live at once: one in two network
namespaces over a delaying line (delay_line.c; without a round trip the kernel's shaper), the other
on this machine with the emulated link. They take turns, block by block, and only one runs at a
time. Prints the median step of each and emulated / real; then, at --narrow-rtt-ms and the most
micro-batches, the same with three posted receives, and how much faster the window is. About 5
minutes on two quiet cores. Needs root, iproute2, gcc and /dev/net/tun.

--sleep: stages sleep instead of computing, about as long as they compute. On two cores the kernel
and the delaying line take from the ranks what a network card and a line take from nobody; with
sleeping ranks they do not, so this compares the links alone.
--tcp: congestion control on the real line. reno sends at once what its window allows; so does
cubic, the usual one, which not every kernel lets a namespace choose. bbr spreads a burst over
time, which the emulated link does not do. Nor does it start slowly after a pause, so the real line
is told not to (tcp_slow_start_after_idle=0): at 200 ms every step would begin with a small window.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import say_where
from benchmarks.namespaces import ADDRESSES, INTERFACE, delay_available, inside, two_hosts
from xcloud.net.link_profile import BUDGET_BYTES, MIN_POSTED

ROOT = Path(__file__).resolve().parent.parent
NARROW = 1  # a budget of one byte: MIN_POSTED receives
WARM_UP = 6  # steps of a new system that are not counted: TCP's window grows in them
REAL, EMULATED = "real", "emulated"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--rtt-ms", nargs="+", type=float, default=[0.0, 20.0, 100.0, 200.0])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--narrow-rtt-ms", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15, help="of each system in a round")
    parser.add_argument("--tcp", default="reno", help="as the kernel names it")
    parser.add_argument("--sleep", action="store_true", help="stages sleep, not compute")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    say_where()
    if (reason := delay_available()) is not None:
        sys.exit(f"this benchmark cannot run here: {reason}")
    if a.sleep:
        os.environ["XCLOUD_SLEEP_S"] = "2.5e-4"
    results = []
    print(f"{'round trip':>10} {'m':>3} {'receives':>9} | {'real':>8} {'emulated':>9} | "
          "emulated / real (rounds)")  # fmt: skip
    for rtt_ms in a.rtt_ms:
        systems = [(m, BUDGET_BYTES) for m in a.micro_batches]
        if rtt_ms == a.narrow_rtt_ms:
            systems.append((max(a.micro_batches), NARROW))
        found = measure(a.mbit * 1e6, rtt_ms / 1e3, a.tcp, systems, a.rounds, a.steps)
        for system in found:
            show(rtt_ms, system)
        if rtt_ms == a.narrow_rtt_ms:
            show_gain(rtt_ms, found[-2], found[-1])
        results.append(
            {"rtt_ms": rtt_ms, "mbit": a.mbit, "tcp": a.tcp, "sleep": a.sleep, "systems": found}
        )
        if a.json:
            a.json.write_text(json.dumps(results) + "\n")


def measure(
    bits_per_s: float,
    rtt_s: float,
    tcp: str,
    systems: Sequence[tuple[int, int]],
    rounds: int,
    steps: int,
) -> list[dict[str, Any]]:
    """Seconds of every counted step, by round, of each system over both links."""
    found: list[dict[str, Any]] = [
        {"micro_batches": m, "budget_bytes": budget, REAL: [], EMULATED: []}
        for m, budget in systems
    ]
    settings = {"tcp_congestion_control": tcp, "tcp_slow_start_after_idle": "0"}
    profile = {"bandwidth_bits_per_s": bits_per_s, "latency_s": rtt_s / 2}
    with (
        two_hosts(bits_per_s, rtt_s or None, settings) as hosts,
        two_ranks([inside(h) for h in hosts], ADDRESSES[0], INTERFACE, REAL) as real,
        two_ranks([(), ()], "127.0.0.1", "lo", profile) as emulated,
    ):
        for round_ in range(rounds + 1):
            for system in found:
                for name, ranks in ((REAL, real), (EMULATED, emulated)):
                    block = {key: system[key] for key in ("micro_batches", "budget_bytes")}
                    block["steps"] = steps if round_ else WARM_UP
                    answer = run_block(ranks, block)
                    if round_:
                        system[name].append(answer["times"])
                    system[f"{name}_bytes_per_step"] = answer["bytes"]
    return found


@contextmanager
def two_ranks(
    prefixes: Sequence[Sequence[str]], address: str, interface: str, link: object
) -> Iterator[list[subprocess.Popen[str]]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
    ranks = [
        subprocess.Popen(
            [*prefix, sys.executable, "-m", "benchmarks.emulator_rank", str(rank), "2",
             f"tcp://{address}:29571", json.dumps(link)],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank, prefix in enumerate(prefixes)
    ]  # fmt: skip
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def run_block(ranks: list[subprocess.Popen[str]], block: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 measured."""
    for process in ranks:
        assert process.stdin is not None
        process.stdin.write(json.dumps(block) + "\n")
        process.stdin.flush()
    answers = []
    for process in ranks:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a rank ended with {process.wait()} in {block}; see above")
        answers.append(json.loads(line))
    return dict(answers[0])


def median(rounds: Sequence[Sequence[float]]) -> float:
    return statistics.median(time for times in rounds for time in times)


def show(rtt_ms: float, system: dict[str, Any]) -> None:
    assert system[f"{REAL}_bytes_per_step"] == system[f"{EMULATED}_bytes_per_step"]
    pairs = zip(system[REAL], system[EMULATED], strict=True)
    each = " ".join(f"{statistics.median(e) / statistics.median(r):.3f}" for r, e in pairs)
    real, emulated = median(system[REAL]), median(system[EMULATED])
    posted = f"only {MIN_POSTED}" if system["budget_bytes"] == NARROW else "all"
    print(f"{rtt_ms:>7g} ms {system['micro_batches']:>3} {posted:>9} | {real:>6.3f} s "
          f"{emulated:>7.3f} s | {emulated / real:.3f} ({each})", flush=True)  # fmt: skip


def show_gain(rtt_ms: float, wide: dict[str, Any], narrow: dict[str, Any]) -> None:
    pairs = zip(narrow[REAL], wide[REAL], strict=True)
    each = " ".join(f"{statistics.median(n) / statistics.median(w):.2f}" for n, w in pairs)
    gain = median(narrow[REAL]) / median(wide[REAL])
    print(f"{rtt_ms:>7g} ms {wide['micro_batches']:>3}: on the real line {gain:.2f} times faster "
          f"than with {MIN_POSTED} posted receives ({each})", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

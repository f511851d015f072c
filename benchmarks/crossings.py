"""Does each compressor pay below the bandwidth that the planner names, and not above it?

    python -m benchmarks.crossings [--micro-batches 4] [--mbit 100 250 500 1000 2500]
        [--updates 64] [--json FILE]

The job of benchmarks/predictions.py (--small there): its profile names a crossing for each
compressor. Then, for each bandwidth, all compressors run in turns of four steps, so a ratio to the
uncompressed step has an interval of 95 % (benchmarks/in_turns.py).
A compressor is seen to pay where the whole interval is below 1, and to cost where it is above; the
crossing lies between the highest bandwidth with the one and the lowest with the other. Runs in
rows, as before, could not tell: near a crossing nothing is at stake. Alone on the machine, two
minutes a bandwidth.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.in_turns import StepRatio, timed
from benchmarks.machine import ran_on, say_where
from benchmarks.predictions import BASE, BLOCKS, COMPRESSORS, SMALL, Bench
from xcloud.net.link_profile import LinkProfile
from xcloud.pipeline.schedule import GPipe
from xcloud.planner.search import crossings, step_at
from xcloud.simulator.plan import NO_COMPRESSION, Plan

CODECS = [name for name in COMPRESSORS if name != NO_COMPRESSION]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--mbit", type=float, nargs="+", default=[100, 250, 500, 1000, 2500])
    parser.add_argument("--updates", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    say_where()
    bench = Bench(SMALL)
    plan = Plan("pipeline", (BLOCKS // 2, BLOCKS), GPipe(given.micro_batches), NO_COMPRESSION)
    line = LinkProfile(1e9)
    named = crossings(step_at(bench.pricer(line), plan), CODECS)
    seen: dict[str, dict[float, StepRatio]] = {name: {} for name in CODECS}
    points = []
    for mbit in given.mbit:
        there = bench.pricer(replace(line, bandwidth_bits_per_s=1e6 * mbit))
        uncompressed_s = there.step_s(plan)
        ratios = measure(mbit, given.micro_batches, given.updates)
        for name in CODECS:
            found = ratios[name]
            foreseen = there.step_s(plan._replace(compression=name)) / uncompressed_s
            seen[name][mbit] = found
            print(f"{mbit:g} Mbit/s {name}: {foreseen:.3f} foreseen, {found.ratio:.3f} measured "
                  f"({found.low:.3f} to {found.high:.3f})", flush=True)  # fmt: skip
            points.append({"mbit": mbit, "compression": name, "foreseen": foreseen,
                           **asdict(found)})  # fmt: skip
    said = list(tell({name: rate / 1e6 for name, rate in named.items()}, seen))
    print("\n".join(said))
    if given.json:
        about = ran_on() | {"micro_batches": given.micro_batches, "updates": given.updates}
        found_all = about | {"named_bits_per_s": named, "points": points, "said": said}
        given.json.write_text(json.dumps(found_all, indent=1) + "\n")


def measure(mbit: float, micro_batches: int, updates: int) -> dict[str, StepRatio]:
    """Of each compressor, by its name."""
    job = [setting for setting in BASE if not setting.startswith("plan")]
    job += [
        *SMALL.settings, f"cluster.wan.bandwidth_bits_per_s={1e6 * mbit}",
        "cluster.wan.latency_s=0", f"schedule.num_micro_batches={micro_batches}",
        f"model.blocks_per_stage=[{BLOCKS // 2}]", f"training.max_steps={updates}",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        rounds = timed({c: [*job, f"compression={c}"] for c in COMPRESSORS}, Path(folder))
    ratios = {c: StepRatio.of(own, rounds[NO_COMPRESSION]) for c, own in rounds.items()}
    if not all(ratios.values()):
        raise SystemExit(f"{updates} updates are too few for an interval: raise --updates")
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def tell(
    named: Mapping[str, float], seen: Mapping[str, Mapping[float, StepRatio]]
) -> Iterator[str]:
    """A line of each compressor. named, and the keys of seen: Mbit/s."""
    for name, places in seen.items():
        pays = max((mbit for mbit, found in places.items() if found.high < 1), default=0.0)
        costs = [mbit for mbit, found in places.items() if found.low > 1 and mbit > pays]
        until = min(costs, default=math.inf)
        verdict = "as named" if pays <= named[name] <= until else "NOT as named"
        yield (
            f"{name}: named {named[name]:.0f} Mbit/s; seen to pay at {pays:g} and to cost at "
            f"{until:g} Mbit/s: {verdict}"
        )


if __name__ == "__main__":
    main()

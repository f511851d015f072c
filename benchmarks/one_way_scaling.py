"""How a one-way job scales with the ranks of its consumer, by simulation, and what bounds it.

    python -m benchmarks.one_way_scaling [--sizes 8 16 32 64] [--consumer-batch-s 1.0] ...

The paper (arXiv 2205.09470) went from 8 to 64 discriminator NPUs and got 4.34 times the
throughput, 54 % of the ideal, and does not say what held it back. This prints, for given times,
the speed-up and the part that bounds each size, once with the producers as they are and once with
as many as the consumer can eat. The defaults are an ERNIE-M-large discriminator (560 M weights,
FP16 gradients) fed by base-size generators that need a third of its time a batch, 8 ranks a
machine joined inside at 200 Gbit/s; all are settings, none is measured or published.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.machine import say_where
from benchmarks.one_way_prediction import Inside, SimulatedCloud, SimulatedJob, scale_consumer
from xcloud.net.link_profile import LinkProfile

PUBLISHED = "paper, 8 to 64: 4.34x, 54 % of the ideal"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--producer-ranks", type=int, default=8)
    parser.add_argument("--consumer-batch-s", type=float, default=1.0)
    parser.add_argument("--producer-batch-s", type=float, default=0.33)
    parser.add_argument("--gradient-bytes", type=float, default=560e6 * 2)
    parser.add_argument("--producer-gradient-bytes", type=float, default=280e6 * 2)
    parser.add_argument("--inside-gbit", type=float, nargs="+", default=[10.0, 25.0, 100.0])
    parser.add_argument("--ranks-per-machine", type=int, default=8)
    parser.add_argument("--machine-gbit", type=float, default=200.0)
    parser.add_argument("--inside-latency-s", type=float, default=20e-6)
    parser.add_argument("--wan-mbit", type=float, default=100.0)
    parser.add_argument("--wan-rtt-s", type=float, default=0.03)
    parser.add_argument("--payload-bytes", type=int, default=64 * 256 * 19 // 8)
    a = parser.parse_args()
    say_where()
    print(PUBLISHED)
    for gbit in a.inside_gbit:
        inside = Inside(gbit * 1e9, a.inside_latency_s, a.ranks_per_machine, a.machine_gbit * 1e9)
        job = SimulatedJob(
            SimulatedCloud(a.sizes[0], a.consumer_batch_s, 0.0, a.gradient_bytes, inside),
            [
                SimulatedCloud(
                    a.producer_ranks, a.producer_batch_s, 0.0, a.producer_gradient_bytes, inside
                )
            ],
            LinkProfile(a.wan_mbit * 1e6, a.wan_rtt_s / 2),
            a.payload_bytes,
            a.sizes[0],
            8,
        )
        enough = replace(job.producers[0], num_ranks=max(a.sizes))
        for text, found in (
            (f"{a.producer_ranks} producer ranks", job),
            (f"{enough.num_ranks} producer ranks", replace(job, producers=[enough])),
        ):
            print(f"\n{gbit:g} Gbit/s between machines of the cloud, {text}")
            for row in scale_consumer(found, a.sizes):
                print(
                    f"  {row.num_ranks:>4} ranks: {row.speed_up:5.2f}x ({100 * row.efficiency:.0f}"
                    f" % of ideal), step {row.prediction.step_s:.2f} s, all-reduce "
                    f"{100 * row.all_reduce_share:.0f} % of it, bound by {row.prediction.bound}"
                )


if __name__ == "__main__":
    main()

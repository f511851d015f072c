"""Throughput of a one-way job across clouds as a share of one cloud: same ranks, same work.

    python -m benchmarks.bench_one_way [--exp electra_multilingual] [--mbit 1000 100 10]
        [--rtt-ms 100] [--rounds 3] [--steps 60] [--json FILE] [key=value ...]

Every round runs one cloud and then each link, so noise of the machine hits all alike. A figure is
tokens per second of the consumer over time in steps, the first steps left out; the share is taken
within a round, and its median over rounds printed with all of them. Without --exp the parts are
toys: matrix products as work, 5 kB a batch. key=value are overrides of the experiment.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from benchmarks.machine import run_quietly, say_where

CONF = Path(__file__).parent.parent / "conf"
ONE_CLOUD = "one cloud"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--exp", help="an experiment of conf/exp; none: toys")
    parser.add_argument("--mbit", nargs="+", type=float, default=[1000, 100, 10])
    parser.add_argument("--rtt-ms", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("override", nargs="*", help="key=value")
    a = parser.parse_args()
    say_where()
    links = {f"{mbit:g} Mbit/s": mbit * 1e6 for mbit in a.mbit}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in (ONE_CLOUD, *links)}
    for number in range(a.rounds):
        for name in found:
            config = config_of(a.exp, a.override, a.steps, links.get(name), a.rtt_ms / 1e3)
            found[name].append(measure(config))
            figure = found[name][-1]["tokens_per_s"]
            print(f"round {number + 1}, {name}: {figure:,.0f} tokens/s", flush=True)
    print(f"\n{'':>12} | {'tokens/s':>10} | share of one cloud (rounds) | waits | bytes/token")
    shares = {}
    for name, runs in found.items():
        pairs = zip(runs, found[ONE_CLOUD], strict=True)
        shares[name] = [mine["tokens_per_s"] / one["tokens_per_s"] for mine, one in pairs]
        each = " ".join(f"{share:.3f}" for share in shares[name])
        rate = statistics.median(r["tokens_per_s"] for r in runs)
        waits = statistics.median(r["waits"] for r in runs)
        print(f"{name:>12} | {rate:>10,.0f} | {statistics.median(shares[name]):.3f} ({each}) | "
              f"{100 * waits:.1f} % of a step | {runs[-1]['bytes_per_token']}")  # fmt: skip
    if a.json:
        text = json.dumps({"runs": found, "shares": shares, "rtt_ms": a.rtt_ms}, indent=2)
        a.json.write_text(text + "\n")


def config_of(
    exp: str | None, overrides: list[str], steps: int, bits_per_s: float | None, rtt_s: float
) -> dict[str, Any]:
    """bits_per_s None: one cloud."""
    if exp is None:
        plain = toy()
        for override in overrides:
            key, _, value = override.partition("=")
            config = OmegaConf.create(plain)
            OmegaConf.update(config, key, yaml.safe_load(value))
            plain = OmegaConf.to_container(config)
    else:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("config", overrides=[f"+exp={exp}", "tracker=none", *overrides])
        plain = OmegaConf.to_container(config)
    plain["training"]["max_steps"] = steps
    if bits_per_s is None:
        plain["cluster"] |= {"form": "one_cloud", "wan": "free", "name": "one_cloud"}
    else:
        plain["cluster"] |= {"form": "clouds", "name": "clouds", "wan": {
            "_target_": "xcloud.net.link_profile.LinkProfile",
            "bandwidth_bits_per_s": bits_per_s, "latency_s": rtt_s / 2,
        }}  # fmt: skip
    return dict(plain)


def measure(
    config: dict[str, Any], keep: Callable[[Path], None] = lambda run_dir: None
) -> dict[str, Any]:
    """keep: what is to happen to the run's folder before it is removed."""
    with tempfile.TemporaryDirectory() as folder:
        summary = run_quietly(config, Path(folder) / "run")
        keep(Path(folder) / "run")
    consumer = next(iter(summary["waiting_s"]))
    return {
        "tokens_per_s": summary["tokens_per_s"],
        "step_s": summary["step_time_s"]["median"],
        "waits": (summary["waiting_s"][consumer] or 0.0) / summary["step_time_s"]["median"],
        "bytes_per_token": summary["feed"]["bytes_per_token"],
        "link_utilisation": summary["link_utilisation"]["forward"],
    }


def toy() -> dict[str, Any]:
    from tests.one_way_toy import cloud, feed_config

    clouds = {"consumer": cloud(1), "one": cloud(1, 1.0), "two": cloud(1, 1.0)}
    return feed_config(clouds, model={"rows": 700, "work": 150}, feed={"run_ahead": 16})


if __name__ == "__main__":
    main()

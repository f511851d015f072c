"""A run whose test evaluation takes long, or its dev evaluation: does it end well, and is no
training step longer for it? Toy model, two clouds, the limits that every run has.

    python -m benchmarks.long_evaluation --test 70     # longer than a silent rank is waited for
    python -m benchmarks.long_evaluation --dev 360     # longer than a message may take
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from omegaconf import OmegaConf

from benchmarks.machine import say_where
from tests.toy import toy_config
from xcloud.launch.local import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--test", type=float, help="seconds of the test evaluation")
    which.add_argument("--dev", type=float, help="seconds of a dev evaluation after step 4 of 6")
    arguments = parser.parse_args()
    say_where()

    config = toy_config("two_clouds", ["cluster/wan=line_1g"])
    training, model = config["training"], config["model"]
    assert isinstance(training, dict) and isinstance(model, dict)
    training |= {"max_steps": 6, "eval_batch_size": 10}  # one piece
    if arguments.dev is not None:
        # The first evaluation is the dev one; the test one is quick.
        model |= {"predict_s": arguments.dev, "slow_predictions": 1}
        training["evaluate_every"] = 4
    else:
        model["predict_s"] = arguments.test

    with tempfile.TemporaryDirectory() as folder:
        run_dir, started_s = Path(folder) / "run", time.monotonic()
        summary = run(OmegaConf.create(config), run_dir)
        lines = (run_dir / "events.jsonl").read_text().splitlines()
        steps = [e for e in map(json.loads, lines) if e["event"] == "step" and e["step"] > 1]
        parts = sorted(path.name for path in (run_dir / "model").iterdir())
    print(
        f"{summary['status']} after {time.monotonic() - started_s:.0f} s; longest step "
        f"{max(step['step_s'] for step in steps):.3f} s, longest waiting "
        f"{max(step['waiting_s'] for step in steps):.3f} s; exported {', '.join(parts)}"
    )


if __name__ == "__main__":
    main()

"""Perplexity against bytes: every strategy fine-tunes the same model on the same tokens.

    python experiments/strategies/study.py BASE DATA OUT.jsonl [--seeds 1 2 3] [--at-once 2]
        [--steps 300] [--batch-size 8] [--learning-rate 5e-4] [--only NAME ...]

BASE: folder of base_model.py. DATA: train, dev and test as .txt, a document a line, or chats as
.jsonl (prepare_texts.py makes some). Each run is two clouds of a rank on an emulated link; a line
of JSON each; runs that OUT holds already are left out, so each DATA needs an OUT of its own. Runs
at once share the processors, so their times mean nothing: bytes and perplexity do. For times see
links.py.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rows import ROWS, add_arguments, settings

ROOT = Path(__file__).resolve().parent.parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    given = parser.parse_args()
    done = set()
    if given.out.exists():
        found = map(json.loads, given.out.read_text().splitlines())
        done = {(row["name"], row["seed"]) for row in found}
    wanted = [(name, seed) for seed in given.seeds for name in given.only]
    common = [*settings(given), "cluster/wan=free"]

    def run(name: str, seed: int) -> dict[str, object]:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "run.py", *common, *ROWS[name], f"seed={seed}",
                       f"hydra.run.dir={folder}/run"]  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            ended = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True
            )
            if ended.returncode:
                raise RuntimeError(
                    f"{name}, seed {seed}: {ended.stdout[-800:]}{ended.stderr[-800:]}"
                )
            summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
        return {"name": name, "seed": seed, "steps": given.steps, "summary": summary}

    with ThreadPoolExecutor(given.at_once) as pool, given.out.open("a") as out:
        for row in pool.map(lambda one: run(*one), [one for one in wanted if one not in done]):
            print(json.dumps(row), file=out, flush=True)
            quality = row["summary"]["quality"]  # type: ignore[index]
            print(row["name"], row["seed"], quality, flush=True)


if __name__ == "__main__":
    main()

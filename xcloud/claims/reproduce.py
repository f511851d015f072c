"""`python -m xcloud reproduce CLAIM`: run it, judge it by its rule, write the record."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xcloud.base.errors import ConfigError, DataError, RunFailed, XcloudError
from xcloud.base.project import project_root
from xcloud.claims.claims import FILE, Claim, read_claims
from xcloud.claims.records import FOLDER, made

ROWS_FILE = "rows.jsonl"  # of a module, in its OUT folder: a line of JSON a row
KEPT_FILES = ("experiment.yaml", "summary.json", "run.log")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m xcloud reproduce", description=__doc__)
    parser.add_argument("claim", help=f"a name in {FILE}")
    parser.add_argument(
        "--quick", action="store_true", help="minutes on two cores; judges nothing"
    )
    parser.add_argument("--data", type=Path, help="the folder that holds the claim's data sets")
    parser.add_argument("--out", type=Path, help=f"default: {FOLDER}/CLAIM; with --quick outputs/")
    given = parser.parse_args(words)
    try:
        return _reproduce(given)
    except XcloudError as error:
        print(f"xcloud: {error}", file=sys.stderr)
        return 1


def _reproduce(given: argparse.Namespace) -> int:
    claims = read_claims(project_root() / FILE)
    if given.claim not in claims:
        raise ConfigError(f"no claim {given.claim!r} in {FILE}; there are {', '.join(claims)}")
    claim = claims[given.claim]
    data = _data(claim, given.data)
    usual = Path("outputs", "quick", claim.name) if given.quick else Path(FOLDER, claim.name)
    out = (given.out or project_root() / usual).absolute()
    rows = list(_rows(claim, given.data, out, given.quick))
    now = datetime.now(UTC).isoformat(timespec="minutes")
    record = made(claim, rows, data, now, given.quick)
    record.write(out, claim)
    print((out / "README.md").read_text(encoding="utf-8"))
    if given.quick and claim.leaves_out:
        print(f"--quick leaves out: {claim.leaves_out}")
    return 0 if given.quick or record.verdict == "reproduced" else 1


def _data(claim: Claim, folder: Path | None) -> list[Path]:
    if claim.needs and folder is None:
        raise DataError(
            f"claim {claim.name} needs {', '.join(claim.needs)}: give the folder that holds "
            "them with --data DIR"
        )
    paths = [Path(folder or ".", name) for name in claim.needs]
    for path in paths:
        if not path.exists():
            raise DataError(f"claim {claim.name} needs {path}, which does not exist")
    return paths


def _rows(claim: Claim, data: Path | None, out: Path, quick: bool) -> Iterator[Mapping[str, Any]]:
    if claim.module:
        yield from _of_module(claim, data, out, quick)
        return
    seeds = claim.seeds[:1] if quick else claim.seeds
    for seed in seeds:
        for row, settings in claim.runs.items():
            words = [*claim.common, *settings, *(claim.quick if quick else ()), f"seed={seed}"]
            print(f"{row}, seed {seed}: {' '.join(words)}", flush=True)
            yield {"row": row, "seed": seed} | _run(
                words, data, out / "runs" / f"{row}-seed{seed}"
            )


def _run(words: Sequence[str], data: Path | None, folder: Path) -> dict[str, Any]:
    """Figures of one run; one that the folder holds is not made again."""
    if not (folder / "summary.json").exists():
        filled = [word.replace("DATA", str(data)) for word in words]
        work = folder.with_name(f"{folder.name}.work")
        command = [sys.executable, "run.py", *filled, f"hydra.run.dir={work}", "tracker=none"]
        done = subprocess.run(
            command,
            cwd=project_root(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise RunFailed(f"{' '.join(command)}\n{done.stderr.strip()}")
        folder.mkdir(parents=True, exist_ok=True)
        for name in KEPT_FILES:
            if (work / name).exists():
                shutil.copyfile(work / name, folder / name)
        shutil.rmtree(work)
    return figures_of(json.loads((folder / "summary.json").read_text(encoding="utf-8")))


def figures_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Of summary.json, the figures that rules speak of, by flat names."""
    sent, ratio = summary["wan_bytes_per_step"], summary["compression_ratio"]
    return {
        **summary["quality"],
        "step_s": summary["step_time_s"]["median"],
        "loss": summary["final_loss"],
        "bytes_forward": sent["forward"],
        "bytes_backward": sent["backward"],
        "ratio": ratio["total"],
        "wall_s": summary["wall_s"],
    }


def _of_module(
    claim: Claim, data: Path | None, out: Path, quick: bool
) -> Iterator[Mapping[str, Any]]:
    words = [word.replace("DATA", str(data)).replace("OUT", str(out)) for word in claim.module]
    more = claim.quick if quick else ()
    done = subprocess.run([sys.executable, "-m", *words, *more], cwd=project_root())
    if done.returncode:
        raise RunFailed(f"python -m {' '.join(words)} ended with code {done.returncode}")
    text = (out / ROWS_FILE).read_text(encoding="utf-8")
    yield from (json.loads(line) for line in text.splitlines())

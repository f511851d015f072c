"""What a record keeps of its runs: one archive, and the check that its rows came from them."""

from __future__ import annotations

import io
import lzma
import re
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.claims.claims import REPEATS, ResultRow
from xcloud.base.bounded import parsed_json
from xcloud.base.errors import DataError

ARCHIVE_FILE = "runs.tar.xz"
NAMING = ("task", "corpus", "row", "line", *REPEATS)
"""What names the run of a row: its first words, and which repeat it is."""
LEAKS = ("label_leak_auc", "token_recovery", "token_recovery_baseline")
OF_THE_STUDY = {"formulas": {"step_s", "bytes"}}
"""Figures that a study takes from a run's events instead of its summary."""


class RunArchive:
    """The files that a record keeps of each run, in one archive: NAME/FILE, both sorted.

    A record of 90 runs has 270 files, which compress to a tenth. Equal files make equal bytes.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / ARCHIVE_FILE

    def read(self) -> dict[str, dict[str, str]]:
        """Return the texts by run and by file; empty without an archive. Raises DataError."""
        texts: dict[str, dict[str, str]] = {}
        if not self.file.exists():
            return texts
        try:
            with tarfile.open(self.file, "r:xz") as archive:
                for member in archive:
                    name, _, file = member.name.partition("/")
                    content = archive.extractfile(member)
                    if content is not None:
                        texts.setdefault(name, {})[file] = content.read().decode()
        except (tarfile.TarError, OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
            raise DataError(f"{self.file} is no archive of runs: {error}") from None
        return texts

    def add(self, name: str, files: Mapping[str, str]) -> None:
        """Rewrite the archive with one more run, or with other files of a run."""
        texts = {**self.read(), name: dict(files)}
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for run in sorted(texts):
                for file in sorted(texts[run]):
                    data = texts[run][file].encode()
                    member = tarfile.TarInfo(f"{run}/{file}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_suffix(".part")
        unfinished.write_bytes(lzma.compress(packed.getvalue(), preset=9))
        unfinished.replace(self.file)


def run_name(about: ResultRow) -> str:
    """Return the name of a row's run, "AB-Net-seed1", which Hydra's command line takes too."""
    words = [f"{key}{value}" if key in REPEATS else str(value) for key, value in about.items()]
    return re.sub(r"[^\w.-]+", "_", "-".join(words))


def figures_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a summary that rules speak of, by flat names."""
    sent = summary["wan_bytes_per_step"]
    ratio = summary["compression_ratio"]
    per_token = summary.get("bytes_per_token") or {}  # runs of 0.2.0 have none
    return {
        **summary["quality"],
        **{f"{name}_error": error for name, error in summary.get("quality_error", {}).items()},
        "step_s": summary["step_time_s"]["median"],
        "final_loss": summary["final_loss"],
        "bytes_forward": sent["forward"],
        "bytes_backward": sent["backward"],
        "bytes": sum(value or 0 for value in sent.values()),
        "ratio": ratio["total"],
        **({"bytes_per_token": per_token["total"]} if per_token.get("total") else {}),
        "wall_s": summary["wall_s"],
        **{k: summary[k] for k in ("steps_to_target",) if k in summary},
        **{name: value for name, value in summary.items() if name in LEAKS},
    }


def mismatches(claim: str, rows: Sequence[ResultRow], note: str, folder: Path) -> list[str]:
    """Return a line for each figure of a row that its run's summary does not have.

    Also for runs of no row and rows without a run, unless the record's note speaks of them.
    """
    runs = RunArchive(folder).read()
    wrong = []
    num_without = 0
    for row in rows:
        name = run_name({key: value for key, value in row.items() if key in NAMING})
        files = runs.pop(name, None)
        if files is None:
            num_without += 1
            continue
        summary = parsed_json(files["summary.json"])
        own = OF_THE_STUDY.get(claim, set())
        for key, value in _came_to(summary, row=row).items():
            if key in row and key not in own and row[key] != value:
                wrong.append(f"{name}: {key} is {row[key]}, its summary has {value}")
    wrong += [f"{name} is the run of no row" for name in runs if name not in note]
    if num_without and "log" not in note and "No folder" not in note:
        wrong.append(f"{num_without} rows have no run, and the note does not say so")
    return wrong


def _came_to(summary: Mapping[str, Any], row: ResultRow) -> dict[str, Any]:
    found = figures_of(summary)
    # A tree that was dirty only by a link says so in the record's note.
    commit = str(summary["commit"]).removesuffix("-dirty")
    if str(row["commit"]).removesuffix("-dirty") != commit:
        found["commit"] = commit
    if "accuracy_es" not in row:  # of the second of two runs, which follows the first one's seed
        found["seed"] = summary["seed"]
    return found

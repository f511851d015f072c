"""Which files of the package a plain run between two clouds goes through: how far a reader has to
follow it. Counted by the functions that the main thread of a process calls; imports and the texts
of the demo left out.

    python -m benchmarks.files_visited [--names] [SETTINGS OF run.py]

Prints for the parent, for a rank before its first update and for one update the number of files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLAIN = ["name=files_visited", "model=transformer", "compression=int8", "training.max_steps=3"]
OUT = "XCLOUD_FILES_VISITED"  # environment variable: the folder for the lists of all processes
UPDATE = ("xcloud/pipeline/trainer.py", "update")
START = ("xcloud/launch/processes.py", "start")  # of the ranks

TRACE = f"""
import atexit, json, os, sys
PACKAGE, ROOT = {str(ROOT / "xcloud")!r} + os.sep, {str(ROOT) + os.sep!r}
visited, num_updates, num_imports, phases = {{}}, 0, 0, {{}}

def call(frame, event, argument):
    global visited, num_updates, num_imports
    code, caller = frame.f_code, frame.f_back and frame.f_back.f_code.co_filename
    is_import = code.co_name == "<module>" and (caller or "").startswith("<frozen importlib")
    change = {{"call": 1, "return": -1}}.get(event, 0) if is_import else 0
    num_imports = max(0, num_imports + change)  # the one of this file is not seen from its start
    if num_imports or event != "call" or not code.co_filename.startswith(PACKAGE):
        return
    file = code.co_filename[len(ROOT):]
    if (file, code.co_name) == {START!r}:
        phases.setdefault("before", list(visited))
    if (file, code.co_name) == {UPDATE!r}:
        phases["before" if not num_updates else "update"] = list(visited)
        num_updates, visited = num_updates + 1, {{}}
    visited.setdefault(file)

def write(*code):
    sys.setprofile(None)
    phases.setdefault("before", list(visited))
    with open(os.path.join(os.environ[{OUT!r}], str(os.getpid())), "w") as out:
        out.write(json.dumps({{"argv": sys.orig_argv, "phases": phases}}))
    return leave(*code) if code else None

leave, os._exit = os._exit, write  # how a rank ends
atexit.register(write)
sys.setprofile(call)
"""


TEXTS = "xcloud/demo/"


def visits(settings: list[str]) -> dict[str, list[str]]:
    """Files in the order in which they are met first: "parent", "rank 0", "rank 1" and their
    "update"s."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(TRACE)
        run_dir = Path(folder) / "run"
        out = Path(folder) / "out"
        out.mkdir()
        command = [sys.executable, str(ROOT / "run.py"), *settings, f"hydra.run.dir={run_dir}"]
        paths = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, OUT: str(out), "PYTHONPATH": paths}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, list[str]] = {}
        for file in out.iterdir():
            process = json.loads(file.read_text())
            words, phases = process["argv"], process["phases"]
            if "--rank" in words:
                name = f"rank {words[words.index('--rank') + 1]}"
                found[name], found[f"{name} update"] = phases["before"], phases["update"]
            elif str(ROOT / "run.py") in words:
                found["parent"] = phases["before"]
    return {
        name: [file for file in files if not file.startswith(TEXTS)]
        for name, files in sorted(found.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--names", action="store_true", help="of the files too")
    parser.add_argument("settings", nargs="*", help="of run.py")
    given = parser.parse_args()
    for name, files in visits(given.settings or PLAIN).items():
        print(f"{name:16} {len(files)}")
        for file in files if given.names else ():
            print(f"    {file}")


if __name__ == "__main__":
    main()

"""Runs jobs `at_once` at a time until a deadline, and writes a line of JSON for each:

python run_jobs.py JOBS.json AT_ONCE SECONDS OUT.jsonl [SECONDS_LEFT_TO_START_ANOTHER]
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

jobs, at_once, deadline, out = (
    json.load(open(sys.argv[1])),
    int(sys.argv[2]),
    time.time() + float(sys.argv[3]),
    open(sys.argv[4], "a"),
)
min_left = float(sys.argv[5]) if len(sys.argv) > 5 else 0
env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
running, done = [], set()


def launch(job):
    d = Path("/tmp/runs") / re.sub(r"[^\w.]+", "_", job["name"])
    d.mkdir(parents=True, exist_ok=True)
    p = subprocess.Popen(
        [sys.executable, "run.py", *job["args"], f"hydra.run.dir={d}", "tracker=none"],
        stdout=open(d / "out", "w"),
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )
    running.append((p, job, d, time.time()))


def collect():
    for entry in running[:]:
        p, job, d, t = entry
        if p.poll() is None:
            continue
        running.remove(entry)
        done.add(job["name"])
        s = d / "summary.json"
        r = {
            "name": job["name"],
            "rc": p.returncode,
            "wall": round(time.time() - t, 1),
            "args": job["args"],
            "summary": json.loads(s.read_text()) if s.exists() else None,
        }
        if p.returncode:
            r["out"] = (d / "out").read_text()[-1500:]
            for log in sorted(d.glob("rank*.log")):
                r[log.name] = log.read_text()[-1500:]
        print(json.dumps(r), file=out, flush=True)
        print(
            job["name"],
            p.returncode,
            r["wall"],
            (r["summary"] or {}).get("quality"),
            ((r["summary"] or {}).get("step_time_s") or {}).get("median"),
            flush=True,
        )


waiting = list(jobs)
while waiting or running:
    collect()
    ready = [j for j in waiting if set(j.get("after", [])) <= done]
    if time.time() > deadline - min_left:
        waiting = []
    elif ready and len(running) < at_once:
        waiting.remove(ready[0])
        launch(ready[0])
        continue
    if time.time() > deadline:
        for entry in running:
            entry[0].terminate()
        time.sleep(2)
        collect()
        break
    time.sleep(0.2)
print("left", [j["name"] for j in waiting], "cut", [r[1]["name"] for r in running], flush=True)

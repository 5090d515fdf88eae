"""Run the scripts that a file lists, one per line, under mpiexec; each has a time limit.

usage: python .ci/run_scripts.py [-n RANKS] [--limit SECONDS] LIST
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("-n", default="2", help="ranks")
parser.add_argument("--limit", default="300", help="seconds for each script")
parser.add_argument("list", type=Path)
args = parser.parse_args()

lines = [line.split("#")[0].strip() for line in args.list.read_text().splitlines()]
scripts = [line for line in lines if line]
mpiexec = shlex.split(os.environ.get("MPIEXEC", "mpiexec"))
launch = ["timeout", "-k", "10", args.limit, *mpiexec, "-n", args.n, sys.executable]
failed = 0
for script in scripts:
    start = time.monotonic()
    run = subprocess.run(
        [*launch, script],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    result = f"FAILED (exit status {run.returncode})" if run.returncode else "ok"
    print(f"{script}: {result}, {time.monotonic() - start:.1f} s", flush=True)
    if run.returncode:
        failed += 1
        print(run.stdout, flush=True)
print(f"{len(scripts) - failed} passed, {failed} failed")
sys.exit(failed > 0 or not scripts)

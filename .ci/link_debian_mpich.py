"""Link Debian's libmpich.so.12 as libmpi.so.12, the name mpi4py's wheel asks for."""

import subprocess
import sys
from pathlib import Path

cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True)
lines = [line for line in cache.stdout.splitlines() if "libmpich.so.12 " in line]
if not lines:
    sys.exit("no libmpich.so.12 on this machine: apt-get install mpich libmpich12")
link = Path(sys.prefix, "lib", "libmpi.so.12")
link.unlink(missing_ok=True)
link.symlink_to(lines[0].split("=>")[1].strip())

"""The kernel's memory killer, as a control group counts what it did."""

from __future__ import annotations

from pathlib import Path


def oom_kills() -> int:
    """Processes that it has ended for want of memory in this one's control group (cgroup v2); 0 where unknown."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2]
        rows = Path(f"/sys/fs/cgroup{group}/memory.events").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(row.split()[1]) for row in rows if row.startswith("oom_kill "))

"""How many threads can compute at once here: the cores that may be used, and the quota of CPU time."""

from __future__ import annotations

import math
import os
from pathlib import Path


def choose_threads(requested: int, root: Path = Path("/")) -> tuple[int, str]:
    """How many threads to compute with, and why. ``root`` has ``proc`` and ``sys`` below it.

    What was asked for; else one per core, but no more than the quota of CPU time is worth, rounded up:
    threads beyond that would be stopped in the middle of a step while all others wait for them.
    """
    if requested:
        return requested, "as asked for"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    if quota is not None and quota < cores:
        return max(1, math.ceil(quota)), f"the control group has a CPU quota of {quota:g} cores"
    return cores, "one per core this process may use"


def cpu_quota(root: Path) -> float | None:
    """The least quota, in cores, of this process's control group and of those above it; None: there is none.

    Files: Linux, Documentation/admin-guide/cgroup-v2.rst (``cpu.max``) and scheduler/sched-bwc.rst (version
    1's ``cpu.cfs_quota_us``). In a container the group's own path may not be there: then the mount's top is
    the container's group.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    quotas = []
    mounts = root / "sys/fs/cgroup"
    for line in ["0::/", "0:cpu:/", *lines]:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = mounts / controllers
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if top == folder or top in folder.parents:
                quotas.append(_quota_v1(folder) if controllers else _quota_v2(folder))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return _cores(quota, period)


def _quota_v1(folder: Path) -> float | None:
    return _cores(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _cores(quota: str, period: str) -> float | None:
    """Microseconds of CPU time in a period of so many. ``max`` and -1 are no quota."""
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)

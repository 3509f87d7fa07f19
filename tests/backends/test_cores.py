"""How many threads a machine or a container is worth."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tenfold.backends.cores import choose_threads, cpu_quota


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v1(folder: str, quota: int, period: int = 100000) -> dict[str, str]:
    top = f"sys/fs/cgroup/{folder}/cpu.cfs_"
    return {f"{top}quota_us": f"{quota}\n", f"{top}period_us": f"{period}\n"}


V2 = "sys/fs/cgroup/"
CASES: dict[str, tuple[dict[str, str], float | None]] = {
    "nothing": ({}, None),
    "v2 in a container": ({"proc/self/cgroup": "0::/\n", V2 + "cpu.max": "150000 100000\n"}, 1.5),
    "v2 without a quota": ({"proc/self/cgroup": "0::/\n", V2 + "cpu.max": "max 100000\n"}, None),
    "v2, of a service": ({"proc/self/cgroup": "0::/a/b\n", V2 + "a/b/cpu.max": "50000 100000"}, 0.5),
    "v2, of a group above": (
        {"proc/self/cgroup": "0::/a/b\n", V2 + "a/b/cpu.max": "max 100000", V2 + "a/cpu.max": "9 3"},
        3.0,
    ),
    "v2, path of the host": ({"proc/self/cgroup": "0::/host/x\n", V2 + "cpu.max": "200000 100000"}, 2.0),
    "v1 in a container": ({"proc/self/cgroup": "1:cpu:/\n", **v1("cpu", 250000)}, 2.5),
    "v1 without a quota": ({"proc/self/cgroup": "1:cpu:/\n", **v1("cpu", -1)}, None),
    "v1, two controllers": ({"proc/self/cgroup": "4:cpu,cpuacct:/x\n", **v1("cpu,cpuacct/x", 100000)}, 1.0),
    "v1, other controllers": ({"proc/self/cgroup": "4:cpuset:/x\n", **v1("cpuset/x", 100000)}, None),
    "no proc": ({V2 + "cpu.max": "150000 100000"}, 1.5),
    "nonsense": ({"proc/self/cgroup": "0::/\n", V2 + "cpu.max": "many 0\n"}, None),
    "no period": ({"proc/self/cgroup": "0::/\n", V2 + "cpu.max": "100 0\n"}, None),
    "outside of the mount": ({"proc/self/cgroup": "0::/../../x\n", V2 + "cpu.max": "max 100000\n"}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_quota_is_that_of_the_control_groups(tmp_path: Path, case: str) -> None:
    """Both versions, the process's own group or one above it; none where there is none."""
    files, cores = CASES[case]
    assert cpu_quota(system(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("cores", "quota", "threads"),
    [(8, "max", 8), (8, "150000", 2), (8, "100000", 1), (8, "10000", 1), (8, "900000", 8), (2, "190000", 2)],
)
def test_threads_are_no_more_than_cores_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, quota: str, threads: int
) -> None:
    """The quota is rounded up, and the plan says when it decided."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    system(tmp_path, {V2 + "cpu.max": f"{quota} 100000"})
    found, why = choose_threads(0, tmp_path)
    assert found == threads
    assert ("quota" in why) == (quota != "max" and int(quota) < cores * 100000)
    assert choose_threads(5, tmp_path) == (5, "as asked for")

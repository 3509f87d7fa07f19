"""How much memory this process holds, now and at its most, and how fast the machine reads it."""

from __future__ import annotations

import multiprocessing
import resource
import sys
from concurrent.futures import ProcessPoolExecutor

from tenfold import _native


def read_bandwidth(threads: int) -> float:
    """Bytes per second that ``threads`` threads read from memory.

    In a process of its own, for the memory that it reads would count as this one's peak.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_read_bandwidth, threads).result()


def _read_bandwidth(threads: int) -> float:
    return _native.read_bandwidth(threads)


def resident_bytes() -> int:
    """Resident now; where there is no /proc, the most so far."""
    return _status("VmRSS") or _most_by_rusage()


def peak_resident_bytes() -> int:
    """Most that was resident at once. On Linux of this program alone: rusage would also count the process
    that it was forked from."""
    return _status("VmHWM") or _most_by_rusage()


def private_bytes() -> int:
    """Resident now and not the content of files, which the system can drop at will; where there is no /proc,
    the same as `resident_bytes`."""
    return _status("RssAnon") or resident_bytes()


def _status(field: str) -> int | None:
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _most_by_rusage() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024

"""How far a long command is, on standard error: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

from tqdm import tqdm

LINE_EVERY_S = 10.0
BAR_EVERY_S = 2.0


class Progress:
    """Work of ``total`` ``units`` that goes on while this is open.

    It is told of by a thread, so that also a single step that takes minutes is seen to be under way.
    """

    def __init__(self, total: float, units: str, phase: str, every_s: float | None = None) -> None:
        """``every_s``: seconds between two lines; None: as it is usual, by whether there is a terminal."""
        self._terminal = sys.stderr.isatty()
        self._every_s = every_s or (BAR_EVERY_S if self._terminal else LINE_EVERY_S)
        self._total, self._units = total, units
        self._phase, self._note, self._done = phase, "", 0.0
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> Progress:
        if self._terminal:
            self._bar = tqdm(
                total=self._total,
                desc=self._phase,
                bar_format="{l_bar}{bar}| {elapsed}{postfix}",
                leave=False,
            )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.close()

    def at(
        self,
        done: float | None = None,
        phase: str | None = None,
        note: str | None = None,
        total: float | None = None,
    ) -> None:
        """What is known now; what is None stays. ``done`` is of all, not since the last call; ``note`` is
        further news, for people."""
        self._done = self._done if done is None else done
        self._phase = self._phase if phase is None else phase
        self._note = self._note if note is None else note
        self._total = self._total if total is None else total
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.set_description(self._phase, refresh=False)
            self._bar.set_postfix_str(self._note, refresh=False)
            self._bar.update(self._done - self._bar.n)

    def line(self) -> str:
        """What is known now, on one line."""
        seconds = round(time.monotonic() - self._began)
        took = f"{seconds // 60} min {seconds % 60} s" if seconds >= 60 else f"{seconds} s"
        parts = [f"{self._done:.0f} of {self._total:.0f} {self._units}", self._note, took]
        return f"{self._phase}: {', '.join(part for part in parts if part)}"

    def _tell(self) -> None:
        while not self._over.wait(self._every_s):
            if self._bar is not None:
                self._bar.refresh()
            else:
                print(self.line(), file=sys.stderr, flush=True)

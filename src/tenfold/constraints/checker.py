"""The first look at a constraint, in a process that may die of it.

llguidance can overflow its stack and can compile without end, and neither can be caught in the process where
it happens. So a front never compiles: a `Checker` hands each constraint that it does not know to a process
of its own (`tenfold.constraints.checking`), which has limits, and what does not come back from there is
refused. What does come back is compiled by the worker by the same code, so within about the same limits.

Who owns what: a `Checker` has up to `PROCESSES` threads, and as many processes; a process is used by one
thread at a time, or is idle. Verdicts are remembered, good and bad, so a constraint that is sent again costs
nothing, and one that kills does so once.
"""

from __future__ import annotations

import hashlib
import logging
import select
import signal
import subprocess
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from tenfold.constraints.compiler import SIMPLER, TOO_LARGE, Vocabulary
from tenfold.constraints.pipe import Verdict, VocabularyWords, receive, send
from tenfold.constraints.size import check_size
from tenfold.interpreter import python_command
from tenfold.limits import RequestError, Unsupported
from tenfold.protocol import Constraint

log = logging.getLogger(__name__)

CPU_S = 1.0
"""Of a process's own time, for one constraint; an ordinary one takes some milliseconds."""
MEMORY_BYTES = 256 << 20
"""Beyond what a process has before."""
WALL_S = 15.0
"""Until an answer, however busy the machine is; and until a process has started."""
WAIT_S = 10.0
"""For a process that is free."""
PROCESSES = 2
"""One that is at its limit holds nobody up, so long as there is one such constraint at a time."""
KNOWN = 4096
"""Verdicts; a kilobyte each at most."""
REASONS = ("invalid", "time", "memory", "crash")
"""Why a constraint is refused: by what it says; because its check took too long or too much; as it killed."""

_BOOT = "from tenfold.constraints.checking import main\nmain({cpu_s}, {memory_bytes})"
_DEATHS: dict[int, tuple[str, str]] = {
    signal.SIGPROF: ("time", f"takes more than {CPU_S:g} s to compile, which is too costly. {SIMPLER}"),
    signal.SIGABRT: ("memory", TOO_LARGE),
    **dict.fromkeys(
        (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP),
        ("crash", f"cannot be compiled: the compiler crashes on it. {SIMPLER}"),
    ),
}
"""Signals that a process ends by through its own doing, and what that says of the constraint."""


class CheckFailed(RuntimeError):
    """It is not known whether the constraint can be enforced, through no fault of its own."""


class Checker:
    """Whether constraints can be enforced. May be used from several threads; close it."""

    def __init__(self, load: Callable[[], Vocabulary], vocab_size: int) -> None:
        """As of `tenfold.constraints.compiler.Compiler`."""
        self._load = load
        self._rows = vocab_size
        self._words: VocabularyWords | None = None
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="constraint")
        self._processes: set[_Process] = set()
        self._idle: list[_Process] = []
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._closed = False
        self.refused: Counter[str] = Counter()
        """Constraints, by one of `REASONS`."""
        self.restarts = 0
        """Times that a process had to be started again."""

    def check(self, constraint: Constraint) -> None:
        """Waits for the verdict. Raises RequestError, naming the constraint's field, for one that cannot be
        enforced, CheckFailed."""
        if (begun := self.begin(constraint)) is not None:
            begun.result()

    def begin(self, constraint: Constraint) -> Future[None] | None:
        """A check that will end, with nothing or as `check` does; None: it is known that nothing is wrong.
        Raises RequestError where that is known."""
        try:
            check_size(constraint)
        except RequestError:
            self.refused["invalid"] += 1
            raise
        name = _digest(constraint)
        if (known := self._recall(name)) is not None:
            _judge(constraint, known, self.refused)
            return None
        with self._lock:
            if self._closed:
                raise CheckFailed("no constraint is checked any more: shutting down")
            return self._threads.submit(self._check, constraint, name, time.monotonic())

    def close(self) -> None:
        """Ends the processes; checks under way fail."""
        with self._lock:
            self._closed = True
            processes = list(self._processes)
        for process in processes:
            process.kill()
        self._threads.shutdown()
        for process in processes:
            process.close()

    def _recall(self, name: bytes) -> Verdict | None:
        with self._lock:
            if (known := self._known.get(name)) is not None:
                self._known.move_to_end(name)
            return known

    def _check(self, constraint: Constraint, name: bytes, since: float) -> None:
        """On a thread of this checker's."""
        verdict = self._recall(name)  # of the same, sent at the same time
        if verdict is None:
            if time.monotonic() - since > WAIT_S:
                raise CheckFailed("too many constraints wait to be checked")
            try:
                verdict = self._asked(constraint)
            except _Died as death:
                if death.status is None:
                    raise
                verdict = self._asked(constraint)  # it was ended by somebody else
            with self._lock:
                self._known[name] = verdict
                if len(self._known) > KNOWN:
                    self._known.popitem(last=False)
        _judge(constraint, verdict, self.refused)

    def _asked(self, constraint: Constraint) -> Verdict:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None:
            process = self._start()
        try:
            verdict = process.ask(self._vocabulary(), constraint)
        except _Died as death:
            with self._lock:
                self._processes.discard(process)
                closed = self._closed
            process.close()
            if closed:
                raise CheckFailed("no constraint is checked any more: shutting down") from None
            self.restarts += 1
            log.warning("%s: %s", constraint.field, death)
            with suppress(CheckFailed):  # it is on its way until somebody needs it
                fresh = self._start()
                with self._lock:
                    self._idle.append(fresh)
            if death.status is None or -death.status not in _DEATHS:
                raise
            reason, problem = _DEATHS[-death.status]
            return Verdict(constraint.field, problem, reason=reason)
        with self._lock:
            self._idle.append(process)
        return verdict

    def _start(self) -> _Process:
        with self._lock:
            if self._closed:
                raise CheckFailed("no constraint is checked any more: shutting down")
            try:
                process = _Process()
            except OSError as error:
                raise CheckFailed(f"the process that checks constraints cannot be started: {error}") from None
            self._processes.add(process)
            return process

    def _vocabulary(self) -> VocabularyWords:
        if self._words is None:
            load = self._load()
            count = min(self._rows, load.vocab_size)
            self._words = VocabularyWords(
                [load.token_bytes(token) for token in range(count)],
                sorted(token for token in load.special_ids if token < count),
                [token for token in load.eos_token_ids if token < count],
                self._rows,
            )
        return self._words


class _Died(CheckFailed):
    """The process has ended without an answer."""

    def __init__(self, status: int | None) -> None:
        """``status``: as of `subprocess.Popen.returncode`; None: it gave no answer in time."""
        self.status = status
        how = f"gave no answer for {WALL_S:g} s" if status is None else f"ended with status {status}"
        super().__init__(f"the process that checks constraints {how}")


class _Process:
    """One process, as one thread uses it at a time."""

    def __init__(self) -> None:
        # In a session of its own: Ctrl-C in the terminal is for the front.
        self._process = subprocess.Popen(
            python_command(_BOOT.format(cpu_s=CPU_S, memory_bytes=MEMORY_BYTES)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._ready = False

    def ask(self, words: VocabularyWords, constraint: Constraint) -> Verdict:
        """Raises _Died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            if not self._ready:
                send(self._process.stdin, words)
                self._await()
                receive(self._process.stdout, Verdict)
                self._ready = True
            send(self._process.stdin, constraint)
            self._await()
            return receive(self._process.stdout, Verdict)
        except (OSError, EOFError):
            raise _Died(self._process.wait()) from None

    def _await(self) -> None:
        """Until there is something to read, or the end of it."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], WALL_S)[0]:
            self.kill()
            self._process.wait()
            raise _Died(None)

    def kill(self) -> None:
        """Whatever it is doing."""
        self._process.kill()

    def close(self) -> None:
        """Ends it, and waits for that."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was not written any more
                pipe.close()


def _digest(constraint: Constraint) -> bytes:
    text = "\0".join((constraint.kind, constraint.field, constraint.text))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _judge(constraint: Constraint, verdict: Verdict, refused: Counter[str]) -> None:
    """Raises RequestError for a constraint that is refused, and counts it."""
    if verdict.field is None:
        return
    refused[verdict.reason] += 1
    raise (Unsupported if verdict.unsupported else RequestError)(verdict.field, verdict.problem)

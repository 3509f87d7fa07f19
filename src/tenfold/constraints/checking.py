"""The process that looks at a constraint first. It may die of that, or be ended by its own limits.

It reads a vocabulary and then constraints from its standard input, and writes a verdict for each to its
standard output; it ends with its input.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

from tenfold.constraints.compiler import Compiler
from tenfold.constraints.pipe import Verdict, VocabularyWords, receive, send
from tenfold.limits import RequestError, Unsupported
from tenfold.protocol import Constraint


class _Vocabulary:
    """See `tenfold.constraints.compiler.Vocabulary`. Cuts text by its longest token, which is all that
    compiling takes."""

    def __init__(self, words: VocabularyWords) -> None:
        self._pieces = words.pieces
        self.vocab_size = len(words.pieces)
        self.special_ids = frozenset(words.special_ids)
        self.eos_token_ids = tuple(words.eos_token_ids)
        self._ids = {piece: id for id, piece in enumerate(words.pieces) if id not in self.special_ids}
        self._longest = max(map(len, self._ids), default=0)

    def token_bytes(self, token: int, /) -> bytes:
        return self._pieces[token]

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        data, at, tokens = text.encode(), 0, []
        while at < len(data):
            for end in range(min(len(data), at + self._longest), at, -1):
                if (token := self._ids.get(data[at:end])) is not None:
                    tokens.append(token)
                    break
            else:  # a byte that the vocabulary does not know
                end = at + 1
            at = end
        return tokens


def main(cpu_s: float, memory_bytes: int) -> None:
    """Each constraint may take so much of this process's time, and all of them so much memory beyond what
    the vocabulary takes; more ends the process, by SIGPROF or as the allocation that fails has it."""
    inbox, outbox = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    words = receive(inbox, VocabularyWords)
    compiler = Compiler(lambda: _Vocabulary(words), words.rows, kept=1)
    verdict(compiler, Constraint(kind="regex", text="a"))  # reads the vocabulary
    # What a panicking library prints would tell of a request in the front's log.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (used := _data_bytes()) is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (used + memory_bytes,) * 2)
    send(outbox, Verdict())
    while True:
        try:
            constraint = receive(inbox, Constraint)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # whose signal ends the process
        found = verdict(compiler, constraint)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(outbox, found)


def verdict(compiler: Compiler, constraint: Constraint) -> Verdict:
    """What the compiler says of it."""
    try:
        compiler.check(constraint)
    except RequestError as error:
        problem = str(error).removeprefix(f"{error.field} ")
        return Verdict(error.field, problem, isinstance(error, Unsupported))
    return Verdict()


def _data_bytes() -> int | None:
    """What RLIMIT_DATA counts, now; None where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))

"""Compiles constraints for one vocabulary, by llguidance, and keeps what was compiled.

llguidance descends through rules by recursion in Rust, and a thread's stack that overflows ends the
process. So all compiling is done on a thread of its own with a stack that outlasts the longest chain that
`size.MAX_BYTES` has room for (5 to 8 kB a rule or `$ref` were measured; the shortest rule has 9 bytes).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from tenfold.constraints.matcher import GrammarMatcher
from tenfold.constraints.messages import error_of, explained
from tenfold.limits import RequestError
from tenfold.protocol import Constraint

log = logging.getLogger(__name__)

KEPT = 64
"""Compiled grammars; a hundred kilobytes each, as a rule."""
SIMPLER = "Make it simpler: fewer or shorter patterns, alternatives and repetitions"
TOO_LARGE = f"takes too much memory to compile. {SIMPLER}"
TRIED = 4
"""Tokens that an answer is begun with before a grammar is taken."""
STACK_BYTES = 256 << 20
"""Address space; only what is used becomes memory."""
LIMITS = {
    "initial_lexer_fuel": 50_000,  # compiling: some 30 ms
    "step_lexer_fuel": 50_000,  # a mask: 4 ms
    "step_max_items": 20_000,  # a mask: 1 ms
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,  # of each request: 1 or 2 kB
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""llguidance's own counters, and what they come to where a grammar does its worst. A request that exceeds
one ends with an error, alone."""


class Vocabulary(Protocol):
    """What compiling needs of a tokenizer; `tenfold.checkpoint.tokenizer.Tokenizer` is one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def token_bytes(self, token: int, /) -> bytes: ...

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]: ...


class Compiler:
    """Makes matchers for constraints. May be used from several threads.

    ``load`` gives the vocabulary; it is called with the first constraint, as llguidance is imported then,
    and not before. ``vocab_size``: rows of the model's output, which is what a mask has bits for. ``kept``:
    so many compiled grammars.
    """

    def __init__(self, load: Callable[[], Vocabulary], vocab_size: int, *, kept: int = KEPT) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._most = kept
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._tokenizer: Any = None
        self._limits: Any = None
        self._ends: frozenset[int] = frozenset()
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self.compiled = 0
        """Grammars compiled, ..."""
        self.compile_ms = 0.0
        """... and how long that took in all, the vocabulary included."""

    def check(self, constraint: Constraint) -> None:
        """Raises RequestError, naming the constraint's field, for one that cannot be enforced: it is too
        large, not understood, has something in it that is not supported, or no text matches it."""
        self._prototype(constraint)

    def begin(self, constraint: Constraint) -> GrammarMatcher:
        """A matcher at the beginning of an answer. Raises as `check` does."""
        return GrammarMatcher(self._prototype(constraint), self._vocab_size, self._ends)

    def _prototype(self, constraint: Constraint) -> Any:
        """The compiled grammar, as a matcher that nobody uses."""
        key = constraint.kind, constraint.text
        with self._lock:
            prototype = self._kept.get(key)
            if prototype is None:
                began = time.perf_counter()
                prototype = self._apart(constraint)
                self.compile_ms += (time.perf_counter() - began) * 1000
                self.compiled += 1
                self._kept[key] = prototype
                if len(self._kept) > self._most:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return prototype

    def _apart(self, constraint: Constraint) -> Any:
        """`_compile` on the thread with the large stack."""
        if self._thread is None:
            before = threading.stack_size(STACK_BYTES)
            try:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
                self._thread.submit(lambda: None).result()
            finally:
                threading.stack_size(before)
        try:
            return self._thread.submit(self._compile, constraint).result()
        except RequestError:
            raise
        except MemoryError:
            raise RequestError(constraint.field, TOO_LARGE) from None
        except BaseException as error:  # a panic in the library's Rust is no Exception
            log.exception("compiling a constraint failed")
            what = f"{type(error).__name__}: {error}"
            raise RequestError(constraint.field, f"cannot be compiled: {error_of(what)}") from None

    def _compile(self, constraint: Constraint) -> Any:
        from llguidance import LLMatcher

        from tenfold.constraints.grammar import grammar_of

        grammar = grammar_of(constraint)
        if self._tokenizer is None:
            self._read_vocabulary()
        wrong, messages = LLMatcher.validate_grammar_with_warnings(
            grammar, self._tokenizer, limits=self._limits
        )
        if wrong or messages:  # a warning says what would not be enforced
            why = explained(constraint.kind, "; ".join(messages))
            raise RequestError(constraint.field, f"cannot be enforced: {why}")
        prototype = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        prototype.compute_bitmask()  # finds what no text matches; and copies need not do it again
        if prototype.is_error():
            why = explained(constraint.kind, prototype.get_error())
            raise RequestError(constraint.field, f"cannot be enforced: {why}")
        if error := self._tried(prototype):
            raise RequestError(
                constraint.field,
                f"is too large: its first {TRIED} tokens exceed a limit of the compiler ({error_of(error)}). "
                "Make its repetitions fewer or shorter",
            )
        return prototype

    def _tried(self, prototype: Any) -> str:
        """What goes wrong at the beginning of an answer: what is forced is followed far ahead with its first
        token, so a grammar that is too large is found here and not under way. Empty: nothing."""
        matcher = prototype.deep_copy()
        for _ in range(TRIED):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            bits = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            token = next((int(bit) for bit in bits if bit not in self._ends), None)
            if token is None or matcher.is_error():
                break
            matcher.consume_token(token)
        error: str = matcher.get_error()
        return error

    def _read_vocabulary(self) -> None:
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        vocabulary = self._load()
        ends = [token for token in vocabulary.eos_token_ids if token < self._vocab_size]
        if not ends:
            raise RequestError(
                "constraint", "is not supported by this model: it has no token that ends an answer"
            )
        self._limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Tokens(vocabulary, self._vocab_size, ends[0])),
            eos_token=ends,
        )
        self._ends = frozenset(ends)


class _Tokens:
    """The vocabulary as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, size: int, eos: int) -> None:
        self._vocabulary = vocabulary
        count = min(size, vocabulary.vocab_size)
        self.eos_token_id = eos
        # A row of the output without a token says nothing, and what says nothing is never allowed.
        self.tokens = [vocabulary.token_bytes(token) for token in range(count)] + [b""] * (size - count)
        self.special_token_ids = sorted(
            token for token in {*vocabulary.special_ids, *vocabulary.eos_token_ids} if token < count
        )

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        return self._vocabulary.encode(text, add_special_tokens=False, parse_special=False)

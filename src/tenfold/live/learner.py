"""The course of live learning in a worker: keep answers, have a head trained, put it live, watch it."""

from __future__ import annotations

import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from tenfold.backends.base import RecurrentProgram
from tenfold.live.conversations import Conversations
from tenfold.live.decide import Watch
from tenfold.live.folder import LOG, WORK, LiveFolder
from tenfold.live.head import LiveHead
from tenfold.live.job import LiveJob, Verdict
from tenfold.live.store import LiveStore
from tenfold.live.trainer import Trainer
from tenfold.speculate.base import DraftSequence
from tenfold.speculate.trained_head import HeadSettings
from tenfold.traffic.store import Features, Origin

log = logging.getLogger(__name__)

_SAVED_EVERY = 2000
"""Tokens between two notes of how many were seen."""


class LearnSettings(msgspec.Struct, frozen=True, kw_only=True):
    """When and how heads are trained."""

    first_tokens: int = 20_000
    """Of answers, before the first training; then whenever there are twice as many as at the last one, or as
    many new ones as are kept."""
    poll_s: float = 0.5
    head: HeadSettings = HeadSettings(epochs=4, learning_rate=3e-4, warm_up=0.1, minutes=12 * 60)
    """Gentler than from random weights, and with hours to spare: the process has what others leave."""


class Learner:
    """One thread calls all methods, between steps. None of them waits for anything but the disk and, when a
    head goes live, its loading. Owns ``folder``, ``store`` and the programs of ``head``."""

    def __init__(
        self,
        folder: LiveFolder,
        store: LiveStore,
        head: LiveHead,
        load: Callable[[Path], RecurrentProgram],
        model: Path,
        settings: LearnSettings,
    ) -> None:
        """``load`` makes a program of a head's folder; raises ValueError or OSError."""
        self.swaps: Counter[str] = Counter()
        """What became of trained heads: promoted, refused, rolled back, failed."""
        self.trainer: Trainer | None = None
        self._folder = folder
        self._store = store
        self._head = head
        self._load = load
        self._model = model
        self._settings = settings
        self._conversations = Conversations()
        self._due = 0.0
        self._saved = folder.state.seen
        self._tried = 0
        self._watch: Watch | None = None
        self._previous: RecurrentProgram | None = None
        """Of the head before, while the live one is watched."""

    def keep(self, sequence: DraftSequence, features: Features) -> None:
        """An answer has ended; ``features`` [rows, width] are of its first tokens."""
        if len(features) < 2:
            return
        answered = sequence.tokens[sequence.prompt_length :]
        origin = Origin(
            temperature=sequence.params.temperature,
            seed=sequence.seed,
            position=sequence.prompt_length,
            conversation=self._conversations.name(sequence.tokens[: sequence.prompt_length]),
            time=time.time(),
        )
        whole = sequence.params.max_tokens != len(answered)
        state = self._folder.state
        state.seen += self._store.add(answered, "stop" if whole else "length", features, origin)
        if state.seen >= self._saved + _SAVED_EVERY:
            self._save()

    def poll(self) -> None:
        """Before a step: looks for what has happened, now and then."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self._settings.poll_s
        if self.trainer is not None:
            found = self.trainer.poll()
            if found is not None:
                self.trainer = None
                self._ended(found)
        elif self._missing() <= 0:
            self._start()
        if self._watch is not None:
            self._look(self._watch)

    def close(self) -> None:
        """Ends a training under way. What drafts goes on drafting."""
        if self.trainer is not None:
            self.trainer.stop()
            self.trainer = None
        self._store.close()
        self._save()
        self._folder.close()

    def _missing(self) -> int:
        """Tokens until the next training."""
        state = self._folder.state
        wanted = max(self._settings.first_tokens, state.tried)
        return state.tried + min(wanted, self._store.capacity) - state.seen

    def _start(self) -> None:
        folder, state = self._folder, self._folder.state
        work = folder.path / WORK
        self._tried = state.seen
        number = state.last + 1
        while folder.head(number).exists():  # from before the state was lost
            number += 1
        state.last = number
        self._save()
        try:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            self.trainer = Trainer(
                LiveJob(
                    model=str(self._model),
                    live=str(folder.path),
                    present=str(folder.head(state.live)),
                    output=str(folder.head(number)),
                    work=str(work),
                    settings=self._settings.head,
                )
            )
        except OSError as error:
            self._ended(f"it could not be started: {error}")
            return
        log.info(
            "a head is trained on recent answers (%d tokens seen), process %d", state.seen, self.trainer.pid
        )

    def _ended(self, found: Verdict | str) -> None:
        """The training is over."""
        folder, state = self._folder, self._folder.state
        state.tried = self._tried
        if isinstance(found, Verdict) and found.promoted:
            self._promote(found)
        elif isinstance(found, Verdict):
            self.swaps["refused"] += 1
            log.info(
                "the head trained on recent answers stays out: %s. The next after %d tokens",
                found.why,
                self._missing(),
            )
        else:
            self._failed("training a head on recent answers failed", found)
        self._save()
        shutil.rmtree(folder.path / WORK, ignore_errors=True)

    def _failed(self, what: str, why: str) -> None:
        self.swaps["failed"] += 1
        log.error(
            "%s: %s. Serving goes on with the live head, the next training is after %d tokens; see %s",
            what,
            why,
            self._missing(),
            self._folder.path / LOG,
        )

    def _promote(self, verdict: Verdict) -> None:
        folder, state = self._folder, self._folder.state
        path = folder.head(state.last)
        began = time.monotonic()
        try:
            program = self._load(path)
        except Exception as error:  # whatever a damaged file makes of the loading
            self._failed(f"the head in {path} does not load", f"{type(error).__name__}: {error}")
            return
        self._watch = Watch(self._head.requests)
        before = self._head.exchange(program)
        if self._previous is not None:
            self._previous.close()
        self._previous = before
        state.before, state.live = state.live, state.last
        self._save()
        folder.drop_heads()
        self.swaps["promoted"] += 1
        log.info(
            "a head trained on recent answers is live (%s, loaded in %.0f ms): %s",
            path,
            (time.monotonic() - began) * 1e3,
            verdict.why,
        )

    def _look(self, watch: Watch) -> None:
        """Compares the live head with the one before it."""
        found = watch.look(list(self._head.requests))
        if found == "open" or self._previous is None:
            return
        if found == "worse":
            assert watch.old is not None and watch.new is not None
            state = self._folder.state
            self._head.exchange(self._previous).close()
            state.live = state.before
            self._save()
            self._folder.drop_heads()
            self.swaps["rolled back"] += 1
            log.warning(
                "the head before is live again (%s): of the new one's first drafts %.3f stood, of its own "
                "%.3f",
                self._folder.head(state.live),
                watch.new.mean,
                watch.old.mean,
            )
        else:
            self._previous.close()
        self._watch = self._previous = None

    def _save(self) -> None:
        self._saved = self._folder.state.seen
        self._folder.save()

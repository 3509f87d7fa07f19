"""The course of learning with a training process that says what a test wants, and its faults."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tenfold.live import learner as live_learner
from tenfold.live import trainer as live_trainer
from tenfold.live.capture import LiveCapture
from tenfold.live.decide import LOOKS, Scores
from tenfold.live.folder import LOG, LiveFolder, LiveState
from tenfold.live.head import LiveHead
from tenfold.live.job import LiveJob, Verdict
from tenfold.live.learner import Learner, LearnSettings
from tenfold.live.speculator import LearningSpeculator
from tenfold.live.store import LiveStore
from tenfold.live.trainer import Trainer
from tenfold.speculate.fixed import FixedSpeculator
from tenfold.speculate.trained_head import HeadSettings
from tenfold.traffic.store import Identity
from tests.helpers.fake_recurrent import FakeRecurrent
from tests.helpers.live import BOOT
from tests.speculate.test_head import Sequence

IDENTITY = Identity(model="m", format="q8", kv_format="bf16", taps=("a",), width=6)
GOOD = Verdict(promoted=True, why="it is better")
BAD = Verdict(promoted=False, why="it is not better")


class FakeTrainer:
    """A training of which a test decides the end."""

    pid = 1

    def __init__(self, job: LiveJob) -> None:
        self.job = job
        self.found: Verdict | str | None = None
        self.stopped = False

    def poll(self) -> Verdict | str | None:
        return self.found

    def stop(self) -> None:
        self.stopped = True


class Program(FakeRecurrent):
    """Knows where it was loaded from, and whether it was closed."""

    def __init__(self, path: Path) -> None:
        super().__init__([0.9])
        self.path = path
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Place:
    """A learner in a folder, with 10 tokens to its first training."""

    def __init__(self, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        drafter.mkdir(exist_ok=True)
        monkeypatch.setattr(live_learner, "Trainer", FakeTrainer)
        self.loaded: list[Program] = []
        self.fault: Exception | None = None
        self.folder = LiveFolder(drafter)
        self.own = Program(drafter)
        self.head = LiveHead(self.own)
        self.learner = Learner(
            self.folder,
            LiveStore(self.folder.path, IDENTITY),
            self.head,
            self._load,
            drafter / "model",
            LearnSettings(first_tokens=10, poll_s=0.0),
        )

    def _load(self, path: Path) -> Program:
        if self.fault is not None:
            raise self.fault
        self.loaded.append(Program(path))
        return self.loaded[-1]

    def answer(self, tokens: int) -> None:
        """So many tokens more."""
        sequence = Sequence([1, *range(tokens)], None)
        self.learner.keep(sequence, np.zeros((tokens, 6), np.uint16))

    @property
    def trainer(self) -> Any:
        return self.learner.trainer

    def train(self, found: Verdict | str, tokens: int = 10) -> FakeTrainer:
        """A training from its beginning to its end."""
        self.answer(tokens)
        self.learner.poll()
        trainer: FakeTrainer = self.trainer
        if isinstance(found, Verdict) and found.promoted:
            Path(trainer.job.output).mkdir(parents=True)
        trainer.found = found
        self.learner.poll()
        return trainer

    def serve(self, scored: int, stood: int, count: int = LOOKS[-1]) -> None:
        """Requests with drafts of the live head."""
        self.head.requests.extend([Scores(scored, stood)] * count)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    place = Place(tmp_path / "drafter", monkeypatch)
    yield place
    place.learner.close()


def test_trained_at_first_and_then_at_twice_as_much(place: Place) -> None:
    """Whatever came of it; one at a time; from the head that is live."""
    place.answer(8)
    place.learner.poll()
    assert place.trainer is None
    assert place.train(BAD, 2).job.present == str(place.folder.drafter)
    place.answer(8)
    place.learner.poll()
    assert place.trainer is None
    job = place.train(GOOD, 2).job
    assert place.head.exchange(place.loaded[0]) is place.loaded[0]
    assert place.train("killed", 20).job.present == job.output
    assert place.learner.swaps == {"refused": 1, "promoted": 1, "failed": 1}
    assert place.train(BAD, 40).job.output != job.output


def test_a_head_that_does_well_stays_and_the_one_before_is_kept_on_disk_alone(place: Place) -> None:
    """Its program goes once the watch is over, its folder when the next but one is live."""
    place.serve(20, 10)
    outputs = []
    for number in range(3):
        outputs.append(Path(place.train(GOOD, 10 * 2**number).job.output))
        before = [place.own, *place.loaded][-2]
        assert not before.closed
        place.serve(20, 10)
        place.learner.poll()
        assert before.closed
    assert place.learner.swaps == {"promoted": 3}
    assert [path.exists() for path in outputs] == [False, True, True]
    assert not place.loaded[-1].closed


def test_a_head_that_does_worse_is_rolled_back(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """The one before drafts again, also after a restart; the log says what was seen."""
    place.serve(20, 10)
    output = Path(place.train(GOOD).job.output)
    place.serve(20, 9, LOOKS[0] - 1)
    place.learner.poll()
    assert place.learner.swaps == {"promoted": 1}
    place.head.requests.clear()
    place.serve(20, 2, LOOKS[0])
    place.learner.poll()
    assert place.learner.swaps == {"promoted": 1, "rolled back": 1}
    assert "of the new one's first drafts 0.100 stood, of its own 0.500" in caplog.text
    assert place.loaded[0].closed and not place.own.closed
    assert place.head.exchange(place.own) is place.own
    assert not output.exists()
    assert place.folder.state.live == 0
    assert msgspec.json.decode((place.folder.path / "state.json").read_bytes(), type=LiveState).live == 0


def test_a_head_that_does_not_load_is_left_alone(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """The live one goes on; the log names the folder."""
    place.fault = ValueError("not the weights")
    output = place.train(GOOD).job.output
    assert place.learner.swaps == {"failed": 1}
    assert place.head.exchange(place.own) is place.own
    assert f"{output} does not load: ValueError: not the weights" in caplog.text
    assert place.folder.state.live == 0


def test_a_restart_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen, tried and live; a training under way is ended, and begun again."""
    first = Place(tmp_path / "drafter", monkeypatch)
    first.train(GOOD)
    first.answer(15)
    first.learner.poll()
    trainer = first.trainer
    assert trainer is not None
    first.learner.close()
    assert trainer.stopped
    second = Place(tmp_path / "drafter", monkeypatch)
    state = second.folder.state
    assert (state.seen, state.tried, state.live) == (25, 10, 1)
    second.learner.poll()
    assert second.trainer.job.present == str(second.folder.head(1))
    second.learner.close()


def test_one_server_at_a_time_learns_in_a_folder(place: Place) -> None:
    """The other is told so; and a folder that is not there is not made."""
    with pytest.raises(ValueError, match="another server"):
        LiveFolder(place.folder.drafter)
    with pytest.raises(ValueError, match="not a drafter"):
        LiveFolder(place.folder.drafter / "nowhere")


@pytest.mark.parametrize(
    "state",
    [b"nonsense", b'{"version": 1, "future": 2}', msgspec.json.encode(LiveState(live=3, last=3)), b""],
)
def test_a_state_that_is_of_no_use_starts_anew(tmp_path: Path, state: bytes) -> None:
    """With the drafter's own head, and a folder that only its owner can read."""
    (tmp_path / "live").mkdir(mode=0o755)
    (tmp_path / "live/state.json").write_bytes(state)
    with LiveFolder(tmp_path) as folder:
        assert (folder.state.live, folder.state.seen) == (0, 0)
        assert folder.path.stat().st_mode & 0o777 == 0o700


def test_a_fault_of_the_learning_ends_the_learning_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once, and drafts, beginnings and ends go on."""
    calls: list[str] = []

    class Inner(FixedSpeculator):
        def propose(self, *args: Any) -> Any:
            calls.append("propose")
            return []

    def broken() -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(place.learner, "poll", broken)
    speculator = LearningSpeculator(Inner(place.head, 1), LiveCapture(6), place.learner)
    for _ in range(3):
        speculator.propose([], 0, [])
    assert calls == ["propose"] * 3
    assert [
        record.message.startswith("learning from recent answers has failed") for record in caplog.records
    ] == [True]
    assert speculator.report().head_swaps == {}


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_a_training_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a line, without a stack for what can be mended; killed, it says so."""
    monkeypatch.setattr(live_trainer, "_BOOT", BOOT)
    job = LiveJob(
        model=str(tmp_path / "gone.gguf"),
        live=str(tmp_path),
        present=str(tmp_path),
        output=str(tmp_path / "o"),
        work=str(tmp_path),
        settings=HeadSettings(),
    )
    trainer = Trainer(job)
    trainer._process.wait(60)
    found = trainer.poll()
    assert isinstance(found, str) and "gone.gguf" in found
    trainer = Trainer(job)
    assert trainer.poll() is None
    trainer.stop()
    assert trainer.poll() == "killed by signal 9 (out of memory?)"
    assert LOG in {path.name for path in tmp_path.iterdir()}

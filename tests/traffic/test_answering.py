"""The target answers traffic."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tenfold.protocol import Chunk, EngineSettings
from tenfold.speculate.base import Outcome
from tenfold.traffic.answering import (
    Answered,
    Capture,
    agreement,
    answer_params,
    answer_traffic,
    check_modes,
    parse_modes,
)
from tenfold.traffic.reading import TrafficRequest
from tenfold.traffic.running import EngineFault
from tenfold.traffic.store import Answer, AnswerStore, Identity
from tests.helpers.fake_engine import FakeConfig, FakeEngine
from tests.helpers.fake_text import load_fake_text, piece_of
from tests.helpers.traffic import traffic_request

TEXT = load_fake_text("")
IDENTITY = Identity(model="m", format="q4", kv_format="bf16", taps=("a",), width=2)


class Capturing(FakeEngine):
    """Calls a speculator as an engine does; the features of a token are made of the token. Stops by
    KeyboardInterrupt after so many steps."""

    def __init__(self, capture: Capture, steps: int = 10**9, features: bool = True) -> None:
        super().__init__(EngineSettings(model="", max_running=8), FakeConfig())
        self.capture = capture
        self.steps = steps
        self.features = features
        self.tokens: dict[str, list[int]] = {}

    def step(self) -> list[Chunk]:
        if not self.steps:
            raise KeyboardInterrupt
        self.steps -= 1
        before = {id: list(tokens) for id, tokens in self.tokens.items()}
        self.capture.propose([self.sequence(id) for id in before], 0, [0] * len(before))
        chunks = super().step()
        for chunk in chunks:
            self.tokens.setdefault(chunk.id, []).extend(chunk.tokens)
        self.capture.observe(
            [Outcome(self.sequence(id), 0, 0, self.tokens[id][-1:]) for id in before], 1, 1.0
        )
        for chunk in chunks:
            if chunk.finish is not None:
                del self.tokens[chunk.id]
        return chunks

    def sequence(self, id: str) -> Any:
        tokens = self.tokens[id]
        features = np.array([tokens[-1], len(tokens)], np.float32) if self.features else None
        return SimpleNamespace(id=id, tokens=[9, *tokens], prompt_length=1, features=features)


def answer(
    folder: Path, requests: list[TrafficRequest], *modes: str, steps: int = 10**9
) -> tuple[list[Answered], list[tuple[int, int]], np.ndarray[Any, Any]]:
    """Answers, what progress told, and the features as float32."""
    told: list[tuple[int, int]] = []
    capture = Capture(2)
    with AnswerStore(folder, IDENTITY) as store:
        engine = Capturing(capture, steps)
        found = answer_traffic(
            engine,
            capture,
            TEXT,
            store,
            requests,
            parse_modes(modes),
            streams=3,
            progress=lambda answers, tokens: told.append((answers, tokens)),
        )
        features = (store.features().astype(np.uint32) << 16).view(np.float32)
    return found, told, features


def check(found: list[Answered], features: np.ndarray[Any, Any]) -> None:
    """Each token of each answer has its own features."""
    for one in found:
        rows = features[one.answer.first_row : one.answer.first_row + one.answer.rows]
        assert one.answer.rows == len(one.answer.tokens)
        # The tokens of the fake are below 512, whose bfloat16 are within 1.
        assert np.abs(rows[:, 0] - one.answer.tokens).max() <= 1
        assert rows[:, 1].tolist() == list(range(1, len(rows) + 1))


def test_every_token_of_every_answer_comes_with_its_features(tmp_path: Path) -> None:
    """Many at once, each in its own place."""
    requests = [traffic_request(i, max_tokens=3 + i) for i in range(12)]
    found, told, features = answer(tmp_path, requests)
    assert [one.request for one in found] == requests
    assert [len(one.answer.tokens) for one in found] == [3 + i for i in range(12)]
    check(found, features)
    assert told[0] == (0, 0) and told[-1] == (12, sum(3 + i for i in range(12)))


@pytest.mark.parametrize("steps", [1, 5, 9, 14, 30])
def test_work_is_taken_up_where_it_was_interrupted(steps: int, tmp_path: Path) -> None:
    """The answers are those of an undisturbed run, and finished ones are not made again."""
    requests = [traffic_request(i, max_tokens=3 + i % 7) for i in range(12)]
    whole, _, _ = answer(tmp_path / "whole", requests, "own,sampled")
    with pytest.raises(KeyboardInterrupt):
        answer(tmp_path / "cut", requests, "own,sampled", steps=steps)
    found, told, features = answer(tmp_path / "cut", requests, "own,sampled")
    assert [one.answer.tokens for one in found] == [one.answer.tokens for one in whole]
    check(found, features)
    in_order = sorted((one.answer for one in found), key=lambda one: one.first_row)
    assert told[-1][1] == sum(len(one.tokens) for one in in_order[told[0][0] :])


def test_equal_requests_are_answered_once(tmp_path: Path) -> None:
    """Greedy ones whatever their seeds; both count as traffic."""
    twice = [traffic_request(i, prompt=(1, 2), temperature=0, seed=i) for i in (1, 2)]
    found, told, _ = answer(tmp_path, twice)
    assert len(found) == 2 and found[0].answer == found[1].answer
    assert told == [(1, 0), (2, 8)]


def test_an_engine_without_hidden_states_is_said(tmp_path: Path) -> None:
    """Training on nothing would look like training."""
    capture = Capture(2)
    with AnswerStore(tmp_path, IDENTITY) as store, pytest.raises(EngineFault, match="no hidden states"):
        engine = Capturing(capture, features=False)
        answer_traffic(engine, capture, TEXT, store, [traffic_request(1)], parse_modes([]))


def test_features_behind_a_gap_are_left_out() -> None:
    """A sequence that was resumed has none for a token: its rows must not move up."""
    capture = Capture(2)
    for tokens, features in (([5], True), ([5, 6], False), ([5, 6, 7], True)):
        row = np.array([tokens[-1], 0], np.float32) if features else None
        sequence: Any = SimpleNamespace(id="a", tokens=[1, *tokens], prompt_length=1, features=row)
        capture.propose([sequence], 0, [0])
    assert capture.take("a", 3).shape == (1, 2)
    assert capture.take("a", 3).shape == (0, 2)


def test_modes_are_given_for_all_or_for_a_class() -> None:
    """The body's own parameters where nothing is said."""
    assert parse_modes([]) == {None: ("own",)}
    assert parse_modes(["greedy,sampled", "a=own"]) == {None: ("greedy", "sampled"), "a": ("own",)}
    check_modes({None: ("own",), "chat": ("own",)}, [traffic_request(1)])


@pytest.mark.parametrize(
    ("options", "says"),
    [(["hot"], "'hot'"), (["=own"], "CLASS="), ([""], "greedy"), (["own", "greedy"], "twice")],
)
def test_wrong_modes_are_refused(options: list[str], says: str) -> None:
    """With what may be written."""
    with pytest.raises(ValueError, match=says):
        parse_modes(options)


def test_modes_for_a_class_that_is_not_there_are_refused() -> None:
    """A typing error must not go unnoticed for an hour."""
    with pytest.raises(ValueError, match=r"'agnet'.*it has chat"):
        check_modes(parse_modes(["agnet=own"]), [traffic_request(1)])


def test_an_answer_is_drawn_as_the_mode_says() -> None:
    """The other parameters stay, the length is limited, and log-probabilities would cost time for nothing."""
    params = traffic_request(3, temperature=0.9, top_p=0.5, max_tokens=1000, logprobs=2).params
    own, greedy, sampled = (answer_params(params, mode, 64) for mode in ("own", "greedy", "sampled"))
    assert (own.temperature, own.seed, own.max_tokens, own.logprobs) == (0.9, 3, 64, None)
    assert (greedy.temperature, greedy.seed, greedy.top_p) == (0, 0, 0.5)
    assert (sampled.temperature, sampled.seed, sampled.top_p) == (0.7, 3, 0.5)


def test_recorded_answers_are_compared_with_the_targets_own() -> None:
    """Word for word, as far as the target went; its end-of-sequence token is no word."""
    words = (40, 41, 42)
    said = "".join(map(piece_of, words))

    def one(recorded: str | None, tokens: tuple[int, ...], finish: Any) -> Answered:
        made = Answer(key="k", tokens=tokens, finish=finish, first_row=0, rows=0, checksum=0)
        return Answered(traffic_request(1, answer=recorded), "own", made)

    found = [
        one(said, (*words, 0), "stop"),
        one(said + " more", words, "length"),
        one(said + " more", (*words, 0), "stop"),
        one("other", words, "length"),
        one(None, words, "length"),
    ]
    assert agreement(found, TEXT) == (2, 4)

"""What the engine promises of drafts, in small scenes over the fake program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from tenfold.backends.base import StepBatch, StepOutput
from tenfold.engine.engine import Engine
from tenfold.engine.limits import EngineConfig
from tenfold.kv.pages import IntegrityError
from tenfold.limits import RequestError
from tenfold.protocol import Request
from tenfold.speculate.base import DraftSequence, Outcome
from tenfold.speculate.controller import Controller
from tenfold.speculate.cost_curve import CostCurve
from tenfold.speculate.fixed import FixedSpeculator
from tenfold.speculate.head import HeadDrafter
from tests.helpers.drafters import FunctionDrafter, Texts, drafters
from tests.helpers.fake_program import FakeProgram
from tests.helpers.fake_recurrent import FakeRecurrent
from tests.helpers.identity import Outcomes, at_once, differences, play, texts_of
from tests.helpers.requests import request, run

LONG = [1 + i * 7 % 39 for i in range(200)]
FREE: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}


def fixed(name: str, texts: Texts, k: int = 4) -> FixedSpeculator:
    """The drafter of this name, for the fake program's vocabulary."""
    return FixedSpeculator(drafters(texts, 40)[name], k)


def plain(*requests: Request, **program: int) -> Outcomes:
    """Answers without speculation."""
    return play(FakeProgram(**program), at_once(list(requests)))[0]


class Recorder(FakeProgram):
    """Remembers the batches: rows of each sequence, wanted rows, sampling."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.seen: list[dict[str, list[Any]]] = []

    def step(self, batch: StepBatch) -> StepOutput:
        """Runs one step."""
        sampling = batch.sampling
        self.seen.append(
            {
                "tokens": batch.tokens.tolist(),
                "rows": np.diff(batch.row_offsets).tolist(),
                "wanted": batch.logit_rows.tolist(),
                **{name: getattr(sampling, name).tolist() for name in sampling.__struct_fields__},
            }
        )
        return super().step(batch)


def test_right_drafts_make_fewer_steps_and_longer_chunks() -> None:
    """With K right tokens a step, n tokens take 1 + (n - 1) / (K + 1) steps, and each chunk has K + 1."""
    one = request("a", LONG[:20], logprobs=2, **{**FREE, "max_tokens": 21})
    law = plain(one)
    engine = Engine(FakeProgram(), speculator=fixed("oracle", texts_of(law)))
    engine.add(one)
    chunks = [chunk for _ in range(5) for chunk in engine.step()]
    assert [len(chunk.tokens) for chunk in chunks] == [1, 5, 5, 5, 5]
    assert [len(chunk.logprobs or ()) for chunk in chunks] == [1, 5, 5, 5, 5]
    assert [chunk.finish for chunk in chunks] == [None] * 4 + ["length"]
    assert [token for chunk in chunks for token in chunk.tokens] == law["a"].tokens
    assert not engine.has_work


def test_each_row_of_a_draft_draws_as_if_the_draft_had_been_drawn() -> None:
    """Position, penalties with the drafts before it (new ones, repeated ones, ones of the prompt), bias and
    the rest, row by row."""
    one = request(
        "a",
        [8, 9, 8],
        **FREE,
        temperature=0.5,
        presence_penalty=0.5,
        logit_bias={5: -math.inf, 6: 1.0},
        seed=-1,
        logprobs=1,
    )
    program = Recorder()
    drafter = FunctionDrafter("fixed", lambda sequence, k: [9, 30, 30, 31][:k])
    engine = Engine(program, speculator=FixedSpeculator(drafter, 4))
    engine.add(request("b", [1, 2], **FREE))
    engine.add(one)
    first = [chunk.tokens[0] for chunk in engine.step()][1]
    engine.step()
    seen = program.seen[1]
    assert seen["rows"] == [5, 5]
    assert seen["wanted"] == list(range(10))
    assert seen["tokens"][5:] == [first, 9, 30, 30, 31]
    assert seen["position"] == [3, 4, 5, 6, 7, 4, 5, 6, 7, 8]
    assert seen["seed"] == [1] * 5 + [2**64 - 1] * 5
    assert seen["temperature"] == [1] * 5 + [0.5] * 5
    assert seen["logprobs"] == [-1] * 5 + [1] * 5
    assert seen["bias_offsets"] == [0] * 6 + [2, 4, 6, 8, 10]
    assert seen["bias_tokens"] == [5, 6] * 5
    assert seen["bias_values"] == [-math.inf, 1.0] * 5
    offsets = seen["history_offsets"]
    assert offsets[:6] == [0] * 6
    drafted = [first, 9, 30, 30, 31]
    for i in range(5):
        part = slice(offsets[5 + i], offsets[6 + i])
        counts = dict(zip(seen["history_tokens"][part], seen["history_counts"][part], strict=True))
        assert counts == {token: drafted[: i + 1].count(token) for token in {8, 9, *drafted[: i + 1]}}


@pytest.mark.parametrize("k", range(1, 9))
def test_nothing_follows_an_end(k: int) -> None:
    """End of sequence, a stop token, max_tokens and the context's end, wherever in a draft they fall: nothing
    after them is committed, streamed, counted or cached."""
    free = plain(request("a", LONG[:9], **FREE))["a"].tokens
    ends: list[dict[str, Any]] = [
        {"max_tokens": 11},
        {"stop_token_ids": (free[7],)},
        {"stop_token_ids": (free[12],), "logprobs": 1},
        {"max_tokens": None},
    ]
    requests = [request(f"{n}", LONG[:9], **{**FREE, **end}) for n, end in enumerate(ends)]
    requests.append(request("eos", LONG[:9], max_tokens=40, logit_bias={0: 4.0}))
    shape = {"max_context": 50}
    for one in requests:
        law = plain(one, **shape)
        program = FakeProgram(**shape)
        engine = Engine(program, speculator=fixed("too long", {one.id: [*law[one.id].tokens, *free]}, k))
        assert differences(law, run(engine, [one])) == []
        assert engine.load().generated_tokens == len(law[one.id].tokens)
        # As many rows are cached as without drafts: all but that of the last token.
        again = request("again", [*one.prompt, *law[one.id].tokens][:49])
        assert run(engine, [again])["again"].cached == run_after(one, again, **shape)["again"].cached


def run_after(one: Request, other: Request, **program: int) -> Outcomes:
    """Answers to ``other`` after ``one``, without speculation."""
    engine = Engine(FakeProgram(**program))
    run(engine, [one])
    return run(engine, [other])


def test_a_draft_is_cut_before_what_is_of_no_use() -> None:
    """A token that would end the request, a number that is no token, and what is beyond the request's length:
    none of them has a row in the step, nor what follows them."""
    law = plain(request("a", LONG[:9], **FREE))["a"].tokens
    one = request("a", LONG[:9], max_tokens=8, stop_token_ids=(39,))
    for guess, rows in (
        ([*law[1:3], 39, *law[4:]], 3),
        ([*law[1:4], 0, 1], 4),
        ([*law[1:3], 40, 1], 3),
        ([-1, 1], 1),
        ([2**70, 1], 1),
        (np.array(law[1:3], np.int32), 3),
        (law[1:] * 9, 7),
    ):
        program = Recorder()
        speculator = FixedSpeculator(FunctionDrafter("f", lambda sequence, k, guess=guess: guess), 100)  # type: ignore[misc]
        engine = Engine(program, speculator=speculator)
        engine.add(one)
        engine.step()
        engine.step()
        assert program.seen[1]["rows"] == [rows]
        load = engine.load().speculation
        assert load is not None
        assert (load.drafted_tokens, load.faults) == (rows - 1, 0)


def test_only_verified_rows_enter_the_cache() -> None:
    """Drafts that fill pages and are refused leave nothing behind: a prompt that is just what was drafted
    finds no more in the cache than what it shares with the text, and gets the text that it has alone."""
    one = request("a", LONG[:10], **FREE)
    law = plain(one)
    drafted: list[list[int]] = []

    def wrong(sequence: DraftSequence, k: int) -> list[int]:
        if sequence.id == "a":
            drafted.append([*sequence.tokens, *LONG[100 : 100 + k]])
            return LONG[100 : 100 + k]
        return []

    engine = Engine(FakeProgram(), speculator=FixedSpeculator(FunctionDrafter("wrong", wrong), 40))
    assert differences(law, run(engine, [one])) == []
    text = [*one.prompt, *law["a"].tokens]
    assert len(drafted) > 30
    for n, tokens in enumerate(drafted):
        other = request(f"{n}", tokens)
        answer = run(engine, [other])[other.id]
        shared = next(i for i, (a, b) in enumerate(zip(text, tokens, strict=False)) if a != b)
        # An earlier one of these prompts, too, has put its pages there.
        shared = max([shared, *(_shared(earlier, tokens) for earlier in drafted[:n])])
        assert answer.cached[0] <= shared
        assert answer.tokens == plain(other)[other.id].tokens


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """First tokens that two texts share."""
    both = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))


def test_drafts_never_cost_a_request_its_place() -> None:
    """In a memory too small for all, speculation puts nobody back whom plain decoding would not, and fails
    nobody: as many preemptions as without where all drafts are wrong, and every answer right."""
    requests = [request(f"r{i}", LONG[i * 20 : i * 20 + 20], **{**FREE, "max_tokens": 60}) for i in range(5)]
    law = plain(*requests)
    scene = at_once(requests)
    _, without = play(FakeProgram(kv_pages=12), scene)
    found, wrong = play(FakeProgram(kv_pages=12), scene, fixed("wrong", texts_of(law), 30))
    assert differences(law, found) == []
    assert wrong.preemptions == without.preemptions > 0
    assert wrong.speculation is not None
    assert wrong.speculation.drafted_tokens > 500
    found, right = play(FakeProgram(kv_pages=12), scene, fixed("oracle", texts_of(law), 30))
    assert differences(law, found) == []
    assert right.preemptions <= without.preemptions


def test_drafts_evict_nothing() -> None:
    """With a cache that fills the memory, a wrong draft of many pages takes none of it: the earlier prompt is
    found again as without speculation."""
    cached: list[list[int]] = []
    for k in (0, 60):
        engine = Engine(FakeProgram(kv_pages=10), speculator=fixed("random", {}, k))
        run(engine, [request("long", LONG[:129], max_tokens=1)])
        run(engine, [request("short", LONG[150:155], **{**FREE, "max_tokens": 10})])
        cached.append(run(engine, [request("again", LONG[:129], max_tokens=1)])["again"].cached)
    assert cached == [[128], [128]]


def test_what_the_cache_gives_is_the_same_with_drafts_and_without() -> None:
    """Waves of requests that go on from each other's texts, page for page: cached_tokens of each request, and
    the sum, are those without speculation."""

    def waves(k: int, name: str, texts: Texts) -> tuple[Outcomes, int]:
        engine = Engine(FakeProgram(kv_pages=40), speculator=fixed(name, texts, k))
        outcomes: Outcomes = {}
        for wave in range(6):
            requests = []
            for i in range(4):
                turn = LONG[8 * i : 8 * i + 20]
                earlier = [*turn, *outcomes[f"{i}.{wave - 1}"].tokens] if wave else []
                requests.append(request(f"{i}.{wave}", [*earlier, *turn], max_tokens=15 + i, seed=wave))
            run(engine, requests, outcomes)
        return outcomes, engine.load().cached_tokens

    law, cached = waves(0, "oracle", {})
    for name in drafters({}, 40):
        found, total = waves(5, name, texts_of(law))
        assert differences(law, found) == []
        assert {id: one.cached for id, one in found.items()} == {id: one.cached for id, one in law.items()}
        assert total == cached > 400


@pytest.mark.parametrize(
    ("rows", "logit_rows", "running"), [(3, 3, 3), (16, 4, 4), (16, 16, 4), (8, 8, 1), (64, 9, 8), (5, 64, 4)]
)
def test_limits_are_kept(rows: int, logit_rows: int, running: int) -> None:
    """No step has more rows or wanted rows than the program takes (the fake refuses those), however many
    tokens are drafted, and there are no more steps than without drafts."""
    requests = [request(f"r{i}", LONG[i : i + 30], max_tokens=20) for i in range(12)]
    law = plain(*requests)
    program = Recorder(max_rows=rows, max_logit_rows=logit_rows)
    engine = Engine(program, EngineConfig(max_running=running), fixed("too long", texts_of(law), 1000))
    assert differences(law, run(engine, requests)) == []
    load = engine.load().speculation
    assert load is not None
    assert load.drafted_tokens > 0
    alone = Recorder(max_rows=rows, max_logit_rows=logit_rows)
    run(Engine(alone, EngineConfig(max_running=running)), requests)
    assert program.batches <= alone.batches


def test_a_long_prompt_gets_half_of_the_rows_that_are_left() -> None:
    """While a prompt is computed in pieces, drafts have their half and decoding goes on."""
    law = plain(request("a", LONG[:4], **FREE))
    program = Recorder(max_rows=21)
    engine = Engine(program, speculator=fixed("too long", texts_of(law), 100))
    engine.add(request("a", LONG[:4], **FREE))
    engine.step()
    engine.add(request("long", LONG[:60], max_tokens=1))
    engine.step()
    engine.step()
    assert [seen["rows"] for seen in program.seen[1:]] == [[11, 10], [11, 10]]


class Watching(FixedSpeculator):
    """Remembers what it was told, and what of features it saw."""

    def __init__(self, drafter: FunctionDrafter, k: int, wants_features: bool) -> None:
        super().__init__(drafter, k, wants_features)
        self.outcomes: list[list[Outcome]] = []
        self.rows: list[int] = []
        self.saw: list[tuple[list[int], float | None]] = []
        self.drew: list[tuple[int, int, float]] = []
        """Of all tokens of all outcomes: the token before, its place, and the first feature."""

    def propose(
        self, sequences: Sequence[DraftSequence], rows: int, limits: Sequence[int]
    ) -> list[Sequence[int]]:
        """Looks at the features."""
        for one in sequences:
            self.saw.append((list(one.tokens), None if one.features is None else float(one.features[0])))
        return super().propose(sequences, rows, limits)

    def observe(self, outcomes: Sequence[Outcome], rows: int, step_ms: float) -> None:
        """Remembers."""
        assert step_ms > 0
        super().observe(outcomes, rows, step_ms)
        self.outcomes.append(list(outcomes))
        for one in outcomes:
            tokens, features = one.sequence.tokens, one.features
            if features is not None:
                assert len(features) == len(one.drawn)
                first = len(tokens) - len(one.drawn)
                self.drew += [
                    (tokens[first + i - 1], first + i - 1, row[0]) for i, row in enumerate(features)
                ]
        self.rows.append(rows)


class WithFeatures(FakeProgram):
    """Hands back, as features of a wanted row, a number made of the row's token and position."""

    def step(self, batch: StepBatch) -> StepOutput:
        """The step, with features in memory that the next step overwrites."""
        output = super().step(batch)
        if not batch.want_features:
            return output
        rows = batch.logit_rows
        self._features = getattr(self, "_features", np.zeros((self.info.max_logit_rows, 2), np.float32))
        self._features[:] = -1
        self._features[: len(rows), 0] = batch.tokens[rows] + 1000 * batch.positions[rows]
        return msgspec.structs.replace(output, features=self._features[: len(rows)])


def test_features_are_those_of_the_row_that_drew_the_last_token() -> None:
    """After prefill, after drafts that stood in part and in whole, for several sequences, also when one was
    put back meanwhile; a copy; and none where they are not wanted or not there."""
    requests = [request(f"r{i}", LONG[i * 20 : i * 20 + 20], **{**FREE, "max_tokens": 60}) for i in range(5)]
    law = plain(*requests)
    for name in ("oracle", "often right", "wrong"):
        speculator = Watching(drafters(texts_of(law), 40)[name], 5, True)
        found, load = play(WithFeatures(kv_pages=12), at_once(requests), speculator)
        assert differences(law, found) == []
        assert load.preemptions
        assert len(speculator.saw) > 40
        # The last token was drawn by the row of the token before it.
        for tokens, feature in speculator.saw:
            assert feature == tokens[-2] + 1000 * (len(tokens) - 2)
        # Outcomes have those of every token.
        assert len(speculator.drew) >= len(speculator.saw)
        for token, place, feature in speculator.drew:
            assert feature == token + 1000 * place
    for program, wanted in ((WithFeatures(), False), (FakeProgram(), True)):
        speculator = Watching(drafters(texts_of(law), 40)["oracle"], 5, wanted)
        play(program, at_once(requests), speculator)
        assert {feature for _, feature in speculator.saw} == {None}
        assert speculator.drew == []


def test_the_speculator_hears_what_became_of_its_drafts() -> None:
    """One outcome for each sequence that decoded, in order, drafts or not; the step's rows, prompts included;
    begin before the first question, end after the last outcome, learning from what ended by itself."""
    a, b = request("a", LONG[:6], **{**FREE, "max_tokens": 9}), request("b", LONG[9:20], **FREE)
    law = plain(a, b)
    drafter = drafters(texts_of(law), 40)["every third wrong"]
    speculator = Watching(drafter, 4, False)
    engine = Engine(FakeProgram(), speculator=speculator)
    engine.add(a)
    engine.step()
    assert (speculator.outcomes, drafter.begun) == ([], [])
    engine.add(b)
    engine.step()
    assert [[(o.sequence.id, o.drafted) for o in step] for step in speculator.outcomes] == [[("a", 4)]]
    assert speculator.rows == [5 + 11]
    engine.step()
    assert [o.sequence.id for o in speculator.outcomes[1]] == ["a", "b"]
    while not drafter.ended:
        engine.step()
    assert drafter.ended == [("a", True, law["a"].tokens)]
    assert engine.abort("b")
    assert drafter.ended[1][:2] == ("b", False)
    assert drafter.begun == []
    for step in speculator.outcomes:
        for outcome in step:
            text = law[outcome.sequence.id].tokens
            assert "".join(map(chr, outcome.drawn)) in "".join(map(chr, text))
            assert len(outcome.drawn) == outcome.accepted + 1
            assert outcome.accepted <= outcome.drafted
    assert sum(len(o.drawn) for step in speculator.outcomes for o in step if o.sequence.id == "a") == 8


def test_an_answer_that_ended_in_its_text_is_learnt_up_to_its_end() -> None:
    """Whoever sees a stop string aborts later than that: what came meanwhile is not learnt from, what came
    before is, and the request's last chunk is that of any abort."""
    one = request("a", LONG[:6], **FREE)
    law = plain(one)
    drafter = drafters(texts_of(law), 40)["oracle"]
    engine = Engine(FakeProgram(), speculator=FixedSpeculator(drafter, 4))
    engine.add(one)
    for _ in range(3):
        engine.step()
    assert engine.abort("a", 5)
    assert drafter.ended == [("a", True, law["a"].tokens[:5])]
    assert [chunk.finish for chunk in engine.step()] == ["abort"]
    engine.check_integrity()
    assert not engine.has_work


def test_a_sequence_that_ends_in_its_first_step_is_not_spoken_of() -> None:
    """No beginning, no end."""
    drafter = drafters({}, 40)["random"]
    run(Engine(FakeProgram(), speculator=FixedSpeculator(drafter, 2)), [request("a", [1], max_tokens=1)])
    assert (drafter.begun, drafter.ended) == ([], [])


def test_a_failed_step_ends_its_requests_for_the_speculator_too() -> None:
    """With drafts in the step: their pages come back, ends are told and not learnt from, others go on."""
    requests = [request(f"r{i}", LONG[i : i + 30], max_tokens=20) for i in range(3)]
    law = plain(*requests)
    drafter = drafters(texts_of(law), 40)["oracle"]
    program = FakeProgram(kv_pages=32)
    engine = Engine(program, EngineConfig(max_running=2), FixedSpeculator(drafter, 3))
    for one in requests:
        engine.add(one)
    engine.step()
    engine.step()
    program.failures.append(RuntimeError("planted"))
    outcomes = run(engine)
    assert [outcomes[f"r{i}"].finish for i in range(3)] == ["error", "error", law["r2"].finish]
    assert outcomes["r2"].tokens == law["r2"].tokens
    assert [(id, learn) for id, learn, _ in drafter.ended] == [("r0", False), ("r1", False), ("r2", True)]


def test_no_token_to_draw_within_a_draft() -> None:
    """Drafts that stood before the row that draws nothing are given out, with the error as their end."""

    class Spent(FakeProgram):
        """Draws nothing at position 14."""

        def step(self, batch: StepBatch) -> StepOutput:
            output = super().step(batch)
            output.tokens[batch.sampling.position == 14] = -1
            return output

    one = request("a", LONG[:9], **FREE)
    law = run(Engine(Spent()), [one])
    assert (law["a"].finish, len(law["a"].tokens)) == ("error", 5)
    texts = {"a": [*law["a"].tokens, 7, 7, 7]}
    for k in range(1, 7):
        engine = Engine(Spent(), speculator=fixed("oracle", texts, k))
        assert differences(law, run(engine, [one])) == []
        assert engine.load().generated_tokens == 5


def test_namespaces_share_nothing() -> None:
    """The same prompt in another namespace finds nothing in the cache; in its own it finds all. Part
    of a page, too, is found in the namespace alone."""
    engine = Engine(FakeProgram())
    one = request("a", LONG[:42])
    law = plain(one)["a"].tokens
    for id, namespace, cached in (("a", "x", 0), ("b", "y", 0), ("c", "", 0), ("d", "x", 41), ("e", "y", 41)):
        answer = run(engine, [msgspec.structs.replace(one, id=id, namespace=namespace)])[id]
        assert (answer.tokens, answer.cached) == (law, [cached])
    for id, namespace, cached in (("f", "z", 0), ("g", "x", 11)):
        part = msgspec.structs.replace(request(id, LONG[:12]), namespace=namespace)
        assert run(engine, [part])[id].cached == [cached]


def test_a_namespace_is_text() -> None:
    """Half of a surrogate pair is none, and is refused by name."""
    with pytest.raises(RequestError, match="namespace is"):
        Engine(FakeProgram()).add(msgspec.structs.replace(request("a", [1]), namespace="\ud800"))


def test_pages_of_refused_drafts_that_are_kept_are_found() -> None:
    """check_integrity sees a page that a sequence has no use for."""
    engine = Engine(FakeProgram(), speculator=fixed("random", {}, 0))
    engine.add(request("a", LONG[:14], **FREE))
    engine.step()
    engine.check_integrity()
    sequence = engine._scheduler.running[0]
    assert sequence.table is not None
    engine._cache.extend(sequence.table, 40)
    with pytest.raises(IntegrityError, match="keeps pages of drafts"):
        engine.check_integrity()


def test_the_load_tells_what_speculation_did() -> None:
    """Steps, tokens committed, drafted and accepted, and why nothing was drafted; nothing without one."""
    one = request("a", LONG[:20], **{**FREE, "max_tokens": 21})
    law = plain(one)
    assert Engine(FakeProgram()).load().speculation is None
    engine = Engine(FakeProgram(), speculator=fixed("oracle", texts_of(law)))
    run(engine, [one])
    counts = engine.load().speculation
    assert counts is not None
    assert (counts.steps, counts.committed_tokens) == (4, 20)
    assert (counts.drafted_tokens, counts.accepted_tokens, counts.faults) == (16, 16, 0)
    engine = Engine(FakeProgram(), speculator=fixed("oracle", {"a": []}))
    run(engine, [one])
    counts = engine.load().speculation
    assert counts is not None
    assert (counts.steps, counts.committed_tokens, counts.drafted_tokens) == (20, 20, 0)
    assert counts.idle == {"no draft": 19, "last token": 1}


def test_closing_frees_program_drafters_and_their_programs() -> None:
    """A head's program is closed with its target's, as nobody else knows of it."""

    class Closing(FakeProgram):
        closed = False

        def close(self) -> None:
            self.closed = True

    target, head = Closing(), FakeRecurrent([0.9])
    suffix = drafters({}, 40)["oracle"]
    curve = CostCurve((1, 2), (1.0, 1.1))
    Engine(target, speculator=Controller([suffix, HeadDrafter(head)], curve)).close()
    assert target.closed and head.closed and suffix.closed

"""From steps that were watched to a forecast."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tenfold.bench.survey import (
    FEWEST,
    LEAST,
    ClassSurvey,
    Sort,
    Step,
    Survey,
    Surveyor,
    forecast_line,
    read_survey,
    situations_of,
)
from tenfold.speculate.acceptance_forecast import AskingCost, Situation
from tenfold.speculate.base import DraftSequence
from tenfold.speculate.controller import Controller
from tenfold.speculate.cost_curve import CostCurve
from tenfold.traffic.running import Done, Job
from tests.helpers.speculation import (
    CHAT,
    FLAT,
    HEAD_ONLY,
    MAX_DRAFT,
    NARROW,
    STEEP,
    Class,
    Clock,
    Points,
    Scenario,
    SimSequence,
    curve_of,
    drafters,
    play,
    play_controller,
    play_plain,
)


class Keeping(Surveyor):
    """Keeps each sequence when it ends; ``loops`` says whether answers go in circles."""

    loops = False

    def __init__(self, controller: Controller, clock: Clock) -> None:
        super().__init__(controller, clock)
        self._now = clock
        self._began: dict[str, float] = {}

    def begin(self, sequence: DraftSequence) -> None:
        super().begin(sequence)
        self._began[sequence.id] = self._now()

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        super().end(sequence, learn)
        assert isinstance(sequence, SimSequence)
        job = Job(sequence.id, 1, sequence.id, (), sequence.params)
        tokens = tuple(sequence.tokens[sequence.prompt_length :])
        tokens = (1,) * len(tokens) if self.loops else tokens
        first = self._began[sequence.id]
        self.keep("a", Done(job, tokens, "stop", 0, first, first, 0, self._now()))


def watch(texts: Class, points: Points, loops: bool = False, tokens: int = 3000) -> Survey:
    clock, scenario = Clock(), Scenario(texts, tokens, curve=lambda done: points)
    controller = Controller(drafters(clock), curve_of(points), max_draft=MAX_DRAFT, clock=clock)
    surveyor = Keeping(controller, clock)
    surveyor.loops = loops
    play(scenario, surveyor, clock, seed=1)
    return surveyor.survey()


@pytest.mark.parametrize("points", [FLAT, STEEP], ids=["flat", "steep"])
@pytest.mark.parametrize("texts", [NARROW, CHAT, HEAD_ONLY], ids=["narrow", "chat", "head alone"])
def test_other_texts_of_the_class_gain_what_was_forecast(texts: Class, points: Points) -> None:
    """Within 10 percent, with two drafters that cost time and a curve that is measured anew."""
    expected = watch(texts, points).forecast(curve_of(points), {Sort("a", True): 10})
    played = Scenario(texts, 5000, curve=lambda done: points)
    found = play_controller(played, seed=2)[0].rate / play_plain(played, seed=2).rate
    assert expected["a"] == pytest.approx(expected["overall"])
    assert 0.9 < expected["a"] / found < 1.1


@pytest.mark.parametrize("batch", [1, 4])
def test_a_machine_where_rows_cost_more_gains_less(batch: int) -> None:
    """Known before anything was drafted there, within 15 percent, also for sequences together."""
    survey = watch(NARROW, FLAT)
    expected = survey.forecast(curve_of(STEEP), {Sort("a", True): 1}, batch)["a"]
    played = Scenario(NARROW, 5000, batch=lambda done: batch, curve=lambda done: STEEP)
    found = play_controller(played, seed=2)[0].rate / play_plain(played, seed=2).rate
    assert expected < survey.forecast(curve_of(FLAT), {Sort("a", True): 1})["a"]
    assert 0.85 < expected / found < 1.15


def test_loops_and_a_handful_of_answers_foretell_nothing() -> None:
    """What is easy to guess is not told of what is not, and chance is not told as knowledge."""
    assert watch(NARROW, FLAT, loops=True).classes == {}
    assert watch(NARROW, FLAT, tokens=100 * (FEWEST - 1)).classes == {}


def step(drafted: int, judged: int, accepted: int, *asked: str, chosen: str | None = "s") -> Step:
    return Step(frozenset(asked), chosen if drafted else None, drafted, judged, accepted, 1.0)


def test_a_draft_that_was_cut_off_says_nothing_of_what_came_behind() -> None:
    """Its positions count as far as they were judged; a token that never stood keeps its row."""
    steps = [
        step(3, 3, 3, "s"),
        step(3, 1, 1, "s"),  # its answer ended
        step(3, 2, 1, "s"),
        step(3, 1, 0, "s"),
        step(2, 1, 0, "s", "h", chosen="h"),
        step(0, 0, 0),
        step(0, 0, 0, "s", "h"),
        step(0, 0, 0, "s", "h"),
    ]
    found = {(tuple(one.survival), one.unasked): one for one in situations_of(steps, ["s", "h"])}
    assert found[("s",), ("h",)].survival["s"] == pytest.approx([3 / 4, 3 / 8, 3 / 8])
    assert found[("h",), ()].survival["h"] == [LEAST, LEAST]
    shares = {key: one.share for key, one in found.items()}
    assert shares == {
        (("s",), ("h",)): 1 / 2,
        (("h",), ()): 1 / 8,
        ((), ("s", "h")): 1 / 8,
        ((), ()): 1 / 4,
    }


def known(survival: float, tokens: int) -> ClassSurvey:
    return ClassSurvey(answers=10, decode_tokens=10 * tokens, situations=(Situation(1.0, {"s": [survival]}),))


def test_all_together_are_weighed_by_the_time_that_they_will_take() -> None:
    """By how many requests there are of a sort and how long its answers are; nothing is said of the whole
    where a class was never seen, nor of a class that is half unknown."""
    curve = CostCurve((1, 2), (1.0, 1.0))
    a, b, drawn = Sort("a", False), Sort("b", False), Sort("a", True)
    survey = Survey(classes={a.name: known(1.0, 100), b.name: known(0.0, 10)})
    found = survey.forecast(curve, {a: 3, b: 30})
    assert found == pytest.approx({"a": 2.0, "b": 1.0, "overall": 600 / (150 + 300)})
    assert survey.forecast(curve, {a: 3, Sort("new", False): 1}) == {"a": 2.0}
    assert survey.forecast(curve, {a: 3, drawn: 1, b: 1}) == {"b": 1.0}
    few = Survey(classes={"a": known(1.0, 100)})
    assert few.forecast(curve, {a: 3, drawn: 1})["a"] == pytest.approx(2.0)
    both = Survey(classes={a.name: known(1.0, 100), drawn.name: known(0.0, 100)})
    assert both.forecast(curve, {a: 1, drawn: 1})["a"] == pytest.approx(200 / 150)
    assert "a 2.00, b 1.00, overall 1.33" in forecast_line(found)
    assert "nothing is known" in forecast_line(Survey().forecast(curve, {a: 3}))
    slower = msgspec.structs.replace(survey, deciding_ms=0.5, overhead_ms=1.0)
    assert slower.forecast(curve, {a: 3})["a"] == pytest.approx(2 * 2.0 / 2.5)


def test_surveys_of_several_sorts_become_one() -> None:
    """All sorts are known afterwards, and what asking and deciding cost is the mean."""
    one = Survey(classes={"a, greedy": known(1.0, 5)}, costs={"s": AskingCost(0.1, 0.3)}, deciding_ms=0.1)
    two = Survey(
        classes={"a, sampled": known(0.5, 7)}, costs={"s": AskingCost(0.3, 0.5), "h": AskingCost(1, 1)}
    )
    merged = Survey.merged([one, two])
    assert merged.classes == {**one.classes, **two.classes}
    assert merged.costs["s"].call_ms == pytest.approx(0.2)
    assert merged.costs["h"] == AskingCost(1, 1)
    assert merged.deciding_ms == pytest.approx(0.05)


def test_a_survey_is_found_again_in_the_evidence(tmp_path: Path) -> None:
    """Among other things; a drafter without evidence is no error, a damaged file is one that names it."""
    assert read_survey(tmp_path) == Survey()
    survey = Survey(classes={"a": known(0.5, 7)}, costs={"s": AskingCost(0.1, 0.2)}, deciding_ms=0.1)
    path = tmp_path / "evidence.json"
    path.write_bytes(msgspec.json.encode({"answers": 7, "survey": survey}))
    assert read_survey(tmp_path) == survey
    path.write_bytes(b'{"survey": {"classes": 3}}')
    with pytest.raises(ValueError, match=r"evidence\.json"):
        read_survey(tmp_path)

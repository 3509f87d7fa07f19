"""Cost curves: measured once, then kept true."""

from __future__ import annotations

import numpy as np
import pytest

from tenfold._native import LiveCurve
from tenfold.backends.base import StepBatch, StepOutput
from tenfold.speculate.cost_curve import CostCurve, measure_curve
from tests.helpers.fake_program import FakeProgram
from tests.helpers.speculation import FLAT, STEEP, Clock, curve_of, live_curve_of


class TimedProgram(FakeProgram):
    """A step takes ``one_row_ms`` times V(rows), by a clock of its own; some take ten times as long."""

    def __init__(
        self, one_row_ms: float, slow_every: int = 10**9, token_ms: float = 0.0, **sizes: int
    ) -> None:
        super().__init__(**sizes)
        self.token_ms = token_ms
        self.clock = Clock()
        self.steps = 0
        self._curve, self._slow_every = curve_of(FLAT, one_row_ms), slow_every

    def step(self, batch: StepBatch) -> StepOutput:
        self.steps += 1
        ms = self._curve.at(len(batch.tokens)) + self.token_ms * float(batch.positions[0])
        ms *= 10 if self.steps % self._slow_every == 0 else 1
        self.clock.now += ms / 1e3
        return super().step(batch)


def test_measures_what_steps_take() -> None:
    """The curve is that of the program although every seventh step takes ten times as long; in well under a
    second for a small model."""
    program = TimedProgram(4.5, slow_every=7)
    curve = measure_curve(program, clock=program.clock)
    assert curve.rows == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    assert [curve.v(rows) for rows, _ in FLAT] == pytest.approx([v for _, v in FLAT])
    assert curve.ms[0] == pytest.approx(4.5)
    assert program.clock.now < 0.9


def test_measures_what_context_takes() -> None:
    """A step of a longer sequence is known to take longer; where there is no room to try, nothing is said."""
    program = TimedProgram(4.5, token_ms=0.001, max_context=4096, kv_pages=256)
    curve = measure_curve(program, clock=program.clock)
    assert curve.depth == 256
    assert curve.token_ms == pytest.approx(0.001)
    small = TimedProgram(4.5, token_ms=0.001, max_context=1024, kv_pages=256)
    assert measure_curve(small, clock=small.clock).token_ms == 0.0


def test_time_is_bounded_for_a_large_model() -> None:
    """With two seconds a row, only 1, 4 and 2 rows are timed, once."""
    program = TimedProgram(2000.0)
    curve = measure_curve(program, clock=program.clock)
    assert curve.rows == (1, 2, 4)
    assert program.steps == 4


@pytest.mark.parametrize(
    ("sizes", "most"),
    [({"max_rows": 8}, 8), ({"max_logit_rows": 5}, 4), ({"kv_pages": 1}, 16), ({"max_context": 24}, 24)],
)
def test_small_programs(sizes: dict[str, int], most: int) -> None:
    """Row counts that the program cannot make are left out."""
    program = TimedProgram(4.5, **sizes)
    assert measure_curve(program, clock=program.clock).rows[-1] == most


def test_a_program_of_one_row_has_no_curve() -> None:
    """A program that cannot verify anything is an error that says so."""
    with pytest.raises(ValueError, match="two rows"):
        measure_curve(FakeProgram(max_logit_rows=1))


def test_curves_that_are_none() -> None:
    """Rows that do not ascend from 1, times that fall, are not positive or not finite are refused."""
    for rows, ms in [
        ((1,), (1.0,)),
        ((1, 2), (1.0,)),
        ((2, 3), (1.0, 2.0)),
        ((1, 3, 2), (1.0, 2.0, 3.0)),
        ((1, 2), (2.0, 1.0)),
        ((1, 2), (0.0, 1.0)),
        ((1, 2), (1.0, float("inf"))),
        ((1, 2), (float("nan"), 1.0)),
    ]:
        with pytest.raises(ValueError):
            CostCurve(rows, ms)


def test_linear_between_and_beyond() -> None:
    """Between the points and beyond the last one the curve is linear; the live one starts as the same."""
    curve = CostCurve((1, 3, 5), (2.0, 4.0, 10.0))
    live = LiveCurve(curve.rows, curve.ms)
    for rows, ms in [(1, 2.0), (2, 3.0), (3, 4.0), (4, 7.0), (5, 10.0), (7, 16.0)]:
        assert curve.at(rows) == pytest.approx(ms)
        assert live.at(rows) == pytest.approx(ms)
    assert live.beyond(2, 3) == pytest.approx([0.0, 1.0, 4.0, 7.0])


def live_after(rows: list[int], factor: float, noise: float, outliers: float, steps: int) -> LiveCurve:
    """Started with the flat curve; steps take ``factor`` times the steep one."""
    rng, truth, live = np.random.default_rng(0), curve_of(STEEP), live_curve_of(FLAT)
    for i in range(steps):
        ms = truth.at(rows[i % len(rows)]) * factor * float(np.exp(noise * rng.standard_normal()))
        live.observe(rows[i % len(rows)], ms * (20 if rng.random() < outliers else 1))
    return live


def test_becomes_what_is_seen() -> None:
    """From a wrong curve, on a machine half as fast, with noise and outliers: within 5 percent after 100
    steps where steps were made."""
    live = live_after([1, 2, 4, 8], factor=2.0, noise=0.05, outliers=0.02, steps=100)
    truth = curve_of(STEEP)
    for rows in (1, 2, 4, 8):
        assert live.at(rows) == pytest.approx(2 * truth.at(rows), rel=0.05)


def test_outliers_do_not_move_it() -> None:
    """A single step that takes 100 times as long moves an estimate by at most 6 percent, also right at the
    start."""
    for before in (0, 40):
        live = live_curve_of(FLAT)
        for _ in range(before):
            live.observe(1, 4.5)
        live.observe(1, 450.0)
        assert live.at(1) == pytest.approx(4.5, rel=0.06)


def test_unseen_goes_along_with_seen() -> None:
    """If the whole machine slows down, what was not seen for long is expected to have slowed down too."""
    live = live_curve_of(FLAT)
    for _ in range(400):
        live.observe(1, 4.5)
    before = live.at(8)
    for _ in range(100):
        live.observe(1, 9.0)
    assert 1.6 * before < live.at(8) < 2.1 * before


def test_what_was_seen_lately_stays() -> None:
    """If only steps of four rows become slower while plain ones are seen as often, plain ones stay."""
    live = live_curve_of(FLAT)
    for i in range(200):
        live.observe(1 if i % 2 else 4, 4.5 if i % 2 else 12.0)
    assert live.at(1) == pytest.approx(4.5, rel=0.03)
    assert live.at(4) == pytest.approx(12.0, rel=0.03)


def test_knows_what_it_has_not_seen() -> None:
    """Rows that were not seen for some time while others changed are doubtful, and so are those not seen for
    500 steps; what was never seen, or not for long, is to be looked at, and as near as the rows allow. Seeing
    them settles it."""
    live = live_curve_of(FLAT)
    for rows in (1, 2, 4, 8):
        live.observe(rows, curve_of(FLAT).at(rows))
    assert not live.doubtful(1)
    assert live.to_look_at(1, 12) == 12
    assert live.to_look_at(1, 11) is None
    for _ in range(40):
        live.observe(4, 9.0)
    assert not live.doubtful(1)  # a plain step costs what drafts would have brought: not so soon
    for _ in range(20):
        live.observe(4, 9.0)
    assert live.doubtful(1)
    for _ in range(280):
        live.observe(4, 9.0)
    assert live.to_look_at(1, 3) == 2
    assert live.to_look_at(2, 7) == 7
    for _ in range(5):
        for rows in (1, 2, 8):
            live.observe(rows, live.at(rows))
    assert not live.doubtful(1)
    assert live.to_look_at(1, 8) is None
    for _ in range(600):
        live.observe(4, 9.0)
    assert live.doubtful(1)


def test_a_surprise_is_looked_at_again() -> None:
    """A row count that took much longer than expected is to be timed again, soon."""
    live = live_curve_of(FLAT)
    for rows in (1, 2, 4, 8):
        live.observe(rows, curve_of(FLAT).at(rows))
    assert live.to_look_at(1, 4) is None
    live.observe(2, 20.0)
    live.observe(1, 4.5)
    assert live.to_look_at(1, 4) == 2

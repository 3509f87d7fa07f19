"""Cost curves."""

import pytest

from tenfold.router.timing import fit_timing, mocker_timing


def test_the_mockers_curves() -> None:
    """Promise: the timing of simulations is that of Dynamo's mocker: what its replay (ai-dynamo-runtime
    1.6.1) gave for a step of 7,458 prompt tokens, and for two decode steps of a request after 64 tokens."""
    timing = mocker_timing(16_384 * 64)
    assert timing.chunk(7458) == pytest.approx(0.153156217, abs=1e-9)
    assert timing.decode(1, 65) + timing.decode(1, 66) == pytest.approx(0.028961632 - 0.017474885, abs=1e-9)


def test_measured_curves_are_found_again() -> None:
    """Promise: curves fitted to steps that follow them are those curves, and no coefficient is below zero."""
    true = mocker_timing(1 << 20)
    fitted = fit_timing(
        512,
        [(n, true.chunk(n)) for n in (1, 64, 200, 512)],
        [(b, c, true.decode(b, c)) for b in (1, 4, 8) for c in (100, 1000, 9000)],
    )
    assert fitted.chunk(300) == pytest.approx(true.chunk(300), rel=1e-6)
    assert fitted.decode(4, 5000) == pytest.approx(true.decode(4, 5000), rel=1e-3)
    falling = fit_timing(512, [(1, 3.0), (500, 1.0)], [(1, 1, 1.0)])
    assert min(falling.prefill_step, falling.prefill_token, falling.prefill_token2) >= 0

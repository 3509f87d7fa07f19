"""The controller's bars, in simulated time: never slower than 0.98x of plain decoding, and no less than 0.95x
of the best drafter and length in hindsight. Run as a script, this prints the table."""

from __future__ import annotations

import pytest

from tests.helpers.speculation import (
    CHAT,
    FLAT,
    HEAD_NARROW,
    HEAD_ONLY,
    HEAD_RANDOM,
    NARROW,
    RANDOM,
    STEEP,
    SUFFIX_BIMODAL,
    SUFFIX_BROKEN,
    SUFFIX_COPIES,
    SUFFIX_LIES,
    SUFFIX_NARROW,
    Class,
    Kind,
    Points,
    Process,
    Scenario,
    play_controller,
    play_fixed,
    play_plain,
)

LIES: Class = [(0, (SUFFIX_LIES, HEAD_RANDOM))]
COPIES: Class = [(0, (SUFFIX_COPIES, HEAD_RANDOM))]
BIMODAL: Class = [(0, (SUFFIX_BIMODAL, HEAD_RANDOM))]
SWITCHES: Class = [(0, RANDOM[0][1]), (1000, NARROW[0][1]), (2500, RANDOM[0][1])]
BREAKS: Class = [
    (0, (SUFFIX_NARROW, HEAD_RANDOM)),
    (1500, (SUFFIX_BROKEN, HEAD_RANDOM)),
    (2500, (SUFFIX_NARROW, HEAD_RANDOM)),
]
RAMP = (1, 2, 4, 8, 16, 16, 8, 4, 2, 1)


def scenario(texts: Class, points: Points, batch: int, tokens: int = 0, length: int = 200) -> Scenario:
    tokens = tokens or 1500 * min(batch, 3)
    return Scenario(texts, tokens, length, batch=lambda done: batch, curve=lambda done: points)


def ramp(texts: Class, points: Points, tokens: int = 9000) -> Scenario:
    return Scenario(texts, tokens, batch=lambda done: RAMP[min(int(done * 10), 9)], curve=lambda done: points)


def deep(texts: Class, points: Points) -> Scenario:
    """Steps of every other text take three times as long, as measured with 3,500 tokens in the cache."""
    return Scenario(
        texts,
        tokens=4000,
        length=80,
        curve=lambda done: points,
        one_row_ms=2.0,
        prompt=lambda text: 3500 if text % 2 else 20,
        token_ms=0.0011,
    )


SCENARIOS: dict[str, Scenario] = {}
for shape, points in (("flat", FLAT), ("steep", STEEP)):
    for batch in (1, 2, 4, 8, 16):
        SCENARIOS[f"random text, batch {batch}, {shape}"] = scenario(RANDOM, points, batch)
        SCENARIOS[f"narrow, batch {batch}, {shape}"] = scenario(NARROW, points, batch)
    SCENARIOS |= {
        f"chat, batch 1, {shape}": scenario(CHAT, points, 1, 2500),
        f"head alone, batch 1, {shape}": scenario(HEAD_ONLY, points, 1, 3000),
        f"long copies, batch 1, {shape}": scenario(COPIES, points, 1, 2500),
        f"claims are lies, batch 1, {shape}": scenario(LIES, points, 1),
        f"claims are lies, batch 4, {shape}": scenario(LIES, points, 4),
        f"some texts good, some hopeless, batch 1, {shape}": scenario(BIMODAL, points, 1, 4000),
        f"some texts good, some hopeless, batch 4, {shape}": scenario(BIMODAL, points, 4),
        f"short texts, chat, batch 1, {shape}": scenario(CHAT, points, 1, 2500, length=30),
        f"random, narrow, random, batch 1, {shape}": scenario(SWITCHES, points, 1, 4000),
        f"drafter breaks and recovers, batch 1, {shape}": scenario(BREAKS, points, 1, 4000),
        f"batch 1 to 16 and back, narrow, {shape}": ramp(NARROW, points),
        f"batch 1 to 16 and back, random, {shape}": ramp(RANDOM, points),
        f"short and long conversations in turn, head alone, {shape}": deep(HEAD_ONLY, points),
        f"short and long conversations in turn, random text, {shape}": deep(RANDOM, points),
    }


def ratios(played: Scenario, seed: int) -> tuple[float, str, float]:
    """Controller over plain; the best fixed choice, and over plain."""
    plain = play_plain(played, seed)
    controlled, _ = play_controller(played, seed)
    fixed = {name: result.rate / plain.rate for name, result in play_fixed(played, seed).items()}
    best = max(fixed, key=fixed.__getitem__)
    return controlled.rate / plain.rate, best, fixed[best]


@pytest.mark.parametrize("name", SCENARIOS)
def test_never_slower_and_near_the_best_fixed_choice(name: str) -> None:
    """At least 0.98x of plain decoding, and 0.95x of the best drafter and length in hindsight."""
    speedup, best, fixed = ratios(SCENARIOS[name], seed=0)
    assert speedup >= 0.98
    assert speedup >= 0.95 * fixed, best


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("batch", [1, 3, 6, 11, 16])
def test_unguessable_text_costs_next_to_nothing(batch: int, seed: int) -> None:
    """On text nobody can guess, asking and learning together cost at most 1.2 percent of simulated time, so
    that the controller's own time has room within the two percent."""
    played = scenario(RANDOM, STEEP if seed % 2 else FLAT, batch, 1200 * batch if batch < 8 else 9000)
    assert play_controller(played, seed)[0].rate / play_plain(played, seed).rate >= 0.988


def test_two_drafters_bring_more_than_one() -> None:
    """With a suffix match in some steps and a head for the others, the choice per step is at least 1.05x the
    best fixed choice of one."""
    speedup, _, fixed = ratios(scenario(NARROW, FLAT, 1, 4000), seed=5)
    assert speedup >= 1.05 * fixed


def test_what_sequences_share_is_counted_once() -> None:
    """Three sequences, a head whose tokens are worth the first row of a draft but not the second and third:
    what each would gain alone is not what they gain together, and the head is not asked for it."""
    weak = Process((Kind(0.4, (0.23,), 0.8), Kind(0.8, (0.09,), quality=1)), run=10)
    head = Process(
        (Kind(1.0, (0.34, 0.5)), Kind(0.25, (0.15, 0.3), 0.47, 1), Kind(0.25, (0.37, 0.3), quality=2))
    )
    played = scenario([(0, (weak, head))], FLAT, 3)
    assert play_controller(played)[0].rate / play_plain(played).rate >= 0.985


def test_rows_of_prompts_do_not_mislead() -> None:
    """Where long prompts are computed beside the decodes now and then, the controller is still no slower, and
    their times do not bend the curve."""
    played = Scenario(
        [(0, (SUFFIX_NARROW, HEAD_NARROW))],
        3000,
        batch=lambda done: 2,
        others=lambda step: 200 if step % 12 < 3 else 0,
    )
    plain, (controlled, _) = play_plain(played), play_controller(played)
    assert controlled.rate >= 1.05 * plain.rate


if __name__ == "__main__":
    print(f"{'scenario':55s} controller  best fixed   controller / best of fixed and plain")
    for title, played in SCENARIOS.items():
        speedup, best, fixed = ratios(played, seed=0)
        print(f"{title:55s} {speedup:10.3f}  {fixed:6.3f} {best:9s} {speedup / max(fixed, 1.0):.3f}")

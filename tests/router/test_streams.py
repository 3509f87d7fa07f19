"""Events that are lost, late, repeated or wrong are noticed and healed."""

from tenfold.protocol import KVEvents, KVSnapshot, LoadSnapshot, PagesRemoved, PagesStored
from tenfold.router.base import Resync, RouterConfig
from tenfold.router.router import Router
from tenfold.router.timing import mocker_timing


def router(empty: bool = True) -> Router:
    made = Router(RouterConfig(timing=mocker_timing(1 << 20), page_tokens=64, silence_s=1e9))
    made.add_worker("a", 8, 0.0, empty=empty)
    return made


def stored(sequence: int, *names: int) -> KVEvents:
    return KVEvents(sequence=sequence, events=(PagesStored(names),))


def load(sequence: int) -> LoadSnapshot:
    return LoadSnapshot(
        running=0,
        waiting=0,
        pages_total=8,
        pages_free=8,
        steps=0,
        prompt_tokens=0,
        cached_tokens=0,
        generated_tokens=0,
        preemptions=0,
        kv_sequence=sequence,
    )


def test_a_gap_is_said_and_healed() -> None:
    """Promise: a lost message leads to one request to resync that says why, asked again after a time without
    an answer; afterwards the pages are exact, with the events that came meanwhile."""
    made = router()
    made.on_event("a", stored(1, 1), 0.0)
    made.on_event("a", stored(3, 3), 0.1)
    assert not made.in_step("a")
    assert made.tick(0.2) == [Resync("a", "events 2 to 2 did not come")]
    assert made.tick(1.0) == []
    assert made.next_tick() == 2.2
    assert len(made.tick(2.2)) == 1
    made.on_event("a", stored(4, 4), 2.3)
    made.on_snapshot("a", KVSnapshot(sequence=3, names=(1, 2, 3)), 2.4)
    assert made.in_step("a")
    assert made.pages("a") == {1, 2, 3, 4}
    assert made.counts.gaps == 1 and made.counts.resyncs == 1


def test_lost_last_events_are_noticed_by_the_load() -> None:
    """Promise: a stream that is dead is noticed although no later event shows the gap; one that is only late
    is not accused."""
    made = router()
    made.on_load("a", load(1), 0.0)
    made.on_event("a", stored(1, 1), 0.9)
    made.on_load("a", load(1), 1.0)
    assert made.tick(1.5) == []
    made.on_load("a", load(2), 2.0)
    assert made.tick(2.9) == []
    (asked,) = made.tick(3.0)
    assert isinstance(asked, Resync) and "no events after 1" in asked.why


def test_what_cannot_be_true_is_not_believed() -> None:
    """Promise: more pages than the worker has, and pages given up that it never had, lead to a resync."""
    made = router()
    made.on_event("a", stored(1, *range(9)), 0.0)
    (asked,) = made.tick(0.0)
    assert isinstance(asked, Resync) and "more pages" in asked.why
    made = router()
    made.on_event("a", KVEvents(sequence=1, events=(PagesRemoved((5,)),)), 0.0)
    (asked,) = made.tick(0.0)
    assert isinstance(asked, Resync) and "not known to have" in asked.why


def test_repeated_and_stale_messages_change_nothing() -> None:
    """Promise: a batch that comes twice counts once, and a snapshot that nobody asked for is not taken up."""
    made = router(empty=False)
    made.on_snapshot("a", KVSnapshot(sequence=2, names=(1, 2)), 0.0)
    made.on_event("a", stored(2, 9), 0.0)
    made.on_event("a", stored(3, 3), 0.0)
    made.on_event("a", stored(3, 9), 0.0)
    made.on_snapshot("a", KVSnapshot(sequence=1, names=(9,)), 0.0)
    assert made.in_step("a") and made.pages("a") == {1, 2, 3}


def test_events_that_are_always_a_little_late_are_no_fault() -> None:
    """Promise: a worker whose every event comes 0.5 s late is in step, though its load is always ahead of
    them."""
    made = router()
    for second in range(1, 9):
        made.on_load("a", load(second), float(second))
        assert made.tick(float(second)) == []
        made.on_event("a", stored(second, second), second + 0.5)
    assert made.counts.gaps == 0

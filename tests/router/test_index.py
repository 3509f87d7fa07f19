"""The page index against a plain model."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.router.index import PageIndex

SLOTS = 40


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 60)), max_size=60), st.integers(0, 60))
def test_overlap_is_the_length_of_the_common_prefix(held: list[tuple[int, int]], asked: int) -> None:
    """Promise: a lookup tells exactly how many first pages each worker has, however many have them, where
    workers hold chains from their beginnings."""
    index = PageIndex()
    depth = dict.fromkeys(range(SLOTS), 0)
    for slot in range(SLOTS):
        index.open(slot, 1000)
    for slot, pages in held:
        known = index.add(slot, range(depth[slot], pages))
        assert known
        depth[slot] = max(depth[slot], pages)
    found = index.overlap(range(asked), SLOTS)
    assert found.tolist() == [min(depth[slot], asked) for slot in range(SLOTS)]
    index.check()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ard"), st.sets(st.integers(0, 30))), max_size=30)
)
def test_both_directions_agree_whatever_comes(changes: list[tuple[int, str, set[int]]]) -> None:
    """Promise: the index holds what was added and not removed, for each worker apart, and forgets a page that
    nobody has: its memory is bounded by what workers hold."""
    index = PageIndex()
    model: list[set[int]] = [set() for _ in range(4)]
    for slot in range(4):
        index.open(slot, 10)
    for slot, kind, names in changes:
        if kind == "a":
            fits = index.add(slot, names)
            model[slot] |= names
            assert fits == (len(model[slot]) <= 10)
        elif kind == "r":
            assert index.remove(slot, names) == (names <= model[slot])
            model[slot] -= names
        else:
            index.replace(slot, names)
            model[slot] = set(names)
        index.check()
    assert [set(index.pages(slot)) for slot in range(4)] == model
    assert len(index) == len(set().union(*model))

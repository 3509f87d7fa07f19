"""The store of responses: what is kept, what goes, and that it is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.server.errors import ApiError
from tenfold.server.responses_api.store import Kept, ResponseStore


def kept(size: int) -> Kept:
    return Kept(response={}, input=[], conversation=[], bytes=size)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("kgd"), st.integers(0, 9), st.integers(0, 40)), max_size=40))
def test_the_newest_are_there_and_memory_is_bounded(work: list[tuple[str, int, int]]) -> None:
    """Against a plain list: what was used longest ago goes first."""
    store = ResponseStore(max_responses=4, max_bytes=100).shelf("")
    model: list[tuple[str, int]] = []
    for number, (what, index, size) in enumerate(work):
        if what == "k":
            store.keep(str(number), kept(size))
            model.append((str(number), size))
            while len(model) > 4 or sum(size for _, size in model) > 100:
                model.pop(0)
        elif index < len(model):
            id = model[index][0]
            entry = model.pop(index)
            if what == "g":
                assert store.get(id).bytes == entry[1]
                model.append(entry)
            else:
                store.delete(id)
        assert (len(store.store), store.store.bytes) == (len(model), sum(size for _, size in model))


def test_one_that_is_too_large_is_not_kept() -> None:
    """And costs no other its place."""
    store = ResponseStore(max_bytes=100).shelf("")
    store.keep("small", kept(60))
    store.keep("large", kept(101))
    assert store.get("small").bytes == 60
    with pytest.raises(ApiError) as lost:
        store.get("large", "previous_response_id")
    assert (lost.value.status, lost.value.param) == (404, "previous_response_id")


def test_a_shelf_is_its_owners_alone() -> None:
    """Nobody else reads what is on it, goes on from it or deletes it; memory is shared."""
    store = ResponseStore(max_bytes=100)
    mine, yours = store.shelf("me"), store.shelf("you")
    mine.keep("a", kept(40))
    for refused in (lambda: yours.get("a"), lambda: yours.delete("a"), lambda: store.shelf("").get("a")):
        with pytest.raises(ApiError, match="there is no response a"):
            refused()
    assert mine.get("a").bytes == 40
    yours.keep("a", kept(60))
    assert (mine.get("a").bytes, yours.get("a").bytes, store.bytes) == (40, 60, 100)

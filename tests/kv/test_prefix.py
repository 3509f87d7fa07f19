"""The prefix index finds what is there and nothing else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.kv.prefix import Node, Parent, PrefixIndex

A = tuple(range(16))
B = tuple(range(100, 116))


def insert(index: PrefixIndex, parent: Parent, tokens: tuple[int, ...], page: int) -> Node:
    """Inserts what must not collide."""
    node = index.insert(parent, tokens, page)
    assert node is not None
    return node


def test_a_page_is_found_only_after_its_parent_and_in_its_namespace() -> None:
    """The same 16 tokens after another page, or in another namespace, are another page."""
    index = PrefixIndex()
    first = insert(index, "", A, 0)
    second = insert(index, first, B, 1)
    other = insert(index, "other", A, 2)
    assert index.find("", A) is first
    assert index.find(first, B) is second
    assert index.find("other", A) is other
    assert (
        index.find("", B) is index.find(second, B) is index.find(other, B) is index.find("third", A) is None
    )


def test_a_planted_hash_collision_is_no_hit() -> None:
    """Where every page has the same hash, tokens and parent still decide; the second page is just not
    indexed."""
    index = PrefixIndex(hash_page=lambda parent, tokens: 0)
    first = insert(index, "", A, 0)
    assert index.find("", A) is first
    assert index.find("", B) is None
    assert index.find(first, A) is None
    assert index.find("other", A) is None
    assert index.insert("", B, 1) is None
    assert index.nearest("", B) is None
    index.check({0}, [])


def test_an_evicted_parent_is_not_mistaken_for_its_successor() -> None:
    """A page whose parent was dropped and then computed anew does not hit below the new parent by its key
    alone."""
    index = PrefixIndex()
    first = insert(index, "", A, 0)
    insert(index, first, B, 1)
    index.remove(0)
    again = insert(index, "", A, 2)
    assert index.find(again, B) is None


@settings(max_examples=200, deadline=None)
@given(
    pages=st.lists(
        st.lists(st.integers(0, 2), min_size=16, max_size=16).map(tuple), max_size=30, unique=True
    ),
    removed=st.sets(st.integers(0, 29)),
    query=st.lists(st.integers(0, 2), max_size=16).map(tuple),
)
def test_nearest_is_the_longest_common_prefix(
    pages: list[tuple[int, ...]], removed: set[int], query: tuple[int, ...]
) -> None:
    """Against a search through all pages: none shares more tokens than the one found; removed ones are not
    found."""
    index = PrefixIndex()
    for page, tokens in enumerate(pages):
        insert(index, "", tokens, page)
    left = [page for page in range(len(pages)) if page not in removed]
    for page in removed & set(range(len(pages))):
        index.remove(page)
    index.check(set(left), [])

    def common(page: int) -> int:
        n = 0
        while n < len(query) and pages[page][n] == query[n]:
            n += 1
        return n

    best = max(map(common, left), default=0)
    found = index.nearest("", query)
    assert (found is None) == (best == 0)
    if found is not None:
        node, shared = found
        assert shared == best == common(node.page)
        assert node.page in left

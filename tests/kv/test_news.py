"""What a cache tells of its pages: enough for a router to know at every moment what is there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tenfold.kv.cache import KVCache
from tenfold.kv.news import PageNews
from tenfold.protocol import KVEvents, PagesRemoved, PagesStored
from tenfold.router.names import namespace_parent, page_names
from tests.helpers.fake_program import FakeProgram


def serve(cache: KVCache, tokens: list[int], namespace: str) -> bool:
    """Opens, computes all, gives back; False if it does not fit."""
    opened = cache.open(tokens, 0, namespace)
    if opened is None:
        return False
    cache.commit(opened[0], tokens, len(tokens))
    cache.check([opened[0]])
    cache.close(opened[0])
    cache.check([])
    return True


def apply(known: set[int], batch: KVEvents) -> None:
    """As a router does, and stricter: nothing is told twice."""
    for event in batch.events:
        if isinstance(event, PagesStored):
            assert known.isdisjoint(event.names)
            known.update(event.names)
        elif isinstance(event, PagesRemoved):
            assert known.issuperset(event.names)
            known.difference_update(event.names)
        else:
            known.clear()


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(
    lambda bits: [bit for bit in bits for _ in range(16)]
)


@given(st.lists(st.tuples(prompts, st.sampled_from(["", "a", "b"]), st.booleans()), max_size=30))
def test_events_lead_to_what_is_there(served: list[tuple[list[int], str, bool]]) -> None:
    """Promise: whoever applies all batches in order has exactly the names of the snapshot, whatever was
    stored, shared and evicted between; numbers have no gaps; the prompt served last is there under the names
    that the front gives it."""
    news = PageNews()
    cache = KVCache(FakeProgram(kv_pages=6), news=news)
    known: set[int] = set()
    batches = 0
    for tokens, namespace, take in served:
        assert serve(cache, tokens, namespace)
        if not take:
            continue
        if (batch := news.take()) is not None:
            batches += 1
            assert batch.sequence == batches
            apply(known, batch)
        assert known == set(news.snapshot().names)
        assert known.issuperset(page_names(tokens, 16, namespace))
        assert news.take() is None


def test_a_chain_is_told_in_one_event_with_what_it_follows() -> None:
    """Promise: events have the shape of other engines' (a list of names and the name before the first), and
    equal tokens of two namespaces have different names."""
    news = PageNews()
    cache = KVCache(FakeProgram(kv_pages=16), news=news)
    tokens = list(range(48))
    serve(cache, tokens[:32], "")
    serve(cache, tokens, "")
    names = page_names(tokens, 16)
    batch = news.take()
    assert batch is not None and batch.events == (PagesStored(names, None),)
    serve(cache, tokens, "other")
    others = page_names(tokens, 16, "other")
    batch = news.take()
    assert batch is not None
    (event,) = batch.events
    assert isinstance(event, PagesStored) and event.names == others
    assert event.parent is not None and not set(names) & set(others)


def test_nobody_listens_and_nothing_is_kept() -> None:
    """Promise: without a router the cache keeps no names."""
    cache = KVCache(FakeProgram(kv_pages=4))
    assert serve(cache, list(range(48)), "")
    cache.check([])


@given(st.lists(st.tuples(prompts, st.sampled_from(["", "a"])), max_size=20))
def test_tokens_of_pages(served: list[tuple[list[int], str]]) -> None:
    """Promise: with tokens, whoever names pages by himself comes to our names, in each namespace."""
    news = PageNews(tokens=True)
    cache = KVCache(FakeProgram(kv_pages=6), news=news)
    chains: dict[int, list[int]] = {}
    for tokens, namespace in served:
        assert serve(cache, tokens, namespace)
        batch = news.take()
        for event in () if batch is None else batch.events:
            if isinstance(event, PagesStored):
                assert len(event.tokens) == 16 * len(event.names)
                before = (
                    [] if event.parent == namespace_parent(event.namespace) else chains[event.parent or 0]
                )
                for n, name in enumerate(event.names):
                    chain = [*before, *event.tokens[: 16 * (n + 1)]]
                    assert page_names(chain, 16, event.namespace)[-1] == name
                    chains[name] = chain

"""Matching, owning, copying and giving back pages: the faults that other prefix caches have had."""

from __future__ import annotations

import pytest

from tenfold.kv.cache import KVCache, PageTable
from tenfold.kv.pages import IntegrityError
from tests.helpers.fake_program import FakeProgram

T = list(range(1000))


def opened(cache: KVCache, tokens: list[int], reserve: int = 0, namespace: str = "") -> tuple[PageTable, int]:
    """Opens what must fit, and checks the books."""
    result = cache.open(tokens, reserve, namespace)
    assert result is not None
    return result


def served(cache: KVCache, tokens: list[int], namespace: str = "") -> tuple[list[int], int]:
    """Opens, computes all, gives back; returns the pages and the rows that were there."""
    table, reused = opened(cache, tokens, namespace=namespace)
    cache.commit(table, tokens, len(tokens))
    cache.check([table])
    pages = table.pages.tolist()
    cache.close(table)
    cache.check([])
    return pages, reused


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48])
def test_a_full_hit_leaves_one_row_to_compute(length: int) -> None:
    """The same prompt again: all rows but the last are there, also where the prompt ends on a page's
    boundary; rows of a page that was never finished are not."""
    cache = KVCache(FakeProgram(kv_pages=16))
    assert served(cache, T[:length])[1] == 0
    finished = length // 16 * 16
    assert served(cache, T[:length])[1] == min(finished, length - 1)


def test_partial_pages_are_copied() -> None:
    """A prompt that leaves a cached page after r tokens gets those r rows, in a page of its own."""
    program = FakeProgram(kv_pages=16)
    cache = KVCache(program)
    pages, _ = served(cache, T[:48])
    for page in pages:
        program.write_page(page, bytes([page + 1]) * 128)
    for shared in (1, 7, 15):
        table, reused = opened(cache, T[: 16 + shared] + [7777] * 20)
        assert reused == 16 + shared
        own = int(table.pages[1])
        assert table.pages[0] == pages[0]
        assert own not in pages
        assert program.read_page(own)[: 8 * shared] == program.read_page(pages[1])[: 8 * shared]
        assert program.read_page(own)[8 * shared :] != program.read_page(pages[1])[8 * shared :]
        cache.close(table)
    cache.check([])


def test_unfinished_rows_are_not_found() -> None:
    """Pages enter the index when a finished step has written all their rows, not when they are taken."""
    cache = KVCache(FakeProgram(kv_pages=16))
    one, _ = opened(cache, T[:40])
    cache.commit(one, T[:40], 31)
    two, reused = opened(cache, T[:40])
    assert reused == 16
    cache.commit(one, T[:40], 32)
    three, reused = opened(cache, T[:40])
    assert reused == 32
    cache.check([one, two, three])


def test_generated_tokens_are_found_in_the_next_turn() -> None:
    """A conversation's second turn finds the pages that its first turn's output filled."""
    cache = KVCache(FakeProgram(kv_pages=16))
    tokens = T[:20]
    table, _ = opened(cache, tokens)
    cache.commit(table, tokens, 20)
    for token in range(500, 530):
        tokens.append(token)
        assert cache.extend(table, len(tokens))
        cache.commit(table, tokens, len(tokens))
    cache.close(table)
    assert served(cache, [*tokens, 1, 2, 3])[1] == 48


def test_duplicate_pages_become_one() -> None:
    """Two sequences that computed the same tokens side by side end up sharing the first one's pages; nothing
    leaks."""
    cache = KVCache(FakeProgram(kv_pages=16))
    one, _ = opened(cache, T[:40])
    two, _ = opened(cache, T[:40])
    assert not set(one.pages.tolist()) & set(two.pages.tolist())
    cache.commit(one, T[:40], 40)
    cache.commit(two, T[:40], 40)
    assert one.pages[:2].tolist() == two.pages[:2].tolist()
    assert one.pages[2] != two.pages[2]
    cache.check([one, two])
    cache.close(one)
    cache.check([two])
    three, reused = opened(cache, T[:40])
    assert reused == 32
    cache.check([two, three])


def test_matched_pages_cannot_be_evicted_by_their_own_sequence() -> None:
    """A prompt that matches old evictable pages and needs new ones: the new ones are taken from others, or
    the prompt does not fit; never from its own match."""
    cache = KVCache(FakeProgram(kv_pages=5))
    old, _ = served(cache, T[:33])
    served(cache, [900] * 17)
    table, reused = opened(cache, T[:80])
    assert reused == 32
    assert table.pages[:2].tolist() == old[:2]
    assert len(set(table.pages.tolist())) == 5
    cache.check([table])


def test_a_copys_source_cannot_be_evicted_before_the_copy() -> None:
    """Where the page to copy from is the oldest evictable one it is still there when it is copied; where it
    is needed itself, nothing is copied and the prompt fits all the same."""
    program = FakeProgram(kv_pages=3)
    cache = KVCache(program)
    pages, _ = served(cache, T[:16])
    program.write_page(pages[0], b"s" * 128)
    prompt = [*T[:10], *[900] * 20]
    table, reused = opened(cache, prompt)
    assert reused == 10
    assert program.read_page(int(table.pages[0]))[:80] == b"s" * 80
    cache.close(table)
    table, reused = opened(cache, [*T[:10], *[901] * 30])
    assert (reused, table.size) == (0, 3)
    cache.check([table])


def test_a_prompt_that_does_not_fit_changes_nothing() -> None:
    """None for want of pages, or of the reserve, leaves books and cache as they were."""
    cache = KVCache(FakeProgram(kv_pages=4))
    served(cache, T[:40])
    holder, _ = opened(cache, [900] * 17)
    available = cache.pool.available
    assert cache.open(T[:64], reserve=0) is None
    assert cache.open(T[:33], reserve=1) is None
    assert cache.pool.available == available
    cache.check([holder])
    assert cache.open(T[:32], reserve=0) is not None


def test_a_stretch_takes_free_pages_alone_and_is_undone_by_a_trim() -> None:
    """Room for guesses: as far as pages are free, none is evicted for it, and all of it comes back."""
    cache = KVCache(FakeProgram(kv_pages=6))
    served(cache, T[:33])
    table, _ = opened(cache, [900] * 20)
    assert (cache.pool.free, cache.pool.available) == (2, 4)
    assert cache.stretch(table, 30) == 30
    assert cache.stretch(table, 33) == 33
    assert cache.pool.free == 1
    assert cache.stretch(table, 1000) == 64
    assert (cache.pool.free, cache.pool.available) == (0, 2)
    assert cache.stretch(table, 1000) == 64
    cache.check([table])
    cache.commit(table, [900] * 40, 40)
    cache.trim(table, 40)
    cache.check([table])
    assert (table.size, table.indexed, cache.pool.free) == (3, 2, 1)
    cache.trim(table, 41)
    assert table.size == 3
    cache.close(table)
    assert served(cache, T[:33])[1] == 32


def test_chains_are_evicted_from_their_end() -> None:
    """When one page must go it is the last of the chain: the rest can still be hit."""
    cache = KVCache(FakeProgram(kv_pages=4))
    served(cache, T[:64])
    served(cache, [900] * 10)
    assert served(cache, T[:50])[1] == 48


def test_namespaces_do_not_share() -> None:
    """Equal prompts in two namespaces have nothing in common, in whole pages or in parts."""
    cache = KVCache(FakeProgram(kv_pages=16))
    served(cache, T[:40], "one")
    assert served(cache, T[:40], "two")[1] == 0
    assert served(cache, T[:40], "one")[1] == 32


def test_hash_collisions_cost_hits_and_nothing_else() -> None:
    """With one hash for all pages only one page is ever cached, and the books still balance."""
    cache = KVCache(FakeProgram(kv_pages=16), hash_page=lambda parent, tokens: 0)
    assert served(cache, T[:64])[1] == 0
    assert served(cache, T[100:164])[1] == 0
    assert served(cache, T[:64])[1] == 16


def test_a_failed_copy_gives_everything_back() -> None:
    """An exception from the program's copy is passed on and leaves no page behind."""
    program = FakeProgram(kv_pages=8)
    cache = KVCache(program)
    served(cache, T[:48])
    program.copy_failures.append(RuntimeError("no"))
    with pytest.raises(RuntimeError, match="no"):
        cache.open([*T[:20], *[900] * 20], reserve=0)
    cache.check([])
    assert cache.pool.available == 8


def test_check_finds_a_table_that_writes_ready_pages() -> None:
    """A table that counts a shared page as its own to write is found."""
    cache = KVCache(FakeProgram(kv_pages=8))
    table, _ = opened(cache, T[:40])
    cache.commit(table, T[:40], 40)
    table.indexed -= 1
    with pytest.raises(IntegrityError, match="the first 1 should be ready"):
        cache.check([table])

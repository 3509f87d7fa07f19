"""The page books: every page in one place, and nothing given away that someone holds."""

from __future__ import annotations

import pytest

from tenfold.kv.pages import IntegrityError, PagePool, PageState


def take(pool: PagePool, count: int = 1) -> list[int]:
    """Takes pages that must be there."""
    pages = [pool.take() for _ in range(count)]
    assert None not in pages
    return [page for page in pages if page is not None]


def test_a_page_goes_through_its_states() -> None:
    """free -> writing -> ready -> evictable -> writing again, and the index is told of the eviction only."""
    forgotten: list[int] = []
    pool = PagePool(1, forgotten.append)
    (page,) = take(pool)
    assert pool.state(page) is PageState.WRITING
    pool.publish(page)
    pool.share(page)
    pool.release(page)
    assert (pool.owners(page), pool.available, pool.take()) == (1, 0, None)
    pool.release(page)
    assert (pool.available, pool.evictable(), forgotten) == (1, [page], [])
    assert take(pool) == [page]
    assert forgotten == [page]
    pool.release(page)
    assert pool.state(page) is PageState.FREE
    pool.check([])


def test_free_pages_go_before_cached_ones_and_the_oldest_first() -> None:
    """Cached pages are kept while there are free ones, then evicted in the order in which they lost their
    owner."""
    pool = PagePool(3, lambda page: None)
    a, b, _ = take(pool, 3)
    for page in (b, a):
        pool.publish(page)
        pool.release(page)
    pool.share(b)
    pool.release(b)
    pool.release(_)
    assert take(pool, 3) == [_, a, b]


def test_wrong_moves_are_refused() -> None:
    """Sharing or publishing a page in the wrong state, or giving back what nobody owns, raises at once."""
    pool = PagePool(2, lambda page: None)
    (page,) = take(pool)
    with pytest.raises(IntegrityError, match="only a ready page can be shared"):
        pool.share(page)
    pool.publish(page)
    with pytest.raises(IntegrityError, match="only a writing page becomes ready"):
        pool.publish(page)
    pool.release(page)
    with pytest.raises(IntegrityError, match="nobody owns it"):
        pool.release(page)
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(0, lambda page: None)


def test_check_finds_planted_faults() -> None:
    """A leaked page, a page counted too often, a page in two places, and a shared unfinished page are each
    found."""

    def fresh() -> tuple[PagePool, int]:
        pool = PagePool(4, lambda page: None)
        (page,) = take(pool)
        pool.check([[page]])
        return pool, page

    pool, page = fresh()
    with pytest.raises(IntegrityError, match="counts 1 owners, but the tables name it 0 times"):
        pool.check([])
    with pytest.raises(IntegrityError, match="name it 2 times"):
        pool.check([[page], [page]])
    pool._free.append(page)
    with pytest.raises(IntegrityError, match="is in 2 places"):
        pool.check([[page]])
    pool, page = fresh()
    pool._free.pop()
    with pytest.raises(IntegrityError, match="is in 0 places"):
        pool.check([[page]])
    pool, page = fresh()
    pool._owners[page] = 2
    with pytest.raises(IntegrityError, match="being written, but has 2 owners"):
        pool.check([[page], [page]])
    pool, page = fresh()
    with pytest.raises(IntegrityError, match=r"no pages \[9\]"):
        pool.check([[page, 9]])

"""Page names: what other routers compute too."""

from tenfold.router.names import chain, page_hashes, page_names


def test_a_pages_own_hash_is_that_of_dynamo() -> None:
    """Promise: pages are named so that routers that read Dynamo's names read ours. The two numbers are what
    `dynamo.llm.compute_block_hash_for_seq(range(128), 64)` of ai-dynamo-runtime 1.6.1 returns."""
    assert page_hashes(range(128), 64) == [3480597578098033343, 3318286205056455972]


def test_a_name_stands_for_all_tokens_up_to_its_end() -> None:
    """Promise: two prompts share names exactly as far as they share full pages, within a namespace."""
    one, other = list(range(70)), [*range(32), 7, *range(33, 70)]
    names = page_names(one, 16)
    assert len(names) == 4
    changed = page_names(other, 16)
    assert names[:2] == changed[:2]
    assert not set(names[2:]) & set(changed)
    assert not set(names) & set(page_names(one, 16, "tenant"))
    assert chain(page_hashes(one, 16)[2:], names[1]) == names[2:]

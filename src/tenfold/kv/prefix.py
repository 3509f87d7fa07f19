"""The prefix index: which ready page holds which 16 tokens after which other page.

Pages form chains. A page's key is a hash of (its parent's key, its 16 tokens), the first page's parent is the
namespace. A key only finds a candidate; a hit needs the same parent (the very page) and the same tokens, so a
hash collision costs a miss and nothing else. No two pages of the index have the same parent and tokens.

The index owns nothing: `tenfold.kv.cache` sees to it that what is found is also owned before anything else is
done.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence

from tenfold.backends.base import PAGE_ROWS
from tenfold.kv.pages import IntegrityError

Tokens = tuple[int, ...]
HashPage = Callable[[int, Tokens], int]


class Node:
    """A ready page in the index. Compared by identity."""

    __slots__ = ("key", "page", "parent", "tokens")

    def __init__(self, page: int, parent: Parent, tokens: Tokens, key: int) -> None:
        self.page = page
        self.parent = parent
        self.tokens = tokens
        self.key = key


Parent = Node | str
"""What a page follows: another page or, for a first page, the namespace. Equal tokens in two namespaces do
not meet."""


def hash_page(parent_key: int, tokens: Tokens) -> int:
    """Key of a page: Python's own hash of a tuple of integers (64 bits; the same in every process)."""
    return hash((parent_key, tokens))


def _tokens_of(node: Node) -> Tokens:
    return node.tokens


class PrefixIndex:
    """Finds pages by what they hold. ``hash_page`` is a parameter so that a test can plant collisions."""

    def __init__(self, hash_page: HashPage = hash_page) -> None:
        self._hash = hash_page
        self._by_key: dict[int, Node] = {}
        self._by_page: dict[int, Node] = {}
        # Ordered by tokens, so that the longest common prefix is next to where a page would stand.
        self._children: dict[Parent, list[Node]] = {}

    def __len__(self) -> int:
        return len(self._by_page)

    def find(self, parent: Parent, tokens: Tokens) -> Node | None:
        """The page that holds exactly these 16 ``tokens`` after ``parent``."""
        node = self._by_key.get(self._key(parent, tokens))
        if node is not None and node.parent == parent and node.tokens == tokens:
            return node
        return None

    def nearest(self, parent: Parent, tokens: Tokens) -> tuple[Node, int] | None:
        """The page after ``parent`` that shares the most first tokens with ``tokens`` (up to 16), and how
        many; None if none shares any."""
        children = self._children.get(parent)
        if not children or not tokens:
            return None
        place = bisect_left(children, tokens, key=_tokens_of)
        shared, best = max(
            (_common(children[i].tokens, tokens), i) for i in (place - 1, place) if 0 <= i < len(children)
        )
        return (children[best], shared) if shared else None

    def insert(self, parent: Parent, tokens: Tokens, page: int) -> Node | None:
        """Adds a page that ``find`` does not find. None, and nothing is added, if another page has its
        key."""
        key = self._key(parent, tokens)
        if key in self._by_key:
            return None
        node = Node(page, parent, tokens, key)
        self._by_key[key] = node
        self._by_page[page] = node
        insort(self._children.setdefault(parent, []), node, key=_tokens_of)
        return node

    def remove(self, page: int) -> Node:
        """Takes a page out, whose contents are about to go."""
        node = self._by_page.pop(page)
        del self._by_key[node.key]
        siblings = self._children[node.parent]
        del siblings[bisect_left(siblings, node.tokens, key=_tokens_of)]
        if not siblings:
            del self._children[node.parent]
        return node

    def by_key(self, key: int) -> Node | None:
        """The page that has this key."""
        return self._by_key.get(key)

    def children(self, parent: Parent) -> Sequence[Node]:
        """The pages after ``parent``."""
        return self._children.get(parent, ())

    def keys_after(self, parent: Parent, tokens: Sequence[int]) -> Iterator[int]:
        """Keys that the full pages of ``tokens`` have, one after another behind ``parent``."""
        key = self._root(parent)
        for at in range(0, len(tokens) - PAGE_ROWS + 1, PAGE_ROWS):
            key = self._hash(key, tuple(tokens[at : at + PAGE_ROWS]))
            yield key

    def nodes(self) -> Iterator[Node]:
        """All pages, every one after the page that it follows."""
        level: list[Parent] = [parent for parent in self._children if isinstance(parent, str)]
        while level:
            found = [node for parent in level for node in self.children(parent)]
            yield from found
            level = [*found]

    def check(self, ready: set[int], evictable: Sequence[int]) -> None:
        """Raises IntegrityError unless the index holds exactly the ``ready`` pages, each under its key and
        after a parent that is still there, and ``evictable`` would give up every page before its parent."""
        if ready != self._by_page.keys():
            raise IntegrityError(f"ready pages and index differ in {sorted(ready ^ self._by_page.keys())}")
        turn = {page: i for i, page in enumerate(evictable)}
        for page, node in self._by_page.items():
            if node.page != page or self._by_key.get(node.key) is not node or len(node.tokens) != PAGE_ROWS:
                raise IntegrityError(f"page {page} is not filed as what it is")
            parent = node.parent
            if isinstance(parent, Node):
                if self._by_page.get(parent.page) is not parent:
                    raise IntegrityError(f"page {page} is in the index, but not the page before it")
                if turn.get(parent.page, len(turn)) < turn.get(page, len(turn)):
                    raise IntegrityError(
                        f"page {parent.page} would be evicted before page {page} that follows it"
                    )
        children = [node for siblings in self._children.values() for node in siblings]
        if len(children) != len(self._by_page) or len(self._by_key) != len(self._by_page):
            raise IntegrityError("the index's three views have different sizes")

    def _key(self, parent: Parent, tokens: Tokens) -> int:
        return self._hash(self._root(parent), tokens)

    def _root(self, parent: Parent) -> int:
        # Not Python's hash of the namespace: that of a string differs from process to process.
        return parent.key if isinstance(parent, Node) else self._hash(0, tuple(parent.encode()))


def _common(one: Iterable[int], other: Iterable[int]) -> int:
    """How many first tokens two pages share."""
    shared = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        shared += 1
    return shared

"""The suffix drafter as it would be written without care for time: every place is compared with the
context."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

ORDERS = (1, 2, 3, 5, 8)
LONGEST, VISITS, ENOUGH, ROOM, RESEEDS, BLOCK = 32, 32, 16, 32, 3, 32
KINDS = (2, 3, 8, 5)
MARK = -1


@dataclass
class SlowWindow:
    """All tokens ever, of which the newest ``capacity`` less 32 may be found."""

    capacity: int
    tokens: list[int] = field(default_factory=lambda: [MARK])
    scopes: list[int] = field(default_factory=lambda: [-1])
    indexed: list[bool] = field(default_factory=lambda: [False])

    def append(self, token: int, scope: int, indexed: bool = True) -> None:
        self.tokens.append(token)
        self.scopes.append(scope)
        self.indexed.append(indexed)

    def agreement(self, context: list[int], place: int) -> int:
        """Tokens before a place that are those at the end of the context."""
        length = 0
        while length < min(len(context), LONGEST) and self.tokens[place - 1 - length] == context[-1 - length]:
            length += 1
        return length

    def find(self, context: list[int], scope: int, room: int = ROOM) -> list[tuple[int, int]]:
        """(length, place), as `SuffixWindow::find` has them."""
        newest_first = [
            (self.agreement(context, place), place)
            for place in range(
                len(self.tokens) - 1, max(0, len(self.tokens) - 1 - (self.capacity - LONGEST)), -1
            )
            if self.indexed[place] and self.scopes[place] == scope
        ]
        found: list[tuple[int, int]] = []
        for order, longer in reversed(list(zip(ORDERS, (*ORDERS[1:], LONGEST + 1), strict=True))):
            if len(found) >= min(room, ENOUGH):
                break
            seen = [match for match in newest_first if match[0] >= order][:VISITS]
            some = [match for match in seen if match[0] < longer][: room - len(found)]
            found += sorted(some, key=lambda match: -match[0])
        return found

    def token(self, place: int, drafted: list[int]) -> int:
        """The token at a place, which for a text's own window may lie in what was drafted; MARK behind the
        end."""
        return (self.tokens + drafted)[place] if place < len(self.tokens) + len(drafted) else MARK


class SlowTraffic:
    """What `SuffixTraffic` keeps."""

    def __init__(self, capacity: int) -> None:
        self.window = SlowWindow(capacity)

    def learn(self, text: list[int], scope: int) -> None:
        """For texts shorter than a block, whose beginnings are not remembered."""
        assert len(text) < BLOCK
        if text:
            self.window.append(MARK, -1, False)
        for token in text:
            self.window.append(token, scope)


class SlowText:
    """What `SuffixText` does."""

    def __init__(self, prior: list[float]) -> None:
        self.prior = np.array(prior, np.float32)
        self.window = SlowWindow(1 << 30)
        self.counts = np.zeros((len(prior), 2), np.float32)
        self.expected: list[tuple[int, list[tuple[int, int]]]] = []

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            if self.expected:
                picked, votes = self.expected.pop(0)
                for bucket, voted in votes:
                    self.counts[bucket] += (voted == token, 1)
                if picked != token:
                    self.expected = []
            self.window.append(token, 0)

    def propose(
        self, traffic: SlowTraffic, scope: int, shared: np.ndarray | None, count: int, floor: float
    ) -> tuple[list[int], list[float]]:
        self.expected = []
        text, drafted = self.window.tokens[1:], list[int]()
        windows = self.window, traffic.window
        pools: list[list[tuple[int, int]]] = [[], []]
        reseeds = [RESEEDS, RESEEDS]
        survival, survivals = np.float32(1), []
        for step in range(count):
            votes: list[tuple[int, int, int] | None] = []
            for side in (0, 1):
                if step == 0 or (not pools[side] and reseeds[side] > 0):
                    reseeds[side] -= step > 0
                    pools[side] = windows[side].find(text + drafted, (0, scope)[side])
                beyond = ([*drafted], [])[side]
                votes.append(vote([(n, windows[side].token(at, beyond)) for n, at in pools[side]]))
            best, picked, buckets = np.float32(0), MARK, []
            for side in (0, 1):
                mine, other = votes[side], votes[1 - side]
                if mine is None:
                    continue
                relation = 0 if other is None else 1 if other[0] == mine[0] else 2
                bucket = int(np.ravel_multi_index((side, relation, mine[1], mine[2]), KINDS))
                buckets.append((bucket, mine[0]))
                right, seen = (
                    np.float32(16) * self.prior[bucket] + self.counts[bucket][0],
                    16 + self.counts[bucket][1],
                )
                if shared is not None:
                    right, seen = right + shared[bucket][0], seen + shared[bucket][1]
                if right / seen > best:
                    best, picked = right / seen, mine[0]
            survival = survival * best
            if picked == MARK or survival < np.float32(floor):
                break
            self.expected.append((picked, buckets))
            drafted.append(picked)
            survivals.append(float(survival))
            for side in (0, 1):
                beyond = ([*drafted], [])[side]
                pools[side] = [
                    (min(n + 1, LONGEST), at + 1)
                    for n, at in pools[side]
                    if windows[side].token(at, beyond) == picked
                    and windows[side].token(at + 1, beyond) != MARK
                ]
        return drafted, survivals


def vote(matches: list[tuple[int, int]]) -> tuple[int, int, int] | None:
    """(token, class of its longest match, class of its share) of the token that (length, token) vote for."""
    if not matches:
        return None
    won: dict[int, int] = {}
    for length, token in matches:
        won[token] = won.get(token, 0) + length**3
    token = max(won, key=lambda each: won[each])  # the first of equals
    longest = next(length for length, each in matches if each == token)
    everything = sum(won.values())
    if sum(each == token for _, each in matches) == 1:
        share = 0
    elif won[token] == everything:
        share = 4
    else:
        share = 1 if 2 * won[token] < everything else 2 if 5 * won[token] < 4 * everything else 3
    return token, sum(longest >= least for least in (2, 3, 4, 6, 9, 16, 32)), share

"""A head that is exchanged under way."""

from __future__ import annotations

from tenfold.live.decide import Scores
from tenfold.live.head import LiveHead
from tests.helpers.fake_recurrent import FakeRecurrent
from tests.speculate.test_head import Sequence, features


def test_first_tokens_are_scored_by_what_came() -> None:
    """Drafted or not verified, right or wrong; a draft whose place was not reached does not count, nor does a
    step without a draft."""
    head = LiveHead(FakeRecurrent([0.9, 0.9]))  # drafts the newest token's successors
    one = Sequence([1, 5], features(), id="a")
    head.begin(one)
    head.propose([one], [2])
    one.tokens += [6, 7, 8]  # as drafted
    head.propose([one], [2])
    one.tokens += [4]  # not as drafted
    one.features = None
    head.propose([one], [2])
    one.tokens += [5]
    one.features = features()
    head.propose([one], [2])
    head.end(one, learn=False)
    assert list(head.requests) == [Scores(2, 1)]
    head.begin(one)
    head.end(one, learn=True)
    assert list(head.requests) == [Scores(2, 1)]


def test_an_exchanged_head_is_judged_by_its_own_drafts() -> None:
    """What the one before drafted counts for neither, also in a request that goes on."""
    first, second = FakeRecurrent([0.9]), FakeRecurrent([0.9])
    head = LiveHead(first)
    one, ended = Sequence([1, 5], features(), id="a"), Sequence([1, 2], features(), id="b")
    head.begin(one)
    head.begin(ended)
    head.propose([one, ended], [1, 1])
    ended.tokens.append(9)
    head.end(ended, learn=True)
    assert list(head.requests) == [Scores(1, 0)]
    assert head.exchange(second) is first
    one.tokens.append(6)
    head.propose([one], [1])
    one.tokens.append(7)
    head.end(one, learn=True)
    assert (len(first.batches), len(second.batches)) == (1, 1)
    assert list(head.requests) == [Scores(1, 1)]

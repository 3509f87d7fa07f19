"""Pages between two hosts, prefill on one and decode on the other, which have a network in common and no
more: the texts are those of one machine, also when the network is cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from msgspec.structs import replace

from tenfold.protocol import KVTransport, Request
from tests.helpers.host_engine import HostEngine
from tests.helpers.namespaces import Host, two_hosts_or_skip
from tests.helpers.requests import request
from tests.kv.test_tier import alone, prompt
from tests.kv.test_transfer import needs_nixl


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """As network namespaces."""
    with two_hosts_or_skip() as pair:
        yield pair


def asked(number: int) -> Request:
    """Another prompt for each number."""
    return request(str(number), prompt(number), max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize(
    "transport", ["tcp", pytest.param("nixl", marks=needs_nixl), pytest.param("auto", marks=needs_nixl)]
)
def test_two_hosts(hosts: tuple[Host, Host], transport: KVTransport) -> None:
    """Promise: a request that is prefilled on one host and decoded on another has the text of one machine,
    and all its full pages come over the network; once that is cut, it has its text still, and its pages are
    computed."""
    with (
        closing(HostEngine(hosts[0], transport)) as prefill,
        closing(HostEngine(hosts[1], transport)) as decode,
    ):
        for number in range(4):
            one = asked(number)
            began = prefill.run(replace(one, prefill_only=True))
            assert began["handoff"]["host" if transport != "nixl" else "nixl"]
            if number == 3:
                hosts[0].connect(False)
            went_on = decode.run(replace(one, output=tuple(began["tokens"]), handoff=began["handoff"]))
            assert began["tokens"] + went_on["tokens"] == alone(one).tokens
            if number < 3:
                assert (went_on["cached"], went_on["imports"]) == (96, {"imported": number + 1})
        assert went_on["cached"] < 16  # rows that prompts have in common
        assert went_on["imports"] == {"imported": 3, "failed": 1}

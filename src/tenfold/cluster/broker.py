"""The event broker: one place that takes events of all workers and hands them to all fronts.

Without it every process of Dynamo binds sockets for its events to all addresses of its machine, and the
events of a KV cache have the tokens of prompts in them. The broker binds to one address. It keeps nothing:
what is lost while it is away, routers fetch from the workers.
"""

from __future__ import annotations

from typing import Any

import zmq


def run_broker(events: str) -> None:
    """Serves at ``HOST:PORT:PORT``: publishers connect to the first port, subscribers to the second."""
    host, subscribe, publish = events.rsplit(":", 2)
    context: Any = zmq.Context.instance()
    with context.socket(zmq.XSUB) as publishers, context.socket(zmq.XPUB) as subscribers:
        for sock, port in ((publishers, subscribe), (subscribers, publish)):
            sock.setsockopt(zmq.IPV6, ":" in host)
            sock.setsockopt(zmq.SNDHWM, 100_000)
            sock.setsockopt(zmq.RCVHWM, 100_000)
            sock.bind(f"tcp://{host}:{port}")
        zmq.proxy(publishers, subscribers)

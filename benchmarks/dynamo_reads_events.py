"""Whether another router understands us: Dynamo's `SelectionService`, fed by the events of a running server.

It needs nothing of Tenfold, and an environment of its own::

    python -m venv dynamo
    dynamo/bin/pip install ai-dynamo-runtime==1.6.1
    tenfold serve smollm2 --workers 2 --routing round-robin --kv-memory 48MiB \\
        --kv-events tcp://127.0.0.1:5557
    dynamo/bin/python benchmarks/dynamo_reads_events.py http://127.0.0.1:8000 \\
        tcp://127.0.0.1:5557 tcp://127.0.0.1:5558

One address for each worker. A prompt is sent, and Dynamo is asked who has its blocks, by its tokens: it names
them by itself. Then other prompts are sent until those blocks are evicted, and it is asked again. Fails if it
is wrong. The KV memory must be small (48 MiB are 1,088 tokens of SmolLM2 for each worker), or nothing is
evicted.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from typing import Any

BLOCK = 16


def ask(url: str, body: dict[str, Any]) -> Any:
    """A POST with JSON."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


async def blocks(service: Any, tokens: list[int]) -> list[int]:
    """How many first blocks of a prompt each worker has, as Dynamo believes."""
    await asyncio.sleep(0.5)  # Events are on their way.
    scores = await service.overlap_scores({"model_name": "m", "token_ids": tokens})
    return [worker["device_blocks"] for worker in scores["workers"]]


async def main(server: str, events: list[str]) -> None:
    os.environ.setdefault("DYN_LOG", "error")
    from dynamo.llm import SelectionService

    service = SelectionService(indexer_threads=1)
    for rank, address in enumerate(events):
        await service.upsert_worker(
            {
                "worker_id": rank,
                "model_name": "m",
                "endpoint": f"none://{rank}",
                "block_size": BLOCK,
                "max_num_batched_tokens": 512,
                "data_parallel_start_rank": rank,
                "data_parallel_size": 1,
                "kv_events_endpoints": {rank: address},
            }
        )
    await asyncio.sleep(1.0)  # Subscriptions too.
    prompt = " ".join(f"number {n}" for n in range(60))
    tokens = ask(f"{server}/tokenize", {"prompt": prompt})["tokens"]
    before = await blocks(service, tokens)
    ask(f"{server}/v1/completions", {"prompt": prompt, "max_tokens": 1})
    after = await blocks(service, tokens)
    chosen = await service.select({"selection_id": "one", "model_name": "m", "token_ids": tokens})
    for n in range(20 * len(events)):
        other = " ".join(f"{n} other {n * k}" for k in range(60))
        ask(f"{server}/v1/completions", {"prompt": other, "max_tokens": 1})
    evicted = await blocks(service, tokens)
    service.shutdown()
    print(f"a prompt of {len(tokens)} tokens; its first blocks that Dynamo knows of, by worker:")
    print(f"  before it was sent  {before}\n  after               {after}\n  after 20 others     {evicted}")
    print(
        f"Dynamo would send it to worker {chosen['worker_id']}: {chosen['overlap']['gpu']} tokens are there"
    )
    full = len(tokens) // BLOCK
    right = not any(before) and sorted(after) == [0] * (len(events) - 1) + [full] and not any(evicted)
    sys.exit(0 if right and chosen["worker_id"] == after.index(full) else "that is wrong")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))

"""What HTTP costs: decode tokens/s of `tenfold serve` beside the same engine called in a process, in turns.

    python benchmarks/http_throughput.py
    python benchmarks/http_throughput.py --model model.gguf --rounds 15 --json

A round is HTTP's turn, then the engine's, with 1 stream and with 8: greedy answers of 256 tokens to different
questions. Both sides have the prompts in their prefix caches after the warm-up. Tokens are counted from the
first of any stream to the last of all. The client is in this process; its own work is part of what HTTP
costs, for it shares the cores with the server. The texts of both sides must be equal.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

from tqdm import tqdm

from tenfold.bench.figures import Comparison, compare, table
from tenfold.bench.http_streams import read_answer, read_streams
from tenfold.bench.peers import Peer, PeerError, Turns
from tenfold.bench.prompts import questions
from tenfold.bench.script import run_script
from tenfold.bench.server import Server
from tenfold.bench.worker import start_worker
from tenfold.checkpoint.locate import locate
from tenfold.config import ISAS, ServeConfig
from tenfold.server.text import Text, load_text

TOKENS = 256
STREAMS = (1, 8)
SIDES = ("http", "in process")


def over_http(server: Server, conversations: list[list[dict[str, str]]]) -> tuple[float, list[str]]:
    """Tokens/s and the texts."""
    bodies = [
        {
            "messages": messages,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for messages in conversations
    ]
    records = read_streams(server.address, "/v1/chat/completions", bodies)
    answers = [read_answer(b"".join(record.parts)) for record in records]
    if any(answer.completion_tokens != TOKENS for answer in answers):
        raise PeerError(f"the server gave {[answer.completion_tokens for answer in answers]} tokens")
    seconds = max(record.last_at for record in records) - min(record.first_at for record in records)
    return len(bodies) * (TOKENS - 1) / seconds, [answer.text for answer in answers]


def in_process(
    engine: Peer, text: Text, conversations: list[list[dict[str, str]]]
) -> tuple[float, list[str]]:
    """Tokens/s and the texts."""
    found = engine.ask("streams", prompts=[text.encode_chat(each) for each in conversations], tokens=TOKENS)
    texts = []
    for ids in found["outputs"]:
        stream = text.stream(())
        texts.append(stream.push(ids) + stream.finish())
    return found["tokens_per_s"], texts


def measure(model: str, config: ServeConfig, rounds: int) -> tuple[dict[str, Any], dict[int, Comparison]]:
    """What was measured, and what was found by streams. Raises ValueError, OSError or PeerError."""
    found: dict[int, dict[str, list[float]]] = {n: {name: [] for name in SIDES} for n in STREAMS}
    text = load_text(str(locate(model)))
    conversations = questions(max(STREAMS))
    longest = max(len(text.encode_chat(messages)) for messages in conversations)
    with ExitStack() as stack:
        options = ("--threads", str(config.threads), "--isa", config.isa)
        server = stack.enter_context(Server(model, *options))
        engine, about = start_worker(config, engine_tokens=max(STREAMS) * (longest + TOKENS + 16))
        stack.enter_context(engine)
        turns = Turns({"http": server.pid, "in process": engine.pid})
        ways = {"http": partial(over_http, server), "in process": partial(in_process, engine, text)}
        for way in ways.values():  # to warm up
            way(conversations)
        for _ in tqdm(range(rounds), disable=not sys.stderr.isatty(), unit="round"):
            for streams in STREAMS:
                texts = {}
                for name, way in ways.items():
                    rate, texts[name] = turns.turn(name, partial(way, conversations[:streams]))
                    found[streams][name].append(rate)
                if texts["http"] != texts["in process"]:
                    raise PeerError("the two sides gave different texts")
        turns.check()
    about = {"model": model, **about, "tokens": TOKENS, "idle_cpu_share": turns.idle_cpu_share}
    return about, {streams: compare(sides) for streams, sides in found.items()}


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a folder, or a known name")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core that may be used")
    parser.add_argument("--isa", choices=ISAS, default="auto")
    parser.add_argument("--rounds", type=int, default=11, help="at least 5")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error("--rounds: at least 5 are needed for an interval")
    config = ServeConfig(model=options.model, threads=options.threads, isa=options.isa)
    about, found = measure(options.model, config, options.rounds)
    if options.json:
        figures = {str(streams): comparison.to_json() for streams, comparison in found.items()}
        print(json.dumps({**about, "decode_tokens_per_s": figures}))
        return 0
    print(f"{options.model}, {about['threads']} threads, {about['isa']}; {options.rounds} rounds in turns")
    print("decode tokens/s over all streams, median (p10 to p90)\n")
    rows = [(str(streams), *comparison.cells()) for streams, comparison in found.items()]
    print(table(("streams", "HTTP", "in process", "ratio (95 % interval)"), rows))
    return 0


if __name__ == "__main__":
    run_script(main)

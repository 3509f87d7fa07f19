"""Answers to the same requests by Tenfold and by llama.cpp, each with its own speculation, in turns.

    python benchmarks/speculation_peer.py --traffic traffic.jsonl --drafter drafter --model model.q4_0.gguf

llama.cpp is there twice: built for this machine, plain and with the prompt lookup of llama-cpp-python, and by
the server in the wheel xllamacpp with each kind of speculation that needs no second model. Prompts are the
held-out requests of the traffic, as token ids; each side gives its own answer, so lengths differ. Figures are
tokens a second after the first token, over answers that do not repeat themselves. The ratio is that of
Tenfold to whichever side of llama.cpp was fastest on the class in all.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from peer_environments import HERE, PEERS, environment_python
from speculation_choices import chosen
from tqdm import tqdm

from tenfold.bench.figures import TotalRatio, table, total_ratio
from tenfold.bench.peers import Peer, PeerError
from tenfold.bench.replay import Side
from tenfold.bench.script import run_script
from tenfold.bench.survey_run import warm_up
from tenfold.checkpoint.locate import locate
from tenfold.config import ServeConfig
from tenfold.server.text import load_text
from tenfold.speculate.build import SpeculationSettings, build_speculator
from tenfold.traffic.answering import MAX_ANSWER
from tenfold.traffic.reading import TrafficRequest
from tenfold.traffic.repetition import repetitive
from tenfold.traffic.running import job_of
from tenfold.traffic.splits import HELD_OUT
from tenfold.worker.build import build_target

OURS = "Tenfold"
LOOKUPS = (0, 4, 10)
KINDS = ("none", "ngram_simple", "ngram_map_k", "ngram_map_k4v", "ngram_mod", "ngram_cache")


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that does not repeat itself."""

    side: str
    kind: str
    conversation: str
    tokens: int
    """After the first."""
    seconds: float


def start(stack: ExitStack, model: str, threads: int, context: int) -> dict[str, Peer]:
    """All of llama.cpp's sides that can be had; who cannot is named."""
    wanted: list[tuple[str, str, str, dict[str, Any]]] = [
        (
            f"llama.cpp, lookup of {lookup}" if lookup else "llama.cpp, plain",
            "llamacpp",
            "llamacpp_answers.py",
            {"lookup": lookup},
        )
        for lookup in LOOKUPS
    ]
    wanted += [(f"xllamacpp, {kind}", "xllamacpp", "xllamacpp_answers.py", {"kind": kind}) for kind in KINDS]
    peers: dict[str, Peer] = {}
    for name, recipe, script, fields in wanted:
        command = [environment_python(PEERS[recipe]), str(HERE / "peer_workers" / script)]
        peer = stack.enter_context(Peer(name, command))
        try:
            peer.ask("load", model=model, threads=threads, context=context, **fields)
        except PeerError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
        else:
            peers[name] = peer
    return peers


def given(side: str, request: TrafficRequest, answer: list[int], first: int, seconds: float) -> list[Given]:
    """The answer, if it counts."""
    if repetitive(answer) or len(answer) <= first:
        return []
    return [
        Given(
            side=side,
            kind=request.kind,
            conversation=request.conversation,
            tokens=len(answer) - first,
            seconds=seconds,
        )
    ]


def per_token(found: list[Given], side: str) -> dict[str, list[float]]:
    """Conversation to [tokens, seconds] of a side."""
    sums: dict[str, list[float]] = {}
    for one in found:
        if one.side == side:
            both = sums.setdefault(one.conversation, [0.0, 0.0])
            both[0] += one.tokens
            both[1] += one.seconds
    return sums


def ratio(found: list[Given], ours: str, theirs: str) -> TotalRatio:
    """Time a token of theirs over ours, each on its own answers, over the conversations that both have."""
    first, second = per_token(found, ours), per_token(found, theirs)
    both = sorted(first.keys() & second.keys())
    tokens = {side: sum(sums[one][0] for one in both) for side, sums in ((ours, first), (theirs, second))}
    return total_ratio(
        [second[one][1] / tokens[theirs] for one in both],
        [first[one][1] / tokens[ours] for one in both],
        both,
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traffic", type=Path, required=True, help="JSONL, as `tenfold replay` reads it")
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or a known name")
    parser.add_argument("--drafter", type=Path, help="a folder that `tenfold train-drafter` wrote")
    parser.add_argument("--temperature", type=float, help="instead of the bodies' own")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--newest", type=float, default=HELD_OUT)
    parser.add_argument("--most", type=int, default=10, help="most requests of a class")
    parser.add_argument("--max-answer", type=int, default=MAX_ANSWER)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    path = str(locate(args.model))
    text = load_text(path)
    settings = ServeConfig(model=args.model, threads=args.threads).engine_settings(path)
    speculation = SpeculationSettings(drafter=args.drafter)
    target = build_target(
        settings,
        speculation.taps,
        lambda program, graph, checkpoint: build_speculator(program, graph, checkpoint, speculation),
    )
    found: list[Given] = []
    with ExitStack() as stack:
        stack.callback(target.engine.close)
        info = target.program.info
        requests = chosen(args, text, info.vocab_size, info.max_context)
        context = max(len(one.prompt) for one in requests) + args.max_answer + 128
        peers = start(stack, path, info.threads, context)
        warm_up(target.engine, text)
        ours = Side(target.engine, text, 1)
        for request in tqdm(requests, disable=not sys.stderr.isatty(), unit="request"):
            id = str(request.line)
            job = job_of(request)
            done = ours.run([job])[1][id]
            found += given(OURS, request, list(done.tokens), done.first_count, done.ended - done.first)
            for name, peer in peers.items():
                answer = peer.ask(
                    "answer",
                    ids=request.prompt,
                    tokens=request.params.max_tokens,
                    temperature=request.params.temperature,
                    ends=text.tokenizer.eos_token_ids,
                )
                found += given(name, request, answer["tokens"], 1, answer["seconds"])
    rows: list[list[str]] = []
    results: dict[str, Any] = {}
    for kind in sorted({one.kind for one in found}):
        some = [one for one in found if one.kind == kind]
        speeds = {
            side: sum(one.tokens for one in some if one.side == side)
            / sum(one.seconds for one in some if one.side == side)
            for side in (OURS, *peers)
            if any(one.side == side for one in some)
        }
        theirs = max((side for side in speeds if side != OURS), key=speeds.__getitem__)
        compared = ratio(some, OURS, theirs)
        results[kind] = {"speeds": speeds, "best": theirs, "ratio": msgspec.to_builtins(compared)}
        rows.append(
            [
                kind,
                *(f"{speeds[side]:.1f}" if side in speeds else "-" for side in (OURS, *peers)),
                theirs,
                compared.text(),
            ]
        )
    if args.json:
        print(json.dumps({"classes": results}))
    else:
        head = ["tokens/s", OURS, *peers, "fastest of llama.cpp", "Tenfold over it"]
        print(table(head, rows))
    return 0


if __name__ == "__main__":
    run_script(main)

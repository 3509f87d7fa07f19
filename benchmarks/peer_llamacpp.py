"""Side by side with llama.cpp built for this machine: same GGUF file, tokens and threads, in turns.

    python benchmarks/peer_llamacpp.py
    python benchmarks/peer_llamacpp.py --model model.gguf --threads 2 --rounds 15 --json

A round is Tenfold's turn, then llama.cpp's: some prefills of 512 tokens over an empty cache, and some runs of
64 tokens, one by one, from depth 256 on. Both stay loaded; only one computes at a time, and the other is
watched to rest. Both are called below their own serving loops, as llama-bench calls llama.cpp: no
tokenization, and for llama.cpp no sampling either, while Tenfold's step includes drawing the token. The text
is Python's manual, tokenized by both; they must agree on the ids.

llama.cpp lives in benchmarks/venvs/llamacpp, which is made when it is missing: that takes a compiler and 5
to 8 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tenfold.bench.figures import Comparison, compare, figure, table
from tenfold.bench.peers import Peer, PeerError, Turns
from tenfold.bench.prompts import manual_text
from tenfold.bench.script import run_script
from tenfold.bench.worker import start_worker
from tenfold.checkpoint.locate import locate
from tenfold.config import FORMATS, ISAS, ServeConfig

PREFILL, DEPTH, DECODE = 512, 256, 64
HERE = Path(__file__).resolve().parent
SIDES = ("tenfold", "llama.cpp")
KINDS = {"prefill": f"prefill, {PREFILL} tokens", "decode": f"decode at depth {DEPTH}"}


def llamacpp_python() -> str:
    """The Python of llama.cpp's own environment, made first if it is missing."""
    folder = HERE / "venvs" / "llamacpp"
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"building llama.cpp for this machine in {folder}: minutes", file=sys.stderr)
        venv.create(folder, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "llama-cpp-python", "--no-binary", "llama-cpp-python"],
            env={**os.environ, "CMAKE_ARGS": "-DGGML_NATIVE=ON"},
            stdout=sys.stderr,
            check=True,
        )
    return str(python)


def take_turn(peer: Peer, ids: list[int], repeats: int) -> dict[str, float]:
    """Tokens/s, each the median of the turn's repeats."""
    prefill = [PREFILL / peer.ask("prefill", ids=ids) for _ in range(repeats)]
    decode = [DECODE / peer.ask("decode", ids=ids[: DEPTH + DECODE], depth=DEPTH) for _ in range(repeats)]
    return {"prefill": figure(prefill).median, "decode": figure(decode).median}


def same_ids(peers: dict[str, Peer], text: str) -> list[int]:
    """The tokens to measure with. Raises PeerError when the sides do not agree on them."""
    ours, theirs = (peers[name].ask("tokenize", text=text) for name in SIDES)
    if ours != theirs:
        pairs = zip(ours, theirs, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
        raise PeerError(f"the two tokenize the text differently, from token {at} on")
    if len(ours) < PREFILL:
        raise ValueError(f"the text has {len(ours)} tokens for this model; {PREFILL} are needed")
    ids: list[int] = ours[:PREFILL]
    return ids


def measure(config: ServeConfig, rounds: int, repeats: int) -> tuple[dict[str, Any], dict[str, Comparison]]:
    """What was measured, and what was found. Raises ValueError, OSError or PeerError."""
    path = str(locate(config.model))
    if not path.endswith(".gguf"):
        raise ValueError(f"{path}: both sides can read only a GGUF file")
    found: dict[str, dict[str, list[float]]] = {what: {name: [] for name in SIDES} for what in KINDS}
    with ExitStack() as stack:
        ours, about = start_worker(config, PREFILL)
        stack.enter_context(ours)
        theirs = stack.enter_context(Peer("llama.cpp", [llamacpp_python(), str(HERE / "llamacpp_worker.py")]))
        about_theirs = theirs.ask("load", model=path, threads=about["threads"], context=PREFILL)
        peers = dict(zip(SIDES, (ours, theirs), strict=True))
        ids = same_ids(peers, manual_text()[: 8 * PREFILL])
        for peer in peers.values():
            take_turn(peer, ids, 1)  # to warm up
        turns = Turns({name: peer.pid for name, peer in peers.items()})
        for _ in tqdm(range(rounds), disable=not sys.stderr.isatty(), unit="round"):
            for name, peer in peers.items():
                figures = turns.turn(name, partial(take_turn, peer, ids, repeats))
                for what in KINDS:
                    found[what][name].append(figures[what])
        turns.check()
    about = {
        "model": path,
        "format": config.format,
        **about,
        "llama_cpp": about_theirs,
        "repeats": repeats,
        "idle_cpu_share": turns.idle_cpu_share,
    }
    return about, {what: compare(found[what]) for what in KINDS}


def report(about: dict[str, Any], found: dict[str, Comparison]) -> str:
    """The table."""
    peer = about["llama_cpp"]
    return "\n".join(
        (
            f"{Path(about['model']).name}, {about['threads']} threads, {found['decode'].ratio.rounds} rounds "
            "in turns; tokens/s, median (p10 to p90)",
            f"Tenfold: {about['isa']}, weights {about['format']}; drawing the token included",
            f"llama.cpp: llama-cpp-python {peer['version']}, {peer['system']}",
            "",
            table(
                ("", "Tenfold", "llama.cpp", "ratio (95 % interval)"),
                [(label, *found[what].cells()) for what, label in KINDS.items()],
            ),
        )
    )


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or a known name")
    parser.add_argument("--threads", type=int, default=0, help="of both; 0: one per core that may be used")
    parser.add_argument("--rounds", type=int, default=11, help="at least 5")
    parser.add_argument("--repeats", type=int, default=3, help="of each figure in a turn")
    parser.add_argument("--format", choices=FORMATS, default="auto", help="of Tenfold's weights")
    parser.add_argument("--isa", choices=ISAS, default="auto", help="of Tenfold")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error("--rounds: at least 5 are needed for an interval")
    config = ServeConfig(model=options.model, threads=options.threads, format=options.format, isa=options.isa)
    about, found = measure(config, options.rounds, options.repeats)
    figures = {f"{what}_tokens_per_s": comparison.to_json() for what, comparison in found.items()}
    print(json.dumps({**about, **figures}) if options.json else report(about, found))
    return 0


if __name__ == "__main__":
    run_script(main)

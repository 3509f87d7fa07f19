"""Side by side with other engines: same model, token ids and threads, in turns.

    python benchmarks/peers.py
    python benchmarks/peers.py --only llamacpp,openvino --formats file,q4_0,q8_0,bf16 --rounds 15
    python benchmarks/peers.py --only llamacpp-avx2,xllamacpp --isa avx2 --json

A round is a turn of each side: Tenfold, then each peer. All stay loaded; only one computes at a time, and the
others are watched to rest. Where an engine allows it, it is called below its serving loop, as llama-bench
calls llama.cpp; what a peer's figures include is said in its script in benchmarks/peer_workers. Tenfold's
steps include drawing the token, and its streams go through its engine. The text is Python's manual; peers
that tokenize must agree on the ids.

Each peer has an environment of its own in benchmarks/venvs, made when it is missing. A peer that cannot be
installed or run is named with the reason, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from peer_environments import HERE, PEERS, Recipe, environment_python
from peer_models import TYPES, folder_of, gguf_in
from tqdm import tqdm

from tenfold.bench.figures import figure
from tenfold.bench.peer_tables import Kind, check_markers, compare_speeds, peers_table, write_between
from tenfold.bench.peers import Peer, PeerError, Turns
from tenfold.bench.prompts import manual_text, windows
from tenfold.bench.script import run_script
from tenfold.bench.worker import start_worker
from tenfold.checkpoint.locate import locate
from tenfold.config import FORMATS, ISAS, ServeConfig
from tenfold.server.text import load_text

PREFILL, DEPTH, DEEP, DECODE = 512, 256, 4096, 64
ROWS = (1, 2, 4, 8)
STEPS = 12
STREAMS, STREAM_DEPTH, STREAM_TOKENS = 8, 128, 33
OURS = "Tenfold"
DOCUMENT = HERE.parent / "docs" / "benchmarks.md"
KINDS = (
    Kind("prefill", f"prefill of {PREFILL}", "tokens/s", 0),
    Kind("decode", f"decode at depth {DEPTH}", "tokens/s"),
    Kind("deep", f"decode at depth {DEEP}", "tokens/s"),
    *(Kind(f"step{n}", f"step of {n} row{'s' * (n > 1)}", "ms", 2, time=True) for n in ROWS),
    Kind("streams", f"{STREAMS} streams at depth {STREAM_DEPTH}", "tokens/s"),
)


class Work:
    """The orders of a turn, for one model's token ids."""

    def __init__(self, ids: list[int], prompts: list[list[int]], max_context: int) -> None:
        self._ids, self._prompts = ids, prompts
        self.deep = len(ids) >= DEEP + DECODE and max_context >= DEEP + DECODE
        """Whether the model's context has room for the deep figure."""

    def turn(self, peer: Peer, orders: list[str], repeats: int) -> dict[str, float]:
        """Each figure that the peer allows, the median of the turn's repeats."""
        ids = self._ids

        def decode(depth: int) -> float:
            return DECODE / float(peer.ask("decode", ids=ids[: depth + DECODE], depth=depth))

        def step(rows: int) -> float:
            fields = {"ids": ids[: DEPTH + DECODE], "depth": DEPTH, "rows": rows, "steps": STEPS}
            return 1e3 * figure(peer.ask("verify", **fields)).median

        def streams() -> float:
            return float(peer.ask("streams", prompts=self._prompts, tokens=STREAM_TOKENS)["tokens_per_s"])

        tasks: list[tuple[str, str, Callable[[], float]]] = [
            ("prefill", "prefill", lambda: PREFILL / float(peer.ask("prefill", ids=ids[:PREFILL]))),
            ("decode", "decode", partial(decode, DEPTH)),
            *((f"step{rows}", "verify", partial(step, rows)) for rows in ROWS),
            ("streams", "streams", streams),
        ]
        if self.deep:
            tasks.append(("deep", "decode", partial(decode, DEEP)))
        return {
            key: figure([task() for _ in range(repeats)]).median
            for key, order, task in tasks
            if order in orders
        }


class Side(msgspec.Struct):
    """A side that is loaded."""

    peer: Peer
    orders: list[str]
    about: dict[str, Any]


def start_peer(recipe: Recipe, model: Path, threads: int) -> Side:
    """A peer that has loaded the model. Raises ValueError, OSError or PeerError."""
    path = model if recipe.reads == "gguf" else folder_of(model)
    peer = Peer(recipe.title, [environment_python(recipe), recipe.script])
    try:
        about = peer.ask("load", model=str(path), threads=threads, **recipe.load)
        return Side(peer, peer.ask("orders"), about)
    except BaseException:
        peer.close()
        raise


def check_ids(side: Side, text: str, ours: list[int]) -> None:
    """Raises PeerError when a side that tokenizes has other ids for the text."""
    if "tokenize" not in side.orders:
        return
    theirs = side.peer.ask("tokenize", text=text)
    if theirs != ours:
        pairs = zip(ours, theirs, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
        raise PeerError(f"{side.peer.name} tokenizes the text differently, from token {at} on")


class Sitting:
    """All sides with one model file."""

    def __init__(self, config: ServeConfig, model: Path, stack: ExitStack) -> None:
        raw = PREFILL + (DEPTH + DECODE) + (DEEP + DECODE)
        engine = STREAMS * (STREAM_DEPTH + STREAM_TOKENS + 16)
        peer, about = start_worker(config, raw_tokens=raw, engine_tokens=engine)
        stack.enter_context(peer)
        encode = load_text(str(model)).encode_prompt
        self.text = manual_text()[: 8 * PREFILL]
        self.ids = encode(self.text)
        prompts = windows(encode, STREAMS, STREAM_DEPTH)
        self.work = Work(windows(encode, 1, DEEP + DECODE)[0], prompts, about["max_context"])
        self.sides = {OURS: Side(peer, ["prefill", "decode", "verify", "streams"], about)}
        self.left_out: dict[str, str] = {}
        self.found: dict[str, dict[str, list[float]]] = {kind.key: {} for kind in KINDS}
        self.idle_cpu_share: dict[str, float] = {}
        self._model, self._stack = model, stack

    def admit(self, recipe: Recipe) -> None:
        """Loads a peer, or notes why not."""
        try:
            side = start_peer(recipe, self._model, self.sides[OURS].about["threads"])
            self._stack.enter_context(side.peer)
            check_ids(side, self.text, self.ids)
        except (ValueError, OSError, PeerError) as error:
            self._leave_out(recipe.title, error)
        else:
            self.sides[recipe.title] = side

    def measure(self, rounds: int, repeats: int, seconds: float) -> None:
        """Rounds of turns, after one to warm up and to find out who does not rest. No round but the first
        five begins after ``seconds``. Raises PeerError when Tenfold fails or somebody does not rest."""
        turns = self._turns()
        for name in list(self.sides):
            self._turn(turns, name, 1)
        # A second turn of Tenfold, with everybody's prompts in place, shows who goes on working.
        self._turn(turns, OURS, 1)
        for name, share in turns.idle_cpu_share.items():
            if name in self.sides and name != OURS and share > 0.02:
                self._leave_out(name, PeerError(f"uses {share:.0%} of a core while it is not its turn"))
        turns = self._turns()
        began = time.perf_counter()
        for number in tqdm(range(rounds), disable=not sys.stderr.isatty(), unit="round"):
            if number >= 5 and time.perf_counter() - began > seconds:
                break
            if len(self.sides) == 1:
                break
            for name in list(self.sides):
                for key, value in self._turn(turns, name, repeats).items():
                    self.found[key].setdefault(name, []).append(value)
        turns.check()
        self.idle_cpu_share = turns.idle_cpu_share

    def _turns(self) -> Turns:
        return Turns({name: side.peer.pid for name, side in self.sides.items()})

    def _turn(self, turns: Turns, name: str, repeats: int) -> dict[str, float]:
        """A side's figures; none, and the side is left out, when it fails."""
        side = self.sides[name]
        try:
            result: dict[str, float] = turns.turn(
                name, partial(self.work.turn, side.peer, side.orders, repeats)
            )
        except PeerError as error:
            if name == OURS:
                raise
            self._leave_out(name, error)
            return {}
        return result

    def _leave_out(self, name: str, error: Exception) -> None:
        self.left_out[name] = str(error)
        print(f"{name} is left out: {error}", file=sys.stderr)
        side = self.sides.pop(name, None)
        if side:
            side.peer.close()
        for rounds in self.found.values():
            rounds.pop(name, None)

    def to_json(self) -> dict[str, Any]:
        """For machines: every figure of every pair, the rounds among them."""
        figures = {
            kind.key: {
                name: compare_speeds(kind, self.found[kind.key], OURS, name).to_json()
                for name in self.found[kind.key]
                if name != OURS
            }
            for kind in KINDS
        }
        return {
            "model": str(self._model),
            "sides": {name: side.about for name, side in self.sides.items()},
            "left_out": self.left_out,
            "idle_cpu_share": self.idle_cpu_share,
            "figures": figures,
        }

    def report(self, format: str) -> str:
        """The table, who took part, and who did not."""
        about = self.sides[OURS].about
        rounds = max((len(values) for values in self.found["decode"].values()), default=0)
        lines = [
            f"{self._model.name}, {about['threads']} threads, {rounds} rounds in turns; median (p10 to p90), "
            "ratio of speeds with its 95 % interval",
            "",
            f"- Tenfold: {about['isa']}, weights {format}",
        ]
        for name, side in self.sides.items():
            if name != OURS:
                lines.append(f"- {name}: {side.about['about']}")
        lines += [f"- {name} is left out: {reason}" for name, reason in self.left_out.items()]
        if not self.work.deep:
            lines.append(f"- The model's context is too short for depth {DEEP}")
        if len(self.sides) > 1:
            lines += ["", peers_table(KINDS, self.found, OURS, "step1")]
        return "\n".join(lines)


def chosen(text: str, known: list[str], what: str) -> list[str]:
    """The names in a list with commas. Raises ValueError for one that is not known."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ValueError(f"{what}: there is no {name!r}; known are {', '.join(known)}")
    return names


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or a known name")
    parser.add_argument("--only", default="llamacpp", help=f"peers, of {', '.join(PEERS)}")
    parser.add_argument(
        "--formats", default="file", help=f"file: as it is; or made from it: {', '.join(TYPES)}"
    )
    parser.add_argument("--threads", type=int, default=0, help="of all; 0: one per core that may be used")
    parser.add_argument("--rounds", type=int, default=11, help="at least 5")
    parser.add_argument("--seconds", type=float, default=600, help="no round but five begins after so many")
    parser.add_argument("--repeats", type=int, default=1, help="of each figure in a turn")
    parser.add_argument("--format", choices=FORMATS, default="auto", help="of Tenfold's weights")
    parser.add_argument("--isa", choices=ISAS, default="auto", help="of Tenfold")
    parser.add_argument(
        "--write",
        metavar="NAME",
        help=f"put the tables into docs/{DOCUMENT.name}, between <!-- peers:NAME begin --> and ... end",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error("--rounds: at least 5 are needed for an interval")
    if options.repeats < 1:
        parser.error("--repeats: must be positive")
    names = chosen(options.only, list(PEERS), "--only")
    formats = chosen(options.formats, ["file", *TYPES], "--formats")
    if options.write:
        check_markers(DOCUMENT, options.write)
    source = locate(options.model)
    if source.suffix != ".gguf":
        raise ValueError(f"{source}: peers are compared on a GGUF file")
    reports, results = [], {}
    for kind in formats:
        model = gguf_in(source, kind)
        config = ServeConfig(
            model=str(model), threads=options.threads, format=options.format, isa=options.isa
        )
        with ExitStack() as stack:
            sitting = Sitting(config, model, stack)
            for name in names:
                sitting.admit(PEERS[name])
            sitting.measure(options.rounds, options.repeats, options.seconds)
        reports.append(sitting.report(options.format))
        results[kind] = {"format": options.format, "repeats": options.repeats, **sitting.to_json()}
    text = "\n\n".join(reports)
    if options.write:
        write_between(DOCUMENT, options.write, text)
    print(json.dumps(results) if options.json else text)
    return 0


if __name__ == "__main__":
    run_script(main)

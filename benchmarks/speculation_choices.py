"""The controller beside every fixed choice, on the real engine: what would have been best, known afterwards?

    python benchmarks/speculation_choices.py --traffic traffic.jsonl --drafter drafter --temperature 0
    python benchmarks/speculation_choices.py --random 16 --streams 8

Every request is answered by each side before the next request comes, by one without speculation, by the
controller with both drafters and with each alone, and by one drafter with a fixed number of tokens
(`suffix 2`, `head 4` ...). All answers must be the same. Each side has a suffix index of its own. Figures are
of decoding and, with one stream, of answers that do not repeat themselves.

`--random N`: instead of traffic, N prompts of random tokens answered at temperature 2, which nothing can
guess: there speculation has only its cost. The exit code is 1 when an answer differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from tenfold.backends.base import Program
from tenfold.bench.figures import TotalRatio, table, total_ratio
from tenfold.bench.replay import Side, turns_of
from tenfold.bench.script import run_script
from tenfold.bench.survey_run import warm_up
from tenfold.checkpoint.base import Checkpoint
from tenfold.checkpoint.locate import locate
from tenfold.config import ServeConfig
from tenfold.graph.graph import Graph
from tenfold.protocol import SamplingParams
from tenfold.server.text import Text, load_text
from tenfold.speculate.base import Drafter, DraftSequence, Outcome, SpeculationReport, Speculator
from tenfold.speculate.build import SpeculationSettings, compile_head
from tenfold.speculate.controller import Controller
from tenfold.speculate.cost_curve import measure_curve
from tenfold.speculate.fixed import FixedSpeculator
from tenfold.speculate.head import HeadDrafter
from tenfold.speculate.suffix import SuffixDrafter
from tenfold.traffic.answering import MAX_ANSWER, answer_params
from tenfold.traffic.reading import TrafficRequest, read_traffic
from tenfold.traffic.repetition import repetitive
from tenfold.traffic.running import Done, job_of
from tenfold.traffic.splits import HELD_OUT, first_of_each, newest, untrained
from tenfold.worker.build import build_target

SUFFIX_LENGTHS = (1, 2, 3, 4, 6, 8)
HEAD_LENGTHS = (1, 2, 3, 4, 6)
RANDOM_PROMPT_TOKENS, RANDOM_ANSWER_TOKENS = 32, 128
PLAIN, CONTROLLER = "plain", "controller"


class Switch:
    """A speculator that passes everything on to the one whose turn it is."""

    def __init__(self, choices: dict[str, Speculator], drafters: Sequence[Drafter], features: bool) -> None:
        self.choices = choices
        self.wants_features = features
        self.now: Speculator = next(iter(choices.values()))
        self._drafters = drafters

    def begin(self, sequence: DraftSequence) -> None:
        """Passed on."""
        self.now.begin(sequence)

    def end(self, sequence: DraftSequence, learn: bool) -> None:
        """Passed on."""
        self.now.end(sequence, learn)

    def propose(
        self, sequences: Sequence[DraftSequence], rows: int, limits: Sequence[int]
    ) -> list[Sequence[int]]:
        """Passed on."""
        return self.now.propose(sequences, rows, limits)

    def observe(self, outcomes: Sequence[Outcome], rows: int, step_ms: float) -> None:
        """Passed on."""
        self.now.observe(outcomes, rows, step_ms)

    def report(self) -> SpeculationReport:
        """Of the one whose turn it is."""
        return self.now.report()

    def close(self) -> None:
        """Closes all drafters, each once."""
        for drafter in self._drafters:
            drafter.close()


def build_switch(program: Program, graph: Graph, checkpoint: Checkpoint, folder: Path | None) -> Switch:
    """All choices there are."""
    curve = measure_curve(program)
    drafters: list[Drafter] = []

    def suffix() -> SuffixDrafter:
        drafters.append(SuffixDrafter())
        return drafters[-1]  # type: ignore[return-value]

    head = None if folder is None else HeadDrafter(compile_head(program, graph, checkpoint, folder))
    choices: dict[str, Speculator] = {}
    if head is None:
        choices[CONTROLLER] = Controller([suffix()], curve)
    else:
        drafters.append(head)
        choices[CONTROLLER] = Controller([suffix(), head], curve, wants_features=True)
        choices["suffix alone"] = Controller([suffix()], curve)
        choices["head alone"] = Controller([head], curve, wants_features=True)
        choices |= {f"head {k}": FixedSpeculator(head, k, wants_features=True) for k in HEAD_LENGTHS}
    choices |= {f"suffix {k}": FixedSpeculator(suffix(), k) for k in SUFFIX_LENGTHS}
    return Switch(choices, drafters, head is not None)


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What is timed as one: a request, or with several streams a turn."""

    kind: str
    group: str
    tokens: int
    seconds: dict[str, float]
    """By side."""


def random_requests(count: int, vocab: int, seed: int) -> list[TrafficRequest]:
    """Prompts of random tokens, to be answered with tokens that are nearly so."""
    dice = random.Random(seed)
    return [
        TrafficRequest(
            line=number + 1,
            kind="random",
            conversation=str(number),
            time=float(number),
            prompt=tuple(dice.randrange(vocab) for _ in range(RANDOM_PROMPT_TOKENS)),
            params=SamplingParams(
                temperature=2.0, seed=dice.getrandbits(63), max_tokens=RANDOM_ANSWER_TOKENS, ignore_eos=True
            ),
            answer=None,
        )
        for number in range(count)
    ]


def measure(
    plain: Side, switched: Side, switch: Switch, requests: Sequence[TrafficRequest], streams: int
) -> tuple[list[Piece], int]:
    """All sides on all requests, and how many answers differ."""
    pieces: list[Piece] = []
    differ = 0
    names = [PLAIN, *switch.choices]
    turns = turns_of(requests, streams)
    for number, turn in enumerate(tqdm(turns, disable=not sys.stderr.isatty(), unit="turn")):
        jobs = [job_of(one) for one in turn]
        found: dict[str, tuple[float, dict[str, Done]]] = {}
        # Each turn begins with another side, so that none always finds the machine as another left it.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name == PLAIN:
                found[name] = plain.run(jobs)
            else:
                switch.now = switch.choices[name]
                found[name] = switched.run(jobs)
        law = found[PLAIN][1]
        differ += sum(
            any((done[id].tokens, done[id].finish) != (one.tokens, one.finish) for _, done in found.values())
            for id, one in law.items()
        )
        kept = [id for id, one in law.items() if len(law) > 1 or not repetitive(one.tokens)]
        tokens = sum(len(law[id].tokens) - law[id].first_count for id in kept)
        if tokens > 0:
            pieces.append(
                Piece(
                    kind=turn[0].kind,
                    group=turn[0].conversation if streams == 1 else str(number),
                    tokens=tokens,
                    # Not the whole turn: who comes second on an engine finds the prompts in its cache.
                    seconds={
                        name: sum(done[id].ended - done[id].first for id in kept)
                        for name, (_, done) in found.items()
                    },
                )
            )
    return pieces, differ


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One class of traffic."""

    tokens: int
    over_plain: dict[str, TotalRatio]
    """Speed of each side over plain decoding."""
    best_fixed: str
    """Plain decoding among them."""
    over_best_fixed: TotalRatio
    """Speed of the controller over that of the best fixed choice."""
    over_best_single: TotalRatio | None
    """Speed of the controller over the better of the controllers of one drafter."""


def judge(pieces: Sequence[Piece]) -> Found:
    """These pieces together."""

    def over(first: str, second: str) -> TotalRatio:
        return total_ratio(
            [one.seconds[second] for one in pieces],
            [one.seconds[first] for one in pieces],
            [one.group for one in pieces],
        )

    names = list(pieces[0].seconds)
    total = {name: sum(one.seconds[name] for one in pieces) for name in names}
    fixed = [name for name in names if name == PLAIN or name[-1].isdigit()]
    single = [name for name in names if name.endswith("alone")]
    best = min(fixed, key=total.__getitem__)
    return Found(
        tokens=sum(one.tokens for one in pieces),
        over_plain={name: over(name, PLAIN) for name in names if name != PLAIN},
        best_fixed=best,
        over_best_fixed=over(CONTROLLER, best),
        over_best_single=over(CONTROLLER, min(single, key=total.__getitem__)) if single else None,
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--traffic", type=Path, help="JSONL, as `tenfold replay` reads it")
    what.add_argument("--random", type=int, metavar="N", help="N prompts of random tokens")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", type=Path, help="a folder that `tenfold train-drafter` wrote")
    parser.add_argument("--temperature", type=float, help="instead of the bodies' own")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--newest", type=float, default=HELD_OUT)
    parser.add_argument("--most", type=int, default=40, help="most requests of a class")
    parser.add_argument("--max-answer", type=int, default=MAX_ANSWER)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    path = str(locate(args.model))
    text = load_text(path)
    settings = ServeConfig(model=args.model, threads=args.threads).engine_settings(path)
    plain = build_target(settings)
    info = plain.program.info
    switched = build_target(
        msgspec.structs.replace(settings, kv_memory_bytes=info.kv_pages * info.page_bytes),
        SpeculationSettings(drafter=args.drafter).taps,
        lambda program, graph, checkpoint: build_switch(program, graph, checkpoint, args.drafter),
    )
    try:
        switch = switched.speculator
        assert isinstance(switch, Switch)
        if args.random:
            requests = random_requests(args.random, info.vocab_size, args.seed)
        else:
            requests = chosen(args, text, info.vocab_size, info.max_context)
        warm_up(plain.engine, text)
        warm_up(switched.engine, text)
        sides = Side(plain.engine, text, args.streams), Side(switched.engine, text, args.streams)
        pieces, differ = measure(*sides, switch, requests, args.streams)
    finally:
        switched.engine.close()
        plain.engine.close()
    kinds = {kind: judge([one for one in pieces if one.kind == kind]) for kind in {p.kind for p in pieces}}
    if args.json:
        print(json.dumps({"classes": msgspec.to_builtins(kinds), "differ": differ, "streams": args.streams}))
    else:
        print(shown(kinds, args.streams, info.isa, info.threads))
        print(f"\n{differ} answers differ")
    return int(differ > 0)


def chosen(args: Any, text: Text, vocab_size: int, max_context: int) -> list[TrafficRequest]:
    """Held-out requests of the traffic, with the parameters to answer them with."""
    requests = newest(read_traffic(args.traffic, text, vocab_size, max_context), args.newest)
    if args.drafter is not None:
        requests = untrained(args.drafter, requests)
    requests = first_of_each(requests, args.most)
    if not requests:
        raise ValueError("no request is left: the drafter has learnt from all of them")
    own = [
        msgspec.structs.replace(one, params=answer_params(one.params, "own", args.max_answer))
        for one in requests
    ]
    if args.temperature is None:
        return own
    return [
        msgspec.structs.replace(one, params=msgspec.structs.replace(one.params, temperature=args.temperature))
        for one in own
    ]


def shown(kinds: dict[str, Found], streams: int, isa: str, threads: int) -> str:
    """For people."""
    names = sorted(kinds)
    rows = [
        [side, *(kinds[name].over_plain[side].text() for name in names)]
        for side in kinds[names[0]].over_plain
    ]
    rows.append(["best fixed choice", *(kinds[name].best_fixed for name in names)])
    rows.append(["controller over it", *(kinds[name].over_best_fixed.text() for name in names)])
    if all(kinds[name].over_best_single is not None for name in names):
        single = [ratio.text() for name in names if (ratio := kinds[name].over_best_single) is not None]
        rows.append(["controller over the best drafter alone", *single])
    head = [f"{streams} streams, {isa}, {threads} threads: over plain", *names]
    return table(head, rows)


if __name__ == "__main__":
    run_script(main)

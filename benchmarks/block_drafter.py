"""A block drafter against the recurrent head at equal cost: is it worth building?

    tenfold train-drafter smollm2 --traffic traffic.jsonl -o drafter --answers greedy,sampled --max-answer 128
    python benchmarks/block_drafter.py traffic.jsonl --work drafter/work --max-answer 128 --results runs

Both are trained by the product's own loop on the same answers: same split, tokens that can be drafted, loss,
optimizer, epochs and choice of the best epoch; CPU time is limited and told. Both are replayed with the noise
of the target on conversations that are newer than what they have learnt from; answers that go in circles are
left out. Weights are rounded to q8 as they are served. Runs that ``--results`` has are not made again.

``reads``: weights read for a proposal of four tokens, beside the head's. ``multiplied``: the same times rows.
The head reads its own again for each token; a block drafter reads once what all positions share.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from block_data import Data, gather
from block_model import Shape, Work, block_work, head_work
from block_training import BlockRun, HeadRun

from tenfold.bench.figures import table, total_ratio
from tenfold.bench.script import run_script
from tenfold.speculate.head_data import log_normalisers
from tenfold.speculate.trained_head import CostCurve, HeadSettings, Progress

LENGTH = 4
SHAPES = {
    "own": Shape(own=True, layers=1, mlp_width=2368),
    "shared": Shape(own=False, layers=1, mlp_width=1536),
    "deep": Shape(own=False, layers=3, mlp_width=3584),
}
"""own: as many reads as the head's, about as many multiplications. shared: as many multiplications, 0.4 times
the reads. deep: as many reads, 3.4 times the multiplications."""


class Run(msgspec.Struct, frozen=True):
    """A training, and how many drafted tokens stood at each anchor of the held-out answers."""

    arm: str
    seed: int
    cpu_s: float
    epochs: int
    best_epoch: int
    trained_weights: int
    reads: float
    multiplications: float
    agreed: list[int]


def train(
    arm: str, seed: int, data: Data, normalisers: object, costs: CostCurve, args: argparse.Namespace
) -> Run:
    """Trains and replays one drafter."""
    settings = HeadSettings(
        seed=seed, epochs=args.epochs, minutes=args.minutes, unroll=LENGTH, patience=args.epochs
    )
    rest = (data.target, settings, costs, data.always, args.work, _tell)
    run: HeadRun
    if arm == "head":
        run = HeadRun(data.training, data.validation, *rest)
        work: Work = head_work(run.config, LENGTH)
    else:
        run = BlockRun(SHAPES[arm], data.training, data.validation, *rest)
        work = block_work(SHAPES[arm], run.config)
    run.begin(normalisers)
    evidence = run.run().evidence
    return Run(
        arm,
        seed,
        evidence.seconds,
        len(evidence.epochs),
        evidence.best_epoch,
        evidence.trained_weights,
        work.reads,
        work.multiplications,
        run.agreements(data.held_out).tolist(),
    )


def _tell(news: Progress) -> None:
    if news.replay is not None:
        acceptance = " ".join(f"{a:.3f}" for a in news.replay.acceptance)
        print(f"  epoch {news.epoch}: loss {news.loss:.3f}, stood {acceptance}", flush=True)


class Steps(msgspec.Struct, frozen=True):
    """What drafts of one length did for each answer."""

    tokens: list[int]
    steps: list[int]


def walk(agreed: Sequence[int], lengths: Sequence[int], draft: int) -> Steps:
    """Steps of the target with drafts of ``draft`` tokens; ``lengths``: tokens of each answer."""
    found = Steps([], [])
    offset = 0
    for length in lengths:
        at = steps = 0
        while at < length - 1:
            at += min(agreed[offset + at], draft) + 1
            steps += 1
        found.tokens.append(length - 1)
        found.steps.append(steps)
        offset += length - 1
    return found


class Arm:
    """All seeds of a drafter on the held-out answers of one sort."""

    def __init__(
        self, runs: Sequence[Run], lengths: Sequence[int], inside: Sequence[bool], costs: CostCurve
    ) -> None:
        chosen = np.flatnonzero(inside)
        anchors = np.repeat(np.asarray(inside), np.asarray(lengths) - 1)
        self.agreed = np.stack([np.asarray(run.agreed)[anchors] for run in runs])
        self.stood = [float((self.agreed >= k).mean()) for k in range(1, LENGTH + 1)]
        self.by_seed = [float((one >= 1).mean()) for one in self.agreed]
        counts = [lengths[i] for i in chosen]
        walks = [[walk(one.tolist(), counts, k) for one in self.agreed] for k in range(1, LENGTH + 1)]
        self.tokens = np.asarray(walks[0][0].tokens)
        self.steps = [np.mean([one.steps for one in of_length], axis=0) for of_length in walks]
        self._costs = costs

    def cost(self, share: float) -> list[float]:
        """Of each answer, with drafts of the best length, if drafting costs ``share`` of the head's."""
        totals = [
            steps * (self._costs.verify[k] + share * k * self._costs.draft)
            for k, steps in enumerate(self.steps, start=1)
        ]
        best: list[float] = min(totals, key=lambda one: float(one.sum())).tolist()
        return best

    def speed(self) -> float:
        return float(self.tokens.sum()) / sum(self.cost(1.0))

    def length(self) -> int:
        sums = [
            float(s.sum()) * (self._costs.verify[k] + k * self._costs.draft)
            for k, s in enumerate(self.steps, 1)
        ]
        return 1 + sums.index(min(sums))


def report(data: Data, runs: Sequence[Run], costs: CostCurve) -> str:
    """The tables, in Markdown."""
    arms = list(dict.fromkeys(run.arm for run in runs))
    head = next(run for run in runs if run.arm == "head")
    work = [
        [
            arm,
            f"{first.trained_weights / 1e6:.1f}",
            f"{first.reads / head.reads:.2f}",
            f"{first.multiplications / head.multiplications:.2f}",
            " ".join(f"{run.cpu_s:.0f}" for run in runs if run.arm == arm),
            " ".join(f"{run.best_epoch}/{run.epochs}" for run in runs if run.arm == arm),
        ]
        for arm in arms
        for first in [next(run for run in runs if run.arm == arm)]
    ]
    lengths = [len(answer.tokens) for answer in data.held_out.answers]
    groups = [answer.group for answer in data.held_out.answers]
    rows = []
    for kind in [*sorted(set(data.kinds)), "all"]:
        for sampled in (False, True):
            inside = [
                kind in (one, "all") and (answer.temperature > 0) == sampled
                for one, answer in zip(data.kinds, data.held_out.answers, strict=True)
            ]
            if not any(inside):
                continue
            sides = {arm: Arm([r for r in runs if r.arm == arm], lengths, inside, costs) for arm in arms}
            chosen = [group for group, here in zip(groups, inside, strict=True) if here]
            cells = [f"{kind}, {'sampled' if sampled else 'greedy'}", f"{sum(sides['head'].tokens)}"]
            for arm in arms:
                side = sides[arm]
                cells.append(" ".join(f"{x:.2f}" for x in side.stood))
                cells.append(f"{side.speed():.2f}")
                if arm != "head":
                    cells.append(total_ratio(sides["head"].cost(1.0), side.cost(1.0), chosen).text())
            rows.append(cells)
    columns = ["class", "tokens"]
    for arm in arms:
        columns += [f"{arm}: stood 1-4", "speed"] + ([] if arm == "head" else ["beside the head (95 %)"])
    return "\n\n".join(
        [
            table(["drafter", "trained, M", "reads", "multiplied", "CPU s", "best epoch"], work),
            table(columns, rows),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("traffic", type=Path)
    parser.add_argument(
        "--work", type=Path, required=True, help="`work` of the folder that train-drafter wrote"
    )
    parser.add_argument("--results", type=Path, required=True, help="folder for what each run found")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--answers", default="greedy,sampled", help="as train-drafter was told")
    parser.add_argument("--max-answer", type=int, default=128, help="as train-drafter was told")
    parser.add_argument("--arms", default="head,own,shared")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--tokens", type=int, default=40_000, help="to train on")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=6.0, help="CPU time of a training")
    parser.add_argument("--verify", help="V(1),V(2),... of the machine; default: a typical curve")
    args = parser.parse_args()
    torch.set_num_threads(1)
    costs = CostCurve(verify=tuple(map(float, args.verify.split(",")))) if args.verify else CostCurve()
    limits = (args.tokens, args.tokens // 8, args.tokens // 2)
    data = gather(args.model, args.traffic, args.work, args.answers, args.max_answer, limits)
    for name in ("training", "validation", "held_out"):
        part = getattr(data, name)
        print(f"{name}: {part.token_count} tokens of {len(part.answers)} answers", flush=True)
    args.results.mkdir(parents=True, exist_ok=True)
    normalisers = None
    runs = []
    for seed in map(int, args.seeds.split(",")):
        for arm in args.arms.split(","):
            path = args.results / f"{arm}-{seed}.json"
            if not path.exists():
                if normalisers is None:
                    normalisers = log_normalisers(data.training, data.target, HeadSettings().temperature)
                print(f"{arm}, seed {seed}", flush=True)
                path.write_bytes(msgspec.json.encode(train(arm, seed, data, normalisers, costs, args)))
            runs.append(msgspec.json.decode(path.read_bytes(), type=Run))
    print()
    print(report(data, runs, costs))
    return 0


if __name__ == "__main__":
    run_script(main)

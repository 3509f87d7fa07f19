"""A block drafter against the recurrent head at equal cost: is it worth building?

    tenfold train-drafter smollm2 --traffic traffic.jsonl -o drafter --answers greedy,sampled --max-answer 128
    python benchmarks/block_drafter.py traffic.jsonl --work drafter/work --max-answer 128 --results runs

Both are trained by the product's own loop on the same answers: same split, tokens that can be drafted, loss,
optimizer, epochs and choice of the best epoch; CPU time is limited and told. Both are replayed with the noise
of the target on conversations that are newer than what they have learnt from; answers that go in circles are
left out. Weights are rounded to q8 as they are served. Runs that ``--results`` has are not made again.

``reads``: weights read for a proposal of four tokens, beside the head's. ``multiplied``: the same times rows.
The head reads its own again for each token; a block drafter reads once what all positions share. ``time``:
CPU time, from what a weight takes in the native head with one row and with four.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from block_data import Data, gather
from block_model import Shape, block_work, head_work
from block_time import NativeTime, native_time
from block_training import BlockRun, HeadRun

from tenfold.backends.torch.functions import Tensor
from tenfold.bench.figures import table, total_ratio
from tenfold.bench.script import run_script
from tenfold.models.recurrent_head import HeadConfig
from tenfold.speculate.drafter_folder import save_drafter
from tenfold.speculate.head_data import log_normalisers
from tenfold.speculate.trained_head import CostCurve, HeadSettings, Progress

LENGTH = 4
LEAN = "lean"
"""A head with a narrower gated layer, which reads less too."""
LEAN_RATIO = 2 / 3
SHAPES = {
    "own": Shape(own=True, layers=1, mlp_width=2368),
    "shared": Shape(own=False, layers=1, mlp_width=1536),
}
"""Reads and multiplications beside a head with 4096 output rows: own 0.90 and 1.22, shared 0.38 and 1.00."""


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
    arm: str, seed: int, data: Data, normalisers: Tensor, costs: CostCurve, args: argparse.Namespace
) -> Run:
    """Trains and replays one drafter."""
    settings = HeadSettings(
        seed=seed, epochs=args.epochs, minutes=args.minutes, unroll=LENGTH, patience=args.epochs
    )
    if arm == LEAN:
        settings = msgspec.structs.replace(settings, mlp_ratio=LEAN_RATIO)
    rest = (data.target, settings, costs, data.always, args.work, _tell, None)
    shape = SHAPES.get(arm)
    run = (
        HeadRun(data.training, data.validation, *rest)
        if shape is None
        else BlockRun(shape, data.training, data.validation, *rest)
    )
    work = head_work(run.config, LENGTH) if shape is None else block_work(shape, run.config)
    run.begin(normalisers)
    head = run.run()
    if arm == "head":
        save_drafter(args.results / "head", head)
    return Run(
        arm=arm,
        seed=seed,
        cpu_s=head.evidence.seconds,
        epochs=len(head.evidence.epochs),
        best_epoch=head.evidence.best_epoch,
        trained_weights=head.evidence.trained_weights,
        reads=work.reads,
        multiplications=work.multiplications,
        agreed=run.agreements(data.held_out).tolist(),
    )


def _tell(news: Progress) -> None:
    if news.replay is not None:
        acceptance = " ".join(f"{a:.3f}" for a in news.replay.acceptance)
        print(f"  epoch {news.epoch}: loss {news.loss:.3f}, stood {acceptance}", flush=True)


def walk(agreed: Sequence[int], lengths: Sequence[int], draft: int) -> list[int]:
    """Steps of the target over each answer with drafts of ``draft`` tokens; ``lengths``: their tokens."""
    found = []
    offset = 0
    for length in lengths:
        at = steps = 0
        while at < length - 1:
            at += min(agreed[offset + at], draft) + 1
            steps += 1
        found.append(steps)
        offset += length - 1
    return found


class Arm:
    """Some runs of a drafter, seen on the held-out answers of one sort."""

    def __init__(
        self, runs: Sequence[Run], lengths: Sequence[int], inside: Sequence[bool], costs: CostCurve
    ) -> None:
        anchors = np.repeat(np.asarray(inside), np.asarray(lengths) - 1)
        agreed = np.stack([np.asarray(run.agreed)[anchors] for run in runs])
        self.stood = [float((agreed >= k).mean()) for k in range(1, LENGTH + 1)]
        counts = [length for length, here in zip(lengths, inside, strict=True) if here]
        self.tokens = sum(counts) - len(counts)
        self._steps = [
            np.mean([walk(one.tolist(), counts, k) for one in agreed], axis=0) for k in range(1, LENGTH + 1)
        ]
        self._costs = costs

    def cost(self, shares: Sequence[float] = (1.0,) * LENGTH) -> list[float]:
        """Of each answer, with drafts of the best fixed length, if those of 1, 2 ... tokens take such shares
        of the head's."""
        costs = self._costs
        totals = [
            steps * (costs.verify[k] + share * k * costs.draft)
            for k, (steps, share) in enumerate(zip(self._steps, shares, strict=True), start=1)
        ]
        best: list[float] = min(totals, key=lambda one: float(one.sum())).tolist()
        return best

    def speed(self) -> float:
        """Tokens per unit of cost; without drafting it is 1."""
        return self.tokens / sum(self.cost())


def times(arm: str, native: NativeTime, config: HeadConfig) -> list[float]:
    """Of a drafter's proposals of 1, 2 ... tokens, beside the head's."""
    found = []
    for length in range(1, LENGTH + 1):
        if arm in SHAPES:
            work = block_work(SHAPES[arm]._replace(length=length), config)
            taken = native.block(work.once, work.block, length)
        else:
            width = config.mlp_width if arm != LEAN else math.ceil(LEAN_RATIO * config.state_width / 32) * 32
            sizes = msgspec.structs.replace(config, mlp_width=width)
            taken = native.head(length, head_work(sizes, length).reads / head_work(config, length).reads)
        found.append(taken / native.head(length))
    return found


def report(data: Data, runs: Sequence[Run], costs: CostCurve, shares: Mapping[str, Sequence[float]]) -> str:
    """The tables, in Markdown. ``shares``: what each drafter's proposals of 1, 2 ... tokens take beside the
    head's."""
    arms = list(dict.fromkeys(run.arm for run in runs))
    lengths = [len(answer.tokens) for answer in data.held_out.answers]
    everywhere = [True] * len(lengths)
    by_seed = {
        arm: [Arm([run], lengths, everywhere, costs) for run in runs if run.arm == arm] for arm in arms
    }
    head = next(run for run in runs if run.arm == "head")
    work = []
    for arm in arms:
        own = [run for run in runs if run.arm == arm]
        work.append(
            [
                arm,
                f"{own[0].trained_weights / 1e6:.1f}",
                f"{own[0].reads / head.reads:.2f}",
                f"{own[0].multiplications / head.multiplications:.2f}",
                " ".join(f"{share:.2f}" for share in shares[arm]),
                " ".join(f"{run.cpu_s:.0f}" for run in own),
                " ".join(f"{run.best_epoch}/{run.epochs}" for run in own),
                " ".join(f"{side.stood[0]:.3f}" for side in by_seed[arm]),
                " ".join(f"{side.speed():.3f}" for side in by_seed[arm]),
            ]
        )
    names = [
        "drafter",
        "trained, M",
        "reads",
        "multiplied",
        "time, 1 to 4",
        "CPU s",
        "epoch",
        "first stood",
        "speed",
    ]
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
            cells = [f"{kind}, {'sampled' if sampled else 'greedy'}", f"{sides['head'].tokens}"]
            for arm, side in sides.items():
                cells.append(" ".join(f"{x:.2f}" for x in side.stood))
                if arm == "head":
                    cells.append(f"{side.speed():.2f}")
                    continue
                cells.append(total_ratio(sides["head"].cost(), side.cost(), chosen).text())
                cells.append(total_ratio(sides["head"].cost(), side.cost(shares[arm]), chosen).text())
            rows.append(cells)
    columns = ["class", "tokens"]
    for arm in arms:
        more = ["speed"] if arm == "head" else ["at the head's cost", "at its own"]
        columns += [f"{arm}: 1 to 4 stood", *more]
    return "\n\n".join([table(names, work), table(columns, rows)])


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
    parser.add_argument("--arms", default="head,own,shared,lean")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--tokens", type=int, default=40_000, help="to train on")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=6.0, help="CPU time of a training")
    parser.add_argument("--verify", help="V(1),V(2),... of the machine; default: a typical curve")
    args = parser.parse_args()
    torch.set_num_threads(1)
    costs = CostCurve(verify=tuple(map(float, args.verify.split(",")))) if args.verify else CostCurve()
    limits = (args.tokens, args.tokens // 8, args.tokens)
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
    native, config = native_time(args.results / "head", data)
    print(f"\nNatively: {native.text()}\n")
    shares = {run.arm: times(run.arm, native, config) for run in runs}
    print(report(data, runs, costs, shares))
    return 0


if __name__ == "__main__":
    run_script(main)

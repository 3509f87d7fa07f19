"""A head trained on a team's own traffic against the same head trained on other text.

    tenfold train-drafter smollm2 --traffic traffic.jsonl -o drafter --answers greedy,sampled
    python benchmarks/head_transfer.py traffic.jsonl --work drafter/work --classes agent,chat

For each class two heads learn, by the product's own loop, from equally many tokens of the target's answers:
one from answers of that class, one from answers of all other classes. Both are replayed on conversations of
the class that are newer than what either has learnt from, with the target's noise; answers that go in circles
are left out. Told is the acceptance length: tokens that a step of the target commits, with drafts of 1 to 4
tokens, and its ratio, own by other, with a 95 % interval over conversations.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from block_data import Data, gather
from block_drafter import walk
from block_training import HeadRun

from tenfold.bench.figures import table, total_ratio
from tenfold.bench.script import run_script
from tenfold.checkpoint.locate import locate
from tenfold.server.text import load_text
from tenfold.speculate.features import FeatureSet
from tenfold.speculate.head_data import log_normalisers
from tenfold.speculate.trained_head import CostCurve, HeadSettings
from tenfold.traffic.reading import read_traffic

LENGTH = 4


def kinds_of(model: str, traffic: Path, data: Data) -> dict[str, str]:
    """The class of each conversation."""
    text, graph = load_text(str(locate(model))), data.target.graph
    requests = read_traffic(traffic, text, graph.vocab_size, graph.max_context)
    return {request.conversation: request.kind for request in requests}


def part(answers: FeatureSet, indices: Sequence[int], most: int) -> FeatureSet:
    """Some of these answers, evenly chosen, of about ``most`` tokens."""
    total = sum(len(answers.answers[i].tokens) for i in indices)
    share = min(1.0, most / max(total, 1))
    return answers.select(i for n, i in enumerate(indices) if int((n + 1) * share) > int(n * share))


def steps_of(
    data: Data, training: FeatureSet, validation: FeatureSet, held_out: FeatureSet, args: argparse.Namespace
) -> list[list[int]]:
    """Trains a head; for drafts of 1 to LENGTH, the steps that each held-out answer takes with it."""
    settings = HeadSettings(epochs=args.epochs, minutes=args.minutes, unroll=LENGTH, patience=args.epochs)
    normalisers = log_normalisers(training, data.target, settings.temperature)
    run = HeadRun(
        training, validation, data.target, settings, CostCurve(), data.always, args.work, lambda _: None, None
    )
    run.begin(normalisers)
    run.run()
    agreed = run.agreements(held_out).tolist()
    lengths = [len(answer.tokens) for answer in held_out.answers]
    return [walk(agreed, lengths, k) for k in range(1, LENGTH + 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("traffic", type=Path)
    parser.add_argument(
        "--work", type=Path, required=True, help="`work` of the folder that train-drafter wrote"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--answers", default="greedy,sampled", help="as train-drafter was told")
    parser.add_argument("--max-answer", type=int, default=256, help="as train-drafter was told")
    parser.add_argument("--classes", default="agent,chat")
    parser.add_argument("--tokens", type=int, default=40_000, help="to train each head on")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=8.0, help="CPU time of a training, at most")
    args = parser.parse_args()
    torch.set_num_threads(1)
    everything = (10**9, 10**9, 10**9)
    data = gather(args.model, args.traffic, args.work, args.answers, args.max_answer, everything)
    kinds = kinds_of(args.model, args.traffic, data)
    rows = []
    for name in args.classes.split(","):
        held_out = data.held_out.select(i for i, kind in enumerate(data.kinds) if kind == name)
        if not held_out.answers:
            raise ValueError(f"--classes: the traffic has no held-out answers of class {name!r}")
        steps = []
        tokens = []
        for own in (True, False):
            parts = []
            for answers, most in ((data.training, args.tokens), (data.validation, args.tokens // 8)):
                chosen = [i for i, a in enumerate(answers.answers) if (kinds[a.group] == name) == own]
                parts.append(part(answers, chosen, most))
            tokens.append(parts[0].token_count)
            print(f"{name}, {'own' if own else 'other'}: {tokens[-1]} tokens", flush=True)
            steps.append(steps_of(data, parts[0], parts[1], held_out, args))
        for sampled in (False, True):
            here = [i for i, a in enumerate(held_out.answers) if (a.temperature > 0) == sampled]
            if not here:
                continue
            counts = [len(held_out.answers[i].tokens) - 1 for i in here]
            groups = [held_out.answers[i].group for i in here]
            cells = [f"{name}, {'sampled' if sampled else 'greedy'}", f"{sum(counts)}"]
            for own_steps, other_steps in zip(*steps, strict=True):
                own_here = np.array([own_steps[i] for i in here])
                other_here = np.array([other_steps[i] for i in here])
                ratio = total_ratio(other_here.tolist(), own_here.tolist(), groups).text()
                lengths = [f"{sum(counts) / one.sum():.2f}" for one in (own_here, other_here)]
                cells.append(f"{lengths[0]} / {lengths[1]}: {ratio}")
            rows.append(cells)
    print(table(["class", "tokens", *(f"drafts of {k}" for k in range(1, LENGTH + 1))], rows))
    return 0


if __name__ == "__main__":
    run_script(main)

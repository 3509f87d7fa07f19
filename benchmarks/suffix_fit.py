"""Fits the tables of ``tenfold.speculate.suffix_prior`` on recorded traffic.

    python benchmarks/suffix_fit.py traffic.jsonl

Replays the first half of the conversations of each class (`suffix_replay.py`) and fits the counts by logistic
regression with a little ridge. What is guessed depends on the tables in turn: enter them, and run it again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from suffix_replay import first_half, read, replay

from tenfold.bench.script import run_script
from tenfold.protocol import SamplingParams
from tenfold.speculate.suffix import SuffixDrafter
from tenfold.speculate.suffix_prior import LENGTHS, OTHERS, SHARES

RIDGE, ROUNDS = 0.5, 50


def main() -> int:
    """Fits and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traffic", type=Path, help="what suffix_traffic.py wrote")
    args = parser.parse_args()
    sizes = [len(OTHERS[0]), len(LENGTHS[0]), len(SHARES[0])]
    counts = np.zeros((2, int(np.prod(sizes)), 2))
    for name, lines in read(args.traffic).items():
        drafter = SuffixDrafter()
        replay(first_half(lines), drafter, name)
        for params in (SamplingParams(temperature=0), SamplingParams()):
            counts += np.array(drafter.counts(name, params)).reshape(counts.shape)
    # One column for each entry of each table.
    columns = np.concatenate(
        [np.eye(size)[index.ravel()] for size, index in zip(sizes, np.indices(sizes), strict=True)], axis=1
    )
    for source, name in enumerate(("the text itself", "finished traffic")):
        right, seen = counts[source].T
        weights = np.zeros(columns.shape[1])
        for _ in range(ROUNDS):
            chance = 1 / (1 + np.exp(-columns @ weights))
            slope = columns.T @ (right - seen * chance) - RIDGE * weights
            curvature = columns.T @ (columns * (seen * chance * (1 - chance))[:, None])
            weights += np.linalg.solve(curvature + RIDGE * np.eye(len(weights)), slope)
        print(f"{name}, {int(seen.sum())} guesses")
        for table, part in zip(
            ("OTHERS", "LENGTHS", "SHARES"), np.split(weights, np.cumsum(sizes)[:2]), strict=True
        ):
            print(f"  {table}: " + ", ".join(f"{each:.1f}" for each in part))
    return 0


if __name__ == "__main__":
    run_script(main)

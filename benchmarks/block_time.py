"""What a block drafter's proposal would take natively, estimated from the head's own program."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from block_data import Data
from block_model import head_work

from tenfold.backends.base import RecurrentProgram, UnrollBatch
from tenfold.backends.native import NativeBackend
from tenfold.models.recurrent_head import HeadConfig
from tenfold.speculate.drafter_folder import open_drafter

_ROUNDS = 300


class NativeTime(NamedTuple):
    """Seconds of CPU time on one thread: the 10th percentiles, as whatever else runs only adds to them."""

    four_steps: float
    """A proposal of the head: four tokens for one sequence."""
    one_row: float
    """Its first step alone, ..."""
    four_rows: float
    """... and the same for four rows at once, as a block drafter makes all that its positions share."""
    weights: float
    """Read by a first step."""

    step_weights: float
    """Read by a further step."""

    def head(self, length: int, ratio: float = 1.0) -> float:
        """Of a head's proposal of so many tokens, if it reads ``ratio`` times what this one does."""
        each = (self.four_steps - self.one_row) / 3
        call = self.one_row - each * self.weights / self.step_weights
        return call + ratio * (self.one_row - call + (length - 1) * each)

    def block(self, once: float, block: float, length: int) -> float:
        """Of a block drafter's, that reads so many weights for one row and for ``length``."""
        each = (self.four_steps - self.one_row) / 3 / self.step_weights
        call = self.one_row - each * self.weights
        each_of_four = (self.four_rows - call) / self.weights
        return call + each * once + (each + (each_of_four - each) * (length - 1) / 3) * block

    def text(self) -> str:
        """For people."""
        parts = self.four_steps, self.one_row, self.four_rows
        four_steps, one_row, four_rows = (f"{seconds * 1e6:.0f} µs" for seconds in parts)
        return (
            f"four steps of the head {four_steps}, the first alone {one_row}, it for four rows {four_rows}."
        )


def native_time(drafter: Path, data: Data) -> tuple[NativeTime, HeadConfig]:
    """Times the head in this folder, in turns; its sizes. Raises CheckpointError, ValueError."""
    folder = open_drafter(drafter, data.target)
    try:
        config = folder.description.head
        program = NativeBackend().compile_recurrent(
            folder.graph,
            folder.checkpoint,
            token_ids=np.array(folder.description.token_ids, np.int32),
            vocab_size=data.target.graph.vocab_size,
            max_sequences=4,
            threads=1,
        )
    finally:
        folder.close()
    cases = [_batch(data, 1, 4), _batch(data, 1, 1), _batch(data, 4, 1)]
    times = [[_seconds(program, batch) for batch in cases] for _ in range(_ROUNDS)]
    program.close()
    four_steps, one_row, four_rows = np.percentile(np.array(times), 10, axis=0).tolist()
    first, both = (head_work(config, steps).reads for steps in (1, 2))
    return NativeTime(four_steps, one_row, four_rows, first, both - first), config


def _seconds(program: RecurrentProgram, batch: UnrollBatch) -> float:
    began = time.process_time()
    program.unroll(batch)
    return time.process_time() - began


def _batch(data: Data, sequences: int, length: int) -> UnrollBatch:
    answers = data.held_out
    codes = answers.features[:sequences].astype(np.uint32) << 16
    return UnrollBatch(
        features=np.ascontiguousarray(codes.view(np.float32)),
        tokens=np.array(answers.answers[0].tokens[:sequences], np.int32),
        seed=np.zeros(sequences, np.uint64),
        position=np.arange(1, sequences + 1, dtype=np.int64),
        temperature=np.zeros(sequences, np.float32),
        lengths=np.full(sequences, length, np.int32),
        floor=np.zeros(sequences, np.float32),
    )

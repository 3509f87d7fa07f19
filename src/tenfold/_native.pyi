"""The compiled core. `native/bindings.cpp` defines it; `backends/native.py` is its only user beside the
benchmarks."""

from typing import Any

import numpy as np
import numpy.typing as npt

def isa_levels() -> list[str]: ...
def read_bandwidth(threads: int, bytes: int = ..., repeats: int = ...) -> float: ...
def gumbel(isa: str, seed: int, position: int, first: int, count: int) -> npt.NDArray[np.float32]: ...

class Program:
    @staticmethod
    def create(
        *,
        isa: str,
        threads: int,
        max_rows: int,
        max_logit_rows: int,
        vocab: int,
        kv_pages: int,
        kv_format: str,
        kv: list[tuple[int, int]],
        kv_bias: bool = ...,
    ) -> Program: ...
    def __getattr__(self, name: str) -> Any: ...

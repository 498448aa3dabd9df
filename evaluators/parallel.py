"""Batches side by side: one thread for each, and no barriers inside an operation.

Splitting every operation over threads makes small models wait at barriers, an order of magnitude longer when the machine is
busy. Batches are independent, so they run in parallel instead, each operation on one thread; which also makes results
independent of the number of cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def run_side_by_side(run: Callable[[Tensor], T], batches: Sequence[Tensor]) -> list[T]:
    """Return ``run(batch)`` for each batch, in order; in threads where the batches are on a CPU.

    `run` must be safe to call from several threads and set its own gradient mode, which is per thread.
    """
    num_threads = min(len(batches), os.cpu_count() or 1)
    if num_threads <= 1 or batches[0].is_cuda:
        return [run(batch) for batch in batches]
    with one_thread_per_operation(), ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(run, batches))


@contextmanager
def one_thread_per_operation() -> Iterator[None]:
    """Keep torch's operations single-threaded for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Work on every core: the rows of the kill matrix, in one process or in several."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import torch

from mone_ref.backend import Backend
from mone_ref.faults import FAULTS, Fault
from mone_ref.suite import cases as case_files
from mone_ref.suite import matrix
from mone_ref.suite.matrix import MatrixError, Row
from mone_ref.suite.simulate import Simulator


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Worker:
    """Makes rows one after the other, and keeps between them what they share."""

    def __init__(self, root: Path, reference: Backend, first_kill: bool) -> None:
        self.cases = case_files.load(root)
        self.simulator = Simulator(root, reference)
        self.first_kill = first_kill

    def row(self, fault: Fault) -> Row:
        """One fault."""
        return matrix.run(self.simulator, fault, self.cases, first_kill=self.first_kill)


def rows(
    root: Path, reference: Backend, faults: Sequence[Fault], *, first_kill: bool, jobs: int
) -> Iterator[Row]:
    """One row per fault, in their order, whatever the number of processes.

    Raises ``CaseError``, ``StaleFault`` and ``MatrixError``, the last also for a fault that
    takes its process down.
    """
    if jobs == 1:
        worker = Worker(root, reference, first_kill)
        try:
            yield from map(worker.row, faults)
        finally:
            worker.simulator.close()
        return
    arguments = (root, reference, first_kill)
    told = 0
    with ProcessPoolExecutor(jobs, get_context("spawn"), _prepare, arguments) as pool:
        try:
            for row in pool.map(_row, [fault.id for fault in faults]):
                yield row
                told += 1
        except BrokenProcessPool:
            left = ", ".join(fault.id for fault in faults[told : told + jobs])
            raise MatrixError(f"a process ended while it ran one of: {left}") from None


_worker: list[Worker] = []


def _prepare(root: Path, reference: Backend, first_kill: bool) -> None:
    """Make the worker of a process. One thread each: there is a process for every core."""
    torch.set_num_threads(1)
    _worker.append(Worker(root, reference, first_kill))


def _row(fault: str) -> Row:
    return _worker[0].row(FAULTS[fault])

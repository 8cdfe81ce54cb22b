"""Runs a function on several gloo ranks and returns what each returned.

The ranks are processes that wait for the next call: starting Python and importing torch costs seconds, a process group
milliseconds. After a call that went wrong, or in which a rank may die, they are thrown away.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

Work = Callable[..., Any]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(tasks: Any, results: Any) -> None:
    """A waiting rank."""
    import torch
    import torch.distributed as distributed

    torch.set_num_threads(1)
    while True:
        rank, size, port, work, arguments, last = tasks.get()
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size)
        )
        try:
            distributed.init_process_group("gloo", rank=rank, world_size=size)
            results.put((rank, True, work(*arguments)))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))
            last = True
        if last:
            results.close()
            results.join_thread()
            os._exit(0)  # without the others' goodbye, which a dead rank would never say
        distributed.destroy_process_group()


class _Rank:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.tasks, self.results = context.Queue(), context.Queue()
        self.process = context.Process(target=_serve, args=(self.tasks, self.results), daemon=True)
        self.process.start()

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)


_waiting: list[_Rank] = []


@atexit.register
def _end_all() -> None:
    while _waiting:
        _waiting.pop().end()


def on_ranks(
    size: int, work: Work, *arguments: Any, timeout: float = 240, silent: tuple[int, ...] = ()
) -> dict[int, Any]:
    """What `work(*arguments)` returned, by rank. Ranks in `silent` may die without a result.

    Raises:
        AssertionError: a rank failed (with its traceback), or one didn't answer in time.
    """
    port = free_port()
    ranks = [_waiting.pop() if _waiting else _Rank() for _ in range(size)]
    for rank, process in enumerate(ranks):
        process.tasks.put((rank, size, port, work, arguments, bool(silent)))
    found: dict[int, Any] = {}
    clean = False
    try:
        end = time.monotonic() + timeout
        awaited = sorted(set(range(size)) - set(silent))
        while awaited:
            for rank in tuple(awaited):
                try:
                    _, good, value = ranks[rank].results.get(timeout=0.02)
                except queue.Empty:
                    continue
                assert good, f"rank {rank} failed:\n{value}"
                found[rank] = value
                awaited.remove(rank)
            assert time.monotonic() < end, f"ranks {awaited} gave no answer"
        clean = not silent
    finally:
        if clean:
            _waiting.extend(ranks)
        else:
            for process in ranks:
                process.end()
    return found

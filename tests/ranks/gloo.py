"""Runs a function on several gloo ranks, each in a process of its own, and returns what each returned."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import traceback
from collections.abc import Callable
from typing import Any

Work = Callable[..., Any]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(rank: int, size: int, port: int, work: Work, arguments: tuple[Any, ...], results: Any) -> None:
    import torch
    import torch.distributed as distributed

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    try:
        distributed.init_process_group("gloo", rank=rank, world_size=size)
        results.put((rank, True, work(*arguments)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise
    finally:
        results.close()
        results.join_thread()
        os._exit(0)  # without the others' goodbye, which a dead rank would never say


def on_ranks(
    size: int, work: Work, *arguments: Any, timeout: float = 120, silent: tuple[int, ...] = ()
) -> dict[int, Any]:
    """What `work(*arguments)` returned, by rank. Ranks in `silent` may die without a result.

    Raises:
        AssertionError: a rank failed (with its traceback), or one didn't answer in time.
    """
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port()
    ranks = [
        context.Process(target=_rank, args=(rank, size, port, work, arguments, results), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    try:
        while set(range(size)) - set(silent) - found.keys():
            rank, good, value = results.get(timeout=timeout)
            assert good, f"rank {rank} failed:\n{value}"
            found[rank] = value
    except queue.Empty:
        raise AssertionError(f"ranks {sorted(set(range(size)) - found.keys())} gave no answer") from None
    finally:
        for process in ranks:
            process.join(5)
            process.kill()
    return found

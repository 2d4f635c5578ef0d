"""Runs of this project in processes of their own, without importing torch anew for each.

A server imports train.py once and forks; a child behaves as the command would: its own session, its
own output files, its own signals. (pytest's own process can't fork: autograd has started there.)
"""

import itertools
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import train

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train"])


def _child(call: Callable, argv: tuple, variables: dict, folder: Path) -> None:
    os.setsid()
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    sys.exit(call(*argv))


def struck(name: str, nth: int, number: int, argv: list[str]) -> int:
    """train.main, which gets the signal as it calls train.NAME for the nth time."""
    called, calls = getattr(train, name), itertools.count(1)

    def strikes(*args, **kwargs):
        if next(calls) == nth:
            os.kill(os.getpid(), number)
        return called(*args, **kwargs)

    setattr(train, name, strikes)
    return train.main(argv)


class Started:
    """A function in a process of its own; its exit status is what the function returned."""

    def __init__(self, folder: Path, call: Callable, *argv, **variables):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.process = FORKS.Process(target=_child, args=(call, argv, variables, folder))
        self.process.start()

    def signal_when(self, happened: Callable[[], bool], number: int) -> "Started":
        """Sends the signal to the process and what it started, once `happened()`."""
        deadline = time.monotonic() + 120
        while not happened() and self.process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        if self.process.is_alive():
            os.kill(self.process.pid, number)
        return self

    def wait(self, seconds: float = 240) -> int:
        """The exit status; the process is killed where it doesn't end in time."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise AssertionError(f"no end after {seconds} s: {self.err()}")
        return self.process.exitcode

    def out(self) -> str:
        return (self.folder / "out").read_text()

    def err(self) -> str:
        return (self.folder / "err").read_text()


def start_two(folder: Path, call: Callable, *argv) -> list[Started]:
    """call(*argv) on two ranks, with the variables that torchrun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    started = []
    for rank in range(2):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        started.append(Started(folder / str(rank), call, *argv, **ranks, **place))
    return started


def two_ranks(folder: Path, call: Callable, *argv) -> None:
    """As start_two, to its end."""
    started = start_two(folder, call, *argv)
    statuses = [process.wait() for process in started]
    assert statuses == [0, 0], [process.err() for process in started]

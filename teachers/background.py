"""One function call in a thread of its own, and the device a thread works on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

T = TypeVar("T")


def work_on(device: torch.device) -> None:
    """Let this thread use `device`: every thread begins with the first one, whatever that of its maker is."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def in_background(name: str, call: Callable[[], T], device: torch.device) -> Future[T]:
    """Start `call` now, on `device`. Unlike an executor's, its thread never keeps the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            work_on(device)
            future.set_result(call())
        except BaseException as error:  # handed to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future

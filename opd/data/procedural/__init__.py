"""Exact tasks on strings of digits, for a character model. Add one in `tasks.py`, or register your own."""

from opd.data.procedural.source import load_procedural
from opd.data.procedural.task import TASKS, DigitTask, register

__all__ = ["TASKS", "DigitTask", "load_procedural", "register"]

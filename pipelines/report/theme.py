"""Colours of the report: one set of roles, each with a value for a light and for a dark page.

Charts are drawn with the light values and their hex codes are then replaced by CSS variables, so that one SVG
follows the reader's colour scheme. The roles of a chart must therefore differ in their light values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Colour:
    """One role."""

    light: str
    dark: str


ROLES: dict[str, Colour] = {
    "page": Colour("#ffffff", "#15181c"),
    "ink": Colour("#1b1f24", "#e3e6ea"),
    "muted": Colour("#5c6570", "#9ea7b1"),
    "line": Colour("#dfe3e8", "#31373f"),
    "panel": Colour("#f5f6f8", "#1d2126"),
    "heat": Colour("#8fc1ea", "#1f5c90"),
    "rest": Colour("#c3c9d0", "#4b545e"),
    # Okabe and Ito's order, lightened or darkened to keep 3:1 against the page in both schemes.
    "c0": Colour("#0072b2", "#56aee8"),
    "c1": Colour("#d55e00", "#f28e4b"),
    "c2": Colour("#00885f", "#35c598"),
    "c3": Colour("#b4548f", "#e39ac4"),
    "c4": Colour("#a07400", "#e2bb4a"),
    "c5": Colour("#3f8fc4", "#a6d6f7"),
    "c6": Colour("#6b4c9a", "#b79be0"),
    "c7": Colour("#7a4a2a", "#cda58a"),
}
SERIES = 8
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
"""Second cue beside the colour, drawn at a line's end."""


def series_role(index: int) -> str:
    """Role of the `index`-th domain, phase or other series; they repeat after `SERIES`."""
    return f"c{index % SERIES}"


def light(role: str) -> str:
    """The hex code a chart is drawn with."""
    return ROLES[role].light


def variables(scheme: str) -> str:
    """CSS declarations of every role for `light` or `dark`."""
    return "".join(f"--{role}:{getattr(colour, scheme)};" for role, colour in ROLES.items())

"""The tables and the figure of study 3, from `results/late/`.

.venv/bin/python examples/when_on_policy/late_table.py            # prints the tables
.venv/bin/python examples/when_on_policy/late_table.py --draw     # writes results/late/tokens.png, too
"""

from __future__ import annotations

from collections.abc import Iterator
from math import nan
from statistics import mean
from typing import Any

from cells import ARMS
from matplotlib.figure import Figure
from study_tables import LABELS, OPD, Seeds, figure, joined, lead, main, whole

CONDITION, LATE, LAST = "late", "rotate", 10
OLDER = ("sort", "reverse", "add3")
LABELS = LABELS | {
    "start": "the student of three domains",
    "teacher": "the specialist of `rotate`",
    "mixed": "mixed GRPO, three times the tokens",
}


def share(arm: dict[str, Any], domains: tuple[str, ...], way: str = "sampled") -> float:
    """Right answers in %, mean over `domains`."""
    return mean(100 * arm[way][domain] / arm["of"] for domain in domains)


def arms_of(seeds: Seeds) -> dict[int, dict[str, Any]]:
    """Seed -> arms, of each seed that is whole."""
    done = whole({seed: found for seed, found in seeds.items() if "mixed" in found.get(CONDITION, {})})
    return {seed: seeds[seed][CONDITION] for seed in done.get(CONDITION, [])}


def extra(arms: dict[str, Any]) -> int:
    """Tokens of the new merge and of the specialist that it needs."""
    return arms["teacher"]["tokens"] + arms[OPD]["tokens"]


def smooth(arms: dict[str, Any]) -> list[tuple[int, float]]:
    """Mixed GRPO's tokens, and the mean reward in % of its last steps on the late domain."""
    curve = arms["mixed"]["curve"]
    ends = range(LAST, len(curve) + 1)
    return [(curve[end - 1][0], 100 * mean(reward for _, reward in curve[end - LAST : end])) for end in ends]


def reached(arms: dict[str, Any]) -> int | None:
    """Tokens after which mixed GRPO is where OPD is on the late domain; `None`: it never is."""
    level = share(arms[OPD], (LATE,))
    return next((tokens for tokens, reward in smooth(arms) if reward >= level), None)


def rows(seeds: Seeds) -> Iterator[str]:
    """Lines of Markdown: every arm, and OPD's lead."""
    found = list(arms_of(seeds).values())
    told_of = ("`rotate`", "older", "older, against before", "OPD is ahead, `rotate`", "OPD is ahead, older")
    yield f"| {len(found)} seeds | {' | '.join(told_of)} |"
    yield "|---|---|---|---|---|---|"
    for arm in (*ARMS, "mixed"):
        late, old = (mean(share(arms[arm], of) for arms in found) for of in ((LATE,), OLDER))
        lost = lead([share(arms[arm], OLDER) - share(arms["start"], OLDER) for arms in found])
        ahead = [lead([share(a[OPD], of) - share(a[arm], of) for a in found]) for of in ((LATE,), OLDER)]
        cells = [
            f"{late:.1f}",
            f"{old:.1f}",
            "" if arm == "start" else lost,
            *(ahead if arm != OPD else ["", ""]),
        ]
        yield f"| {LABELS[arm]} | {' | '.join(cells)} |"


def tokens(seeds: Seeds) -> Iterator[str]:
    """Lines of Markdown: what it took, seed by seed."""
    head = (
        "seed",
        "specialist",
        "new merge",
        "mixed GRPO, to that level",
        "times both",
        "times the merge alone",
    )
    yield f"| {' | '.join(head)} |"
    yield "|---|---|---|---|---|---|"
    for number, arms in arms_of(seeds).items():
        needed, most = reached(arms), arms["mixed"]["tokens"]
        sign, count = ("", needed) if needed is not None else ("> ", most)
        cells = [f"{arms['teacher']['tokens']:,}", f"{arms[OPD]['tokens']:,}", f"{sign}{count:,}"]
        cells += [f"{sign}{count / of:.1f}" for of in (extra(arms), arms[OPD]["tokens"])]
        yield f"| {number} | {' | '.join(cells)} |"


def tables(seeds: Seeds) -> str:
    """All of it."""
    return joined(
        "Right answers in %, sampled:", rows(seeds), "Student tokens that were extra:", tokens(seeds)
    )


def draw(seeds: Seeds) -> Figure:
    """The late domain against the extra tokens."""
    found = list(arms_of(seeds).values())
    curves = [[(spent / 1000, reward) for spent, reward in smooth(arms)] for arms in found]
    drawn = {
        "mixed": [point for curve in curves for point in (*curve, (nan, nan))],  # a gap between seeds
        "dear": [(extra(arms) / 1000, share(arms[OPD], (LATE,))) for arms in found],
        "cheap": [(arms[OPD]["tokens"] / 1000, share(arms[OPD], (LATE,))) for arms in found],
    }
    told = {
        "mixed": "mixed GRPO",
        "dear": "OPD, with the specialist's tokens",
        "cheap": "OPD, the specialist is there",
    }
    return figure({"": drawn}, told, ("extra student tokens (thousands)", "rotate, sampled (%)"))


if __name__ == "__main__":
    main("late", tables, draw, "tokens.png")

"""The tables and the figure of study 1, from `results/noise/`.

.venv/bin/python examples/when_on_policy/noise_table.py            # prints the tables
.venv/bin/python examples/when_on_policy/noise_table.py --draw     # writes results/noise/places.png, too
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any

from cells import ARMS
from matplotlib.figure import Figure
from study_tables import LABELS, OPD, SOFT, Seeds, figure, joined, lead, main, whole

PLACES = (4, 8, 16)


def share(arm: dict[str, Any], way: str, place: int) -> float:
    """Right digits at `place` (from 1), in %."""
    return 100 * arm[way][place - 1] / arm["of"]


def ahead(seeds: Seeds, condition: str, over: str, way: str, place: int) -> str:
    """By how many points OPD is ahead."""
    found = [seeds[seed][condition] for seed in whole(seeds)[condition]]
    return lead([share(arms[OPD], way, place) - share(arms[over], way, place) for arms in found])


def cells(seeds: Seeds, way: str) -> Iterator[str]:
    """Lines of Markdown: every arm at the last place, by condition."""
    yield "| condition | seeds | start | teacher | samples | soft labels | reverse | k1 | forward | **OPD** |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, having in whole(seeds).items():
        numbers = [f"{mean(share(seeds[s][name][arm], way, PLACES[-1]) for s in having):.1f}" for arm in ARMS]
        yield f"| {name} | {len(having)} | {' | '.join(numbers)} |"


def leads(seeds: Seeds) -> Iterator[str]:
    """Lines of Markdown: OPD's lead over soft labels at every horizon, and over samples at the last one."""
    of = " | ".join(f"soft labels, {place}" for place in PLACES)
    last = PLACES[-1]
    more = (f"soft labels, {last}, greedy", f"samples, {last}", f"samples, {last}, greedy", f"k1, {last}")
    yield f"| condition | {of} | {' | '.join(more)} |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in whole(seeds):
        found = [ahead(seeds, name, SOFT, "sampled", place) for place in PLACES]
        found.append(ahead(seeds, name, SOFT, "greedy", last))
        found += [ahead(seeds, name, "teacher/sampled", way, last) for way in ("sampled", "greedy")]
        found.append(ahead(seeds, name, "student/sampled", "sampled", last))
        yield f"| {name} | {' | '.join(found)} |"


def fewer(seeds: Seeds) -> Iterator[str]:
    """Lines of Markdown: by how much OPD's lead over soft labels is larger with few prompts than with fresh
    ones.
    """
    few, fresh = "0 % wrong, 128 prompts", "0 % wrong"
    both = [found for seed, found in seeds.items() if seed in whole(seeds).get(few, [])]

    def more(arms: dict[str, Any], way: str, place: int) -> float:
        ahead = [share(arms[c][OPD], way, place) - share(arms[c][SOFT], way, place) for c in (few, fresh)]
        return ahead[0] - ahead[1]

    yield f"| place | {' | '.join(map(str, PLACES))} |"
    yield f"|---|{'---|' * len(PLACES)}"
    for way in ("sampled", "greedy"):
        yield f"| {way} | {' | '.join(lead([more(arms, way, at) for arms in both]) for at in PLACES)} |"


def tables(seeds: Seeds) -> str:
    """All of it."""
    return joined(
        "Right digits at place 16 in %, sampled; on the teacher's answers, then on the student's:",
        cells(seeds, "sampled"),
        "The same, greedy:",
        cells(seeds, "greedy"),
        "Points by which OPD is ahead (paired by seed, 95 % interval), of what, at which place:",
        leads(seeds),
        "Points by which OPD's lead over soft labels is larger with 128 prompts than with fresh ones:",
        fewer(seeds),
    )


def draw(seeds: Seeds) -> Figure:
    """Right digits against the place, a panel a condition."""

    def curve(name: str, arm: str, having: list[int]) -> list[tuple[float, float]]:
        places = range(1, PLACES[-1] + 1)
        return [(at, mean(share(seeds[s][name][arm], "sampled", at) for s in having)) for at in places]

    shown = ("start", "teacher", "teacher/sampled", SOFT, OPD)
    drawn = {name: {arm: curve(name, arm, having) for arm in shown} for name, having in whole(seeds).items()}
    made = figure(drawn, LABELS, ("steps of work", "right after so many steps (%)"), width=2.7)
    for panel in made.axes:
        panel.set_xticks((1, *PLACES))
    return made


if __name__ == "__main__":
    main("noise", tables, draw, "places.png")

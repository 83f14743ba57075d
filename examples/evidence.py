"""What the project knows: a row a claim, its numbers computed from the results that are committed.

.venv/bin/python examples/evidence.py            # the table of docs/evidence.md
.venv/bin/python examples/evidence.py --write    # puts it there
.venv/bin/python examples/evidence.py --readme   # the rows of the README's table
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from opd.pipelines.evaluation.statistics import paired_interval

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "evidence.md"
MARKS = ("<!-- claims -->", "<!-- end of claims -->")
HEAD = ("claim", "measured", "on", "command", "what would refute it")
Study = list[dict[str, Any]]


class Claim(NamedTuple):
    """One row of the page."""

    text: str
    measured: Callable[[], str]
    on: str
    command: str
    refuted: str


def read(path: str) -> Any:
    """Return the committed results of a benchmark."""
    return json.loads((ROOT / path).read_text("utf-8"))


def seeds(example: str) -> Study:
    """Return the committed results of an example or a study, a seed each, by seed."""
    paths = (ROOT / "examples" / example / "results").glob("seed-*.json")
    by_seed = sorted(paths, key=lambda path: int(path.stem.removeprefix("seed-")))
    return [json.loads(path.read_text("utf-8")) for path in by_seed]


@cache
def module(path: str) -> Any:
    """Return the program that makes an example's own tables."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), ROOT / "examples" / f"{path}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def points(interval: Sequence[float]) -> str:
    """Format a difference in points with its bounds."""
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*interval)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Format the difference of two shares, in points, paired by seed."""
    return points(paired_interval([100 * (a - b) for a, b in zip(ours, theirs, strict=True)]))


def leads(example: str, rows: dict[str, str]) -> str:
    """Format by how many points OPD is ahead of other rows of an example's table."""
    table = module("table")
    runs = table.load(example)
    return ", ".join(f"{name} {points(table.ahead(runs, row))}" for row, name in rows.items())


def kept_share(example: str) -> str:
    """Format what a merge keeps of the mean gain of its specialists, over seeds."""
    table = module("table")
    shares = table.kept_shares(table.load(example), "merged")
    if len(shares) == 1:
        return f"{shares[0]:.1f} %"
    return "{:.1f} % ({:.1f} to {:.1f})".format(*paired_interval(shares))


def total_tokens() -> str:
    """Format the lead of specialists and OPD over mixed-domain GRPO at about equal total tokens."""
    models = read("examples/merge_study/results/summary.json")["models"]

    def right(row: str) -> list[float]:
        return [fmean(one["sampled"]["accuracy"] for one in run["domains"].values()) for run in models[row]]

    longer = paired(right("longer"), right("mixed_grpo_all"))
    return f"the longer merge {longer}, the shorter one {paired(right('merged'), right('mixed_grpo_all'))}"


def mixture_shares() -> str:
    """Format what merges into and out of a mixture of experts, and a dense one, keep of the gain."""
    table = module("mixtures/table")
    own = (
        ("", "mixture"),
        ("-dense", "dense"),
        ("-from-dense", "dense into a mixture"),
        ("-into-dense", "a mixture's into a dense one"),
    )
    cells = []
    for kind, name in own:
        shares = [table.level_and_share(seed, kind, "merged")[1] for seed in seeds("mixtures")]
        cells.append(f"{name} {fmean(shares):.0f} %")
    return ", ".join(cells)


def rounds() -> str:
    """Format two rounds against one, and a start from an average against one from the base."""
    found = seeds("rounds")
    two = paired([one["two"]["merged"] for one in found], [one["one"]["merged"] for one in found])
    ends = [[one["starts"][name]["end"] for one in found] for name in ("average", "base")]
    return f"two rounds {two}, a start from the average {paired(*ends)}"


def controllers() -> str:
    """Format each controller's worst domain against static weights."""
    found = seeds("budget")

    def worst(arm: str) -> list[float]:
        return [min(one["arms"][arm]["accuracy"].values()) for one in found]

    arms = ("gap", "progress", "gradient")
    return ", ".join(f"`{arm}` {paired(worst(arm), worst('static'))}" for arm in arms)


def foreign_formats() -> str:
    """Format what soft labels gain where the teacher's format is foreign, in few steps and in many."""
    study, found = module("warm_up/study"), seeds("warm_up")

    def right(arm: str) -> list[float]:
        return [study.foreign(one[arm]["accuracy"]) for one in found]

    few, late = paired(right("soft labels"), right("none")), "warm-up, 20 of 180 steps"
    return f"60 steps {few}; 20 of 180 steps {paired(right(late), right('none, 180 steps'))}"


def replayed_routing() -> str:
    """Format by how much the mismatch falls where routers are least decided."""
    found = [seed["0.997"] for seed in seeds("routing_replay")]
    factors = [one["free"]["mean"] / one["replay"]["mean"] for one in found]
    free, replay = (fmean(one[arm]["mean"] for one in found) for arm in ("free", "replay"))
    decided = fmean(seed["0"]["replay"]["mean"] for seed in seeds("routing_replay"))
    return (
        f"{min(factors):.1f} to {max(factors):.1f} times less, from {free:.3f} to {replay:.4f} nats a token"
        f" on the mean; {decided:.4f} where routers are decided"
    )


def trained_fp8() -> str:
    """Format what training for FP8 gains over rounding at the end, and both over the float32 student."""
    right = {
        arm: [fmean(one[arm]["right"].values()) for one in seeds("quantised")]
        for arm in ("plain", "rounded", "trained")
    }
    rounded, trained = (paired(right[arm], right["plain"]) for arm in ("rounded", "trained"))
    against = paired(right["trained"], right["rounded"])
    return (
        f"trained for it {against}; against float32: rounded at the end {rounded}, trained for it {trained}"
    )


def estimators() -> str:
    """Format the estimators that are told apart from GRPO on the mean of both tasks."""
    table = module("which_estimator/table")
    found = table.results()
    arms = [arm for arm in table.arms(found) if arm not in ("base", "grpo")]
    ahead = {arm: table.ahead(found, arm) for arm in arms}
    apart = [f"{arm} {points(one)}" for arm, one in ahead.items() if not one.low <= 0 <= one.high]
    return f"mean reward of both tasks, {len(apart)} of {len(arms)} told apart: {', '.join(apart)}"


def against_trl() -> str:
    """Format processor seconds to 95 % of the specialists, of each side's best arm and of the recipe."""
    (race,) = read("tests/bench/results/merge_against_trl.json")["results"]
    goal = 0.95 * fmean(race["specialists"].values())

    def reached(curve: Study) -> float:
        return min(
            (one["seconds"] for one in curve if fmean(one[d] for d in race["specialists"]) >= goal),
            default=float("inf"),
        )

    ours = min(reached(race[arm]) for arm in ("opd", "opd at another rate"))
    theirs = min(reached(arm["curve"]) for arm in race["trl"])
    own = reached(race["opd"])
    return (
        f"{ours:.1f} s of `opd` at the better of two rates ({own:.1f} at the recipe's),"
        f" {theirs:.1f} s of TRL at the best of its own"
    )


def exact_kl() -> str:
    """Format the time of the full-vocabulary KL and of others, as multiples of its four matmuls."""
    rows = read("tests/gpu/results/h100.json")["sections"]["kernels"]["rows"]
    numbers = {row["name"].removeprefix("8192 x 4096 x 128256, T 1.0: "): row["numbers"] for row in rows}
    names = {
        "auto, 4096 tokens a chunk": "ours",
        "full logits": "whole logits",
        "liger, chunked, eager": "Liger (eager)",
        "liger, triton": "Liger (Triton)",
    }
    return ", ".join(
        f"{label} {numbers[name]['over matmuls']:.2f} ({numbers[name]['GiB']:.1f} GiB)"
        for name, label in names.items()
    )


def kills() -> str:
    """Format the kills, and the lengths of episodes with and without them."""
    found = read("tests/bench/results/kills_episodes.json")
    arms, count = found["arms"], found["counts"]["kills"]
    turns = {arm: arms[arm]["turns"] for arm in ("undisturbed", "resumed", "restarted")}
    same = {arm: found["p"][arm]["turns"] for arm in ("resumed", "restarted")}
    return f"{count:,} kills; turns an episode: " + ", ".join(
        f"{arm} {mean:.2f}" + (f" (p of the same turns {same[arm]:.2g})" if arm in same else "")
        for arm, mean in turns.items()
    )


def staleness() -> str:
    """Format accuracy of schedules that write ahead, against one step after another."""
    found = read("tests/bench/results/async_accuracy.json")["schedules"]

    def right(name: str) -> list[float]:
        return [seed["accuracy"] for seed in found[name]["seeds"]]

    return ", ".join(f"`{name}` {paired(right(name), right('in turn'))}" for name in ("ahead", "async 4"))


def predicted_steps() -> str:
    """Format the largest error of the plan's step times on models that it was not fitted to."""
    rows = read("tests/bench/results/simulate_check.json")["rows"]
    errors = [100 * abs(row["error"]["step"]) for row in rows]
    return (
        f"wrong by at most {max(errors[2:]):.0f} % of a step's time in {len(errors) - 2} settings, and by"
        f" {max(errors[:2]):.0f} % in the two that it was fitted to"
    )


def million() -> str:
    """Format the memory of a step on trajectories of a million tokens."""
    found = read("examples/million_token/results/results.json")
    return (
        f"trajectories of up to {found['longest']:,} tokens: peak {found['peak_mib']:,.0f} MiB,"
        f" of which {found['peak_mib_before_the_data']:,.0f} before the data; their logits would take"
        f" {found['logits_would_take_mib']:,} MiB"
    )


MERGES = {"average": "average", "task_arithmetic": "task arithmetic", "ties": "TIES", "dare": "DARE"}
BENCH = ".venv/bin/python tests/bench/"
CLAIMS = (
    Claim(
        "A merge keeps what its specialists gained",
        lambda: (
            f"{kept_share('quickstart')} of the gain; {leads('quickstart', {'specialists': 'against them'})}"
        ),
        "0.33 M, three domains, 10 seeds",
        "bash examples/quickstart.sh --seed N --out runs/quickstart-N",
        "a seed that keeps less than 95 %",
    ),
    Claim(
        "On domains that disagree about the same inputs it is ahead of merges of weights",
        lambda: leads("quickstart", MERGES),
        "as above",
        "as above",
        "a merge of weights within 10 points",
    ),
    Claim(
        "Where a prompt has one right answer, distillation on the teachers' answers is nearly as good",
        lambda: leads("quickstart", {"off_policy": "OPD is ahead by"}),
        "as above",
        "as above",
        "a lead above 2 points",
    ),
    Claim(
        "On a real model it is level with the specialists, not told apart from TIES",
        lambda: leads(
            "real_model",
            {"specialists": "specialists", "off_policy": "off-policy", "ties": "TIES", "average": "average"},
        ),
        "SmolLM2-135M-Instruct with adapters, three domains, 4 seeds",
        "bash examples/real_model/run.sh --seed N --out runs/real-model-N",
        "four more seeds that exclude 0 for the specialists, or include it for the average",
    ),
    Claim(
        "Five named tasks at once: ahead of merges of weights, short of the 95 % that were asked for",
        lambda: (
            f"{kept_share('five_tasks')} of the gain; "
            + leads(
                "five_tasks",
                {"task_arithmetic": "task arithmetic (the nearest of seven)", "soft_labels": "soft labels"},
            )
        ),
        "0.34 M, reasoning-gym, 1 seed: intervals of the answers' noise alone",
        "bash examples/five_tasks/run.sh --seed N --out runs/five-tasks-N",
        "another seed in which task arithmetic is level",
    ),
    Claim(
        "At equal total tokens OPD does not beat mixed-domain GRPO",
        total_tokens,
        "0.33 M, three domains, 3 seeds",
        ".venv/bin/python examples/merge_study/study.py",
        "a lead of the longer merge whose interval excludes 0",
    ),
    Claim(
        "Mixtures of experts merge as dense models do, and into each other",
        lambda: f"kept of the gain: {mixture_shares()}",
        "8 experts, three domains, 3 seeds",
        "bash examples/mixtures/run.sh --seed N --out runs/mixtures-N",
        "a mean below 95 %",
    ),
    Claim(
        "A start from an average of the specialists helps, two short rounds do not",
        rounds,
        "0.07 M, two domains, equal tokens, 5 seeds",
        ".venv/bin/python examples/rounds/study.py --seeds 0 1 2 3 4",
        "a seed in which two rounds are ahead, or the average is behind",
    ),
    Claim(
        "No controller of the domains' weights is told apart from static ones in the worst domain",
        controllers,
        "0.12 M, three domains, 5 seeds",
        ".venv/bin/python examples/budget/study.py --seeds 0 1 2 3 4",
        "an interval above 0",
    ),
    Claim(
        "Soft labels are faster where the teacher's format is foreign; long merges make up for it",
        foreign_formats,
        "0.12 M, 3 seeds",
        ".venv/bin/python examples/warm_up/study.py --seeds 0 1 2",
        "an interval of the long merges that excludes 0",
    ),
    Claim(
        "Routing replay brings the mismatch of an undecided router down to that of the arithmetic",
        replayed_routing,
        "8 experts, engine in bfloat16, 3 seeds",
        ".venv/bin/python examples/routing_replay/study.py --seeds 0 1 2",
        "less than 10 times; whether learning gains is not resolved",
    ),
    Claim(
        "Training for FP8 is not told apart from rounding at the end",
        trained_fp8,
        "0.33 M, 3 merges",
        ".venv/bin/python examples/quantised/study.py --seeds 0 1 2",
        "a first interval that excludes 0",
    ),
    Claim(
        "On the mean of two tasks policy-gradient estimators are within 2 points of GRPO",
        estimators,
        "0.1 M, two tasks, equal samples, 5 seeds",
        ".venv/bin/python examples/which_estimator/study.py --seeds 0 1 2 3 4",
        "an interval that leaves 3 points to either side",
    ),
    Claim(
        "To 95 % of the specialists OPD here and a patched TRL take about the same time",
        against_trl,
        "0.33 M, three domains, 1 seed, one thread",
        f"{BENCH}merge_against_trl.py",
        "a seed in which one takes 1.3 times the other; larger models were not raced",
    ),
    Claim(
        "The exact full-vocabulary KL stays near the time of its matmuls",
        exact_kl,
        "8192 x 4096 x 128256, bfloat16, one H100",
        "bash tests/gpu/accept.sh",
        "more than 1.4 on an H100; small heads (4096 x 1024) take 1.9 to 2.4",
    ),
    Claim(
        "A killed run goes on with the distribution that it had; restarts favour short episodes",
        kills,
        "agents of a toy, two cores",
        "PYTHONPATH=tests/crash:examples/length_bias .venv/bin/python tests/crash/episode_loop.py"
        " --kills 1000 --episodes 5120",
        "a token lost (the program ends with an error), or a p of resumed turns below 0.01",
    ),
    Claim(
        "Writing ahead of the trainer costs little accuracy; four batches ahead it is behind in each seed,"
        " but not told apart",
        staleness,
        "0.33 M, three domains, 3 seeds",
        f"{BENCH}async_accuracy.py runs/quickstart-[0-2]",
        "a seed in which `ahead` is more than 1 point behind, or `async 4` is ahead",
    ),
    Claim(
        "`opd plan` predicts steps of settings that it was not fitted to",
        predicted_steps,
        "5 M, two cores",
        f"PYTHONPATH=tests/pipelines {BENCH}simulate_check.py",
        "an error above 15 %; on GPUs it was not checked",
    ),
    Claim(
        "A step learns from a trajectory of a million tokens and holds no logits of it",
        million,
        "a toy that attends to 128 tokens, vocabulary 512, two cores",
        ".venv/bin/python examples/million_token/run.py",
        "a peak above 3,000 MiB",
    ),
)


def table() -> Iterator[str]:
    """Yield the lines of the page's table."""
    yield f"| {' | '.join(HEAD)} |"
    yield "|---" * len(HEAD) + "|"
    for claim in CLAIMS:
        command = claim.command if claim.command == "as above" else f"`{claim.command}`"
        yield f"| {claim.text} | {claim.measured()} | {claim.on} | {command} | {claim.refuted} |"


def readme_rows() -> Iterator[str]:
    """Yield the rows of the README's table: the real model's mean, greedy and OPD's lead."""
    made = module("table")
    runs = made.load("real_model")
    for row in ("specialists", "merged", "off_policy", "ties"):
        sampled = made.means(runs, row, "sampled")
        right = f"{fmean(sampled):.1f} ({stdev(sampled):.1f})"
        lead = "" if row == "merged" else points(made.ahead(runs, row))
        right = f"**{right}**" if row == "merged" else right
        yield f"| {made.LABELS[row]} | {right} | {fmean(made.means(runs, row, 'greedy')):.1f} | {lead} |"


def page(text: str, lines: Iterator[str]) -> str:
    """Return the page's text with these lines between its marks."""
    start, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    return "\n".join([text[:start], *lines, text[end:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    parser.add_argument("--readme", action="store_true", help="print the rows of the README's table")
    given = parser.parse_args()
    if given.readme:
        print("\n".join(readme_rows()))
    elif given.write:
        PAGE.write_text(page(PAGE.read_text("utf-8"), table()), "utf-8")
    else:
        print("\n".join(table()))


if __name__ == "__main__":
    main()

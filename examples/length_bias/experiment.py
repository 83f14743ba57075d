"""Does an interruption favour short responses? Restart from scratch against resume from the token log.

    python examples/length_bias/experiment.py [--count 20480] [--hazards 0.005 0.02 0.05] [--out FOLDER]

Writes results.json, table.md and the figures. Five to ten minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import two_samples
from arms import LIMIT, Outcome, build_model, build_requests, prompt_of, restarted, resumed, undisturbed
from figures import draw

from opd.models.causal_lm import CausalLM

HERE = Path(__file__).resolve().parent
LEVEL = 0.01
"""Significance over all tests together that should not reject: each uses `LEVEL` divided by their number."""
CONTROL_TESTS, RESUME_TESTS = 3, 4
"""How many those are: of the control, and at each hazard of the responses that were resumed."""


def main() -> None:
    """Run every arm, test, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_480, help="rollouts per arm")
    parser.add_argument("--hazards", type=float, nargs="+", default=[0.005, 0.02, 0.05], help="per token")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = run(build_model(), options.count, options.hazards)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "table.md").write_text(table(results))
    print(table(results))
    draw(results, options.out)


def run(model: CausalLM, count: int, hazards: list[float]) -> dict[str, Any]:
    """All arms with `count` rollouts each, every one with a seed of its own, and their two_samples."""
    reference = undisturbed(model, build_requests(model, count, seed=0))
    control = undisturbed(model, build_requests(model, count, seed=1))
    results: dict[str, Any] = {
        "count": count,
        "limit": LIMIT,
        "level": LEVEL / (CONTROL_TESTS + RESUME_TESTS * len(hazards)),
        "undisturbed": describe(reference),
        "control": describe(control) | compare(reference, control),
        "hazards": {},
    }
    for number, hazard in enumerate(hazards):
        print(f"hazard {hazard:g} per token", flush=True)
        results["hazards"][f"{hazard:g}"] = at_hazard(model, reference, count, hazard, number)
    return results


def at_hazard(model: CausalLM, reference: Outcome, count: int, hazard: float, number: int) -> dict[str, Any]:
    """The arms that are interrupted, at one hazard."""
    restart = restarted(model, build_requests(model, count, 100 + number), hazard, seed=number)
    fresh_requests = build_requests(model, count, 200 + number)
    same_requests = build_requests(model, count, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        fresh = resumed(model, fresh_requests, hazard, 10 + number, folder=Path(folder, "fresh"), fresh=True)
        same = resumed(model, same_requests, hazard, 20 + number, folder=Path(folder, "same"), fresh=False)
    by_uid = {request.uid: request for request in fresh_requests}
    seen, expected, p_value = two_samples.next_token_fit(model, by_uid, fresh.responses, fresh.resumes)
    equal = [np.array_equal(ids, reference.responses[uid]) for uid, ids in same.responses.items()]
    return {
        "restart": describe(restart) | compare(reference, restart),
        "resume": describe(fresh) | compare(reference, fresh),
        "resume_same_noise": describe(same) | {"equal_to_undisturbed": int(sum(equal))},
        "restart_predicted_mean_length": survivors_mean(reference, hazard),
        "next_token": {
            "resumes": len(fresh.resumes),
            "p_value": p_value,
            "counts": seen.tolist(),
            "expected": expected.tolist(),
        },
    }


def survivors_mean(reference: Outcome, hazard: float) -> float:
    """Mean length a restart has in theory: of each prompt's responses, every one in proportion to the
    probability that it survives, and all prompts alike, since every request is tried until one survives.
    """
    weights = (1 - hazard) ** (reference.lengths - 1.0)
    prompt = np.array([prompt_of(uid) for uid in reference.responses])
    return float((np.bincount(prompt, weights * reference.lengths) / np.bincount(prompt, weights)).mean())


def describe(outcome: Outcome) -> dict[str, Any]:
    """Mean length and reward with standard errors, the histogram of lengths, and the work it took."""
    lengths, rewards = outcome.lengths, outcome.rewards
    root = np.sqrt(len(lengths))
    return {
        "length": float(lengths.mean()),
        "length_error": float(lengths.std(ddof=1) / root),
        "reward": float(rewards.mean()),
        "reward_error": float(rewards.std(ddof=1) / root),
        "histogram": np.bincount(lengths, minlength=LIMIT + 1).tolist(),
        "sampled_per_kept_token": outcome.sampled / int(lengths.sum()),
        "interruptions": outcome.interruptions,
    }


def compare(reference: Outcome, other: Outcome) -> dict[str, float]:
    """p-values of equal length distributions and equal mean rewards."""
    distance, p_value = two_samples.kolmogorov_smirnov(reference.lengths, other.lengths)
    return {
        "ks_distance": distance,
        "p_ks": p_value,
        "p_lengths": two_samples.same_lengths(reference.lengths, other.lengths),
        "p_reward": two_samples.same_mean(reference.rewards, other.rewards),
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    level = results["level"]
    lines = [
        f"{results['count']:,} rollouts per arm over the same prompts, every arm with noise of its own; at"
        f" most {results['limit']} tokens. A test rejects below p = {level:.5f} (marked *): {LEVEL}"
        " divided by the number of tests that should not reject.",
        "",
        "| hazard per token | arm | interruptions | mean length | mean reward | KS distance | p (KS) |"
        " p (chi-square of lengths) | p (mean reward) | tokens sampled per token kept |",
        "|---|---|---|---|---|---|---|---|---|---|",
        _row("-", "undisturbed", results["undisturbed"], level),
        _row("-", "undisturbed, other noise", results["control"], level),
    ]
    for hazard, arms in results["hazards"].items():
        lines.append(_row(hazard, "restart from scratch", arms["restart"], level))
        lines.append(_row(hazard, "resume from the log", arms["resume"], level))
    lines += [
        "",
        "| hazard per token | mean length a restart must have | found | resumed with the same noise:",
    ]
    lines[-1] += " equal to undisturbed | first tokens after a resume | p (the model's probabilities) |"
    lines.append("|---|---|---|---|---|---|")
    for hazard, arms in results["hazards"].items():
        equal = arms["resume_same_noise"]["equal_to_undisturbed"]
        lines.append(
            f"| {hazard} | {arms['restart_predicted_mean_length']:.2f} | {arms['restart']['length']:.2f} |"
            f" {equal:,} of {results['count']:,} | {arms['next_token']['resumes']:,} |"
            f" {_p(arms['next_token']['p_value'], level)} |"
        )
    return "\n".join(lines) + "\n"


def _row(hazard: str, name: str, arm: dict[str, Any], level: float) -> str:
    cells = [
        hazard,
        name,
        f"{arm['interruptions']:,}",
        f"{arm['length']:.2f} ± {1.96 * arm['length_error']:.2f}",
        f"{arm['reward']:.4f} ± {1.96 * arm['reward_error']:.4f}",
    ]
    if "p_ks" in arm:
        cells.append(f"{arm['ks_distance']:.4f}")
        cells += [_p(arm[key], level) for key in ("p_ks", "p_lengths", "p_reward")]
    else:
        cells += ["-"] * 4
    return "| " + " | ".join([*cells, f"{arm['sampled_per_kept_token']:.2f}"]) + " |"


def _p(value: float, level: float) -> str:
    """A p-value, marked where its test rejects."""
    text = f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"
    return f"{text} *" if value < level else text


if __name__ == "__main__":
    main()

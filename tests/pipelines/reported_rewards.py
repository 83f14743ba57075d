"""Answers and rewards of public reports."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from public_reports import Report

from opd.config.recipe import DomainConfig
from opd.errors import RewardError
from opd.rewards.registry import verifier_of
from opd.rewards.verifier import Answered
from opd.rollout.rewards import Job, RewardSample, Turn, wrap_reward


def scores(reward: Any, *answers: tuple[str, Any, float]) -> Callable[[Path], None]:
    """A built-in reward says this of these answers: text, label, score."""

    def tried(place: Path) -> None:
        if reward == "math":
            pytest.importorskip("math_verify")
        settings = DomainConfig.model_validate({"source": "x.jsonl", "reward": reward}).reward
        verifier = verifier_of(settings)
        assert [verifier.label_fault(settings, label) for _, label, _ in answers] == [None] * len(answers)
        found = verifier.score(settings, [Answered(text, label) for text, label, _ in answers])
        numbers = [one["reward"] if isinstance(one, dict) else one for one in found]
        assert list(zip(answers, numbers, strict=True)) == [(one, one[2]) for one in answers]

    return tried


def rewarded(
    function: Callable[..., Any], check: str | Sequence[float], **metadata: Any
) -> Callable[[Path], None]:
    """A reward function of the user's own returns `check`, or is refused with a sentence that it matches."""

    def tried(place: Path) -> None:
        asked = [
            RewardSample(
                str(i), f"answer {i}", "?", str(i), "a", dict(metadata), (Turn("assistant", f"answer {i}"),)
            )
            for i in range(3)
        ]
        job = Job(wrap_reward(function, "mine:reward"), asked, 20.0)
        job.start()
        if isinstance(check, str):
            with pytest.raises(RewardError, match=check) as caught:
                job.result()
            assert "\n" not in str(caught.value)
        else:
            assert [scored.reward for scored in job.result()] == list(check)

    return tried


def by_columns(prompts, completions, **columns):
    """TRL's form."""
    assert prompts == ["?"] * 3
    return [float(text[-1]) for text in completions]


def in_tensors(prompts, completions, **columns):
    import torch

    return torch.tensor([0.0, 1.0, 2.0])


def with_none(prompts, completions, **columns):
    return [1.0, None, 0.0]


def with_nan(sample):
    return float("nan")


def too_few(prompts, completions, **columns):
    return [1.0]


LONG = " and the reasoning above confirms this result is consistent." * 20

REWARDS = [
    Report(
        "THUDM/slime#2150",
        r"`\fbox{42}`",
        "0",
        "1",
        scores("math", (r"so \fbox{42}", "42", 1), (r"\fbox{\frac{1}{2}}", "0.5", 1)),
    ),
    Report(
        "THUDM/slime#543",
        r"`Answer: \boxed{5}` for 5",
        "0: the box is looked for twice",
        "1",
        scores("math", (r"Answer: \boxed{5}", "5", 1)),
    ),
    Report(
        "modelscope/ms-swift#10147",
        r"`\boxed{\frac{1}{3}}` for one half",
        "1: cut at the first brace",
        "0",
        scores(
            "math",
            (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", 0),
            (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
            (r"\boxed{\frac{12}{3}}", r"\frac{1}{23}", 0),
        ),
    ),
    Report(
        "verl-project/verl#7274",
        "an answer with 300 characters behind it",
        "0",
        "1",
        scores(
            "math",
            ("2+40=42\n#### 42\n" + LONG, "42", 1),
            (r"\boxed{42}" + LONG, "42", 1),
            ("The answer is 42." + LONG, "42", 1),
        ),
    ),
    Report(
        "EleutherAI/lm-evaluation-harness#3477",
        r"`\boxed` without braces",
        "a traceback",
        "0, or what stands elsewhere",
        scores("math", ("Mark it with \\boxed ", "42", 0), ("No \\boxed. The answer is 42", "42", 1)),
    ),
    Report(
        "EleutherAI/lm-evaluation-harness#3644",
        r"`\boxed{[2,5)}` for `[2,5)`",
        "0",
        "1",
        scores("math", (r"The domain is \boxed{[2,5)}", "[2,5)", 1)),
    ),
    Report(
        "jsboige/CoursIA#12505",
        "`$1,234.00` for 1234",
        "234 is compared",
        "1",
        scores("math", ("The answer is $1,234.00", "1234", 1), ("The answer is 234", "1234", 0)),
    ),
    Report(
        "huggingface/Math-Verify#76",
        "`**73**` in bold",
        "0",
        "1",
        scores(
            "math",
            ("Final Answer: **73**", "73", 1),
            ("The answer is **73**.", "73", 1),
            ("**The answer is 73.**", "73", 1),
        ),
    ),
    Report(
        "huggingface/Math-Verify#37",
        r"`\text{13}` for 13",
        "0",
        "1",
        scores("math", (r"\boxed{\text{13}}", "13", 1)),
    ),
    Report(
        "huggingface/Math-Verify#14",
        r"numbers that are small, and others: `2^{-98}` for `2^{-99}`",
        "1: rounded to six digits",
        "0",
        scores(
            "math",
            (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}", 0),
            (r"\boxed{\frac{1}{2^{99}}}", r"\frac{1}{2^{99}}", 1),
            (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}", 0),
            (r"\boxed{n=1, 2, 3}", "n=2, 3, 4", 0),
            (r"\boxed{D = (0, 1.5)}", "D = (0, 1)", 0),
            (r"\boxed{1 + \frac{1}{e}}", r"1 - \frac{1}{e}", 0),
            (r"\boxed{2021}", r"\pm 2021", 0),
            (r"\boxed{1:00}", "12:00", 0),
            (r"\boxed{0.33}", r"\frac{1}{3}", 0),
        ),
    ),
    Report(
        "huggingface/Math-Verify#47",
        "one of two answers, for `1331 and 1728`",
        "1",
        "0",
        scores("math", (r"\boxed{1728}", "1331 and 1728", 0), (r"\boxed{1728, 1331}", "1331, 1728", 1)),
    ),
    Report(
        "huggingface/Math-Verify#60",
        "another equation",
        "1",
        "0",
        scores(
            "math",
            (r"\boxed{3x + 4y + 14=0}", "3*x-1*y+13=0", 0),
            (r"\boxed{-34x-45y+20z-100=0}", "34x+45y-20z+100=0", 1),
        ),
    ),
    Report(
        "huggingface/Math-Verify#2",
        "decimals and fractions in other forms",
        "0",
        "1",
        scores(
            "math",
            (r"\boxed{0.0833333333333333}", r"\frac{1}{12}", 1),
            (r"\boxed{(1,4.5)}", r"(1,\frac{9}{2})", 1),
            (r"\boxed{\frac{x}{7}+\frac{2}{7}}", r"\frac{x+2}{7}", 1),
        ),
    ),
    Report(
        "huggingface/Math-Verify#67", r"28 for `28\%`", "0", "1", scores("math", (r"\boxed{28}", r"28\%", 1))
    ),
    Report(
        "openai/simple-evals#33",
        "`Antwort:` and C on a later line",
        "A, of `Antwort`",
        "C",
        scores(
            "choice",
            ("Antwort:\n\nAntwort: C", "A", 0),
            ("Antwort:\n\nAntwort: C", "C", 1),
            ("答案:B", "B", 1),
        ),
    ),
    Report(
        "jundot/omlx#3668",
        "a distractor named behind the answer",
        "the distractor",
        "the answer",
        scores(
            "choice",
            ("The answer is B. Note that A is a common distractor.", "B", 1),
            ("ANSWER IS D. A is incorrect.", "D", 1),
            ("The answer is C because I computed the integral.", "C", 1),
        ),
    ),
    Report(
        "TIGER-AI-Lab/MMLU-Pro#7",
        "`A perfect answer cannot be found.`",
        "A",
        "no choice",
        scores(
            "choice",
            ("A perfect answer cannot be found.", "A", 0),
            ("I do not know.", "I", 0),
            ("A", "A", 1),
            ("A.", "A", 1),
        ),
    ),
    Report(
        "groq/openbench#348",
        "`Answer seems to be A`, and then `Answer: A`",
        "S",
        "A",
        scores("choice", ("The answer is 11.\n\nAnswer seems to be A.\n\nAnswer: A\n", "A", 1)),
    ),
    Report(
        "aniri15/OPD-V#2",
        "`Answer: **D**`, and a letter before it that is dismissed",
        "A, of `Answer`",
        "D",
        scores(
            "choice",
            ("Answer: **D**", "D", 1),
            ("I considered (A), but it is incorrect. Final answer: D.", "D", 1),
            ("The correct answer is d.", "D", 1),
        ),
    ),
    Report(
        "antirez/ds4#321",
        "`Answer: It is not B, the answer is D`",
        "B",
        "D",
        scores(
            "choice",
            ("Answer: It is not B, the answer is D", "D", 1),
            ("Answer: I think it is C", "C", 1),
            ("Answer: rules out C, leaving D", "C", 0),
        ),
    ),
    Report(
        "NVIDIA-NeMo/Skills#1526",
        "a formula in a box, and `**Answer: D**`",
        "E, of the formula",
        "D",
        scores("choice", ("So \\boxed{\\langle H\\rangle \\ll \\Delta E}\n**Answer: D**", "D", 1)),
    ),
    Report(
        "NVIDIA-NeMo/Gym#1844",
        r"`\boxed{\text{E}}`, `\boxed{E: ...}`",
        "no answer",
        "E",
        scores("choice", (r"\boxed{\text{E}}", "E", 1), (r"\boxed{E: A polygenic risk score}", "E", 1)),
    ),
    Report(
        "EleutherAI/lm-evaluation-harness#4188",
        "small letters, and articles behind the answer",
        "nothing, or a",
        "the letter",
        scores("choice", ("d", "D", 1), ("b. 4", "B", 1), ("The answer is B because a car moves.", "B", 1)),
    ),
    Report(
        "modelscope/ms-swift#8123",
        "a reward that is None",
        "all advantages of the batch are NaN",
        "refused, with function and sample",
        rewarded(with_none, r"mine:reward.*domain a, sample 1.*None"),
    ),
    Report(
        "huggingface/trl#5775",
        "a reward that is NaN",
        "a loss of NaN, or 0 in its place",
        "refused, with function and sample",
        rewarded(with_nan, r"mine:reward.*returned nan"),
    ),
    Report(
        "huggingface/trl#5233",
        "columns named `prompts`, `completions` or `step` beside TRL's own",
        "they overwrite each other",
        "TRL's are the samples'",
        rewarded(by_columns, (0.0, 1.0, 2.0), prompts="x", completions="y", step=3),
    ),
    Report(
        "huggingface/trl#2644",
        "rewards as a tensor",
        "taken or not by the release",
        "one each",
        rewarded(in_tensors, (0.0, 1.0, 2.0)),
    ),
    Report(
        "unslothai/unsloth#2378",
        "fewer rewards than answers",
        "a broadcast, without a word",
        "refused, with both numbers",
        rewarded(too_few, r"returned 1 rewards for 3 completions"),
    ),
]

"""What scores answers: `domains.NAME.reward`. The code of a kind is `opd/rewards/TYPE_reward.py`."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator

from opd.config.base import Config

Way = Literal["whole", "boxed", "answer", "number", "last_line", "code", "json"]
Ways = Annotated[list[Way], Field(min_length=1), BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
"""One way to read an answer, or several, of which the first counts that finds something."""


class FunctionReward(Config):
    """A function of your own; `reward: package.module:function` is short for it."""

    type: Literal["function"] = "function"
    path: str
    """Dotted path, `package.module:function`."""


class MathReward(Config):
    """1 for an answer that is mathematically equal to the label (extra `verifiers`: math-verify), else 0."""

    type: Literal["math"] = "math"
    extract: Ways = ["boxed", "answer", "whole"]
    """Where the answer stands. `boxed`: in the last `\\boxed{}`; `answer`: after the last `Answer:`,
    `answer is` or `####`, or in `<answer>` tags; `number`: the last one; `last_line`; `whole`: the formula or
    number that math-verify finds last. The first way counts that finds something."""
    seconds: float = Field(default=3.0, gt=0, le=600)
    """Of processor time that a comparison may take; one that takes longer is wrong."""
    digits: int = Field(default=6, ge=0, le=15)
    """Decimal places to which numbers are compared."""


class ChoiceReward(Config):
    """1 for the right letter of a multiple choice, else 0. The label is the letter, or its number from 0."""

    type: Literal["choice"] = "choice"
    extract: Ways = ["boxed", "answer", "last_line"]
    """Where the letter stands: what is found has to begin with it (`B`, `(B)`, `B. because`), else the next
    way is tried."""
    choices: int = Field(default=10, ge=2, le=26)
    """How many there are: letters from A."""


class ExactReward(Config):
    """1 for an answer that is the label, or one of a list of them, else 0."""

    type: Literal["exact"] = "exact"
    extract: Ways = ["whole"]
    """Where the answer stands; blanks around it do not count."""
    normalise: Literal["none", "squad"] = "none"
    """`squad`: in lower case, without punctuation and articles, as SQuAD compares."""


class F1Reward(Config):
    """SQuAD's F1 of the answer's words and the label's, or of the best of a list: from 0 to 1."""

    type: Literal["f1"] = "f1"
    extract: Ways = ["whole"]
    """Where the answer stands."""


def _pattern(text: str | None) -> str | None:
    if text is not None:
        try:
            re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{text!r} is no regular expression ({error})") from None
    return text


class RegexReward(Config):
    """1 for an answer that the regular expression matches, else 0; the label is the expression, or what its
    group `answer` has to catch."""

    type: Literal["regex"] = "regex"
    extract: Ways = ["whole"]
    """What is looked at."""
    pattern: str | None = None
    """One expression for every row; `null` takes each row's label. Where it has a group named `answer`, what
    the last match caught there has to be the label."""
    full: bool = False
    """Whether it has to match all that is looked at and not a part of it."""
    ignore_case: bool = False
    """Whether upper and lower case are the same."""
    seconds: float = Field(default=1.0, gt=0, le=600)
    """Of processor time; an answer that takes longer is wrong."""

    _is_one = field_validator("pattern")(_pattern)


class JSONSchemaReward(Config):
    """1 for an answer that is JSON and fits the schema (extra `verifiers`: jsonschema), else 0."""

    type: Literal["json_schema"] = "json_schema"
    extract: Ways = ["json"]
    """`json`: the last block between three backticks, or else from the first bracket to the last."""
    definition: dict[str, Any] | None = None
    """The JSON schema for every row; `null` takes each row's label: an object, or one as text. Nothing that
    it refers to elsewhere is fetched."""
    parses: float = Field(default=0.0, ge=0, lt=1)
    """Reward of JSON that does not fit."""
    seconds: float = Field(default=1.0, gt=0, le=600)
    """Of processor time; an answer that takes longer is wrong."""


class PythonReward(Config):
    """1 for code that passes the label's tests, else 0; both run in a sandbox."""

    type: Literal["python"] = "python"
    extract: Ways = ["code", "whole"]
    """`code`: the last block between three backticks."""
    partial: bool = False
    """Whether the reward is the share of tests that pass."""
    sandbox: Literal["auto", "bubblewrap", "landlock", "limits"] = "auto"
    """`auto` takes the first that works here: `bubblewrap` (extra `verifiers`, user namespaces), `landlock`
    (the kernel's own means for a process), `limits` (of time, memory and output alone: code can read what you
    can). All add seccomp where the kernel has it. `opd doctor` says which it is."""
    seconds: int = Field(default=5, gt=0, le=3600)
    """Of processor time that an answer may take, for each standard input where the tests are such. By the
    clock all tests together may take three times as long, and five seconds more."""
    memory_mb: int = Field(default=512, ge=64, le=1_000_000)
    """Address space of its process (MiB)."""
    output_mb: int = Field(default=4, gt=0, le=1024)
    """Of each standard output and each file that it writes (MiB)."""


VerifierSettings = (
    MathReward | ChoiceReward | ExactReward | F1Reward | RegexReward | JSONSchemaReward | PythonReward
)
"""Those that are built in."""
VERIFIERS: tuple[str, ...] = tuple(kind.model_fields["type"].default for kind in get_args(VerifierSettings))


def _named(value: Any) -> Any:
    """`math` is short for `{type: math}`, `package.module:function` for a function."""
    if not isinstance(value, str):
        return value
    if value in VERIFIERS:
        return {"type": value}
    if ":" not in value and "." not in value:
        close = get_close_matches(value, VERIFIERS, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"{value!r} is no reward: give package.module:function, or one of {', '.join(VERIFIERS)}{hint}"
        )
    return {"type": "function", "path": value}


RewardConfig = Annotated[
    FunctionReward | VerifierSettings, Field(discriminator="type"), BeforeValidator(_named)
]

"""Check the recipe's alert rules on the metrics of each step, and request their actions.

A rule's state is a function of the lines of `metrics.jsonl` alone. A resumed stage reads those up to its
checkpoint again, also with other rules than before. One number is measured for the rules alone, if the recipe
has it: the student's distance from its start.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase

import numpy as np

from opd.config import Recipe
from opd.config.watch import Condition, RuleConfig, covers_metric
from opd.metrics import FlagsWriter, read_metrics, row_of
from opd.pipelines.commands.exit_status import resume_command
from opd.pipelines.records.settings import ACCEPT_SETTINGS
from opd.pipelines.records.stage_names import split_round
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.samples import StepSamples
from opd.redact import redact
from opd.train.frozen import FrozenModel
from opd.types import Sample

_log = logging.getLogger(__name__)

Row = Mapping[str, int | float]
_BASE = "base_logprobs"


@dataclass(frozen=True, slots=True)
class Flag:
    """A fired rule: a line of `flags.jsonl`."""

    step: int
    rule: str
    metric: str
    value: float
    """The metric's value in the last of the consecutive steps."""
    bound: float
    """The violated bound, as a value of the metric."""
    action: str
    sentence: str
    """The event, and a hint."""


@dataclass(frozen=True, slots=True)
class StepAction:
    """The actions of the rules after a step."""

    factor: float = 1.0
    """Factor of the learning rate from now on."""
    stop: str = ""
    """The reason to stop the stage, and how to continue. Empty if it goes on."""


class ConditionState:
    """The metrics of one condition, step after step."""

    def __init__(self, condition: Condition) -> None:
        self.condition = condition
        self.latest: dict[str, float] = {}
        """The latest value, or mean of the last ones, of each of its metrics."""
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, deque[float]] = {}
        self._covered: dict[str, bool] = {}

    def read(self, row: Row) -> list[str]:
        """Read the values of a step, and return the metrics of this condition."""
        condition, names = self.condition, []
        for name, value in row.items():
            if name not in self._covered:
                self._covered[name] = covers_metric(condition.metric, name)
            if not self._covered[name]:
                continue
            names.append(name)
            first = self._first.setdefault(name, [])
            if condition.form != "value" and len(first) < condition.first:
                first.append(float(value))
                continue
            last = self._last.setdefault(name, deque(maxlen=condition.last))
            last.append(float(value))
            if len(last) == condition.last:
                self.latest[name] = math.fsum(last) / len(last)
        return names

    def find_violation(self, name: str) -> tuple[float, float] | None:
        """Return a metric's latest value or mean, and the bound that it violates, `None` within bounds."""
        if name not in self.latest:
            return None
        value, condition = self.latest[name], self.condition
        for limit, is_above in ((condition.above, True), (condition.below, False)):
            if limit is None:
                continue
            bound = limit
            if condition.form != "value":
                mean = math.fsum(self._first[name]) / len(self._first[name])
                if condition.form == "ratio" and mean <= 0:
                    continue
                bound = mean + limit if condition.form == "change" else mean * limit
            if value > bound if is_above else value < bound:
                return value, bound
        return None

    def describe_violation(self, name: str) -> str:
        """Describe a metric's violation of its bounds."""
        violation, condition = self.find_violation(name), self.condition
        assert violation is not None
        value, bound = violation
        high = value > bound
        mean = f" (mean of its last {condition.last})" if condition.last > 1 else ""
        words = f"{name}{mean} is {value:.4g}, {'above' if high else 'below'} {bound:.4g}"
        limit = condition.above if high else condition.below
        first = f"the mean of its first {condition.first}"
        if condition.form == "ratio":
            words += f" ({limit:g} times {first})"
        if condition.form == "change":
            words += f" ({first} and {limit:g})"
        return words


class AlertRule:
    """One rule, with each metric's number of steps beyond its bounds."""

    def __init__(self, name: str, config: RuleConfig) -> None:
        self.name, self.config = name, config
        self._main = ConditionState(config)
        self._also = None if config.also is None else ConditionState(config.also)
        self._row: dict[str, int] = {}
        self._warned: set[str] = set()

    def check_step(self, row: Row) -> Iterator[Flag]:
        """Read the values of a step, and yield flags that fire. A continuing warning is not repeated."""
        also = self._also
        if also is not None:
            also.read(row)
        for metric in self._main.read(row):
            fires, other = self._main.find_violation(metric) is not None, metric
            if fires and also is not None:  # the other condition is on the same metric, or on any of its own
                others = [metric] if also.condition.metric == self.config.metric else list(also.latest)
                other = next((name for name in others if also.find_violation(name) is not None), "")
                fires = bool(other)
            if not fires:
                self._row[metric] = 0
                self._warned.discard(metric)
                continue
            self._row[metric] = self._row.get(metric, 0) + 1
            if self._row[metric] < self.config.steps:
                continue
            self._row[metric] = 0
            if self.config.action != "warn" or metric not in self._warned:
                self._warned.add(metric)
                yield self._make_flag(int(row["step"]), metric, other)

    def _make_flag(self, step: int, metric: str, other: str) -> Flag:
        violation, config = self._main.find_violation(metric), self.config
        assert violation is not None
        words = self._main.describe_violation(metric)
        if config.steps > 1:
            words += f", for {config.steps} in a row"
        if self._also is not None and other != metric:
            words += f", while {self._also.describe_violation(other)}"
        if config.action == "lower_rate":
            words += f"; the learning rate is multiplied by {config.factor:g} from here on"
        sentence = redact(f"{words}; {config.lever.rstrip('.')}.")
        return Flag(step, self.name, metric, *violation, config.action, sentence)


class StageAlerts:
    """The rules of one stage.

    Args:
        context: The stage. Of several ranks the first one checks, and sends the others its actions.
    """

    def __init__(self, context: StageContext) -> None:
        self._ranks, self._stage = context.ranks, context.stage
        rules = {name: rule for name, rule in (context.recipe.watch or {}).items() if rule is not None}
        names = {context.stage, split_round(context.stage)[0]}
        mine = {
            name: rule for name, rule in rules.items() if any(fnmatchcase(one, rule.stages) for one in names)
        }
        self._acts = any(rule.action != "warn" for rule in mine.values())
        self._rules: list[AlertRule] = []
        self._flags: FlagsWriter | None = None
        if context.ranks.is_main:
            self._rules = [AlertRule(name, rule) for name, rule in mine.items()]
            self._flags = FlagsWriter(context.folder.stage_folder(context.stage))

    @property
    def tail(self) -> str:
        """The digest of all flags so far. See `JSONLinesWriter.last_chain`."""
        return "" if self._flags is None else self._flags.last_chain

    @classmethod
    def resume_rules(cls, context: StageContext, step: int, tail: str) -> StageAlerts:
        """Drop the flags after `step`, and read the logged metrics up to it again."""
        watch = cls(context)
        if watch._flags is not None:
            watch._flags.truncate(step, tail)
        for row in read_metrics(context.metrics.path) if step and watch._rules else ():
            for rule in watch._rules:
                for _ in rule.check_step(row):
                    pass
        return watch

    def check_step(self, step: int, metrics: Mapping[str, object], seconds: float) -> StepAction:
        """Check the metrics of a step against the rules. The result is the same on every rank."""
        factor, stop = 1.0, ""
        row = row_of(step, metrics, seconds) if self._rules else {}
        for rule in self._rules:
            for flag in rule.check_step(row):
                assert self._flags is not None
                self._flags.append(asdict(flag))
                _log.warning("step %d, %s: %s", step, flag.rule, flag.sentence, extra={"stage": self._stage})
                if flag.action == "lower_rate":
                    factor *= rule.config.factor
                if flag.action == "stop" and not stop:
                    stop = f"{self._stage}: the rule {flag.rule} of `watch` has stopped it at step {step}:"
                    stop += f" {flag.sentence} Then go on with: {resume_command(ACCEPT_SETTINGS)}"
        if self._acts and not self._ranks.is_alone:
            factor, stop = self._ranks.gather_json([factor, stop], "what the rules ask for")[0]
        return StepAction(factor, stop)


class BaseKL:
    """The student's distance from the start model of its stage, if the recipe measures it.

    Args:
        recipe: Has the frequency of this measurement, at least 1.
    """

    def __init__(self, recipe: Recipe, model: FrozenModel) -> None:
        self._every, self._model = recipe.evaluation.base_kl_every, model
        self._temperatures = {name: recipe.for_domain(name).rollout.temperature for name in recipe.domains}

    def measure_kl(self, step: StepSamples, index: int) -> dict[str, float]:
        """Return `base_kl` of every so many steps, over the tokens of `step`, which are dealt out. It is the
        mean difference of the engine's log-probabilities to the start model's (k1, nats a token). Each is at
        the temperature of its sampling.
        """
        if (index + 1) % self._every:
            return {}
        step.compute_signal(_BASE, step.samples, self._base_logprobs, "the base's log-probabilities")
        total, count = 0.0, 0
        for lot in step.local_samples():
            for sample in lot:
                apart = sample.rollout_logprobs.astype(np.float64) - step.read_signal(_BASE, sample)
                total += float(apart[sample.loss_mask].sum())
                count += int(np.count_nonzero(sample.loss_mask))
        sums = step.gather_local([total, count], "the KL to the base")
        total, count = sum(one[0] for one in sums), sum(one[1] for one in sums)
        return {"base_kl": total / count} if count else {}

    def _base_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        logprobs: dict[str, np.ndarray] = {}
        # Ranks take the temperatures in the same order, whatever samples they have.
        for temperature in sorted(set(self._temperatures.values())):
            drawn = [sample for sample in samples if self._temperatures[sample.domain] == temperature]
            values = self._model.local_logprobs(drawn, temperature)
            logprobs |= {sample.uid: one for sample, one in zip(drawn, values, strict=True)}
        return [logprobs[sample.uid] for sample in samples]

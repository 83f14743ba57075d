"""`reward: f1`: how much of the label's words the answer has, and how little else, as SQuAD measures it."""

from __future__ import annotations

from collections import Counter

from opd.config.rewards import F1Reward
from opd.rewards.exact_reward import label_fault, squad, texts
from opd.rewards.extract import extracted
from opd.rewards.verifier import Answered, Verifier, each


def f1(answer: str, label: str) -> float:
    """Of the words, in SQuAD's form; 1 where both have none."""
    given, wanted = squad(answer).split(), squad(label).split()
    if not given or not wanted:
        return float(given == wanted)
    same = (Counter(given) & Counter(wanted)).total()
    return 2 * same / (len(given) + len(wanted))


def score(settings: F1Reward, answer: Answered) -> float:
    """The best over the labels."""
    found = extracted(answer.text, settings.extract)
    wanted = [label for label in texts(answer.label) if squad(label)]  # the others equal signs alone
    return 0.0 if found is None else max(f1(found, label) for label in wanted)


VERIFIER = Verifier(each(score), label_fault)

"""What counts as right. A label is text: of `facts`, JSON."""

from __future__ import annotations

import json
import re
from typing import Any


def last_number(sample: Any) -> float:
    """The last number of the answer is the label."""
    found = re.findall(r"\d+", sample.text.replace(",", ""))
    return float(bool(found) and found[-1] == sample.label)


def same_text(sample: Any) -> float:
    """The answer is the label to the letter."""
    return float(sample.text.strip() == sample.label)


def same_facts(sample: Any) -> float:
    """The answer is an object of JSON with the label's content, in whatever order and spacing."""
    try:
        return float(json.loads(sample.text) == json.loads(sample.label))
    except (ValueError, RecursionError):
        return 0.0

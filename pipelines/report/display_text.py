"""Format numbers and names for people."""

from __future__ import annotations

from opd.pipelines.evaluation.statistics import Interval
from opd.pipelines.records.stage_names import kind_of, split_round, stage_model

NARROW = "\u202f"
MINUS = "\u2212"
DASH = "\u2013"
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

MODELS = {
    "base": "Base",
    "merged": "Merged student",
    "average": "Weight average",
    "task_arithmetic": "Task arithmetic",
    "ties": "TIES",
    "dare": "DARE",
    "della": "DELLA",
    "sce": "SCE",
    "slerp": "SLERP",
    "model_stock": "Model stock",
    "ram": "RAM",
    "ram_plus": "RAM+",
    "mixed_grpo": "Mixed-domain GRPO",
    "mixed_grpo_all": "Mixed-domain GRPO (all tokens)",
    "off_policy": "Off-policy distillation",
}
STAGES = {"base": "Base", "merge": "Merge", "evaluate": "Evaluation"}


def model_label(name: str) -> str:
    bare, number = split_round(name)
    kind, _, domain = bare.partition(":")
    label = f"{kind.capitalize()}, {domain}" if domain else MODELS.get(bare, bare)
    return label if bare == name else f"{label}, round {number}"


def format_best_teachers(best: dict[str, str]) -> str:
    """Format the best teacher of each domain with several."""
    return "; ".join(f"on {domain} the best of its teachers counts, {name}" for domain, name in best.items())


def teachers_label(teacher_word: str) -> str:
    """Return the label of all teachers, each on its own domains."""
    return f"{teacher_word.capitalize()}s, own domain"


def lower_label(label: str) -> str:
    """Return a display name inside a sentence: "Weight average" -> "weight average", "TIES" stays."""
    label = label.replace(" (all tokens)", " on all tokens")
    return label if label[:2].isupper() else label[:1].lower() + label[1:]


def stage_label(name: str) -> str:
    bare, number = split_round(name)
    if bare != name:
        return f"{stage_label(bare)}, round {number}"
    kind, model = kind_of(name), stage_model(name)
    if kind == "sft" and ":" in model:
        return f"Demonstrations, {model.partition(':')[2]}"
    if kind == "baseline" or model.startswith("specialist:"):
        return model_label(model) or name
    return STAGES.get(name, name)


def percent(value: float, digits: int = 1) -> str:
    """Format 0.985 as "98.5 %", with a narrow no-break space."""
    return f"{100 * value:.{digits}f}{NARROW}%"


def points(value: float) -> str:
    """Format 0.149 as "+14.9", in percentage points."""
    text = f"{100 * value:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", MINUS)


def format_bounds(interval: Interval, digits: int = 1) -> str:
    """Format the interval of a share in percent, "97.9–98.9"."""
    return f"{100 * interval.low:.{digits}f}{DASH}{100 * interval.high:.{digits}f}".replace("-", MINUS)


def point_bounds(interval: Interval) -> str:
    """Format the interval of a difference in percentage points, "+13.1 to +16.7"."""
    return f"{points(interval.low)} to {points(interval.high)}"


def amount(value: float) -> str:
    """Format 206976 as "207 k", with three significant digits."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            scaled = value / size
            digits = 0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
            text = f"{scaled:.{digits}f}"
            return f"{text.rstrip('0').rstrip('.') if '.' in text else text}{NARROW}{suffix}"
    return f"{value:.3g}"


def format_power(value: float) -> str:
    """Format 2.1e-7 as "2×10⁻⁷", with one significant digit."""
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}\u00d710{str(int(exponent)).translate(SUPERSCRIPT)}".replace("-", MINUS)


def format_duration(seconds: float) -> str:
    """Format seconds as "8.4 s", "42 s", "2 min 05 s" or "3 h 12 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f}{NARROW}s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}{NARROW}s"
    if rounded < 3600:
        return f"{rounded // 60}{NARROW}min {rounded % 60:02d}{NARROW}s"
    return f"{rounded // 3600}{NARROW}h {rounded % 3600 // 60:02d}{NARROW}min"


def join_items(items: list[str]) -> str:
    """Join ["a", "b", "c"] to "a, b and c"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"

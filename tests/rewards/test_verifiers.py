"""Built-in rewards: what each says of right and wrong answers, and of labels it cannot use."""

from __future__ import annotations

import json
import sys

import pytest
import tiny

from opd.config.recipe import DomainConfig
from opd.config.rewards import VERIFIERS, PythonReward
from opd.data.load import load_domain
from opd.errors import DataError, MissingExtraError, RewardError
from opd.rewards.python_reward import label_fault
from opd.rewards.registry import check_labels, own_reward, reward_of, scored_by, verifier_of
from opd.rewards.verifier import Answered, side_by_side
from opd.rollout.prompts import Prompt
from opd.rollout.rewards import RewardRunner
from opd.types import Status

ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```"
HALF = {"type": "object", "required": ["a"], "properties": {"a": {"type": "number"}}}
HEDGED = [
    *(
        "Answer: C is wrong",
        "Option C is incorrect",
        "C is not correct",
        "C isn't right",
        "I think it is not C",
    ),
    *("C or D", "Answer: C or D", "Answer: C, D", "Answer: A/B", "Answer: A & C", "Answer: A or B or C or D"),
    *(
        r"\boxed{B, C}",
        r"\boxed{B or C}",
        "A, B, C, D",
        "A. B. C. D.",
        "Either A or B",
        "A) x\nB) y\nC) z\nD) w",
    ),
    *("D-day was in 1944", "D'oh", "A's fine", "B vitamins matter", "C++ is a language", "vitamin C helps"),
    *(
        "Thus, A or B.",
        "I'd say B or A",
        "Thus not B.",
        "I'd never say B.",
        "I cannot say B",
        "Thus, vitamin B.",
    ),
    *("It is not A, not B", "It isn't B, not A", "The wrong one is B.", "So A, B.", "It is B or A, not C"),
    *("```\nA\nB\n```", "```python\nB = 3\n```", "不选B", "排除B", "A、B", "选A和B", "I'd say B vitamins"),
    *("Answer: A man", "The answer is A good question", "A man chose", "I gave A a cake", "I am not sure"),
]
"""Answers that name no letter, several, or one that they deny."""
CHOSEN = [
    *(
        ("Therefore, C is correct.", "C"),
        ("I choose C", "C"),
        ("I'd go with C", "C"),
        ("I think it is A", "A"),
    ),
    *(("The answer would be C", "C"), ("Answer: C Paris", "C"), ("C. Paris", "C"), ("**C**: water", "C")),
    *(("Answer: C. A is wrong because of x", "C"), ("Answer: A, because B is wrong", "A"), ("b. 4", "B")),
    *(("Answer: C is right, not D", "C"), ("The correct answer is option B.", "B"), ("Option C", "C")),
    ("A look at both shows that it is C", "C"),
]
CHOSEN += [
    (text, "B")
    for text in (
        *("The correct answer is therefore B.", "Thus, B.", "So B.", "Therefore: B", "Hence, option B"),
        *("The answer is, therefore, B.", "It's clearly B.", "I'd say B.", "I would say B", "I believe B."),
        *("It is B, not A", "It is B, and not A.", "B, not A", "Answer: B (not A)", "It is B rather than A"),
        *(
            "It is B instead of option A.",
            "\uff22",
            "\uff08\uff22\uff09",
            "```\nB\n```",
            "So:\n~~~text\n(B)\n~~~",
        ),
        *("选B", "故选\uff22。", "正确答案是B", "```\nA\n```\nNo, it is B"),
    )
]
CASES = [
    ("math", r"so \boxed{\frac{1}{2}}", "0.5", 1),
    ("math", "The answer is 1,234.", 1234, 1),
    ("math", "#### 42", "6 * 7 = 42\n#### 42", 1),
    ("math", r"\boxed{x^2+2x+1}", "$(x+1)^2$", 1),
    ("math", r"it is $\frac{3}{4}$", r"\boxed{0.75}", 1),
    ("math", r"\boxed{[1,2)}", "[1,2)", 1),
    ("math", r"\boxed{[1,2]}", "[1,2)", 0),
    ("math", r"\boxed{\text{yes}}", "yes", 1),
    ("math", r"\boxed{1} or \boxed{2}", "1", 0),
    ("math", r"I see 3 and say \boxed{4}", "3", 0),
    ("math", "", "0", 0),
    ("math", "The answer is 4.5. So 7 of them", "4.5", 1),
    ("math", r"\boxed{2^{-98}}", "2^{-99}", 0),
    ("math", r"\boxed{2^{-99}}", r"\frac{1}{2^{99}}", 1),
    ("math", r"\boxed{0.333333}", r"\frac{1}{3}", 1),
    ("choice", "Answer: B", "B", 1),
    ("choice", "The answer is (C).", 2, 1),
    ("choice", r"\boxed{\text{D}}", "(D)", 1),
    ("choice", "Because.\n**A**", "A", 1),
    ("choice", "answer: d", "D", 1),
    *[("choice", hedged, right, 0) for hedged in HEDGED for right in "ABCD"],
    *[("choice", said, right, 1) for said, right in CHOSEN],
    ("math", "The answer isn't 5.", 5, 0),
    ("math", "The answer is not 5, it is 6.", 6, 1),
    ("math", "Answer: 42; or 43", 43, 0),
    ("math", r"\boxed{101_3}", "101_2", 0),
    ("math", r"\boxed{101_{2}}", "101_2", 1),
    ({"type": "exact", "normalise": "squad"}, "1.5", "15", 0),
    ({"type": "exact", "normalise": "squad"}, "-5", "5", 0),
    ({"type": "exact", "normalise": "squad"}, "It's 3.14.", "its 3.14", 1),
    ({"type": "exact", "extract": "number"}, "on 2024-01-02", 2, 1),
    ("choice", "B", "A", 0),
    ("choice", "So:\nA perfect answer is not there", "A", 0),
    ("choice", "Answer: A because of it", "A", 1),
    ("choice", "Answer: I think it is C", "C", 1),
    ("choice", "Answer: I do not think it is C", "C", 0),
    ("choice", "Answer: I because of it", "I", 1),
    ("choice", "answer: c) it", "C", 1),
    ("choice", "It cannot be known", "A", 0),
    ("exact", " Paris\n", "Paris", 1),
    ("exact", "paris", ["Rome", "Paris"], 0),
    ({"type": "exact", "normalise": "squad"}, "!", ["the", "who"], 0),
    ({"type": "exact", "normalise": "squad"}, "the Paris.", ["Rome", "paris"], 1),
    ({"type": "exact", "extract": "number"}, "it is 1,234", 1234, 1),
    ("f1", "the cat sat", "cat sat down", 0.8),
    ("f1", "dog", ["cat", "a dog"], 1),
    ("f1", "cat", "dog", 0),
    ("f1", "?", ["A", "cat"], 0),
    ("regex", "room 12", r"\d{2}", 1),
    ({"type": "regex", "full": True}, "room 12", r"\d{2}", 0),
    ({"type": "regex", "ignore_case": True, "pattern": "^YES"}, "yes, it is", None, 1),
    ({"type": "regex", "pattern": r"x=(?P<answer>\d+)"}, "x=1, x=2", 2, 1),
    ({"type": "regex", "pattern": r"x=(?P<answer>\d+)"}, "x=1, x=2", "1", 0),
    ("json_schema", '```json\n{"a": 1}\n```', HALF, 1),
    ("json_schema", '{"a": NaN}', json.dumps(HALF), 0),
    ({"type": "json_schema", "definition": HALF, "parses": 0.2}, '{"a": "1"}', None, 0.2),
    ({"type": "json_schema", "definition": HALF, "parses": 0.2}, '{"a": 1', None, 0),
    *[("json_schema", text, schema, score) for schema, text, score in (
        ({"multipleOf": 0.1}, "0.3", 1), ({"multipleOf": 0.01}, "19.99", 1), ({"multipleOf": 0.1}, "0.35", 0),
        ({"type": "integer"}, "1.0", 1), ({"type": "integer"}, "1.5", 0), ({"type": "integer"}, "true", 0),
        ({"type": "integer"}, "1" * 5000, 1), ({"const": 0.1}, "0.10", 1), ({"maximum": 2.5}, "2.5000001", 0),
        ({"enum": [1.5, 2]}, "2.0", 1), ({"multipleOf": 3}, "1e999999", 0),
        ({"uniqueItems": True}, "[1, 1.0]", 0),
        ({"format": "date"}, '"2020-12-31"', 1), ({"format": "date"}, '"2020-13-45"', 0),
        ({"format": "email"}, '"a"', 0), ({"format": "date-time"}, '"2020-12-31T00:00:00Z"', 1),
        ({"format": "uri"}, '"https://example.org/a?b=c"', 1), ({"format": "uri"}, '"example.org"', 0),
        ({"format": "uri"}, '"https://a b"', 0), ({"format": "duration"}, '"P1DT12H0.5S"', 1),
        ({"format": "duration"}, '"P"', 0), ({"format": "duration"}, '"1 day"', 0),
        ({"type": "string", "format": "password"}, '"x"', 1),
        ({"name": "n", "strict": True, "schema": {"type": "integer"}}, "1", 1),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}, "1.5", 0),
        ({"properties": {"name": {}, "schema": {"type": "object"}}, "required": ["name"]}, "{}", 0),
        ({"format": "time"}, '"12:30:00Z"', 1), ({"format": "time"}, '"12:30:00"', 0),
        ({"type": "string", "tsType": "Date"}, '"a"', 1), ({"tsType": "1", "const": 1}, "1", 1),
        ({"type": "string", "types": "a", "maxlen": 2}, '"a"', 1),
        ({"format": "date-time"}, '"2020-12-32T00:00:00Z"', 0), ({"format": "date-time"}, '"2020-12-31"', 0),
        ({"properties": {"kids": {"items": {"$ref": "#"}}, "n": {"type": "integer"}}},
         '{"kids": [{"kids": [{"n": 0.5}]}]}', 0),
    )],
    ("python", ADD, ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], 1),
    ("python", ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 3"], 0),
    ({"type": "python", "partial": True}, ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 3"], 0.5),
    ("python", ADD, {"test": "def check(f):\n    assert f(1, 2) == 3", "entry_point": "add"}, 1),
    ("python", ADD, {"setup": "import math", "tests": ["assert add(math.pi, 0) > 3"]}, 1),
    ("python", ADD, {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}, 1),
    ("python", "class Solution:\n def f(self, x): return (x, x)", {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 1]]}, 1),  # noqa: E501
    ("python", "n = int(input())\nprint(n * 2, '\\n')", {"inputs": ["1\n", "2"], "outputs": ["2", "4\n"]}, 1),
    ({"type": "python", "partial": True}, "print(2)", {"inputs": ["1", "2"], "outputs": ["2", "4"]}, 0.5),
    ("python", "import threading\nthreading.Thread(target=lambda: print(2)).start()", {"inputs": [""], "outputs": ["2"]}, 1),  # noqa: E501
    ("python", "import atexit\natexit.register(print, 3)", {"inputs": [""], "outputs": ["3"]}, 1),
    ("python", "```python\nprint(3); exit()\n```\nIt prints\n```\n3\n```", {"inputs": [""], "outputs": ["3"]}, 1),  # noqa: E501
    ("python", "class Solution:\n def f(self, x: List[int]) -> Optional[int]: return math.gcd(*x)", "assert Solution().f([4, 6]) == 2", 1),  # noqa: E501
    ("python", "def sum(a, b): return a - b", {"fn_name": "sum", "inputs": [[3, 1]], "outputs": [2]}, 1),
    ("python", "def sum(a, b): return a - b", {"test": "def check(f): assert f(3, 1) == 2", "entry_point": "sum"}, 1),  # noqa: E501
    ("python", "def f(): return 1", {"fn_name": "sum", "inputs": [[[3, 1]]], "outputs": [4]}, 0),
    ("python", "def f(): return 10 ** 5000", "assert f() == 10 ** 5000", 1),
    ("python", "def f(): raise KeyError('bad')", "try:\n    f()\n    assert 0\nexcept KeyError as e:\n    assert e.args == ('bad',)", 1),  # noqa: E501
    ("python", "```python title=\"a.py\"\ndef f(): return 1\n```", "assert f() == 1", 1),
    ("python", "def all(x): return True\ndef f(): return [0]", "assert all(f())", 0),
    ("python", "I do not know", ["assert add(1, 2) == 3"], 0),
]  # fmt: skip


def domain(reward, **fields):
    return DomainConfig.model_validate({"source": "x.jsonl", "reward": reward, **fields})


def scored(reward, *answers):
    settings = domain(reward).reward
    verifier = verifier_of(settings)
    for _, label in answers:
        assert verifier.label_fault(settings, label) is None
    found = verifier.score(settings, [Answered(text, label) for text, label in answers])
    return [one["reward"] if isinstance(one, dict) else one for one in found]


LISTED = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
READ = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}
UNIQUE = {"type": "array", "items": {"multipleOf": 0.1}, "maxItems": 2}
ODD = """```
class Kind(type):
    @property
    def __name__(cls): raise ValueError
class Odd(Exception, metaclass=Kind):
    def __str__(self): raise ValueError
"""
FEEDBACK = [
    ("python", ADD, "assert add(1, 2) == 3", None),
    ("python", "Nothing", "assert add(1, 2) == 3", "NameError: name 'Nothing' is not defined"),
    ("python", "```python\ndef add(a, b) return\n```", "assert add(1, 2) == 3", "SyntaxError: expected ':'"),
    (
        "python",
        ADD,
        ["assert add(1, 2) == 3", "assert add(1, 2) == 4, 'no'"],
        "== 4, 'no'\nAssertionError: no",
    ),
    ("python", ADD, ["assert add(1, 'a') == 3"], "fails:\nassert add(1, 'a') == 3\nTypeError: unsupported"),
    ("python", "```\ndef add(a, b): return a + 2\n```", LISTED, "add(3, 4) has to return 7.\nAssertionError"),
    ("python", "```\nprint(3)\n```", READ, "Input:\n3 4\nExpected output:\n7\nOutput:\n3"),
    ("python", "```\nexit(1)\n```", READ, "Input:\n1 2\nExpected output:\n3\nOutput:\nnone: it ended"),
    ("python", "```\nimport os\nos._exit(0)\n```", "assert f() == 3", "f() == 3\nThe code ended early"),
    ("python", f"```\nraise ValueError('{'x' * 9000}')\n```", "assert f() == 3", f"ValueError: {'x' * 480}"),
    (
        "python",
        "```\nwhile True: pass\n```",
        "assert f() == 3",
        "f() == 3\nThe code ended early, took too long",
    ),
    ("python", f"{ODD}\ndef f(): raise Odd()", "assert f() == 3", "f() == 3\nException: "),
    ("python", f"{ODD}\nraise Odd()", "assert f() == 3", "f() == 3\nException: "),
    (
        "python",
        "```\nprint(4)\n```",
        {"inputs": ["1" * 9000], "outputs": ["3"]},
        "Expected output:\n3\nOutput:\n4",
    ),
    ("json_schema", "[0.1, 0.2]", UNIQUE, None),
    ("json_schema", f"[{'0, ' * 5000}0]", UNIQUE, "] is too long"),
    ("json_schema", "1e99999999999999999999", UNIQUE, "The answer is no JSON: the exponent of 1e999"),
    ("json_schema", "[0.1, 0.25]", UNIQUE, "$[1]: 0.25 is not a multiple of 0.1"),
    ("json_schema", "[0.1, 0.1, 0.1]", UNIQUE, "$: [0.1, 0.1, 0.1] is too long"),
    ("json_schema", "[0.1", UNIQUE, "The answer is no JSON: "),
]


@pytest.mark.parametrize(("kind", "text", "label", "said"), FEEDBACK)
def test_feedback_is_the_first_fault(kind, text, label, said):
    if kind == "json_schema":
        pytest.importorskip("jsonschema")
    settings = domain(kind).reward
    (found,) = verifier_of(settings).score(settings, [Answered(text, label)])
    if said is None:
        assert found == 1.0
    else:
        assert found["reward"] == 0.0
        assert said in found["feedback"]
        assert len(found["feedback"]) < 3200


@pytest.mark.parametrize("ends", ["import os; os._exit(0)", "while True: pass"])
def test_code_that_ends_has_not_raised_what_a_test_expects(ends):
    raises = "import unittest\nwith unittest.TestCase().assertRaises({}):\n    f()"
    labels = [raises.format(kind) for kind in ("ValueError", "Exception")]
    (found,) = scored({"type": "python", "partial": True, "seconds": 1}, (f"def f():\n    {ends}", labels))
    assert found == 0.0


@pytest.mark.parametrize("kind", [kind for kind in VERIFIERS if kind not in ("judge", "scorer")])
def test_right_and_wrong(kind):
    """All cases of one reward, those with the same settings as one batch."""
    if kind in ("math", "json_schema"):
        pytest.importorskip({"math": "math_verify"}.get(kind, "jsonschema"))
    batches: dict[str, list] = {}
    for reward, text, label, score in CASES:
        if kind in (reward, isinstance(reward, dict) and reward["type"]):
            batches.setdefault(json.dumps(reward), []).append((text, label, score))
    assert batches, "a kind of reward needs cases here"
    for reward, cases in batches.items():
        found = scored(json.loads(reward), *[(text, label) for text, label, _ in cases])
        assert found == pytest.approx([score for *_, score in cases]), cases


MANY = ["assert sort([2, 1]) == [1, 2]", "x = [3, 1]\nsort_here(x)\nassert x == [1, 3]"]
OBJECTS = """
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item); return self
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
def squares(n):
    for i in range(n): yield i * i
def fails(): raise ValueError("no")
import enum, math, collections
def count(text): return collections.Counter(text)
def sort(x): return sorted(x)
def sort_here(x): x.sort()
from dataclasses import dataclass
@dataclass
class Point:
    x: int
    y: "int" = 2
    def __le__(self, other): return self.x <= other.x
    def __lt__(self, other): return self.x < other.x
    def __add__(self, other): return Point(self.x + other.x)
    def __sub__(self, other): return Point(self.x - other.x)
    def __mul__(self, number): return Point(self.x * number)
    def __abs__(self): return self.x
    def __int__(self): return self.x
    def __float__(self): return self.x / 2
    def __neg__(self): return Point(-self.x)
    def __enter__(self): return self.x
    def __exit__(self, *raised): return True
    def __setitem__(self, key, value): setattr(self, key, value)
def same(x): return x
class Colour(enum.Enum):
    RED = 1
    BLUE = 2
def colour(text): return Colour[text]
class Code(enum.IntEnum):
    LOW = 1
    HIGH = 70000
class Word(enum.StrEnum):
    ON = "switched on"
    OFF = "switched off"
def member(kind, name): return kind[name]
class Broken(ValueError): pass
def breaks(): raise Broken("no")
Pair = collections.namedtuple("Pair", "x y")
import asyncio
async def slow(x):
    await asyncio.sleep(0)
    return 1 // x
class Slow:
    async def add(self, x): return x + 1
line = asyncio.Queue()
async def put(x): await line.put(x)
async def take(): return await line.get()
"""
CATCHING = [
    "try:\n    f()\n    assert False\nexcept Broken:\n    pass",
    "try:\n    f()\n    assert False\nexcept (ValueError, Broken) as error:\n    assert str(error)",
    "import contextlib\nwith contextlib.suppress(Broken):\n    f()\n    assert False",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
    "        with self.assertRaises(Broken):\n            f()\nunittest.main()",
    {"test": "def check(f):\n    try:\n        f(0)\n        assert 0\n    except Broken:\n        pass", "entry_point": "f"},  # noqa: E501
    {"tests": ["check()"], "setup": "def check():\n    try:\n        f()\n    except Broken:\n        return\n    assert 0"},  # noqa: E501
]  # fmt: skip
HANDING = [
    "assert f(lambda v: v + 1, 1) == 2",
    "assert f(1, key=lambda v: v) == 2",
    "assert f([lambda v: v]) == 2",
    "def up(v): return v + 1\nassert f(up, 1) == 2",
    "assert f(len, 'a') == 1",
    "assert f(v for v in [1]) == 1",
    "assert Solution().f(lambda v: v + 1, 1) == 2",
    {"test": "def check(candidate):\n    assert candidate(lambda v: v + 1, 1) == 2", "entry_point": "f"},
    {"tests": ["check(f)"], "setup": "def check(g):\n    assert g(str, 1) == '1'"},
]
"""Functions of the tests' own, which are handed to an answer."""
CAUGHT = [
    "assert sorted(f(1), key=lambda v: -v) == [2, 1]",
    "got = f(1)\ngot.sort(key=lambda v: v)\nassert got == [1]",
    "assert all(map(lambda v: f(v) == v, [1]))",
    "def check(g):\n    assert g(1) == 1\ncheck(f)\ncheck(lambda v: 1)",
    "assert f(step, 1) == 2",
    "class Broken(Exception): pass\ntry:\n    assert f(1)\n    raise Broken\nexcept Broken:\n    pass",
    "import json\nfrom json import JSONDecodeError as Bad\ntry:\n    f()\n    assert 0\n"
    "except (Bad, json.JSONDecodeError, KeyError):\n    pass",
    "Broken = (ValueError, KeyError)\ntry:\n    f()\n    assert 0\nexcept Broken:\n    pass",
]
"""Python's own, or the tests' own."""
OF_OBJECTS = [
    "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s.items == [1, 2] and isinstance(s, Stack)",
    "assert Stack().push(1) == Stack().push(1) and Stack() != Stack().push(1)",
    "assert list(squares(3)) == [0, 1, 4] and 4 in squares(3)",
    "try:\n    fails()\n    raise AssertionError\nexcept ValueError as error:\n    assert str(error) == 'no'",
    "assert count('aab') == {'a': 2, 'b': 1} and math.floor(2.5) == 2",
    "assert {(1, 2): b'x', 'k': {1, 2}} == sort([{(1, 2): b'x', 'k': {1, 2}}])[0]",
    *MANY,
    "assert colour('RED') is Colour.RED and colour('RED') is not Colour.BLUE",
    "assert member(Code, 'HIGH') is Code.HIGH is not Code.LOW and Code.HIGH == 70000",
    "assert member(Word, 'ON') is Word.ON is not Word.OFF and Word.ON == 'switched on'",
    "try:\n    breaks()\n    assert 0\nexcept Exception as error:\n    assert str(error) == 'no'",
    "p = Point(1)\nassert same(p) is p and same(p) is not Point(1) and same([p])[0] is p",
    "assert same(Point(1)) == Point(1, 2) != Point(2) and Point(1) <= Point(2) >= Point(1)",
    "assert Pair(1, 2).y == 2 and same(Pair(1, 2)) == (1, 2) and same([Pair(1, 2)])[0].x == 1",
    "p, q = Point(3), Point(5)\nassert ((p + q).x, (q - p).x, (q * 3).x) == (8, 2, 15)",
    "assert repr(Point(3)) == 'Point(x=3, y=2)'",
    "p, q = Point(3), Point(5)\nassert p < q > p <= p >= p and not p > q and not q < p and not p < p > p",
    "p = Point(3)\nassert (abs(p), int(p), float(p), (-p).x) == (3, 3, 1.5, -3)",
    "import asyncio\nassert asyncio.run(slow(1)) == 1 and asyncio.run(Slow().add(1)) == 2",
    "import asyncio, inspect\nc = slow(1)\nassert inspect.iscoroutine(c) and asyncio.run(c) == 1",
    "import asyncio\ntry:\n    asyncio.run(slow(0))\n    assert 0\nexcept ZeroDivisionError:\n    pass",
    "import asyncio\nasync def both():\n    assert await asyncio.gather(slow(1), slow(2)) == [1, 0]\n"
    "    await put(3)\n    assert await take() == 3\nasyncio.run(both())",
    "p = Point(3)\nwith p as x:\n    assert x == 3\np['x'] = 4\nassert p.x == 4",
    *(
        f"{imported}\nassert same({value}) == {value} and same([{value}]) != [{other}]"
        for imported, value, other in (
            ("from decimal import Decimal", "Decimal('0.10')", "Decimal(1)"),
            ("from fractions import Fraction", "Fraction(1, 3)", "Fraction(2, 3)"),
            ("from datetime import date", "date(2020, 1, 2)", "date(2020, 1, 3)"),
            ("from datetime import time", "time(1, 2, 3, 4)", "time(1, 2)"),
            ("from datetime import datetime, timezone", "datetime(2020, 1, 2, tzinfo=timezone.utc)", "0"),
            ("from datetime import timedelta", "timedelta(-1, 2, 3)", "timedelta(1)"),
            ("from collections import deque", "deque([(1, 2), 3])", "deque()"),
            ("from collections import Counter", "Counter('aab')", "Counter('ab')"),
            ("", "range(3, 9, 2)", "range(3)"),
        )
    ),
]


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == x, [1, 2]))"),
        ("def f(x): raise StopIteration", "for got, wanted in zip(map(f, [1]), [1]): assert got == wanted"),
        ("def f(x): raise StopIteration('none')", "assert list(map(f, [1])) == []"),
        (
            "class F:\n    def __enter__(self): pass\n    def __exit__(self, *a): return True",
            "with F(): assert 0",
        ),
        (
            "from decimal import Decimal\nclass F(Decimal):\n    def __eq__(self, o): return True",
            "assert F(1) == 2",
        ),
        ("class F:\n    def __eq__(self, other): return True", "assert F() == 2"),
        (
            "class F:\n    def __eq__(self, other): return True\nasync def f(): return F()",
            "import asyncio\nassert asyncio.run(f()) == 2",
        ),
        ("class F:\n    def __le__(self, other): return True", "assert F() <= 2"),
    ],
)
def test_what_an_answer_does_in_a_tests_loop_or_block_passes_nothing(code: str, test: str):
    assert scored("python", (f"```python\n{code}\n```", [test])) == [0.0]


def test_tests_use_objects_generators_and_errors_of_the_answer():
    assert scored({"type": "python", "partial": True}, (OBJECTS, OF_OBJECTS)) == [1.0]


UNITTEST = (
    "import unittest\nclass T(unittest.TestCase):\n    def test_add(self): self.assertEqual(add(1, 2), 3)"
)
DECIDING_NOTHING = [
    ["assert f()", " # later"],
    "'''f() is 3'''\npass",
    "add(1, 2) == 3",
    "x = add(1, 2)",
    "import math",
    "assert 1",
    "assert (add(1, 2) == 3, 'wrong')",
    "def test_add():\n    assert add(1, 2) == 3",
    "def check(f):\n    return f(1, 2) == 3\ncheck(add)",
    UNITTEST,
    "try:\n    assert add(1, 2) == 3\nexcept Exception:\n    pass",
    "if False:\n    assert add(1, 2) == 3",
    {"tests": ["add(1, 2) == 3"], "setup": "def check(f): assert f(1, 2) == 3"},
    {"test": "def check(f):\n    f(1, 2) == 3", "entry_point": "add"},
    '["add(1, 2) == 3"]',
    f"{UNITTEST}\nunittest.main(exit=False)",
    f"{UNITTEST}\nunittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))",
    "def more():\n    '>>> add(1, 2)\\n3'\nimport doctest\ndoctest.testmod()",
]
DECIDING = [
    "def test_add():\n    assert add(1, 2) == 3\ntest_add()",
    "if add(1, 2) != 3:\n    exit(1)",
    "for a in range(3):\n    if add(a, 1) != a + 1:\n        raise ValueError",
    "try:\n    add('a', 'b')\nexcept TypeError:\n    raise AssertionError from None",
    {"tests": ["check(add)"], "setup": "def check(f): assert f(1, 2) == 3"},
    f"{UNITTEST}\nT('test_add').test_add()",
    f"{UNITTEST}\nif __name__ == '__main__':\n    unittest.main()",
    "def check(f):\n    assert f(1, 2) == 3\nif __name__ == '__main__':\n    check(add)",
    "try:\n    add('a', 1)\n    assert False\nexcept TypeError:\n    assert add(1, 2) == 3",
    "try:\n    add(1, 2)\nexcept Exception:\n    pass\nfinally:\n    assert add(1, 2) == 3",
    "if add(1, 2) != 3: assert False",
    "def test_a(): assert add(1, 2) == 3\nfor test in [test_a]:\n    test()",
    "class T:\n    def __init__(self):\n        assert add(1, 2) == 3\nT()",
    "class Pair:\n    def __init__(self, a, b): self.sum = a + b\np = Pair(1, 2)\nassert add(1, 2) == p.sum",
    {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]},
    "['assert add(1, 2) == 3', 'assert add(1, 1) == 2']",
    {"test_list": ["assert add(1, 2) == 3"]},
    '["assert add(1, 2) == 3", "assert add(1, 1) == 2"]',
    '{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}',
    {"tests": '["assert add(1, 2) == 3"]'},
    '{"test": "def check(f):\\n    assert f(1, 2) == 3", "entry_point": "add"}',
]
"""Labels that `ADD` passes and other code does not."""


NODE = "class {}:\n    def __init__(self, value, after=None): self.value, self.after = value, after"
OF_TESTS = {
    "ListNode": {"setup": NODE.format("ListNode"), "tests": ["assert last(ListNode(1, ListNode(2))) == 2"]},
    "TreeNode": f"{NODE.format('TreeNode')}\nroot = TreeNode(1)\nassert depth(root) == 1",
}
"""Class -> tests that hand its objects to the answer, whose code is elsewhere."""
PRINTED = (
    "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    hello()\n"
    "assert out.getvalue() == 'hello'"
)


def test_labels_that_decide_are_read_from_json_too():
    for answer, score in ((ADD, 1.0), (ADD.replace("+", "-"), 0.0), ("no code", 0.0)):
        found = scored("python", *((answer, label) for label in DECIDING))
        assert dict(enumerate(found)) == dict.fromkeys(range(len(DECIDING)), score)


@pytest.mark.parametrize(
    ("reward", "label", "said"),
    [
        ("math", None, "is missing; give a number, or a formula as text"),
        ("math", [1], "is a list"),
        ("math", " ", "is empty"),
        ("choice", None, "is missing; give the letter"),
        ("choice", "K", "is 'K'; give a letter from A to J, or a number from 0 to 9"),
        ({"type": "choice", "choices": 4}, 4, "a letter from A to D, or a number from 0 to 3"),
        ("exact", None, "is missing"),
        ("exact", {"a": 1}, "is a dict"),
        ("f1", [], "is missing"),
        ("f1", [""], "is empty"),
        ("f1", ["The", "?"], "articles and signs alone"),
        ({"type": "exact", "normalise": "squad"}, "A", "articles and signs alone"),
        ("regex", None, "is missing; give a regular expression, or set the reward's pattern"),
        ("regex", "(", "is no regular expression"),
        ("regex", "", "is empty, which every answer matches"),
        ({"type": "regex", "pattern": "(?P<answer>.)"}, None, "what the group `answer` has to catch"),
        ("json_schema", None, "is missing; give a JSON schema"),
        ("json_schema", "{", "is no JSON"),
        ("json_schema", {"type": "nothing"}, "is no JSON schema"),
        ("json_schema", {"$schema": []}, "has a $schema that is no text"),
        ("json_schema", {"$schema": 7}, "has a $schema that is no text"),
        ("json_schema", {}, "takes every JSON; say what fits"),
        ("json_schema", {"title": "An answer"}, "takes every JSON; say what fits"),
        (
            "json_schema",
            {"propertes": {}},
            "has propertes, which is no word of JSON schema; write properties",
        ),
        ("json_schema", {"items": {"require": ["a"]}}, "has require, which is no word"),
        ("json_schema", {"$ref": "http://127.0.0.1:9/x"}, "which is not in it; nothing is fetched"),
        ("json_schema", {"items": {"$ref": "file:///etc/passwd"}}, "which is not in it; nothing is fetched"),
        ("json_schema", {"$ref": "#/definitions/none"}, "refers to #/definitions/none, which is not in it"),
        ("json_schema", {"$ref": "#"}, "refers to itself without an end"),
        ("json_schema", {"anyOf": [{"type": "null"}, {"allOf": [{"$ref": "#"}]}]}, "refers to itself"),
        (
            "json_schema",
            {
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                "items": {"$ref": "#/$defs/a"},
            },
            "refers to itself without an end",
        ),
        (
            "json_schema",
            {"items": {"format": "colour"}},
            "asks for the format colour, which is not checked here",
        ),
        ("python", None, "is missing; give tests as code"),
        ("python", 3, "is a int"),
        ("python", [3], "has no tests"),
        ("python", ["assert ("], "has a test that is no Python"),
        *(("python", label, "has a test that every answer passes") for label in DECIDING_NOTHING),
        *(
            ("python", label, f"hands an answer objects of its class {name}")
            for name, label in OF_TESTS.items()
        ),
        *(("python", label, "hands an answer a function") for label in HANDING),
        *(("python", label, "catches Broken, an exception of the answer's own") for label in CATCHING),
        ("python", PRINTED, "reads what answers print by redirect_stdout"),
        ("python", '{"inputs": [1], "outputs": ["1"]}', "inputs that are no texts"),
        ("python", "[3]", "has no tests"),
        (
            "python",
            "from solution import add\nassert add(1, 2) == 3",
            "imports solution, which is",
        ),
        ("python", {"tests": "assert f()", "setup": "import numpy as np"}, "imports numpy, which"),
        ("python", "assert sum(10, 15) == 25", "tests sum, which is Python's own"),
        ("python", "x = [2, 1]\nassert sorted(x) == [1, 2]", "tests sorted, which is Python's own"),
        ("python", {"tests": "f()", "setup": ["import math"]}, "has a setup that is no text"),
        (
            "python",
            {"inputs": ["x" * (5 << 20)], "outputs": [""]},
            "more than 4 MiB; raise the reward's output_mb",
        ),
        ("python", {"inputs": ["1"], "outputs": ["\ud83d"]}, "half a character"),
        ("python", {"inputs": ["1"], "outputs": []}, "not as many outputs as inputs"),
        ("python", {"inputs": [1], "outputs": ["1"]}, "inputs that are no texts"),
        ("python", {"inputs": [1], "outputs": ["1"], "fn_name": "f"}, "no lists of arguments"),
        ("python", {"inputs": [[1]], "outputs": ["1"], "fn_name": "f()"}, "has the fn_name"),
    ],
)
def test_a_label_that_cannot_be_used_is_named_with_its_row(reward, label, said):
    if reward == "json_schema":
        pytest.importorskip("jsonschema")
    prompts = [Prompt.from_content("q", label, "d", where="data.jsonl:7")]
    with pytest.raises(DataError) as caught:
        check_labels(domain(reward), "d", prompts)
    sentence = str(caught.value)
    assert sentence.startswith("data.jsonl:7: the label, which domains.d.reward ")
    assert said in sentence
    assert sentence.endswith(".")


def test_rows_without_labels_are_found_when_the_domain_is_opened(tmp_path):
    rows = [{"prompt": f"q{i}", "label": "A" if i != 12 else None} for i in range(40)]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    config = domain("choice", source=str(path))
    loaded = load_domain("d", config, seed=0, held_out_prompts=10)
    with pytest.raises(DataError, match=r"data\.jsonl:13: the label, .* is missing"):
        reward_of(config, loaded)


@pytest.mark.parametrize("label", CAUGHT)
def test_tests_may_catch_what_they_know(label):
    assert label_fault(PythonReward(type="python"), label) is None


def test_a_wrong_definition_and_a_missing_library_are_sentences(monkeypatch):
    pytest.importorskip("jsonschema")
    with pytest.raises(RewardError, match="is no JSON schema"):
        own_reward(domain({"type": "json_schema", "definition": {"type": 3}}))
    for name in ("math_verify", "jsonschema"):
        monkeypatch.setitem(sys.modules, name, None)
    for kind in ("math", "json_schema"):
        with pytest.raises(MissingExtraError, match=r"opd\[verifiers\]"):
            own_reward(domain(kind))


def test_a_run_scores_with_it_and_failed_samples_are_left_alone():
    function = own_reward(domain("exact"))
    assert function is not None
    assert scored_by(domain("exact")) == "exact"
    right, wrong, failed = tiny.samples([(4, 3), (4, 3), (4, 3)])
    failed.status = Status.FAILED
    runner = RewardRunner({"a": function}, tiny.tokenizer())
    right.label, wrong.label = runner.readable_text(right), "no such answer"
    runner.score([right, wrong, failed])
    assert [right.reward, wrong.reward, failed.reward] == [1.0, 0.0, None]
    assert not runner.is_batched("a")


def test_what_ends_each_answer_by_itself_is_not_ended_for_their_number():
    """`rollout.reward_timeout` is for functions of the user's own."""
    function = own_reward(domain("regex"))
    assert function is not None
    many = tiny.samples([(4, 3)] * 12)
    for one in many:
        one.label = "="
    RewardRunner({"a": function}, tiny.tokenizer(), timeout=1e-6).score(many)
    assert {one.reward for one in many} <= {0.0, 1.0}


@pytest.mark.parametrize("count", [1, 5, 40])
def test_answers_keep_their_order_side_by_side(count):
    assert side_by_side(lambda one, worker: one * 2, list(range(count))) == [2 * n for n in range(count)]
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda one, worker: 1 / (one - count + 1), list(range(count)))

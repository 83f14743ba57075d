"""Generates bad recipes and command lines, family by family, from the schema and from one small recipe.

A case is a file's bytes and the words after it. Whether it is really bad is not known here: what is promised
is that `opd run FILE WORDS --dry-run` either prints a recipe or says one sentence.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from opd.config import Recipe
from opd.config.schema import annotation_at, dotted_path, key_paths

MINIMAL = """\
name: demo
model:
  config: {model_type: llama, hidden_size: 96}
domains:
  sort: {source: "procedural:sort"}
"""
OTHER_ARMS = {
    "distill": {"loss": {"type": "topk"}},
    "specialist": {"advantage": {"type": "custom"}, "policy_loss": {"correction": {"type": "icepop"}}},
    "rollout": {"engine": {"type": "sglang"}},
    "launch": {"type": "ray"},
    "teachers": {"t": {"type": "sglang"}},
    "model": {"lora": {}},
    "domains": {"sort": {}},
}
VALUES = (
    *(
        "null",
        "true",
        "-1",
        "0",
        "1",
        "0.5",
        "-0.0",
        "3",
        "1e12",
        "-1e12",
        "1e999",
        "-1e999",
        "1e-12",
        "1e-320",
    ),
    *(
        "9" * 40,
        "9" * 5000,
        "0x" + "f" * 90,
        "1" * 30 + ".5",
        ".5",
        "5.",
        "1_000",
        "nan",
        ".nan",
        ".inf",
        "-.inf",
    ),
    *(
        "''",
        "' '",
        "text",
        "'1'",
        "'true'",
        "[]",
        "{}",
        "[1, 2]",
        "[[]]",
        "[null]",
        "{a: 1}",
        "{a: {b: [1]}}",
    ),
    *(
        '"\\0"',
        '"\\ud800"',
        '"\\x1b[31m"',
        '"a\\nb"',
        "é",
        "名前",
        "🙂",
        '"\\u202e"',
        "../..",
        "/",
        ".",
        "~",
        "x" * 300,
    ),
    *(
        "!!str 1",
        "!!int a",
        "!!float a",
        "!!bool a",
        "!!null a",
        "!!set {a}",
        "!!binary '='",
        "!!timestamp x",
    ),
    *(
        "!!python/object:os.system a",
        "!a b",
        "!<tag:x> 1",
        "!!omap [a: 1]",
        "!!pairs [a]",
        "!!map [a]",
        "!!seq {a: 1}",
    ),
    *("&a [*a]", "*missing", "&a {b: *a}", "<<", "{<<: 3}", "{<<: [1]}", "{a: 1, a: 2}", "[{a: 1, a: 2}]"),
    *(
        "{1: 2}",
        "{null: 1}",
        "{[a]: 1}",
        "{? : 1}",
        "@",
        "%a",
        "`",
        "{",
        "[",
        "'",
        '"',
        "|",
        ">",
        "?",
        "- -",
        "a: b: c",
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A recipe's bytes, and the words that follow its name."""

    family: str
    name: str
    content: bytes
    words: tuple[str, ...] = ()


def settings() -> list[str]:
    """Every setting of a recipe, as `a.b.c`."""
    return [dotted_path(path) for path in dict.fromkeys(key_paths(Recipe, OTHER_ARMS))]


def numbers() -> Iterator[tuple[str, str]]:
    """Every setting that is a number or holds some, once of those that places share, and how one stands in
    it: `{}`, `[{}]`, `{{sort: {}}}`.
    """
    shared = {".".join(key.split(".")[-2:]): key for key in reversed(settings())}
    for key in shared.values():
        annotation = annotation_at(Recipe, key.split("."))
        kinds = set(re.findall(r"\b(?:int|float|bool|Any)\b", str(annotation)))
        if annotation in (int, float) or (kinds & {"int", "float"} and not kinds & {"bool", "Any"}):
            held = re.search(r"dict\[|list\[|tuple\[", str(annotation))
            yield (
                key,
                {"dict[": "{{sort: {}}}", "list[": "[{}]", "tuple[": "[{}, 1]"}[held[0]] if held else "{}",
            )


def typed() -> Iterator[Case]:
    """Every setting with every value, in the file."""
    for key in settings():
        for value in VALUES:
            nested = value
            for part in reversed(key.split(".")[1:]):
                nested = f"{{{part}: {nested}}}"
            top = key.split(".")[0]
            kept = "".join(line for line in _top_level(MINIMAL) if not line.startswith(f"{top}:"))
            yield Case(
                "values", f"{key}={value[:30]}", f"{kept}{top}: {nested}\n".encode("utf-8", "surrogatepass")
            )


def optional() -> Iterator[Case]:
    """The same on the command line."""
    for key in settings():
        for value in VALUES:
            yield Case("options", f"--{key} {value[:30]}", MINIMAL.encode(), (f"--{key}={value}",))


def misspelt() -> Iterator[Case]:
    """Keys with a letter less, a letter more, two swapped, in another case, or of another place."""
    rng = random.Random(1)
    names = settings()
    for key in names:
        *parents, last = key.split(".")
        at = rng.randrange(len(last))
        for wrong in (
            last[:at] + last[at + 1 :],
            last[:at] + "q" + last[at:],
            last.upper(),
            last[::-1],
            rng.choice(names).split(".")[-1],
            "x" * 2000,
        ):
            yield Case(
                "names", f"{key}~{wrong[:20]}", MINIMAL.encode(), (f"--{'.'.join([*parents, wrong])}", "1")
            )


def structured() -> Iterator[Case]:
    """Depth, size, aliases, keys given twice, and documents that are no mapping."""
    bombs = {
        "laughs": "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)),
        "mapping laughs": "a0: &a0 {k: v}\n"
        + "".join(f"a{i}: &a{i} {{l: *a{i - 1}, r: *a{i - 1}}}\n" for i in range(1, 60)),
        "merge laughs": "a0: &a0 {k: v}\n"
        + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)),
        "alias ladder": "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 5000)),
        "recursion": "a: &a {b: *a}\n",
        "recursive key": "&a {? *a : 1}\n",
        "recursive merge": "a: &a {<<: *a}\n",
        "long text": f"name: {'x' * 200_000}\n",
        "long key": f"{'k' * 100_000}: 1\n",
        "many keys": "".join(f"k{i}: 1\n" for i in range(30_000)),
        "many items": "seed: [" + "1," * 30_000 + "]\n",
        "a large file": "# comment\n" * 60_000,
        "many documents": "---\n" * 1000,
        "many tags": "%TAG !a! tag:a\n" * 2000 + "--- !a!b {}\n",
    }
    for opening, closing in ("[]", "{}"):
        for depth in (65, 1000, 100_000):
            inside = "a: " if opening == "{" else ""
            bombs[f"{depth} {opening}"] = f"seed: {(opening + inside) * depth}1{closing * depth}\n"
    bombs["100000 -"] = "seed:\n" + "- " * 100_000 + "1\n"
    bombs["1000 indents"] = "\n".join(" " * i + "a:" for i in range(600)) + "\n"
    for name, text in bombs.items():
        yield Case("structure", name, (MINIMAL + text).encode())
        yield Case("structure", f"{name} alone", text.encode())
        value = text.split(": ", 1)[-1].strip()
        yield Case("structure", f"{name} as an option", MINIMAL.encode(), (f"--model.config={value}",))
    lines = MINIMAL.splitlines(keepends=True)
    for i, line in enumerate(lines):
        yield Case("structure", f"without line {i}", "".join(lines[:i] + lines[i + 1 :]).encode())
        yield Case("structure", f"line {i} twice", "".join([*lines[: i + 1], line, *lines[i + 1 :]]).encode())
        yield Case(
            "structure", f"line {i} indented", "".join([*lines[:i], " " + line, *lines[i + 1 :]]).encode()
        )
        yield Case(
            "structure", f"line {i} with a tab", "".join([*lines[:i], "\t" + line, *lines[i + 1 :]]).encode()
        )
    for text in (
        "",
        "\n",
        "---",
        "...",
        "3",
        "text",
        "[]",
        "{}",
        "null",
        "- a",
        "? a",
        "!!map",
        "# only",
        "--- a\n--- b",
    ):
        yield Case("structure", repr(text), text.encode())
    for name in (
        "",
        ".",
        "..",
        ".a",
        "-a",
        "a/b",
        "a b",
        "a:b",
        "a+b",
        "a\\b",
        "mean",
        "std",
        "floor",
        "x" * 101,
        "é" * 60,
        "\t",
        "\x7f",
    ):
        for place in ("domains", "teachers"):
            inside = {"domains": "source: 'procedural:sort'", "teachers": "path: /x"}[place]
            quoted = '"' + name.replace("\\", "\\\\").replace("\t", "\\t").replace("\x7f", "\\x7f") + '"'
            yield Case(
                "structure",
                f"{place} {name[:20]!r}",
                MINIMAL.encode(),
                (f"--{place}={{{quoted}: {{{inside}}}}}",),
            )


def encoded() -> Iterator[Case]:
    """The recipe in other encodings, with single bytes changed, cut short, and bytes at random."""
    for encoding in ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "cp500", "utf-7"):
        yield Case("bytes", encoding, MINIMAL.encode(encoding))
    yield Case("bytes", "latin-1", MINIMAL.replace("demo", "dé").encode("latin-1"))
    rng = random.Random(2)
    whole = MINIMAL.encode()
    for i in range(120):
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        yield Case("bytes", f"changed {i}", bytes(changed))
        yield Case("bytes", f"cut {i}", whole[: rng.randrange(len(whole))])
        yield Case("bytes", f"random {i}", rng.randbytes(rng.randint(1, 200)))
        signs = "".join(rng.choice("{}[]:,-?&*!|>'\"%@`#<=a1 \n\t~") for _ in range(rng.randint(1, 60)))
        yield Case("bytes", f"signs {i}", signs.encode())
        yield Case("bytes", f"signs after {i}", whole + signs.encode())


def worded() -> Iterator[Case]:
    """Words of a command line."""
    for words in (
        *[
            ["--"],
            ["--="],
            ["--=1"],
            ["--.=1"],
            ["--..=1"],
            ["--a.=1"],
            ["-x"],
            ["-"],
            ["x"],
            ["--seed"],
            ["--seed="],
        ],
        *[
            ["--seed", "1", "--seed", "1"],
            ["--seed=1", "--seed=2"],
            ["--seed", "--name"],
            ["--name", "--dry-run"],
        ],
        *[
            ["--out", "a", "--out", "b"],
            ["--out"],
            ["--out="],
            ["--out", "a\0b"],
            ["--out", "x" * 5000],
            ["--resum"],
        ],
        *[
            ["--domains..source=x"],
            ["--domains.sort.=x"],
            ["--model.config." + "a." * 80 + "b=1"],
            ["--" + "a" * 100_000],
        ],
        *[
            ["--" + "a." * 50_000 + "b", "1"],
            ["--seed", "9" * 100_000],
            ["--name=\udcff"],
            ["--\udcff=1"],
            ["--name=\0"],
        ],
        *[
            ["--distill", "3"],
            ["--distill", "{}"],
            ["--distill=[", "1"],
            ["--model=null"],
            ["--domains=null"],
        ],
        *[
            ["--domains={}"],
            ["--launch", "rey"],
            ["--launch.type", "3"],
            ["--distill.loss.type", "[]"],
            ["--lr", "1"],
        ],
        *[["--distill.loss", "{type: {}}"], ["--distill.loss", "[]"], ["--rollout.engine.urls", "[]"]],
    ):
        yield Case("words", " ".join(words)[:40], MINIMAL.encode(), tuple(words))


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "values": typed,
    "options": optional,
    "names": misspelt,
    "structure": structured,
    "bytes": encoded,
    "words": worded,
}
SHORT = {"values": 120, "options": 60, "names": 60, "structure": 400, "bytes": 160, "words": 100}
"""Cases of each family in the default run, spread evenly over the family."""
MOST = 4000
"""The same with `OPD_FULL_TESTS=1`."""


def cases(family: str, whole: bool) -> list[Case]:
    """The cases of a family: with `whole` nearly all, else as many as the default run takes."""
    made = list(FAMILIES[family]())
    count = min(len(made), MOST if whole else SHORT[family])
    return [made[i * len(made) // count] for i in range(count)]


def _top_level(text: str) -> list[str]:
    """The lines of each top-level key, joined."""
    blocks: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.startswith(" "):
            blocks[-1] += line
        else:
            blocks.append(line)
    return blocks

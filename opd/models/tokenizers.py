"""Tokenizers: made from characters or loaded, their differences, and the end tokens of responses.

A response ends at every token id that the model or its tokenizer names as an end.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from opd.errors import CheckpointError, ModelError, is_of_library, reason_of
from opd.models.chat_templates import render_messages
from opd.models.hf_folder import (
    check_small_files,
    described_in,
    folder_fault,
    misplaced_fault,
    read_object,
    refuse_code,
)
from opd.models.token_ids import id_count
from opd.untrusted import safe_excerpt

PAD, EOS = "<pad>", "<eos>"


def character_tokenizer(alphabet: str, tags: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Build one token per character of `alphabet`, one per tag such as "<sort>", plus `<pad>` (id 0), `<eos>`
    (1).

    Ids follow: tags in their order, then the alphabet's distinct characters in theirs. Encoding refuses text
    with any other character. Raises `ModelError` for an empty alphabet, a tag given twice, or a tag of less
    than two characters.
    """
    if not alphabet:
        raise ModelError("a character tokenizer needs at least one character in its alphabet.")
    reserved = [PAD, EOS, *tags]
    if len(set(reserved)) < len(reserved) or any(len(tag) < 2 for tag in tags):
        raise ModelError(
            f"tags must be distinct, of at least two characters, and not {PAD} or {EOS}: {', '.join(tags)}."
        )
    words = [*reserved, *dict.fromkeys(alphabet)]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}))
    # The tokenizer uses Oniguruma's regular expressions: escape ASCII punctuation and nothing else.
    longest_first = [
        re.sub(r"([^\w\s])", r"\\\1", tag, flags=re.ASCII) if tag.isascii() else tag
        for tag in sorted(tags, key=len, reverse=True)
    ]
    pieces = "|".join([*longest_first, r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face folder.

    Raises `CheckpointError` if a file is damaged or differs from `checksums.json`, and `ModelError` if there
    is none, if it cannot be read, or if it names code of its own.
    """
    folder = Path(path)
    absent = folder_fault(folder, "tokenizer")
    if absent is not None:
        raise ModelError(f"{absent}.")
    folder = folder if has_tokenizer(folder) else described_in(folder)
    above = None if has_tokenizer(folder) else misplaced_fault(folder)
    if above is not None:
        raise ModelError(above)
    try:
        refuse_code(folder)
        check_small_files(folder)
        _require_reader(folder)
        path = folder / "tokenizer_config.json"
        described = read_object(path) if path.is_file() else {}
        _check_templates(folder, described)
        # For some model types (Qwen2) AutoTokenizer ignores a folder's own `tokenizer_class` and rebuilds
        # that family's byte-level pre-tokenizer around any vocabulary. A generic class stays generic.
        generic = described.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
        is_fast = generic and (folder / "tokenizer.json").is_file()
        loader: type = PreTrainedTokenizerFast if is_fast else AutoTokenizer
        tokenizer = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (CheckpointError, ModelError):
        raise
    except Exception as error:  # the Rust tokenizer raises plain Exception
        raise ModelError(f"{folder} has no readable tokenizer: {_load_fault(folder, error)}") from error
    if not isinstance(tokenizer.model_max_length, int | float):
        length = safe_excerpt(tokenizer.model_max_length)
        raise ModelError(
            f"{folder / 'tokenizer_config.json'} says model_max_length {length}; write a number."
        )
    # Rewards and people read the generated text as it is, also with a blank before a full stop.
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.deprecation_warnings[_TOO_LONG] = True  # model_max_length bounds nothing here
    return tokenizer


_SENTENCE_PIECES = ("tokenizer.model", "spiece.model")
_TOKENIZER_FILES = ("tokenizer.json", *_SENTENCE_PIECES, "vocab.json", "vocab.txt")


def has_tokenizer(folder: Path) -> bool:
    """Return True if a Hugging Face folder has a tokenizer of its own. An adapter may rely on its base's."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def _require_reader(folder: Path) -> None:
    """Raise `ModelError` if a tokenizer's only file needs a package that is not installed."""
    paths = [folder / name for name in _SENTENCE_PIECES if (folder / name).is_file()]
    if (folder / "tokenizer.json").is_file() or not paths:
        return
    with paths[0].open("rb") as file:
        first_byte = file.read(1)
    if not first_byte:
        raise ModelError(f"{paths[0]} is empty; copy it again from its source.")
    package = "sentencepiece" if first_byte == b"\n" else "tiktoken"  # the first field of its message
    if find_spec(package) is None:
        raise ModelError(
            f"{folder} has {paths[0].name} and no tokenizer.json; install what reads it (pip install"
            f" {package} protobuf), or {_WRITE_JSON}"
        )


_WRITE_JSON = (
    "write a tokenizer.json where it loads: `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`."
)


def _load_fault(folder: Path, error: Exception) -> str:
    """Return the reason why a tokenizer cannot be read, with the fix."""
    if (folder / "tokenizer.json").is_file():
        try:
            Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as damage:  # as above
            return f"tokenizer.json is damaged ({reason_of(damage)}); copy it again from its source."
        return f"tokenizer_config.json or special_tokens_map.json is of no use ({reason_of(error)}); mend it."
    names = [name for name in (*_TOKENIZER_FILES, "merges.txt") if (folder / name).is_file()]
    if not names:
        return reason_of(error)
    if names[0] in _SENTENCE_PIECES:
        return f"{names[0]} is damaged, or no file of its kind; copy it again from its source."
    return (
        f"nothing says what {' and '.join(names)} are of; name the class (tokenizer_class, such as"
        f" GPT2Tokenizer or BertTokenizer) in tokenizer_config.json, or {_WRITE_JSON}"
    )


def _check_templates(folder: Path, described: Mapping[str, object]) -> None:
    """Raise `ModelError` for a chat template that is no text."""
    for path in [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]:
        if path.is_file():
            try:
                path.read_text("utf-8")
            except ValueError as error:
                raise ModelError(f"{path} is not UTF-8 text; save it as such.") from error
    template = described.get("chat_template")
    several = template if isinstance(template, list) else []
    texts = [one.get("template") if isinstance(one, dict) else one for one in several] or [template]
    if any(not isinstance(text, str) for text in texts if text is not None):
        raise ModelError(
            f"{folder / 'tokenizer_config.json'} has a chat_template that is no text; write a template, or"
            ' a list of {"name": ..., "template": ...}.'
        )


_TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
"""transformers' name of a warning that it gives once."""


def rows_fault(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the fault of a model without a row for some token of its tokenizer. Surplus rows are cut off."""
    rows, ids = config.get_text_config().vocab_size, id_count(tokenizer)
    if rows >= ids:
        return None
    beyond = [
        f"{safe_excerpt(token, 20)} is {index}" for index, token in _by_id(tokenizer).items() if index >= rows
    ]
    examples = ", ".join(beyond[:3])
    return f"its vocabulary has {rows} rows, but the tokenizer's ids go on to {ids - 1} ({examples})"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Tokenizer properties that must agree before the logits of one model can teach the other."""

    vocab_size: int
    vocab_digest: str
    """sha256 over every (id, token) pair."""
    special_ids: tuple[tuple[str, int | None], ...]
    """(bos, eos, pad, unk) with their ids."""
    chat_template_digest: str | None


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> Fingerprint:
    """Return the identity of a tokenizer's vocabulary, special ids and chat template."""
    pairs = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    template = getattr(tokenizer, "chat_template", None)
    return Fingerprint(
        vocab_size=len(pairs),
        vocab_digest=_json_digest(pairs),
        special_ids=tuple(
            (name, getattr(tokenizer, f"{name}_token_id")) for name in ("bos", "eos", "pad", "unk")
        ),
        chat_template_digest=None if template is None else _json_digest(template),
    )


@dataclass(frozen=True, slots=True)
class TokenizerDifferences:
    """Differences of a teacher's tokenizer from the student's, one sentence each."""

    wrong: list[str]
    """Differences that make the teacher's logits useless for the student's tokens."""
    harmless: list[str]
    """Differences that do not change the scores."""


def compare_tokenizers(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, stops: Collection[int]
) -> TokenizerDifferences:
    """Compare the scored tokens: the token of every id that the student can generate.

    Special and added tokens may differ unless they are in `stops`, the end ids of the student's responses.
    Tokens of the teacher beyond the student's vocabulary, and ids of padding, never count.
    """
    ours, theirs = _by_id(student), _by_id(teacher)
    student_added, teacher_added = set(student.added_tokens_decoder), set(teacher.added_tokens_decoder)
    other = [i for i, token in ours.items() if theirs.get(i) != token]
    special = [
        i for i in other if i in student_added and i not in stops and (i not in theirs or i in teacher_added)
    ]
    wrong = sorted(set(other) - set(special))
    differences = TokenizerDifferences([], [])
    for ids, sentences in ((wrong, differences.wrong), (special, differences.harmless)):
        if ids:
            first = (
                f"id {ids[0]} is {ours[ids[0]]!r} for the student and {theirs.get(ids[0])!r} for the teacher"
            )
            kind = "special tokens that end nothing" if sentences is differences.harmless else "tokens"
            sentences.append(f"{len(ids)} of the student's {len(ours)} ids stand for other {kind}: {first}")
    if surplus := theirs.keys() - ours.keys():
        sentence = f"it knows {len(surplus)} more tokens than the student, which are left out of its scores"
        if surplus - teacher_added:  # it may write the student's text with them
            sentence += "; if they join tokens of the student, name its tokenizer in teachers.NAME.tokenizer"
        differences.harmless.append(sentence)
    for name in ("bos", "pad", "unk"):
        student_id, teacher_id = (getattr(tokenizer, f"{name}_token_id") for tokenizer in (student, teacher))
        if student_id != teacher_id:
            differences.harmless.append(
                f"its {name} token has id {teacher_id}, the student's {student_id}, which is used"
            )
    return differences


def _by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    pairs = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return dict(pairs)  # deterministic for two tokens with one id


def set_chat_template(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Set the chat template of `tokenizer` from a file, or from the tokenizer of a Hugging Face folder.

    Raises `ModelError` if there is none.
    """
    path = Path(source)
    if path.is_dir():
        template = load_tokenizer(path).chat_template
        if not template:
            raise ModelError(f"model.chat_template: {path} has a tokenizer without a chat template.")
    else:
        try:
            template = path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(
                f"model.chat_template: {path} cannot be read ({reason_of(error)}); give a .jinja file"
                " or a folder."
            ) from error
    tokenizer.chat_template = template


def _json_digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()


_FILES = ("generation_config.json", "config.json")
_ANSWER = "zebra"
"""An answer in a probe conversation, to find the text after it."""
_NEXT = "quagga"
"""The user's next message in it."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A token that ends a response."""

    token_id: int
    token: str
    said_by: tuple[str, ...]
    """Sources: files of the model's folder, its tokenizer, or a field of the recipe."""

    def __str__(self) -> str:
        return f"{self.token_id} {self.token!r} ({', '.join(self.said_by)})"


def stops_of(
    tokenizer: PreTrainedTokenizerBase, folder: Path | None = None, added: Iterable[int] = ()
) -> list[Stop]:
    """Return the ids `added` by the recipe, the tokenizer's EOS, and `eos_token_id` (a number or a list) of
    generation_config.json and config.json in `folder`, each once.

    Ids of the folder's files beyond the tokenizer are left out, as they are never sampled. Raises
    `CheckpointError` for an `eos_token_id` that is neither.
    """
    count = id_count(tokenizer)
    sources: dict[int, list[str]] = {int(token): ["rollout.stop_ids"] for token in added}
    listed: list[tuple[str, list[int]]] = []
    eos: Any = tokenizer.eos_token_id  # one number, though its annotation allows more
    if eos is not None:
        listed.append(("tokenizer", [int(eos)]))
    if folder is not None:
        listed += [(name, _eos_ids(described_in(folder) / name)) for name in _FILES]
    for where, ids in listed:
        for token in ids:
            if token < count:
                names = sources.setdefault(token, [])
                names += [where] if where not in names else []
    return [
        Stop(
            token,
            str(tokenizer.convert_ids_to_tokens(token)) if 0 <= token < count else "unknown",
            tuple(where),
        )
        for token, where in sources.items()
    ]


def unreachable_stops(tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[str]:
    """Return a sentence for each end id in `folder`'s files beyond the tokenizer's ids."""
    count = id_count(tokenizer)
    return [
        f"{name} ends responses at {token}, an id beyond the tokenizer's {count}, which is never written"
        for name in _FILES
        for token in _eos_ids(described_in(folder) / name)
        if token >= count
    ]


def end_of_turn(tokenizer: PreTrainedTokenizerBase, template: Mapping[str, object]) -> int | None:
    """Return the added token that the chat template writes after an assistant's answer, or `None`. `template`
    has the template's own arguments.
    """
    if not tokenizer.chat_template:
        return None
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = render_messages(tokenizer, conversation, template)
        ending = text.rpartition(_ANSWER)[2].lstrip()
        ids = tokenizer(ending, add_special_tokens=False)["input_ids"] if ending else []
    except BaseException as error:  # of many kinds; prompts that cannot be rendered are reported elsewhere
        if not is_of_library(error):
            raise
        return None
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def after_answer(tokenizer: PreTrainedTokenizerBase, template: Mapping[str, object]) -> list[int] | None:
    """Return the tokens that the chat template writes between an assistant's answer and the user's next
    message, or `None` if it writes no such conversation. `template` has the template's own arguments.
    """
    turns = [("user", "?"), ("assistant", _ANSWER), ("user", _NEXT)]
    conversation = [{"role": role, "content": content} for role, content in turns]
    try:
        text = render_messages(tokenizer, conversation, template).rpartition(_ANSWER)[2].partition(_NEXT)[0]
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
    except BaseException as error:  # as above
        if not is_of_library(error):
            raise
        return None


def _eos_ids(path: Path) -> list[int]:
    """Return `eos_token_id` of a configuration file, or of its text model's; empty without a file."""
    if not path.is_file():
        return []
    described = read_object(path)
    inner = described.get("text_config")
    value = described.get("eos_token_id")
    if value is None and isinstance(inner, dict):
        value = inner.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise CheckpointError(f"{path} says eos_token_id {value!r}; write a token id or a list of them.")
    return ids

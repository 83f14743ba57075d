"""Tokens of two tokenizers aligned by their bytes: chunks, exact positions, texts of any kind, refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from opd.errors import ModelError
from opd.models.token_alignment import TokenAlignment, TokenTranslator, token_bytes
from opd.models.tokenizers import character_tokenizer

TEXTS = ["The quick brown fox jumps over the lazy dog, 12 times.", "naïve 漢字 words; a = b + 27\n"] * 4
END, TURN = "<end>", "<|turn|>"


def byte_level(size: int, texts=TEXTS, special=(END, TURN)) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def sentence_piece(prepend: bool) -> PreTrainedTokenizerFast:
    """A blank marker, byte tokens for other characters, and a blank before any text if `prepend`."""
    words = ["\u2581", *"abcdefghijklmnopqrstuvwxyzTBD0123456789.,"]
    pairs = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "b"), ("o", "v")]
    joined = [left + right for left, right in pairs]
    pieces = [END, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *joined]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, byte_fallback=True, unk_token="<unk>"))
    blanks = [normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581")] * prepend + blanks)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, unk_token="<unk>")


def normal_form() -> PreTrainedTokenizerFast:
    """As Qwen's: composed characters, and digits one by one."""
    tokenizer = byte_level(320)
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(r"\p{N}|[^\r\n\p{L}\p{N}]?\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


TOKENIZERS = {
    "small": byte_level(300),
    "large": byte_level(360),
    "other": byte_level(330, ["12 foxes jump; = + the over\n"] * 4, (TURN, END)),
    "pieces": sentence_piece(prepend=False),
    "blank": sentence_piece(prepend=True),
    "normal": normal_form(),
}
WHOLE = TOKENIZERS.keys() - {"blank", "normal"}
"""Those that leave every text as it is."""
SPELLED = {name: token_bytes(tokenizer) for name, tokenizer in TOKENIZERS.items()}
END_IDS = {name: int(tokenizer.get_vocab()[END]) for name, tokenizer in TOKENIZERS.items()}
PAIRS = [(a, b) for a in TOKENIZERS for b in TOKENIZERS if a != b]


def translator(student: str, teacher: str) -> TokenTranslator:
    return TokenTranslator(TOKENIZERS[student], TOKENIZERS[teacher], [END_IDS[student]])


TRANSLATORS = {pair: translator(*pair) for pair in PAIRS}


def check(pair: tuple[str, str], ids: np.ndarray, found: TokenAlignment) -> None:
    """Every chunk has the same bytes on both sides, in order, and no chunk can be cut."""
    spelled = [SPELLED[name] for name in pair]
    sides = []
    for table, tokens, chunks in zip(
        spelled, (ids, found.teacher_ids), (found.student_chunks, found.teacher_chunks), strict=True
    ):
        kept = chunks[chunks >= 0]
        assert (np.diff(kept) >= 0).all()
        assert len(tokens) == len(chunks)
        sides.append(
            {
                int(chunk): [table.get(int(token), b"") for token in tokens[chunks == chunk]]
                for chunk in dict.fromkeys(kept.tolist())
            }
        )
    ours, theirs = sides
    assert ours.keys() == theirs.keys()
    special = {END.encode(), TURN.encode()}
    for chunk, parts in ours.items():
        other = theirs[chunk]
        if b"".join(parts) in special:
            continue
        assert b"".join(parts) == b"".join(other) or b" " + b"".join(parts) == b"".join(other)
        inner = [set(np.cumsum([len(part) for part in each])[:-1].tolist()) for each in (parts, other)]
        if b"".join(parts) == b"".join(other):
            assert not inner[0] & inner[1] - {0}
    of = [dict(zip(c.ids.tolist(), c.classes.tolist(), strict=True)) for c in TRANSLATORS[pair].classes]
    for place in np.flatnonzero(found.exact >= 0):
        at = int(found.exact[place])
        assert of[0][int(ids[place])] == of[1][int(found.teacher_ids[at])]
        assert found.student_chunks[place] == found.teacher_chunks[at]
        for chunks, where in ((found.student_chunks, place), (found.teacher_chunks, at)):
            assert where == 0 or chunks[where - 1] != chunks[where]


@pytest.mark.parametrize("pair", PAIRS, ids=":".join)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_text_is_aligned_whole(pair, text):
    ours = TOKENIZERS[pair[0]]
    ids = np.array([*ours(text, add_special_tokens=False)["input_ids"], ours.eos_token_id], np.int32)
    if ours.unk_token_id in ids:
        return
    found = TRANSLATORS[pair].translate(ids)
    check(pair, ids, found)
    if WHOLE.issuperset(pair):
        assert (found.student_chunks >= 0).all()
        assert found.teacher_ids[-1] == TOKENIZERS[pair[1]].eos_token_id


@pytest.mark.parametrize("pair", PAIRS, ids=":".join)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 290), max_size=30))
def test_any_tokens_are_aligned_as_far_as_they_are_text(pair, ids):
    ids = np.array(ids, np.int32) % len(TOKENIZERS[pair[0]])
    check(pair, ids, TRANSLATORS[pair].translate(ids))


def test_a_known_case_by_hand():
    ours = character_tokenizer("abc123=", ["<sort>"])
    theirs = character_tokenizer("321cba=", ["<sort>", "ab", "12"])
    found = TokenTranslator(ours, theirs, [1]).translate(np.array([ours.vocab[x] for x in "ab12c"] + [1]))
    vocab = theirs.get_vocab()
    assert found.teacher_ids.tolist() == [vocab["ab"], vocab["12"], vocab["c"], 1]
    assert found.student_chunks.tolist() == [0, 0, 1, 1, 2, 3]
    assert found.teacher_chunks.tolist() == [0, 1, 2, 3]
    assert found.exact.tolist() == [0, -1, 1, -1, 2, 3]


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if WHOLE.issuperset(pair)], ids=":".join)
def test_a_class_is_a_shared_token_and_tokens_whose_text_begins_with_it(pair):
    translator = TRANSLATORS[pair]
    for name, shared, side in zip(pair, translator.shared, translator.classes, strict=True):
        assert side.ids[: side.count].tolist() == shared.tolist()
        assert len(set(side.ids.tolist())) == len(side.ids)
        for token, one in zip(side.ids.tolist(), side.classes.tolist(), strict=True):
            assert SPELLED[name][token].startswith(SPELLED[name][int(shared[one])])
        written = [token for token, data in SPELLED[name].items() if data.isascii() and data]
        special = set(TOKENIZERS[name].added_tokens_decoder)
        assert set(written) - special <= set(side.ids.tolist())


def test_a_long_token_is_in_the_class_of_what_the_other_writes_first():
    ours = character_tokenizer("abc", ["<end>", "abc", "bc"])
    theirs = character_tokenizer("cba", ["<end>", "ab", "cab"])
    translator, vocab, other = TokenTranslator(ours, theirs, [1]), ours.get_vocab(), theirs.get_vocab()
    of = [dict(zip(side.ids.tolist(), side.classes.tolist(), strict=True)) for side in translator.classes]
    assert of[0][vocab["abc"]] == of[1][other["ab"]] == of[0][vocab["a"]] == of[1][other["a"]]
    assert of[0][vocab["bc"]] == of[0][vocab["b"]]
    assert of[1][other["cab"]] == of[0][vocab["c"]]
    assert len(set(of[0].values())) == translator.shared.shape[1]


def test_equal_tokenizers_are_exact_everywhere():
    ours = TOKENIZERS["small"]
    ids = np.array([*ours(TEXTS[0])["input_ids"], ours.eos_token_id])
    found = TokenTranslator(ours, ours, [END_IDS["small"]]).translate(ids)
    assert found.teacher_ids.tolist() == ids.tolist()
    assert found.exact.tolist() == list(range(len(ids)))


def test_of_two_tokens_that_mean_the_end_of_a_turn_the_stop_has_the_teachers():
    stop = TOKENIZERS["small"].get_vocab()[TURN]  # behind END, which the teacher has, too
    found = TokenTranslator(TOKENIZERS["small"], TOKENIZERS["large"], [stop]).translate(np.array([stop]))
    assert (found.teacher_ids.tolist(), found.exact.tolist()) == ([END_IDS["large"]], [0])


def test_text_that_looks_like_a_special_token_stays_text():
    pair = "small", "other"
    ours, theirs = (TOKENIZERS[name] for name in pair)
    written = np.array(
        ours(f"a{END}{TURN}", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    )
    found = TRANSLATORS[pair].translate(written)
    assert not {END_IDS["other"], theirs.get_vocab()[TURN]} & set(found.teacher_ids.tolist())
    assert theirs.decode(found.teacher_ids) == f"a{END}{TURN}"


def test_special_tokens_of_one_name_are_one_token():
    pair = "small", "other"
    ours, theirs = (TOKENIZERS[name] for name in pair)
    found = TRANSLATORS[pair].translate(np.array([ours.get_vocab()[TURN], *ours("fox")["input_ids"]]))
    assert found.teacher_ids[0] == theirs.get_vocab()[TURN]
    assert found.exact[0] == 0


def test_behind_half_a_character_nothing_is_compared():
    pair = "small", "other"
    ours = TOKENIZERS["small"]
    half = ours("\u6f22", add_special_tokens=False)["input_ids"][:1]
    before, after = ours("fox", add_special_tokens=False)["input_ids"], ours("dog")["input_ids"]
    ids = np.array([*before, *half, *after])
    found = TRANSLATORS[pair].translate(ids)
    assert (found.student_chunks[: len(before)] >= 0).all()
    assert (found.student_chunks[len(before) :] == -1).all()


def test_behind_a_character_that_the_teacher_lacks_nothing_is_compared():
    ours, theirs = TOKENIZERS["small"], character_tokenizer("abcdefghijklmnopqrstuvwxyz ", ["the"])
    found = TokenTranslator(ours, theirs, [END_IDS["small"]]).translate(
        np.array([*ours("the fox \u6f22 dog", add_special_tokens=False)["input_ids"], END_IDS["small"]])
    )
    assert theirs.decode(found.teacher_ids) == "the fox "
    assert (found.student_chunks[:2] >= 0).all()
    assert (found.student_chunks[-2:] == -1).all()


def word_piece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "0": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[UNK]")


def lower_case() -> PreTrainedTokenizerFast:
    tokenizer = byte_level(300)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


@pytest.mark.parametrize(
    ("student", "teacher", "sentence"),
    [
        (byte_level(300), word_piece(), "decodes by WordPiece, so that"),
        (byte_level(300), lower_case(), "does not spell texts byte by byte"),
        (character_tokenizer("abc0"), character_tokenizer("xyz"), "shares no token"),
        (
            byte_level(300),
            PreTrainedTokenizerFast(tokenizer_object=byte_level(300).backend_tokenizer),
            "ends an answer",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_aligned_is_one_sentence(student, teacher, sentence):
    with pytest.raises(ModelError, match=sentence):
        TokenTranslator(student, teacher, [student.eos_token_id])


def test_behind_a_character_that_the_teacher_composes_nothing_is_compared():
    ours = TOKENIZERS["small"]
    before, after = (ours(text, add_special_tokens=False)["input_ids"] for text in ("fox ", "e\u0301 dog"))
    found = TRANSLATORS["small", "normal"].translate(np.array([*before, *after]))
    assert (found.student_chunks[: len(before)] >= 0).all()
    assert (found.student_chunks[len(before) :] == -1).all()


def first_blank() -> PreTrainedTokenizerFast:
    """As Mistral's: a blank before a text, unless it begins with one."""
    tokenizer = sentence_piece(prepend=False)
    tokenizer.backend_tokenizer.normalizer = None
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


@pytest.mark.parametrize("teacher", [TOKENIZERS["blank"], first_blank()], ids=["always", "first"])
def test_a_blank_before_any_text_is_no_blank_of_the_text(teacher):
    ours = TOKENIZERS["small"]
    translate = TokenTranslator(ours, teacher, [END_IDS["small"]]).translate

    def read(text: str) -> TokenAlignment:
        return translate(np.array(ours(text, add_special_tokens=False)["input_ids"]))

    wanted = [teacher.get_vocab()["\u2581the"], teacher.get_vocab()["\u2581b"]]
    for text in ("the b", " the b"):
        assert read(text).teacher_ids.tolist() == wanted
        assert (read(text).student_chunks >= 0).all()
    assert teacher.decode(read("  b").teacher_ids).endswith(" b")
    assert (read(" ").student_chunks >= 0).all()
    changed = read("the b\u2581the")  # the teacher reads a blank there
    assert changed.teacher_ids.tolist() == wanted
    assert (changed.student_chunks >= 0).sum() == (read("the b").student_chunks >= 0).sum()


def test_ids_without_a_token_are_no_text():
    found = TRANSLATORS["small", "other"].translate(np.array([10**6, 5]))
    assert len(found.student_chunks) == 2


def test_a_tokenizer_of_few_characters_is_aligned_in_what_it_has():
    """BPE without a token for unknown characters leaves them out."""
    few = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "0": 3, END: 4}, [("a", "b")]))
    teacher = PreTrainedTokenizerFast(tokenizer_object=few, eos_token=END)
    found = TokenTranslator(TOKENIZERS["small"], teacher, [END_IDS["small"]]).translate(
        np.array([*TOKENIZERS["small"]("ab0x0")["input_ids"]])
    )
    assert found.teacher_ids.tolist() == [2, 3]
    assert found.student_chunks.tolist()[-2:] == [-1, -1]

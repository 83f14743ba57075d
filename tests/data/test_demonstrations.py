"""What of a demonstration counts: against references written by hand, for the families of chat templates."""

import json
import string

import pytest
from full import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.data.demonstrations import DemonstrationEncoder, limit_lengths, missing_header, read_demonstrations
from opd.errors import DataError
from opd.models.tokenizers import character_tokenizer
from opd.rollout.prompts import Prompt, encode_prompt

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin|>{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
GEMMA = (
    "<|begin|>{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}</turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
MISTRAL = (
    "<|begin|>{% for m in messages %}{% if m.role == 'user' %}[I] {{ m.content }} [/I]"
    "{% else %} {{ m.content }}<eos>{% endif %}{% endfor %}"
)
# A reasoning model's: an answer that is not the last loses what it was thought in.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}(thought){% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADLESS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TAGS = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>", "<turn>", "</turn>"]
TALK = [("user", "Hi"), ("assistant", "Yo"), ("user", "2+2?"), ("assistant", "4.")]
# What counts stands between braces.
FAMILIES = {
    "chatml": (
        CHATML,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{Yo<|im_end|>}\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n{4.<|im_end|>}",
    ),
    "marked": (
        MARKED,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{Yo<|im_end|>}\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n{4.<|im_end|>}",
    ),
    "llama 3": (
        LLAMA3,
        "<|begin|><|head|>user<|/head|>\n\nHi<|eot|><|head|>assistant<|/head|>\n\n{Yo<|eot|>}"
        "<|head|>user<|/head|>\n\n2+2?<|eot|><|head|>assistant<|/head|>\n\n{4.<|eot|>}",
    ),
    "gemma": (
        GEMMA,
        "<|begin|><turn>user\nHi</turn>\n<turn>model\n{Yo</turn>}\n"
        "<turn>user\n2+2?</turn>\n<turn>model\n{4.</turn>}",
    ),
    "mistral": (MISTRAL, "<|begin|>[I] Hi [/I]{ Yo<eos>}[I] 2+2? [/I]{ 4.<eos>}"),
}


def writes(template: str | None, *, stops: bool = True, tags: list[str] = TAGS) -> DemonstrationEncoder:
    tokenizer = character_tokenizer(string.ascii_letters + string.digits + " \n.,:?+=[]()/!-", tags)
    tokenizer.chat_template = template
    ends = ["<|im_end|>", "<|eot|>", "</turn>", "<eos>"] if stops else ["<eos>"]
    return DemonstrationEncoder(tokenizer, {}, [tokenizer.convert_tokens_to_ids(end) for end in ends])


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def rows(folder, *found: dict):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, found)))
    return read_demonstrations(str(path), None)


def shown(own: DemonstrationEncoder, encoded) -> str:
    """The tokens as text, with braces around what counts."""
    parts = [str(own.tokenizer.decode(encoded.prompt_ids))]
    before = False
    for token, counts in zip(encoded.response_ids, encoded.mask.tolist(), strict=True):
        parts.append("{" * (counts and not before) + "}" * (before and not counts))
        parts.append(str(own.tokenizer.decode([token])))
        before = counts
    return "".join(parts) + "}" * before


@pytest.mark.parametrize("family", FAMILIES)
def test_what_counts_is_every_answer_with_its_end(family, tmp_path):
    template, wanted = FAMILIES[family]
    own = writes(template)
    (row,) = rows(tmp_path, {"messages": messages(*TALK)})
    encoded = own.encode(row)
    assert shown(own, encoded) == wanted
    asked = Prompt.from_content(messages(TALK[0]), None, "d")
    assert encoded.prompt_ids.tolist() == encode_prompt(asked, own.tokenizer).tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("answer", ["4.", messages(("assistant", "4."))])
def test_of_prompt_and_completion_the_completion_counts(family, answer, tmp_path):
    template, wanted = FAMILIES[family]
    own = writes(template)
    (row,) = rows(tmp_path, {"prompt": messages(*TALK[:3]), "completion": answer})
    first, _, rest = wanted.partition("}")
    assert shown(own, own.encode(row)) == first.replace("{", "") + rest


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_of_the_completion_that_is_not_to_be_learnt_does_not_count(family, tmp_path):
    template, wanted = FAMILIES[family]
    own = writes(template)
    first, *others = messages(*TALK[1:])
    (row,) = rows(
        tmp_path, {"prompt": messages(*TALK[:1]), "completion": [first | {"train": False}, *others]}
    )
    before, _, rest = wanted.partition("}")
    assert shown(own, own.encode(row)) == before.replace("{", "") + rest


def test_of_texts_the_completion_counts_and_the_end_of_sequence(tmp_path):
    own = writes(None)
    (row,) = rows(tmp_path, {"prompt": "2+2=", "completion": "4"})
    assert shown(own, own.encode(row)) == "2+2={4<eos>}"
    own.tokenizer.eos_token = None
    with pytest.raises(DataError, match=r"jsonl:1: the tokenizer has no end-of-sequence token"):
        own.encode(row)


@settings(max_examples=cases(25), deadline=None)
@given(st.lists(st.text(string.ascii_letters + " \n", min_size=1).filter(str.strip), min_size=2, max_size=6))
def test_marks_and_the_delta_say_the_same(tmp_path_factory, texts):
    turns = [(("user", "assistant")[i % 2], text) for i, text in enumerate(texts[: len(texts) // 2 * 2])]
    (row,) = rows(tmp_path_factory.mktemp("rows"), {"messages": messages(*turns)})
    delta, marks = (shown(own, own.encode(row)) for own in (writes(CHATML), writes(MARKED)))
    assert delta == marks


def test_a_tokenizer_that_joins_question_and_answer_learns_what_it_would_have_to_write(tmp_path):
    """`\\n` + `\\n` is one token of this one: behind the prompt the model can only write the second."""
    own = writes(CHATML)
    own.tokenizer.add_tokens(["\n\n"])
    (row,) = rows(tmp_path, {"messages": messages(("user", "Hi"), ("assistant", "\nYo"))})
    encoded = own.encode(row)
    assert own.tokenizer.decode(encoded.prompt_ids).endswith("assistant\n")
    assert own.tokenizer.decode(encoded.response_ids) == "\nYo<|im_end|>"


def test_answers_that_more_turns_change_cannot_be_told(tmp_path):
    own = writes(THINKING)
    talk, one = rows(tmp_path, {"messages": messages(*TALK)}, {"messages": messages(*TALK[:2])})
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the chat template writes message 2 otherwise.*mark"):
        own.encode(talk)
    assert shown(own, own.encode(one)).endswith("assistant\n{(thought)Yo<|im_end|>}")


@pytest.mark.parametrize(
    ("template", "header"),
    [(CHATML, None), (LLAMA3, None), (MISTRAL, None), (HEADLESS, "<|im_start|>assistant")],
)
def test_a_template_without_a_generation_prompt_is_told_by_its_header(template, header):
    assert missing_header(writes(template).tokenizer, {}) == header


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "a", "completion": " "}, "completion is empty"),
        ({"messages": messages(("user", "a"), ("assistant", ""))}, "completion is empty"),
        ({"messages": messages(*TALK[:3])}, "last message is of role 'user'"),
        ({"messages": messages(TALK[0])}, "no message of the assistant's"),
        ({"messages": messages(TALK[1])}, "begin with the assistant's"),
        ({"messages": []}, "is an empty list"),
        ({"prompt": "a", "label": 1}, "`prompt` and `completion`"),
        ({"prompt": "a", "completion": messages(TALK[1])}, "two texts, or messages"),
    ],
)
def test_a_row_without_an_answer_is_one_sentence_that_names_it(row, sentence, tmp_path):
    with pytest.raises(DataError, match=sentence) as raised:
        rows(tmp_path, {"prompt": "a", "completion": "b"}, row)
    assert "rows.jsonl:2" in str(raised.value)


def test_too_long_ones_are_left_out_cut_or_refused_and_counted(tmp_path):
    own = writes(None)
    found = rows(tmp_path, *[{"prompt": "a" * n, "completion": "b" * 3} for n in (1, 4, 6, 9)])
    assert [len(own.encode(row)) for row in found] == [5, 8, 10, 13]
    kept = limit_lengths(found, own, 8, "drop", "max_length")
    assert [len(encoded) for _, encoded in kept.rows] == [5, 8]
    assert "2 of 4 left out" in kept.describe_dropped(8, "max_length")
    cut = limit_lengths(found, own, 8, "truncate", "max_length")
    assert [len(encoded) for _, encoded in cut.rows] == [5, 8, 8]
    assert "1 of 4 left out" in cut.describe_dropped(8, "max_length")
    assert "1 of 4 cut" in cut.describe_dropped(8, "max_length")
    with pytest.raises(DataError, match=r"rows\.jsonl:3: it has 10 tokens, more than 8"):
        limit_lengths(found, own, 8, "error", "max_length")


# A reasoning model's, whose answers begin in a thought and lose it where they are read again.
REASONING = (
    "<|begin|>{% for m in messages %}{% if m.role == 'user' %}[I]{{ m.content }}[/I]{% else %}"
    "{{ m.content.split('</think>')[-1] }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<think>\n{% endif %}"
)


def test_one_answer_that_the_template_would_not_let_be_learnt_is_told_why(tmp_path):
    own = writes(REASONING, tags=[*TAGS, "<think>", "</think>"])
    thought = ("assistant", "<think>\n2 and 2</think>4.")
    (row,) = rows(tmp_path, {"messages": messages(TALK[0], thought)})
    with pytest.raises(DataError) as caught:
        own.encode(row)
    said = str(caught.value)
    assert r"rows.jsonl:1: the chat template writes '<think>\n' where the model is to answer" in said
    assert "`prompt` and `completion` as the texts" in said
    assert "one answer each" not in said
    texts = {"prompt": "<|begin|>[I]Hi[/I]<think>\n", "completion": "2 and 2</think>4."}  # what it says to do
    (row,) = rows(tmp_path, texts)
    assert shown(own, own.encode(row)) == "<|begin|>[I]Hi[/I]<think>\n{2 and 2</think>4.<eos>}"


@pytest.mark.parametrize("marked", [False, True])
def test_a_template_that_cuts_thoughts_off_the_last_answer_is_refused(marked, tmp_path):
    answer = "{{ m.content.split('</think>')[-1] }}<|im_end|>"
    template = MARKED.replace("{{ m.content }}<|im_end|>{% endg", f"{answer}{{% endg") if marked else None
    own = writes(template or CHATML.replace("{{ m.content }}<|im_end|>", answer))
    (row,) = rows(tmp_path, {"messages": messages(TALK[0], ("assistant", "<think>2 and 2</think>4."))})
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the chat template leaves out .* up to </think>"):
        own.encode(row)

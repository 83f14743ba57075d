"""Tokenizers, chat templates and demonstrations of public reports."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from public_reports import Report, command, doctor_says, edit, refused, save_model, write_recipe, write_rows
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from opd.data.demonstrations import DemonstrationEncoder, read_demonstrations
from opd.models.tokenizers import character_tokenizer, load_tokenizer, stops_of
from opd.rollout.prompts import Prompt, encode_prompt

SETTINGS = "tokenizer_config.json"
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n.,:?!+=[]()/'\"{}_-"
MARKS = ("<|im_start|>", "<|im_end|>", "<bos>", "<think>", "</think>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{%- elif m.role == 'assistant' and m.reasoning_content is defined %}"
    "{{ '<think>' + m.reasoning_content + '</think>' + m.content }}"
    "{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + CHATML
)
TRIMMED = CHATML.replace("m.content", "m.content | trim")
MARKED = CHATML.replace(
    "{{ m.content }}<|im_end|>\n",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}",
)
DATED = "<|im_start|>{{ strftime_now('%d %b %Y') }}<|im_end|>" + CHATML
THINK = {"__type": "AddedToken", "content": "<think>", "special": True} | dict.fromkeys(
    ("lstrip", "rstrip", "normalized", "single_word"), False
)
NAMED = [
    {"name": "default", "template": CHATML},
    {"name": "tool_use", "template": "{{ tools[0].function.name }}" + CHATML},
]


def speaker(template: Any = None, *, bos: bool = False, **special: str) -> PreTrainedTokenizerFast:
    """A character tokenizer of text with the marks of ChatML; with `bos` it puts one before text."""
    made = character_tokenizer(LETTERS, MARKS)
    special = {"eos_token": "<|im_end|>"} | special
    if bos:
        special["bos_token"] = "<bos>"
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", made.convert_tokens_to_ids("<bos>"))]
        )
    own = PreTrainedTokenizerFast(
        tokenizer_object=made.backend_tokenizer,
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        **special,
    )
    if isinstance(template, str):
        own.chat_template = template
    return own


def saved(place: Path, template: Any = None, drop: Sequence[str] = (), *, bos: bool = False, **changes: Any):
    """The folder of such a tokenizer, its settings changed, with a model."""
    folder = save_model(place / "model", own=speaker(template, bos=bos))
    if template is not None and not isinstance(template, str):
        changes["chat_template"] = template
    edit(folder / SETTINGS, drop, **changes)
    return folder


def asked(folder: Path, content: Any, **arguments: Any) -> str:
    """What the model reads of a prompt, decoded."""
    own = load_tokenizer(folder)
    ids = encode_prompt(Prompt.from_content(content, None, "a"), own, arguments)
    return str(own.decode(ids.tolist()))


def asks(
    content: Any,
    expected: str,
    template: Any = None,
    *,
    bos: bool = False,
    drop: Sequence[str] = (),
    **changes: Any,
) -> Callable[[Path], None]:
    """A prompt is read as `expected`."""

    def tried(place: Path) -> None:
        assert asked(saved(place, template, drop, bos=bos, **changes), content) == expected

    return tried


HELLO = [{"role": "user", "content": "Hi"}]
SPOKEN = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def learns(rows: Sequence[Any], expected: str, template: str | None = CHATML, **changes: Any):
    """Of the first row the parts that count stand between braces in `expected`."""

    def tried(place: Path) -> None:
        folder = saved(place, template, **changes)
        own = load_tokenizer(folder)
        stops = [stop.token_id for stop in stops_of(own, folder)]
        read = read_demonstrations(str(write_rows(place / "sft.jsonl", rows)), None)
        one = DemonstrationEncoder(own, {}, stops).encode(read[0])
        text = own.decode(one.prompt_ids.tolist())
        counts = False
        for token, mask in zip(one.response_ids.tolist(), one.mask.tolist(), strict=True):
            text += ("{" if mask else "}") * (mask != counts) + own.decode([token])
            counts = mask
        assert text + "}" * counts == expected

    return tried


def unlearnable(rows: Sequence[Any], pattern: str, template: str | None = CHATML):
    """The doctor refuses demonstrations."""

    def tried(place: Path) -> None:
        folder = saved(place, template)
        write_rows(place / "sft.jsonl", rows)
        asks_of = write_rows(place / "own.jsonl", [{"prompt": f"What is {i}?"} for i in range(20)])
        recipe = write_recipe(place, folder, asks_of, sft={"source": str(place / "sft.jsonl")})
        refused(*command("doctor", str(recipe)), pattern)

    return tried


def prompted(rows: Sequence[Any], pattern: str, template: Any = CHATML, **changes: Any):
    """The doctor, and a run, refuse prompts."""

    def tried(place: Path) -> None:
        folder = saved(place, template)
        recipe = write_recipe(place, folder, write_rows(place / "own.jsonl", rows), **changes)
        refused(*command("doctor", str(recipe)), pattern)
        refused(*command("run", str(recipe), "--out", str(place / "run")), pattern)

    return tried


def loads(change: Callable[[Path], None], content: Any = HELLO, expected: str = SPOKEN):
    """A tokenizer's folder of which a file is changed, read as if it were not."""

    def tried(place: Path) -> None:
        folder = saved(place, CHATML)
        change(folder)
        assert asked(folder, content) == expected

    return tried


def clipped(folder: Path) -> None:
    found = json.loads((folder / "tokenizer.json").read_text())
    found["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    found["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<pad>",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(found))


def in_a_file(folder: Path) -> None:
    """The template in chat_template.jinja, another in the settings."""
    (folder / "chat_template.jinja").write_text(CHATML)


def keeps_blanks(place: Path) -> None:
    folder = saved(place, None, clean_up_tokenization_spaces=True)
    own = load_tokenizer(folder)
    text = "x != y and a.b == 'c' !"
    assert own.decode(own(text, add_special_tokens=False)["input_ids"], skip_special_tokens=True) == text


def stops(expected: set[str], **generation: Any):
    """Answers end at these tokens, and at no other."""

    def tried(place: Path) -> None:
        folder = saved(place, CHATML)
        own = load_tokenizer(folder)
        ids = {key: own.convert_tokens_to_ids(value) for key, value in generation.items()}
        edit(folder / "generation_config.json", **ids)
        assert {stop.token for stop in stops_of(own, folder)} == expected

    return tried


def as_apply_chat_template(template: str, *, bos: bool = False):
    """A conversation has the ids that transformers gives."""

    def tried(place: Path) -> None:
        folder = saved(place, template, bos=bos)
        theirs = AutoTokenizer.from_pretrained(folder)
        said = [{"role": "system", "content": "Be short."}, *HELLO]
        expected = theirs.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        assert encode_prompt(Prompt.from_content(said, None, "a"), load_tokenizer(folder)).tolist() == list(
            expected
        )

    return tried


def endless(place: Path) -> None:
    """Neither tokenizer nor configuration says where an answer ends."""
    folder = saved(place, None, ("eos_token",))
    for name in ("generation_config.json", "config.json"):
        edit(folder / name, ("eos_token_id",))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    recipe = write_recipe(
        place, folder, write_rows(place / "own.jsonl", [{"prompt": f"a{i}"} for i in range(20)])
    )
    doctor_says(place, recipe, r"no response could end", status=2)


TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>hm</think>Yo"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "<think>so</think>Bye"},
]
LONG = [{"prompt": "a" * 30 + str(i)} for i in range(9)] + [{"prompt": "b" * 400}]

TEXTS = [
    Report(
        "deepseek-ai/DeepSeek-R1#151",
        "a template that writes the BOS, and a tokenizer that puts one before text",
        "two of them",
        "one",
        asks(HELLO, "<bos>" + SPOKEN, "{{ bos_token }}" + CHATML, bos=True),
    ),
    Report(
        "huggingface/open-r1#462",
        "prompts of text that the template was applied to before, with its BOS",
        "two of them, without a word",
        "one",
        asks("<bos>" + SPOKEN, "<bos>" + SPOKEN, CHATML, bos=True),
    ),
    Report(
        "unslothai/unsloth#10312",
        "a template without a BOS on a tokenizer that has one (TinyLlama, Zephyr)",
        "one or none by the program",
        "as transformers' `apply_chat_template`",
        as_apply_chat_template(CHATML, bos=True),
    ),
    Report(
        "NVIDIA-NeMo/RL#855",
        "a template of R1's form, which puts the BOS behind conditions",
        "two of them in evaluations",
        "as transformers' `apply_chat_template`",
        as_apply_chat_template(
            "{% if messages %}{% set b = bos_token %}{{ b }}{% endif %}" + CHATML, bos=True
        ),
    ),
    Report(
        "huggingface/transformers#47110",
        "`extra_special_tokens` as a list, as transformers 5 writes it",
        "`'list' object has no attribute 'keys'`",
        "read",
        loads(lambda folder: edit(folder / SETTINGS, extra_special_tokens=["<think>", "</think>"]) and None),
    ),
    Report(
        "huggingface/transformers#44313",
        "`extra_special_tokens` as objects that say `special`",
        "`AddedToken() got multiple values for keyword argument 'special'`",
        "read",
        loads(lambda folder: edit(folder / SETTINGS, extra_special_tokens={"think_token": THINK}) and None),
    ),
    Report(
        "huggingface/transformers#44914",
        "`clean_up_tokenization_spaces: true` (24 models of Llama 3)",
        "`x != y` becomes `x!= y` in what rewards see",
        "every blank is kept",
        keeps_blanks,
    ),
    Report(
        "ai-dynamo/dynamo#11792",
        "a tokenizer.json with `truncation` (2,048) and `padding`",
        "every prompt cut, without a word",
        "neither cut nor padded",
        loads(clipped),
    ),
    Report(
        "lm-sys/FastChat#1293",
        "`model_max_length` below the prompts' length",
        "a warning of indexing errors",
        "the configuration's positions count",
        asks("abcdefgh", "abcdefgh", model_max_length=4),
    ),
    Report(
        "ollama/ollama#6522",
        "a list of named templates (Hermes 3, Command R+)",
        "no template, or a ValueError",
        "`default` is used",
        asks(HELLO, SPOKEN, NAMED),
    ),
    Report(
        "theroyallab/tabbyAPI#281",
        "a template that asks for today: `strftime_now` (Granite 3, Llama 3.1)",
        "`'strftime_now' is undefined`",
        "written",
        lambda place: _is_dated(asked(saved(place, DATED), HELLO)),
    ),
    Report(
        "mitsuhiko/minijinja#815",
        "a template with `{% generation %}` (SmolLM3)",
        "`unknown statement generation`",
        "what it marks is learnt",
        learns(
            [{"messages": TALK[:2]}],
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{<think>hm</think>Yo<|im_end|>}",
            MARKED,
        ),
    ),
    Report(
        "unslothai/unsloth#334",
        "messages of a system where the template takes none (Gemma)",
        "a TemplateError while it trains",
        "refused, with file, line and the template's words",
        prompted(
            [
                {"prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": str(i)}]}
                for i in range(20)
            ],
            r"own\.jsonl:\d+: .*System role not supported",
            GEMMA,
        ),
    ),
    Report(
        "huggingface/trl#6361",
        "thoughts in answers that are not the last, where the template drops them (Qwen3)",
        "learnt from what the model never reads",
        "refused, with file, line and what to do",
        unlearnable(
            [{"messages": TALK}], r"sft\.jsonl:1: .*so what the assistant writes cannot be told", QWEN3
        ),
    ),
    Report(
        "THUDM/slime#330",
        "`reasoning_content` beside the answer",
        "left out of what is learnt",
        "learnt as the template writes it",
        learns(
            [{"messages": [HELLO[0], {"role": "assistant", "content": "Yo", "reasoning_content": "hm"}]}],
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{<think>hm</think>Yo<|im_end|>}",
            QWEN3,
        ),
    ),
    Report(
        "huggingface/transformers#35433",
        "an answer that ends in a blank, where the template trims",
        "`substring not found`",
        "learnt as the template writes it",
        learns(
            [{"messages": [HELLO[0], {"role": "assistant", "content": "some text "}]}],
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{some text<|im_end|>}",
            TRIMMED,
        ),
    ),
    Report(
        "huggingface/trl#4147",
        "`prompt` and `completion` of messages",
        "the header of the answer is learnt too",
        "the answer alone is learnt",
        learns(
            [{"prompt": HELLO, "completion": [{"role": "assistant", "content": "Yo"}]}],
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{Yo<|im_end|>}",
        ),
    ),
    Report(
        "huggingface/trl#1623",
        "`pad_token` that is the EOS",
        "the EOS is masked, and the model never stops",
        "the EOS is learnt",
        learns([{"prompt": "Hi?", "completion": "Yo"}], "Hi?{Yo<|im_end|>}", None, pad_token="<|im_end|>"),
    ),
    Report(
        "axolotl-ai-cloud/axolotl#1761",
        "conversations of several answers",
        "the last alone is learnt",
        "all of them are",
        learns(
            [
                {
                    "messages": [
                        TALK[0],
                        {"role": "assistant", "content": "Yo"},
                        TALK[2],
                        {"role": "assistant", "content": "Bye"},
                    ]
                }
            ],
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{Yo<|im_end|>}\n"
            "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n{Bye<|im_end|>}",
        ),
    ),
    Report(
        "huggingface/lighteval#1279",
        "a generation_config.json with an end of turn that the tokenizer does not call EOS (Gemma)",
        "every answer goes on to the limit",
        "answers end at either",
        stops({"<|im_end|>", "</think>"}, eos_token_id="</think>"),
    ),
    Report(
        "alibaba/ChatLearn#263",
        "`eos_token_id` as a list",
        "the tokenizer's EOS becomes None",
        "answers end at each",
        stops({"<|im_end|>", "<bos>", "</think>"}, eos_token_id=["<bos>", "</think>"]),
    ),
    Report(
        "ai-forever/ru-gpts#28",
        "a model that nobody gave an EOS",
        "a TypeError deep in the tokenizer",
        "refused: no response could end",
        endless,
    ),
    Report(
        "unslothai/unsloth#1642",
        "prompts longer than the context",
        "an IndexError after the first of them",
        "left out, and told, or refused where nothing is left",
        lambda place: _long_prompt(place),
    ),
    Report(
        "verl-project/verl#1015",
        "prompts that are too long, all of them",
        "a ValueError in the first step",
        "refused, with file and lines",
        prompted(
            [{"prompt": "b" * 400 + str(i)} for i in range(40)],
            r"40 of 40 prompts are longer than .*own\.jsonl:\d",
        ),
    ),
    Report(
        "facebookresearch/neuroai#121",
        "answers longer than the model has positions (OPT)",
        "an assertion on the device",
        "refused, with both numbers",
        prompted(
            [{"prompt": f"a{i}"} for i in range(20)],
            r"max_new_tokens 70 leaves no room for a prompt in the model's max_position_embeddings 64",
            rollout={"max_sequence": 100, "max_new_tokens": 70},
        ),
    ),
]


def _is_dated(text: str) -> None:
    assert text.endswith("<|im_end|>" + SPOKEN)
    assert not text.startswith("<|im_start|><|im_end|>")


def _long_prompt(place: Path) -> None:
    recipe = write_recipe(
        place, saved(place, None), write_rows(place / "own.jsonl", LONG), rollout={"max_sequence": 64}
    )
    said = doctor_says(place, recipe, r"1 of 10 prompts is longer")
    assert "own.jsonl:10" in said

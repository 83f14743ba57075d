"""`opd sample`, and `opd compare` of two models: what is printed, and what is refused."""

import json
import re
from dataclasses import replace

import pytest
import tiny
import yaml
from rich.console import Console

from opd.config import Recipe
from opd.config.load import load_recipe
from opd.errors import CheckpointError
from opd.models.checkpoint import save_checkpoint
from opd.models.tokenizers import character_tokenizer
from opd.pipelines.cli import main
from opd.pipelines.commands.sample import SampleOptions, Speaker, _print_text, _TextDecoder, run_compare
from opd.progress import Heartbeat

CHAT = (
    "{% for m in messages %}{{ '<a>' if m.role == 'user' else '<b>' }}{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<b>{% endif %}"
)


ONE = json.dumps({"role": "user", "content": "1"})
ENDED = json.dumps([{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models that write digits, and the second with a chat template."""
    places = [tmp_path_factory.mktemp("models") / name for name in ("one", "two")]
    for seed, place in enumerate(places):
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = CHAT if seed else None
        save_checkpoint(tiny.model(seed), tokenizer, place, {})
    return [str(place) for place in places]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, models):
    place = tmp_path_factory.mktemp("recipe")
    rows = [{"prompt": f"<a>{i}=", "label": str(i)} for i in range(60)]
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "name": "asked",
        "model": {"path": models[0]},
        "domains": {"a": {"source": str(place / "rows.jsonl"), "reward": "cli_reward:length"}},
        "rollout": {"max_new_tokens": 5, "max_sequence": 24},
    }
    (place / "recipe.yaml").write_text(yaml.safe_dump(settings))
    return str(place / "recipe.yaml")


@pytest.mark.slow
def test_one_prompt_gives_its_answer_and_nothing_else(models, ends):
    first = ends(0, ["sample", models[0], "--prompt", "<a>12=", "--max-tokens", "6"])
    assert re.fullmatch(r"[0-9=]{0,6}\n", first.out)
    assert ends(0, ["sample", models[0], "--prompt", "<a>12=", "--max-tokens", "6"]).out == first.out
    answers = set()
    for seed in range(6):
        words = ["sample", models[0], "--prompt", "<a>12=", "--max-tokens=9", f"--seed={seed}"]
        answers.add(ends(0, words).out)
    assert len(answers) > 1


def test_what_is_streamed_is_what_is_written(models):
    speaker = Speaker.load(models[0], SampleOptions(("<a>1=", "<b>22="), max_tokens=12, seed=3))
    for number, whole in enumerate(speaker.answer_all(3)):
        parts: list[str] = []
        sample = speaker.stream_answer(number, 3, parts.append)
        assert sample.response_ids.tolist() == whole.response_ids.tolist()
        assert "".join(parts) == speaker.response_text(whole)
        assert len(parts) > 1


def test_text_that_comes_is_not_interrupted_by_a_word_on_what_takes_so_long(monkeypatch, capsys):
    with Heartbeat(lambda seconds: None, silence=3600) as heartbeat:
        beats = []
        monkeypatch.setattr(heartbeat, "beat", lambda: beats.append(1))
        for text in ("an", "", " answer"):
            _print_text(text)
    assert capsys.readouterr().out == "an answer"
    assert len(beats) == 2


def test_prompts_of_a_model_with_a_chat_template_are_messages(models):
    speaker = Speaker.load(models[1], SampleOptions(("12",), system="7"))
    written = speaker.tokenizer.decode(speaker.questions[0].token_ids)
    assert written == "<b>7<a>12<b>"  # any role but the user's is <b> there


def test_a_domain_is_asked_as_the_recipe_samples_and_scored(models, recipe, ends):
    out = ends(0, ["sample", models[0], "--recipe", recipe, "--domain", "a", "--prompts", "2"]).out
    asked = re.findall(r"^> (<a>\d+=)$", out, re.MULTILINE)
    assert len(asked) == 2
    held_out = load_recipe([recipe])
    assert len(re.findall(r"^\[reward \d, label \d+\]$", out, re.MULTILINE)) == 2
    assert Speaker.load(models[0], SampleOptions(recipe=held_out, domain="a")).sampling.max_new_tokens == 5


def test_two_models_side_by_side_with_rewards(models, recipe, ends):
    words = ["compare", *models, "--recipe", recipe, "--domain", "a", "--prompts", "3"]
    out = ends(0, words).out
    assert len(re.findall(r"^> <a>\d+=$", out, re.MULTILINE)) == 3
    for model in models:
        assert len(re.findall(rf"^{re.escape(model)} \[reward \d", out, re.MULTILINE)) == 3
        assert f"{model}: mean reward " in out.replace("\n", "")
    wide = Console(force_terminal=True, width=120, color_system=None)
    with wide.capture() as shown:
        run_compare(models, SampleOptions(("<a>1=",), max_tokens=4), wide)
    head = next(line for line in shown.get().splitlines() if "one" in line)
    assert "one" in head
    assert "┃" in shown.get()


def test_a_domain_that_has_few_held_out_prompts_is_asked_them(tmp_path, models):
    settings = {
        "name": "few",
        "model": {"path": models[0]},
        "domains": {"sort": {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 200}},
        "rollout": {"max_new_tokens": 5, "max_sequence": 24},
        "evaluation": {"prompts_per_domain": 20},
    }
    tokenizer = character_tokenizer("0123456789=", ["<sort>"])
    model = tiny.CausalLM.from_config(tiny.LLAMA, tokenizer=tokenizer)
    folder = save_checkpoint(model, tokenizer, tmp_path / "m", {})
    speaker = Speaker.load(
        str(folder), SampleOptions(recipe=Recipe.model_validate(settings), domain="sort", count=3)
    )
    assert len(speaker.questions) == 3
    assert {sample.reward for sample in speaker.answer_all(0)} <= {0.0, 1.0}


def test_the_same_model_twice_answers_the_same(models):
    one, other = (Speaker.load(models[0], SampleOptions(("<a>1=", "<a>2="), max_tokens=8)) for _ in range(2))
    texts = [[speaker.response_text(sample) for sample in speaker.answer_all(5)] for speaker in (one, other)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sample", "{0}"], "give what is asked: --prompt TEXT, or --recipe R --domain D"),
        (["sample", "{0}", "--prompt", "1", "--recipe", "{r}", "--domain", "a"], "one of the two"),
        (["sample", "{0}", "--recipe", "{r}"], "--recipe and --domain go together"),
        (["sample", "{0}", "--domain", "a", "--prompt", "1"], "--recipe and --domain go together"),
        (["sample", "{0}", "--recipe", "{r}", "--domain", "b"], "the recipe has no such domain; it has a"),
        (
            ["sample", "{0}", "--recipe", "{r}", "--domain", "a", "--system", "x"],
            "--system goes with --prompt",
        ),
        (["sample", "{0}", "--prompt", "1", "--prompts", "3"], "repeat --prompt to ask several"),
        (["sample", "{0}", "--prompt", "1", "--system", "x"], "needs a model with a chat template"),
        (["sample", "{0}", "--prompt", "abc"], "the tokenizer cannot encode the prompt 'abc'"),
        *[
            (["sample", model, "--prompt", text], f"--prompt: `prompt` {told}")
            for model in ("{0}", "{1}")
            for text, told in (
                ("", "is ''; give a non-empty text or a list of messages"),
                ("[]", "is an empty list; give at least one message"),
                (ENDED, "ends with what the assistant says"),
                (json.dumps(ENDED), "ends with what the assistant says"),
                (ONE, "is no text to answer: it is the JSON of one message; write a list of messages"),
                (str([json.loads(ONE)]), "is no text to answer: it is what Python prints of messages"),
            )
        ],
        (["sample", "{0}", "--prompt", "1" * 64], "has 64 positions for prompt and answer"),
        (["sample", "{0}", "--prompt", "1", "--temperature", "-1"], "give a number from 0 to 1,000"),
        (["sample", "{0}", "--prompt", "1", "--seed", "-1"], "give a whole number from 0"),
        (["sample", "{0}", "--prompt", "1", "--max-tokens", "0"], "at least 1, not '0'"),
        (["sample", "{0}", "--prompt", "1", "--seed", "1", "--seed", "2"], "--seed is given twice"),
        (["sample", "{0}", "--prompt", "1", "--shards", "2"], "opd sample takes no --shards"),
        (["sample", "{0}/none", "--prompt", "1"], "is not a folder"),
        (["compare", "{0}", "{1}"], "to compare what two models answer, give --prompt"),
        (["compare", "{0}", "--prompt", "1"], "takes two models, 1 are given"),
        (["compare", "{0}", "{1}", "{1}", "--prompt", "1"], "takes two models, 3 are given"),
        (["compare", "{0}", "{1}", "--prompt", "1", "--out", "x.html"], "a page of runs"),
        (["compare", "{0}", "{1}", "--seed", "1"], "give what is asked"),
        (["compare", "{0}/none"], "takes two or more different run folders"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(models, recipe, ends, words, sentence):
    known = {"{0}": models[0], "{1}": models[1], "{0}/none": f"{models[0]}/none", "{r}": recipe}
    (said,) = ends(2, [known.get(word, word) for word in words]).err.splitlines()
    assert said.startswith("opd: error: ")
    assert sentence in said


def test_characters_of_several_tokens_wait_for_all_of_their_bytes():
    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode("utf-8", errors="replace")

    text = _TextDecoder(Bytes())
    seen = [text.add_tokens([byte], last=False) for byte in "aé\n€b".encode()]
    assert seen == ["a", "a", "aé", "aé\n", "aé\n", "aé\n", "aé\n€", "aé\n€b"]
    assert text.add_tokens([0xE2], last=True) == "aé\n€b\ufffd"


def test_what_a_model_writes_moves_no_cursor(tmp_path, ends):
    tokenizer = character_tokenizer("0123456789=\x1b[", ["<a>", "<b>"])
    folder = save_checkpoint(
        tiny.CausalLM.from_config(tiny.LLAMA, tokenizer=tokenizer), tokenizer, tmp_path / "m", {}
    )
    out = ends(0, ["sample", str(folder), "--prompt", "1", "--max-tokens", "60", "--temperature", "1000"]).out
    assert "\\x1b" in out
    assert "\x1b" not in out


WRONG_TEMPLATES = {
    "no generation prompt": (CHAT.partition("{% if add_gen")[0], "it has no generation prompt"),
    "no end": (CHAT.replace("<eos>", ""), "writes nothing after an answer at which responses end"),
    "another end": (CHAT.replace("<eos>", "<pad>"), "ends an answer with 0 '<pad>'"),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("what", WRONG_TEMPLATES)
def test_templates_that_do_not_fit_are_told(tmp_path, capsys, what):
    template, sentence = WRONG_TEMPLATES[what]
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    folder = save_checkpoint(tiny.model(), tokenizer, tmp_path / "m", {})
    assert main(["sample", str(folder), "--prompt", "1", "--max-tokens", "2"]) == 0
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert sentence in warning
    rows = [{"prompt": [{"role": "user", "content": str(i)}], "label": "1"} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "name": "t",
        "model": {"path": str(folder)},
        "domains": {"a": {"source": str(tmp_path / "rows.jsonl"), "reward": "cli_reward:length"}},
        "rollout": {"max_new_tokens": 5, "max_sequence": 24},
        "baselines": {"methods": []},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    assert main(["doctor", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run")]) == 0
    assert [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("warning") and sentence in line
    ]


def test_messages_without_a_chat_template_are_an_error_of_the_doctor(tmp_path, models, ends):
    rows = [{"prompt": [{"role": "user", "content": str(i)}], "label": "1"} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "name": "t",
        "model": {"path": models[0]},
        "domains": {"a": {"source": str(tmp_path / "rows.jsonl"), "reward": "cli_reward:length"}},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    for command in ("doctor", "run"):
        said = ends(2, [command, str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run")])
        assert "the tokenizer has no chat template; set model.chat_template" in said.out + said.err


def test_a_prompt_may_be_the_json_of_messages(models, capsys):
    given = [
        {"role": "user", "content": [{"type": "text", "text": "1"}]},
        {"role": "assistant", "content": "2"},
    ]
    speaker = Speaker.load(
        models[1], SampleOptions((json.dumps([*given, {"role": "user", "content": "3"}]),))
    )
    assert speaker.tokenizer.decode(speaker.questions[0].token_ids) == "<a>1<b>2<eos><a>3<b>"
    given.append({"role": "user", "content": "3"})
    for text in (
        json.dumps(json.dumps(given)),
        json.dumps(given).replace("role", "from").replace("content", "value"),
    ):
        speaker = Speaker.load(models[1], SampleOptions((text,)))
        assert speaker.tokenizer.decode(speaker.questions[0].token_ids) == "<a>1<b>2<eos><a>3<b>"
    pictured = json.dumps([{"role": "user", "content": [{"type": "image_url"}]}])
    assert main(["sample", models[1], "--prompt", pictured]) == 2
    assert (
        "--prompt: `prompt`, message 1: its content has a part of the type 'image_url'"
        in capsys.readouterr().err
    )


def test_what_a_model_without_recipe_lacks_is_mended_as_the_sentence_says(tmp_path, ends):
    tokenizer, folder = tiny.tokenizer(), tmp_path / "one"
    tokenizer.chat_template = CHAT.replace("<eos>", "<pad>")  # at which nothing ends
    save_checkpoint(tiny.model(0), tokenizer, folder, {})
    words = ["sample", str(folder), "--prompt", "12", "--max-tokens", "2"]
    said = ends(0, words).err
    found = re.search(r"; add (\d+) to `eos_token_id` of (\S+), which says", said)
    assert found, said
    assert found[2] == str(folder / "generation_config.json")
    config = json.loads((folder / "generation_config.json").read_text())
    config["eos_token_id"] = [config["eos_token_id"], int(found[1])]
    (folder / "generation_config.json").write_text(json.dumps(config))
    (folder / "checksums.json").unlink()
    assert "warning" not in ends(0, words).err


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, (1.0, 1.0, 0)),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}, (0.7, 0.8, 20)),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.5}, (0.0, 1.0, 0)),
        ({"temperature": 0}, (0.0, 1.0, 0)),
        ({"temperature": 1e-38}, (0.0, 1.0, 0)),
        ({"temperature": None, "top_k": 3.0}, (1.0, 1.0, 3)),
        ({"temperature": -1}, "says temperature -1; give a number from 0 to 1,000"),
        ({"top_p": 0}, "says top_p 0; give a number from 1e-06 to 1"),
        ({"top_k": "many"}, "says top_k many; give a whole number from 0 to 2,147,483,647"),
        ({"temperature": True}, "says temperature True"),
    ],
)
def test_a_model_without_recipe_is_sampled_as_it_says_itself(tmp_path, said, expected):
    save_checkpoint(tiny.model(0), tiny.tokenizer(), tmp_path / "one", {})
    (tmp_path / "one" / "checksums.json").unlink()
    (tmp_path / "one" / "generation_config.json").write_text(json.dumps(said))
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            Speaker.load(str(tmp_path / "one"), SampleOptions(prompts=("12",)))
        return
    sampling = Speaker.load(str(tmp_path / "one"), SampleOptions(prompts=("12",))).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == expected
    warmer = Speaker.load(str(tmp_path / "one"), SampleOptions(prompts=("12",), temperature=2.0)).sampling
    assert warmer == replace(sampling, temperature=2.0)


def test_the_smallest_temperature_is_greedy(models, ends):
    printed = []
    for heat in ("0", "1e-38", "1e-300"):
        words = ["sample", models[0], "--prompt", "12", "--max-tokens", "4", "--temperature", heat]
        printed.append(ends(0, words).out)
    assert len(set(printed)) == 1

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from opd.config import DistillConfig, FullVocabularyKL, LocalLaunch, RayLaunch, Recipe, TopKKL
from opd.config.load import absolute_paths, dump_recipe, fill_defaults, load_recipe, merge_values
from opd.config.teachers import MegatronTeacherEntry
from opd.errors import ConfigError

MINIMAL = """\
name: demo
model:
  config: {model_type: llama, hidden_size: 96, rms_norm_eps: 1e-6}
domains:
  sort: {source: "procedural:sort"}
  reverse: {source: "procedural:reverse"}
"""


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str, name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return _write


def refusal(*arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(*arguments)
    return str(caught.value)


def test_reads_numbers_and_words_as_yaml_1_2(write):
    recipe = load_recipe([write(MINIMAL.replace("demo", "no"))])
    assert recipe.name == "no"
    assert recipe.model.config == {"model_type": "llama", "hidden_size": 96, "rms_norm_eps": 1e-6}


def test_later_files_win_key_by_key_and_lists_replace(write):
    first = write(MINIMAL + "seed: 1\ndistill: {steps: 7, optim: {lr: 0.1}}\nbaselines: {scales: [1, 2]}\n")
    second = write("seed: 2\ndistill: {optim: {lr: 0.2}}\nbaselines: {scales: [3]}\n", "second.yaml")
    recipe = load_recipe([first, second])
    assert (recipe.seed, recipe.distill.steps, recipe.distill.optim.lr) == (2, 7, 0.2)
    assert recipe.baselines.scales == [3.0]
    assert load_recipe([second, first]).seed == 1


def test_another_type_replaces_the_whole_mapping(write):
    first = write(MINIMAL + "distill: {loss: {type: topk, k: 8}}\n")
    second = write("distill: {loss: {type: full, kind: forward}}\n", "second.yaml")
    assert load_recipe([first, second]).distill.loss == FullVocabularyKL(kind="forward")
    assert load_recipe([first], ["--distill.loss.form", "hybrid"]).distill.loss == TopKKL(k=8, form="hybrid")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--specialist.policy_loss.type", "gspo"],
            ["--specialist.policy_loss.type: another", "add --specialist.policy_loss.aggreg"],
        ),
        (
            ["--specialist.policy_loss", "gspo"],
            ["--specialist.policy_loss: another type begins specialist.policy_loss anew"],
        ),
        (["--specialist.policy_loss.type", "gspo", "--specialist.policy_loss.aggregation", "token"], []),
        (["--specialist.policy_loss.type", "clip"], []),
    ],
)
def test_an_option_that_takes_another_type_says_what_goes_with_the_old_one(write, words, said, caplog):
    """Where the new one has it too: what means nothing there is not missed."""
    recipe = write(MINIMAL + "specialist: {policy_loss: {type: clip, aggregation: turn, dual_clip: 3}}\n")
    load_recipe([recipe], words)
    assert len(caplog.messages) == bool(said)
    for part in said:
        assert part in caplog.messages[0]
        assert "dual_clip" not in caplog.messages[0]


def test_one_key_keeps_the_other_defaults_of_its_place(write):
    recipe = load_recipe([write(MINIMAL + "distill: {optim: {lr: 3e-5}}\n")])
    assert recipe.distill.optim == DistillConfig().optim.model_copy(update={"lr": 3e-5})
    assert recipe.specialist == Recipe.model_fields["specialist"].default


@pytest.mark.parametrize(
    "words", [["--distill.lr", "3e-5"], ["--distill.optim.lr=3e-5"], ["--distill.optim", "{lr: 3e-5}"]]
)
def test_overrides_reach_the_same_field(write, words):
    assert load_recipe([write(MINIMAL)], words).distill.optim.lr == 3e-5


def test_overrides_reach_into_free_mappings_and_keep_text_text(write):
    words = ["--model.config.num_layers", "3", "--domains.sort.params.digits=6", "--name", "2026"]
    recipe = load_recipe([write(MINIMAL)], words)
    assert recipe.model.config is not None
    assert recipe.model.config["num_layers"] == 3
    assert recipe.domains["sort"].params == {"digits": 6}
    assert recipe.name == "2026"


def test_the_order_of_two_options_of_one_union_does_not_matter(write):
    words = ["--distill.loss.k", "4", "--distill.loss.type", "topk"]
    assert load_recipe([write(MINIMAL)], words).distill.loss == TopKKL(k=4)


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        ("{a: []}", "`domains.sort.teacher.a` is []: list should have at least 1 item"),
        ("{a: [[0, 1, 2]]}", "`domains.sort.teacher.a[0]` is [0, 1, 2]: list should have at most 2 items"),
        ("{a: [[x, 1]]}", "`domains.sort.teacher.a[0][0]` is 'x': input should be a valid integer"),
        ("{a: [[0, .nan]], b: 1}", "`domains.sort.teacher.a[0][1]` is '.nan', which is no finite number"),
        ("{a: null}", "`domains.sort.teacher.a` is None: input should be a valid number"),
        ("3.5", "`domains.sort.teacher` is 3.5: input should be a valid string"),
    ],
)
def test_of_a_setting_with_several_forms_the_error_of_the_one_given_is_told(write, teacher, said):
    text = MINIMAL.replace("  sort: {", f"  sort: {{teacher: {teacher}, ")
    assert text != MINIMAL
    with pytest.raises(ConfigError) as caught:
        load_recipe([write(text)])
    assert said in str(caught.value)
    assert str(caught.value).count("domains.sort.teacher") == 1


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("distill: {stps: 3}", ["recipe.yaml:7", "unknown key `distill.stps`", "`distill.steps`"]),
        ("distill: {lr: 3}", ["unknown key `distill.lr`", "`distill.optim.lr`"]),
        ("distill: {loss: {type: full, k: 3}}", ["`distill.loss.k` belongs to type 'topk'"]),
        ("distill: {loss: {type: ful}}", ["`distill.loss.type` is 'ful'", "did you mean 'full'?"]),
        ("distill: {mixture: one_hat}", ["`distill.mixture` is 'one_hat'", "did you mean 'one_hot'?"]),
        ("distill: {steps: -1}", ["`distill.steps` is -1", "greater than 0"]),
        ("baselines: {methods: [tis]}", ["`baselines.methods[0]` is 'tis'", "did you mean 'ties'?"]),
        ("teachers: {a: {}}", ["teachers.a has no path", "no domain of that name"]),
        (
            "teachers: {a: {type: sglang, urls: [u]}}",
            ["recipe.yaml:7", "teachers.a.urls", "number 1 is no URL"],
        ),
        (
            "teachers: {a: {type: sglang, urls: ['http://u']}}",
            ["recipe.yaml:7", "give path, the model that the"],
        ),
        ("teachers: {a: {path: p, urls: [u]}}", ["`teachers.a.urls` belongs to type 'sglang'"]),
        ("teachers: {a: {path: p, type: streaming}}", ["must be one of local, streamed", "'streamed'?"]),
        ("teachers: {a: {path: p, server: {urls: [u]}}}", ["`teachers.a.server` is no", "{type: sglang,"]),
        ("distill: {teachers: resident}", ["resident teachers are called local now"]),
        ("distill: {backend: megatron}", ["`distill.backend` is no setting", "{type: megatron}"]),
        ("distill: {megatron: {tensor_parallel: 2}}", ["`distill.megatron` is no setting"]),
        (
            "distill: {teachers: {path: p}}",
            ["`distill.teachers.path` is no setting", "its own `teachers.NAME.path`"],
        ),
        ("distill: [1]", ["`distill` is [1], but takes a mapping"]),
        ("seed: 1\nseed: 2", ["recipe.yaml:8", "'seed' appears twice"]),
        ("1: 2", ["recipe.yaml:7", "'1' is not text"]),
        ("distill: {steps: 2, seed:3}", ["recipe.yaml:7", "'seed:3' has no value; put a blank"]),
        ("seed: [", ["not valid YAML"]),
        ("distill: {optim: {lr: 1e999}}", ["`distill.optim.lr` is inf"]),
        (
            "specialist: {reference_kl: {estimator: k1}}",
            ["k1 with placement loss has a zero or wrong gradient"],
        ),
        ("specialist: {advantage: {type: reinforce}}", ["did you mean 'reinforce_plus_plus'?"]),
        ("specialist: {advantage: {type: reinforce_plus_plus}}", ["set filter_zero_variance to false"]),
        ("specialist: {policy_loss: {type: gspp}}", ["`specialist.policy_loss.type` is 'gspp'", "'gspo'?"]),
        ("specialist: {policy_loss: {type: [1]}}", ["must be one of clip, gspo, cispo"]),
        (
            "specialist: {policy_loss: {type: gspo, clip_low: -0.1}}",
            ["`specialist.policy_loss.clip_low` is -0.1"],
        ),
        ("specialist: {policy_loss: {clip_low: 1.2}}", ["`specialist.policy_loss.clip_low` is 1.2"]),
        ("specialist: {policy_loss: {type: cispo, dual_clip: 3}}", ["dual_clip` belongs to type 'clip'"]),
        ("specialist: {policy_loss: 3}", ["`specialist.policy_loss` is 3, but takes a mapping"]),
        ("specialist: {advantage: rloo}", ["is 'rloo', but takes a mapping", "write {type: rloo}"]),
        ("specialist: {policy_loss: gspo}", ["`specialist.policy_loss` is 'gspo'", "write {type: gspo}"]),
        ("distill: {loss: k1}", ["`distill.loss` is 'k1'", "write {type: k1}"]),
        ("distill: {policy_loss: {type: gspo}}", ["`distill.policy_loss.type` is 'gspo'"]),
        ("specialist: {epochs: 0}", ["`specialist.epochs` is 0", "greater than 0"]),
        ("specialist: {reference_kl: {coef: -0.1}}", ["`specialist.reference_kl.coef` is -0.1"]),
        ("specialist: {reference_kl: {target: 0.1}}", ["target has no effect with coef 0"]),
        ("specialist: {reference_kl: {coef: 0.1, target: 0}}", ["`specialist.reference_kl.target` is 0"]),
        ("specialist: {reference_kl: {coef: 0.1, gain: 0.5}}", ["gain has no effect without target"]),
        ("specialist: {reference_kl: {coef: 0.1, discount: 1}}", ["set placement to advantage"]),
        ("specialist: {group_size: 1}", ["advantage grpo compares", "{type: reinforce_plus_plus}"]),
        (
            "storage: {published: 's3:/b/x'}",
            ["recipe.yaml:7", "storage.published", "write s3://b/x, or ./s3:/b/x"],
        ),
        ("teachers: {a: {path: 's3:/b/x'}}", ["recipe.yaml:7", "teachers.a", "write s3://b/x, or ./s3:/b/x"]),
        ("specialist: {group_size: 0}", ["`specialist.group_size` is 0"]),
        ("distill: {rl_coef: 1, advantage: {type: rloo}}", ["set samples_per_prompt to 2 or more"]),
    ],
)
def test_a_wrong_file_gives_one_sentence(write, text, parts):
    message = refusal([write(MINIMAL + text + "\n")])
    assert all(part in message for part in parts), message
    assert "\n" not in message
    assert "pydantic" not in message


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        *[(text, "put a text that holds `: ` in quotes") for text in ("a: b: c", "a: b\n c: d")],
        ("\ta: b", "indent with blanks"),
        *[
            (text, "put the text in quotes that begins with this sign")
            for text in ("a: @b", "a: `b", "a: %b")
        ],
        *[(text, "put the text in quotes that begins with * or &") for text in ("a: *b", "a: * b", "a: & b")],
        *[(text, "close the quotes that were opened") for text in ("a: 'b", 'a: "b')],
        *[(text, "close the bracket") for text in ("a: [1, 2", "a: {b: 1", "a: [b c: d: e]")],
        *[(text, "write \\\\ for a backslash") for text in ('a: "\\q"', 'a: "\\x"')],
        ('a: "\\UFFFFFFFF"', "use single quotes"),
        ('a: "\\U00110000"', "use single quotes"),
        *[(text, "on a line of its own") for text in ("a: - b", "a: ? b")],
        *[(text, "give a value, and put the text in quotes") for text in ("a: ]", "a: }", "{")],
        *[(text, "keep one document") for text in ("--- a\n--- b", "a: b\n---\nc: d", "--- |\n a\n...b")],
        ("a: \x01", "take the control sign out"),
        *[(text, "as in `<<: *NAME`") for text in ("<<: 3", "<<: [1]\na: b")],
        *[(text, "on the line below the sign | or >") for text in ("a: >x\n b", "a: |99\n b", "a: |0\n b")],
        *[
            (text, "mend the indentation")
            for text in ("a: 'b' c", "a: b #c\n  d: e", "a: b,\n,", "a: &b &c d")
        ],
        *[(text, "put the text in quotes that begins with !") for text in ("a: !<b", "a: !b!c d")],
        *[
            (text, "take the line that begins with % out")
            for text in ("%YAML 3.0\n---\na: b", "%YAML x\n--- a")
        ],
        ("a: &b [*b]", "take it out there"),
        ("[1]", "write lines of the form `KEY: VALUE`"),
        ("? [a]\n: b", "write a single word"),
        ("a: " + "9" * 6000, "a number of 6000 characters; give one of 100 at most"),
        ("a: " + "[" * 6000, "more than 64 levels inside each other; write less"),
        ("a: " + "x" * 200_000, "give one of 100,000 at most"),
        ("# x\n" * 200_000, "more than 524,288 bytes; is it the right file?"),
    ],
)
def test_what_is_no_recipe_is_told_with_the_way_out(write, text, way_out):
    message = refusal([write(text + "\n")])
    assert way_out in message
    assert not {"sys.", "int_max"} & set(message.split())


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--lr", "1"], ["--lr is ambiguous", "--distill.optim.lr", "--specialist.optim.lr"]),
        (["--distil.lr", "1"], ["--distil.lr", "did you mean --distill.optim.lr?"]),
        (["--distill.stps", "1"], ["did you mean --distill.steps?"]),
        (["--seed"], ["--seed needs a value"]),
        (["--seed", "--name", "a"], ["--seed needs a value"]),
        (["--seed", "one"], ["--seed: `seed` is 'one'", "integer"]),
        (["--distill.lr", "true"], ["`distill.optim.lr` is 'true'", "number"]),
        (["--distill.steps", "true"], ["`distill.steps` is 'true'", "integer"]),
        (["--baselines.scales", "[0.1, false]"], ["`baselines.scales[1]` is 'false'", "number"]),
        (["--domains.sort.weight", "true"], ["`domains.sort.weight` is 'true'", "number"]),
        (["--runtime.threads", "true"], ["`runtime.threads` is 'true'", "integer"]),
        (["--seed", "["], ["--seed: '[' is not a valid value"]),
        (["seed"], ["'seed' is not an option"]),
        (["--distill.optim", "3", "--distill.lr", "1"], ["'optim' as a whole"]),
        (["--launch", "fast", "--launch.engines", "2"], ["--launch.engines", "'launch' as a whole"]),
        (["--launch", "local", "--launch.engines", "2"], ["--launch.engines", "belongs to type 'ray'"]),
        (["--launch", "ray", "--launch", "local"], ["--launch", "given twice"]),
        (["--distill.lr", "1", "--distill.lr", "3e-5"], ["--distill.lr", "given twice"]),
        (["--distill.optim.lr", "1", "--distill.lr=1"], ["--distill.lr", "given twice"]),
        (["--distill.lr", "1", "--distill.optim", "{lr: 1}"], ["--distill.optim", "given twice"]),
        (["--distill.optim", "{lr: 1}", "--distill.optim", "{lr: 2}"], ["--distill.optim", "given twice"]),
        (["--distill.optim", "{lr: 1, lr: 2}"], ["--distill.optim", "'lr' appears twice"]),
        (["--distill.optim", "{lr:1}"], ["--distill.optim", "'lr:1' has no value; put a blank after its"]),
    ],
)
def test_a_wrong_option_gives_one_sentence(write, words, parts):
    message = refusal([write(MINIMAL)], words)
    assert all(part in message for part in parts), message


def test_missing_and_unreadable_files(tmp_path: Path):
    assert "no such recipe file" in refusal([tmp_path / "none.yaml"])
    assert "cannot be read" in refusal([tmp_path])
    assert "no recipe was given" in refusal([])
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert "a mapping of keys to values" in refusal([tmp_path / "list.yaml"])


@pytest.mark.parametrize(
    "text", ["", "\n", "# later\n", "---\n", "---\n...\n", "{}", "{ }  # later\n", "null", "~"]
)
def test_an_empty_file_is_told_wherever_it_stands(write, text, tmp_path):
    empty, recipe = tmp_path / "empty.yaml", write(MINIMAL)
    empty.write_text(text)
    for files in ([empty], [recipe, empty], [empty, recipe], [recipe, empty, recipe]):
        assert "empty.yaml: the recipe is empty; write lines" in refusal(files)


def test_a_teacher_nobody_has_is_named(write):
    message = refusal([write(MINIMAL)], ["--domains.sort.teacher", "nobody"])
    assert "domains.sort.teacher names 'nobody'" in message


words = st.text(
    alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=12
)
tricky = st.sampled_from(["3e-5", "no", "null", "~", "1:30", "0x1F", "<<", "true", "1_000", "-", "a: b", "#"])


@pytest.mark.slow
@given(name=words | tricky, lr=st.floats(1e-12, 1e6), value=words | tricky | st.integers() | st.booleans())
def test_dump_reads_back_equal(tmp_path_factory, name, lr, value):
    data = yaml.safe_load(MINIMAL.replace("1e-6", "0.5"))
    data |= {"name": name, "distill": {"optim": {"lr": lr}}}
    data["domains"]["sort"]["params"] = {"value": value}
    recipe = Recipe.model_validate(data)
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe([path]) == recipe


trees = st.recursive(
    st.integers(0, 3), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
)


@given(left=trees, right=trees)
def test_merge_keeps_every_leaf_of_the_right(left, right):
    merged = merge_values(left, right, None)
    assert merge_values(merged, right, None) == merged

    def holds(whole, part):
        if not (isinstance(part, dict) and isinstance(whole, dict)):
            return whole == part
        return all(key in whole and holds(whole[key], value) for key, value in part.items())

    assert holds(merged, right)


def test_complete_leaves_unknown_keys_for_the_error_message():
    assert fill_defaults(Recipe, {"nam": 1}) == {"nam": 1}


def test_launch_by_name_takes_settings_from_other_places(write):
    by_name = write(MINIMAL + "launch: ray\n")
    settings = write("launch: {engines: 2}\n", "more.yaml")
    assert load_recipe([by_name]).launch == RayLaunch()
    assert load_recipe([by_name, settings], ["--launch.teachers", "3"]).launch == RayLaunch(
        engines=2, teachers=3
    )
    assert load_recipe([by_name, settings], ["--launch", "local"]).launch == LocalLaunch()
    assert "did you mean 'ray'" in refusal([by_name], ["--launch", "rey"])
    assert "belongs to type 'ray'" in refusal([write(MINIMAL), settings])


@pytest.mark.parametrize(
    "words",
    [
        ["--launch", "ray", "--launch.engines", "2"],
        ["--launch.engines", "2", "--launch", "ray"],
        ["--launch", "ray", "--launch", "{engines: 2}"],
        ["--launch", "{engines: 2}", "--launch", "ray"],
    ],
)
def test_options_choose_a_launch_by_name_and_set_it(write, words):
    assert load_recipe([write(MINIMAL)], words).launch == RayLaunch(engines=2)


def test_adapters_go_with_every_back_end_engine_and_launcher(write):
    text = MINIMAL.replace("domains:", "  lora: {rank: 4}\ndomains:")
    recipe = load_recipe([write(text)])
    assert recipe.model.lora is not None
    assert (recipe.model.lora.rank, recipe.model.lora.alpha) == (4, 32.0)
    served = "rollout: {engine: {type: sglang, urls: ['http://127.0.0.1:1']}}"
    backends = [f"train: {{backend: {name}}}" for name in ("deepspeed", "megatron")]
    for elsewhere in ("launch: ray", served, "train: {context_parallel: 2}", *backends):
        assert load_recipe([write(text + elsewhere)]).model.lora == recipe.model.lora


def test_a_teacher_without_type_is_of_the_kind_of_the_merge(write):
    text = MINIMAL + "  add3: {source: 'procedural:add3'}\nteachers: {sort: {path: p}, add3: {type: local}}\n"
    recipe = load_recipe(
        [write(text)], ["--distill.teachers.type", "megatron", "--distill.teachers.keep", "true"]
    )
    assert recipe.teachers["sort"] == MegatronTeacherEntry(path="p", keep=True)
    assert recipe.teacher_settings("add3").type == "local"
    assert recipe.specialist_domains() == ["reverse", "add3"]
    assert (
        load_recipe([write(text)], ["--distill.teachers", "local"]).teacher_settings("sort").type == "local"
    )
    with pytest.raises(ConfigError, match=r"--distill.backend is no setting; set"):
        load_recipe([write(text)], ["--distill.backend", "torch"])


def test_a_domain_changes_what_its_specialist_is_trained_with_and_keeps_the_rest(write):
    own = (
        "  sort: {source: 'procedural:sort', specialist: {steps: 7, advantage: {type: rloo}, optim: {lr: 1}}}"
    )
    general = "specialist: {group_size: 5, advantage: {type: grpo, eps: 0.1}, optim: {beta1: 0.5, lr: 2}}\n"
    path = write(MINIMAL.replace('  sort: {source: "procedural:sort"}', own) + general)
    recipe = load_recipe([path], ["--specialist.optim.beta2", "0.7", "--specialist.weight_decay", "0.3"])
    found, other = (recipe.for_domain(name).specialist for name in ("sort", "reverse"))
    assert (found.steps, found.group_size, found.advantage.type) == (7, 5, "rloo")
    assert (found.optim.lr, found.optim.beta1, found.optim.beta2, found.optim.weight_decay) == (
        1,
        0.5,
        0.7,
        0.3,
    )
    assert (other.steps, other.optim.lr, other) == (120, 2, recipe.specialist)
    assert load_recipe([write(dump_recipe(recipe), "dumped.yaml")]) == recipe
    changed = load_recipe([path], ["--domains.sort.specialist.lr", "3"])
    assert changed.for_domain("sort").specialist.optim.lr == 3
    path.write_text(path.read_text().replace("steps: 7", "stepz: 7"))
    assert "recipe.yaml:5" in refusal([path])
    assert "did you mean `domains.sort.specialist.steps`?" in refusal([path])


def test_a_domain_is_written_in_its_own_way_and_keeps_the_rest(write):
    own = "  sort: {source: 'procedural:sort', rollout: {temperature: 0.5}, distill: {prompts_per_domain: 3}}"
    general = "rollout: {max_new_tokens: 9, max_running: 7, generate: 'a:b'}\n"
    path = write(MINIMAL.replace('  sort: {source: "procedural:sort"}', own) + general)
    recipe = load_recipe([path], ["--rollout.top_k", "4"])
    found, other = (recipe.for_domain(name) for name in ("sort", "reverse"))
    assert found.rollout == recipe.rollout.model_copy(update={"temperature": 0.5})
    assert (found.rollout.max_new_tokens, found.rollout.top_k, found.rollout.max_running) == (9, 4, 7)
    assert (found.distill.prompts_per_domain, found.distill.steps) == (3, recipe.distill.steps)
    assert other == recipe
    assert recipe.drawn_alike().for_domain("sort").rollout == recipe.rollout
    assert load_recipe([write(dump_recipe(recipe), "dumped.yaml")]) == recipe
    longer = load_recipe([path], ["--domains.sort.rollout.max_new_tokens", "30"])
    assert (longer.longest_response(), recipe.longest_response()) == (30, 9)


@pytest.mark.parametrize(
    ("settings", "distill", "complaint"),
    [
        ("rollout: {max_running: 4}", "", "domains.sort.rollout.max_running"),
        ("rollout: {temperature: 0}", "", "domains.sort.rollout.temperature"),
        ("distill: {steps: 4}", "", "domains.sort.distill.steps"),
        ("distill: {rl_coef: 1}", "", "set distill.rl_coef above 0"),
        ("rollout: {top_p: 0.9}", "{loss: {type: k1}}", "set distill.loss.loss.correction to {type: tis}"),
        ("rollout: {top_k: 9}", "{loss: {type: k2}}", "set distill.policy_loss.correction to {type: tis}"),
        (
            "rollout: {temperature: 2}",
            "{rl_coef: 1, samples_per_prompt: 2}",
            "set distill.policy_loss.correction to {type: tis}",
        ),
    ],
)
def test_a_domains_settings_that_could_not_hold_are_refused(write, settings, distill, complaint):
    own = f"  sort: {{source: 'procedural:sort', {settings}}}"
    text = MINIMAL.replace('  sort: {source: "procedural:sort"}', own)
    assert complaint in refusal([write(text + (f"distill: {distill}\n" if distill else ""))])


@pytest.mark.parametrize(
    ("field", "given", "sentence"),
    [
        ("success", "won", "'won' is no rule: give a number, or info.NAME"),
        ("success", "info.", "'info.' is no rule: give a number, or info.NAME"),
        ("observation_role", "assistant", "'assistant' is no role of an environment: give one word of small"),
        ("observation_role", "'<|user|>'", "'<|user|>' is no role of an environment: give one word of small"),
        ("observation_role", "''", "'' is no role of an environment: give one word of small letters"),
    ],
)
def test_what_no_environment_can_say_is_refused(write, field, given, sentence):
    environment = f'  own: {{source: "procedural:sort", environment: {{type: tools, {field}: {given}}}}}\n'
    said = refusal([write(MINIMAL + environment)])
    assert f"`domains.own.environment.{field}`: {sentence}" in said


@pytest.mark.parametrize(("success", "taken"), [("0.9", 0.9), ("'0.9'", 0.9), ("info.won", "info.won")])
def test_success_of_an_episode_is_a_bound_or_a_name(write, success, taken):
    environment = f'  own: {{source: "procedural:sort", environment: {{type: tools, success: {success}}}}}\n'
    config = load_recipe([write(MINIMAL + environment)]).domains["own"].environment
    assert config is not None
    assert config.success == taken


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize(("signal", "loss"), [("topk", "topk"), ("sampled", "k1")])
def test_served_log_probabilities_at_another_temperature_are_refused(write, kind, signal, loss):
    recipe = {
        "name": "run",
        "model": {"path": "base"},
        "teachers": {"math": {"type": kind, "path": "m", "signal": signal, "urls": ["http://127.0.0.1:1"]}},
        "domains": {"math": {"source": "math.jsonl", "reward": "exact", "teacher": "math"}},
        "rollout": {"temperature": 0.5},
        "distill": {"loss": {"type": loss}},
    }
    with pytest.raises(ConfigError, match=r"temperature 1 only.*set teachers\.math\.signal to hidden"):
        load_recipe([write(yaml.safe_dump(recipe))], [])
    recipe["rollout"] = {"temperature": 1.0}
    assert load_recipe([write(yaml.safe_dump(recipe))], []).rollout.temperature == 1.0


def test_the_home_of_a_models_folder_is_written_out(write, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    recipe = absolute_paths(
        load_recipe([write(MINIMAL)], ["--model.tokenizer", "~/model", "--run_dir", "~/run"])
    )
    assert (recipe.model.tokenizer, recipe.run_dir) == ("/somewhere/model", "~/run")

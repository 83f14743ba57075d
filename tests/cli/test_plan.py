"""`opd plan`: printed from metadata alone, with or without a recipe."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from watched import without_waiting

from opd.pipelines.cli import main
from opd.pipelines.options import build_parser
from opd.storage.sample_lot import SampleRecord
from opd.storage.sample_store import SampleWriter
from opd.types import Status

RECIPE = """\
name: demo
model:
  config: {model_type: llama, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4}
domains:
  sort: {source: "procedural:sort"}
  reverse: {source: "procedural:reverse", teacher: {sort: 0.5, reverse: 0.5}}
distill: {prompts_per_domain: 6, samples_per_prompt: 2}
"""


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Twelve trajectories of two teachers, one of which failed."""
    items = []
    for i in range(12):
        status, teacher = Status.FAILED if i == 5 else Status.COMPLETED, ("zeta", "alpha")[i % 2]
        record = SampleRecord(f"{i}", 0, 100 * (i + 1), teacher=teacher, status=status)
        items.append((record, {"token_ids": np.ones(100 * (i + 1), np.int32)}))
    with SampleWriter(tmp_path / "store", durable=False) as writer:
        writer.put(items)
    return str(tmp_path / "store")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return str(path)


def test_a_stores_plan_needs_no_recipe_and_no_torch(store: str) -> None:
    code = "import sys; from opd.pipelines.cli import main; main(sys.argv[1:])"
    code += "; assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "plan", "--store", store, "--ranks", "2", "--mini-batch", "4"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, without_waiting(result.stderr)) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == f"plan      11 trajectories in {store}: 3 mini-batches of 4 on 2 ranks"
    assert lines[1] == "tokens    7,200; trajectories of 100 to 1,200, mean 655"
    assert lines[2] == "teachers  alpha 5, zeta 6"
    listed = [line.split()[:2] for line in lines if line.startswith("             ")]
    assert listed == sorted(listed)
    assert {rank for rank, _ in listed} == {"0", "1"}


def test_ranks_that_share_sequences_are_planned_together(recipe: str, capsys, ends) -> None:
    words = ["plan", recipe, "--train.context_parallel", "2"]
    said = {}
    for ranks in (None, "2", "4"):
        said[ranks] = ends(0, [*words, *([] if ranks is None else ["--ranks", ranks])]).out
    assert said[None] == said["2"]
    assert "on 4 ranks, 2 of them for each trajectory" in said["4"]
    assert "of a rank of a stage" in said["4"]
    assert main([*words, "--ranks", "3"]) == 2
    assert "3 ranks cannot be divided into groups of train.context_parallel 2" in capsys.readouterr().err
    words = ["plan", recipe, "--train.context_parallel", "auto", "--distill.batch.max_tokens"]
    for most, told in (
        ("10", "on 4 ranks, 4 of them for each trajectory (train.context"),
        ("1000", "on 4 ranks ("),
    ):
        assert told in ends(0, [*words, most, "--ranks", "4"]).out


@pytest.mark.parametrize("cut", ["tensor_parallel", "pipeline_parallel"])
def test_ranks_that_cut_a_student_have_one_batch(recipe: str, cut: str, ends) -> None:
    words = ["plan", recipe, "--train.backend", "megatron", f"--train.{cut}", "2", "--ranks"]
    for ranks, first in (("2", {"0"}), ("4", {"0", "1"})):
        lines = ends(0, [*words, ranks]).out.splitlines()
        assert lines[0].endswith(f"on {ranks} ranks, 2 of them for each trajectory")
        assert {line.split()[0] for line in lines if line.startswith("             ")} == first


def test_a_recipes_step_is_planned_in_the_order_of_teachers(recipe: str, ends) -> None:
    lines = ends(0, ["plan", recipe, "--ranks", "2", "--rollout.max_new_tokens", "50"]).out.splitlines()
    assert lines[0] == "plan      one step of demo, responses of 50 tokens: 1 mini-batch of 24 on 2 ranks"
    counts = dict(part.split() for part in lines[2].removeprefix("teachers  ").split(", "))
    assert sum(map(int, counts.values())) == 24
    assert list(counts) == ["sort", "reverse"]
    listed = [line.split()[:3] for line in lines if line.startswith("             ")]
    assert listed == [["0", "sort,", "reverse"], ["1", "sort,", "reverse"]]


def test_a_balancing_loss_keeps_one_teacher_a_micro_batch(recipe: str, ends) -> None:
    experts = "qwen3_moe, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32"
    Path(recipe).write_text(RECIPE.replace("llama", experts))
    lines = ends(0, ["plan", recipe, "--ranks", "2", "--train.balance_loss", "0.01"]).out.splitlines()
    listed = [line.split()[:2] for line in lines if line.startswith("             ")]
    assert listed == [["0", "sort"], ["0", "reverse"], ["1", "sort"], ["1", "reverse"]]


def test_answers_that_teachers_write_first_are_told(recipe: str, capsys, ends) -> None:
    assert main(["plan", recipe, "--distill.prefixes", "teacher", "--distill.steps", "10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(
        "answers   all 240 of the 10 steps are written by the teachers before the first"
    )
    words = ["--distill.warm_up.steps", "3", "--distill.mixture", "geometric"]
    lines = ends(0, ["plan", recipe, *words]).out.splitlines()
    assert lines[1].startswith("answers   up to 72 of 3 steps are written by foreign teachers, and held in")


def test_what_specialists_ask_and_a_stage_holds_is_told(recipe: str, ends) -> None:
    """Beside a step of the merge: answers that are not learnt from, copies and a critic."""
    words = ["--specialist.refill.limit", "4", "--specialist.difficulty.samples", "6"]
    words += ["--evaluation.base_kl_every", "5", "--specialist.steps", "10", "--rollout.max_new_tokens", "50"]
    *_, sort, reverse, memory, phases, disk = ends(0, ["plan", recipe, *words]).out.splitlines()
    assert sort == reverse.replace("reverse", "sort")
    answers = "10 steps of 64 prompts x 8 answers of at most 50 tokens: 256,000 tokens"
    assert sort == (
        f"answers   specialist sort: {answers}; refill takes up to 4 times as many: 1,024,000; before the"
        " first step 12,288 answers measure the difficulty of prompts: 614,400 tokens"
    )
    assert re.match(r"memory    at most [\d.]+ MiB of a stage \(weights", memory)
    assert "frozen copy of the start" in memory
    size = r"[\d.]+ [KM]iB"
    assert re.fullmatch(
        rf"phases    rollout {size}, score {size}, train {size}, sync {size}; at most {size} with"
        r" runtime.offload \{engine: true, trainer: true\}",
        phases,
    )
    assert re.match(r"disk      at most [\d.]+ GiB of the run \(model folders", disk)


def test_what_the_engine_records_beside_tokens_is_told(recipe: str, capsys) -> None:
    """512 answers of at most 50 tokens a step: masks, and choices of two experts in each of two layers."""
    words = ["--rollout.max_new_tokens", "50", "--rollout.max_sequence", "64", "--specialist.steps", "30"]
    mixture = "{model_type: qwen3_moe, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2"
    mixture += ", head_dim: 16, num_key_value_heads: 2, num_experts: 4, num_experts_per_tok: 2"
    mixture += ", moe_intermediate_size: 16}"
    # 4 bytes for each of 3 tokens and their number; 4 bytes of choices a position
    masks, choices = "sampling masks 400.0 KiB", "choices of experts 128.0 KiB"
    for given, due in (
        ([], ""),
        (["--rollout.top_k", "3"], f"{masks} in memory for a step, in the log at most 7.8 MiB between"),
        (["--rollout.top_k", "3", "--rollout.log", "null"], f"{masks} in memory for a step"),
        (["--rollout.top_k", "3", "--rollout.replay_masks", "false"], ""),
        (["--rollout.top_k", "3", "--model.config", mixture], f"{masks}, {choices} in memory for"),
        (["--model.config", mixture, "--storage.trajectories", "disk"], f"{choices} in samples on disk for"),
        (["--model.config", mixture, "--rollout.replay_experts", "false"], ""),
    ):
        assert main(["plan", recipe, *words, *given]) == 0
        told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("recorded")]
        assert len(told) == 2 * bool(due), given
        assert not due or told[0].startswith(f"recorded  specialist sort: at most {due}")


def test_the_fixed_cost_of_a_micro_batch_is_told_and_can_be_set(store: str, capsys) -> None:
    seconds = []
    for words in ([], ["--overhead-ms", "2000"], ["--overhead-ms", "0"]):
        assert main(["plan", "--store", store, "--tflops", "1000", *words]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("time")]
        assert f"costs {(words or ['', '10'])[1]} ms of it however small it is (--overhead-ms)" in line
        seconds.append(float(line.split()[1]))
    assert seconds[2] < seconds[0] < seconds[1]


def test_trajectories_without_tokens_are_planned_too(tmp_path: Path, ends) -> None:
    with SampleWriter(tmp_path, durable=False) as writer:
        writer.put([(SampleRecord(f"{i}", 0, 0), {}) for i in range(3)])
    assert "3 trajectories in" in ends(0, ["plan", "--store", str(tmp_path), "--mini-batch", "2"]).out


def test_what_does_not_fit_is_said(store: str, capsys, ends) -> None:
    out = ends(0, ["plan", "--store", store, "--budget-mb", "600"]).out
    assert "oversize  " in out
    found = re.search(r"(\d+) of (\d+) do not fit the budget even alone: give --budget-mb (\d+)", out)
    assert found
    assert 0 < int(found[1]) < int(found[2])
    assert main(["plan", "--store", store, "--budget-mb", found[3]]) == 0
    assert "oversize" not in capsys.readouterr().out, "the number to use is enough"


def test_where_nothing_fits_the_numbers_to_use_are_said(store: str, recipe: str, ends) -> None:
    words = ["plan", recipe, "--store", store, "--distill.batch.max_tokens", "1"]
    out = ends(0, [*words, "--budget-mb", "0.01"]).out
    found = re.search(
        r"no trajectory fits .*: give --budget-mb (\d+) and --distill.batch.max_tokens (\d+)", out
    )
    assert found
    assert "oversize" not in ends(0, [*words[:-1], found[2], "--budget-mb", found[1]]).out


def test_no_help_sends_the_reader_into_the_source(ends) -> None:
    names = [name for name in build_parser()._subparsers._group_actions[0].choices]
    for words in ([], *([name] for name in names)):
        said = re.sub(r"DeepSpeed|DeepSeek|TensorBoard|IcePop", "", ends(0, [*words, "--help"]).out)
        assert not re.search(r"[a-z_]+\.py\b|[A-Z][a-z]+[A-Z][a-z]\w+", said), words


BEYOND = [("--ranks", value) for value in ("0", "many", "1.5", "1" * 9)] + [
    (f"--{name}", value)
    for name in ("budget-mb", "tflops", "read-mb", "overhead-ms")
    for value in ("nan", "inf", "1e400", "-1", "x")
]
"""Options with a value that no plan is made of."""


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "needs a recipe, or --store"),
        (["--store", "none"], "there are no samples in none"),
        (["--store", "{store}", "--seed", "1"], "opd plan without a recipe takes no settings"),
        *((["--store", "{store}", name, value], f"argument {name}: give a ") for name, value in BEYOND),
    ],
)
def test_a_users_error_is_one_line(store: str, words: list[str], part: str, ends) -> None:
    captured = ends(2, ["plan", *(word.format(store=store) for word in words)])
    assert captured.out == ""
    assert without_waiting(captured.err).count("\n") == 1
    assert part in captured.err


@pytest.mark.parametrize(("policy", "longest"), [("drop", 8), ("truncate", 26)])
def test_prompts_without_room_are_dealt_with_as_the_run_does(
    tmp_path: Path, ends, policy: str, longest: int
) -> None:
    asked = [f"{n:02}" if n % 2 else f"{n:040}" for n in range(20)]
    lines = [json.dumps({"prompt": prompt, "label": "1"}) for prompt in asked]
    (tmp_path / "p.jsonl").write_text("\n".join(lines) + "\n")
    place = f"source: {tmp_path}/p.jsonl"
    file = f'{{{place}, reward: "math:sqrt", held_out: 0.5, long_prompts: {policy}, teacher: sort}}'
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("distill:", f"  file: {file}\ndistill:"))
    words = ["--rollout.max_new_tokens", "6", "--rollout.max_sequence", "26"]
    printed = ends(0, ["plan", str(tmp_path / "recipe.yaml"), *words]).out
    assert "prompts   file: 10 of 20 prompts are longer than the 20 tokens" in printed
    assert (f" to {longest}, mean" in printed) is (policy == "truncate")

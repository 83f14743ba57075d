"""Data, rewards and recipes of public reports."""

import datetime
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml
from public_reports import Report, command, doctor_says, refused, save_model, write_recipe, write_rows
from reported_rewards import scores

from opd.config.load import load_recipe
from opd.config.recipe import DomainConfig
from opd.data.load import load_domain
from opd.rollout.prompts import Prompt

GOOD = [{"prompt": f"<a>{i}=", "label": str(i)} for i in range(20)]


def loaded(source: Path) -> list[Prompt]:
    """All prompts of a file."""
    config = DomainConfig.model_validate({"source": str(source), "reward": "exact"})
    domain = load_domain("a", config, seed=0, held_out_prompts=1000)
    return [*domain.train, *domain.held_out]


def reads(write: Callable[[Path], Path], expected: Callable[[list[Prompt]], bool]) -> Callable[[Path], None]:
    """The prompts of a file are as `expected`."""

    def tried(place: Path) -> None:
        found = loaded(write(place / "rows.jsonl"))
        assert expected(found), found[:3]

    return tried


def unread(
    write: Callable[[Path], Path], pattern: str, reward: Any = "cli_reward:length"
) -> Callable[[Path], None]:
    """Doctor and run refuse a file."""

    def tried(place: Path) -> None:
        own = {"source": str(write(place / "data.jsonl")), "reward": reward}
        recipe = write_recipe(place, save_model(place / "model"), domains={"a": own})
        refused(*command("doctor", str(recipe)), pattern)
        refused(*command("run", str(recipe), "--out", str(place / "run")), pattern)

    return tried


def lines(*rows: Any) -> Callable[[Path], Path]:
    return lambda path: write_rows(path, [*GOOD, *rows])


def raw(data: bytes) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        path.write_bytes(data)
        return path

    return write


def table(**columns: Any) -> Callable[[Path], Path]:
    """A .parquet file."""

    def write(path: Path) -> Path:
        import pyarrow
        import pyarrow.parquet

        path = path.with_suffix(".parquet")
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        return path

    return write


PARQUET = [f"<a>{i}=" for i in range(20)]


def trains(write: Callable[[Path], Path], reward: str = "reported_rows:characters") -> Callable[[Path], None]:
    """A run of two steps."""

    def tried(place: Path) -> None:
        own = {"source": str(write(place / "data.jsonl")), "reward": reward}
        recipe = write_recipe(place, save_model(place / "model"), domains={"a": own})
        doctor_says(place, recipe, "0 errors")
        words = ["specialist", str(recipe), "--domain", "a", "--out", str(place / "run")]
        status, said = command(*words)
        assert status == 0, said

    return tried


def says(text: str, key: str, value: Any) -> Callable[[Path], None]:
    """A recipe with this text has this value."""

    def tried(place: Path) -> None:
        path = write_recipe(place, "model")
        (place / "more.yaml").write_text(text)
        found: Any = load_recipe([path, place / "more.yaml"])
        for name in key.split("."):
            found = getattr(found, name)
        assert found == value
        assert type(found) is type(value)

    return tried


def unsaid(text: str, pattern: str, *words: str) -> Callable[[Path], None]:
    """A recipe with this text, or a command with these words, is refused."""

    def tried(place: Path) -> None:
        path = write_recipe(place, "model")
        (place / "more.yaml").write_text(text)
        refused(*command("run", str(path), str(place / "more.yaml"), "--dry-run", *words), pattern)

    return tried


def no_room(place: Path) -> None:
    rollout = {"max_new_tokens": 32, "max_sequence": 32}
    recipe = write_recipe(place, save_model(place / "model"), rollout=rollout)
    doctor_says(
        place, recipe, r"max_new_tokens 32 leaves no room for a prompt in rollout\.max_sequence 32", status=2
    )


def tempered(place: Path) -> None:
    """Tokens at a temperature near zero are the most probable ones."""
    import numpy as np
    from public_reports import plain

    from opd.models.causal_lm import CausalLM
    from opd.rollout.torch_engine import TorchEngine
    from opd.types import RolloutRequest, SamplingParams

    folder = save_model(place / "model")
    engine = TorchEngine(CausalLM.from_pretrained(folder), max_running=2, max_sequence=40)
    written = {}
    for temperature in (0.0, 1e-6, 1e-30):
        sampling = SamplingParams(temperature=temperature, max_new_tokens=12, stop_ids=())
        chunks = list(
            engine.generate([RolloutRequest("0", np.array([2, 3, 4], dtype=np.int32), sampling, seed=1)])
        )
        written[temperature] = [int(token) for chunk in chunks for token in chunk.token_ids]
        assert all(np.isfinite(chunk.logprobs).all() for chunk in chunks)
    assert written[1e-6] == written[1e-30] == written[0.0]
    assert plain(folder) is not None


ROWS = [
    Report(
        "huggingface/datasets#8241",
        "a .jsonl file that begins with a byte order mark",
        "another schema, without a word",
        "read as without it",
        reads(
            raw(b"\xef\xbb\xbf" + b"".join(json.dumps(row).encode() + b"\n" for row in GOOD)),
            lambda p: len(p) == 20,
        ),
    ),
    Report(
        "huggingface/datasets#7222",
        "rows of which some lack a column, or say null",
        "`Couldn't cast array of type string to null`",
        "each row as it is",
        reads(
            lines(
                {"prompt": "<a>x", "label": "1", "hint": None}, {"prompt": "<a>y", "label": "1", "hint": "z"}
            ),
            lambda p: len(p) == 22,
        ),
    ),
    Report(
        "lil-lab/nlvr#1",
        "a file that is one list of objects",
        "`Extra data`",
        "refused, with what to do",
        unread(raw(json.dumps(GOOD).encode()), r"data\.jsonl:1: a list .*write every object on a line"),
    ),
    Report(
        "modelscope/ms-swift#5087",
        "rows without `prompt`",
        "`KeyError: 'prompt'`",
        "refused, with file, line and columns",
        unread(
            lambda path: write_rows(path, [{"question": "1", "answer": "2"}] * 4),
            r"data\.jsonl:1: there is no `prompt` \(columns: question, answer\)",
        ),
    ),
    Report(
        "verl-project/verl#758",
        "a table without the label that the reward compares with",
        "`KeyError: 'reward_model'` after the first rollout",
        "refused, with the row and the reward",
        unread(table(prompt=PARQUET), r"label.*is missing", "math"),
    ),
    Report(
        "verl-project/verl#3388",
        "messages in a table, as arrays of structures",
        "`The truth value of an array ... is ambiguous`",
        "read as messages",
        reads(
            table(prompt=[[{"role": "user", "content": text}] for text in PARQUET], label=["1"] * 20),
            lambda p: p[0].messages is not None and p[0].messages[0].keys() == {"role", "content"},
        ),
    ),
    Report(
        "huggingface/datasets#7617",
        "messages in a table, which pads them with null",
        "`None` in what the model reads",
        "as if the keys were not there",
        reads(
            table(
                prompt=[
                    [
                        {"role": "system", "content": "x", "name": None},
                        {"role": "user", "content": t, "name": "n"},
                    ]
                    for t in PARQUET
                ],
                label=["1"] * 20,
            ),
            lambda p: all("name" not in one.messages[0] for one in p if one.messages),
        ),
    ),
    Report(
        "mlrun/mlrun#5447",
        "dates, decimals and bytes in columns of a table",
        "`Object of type date is not JSON serializable`",
        "a run goes through",
        trains(
            table(
                prompt=PARQUET,
                label=["1"] * 20,
                when=[datetime.date(2026, 1, 2)] * 20,
                at=[datetime.datetime(2026, 1, 2, 3)] * 20,
                price=[Decimal("1.50")] * 20,
                raw=[b"\x89PNG"] * 20,
            )
        ),
        long=True,
    ),
    Report(
        "huggingface/datasets#8362",
        "whole numbers that became 4.0 beside an empty cell",
        "numbers above 2**53 change",
        "4 is right where the label is 4.0",
        scores("exact", ("4", 4.0, 1.0), ("5", 4.0, 0.0)),
    ),
    Report(
        "huggingface/datasets#5827",
        "a label `NaN`",
        "the file is not read, with three tracebacks",
        "refused, with the row",
        unread(lines({"prompt": "<a>9", "label": float("nan")}), r"NaN|nan|not finite|missing", "math"),
    ),
    Report(
        "aws-samples/foundation-model-benchmarking-tool#281",
        "empty prompts in the midst of others",
        "empty requests",
        "refused, with file and line",
        unread(lines({"prompt": "", "label": "1"}), r"data\.jsonl:21: `prompt` is ''"),
    ),
]

RECIPES = [
    Report(
        "hiyouga/LlamaFactory#4014",
        "`lr: 1e-5`, which YAML calls a text",
        "`'<=' not supported between 'float' and 'str'`",
        "the number",
        says("distill: {optim: {lr: 1e-5}}", "distill.optim.lr", 1e-5),
    ),
    Report(
        "hiyouga/LlamaFactory#8505",
        '`lr: "5e-5"` in quotes',
        "a TypeError in the optimiser",
        "the number, or refused with the key",
        says('distill: {optim: {lr: "5e-5"}}', "distill.optim.lr", 5e-5),
    ),
    Report(
        "huggingface/trl#3199",
        "groups of one answer",
        "`must be evenly divisible by ... (1)`",
        "refused, with the key",
        unsaid("specialist: {group_size: 1}", r"specialist`: group_size is 1"),
    ),
    Report(
        "THUDM/slime#2197",
        "`temperature: 0` in training",
        "a division by zero",
        "refused, with the key",
        unsaid("rollout: {temperature: 0}", r"rollout\.temperature.*0"),
    ),
    Report(
        "huggingface/trl#3640",
        "a temperature near zero",
        "probabilities of 0, and NaN",
        "the most probable tokens",
        tempered,
    ),
    Report(
        "verl-project/verl#502",
        "a prompt limit that leaves no answer",
        "filters everything",
        "refused, with both numbers",
        no_room,
    ),
    Report(
        "handarbeit/fabrik#1544",
        "a key that the recipe does not know",
        "ignored, without a word",
        "refused, with what it is called here",
        unsaid(
            "distill: {learning_rate: 1.0e-5}",
            r"`distill\.learning_rate` is TRL.s and axolotl.s name; here it is .*distill\.optim\.lr",
        ),
    ),
    Report(
        "huggingface/open-r1#249",
        "`--num_generations`, another library's name",
        "a ValueError about batch sizes",
        "refused, with what it is called here",
        unsaid("{}", r"--specialist\.group_size", "--num_generations", "8"),
    ),
    Report(
        "lseventeen/FR-UNet#10",
        "`lr: 1e-05` on the command line",
        "a text",
        "the number",
        lambda place: _dry(place, "--distill.lr", "1e-05", key=("distill", "optim", "lr"), value=1e-05),
    ),
]


def characters(sample):
    """A reward for runs: how many a random model writes differs from answer to answer."""
    return float(sum(map(ord, sample.text)))


def _dry(place: Path, *words: str, key: tuple[str, ...], value: Any) -> None:
    path = write_recipe(place, save_model(place / "model"))
    status, said = command("run", str(path), "--dry-run", *words)
    assert status == 0, said
    printed = [
        line for line in said.splitlines() if not line.startswith("opd: ")
    ]  # a model that is not there
    found = yaml.safe_load("\n".join(printed))
    for name in key:
        found = found[name]
    assert float(found) == value

"""Inputs of which public reports say that a peer misread them in silence, or ended in a traceback: what they
become here.

A report is tried as a user would meet it. What can be used is compared with the library that defines it, in
float64; what cannot is refused by every command with the same sentence. The tables are in `reported_*.py`;
`render_page()` writes that of the documentation (`docs/reference/public_inputs.md`).
"""

import contextlib
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from opd.config.load import load_recipe
from opd.models.causal_lm import CausalLM
from opd.models.tokenizers import character_tokenizer
from opd.pipelines.check.examine import run_checks
from opd.pipelines.cli import main
from opd.rollout.torch_engine import TorchEngine
from opd.teachers.kinds import Placement
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.streamed_teacher import streamed_teachers
from opd.types import RolloutRequest, Sample, SamplingParams

DIGITS, TAGS = "0123456789= ", ("<a>", "<b>")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


@dataclass(frozen=True, slots=True)
class Report:
    """One public report."""

    source: str
    """`owner/repo#number` on GitHub."""
    brought: str
    """The input, in words."""
    peer: str
    """What came of it there."""
    outcome: str
    """What comes of it here."""
    tried: Callable[[Path], None]
    """Makes the input below an empty folder and tries it; raises `AssertionError`."""
    long: bool = False
    """Whether it takes more than some seconds."""

    def __str__(self) -> str:
        return f"{self.source} {self.brought}"


def page(groups: dict[str, Sequence[Report]]) -> list[str]:
    """The lines of the documentation's tables."""
    lines = []
    for title, reports in groups.items():
        lines += [f"## {title}", "", "| what is brought | there | here | report |", "|---|---|---|---|"]
        for one in reports:
            repository, _, number = one.source.partition("#")
            link = f"[{one.source}](https://github.com/{repository}/issues/{number})"
            cells = [cell.replace("|", "\\|") for cell in (one.brought, one.peer, one.outcome)]
            lines.append(f"| {' | '.join(cells)} | {link} |")
        lines.append("")
    return lines


def tokenizer(template: str | None = None) -> PreTrainedTokenizerBase:
    """Digits, a blank, "=" and two tags."""
    made = character_tokenizer(DIGITS, TAGS)
    made.chat_template = template
    return made


def save_model(folder: Path, *, own: PreTrainedTokenizerBase | None = None, **config: Any) -> Path:
    """A random model as transformers saves it, with its tokenizer."""
    own = own or tokenizer()
    settings = {
        "vocab_size": len(own),
        "bos_token_id": own.bos_token_id,
        "eos_token_id": own.eos_token_id,
        "pad_token_id": own.pad_token_id,
    }
    settings |= LLAMA | config
    described = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(described)
    model.save_pretrained(folder)
    own.save_pretrained(folder)
    return folder


def edit(path: Path, drop: Sequence[str] = (), **changes: Any) -> Path:
    """Change a file of JSON; returns its folder."""
    found = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps(found | changes))
    return path.parent


def command(*words: str) -> tuple[int, str]:
    """Status of a command, and all that it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(list(words))
    return status, out.getvalue()


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """A .jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_recipe(place: Path, model: Path | str, source: Path | None = None, **changes: Any) -> Path:
    """A recipe with one domain, `a`, whose reward takes any answer."""
    if source is None:
        source = write_rows(place / "rows.jsonl", [{"prompt": f"<a>{i}="} for i in range(20)])
    settings: dict[str, Any] = {
        "name": "reported",
        "model": {"path": str(model)},
        "domains": {"a": {"source": str(source), "reward": "cli_reward:length"}},
        "rollout": {"max_new_tokens": 5, "max_sequence": 32},
        "specialist": {"steps": 2, "prompts_per_step": 2, "group_size": 2},
        "distill": {"steps": 2, "prompts_per_domain": 2},
        "baselines": {"methods": []},
        "evaluation": {"prompts_per_domain": 4},
        "runtime": {"threads": 1},
    }
    for key, value in changes.items():
        settings[key] = settings.get(key, {}) | value if isinstance(value, dict) else value
    path = place / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def refused(status: int, said: str, pattern: str) -> None:
    """A command ended with status 2 and one sentence that `pattern` matches."""
    assert status == 2, said
    assert "Traceback" not in said
    errors = [line for line in said.splitlines() if re.match(r"(opd: )?error", line)]
    assert errors, said
    assert any(re.search(pattern, line) for line in errors), errors
    assert all(len(line) < 800 for line in errors), errors


def refuses(pattern: str, make: Callable[[Path], Path]) -> Callable[[Path], None]:
    """Doctor, run, sample and publish refuse the model folder that `make` makes, with one sentence."""

    def tried(place: Path) -> None:
        folder = make(place / "model")
        recipe = write_recipe(place, folder)
        for words in (
            ["doctor", str(recipe)],
            ["run", str(recipe), "--out", str(place / "run")],
            ["sample", str(folder), "--prompt", "<a>1=", "--max-tokens", "2"],
            ["publish", str(folder), str(place / "published")],
        ):
            refused(*command(*words), pattern)

    return tried


def used(
    make: Callable[[Path], Path],
    reference: Callable[[Path], Any] | None = None,
    *,
    streamed: bool = True,
    said: str = "",
) -> Callable[[Path], None]:
    """The model folder that `make` makes gives the scores of `reference(folder)`, a module (default:
    transformers' own, eager): in training, when it writes, and as a streamed teacher. The doctor has no
    error, and says `said`.
    """

    def tried(place: Path) -> None:
        folder = make(place / "model")
        module = (reference or plain)(folder).double().eval()
        check_scores(folder, module)
        if streamed:
            check_streamed(folder, place / "published")
        found = run_checks(load_recipe([write_recipe(place, folder)]), thorough=False)
        text = "\n".join(f"{one.level} {one.title}: {one.detail}" for one in found)
        assert not any(one.level == "error" for one in found), text
        assert re.search(said, text), text

    return tried


def plain(folder: Path) -> Any:
    """transformers' own model."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")


LENGTHS = (23, 5, 9)


def check_scores(folder: Path, module: Any) -> None:
    """Packed sequences, and what the engine writes, have the log-probabilities of `module`."""
    model = CausalLM.from_pretrained(folder)
    size = len(tokenizer())
    ids = torch.randint(2, size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    with torch.no_grad():
        logits = model.head().logits(model.hidden(ids, positions, bounds)).double()
        alone = [module(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(LENGTHS)]
    expected = torch.log_softmax(torch.cat(alone), dim=-1)
    torch.testing.assert_close(torch.log_softmax(logits, dim=-1), expected, atol=3e-4, rtol=1e-4)
    for temperature in (0.0, 1.0):
        check_written(model, module, temperature)


def check_written(model: CausalLM, module: Any, temperature: float) -> None:
    engine = TorchEngine(model, max_running=4, max_sequence=48)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=16, stop_ids=())
    prompts = [np.arange(2, 2 + length, dtype=np.int32) for length in (11, 3)]
    written: dict[str, tuple[list[int], list[float]]] = {"0": ([], []), "1": ([], [])}
    requests = [RolloutRequest(str(i), prompt, sampling, seed=i) for i, prompt in enumerate(prompts)]
    for chunk in engine.generate(requests):
        for uid, token, value in zip(chunk.uids, chunk.token_ids, chunk.logprobs, strict=True):
            written[uid][0].append(int(token))
            written[uid][1].append(float(value))
    for uid, prompt in enumerate(prompts):
        tokens, logprobs = written[str(uid)]
        assert len(tokens) == sampling.max_new_tokens
        ids = torch.tensor([*prompt.tolist(), *tokens])[None]
        with torch.no_grad():
            table = torch.log_softmax(module(ids, use_cache=False).logits[0, len(prompt) - 1 : -1], dim=-1)
        if temperature == 0:
            assert table.argmax(dim=-1).tolist() == tokens
        else:
            own = table.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            np.testing.assert_allclose(logprobs, own.numpy(), atol=3e-4)


def samples(vocabulary: int) -> list[Sample]:
    """Two samples to score."""
    import tiny

    made = tiny.samples([(3, 20), (2, 5)])
    for sample in made:
        sample.prompt_ids %= vocabulary
        sample.response_ids %= vocabulary
    return made


def check_streamed(folder: Path, published: Path) -> None:
    """A streamed teacher gives the bits of a loaded one."""
    status, said = command("publish", str(folder), str(published))
    assert status == 0, said
    asked = samples(8)
    streamed = streamed_teachers({"t": str(published)}, Placement(max_tokens=32))["t"]
    try:
        loaded = LocalTeacher("t", folder, max_tokens=32)
        assert torch.equal(streamed.score(asked).rows, loaded.score(asked).rows)
    finally:
        streamed.close()


def doctor_says(place: Path, recipe: Path, pattern: str, *, status: int = 0) -> str:
    """The doctor ends with `status` and prints what `pattern` matches."""
    found, said = command("doctor", str(recipe))
    assert found == status, said
    assert re.search(pattern, said), said
    return said

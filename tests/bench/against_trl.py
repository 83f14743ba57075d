"""Processor seconds of a training step against TRL on the same work, each in an environment of its own.

    .venv/bin/python tests/bench/against_trl.py [--cases distill-small ...] [--rounds 3] [--folder DIR]
                                                [--json FILE]

Both train the same random Llama on the same prompts with AdamW in fp32 on one thread, every response of one
length: distillation from one teacher by the exact reverse KL, or GRPO of one update a step without reference.
`opd` runs as its command does, with its defaults: a log of every token, weights verified at every step,
metrics written. TRL runs as its trainers do, without gradient checkpointing and without checkpoints.

A step's cost is the difference of two runs of different length, start and end of the process apart, over
their steps: all processor seconds of the process and its children. The first call makes TRL's environment in
DIR by pip, with the PyTorch and transformers of this one.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TRL = "1.16.0"
HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]


@dataclass(frozen=True)
class Case:
    """One race: `prompts` a step, each answered `group` times, prompt and response of fixed length."""

    algorithm: str
    config: dict[str, int]
    prompts: int
    group: int
    prompt: int
    new: int
    steps: tuple[int, int]
    """Of the short and the long run."""


SMALL = {
    "vocab_size": 16,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
"""The quick start's."""
LARGE = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
"""42 M parameters."""
CASES = {
    "distill-small": Case("distill", SMALL, 24, 1, 10, 10, (40, 240)),
    "distill-large": Case("distill", LARGE, 16, 1, 16, 64, (3, 9)),
    "grpo-small": Case("grpo", SMALL, 64, 8, 10, 10, (5, 35)),
    "grpo-large": Case("grpo", LARGE, 4, 4, 16, 64, (3, 9)),
}
RATE = 1e-4
REWARD = '''"""What both reward: the share of even token ids, which differs between responses."""


def share(ids):
    return sum(int(token) % 2 == 0 for token in ids) / max(len(ids), 1)


def of_sample(sample):
    return share(sample.token_ids)


def of_completions(completion_ids, **_):
    return [share(ids) for ids in completion_ids]
'''


def write_inputs(case: Case, folder: Path, seeds: tuple[int, int] = (0, 1), prompts: int = 4096) -> None:
    """Student, teacher, `prompts` prompts and reward below `folder`; `seeds` are the two models'."""
    import random

    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    count = case.config["vocab_size"]
    words = {"<pad>": 0, **{f"w{i}": i for i in range(1, count - 1)}, "<end>": count - 1}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")
    for name, seed in zip(("student", "teacher"), seeds, strict=True):
        torch.manual_seed(seed)
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        form: dict[str, Any] = {"max_position_embeddings": 256, **case.config, **ids}
        model = LlamaForCausalLM(LlamaConfig(**form, tie_word_embeddings=True))
        # The logit of the token that ends a response is about 25 below the others': all are of one length.
        weight: torch.Tensor = model.model.embed_tokens.weight.data
        weight[:, 0] = 4.0
        weight[count - 1, 0] -= 25.0 / case.config["hidden_size"] ** 0.5
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    draw = random.Random(0)
    with open(folder / "prompts.jsonl", "w", encoding="utf-8") as file:
        for _ in range(prompts):
            prompt = " ".join(f"w{draw.randrange(1, count - 1)}" for _ in range(case.prompt))
            file.write(json.dumps({"prompt": prompt, "label": "w1"}) + "\n")
    (folder / "race_reward.py").write_text(REWARD, encoding="utf-8")


def recipe_of(case: Case, folder: Path, steps: int) -> dict[str, Any]:
    """What `opd` is told; everything else is its default."""
    optim = {"lr": RATE, "schedule": "constant", "weight_decay": 0.0}
    stage: dict[str, Any] = {"steps": steps, "checkpoint_every": 1_000_000, "optim": optim}
    domain = {"source": str(folder / "prompts.jsonl"), "reward": "race_reward:of_sample"}
    if case.algorithm == "distill":
        domain["teacher"] = "teacher"
        trained = {
            "teachers": {"teacher": {"path": str(folder / "teacher")}},
            "distill": stage | {"prompts_per_domain": case.prompts},
        }
    else:
        asked = {"prompts_per_step": case.prompts, "group_size": case.group, "minibatches": 1}
        trained = {"specialist": stage | asked}
    return {
        "name": "race",
        "model": {"path": str(folder / "student")},
        "domains": {"race": domain},
        "rollout": {"max_new_tokens": case.new, "max_sequence": case.prompt + case.new},
        **trained,
        "baselines": {"methods": []},
        "runtime": {"threads": 1},
    }


def run_opd(case: Case, folder: Path, steps: int, out: Path) -> list[str]:
    """The command that trains `steps` steps."""
    recipe = out.with_suffix(".yaml")
    recipe.write_text(json.dumps(recipe_of(case, folder, steps)), encoding="utf-8")  # JSON is YAML
    stage = ["distill"] if case.algorithm == "distill" else ["specialist", "--domain", "race"]
    command = [sys.executable, "-m", "opd.pipelines.cli", stage[0], str(recipe), *stage[1:]]
    return [*command, "--out", str(out)]


def train_with_trl(case: Case, folder: Path, steps: int, out: Path) -> None:
    """What the process of TRL's environment does."""
    import torch
    from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    common: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": steps,
        "per_device_train_batch_size": case.prompts * case.group,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_completion_length": case.new,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    data = load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train")
    data = data.remove_columns("label")
    tokenizer = AutoTokenizer.from_pretrained(folder / "student", padding_side="left")
    student = AutoModelForCausalLM.from_pretrained(folder / "student", dtype=torch.float32)
    if case.algorithm == "distill":
        from trl import (  # pyright: ignore[reportMissingImports]
            DistillationConfig,
            DistillationTrainer,
        )

        teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
        trainer = DistillationTrainer(
            model=student,
            teacher_model=teacher,
            args=DistillationConfig(**common, beta=1.0),
            train_dataset=data,
            processing_class=tokenizer,
        )
    else:
        from race_reward import of_completions  # pyright: ignore[reportMissingImports]
        from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

        trainer = GRPOTrainer(
            model=student,
            reward_funcs=of_completions,
            args=GRPOConfig(**common, num_generations=case.group, beta=0.0),
            train_dataset=data,
            processing_class=tokenizer,
        )
    trainer.train()


def environment(folder: Path) -> Path:
    """The interpreter of TRL's environment below `folder`, made once."""
    import torch
    import transformers

    python = folder / "trl" / "bin" / "python"
    done = folder / "trl" / f".trl-{TRL}"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "trl")], check=True)
        pinned = [f"torch=={torch.__version__}", f"transformers=={transformers.__version__}", f"trl=={TRL}"]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *pinned], check=True)
        done.touch()
    return python


def measured(command: Sequence[str], env: dict[str, str], log: Path) -> tuple[float, float]:
    """Processor seconds of a command with its children, and its peak resident MiB. Raises `SystemExit` where
    it fails.
    """
    with open(log, "wb") as file:
        child = subprocess.Popen(command, env=env, stdout=file, stderr=file)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}:\n{said}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def race(name: str, rounds: int, python: Path, folder: Path) -> dict[str, Any]:
    """One case: seconds a step of each round, and the peak of memory, by side."""
    case, inputs = CASES[name], folder / name
    write_inputs(case, inputs)
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ours = env | {"PYTHONPATH": f"{ROOT}{os.pathsep}{inputs}"}
    theirs = env | {"PYTHONPATH": str(inputs)}
    found: dict[str, Any] = {"case": asdict(case), "opd": [], "trl": [], "opd_mib": 0.0, "trl_mib": 0.0}
    for number in range(rounds):
        for side in ("opd", "trl"):
            totals = []
            for steps in case.steps:
                out = folder / f"{name}-{side}-{number}-{steps}"
                if side == "opd":
                    command, own = run_opd(case, inputs, steps, out), ours
                else:
                    parts = [python, "-P", HERE, "--trl", name, inputs, steps, out]
                    command, own = [str(part) for part in parts], theirs
                seconds, peak = measured(command, own, out.with_suffix(".log"))
                totals.append(seconds)
                found[f"{side}_mib"] = max(found[f"{side}_mib"], peak)
            found[side].append((totals[1] - totals[0]) / (case.steps[1] - case.steps[0]))
        print(
            f"{name}: round {number + 1}: opd {found['opd'][-1]:.4f} s, TRL {found['trl'][-1]:.4f} s a step"
        )
    return found


def processor() -> str:
    """Its name."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "opd" / "against_trl")
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    parser.add_argument("--trl", nargs=4, metavar=("CASE", "INPUTS", "STEPS", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl:
        name, inputs, steps, out = options.trl
        train_with_trl(CASES[name], Path(inputs), int(steps), Path(out))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    python = environment(options.folder)
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.cases:
            results[name] = race(name, options.rounds, python, Path(scratch))
    print("| | opd, s a step | TRL | opd / TRL | peak MiB, opd | TRL |\n|---|---|---|---|---|---|")
    for name, found in results.items():
        ours, theirs = statistics.median(found["opd"]), statistics.median(found["trl"])
        row = [name, f"{ours:.4f}", f"{theirs:.4f}", f"{ours / theirs:.2f}"]
        print(f"| {' | '.join([*row, str(round(found['opd_mib'])), str(round(found['trl_mib']))])} |")
    if options.json:
        kept = {"processor": processor(), "trl": TRL, "results": results}
        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

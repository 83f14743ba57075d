"""Write model cards: a model's role, accuracy, prompts, loading and training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.config import Recipe
from opd.config.hub_names import display_path
from opd.config.recipe import WEIGHT_MERGES
from opd.config.rl import is_scheduled
from opd.data.load import load_domain
from opd.errors import OpdError
from opd.models.adapters import FOLDER, has_adapter
from opd.models.checkpoint import escape_markdown, model_card
from opd.models.hf_folder import CARD
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.records.settings import RecordedChange
from opd.pipelines.records.stage_names import model_stage, of_round, split_round
from opd.rollout.prompts import Prompt
from opd.storage.files import write_atomic
from opd.untrusted import escape_controls

PEEK = 16
"""Prompts that a generated source makes for an example."""
LONGEST = 4000
"""Characters of a prompt in the lines that load a model."""
MESSAGES = "Chat messages, through the tokenizer's chat template, up to where the assistant begins."
TEXT = "Plain text, as it is, with the special tokens that the tokenizer itself puts before it."
FP8_FORM = (
    "The matrices of its layers are FP8 (e4m3, a scale for each block of 128 x 128), and it was trained with"
    " these numbers."
)
METHODS = {
    "average": "A weight average of the teachers, for comparison with the merged student.",
    "task_arithmetic": "The teachers merged by task arithmetic on their weights, for comparison.",
    "ties": "The teachers merged by TIES on their weights, for comparison.",
    "dare": "The teachers merged by DARE on their weights, for comparison.",
    "della": "The teachers merged by DELLA on their weights, for comparison.",
    "sce": "The teachers merged by SCE on their weights, for comparison.",
    "slerp": "Two teachers interpolated spherically on their weights (SLERP), for comparison.",
    "model_stock": "The teachers merged with the base by Model Stock on their weights, for comparison.",
    "ram": "The teachers merged by RAM on their weights, for comparison.",
    "ram_plus": "The teachers merged by RAM+ on their weights, for comparison.",
    "mixed_grpo": "One model trained with GRPO on all domains, with the merge's tokens, for comparison.",
    "mixed_grpo_all": "One model trained with GRPO on all domains, with the run's tokens, for comparison.",
    "off_policy": "A student trained on samples of the teachers, not on its own, for comparison.",
}


def made_models(recipe: Recipe, folder: RunFolder) -> dict[str, str]:
    """Return name -> stage of every existing model that the run itself makes."""
    trained = [f"{kind}:{domain}" for domain in recipe.specialist_domains() for kind in ("sft", "specialist")]
    base = ["base"] if recipe.trains_base or recipe.model.config is not None else []
    again = [
        of_round(name, number) for number in range(2, recipe.rounds + 1) for name in [*trained, "merged"]
    ]
    names = [*trained, *base, "merged", *again, *METHODS]
    return {name: model_stage(name) for name in names if folder.model_folder(recipe, name).is_dir()}


@dataclass(frozen=True, slots=True)
class Cards:
    """The common data of one run's cards."""

    recipe: Recipe
    folder: RunFolder
    examples: dict[str, Prompt]
    """A prompt of every domain with a readable source."""

    @classmethod
    def from_run(cls, recipe: Recipe, folder: RunFolder) -> Cards:
        """Read a few prompts of every domain."""
        return cls(recipe, folder, example_prompts(recipe))

    def card_sections(
        self, name: str, result: Mapping[str, object], accuracy: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the sections for `model_card` of model `name`. `result` is its stage's result, `accuracy`
        the evaluation's rows of it by domain, empty before its evaluation.
        """
        recipe, folder = self.recipe, self.folder
        kind, domain, number = _parts_of(recipe, name)
        path = folder.model_folder(recipe, name)
        sections: dict[str, Any] = {"about": _about_text(recipe, name)}
        if kind != "base":
            goes_on = number > 1 and kind in (*_OF_ROUNDS, *WEIGHT_MERGES)
            start = of_round("merged", number - 1) if goes_on else "base"
            start = recipe.distill.start if kind == "merged" and number == 1 else start
            sections["base_model"] = display_path(str(folder.model_folder(recipe, start).absolute()))
        elif recipe.model.path is not None:
            sections["base_model"] = display_path(str(Path(recipe.model.path).absolute()))
        sections["accuracy"] = _accuracy_section(accuracy)
        sections |= self.usage_sections(path, [domain] if domain else list(recipe.domains))
        sections["sampling"] = _sampling_section(recipe.for_domain(domain) if domain else recipe)
        if kind not in ("base", "sft", "specialist", "mixed_grpo", "mixed_grpo_all"):
            sections["teachers"] = _teacher_rows(recipe, folder, number)
        weights = "sha256 of each file: `checksums.json`."
        if result.get("digest"):
            digest = f"Digest of the weights (names, shapes, types and bytes): `{result['digest']}`"
            weights = f"{digest}; {weights}"
        made = kind != "base" or recipe.trains_base
        if recipe.model.quantize == "fp8" and made and kind not in WEIGHT_MERGES:
            weights += f" {FP8_FORM}"
        if has_adapter(path):
            weights += f" The LoRA adapters it was trained as are in `{FOLDER}/`."
        sections["weights"] = weights
        run = escape_markdown(recipe.name)
        config = escape_markdown(str((folder.path / "config.json").absolute()))
        sections["recipe"] = f"Run {run}, seed {recipe.seed}; all of its recipe: `{config}`."
        sections["settings"] = _settings_section(recipe, folder, name, result)
        return sections

    def usage_sections(self, path: Path, domains: list[str]) -> dict[str, str]:
        """Return its prompt format and loading code. Empty if no prompt can be shown."""
        examples = self.examples
        shown = [examples[name] for name in domains if name in examples] or list(examples.values())
        if not shown:
            return {}
        forms: dict[str, list[Prompt]] = {}
        for prompt in shown:
            forms.setdefault(TEXT if prompt.messages is None else MESSAGES, []).append(prompt)
        kind = "" if len(forms) == 1 else " such"
        lists, code = [], []
        for form, prompts in forms.items():
            rows = [f"- {escape_markdown(one.domain)}: `{_prompt_excerpt(one)}`" for one in prompts]
            lists.append(f"{form} A training prompt of each{kind} domain:\n\n" + "\n".join(rows))
            title = f"# {', '.join(prompt.domain for prompt in prompts)}\n" if len(forms) > 1 else ""
            code.append(title + loading_lines(self.recipe, path, prompts[0]))
        lines = "\n".join(code)
        return {"prompt_format": "\n\n".join(lists), "loading": f"```python\n{lines}```"}


def _sampling_section(recipe: Recipe) -> dict[str, Any]:
    """Return the sampling of the model's answers in training, and their ends."""
    rollout = recipe.rollout
    settings: dict[str, Any] = {key: getattr(rollout, key) for key in ("temperature", "top_p", "top_k")}
    settings["answers end at"] = "the tokens that generation_config.json has as eos_token_id"
    if rollout.stop_ids:
        settings["of these by the recipe"] = ", ".join(map(str, rollout.stop_ids))
    if rollout.stop:
        settings["and behind"] = ", ".join(json.dumps(one, ensure_ascii=False) for one in rollout.stop)
    return settings


def write_cards(recipe: Recipe, folder: RunFolder, measured: Mapping[str, Any]) -> None:
    """Write the card of every model that the run has made, from the present results. No other file of a
    model's folder changes, and nothing reads the card.
    """
    cards = Cards.from_run(recipe, folder)
    for name, stage in made_models(recipe, folder).items():
        result, target = folder.stage_done(stage), folder.model_folder(recipe, name) / CARD
        if result is None:
            continue
        kind, domain, number = _parts_of(recipe, name)
        role = {
            "base": "base",
            "merged": "merged student",
            "specialist": f"specialist for {domain}",
            "sft": f"demonstrations of {domain}",
        }.get(kind, name.replace("_", " "))
        role += f", round {number}" if recipe.rounds > 1 and kind in _OF_ROUNDS else ""
        card = cards.card_sections(name, result, measured.get(name, {}))
        text = model_card(f"{recipe.name}: {role}", card).encode()
        if not target.is_file() or target.read_bytes() != text:
            write_atomic(target, text)


_OF_ROUNDS = ("specialist", "merged")
"""Kinds of the models that each round makes."""


def _parts_of(recipe: Recipe, name: str) -> tuple[str, str, int]:
    """Return kind, domain ("" without one) and round of a model. Baselines are of the last round."""
    name, number = split_round(name)
    kind, _, domain = name.partition(":")
    return kind, domain, number if kind in (*_OF_ROUNDS, "base", "sft") else recipe.rounds


def _about_text(recipe: Recipe, name: str) -> str:
    kind, domain, number = _parts_of(recipe, name)
    if number > 1 and kind in _OF_ROUNDS:
        first = _about_text(recipe, split_round(name)[0])
        return f"{first} Of round {number}: its base is the merged student of round {number - 1}."
    if kind == "base":
        path = recipe.model.path
        start = "Random weights" if path is None else f"The model {display_path(path)}"
        if recipe.sft is not None:
            return (
                f"{start}, fine-tuned on the demonstrations of {display_path(recipe.sft.source)}: what this"
                " run's specialists and student begin as."
            )
        if recipe.base is None:
            return f"{start}, untrained: what this run's specialists and student begin as."
        right = f"about {recipe.base.right:.0%} of them right"
        return (
            f"{start}, warmed up on demonstrations, {right}: the base from which this run's "
            "specialists and student are trained. No specialist and no merge has touched it."
        )
    if kind in ("sft", "specialist"):
        sft = recipe.domains[domain].sft
        tuned = "" if sft is None else f"fine-tuned on the demonstrations of {display_path(sft.source)}"
        if kind == "sft":
            return f"What the specialist for the domain {domain} begins as: the base, {tuned}."
        teachers = [name for name, taught in recipe.opd_teachers().items() if domain in taught]
        following = (
            f", following {', '.join(teachers)} on the answers it wrote (OPD)" if teachers else " alone"
        )
        rewarded = f"trained with GRPO on its rewards{following}" if domain in recipe.grpo_domains() else ""
        learnt = ", then ".join(part for part in (tuned, rewarded) if part)
        return f"A specialist for the domain {domain}: the base, {learnt}."
    if kind == "merged":
        if recipe.distill.prefixes == "teacher":
            return (
                "A student distilled from its teachers off-policy: it followed the teacher of each domain on"
                f" answers that this teacher had written (loss: {recipe.distill.loss.type})."
            )
        began, warm_up = "", recipe.distill.warm_up
        if warm_up is not None:
            began = (
                f" Where the first step's divergence was at least {warm_up.min_kl:g} nats a token, it began"
                f" with {warm_up.steps} steps of soft labels on the teacher's answers."
            )
        return (
            "A student merged from its teachers by multi-teacher on-policy distillation: it wrote its own"
            f" answers and followed the teacher of each answer's domain (loss: {recipe.distill.loss.type})."
            f"{began}"
        )
    return METHODS[name]


def _accuracy_section(rows: Mapping[str, Any]) -> Any:
    if not rows:
        return "Not measured yet; `opd evaluate RECIPE --resume` does, and writes it here."
    table = {}
    for domain, row in rows.items():
        sampled = row["sampled"]
        share, low, high = (f"{100 * sampled[key]:.1f}" for key in ("accuracy", "low", "high"))
        interval, total = f"{share} ({low} to {high})", sampled["total"]
        table[domain] = {"sampled, % right": interval, "held-out answers": total}
        for key, word in (("pass_at", "pass"), ("maj_at", "maj")):
            for k, value in row.get(key, {}).items():
                table[domain][f"{word}@{k}, %"] = f"{100 * value['value']:.1f}"
        if "greedy" in row:
            table[domain]["greedy, % right"] = f"{100 * row['greedy']['accuracy']:.1f}"
    return table


def example_prompts(recipe: Recipe) -> dict[str, Prompt]:
    """Return a prompt of every domain with a readable source."""
    examples = {}
    for name, config in recipe.domains.items():
        small = config.model_copy(update={"prompts": min(config.prompts, PEEK)})
        with suppress(OpdError, IndexError):  # the source is gone: then a card has no example of it
            examples[name] = load_domain(name, small, seed=recipe.seed, held_out_prompts=1).train[0]
    return examples


def loading_lines(recipe: Recipe, path: Path, prompt: Prompt) -> str:
    """Return Python code that samples the model in `path` with plain transformers, as the recipe does."""
    rollout = recipe.rollout
    code = ascii(prompt.text if prompt.messages is None else prompt.messages)
    if len(code) > LONGEST:
        code = ascii("a prompt") if prompt.messages is None else ascii([{"role": "user", "content": "..."}])
    if prompt.messages is None:
        encode = f'tokenizer({code}, return_tensors="pt")'
    else:
        encode = (
            f"tokenizer.apply_chat_template(\n    {code},\n"
            '    add_generation_prompt=True, return_dict=True, return_tensors="pt",\n)'
        )
    stops = f"    stop_strings={rollout.stop!a}, tokenizer=tokenizer,\n" if rollout.stop else ""
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"folder = {str(path.absolute())!a}\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        f"asked = {encode}\n"
        "answered = model.generate(\n"
        '    asked["input_ids"], attention_mask=asked["attention_mask"], do_sample=True,\n'
        f"    temperature={rollout.temperature:g}, top_p={rollout.top_p:g}, top_k={rollout.top_k},"
        f" max_new_tokens={rollout.max_new_tokens},\n{stops})\n"
        'print(tokenizer.decode(answered[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))\n'
    )


def _prompt_excerpt(prompt: Prompt) -> str:
    text = prompt.text if prompt.text is not None else json.dumps(prompt.messages, ensure_ascii=False)
    text = escape_controls(text, "").replace("`", "'")
    return text if len(text) <= 400 else f"{text[:400]} ..."


def _teacher_rows(recipe: Recipe, folder: RunFolder, number: int) -> dict[str, dict[str, str]]:
    names = dict.fromkeys(name for domain in recipe.domains for name in recipe.teacher_weights(domain))
    rows = {}
    for name in names:
        weights = {domain: recipe.teacher_weights(domain).get(name, 0.0) for domain in recipe.domains}
        path = display_path(recipe.given_teachers().get(name, "")) or str(
            folder.model_folder(recipe, of_round(f"specialist:{name}", number)).absolute()
        )
        if (itself := recipe.student_teachers().get(name)) is not None:
            decay = itself.decay
            path = "this model as it learnt" if decay is None else f"its moving average (decay {decay:g})"
            path = f"a copy of it, renewed every {itself.sync_every} steps" if decay == 0 else path
        elif recipe.teacher_tokenizer(name) is not None:
            path = f"{path} (with a tokenizer of its own)"
        first = {d for d in weights if is_scheduled(recipe.teacher_plan(d))}
        shares = {d: f"{w:g}, at first" if d in first else f"{w:g}" for d, w in weights.items() if w}
        taught = ", ".join(d if share == "1" else f"{d} ({share})" for d, share in shares.items())
        rows[name] = {"model": path, "teaches": taught}
    return rows


def _settings_section(
    recipe: Recipe, folder: RunFolder, name: str, result: Mapping[str, Any]
) -> dict[str, Any]:
    kind, domain, _ = _parts_of(recipe, name)
    prefix = "distill."
    if kind == "base":
        config: Any = recipe.sft or recipe.base
        prefix = "sft." if recipe.sft else "base."
    elif kind == "sft" or (kind == "specialist" and domain not in recipe.grpo_domains()):
        config, prefix = recipe.domains[domain].sft, f"domains.{domain}.sft."
    elif kind == "specialist":
        config = recipe.for_domain(domain).specialist
        is_general = recipe.domains[domain].specialist is None
        prefix = "specialist." if is_general else f"domains.{domain}.specialist."
    elif kind in ("mixed_grpo", "mixed_grpo_all"):
        config, prefix = recipe.specialist, "specialist."
    else:
        config = None if kind in WEIGHT_MERGES else recipe.distill
    if config is None:
        settings = dict(result.get("settings", {}))
    else:
        settings = config.model_dump(mode="json")
        settings |= _apply_changes(settings, prefix, model_stage(name), folder.setting_changes)
    tokens = result.get("student_tokens")
    return settings | ({"student_tokens": int(tokens)} if tokens else {})


def _apply_changes(
    settings: dict[str, Any], prefix: str, stage: str, changes: Sequence[RecordedChange]
) -> dict[str, Any]:
    """Set the `settings` below `prefix` to their values when `stage` ended. Returns their earlier values."""
    earlier: list[str] = []
    for change in reversed([one for one in changes if one.field.startswith(prefix)]):
        name = change.field.removeprefix(prefix)
        *parents, last = name.split(".")
        if stage in change.done:
            holder: Any = settings
            for key in parents:
                holder = holder.get(key) if isinstance(holder, dict) else None
            if isinstance(holder, dict):
                holder[last] = change.old
        elif change.stages.get(stage):
            earlier.insert(0, f"{name} {json.dumps(change.old)} up to step {change.stages[stage]}")
    return {"before": earlier} if earlier else {}

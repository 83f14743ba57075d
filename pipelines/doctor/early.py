"""What can be known to be wrong without any library of models: sizes, places to publish, rewards on answers.

Importable without torch, so that what a run cannot do is said in a second.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config import Recipe
from opd.errors import StorageError
from opd.foreign import machine_memory
from opd.pipelines.doctor.checks import Finding, attempt, existing_parent, given_teachers, unwritable
from opd.retry import Retry

if TYPE_CHECKING:
    from opd.data.prompts import Domain, Prompt

_DRAWS = 50_000_000
"""Strings that a generated source may look at for its prompts: minutes."""
_RESPONSES = 10_000_000
"""Responses of one step or one evaluation."""
_TOKEN_BYTES = 33
"""What a response keeps of a token in memory: ids, log-probabilities, versions, masks and terms."""
_PROMPT_BYTES = 1000
_BEYOND = 4
"""Times the machine's memory beyond which a size is a mistake: longest responses are rare."""


def check_sizes(recipe: Recipe) -> list[Finding]:
    """Settings that no machine, or not this one, can mean together: one finding each, or none."""
    cores = os.cpu_count() or 1
    most = max(64, 8 * cores)
    wrong: list[str] = []
    local = recipe.launch.type == "local"
    counts = {
        "train.ranks": (recipe.train.ranks or 1) if local else 1,
        "runtime.workers": recipe.runtime.workers if local else 1,
        "runtime.threads": recipe.runtime.threads or 1,
    }
    for key, count in counts.items():
        if count > most:
            wrong.append(f"{key} is {count}, and this machine has {cores} cores; give {most} at most")
    for key, responses in _responses(recipe).items():
        if responses > _RESPONSES:
            wrong.append(f"{key} makes {responses:,} responses at once; give {_RESPONSES:,} at most")
    for name, config in recipe.domains.items():
        held_out = recipe.evaluation.prompts_per_domain
        draws = max(config.prompts / (1 - config.held_out), held_out / config.held_out)
        if config.source.partition(":")[0] in ("procedural", "reasoning-gym") and draws > _DRAWS:
            wrong.append(
                f"domains.{name}: {config.prompts:,} training prompts and {held_out:,} held-out ones with"
                f" held_out {config.held_out:g} are found among some {draws:,.0f}; ask for fewer, or for a"
                " held_out nearer to 0.1"
            )
    return [Finding("error", "sizes", sentence) for sentence in wrong or _too_large(recipe)]


def _responses(recipe: Recipe) -> dict[str, int]:
    specialist, distill, evaluation = recipe.specialist, recipe.distill, recipe.evaluation
    return {
        "specialist.prompts_per_step x group_size": specialist.prompts_per_step * specialist.group_size,
        "distill.prompts_per_domain x samples_per_prompt x domains": distill.prompts_per_domain
        * distill.samples_per_prompt
        * len(recipe.domains),
        "evaluation.prompts_per_domain x samples_per_prompt": evaluation.prompts_per_domain
        * evaluation.samples_per_prompt,
    }


def _too_large(recipe: Recipe) -> list[str]:
    """What would fill the memory many times over."""
    memory = machine_memory()
    length = min(recipe.rollout.max_new_tokens, recipe.rollout.max_sequence)
    sizes = {
        f"{key} of {length:,} tokens": responses * length * _TOKEN_BYTES
        for key, responses in _responses(recipe).items()
        if recipe.storage.trajectories == "memory"
    }
    prompts = sum(config.prompts for config in recipe.domains.values() if ":" in config.source)
    sizes["domains.*.prompts"] = prompts * _PROMPT_BYTES
    return [
        f"{key} take up to {size / 2**30:,.0f} GiB, and this machine has {memory / 2**30:,.0f}; lower one of"
        " them"
        for key, size in sizes.items()
        if size > _BEYOND * memory
    ]


def refuse_place(url: str, models: Iterable[str]) -> None:
    """Raise `StorageError` where nothing can be published: `url` is empty, ends with this process, or is
    the folder of one of `models`, whose files it would mix with.
    """
    if not url.strip():
        raise StorageError("the place to publish is empty; give a folder, or s3://BUCKET/PREFIX.")
    protocol, separator, rest = url.partition("://")
    if separator and protocol == "memory":
        raise StorageError(
            f"{url} is the memory of this process, where nobody else can read; give a folder, or"
            " s3://BUCKET/PREFIX."
        )
    if separator and protocol != "file":
        return
    place = Path(rest if separator else url).expanduser().absolute().resolve()
    for model in models:
        folder = Path(model).absolute().resolve()
        if "://" not in model and folder.is_dir() and place.is_relative_to(folder):
            raise StorageError(f"{url} is in the model's own folder {model}; publish it elsewhere.")


def check_publishing(recipe: Recipe) -> list[Finding]:
    """Whether `storage.published` can be written. An object store is asked to keep one empty object, which is
    taken away again.
    """
    return attempt("storage.published", lambda: _check_publishing(recipe))


def _check_publishing(recipe: Recipe) -> list[Finding]:
    title, url = "storage.published", recipe.storage.published
    if url is None or recipe.distill.teachers != "streamed":
        return []
    own = [path for path in (recipe.model.path, *given_teachers(recipe).values()) if path is not None]
    refuse_place(url, own)
    protocol, separator, rest = url.partition("://")
    if not separator or protocol == "file":
        parent = existing_parent(Path(rest if separator else url).expanduser())
        wrong = unwritable(parent)
        if wrong is not None:
            return [Finding("error", title, f"{parent} cannot be written ({wrong}); choose another place")]
        return [Finding("ok", title, url)]
    from opd.storage.object_store import ObjectStore
    from opd.storage.store_faults import StoreOptions

    name = f".opd-probe-{secrets.token_hex(4)}"
    with ObjectStore.open(url, options=StoreOptions(retry=Retry(attempts=2, pause=0.1))) as store:
        store.put(name, b"")
        store.delete(name)
    return [Finding("ok", title, f"{url}, which can be written")]


def check_rewards(
    recipe: Recipe, domains: Mapping[str, Domain], written: Mapping[str, Sequence[str]] | None = None
) -> list[Finding]:
    """What each domain's reward says of an empty answer, one of one token and the label; or else of what was
    `written` by the base. A reward that raises is an error.
    """
    findings: list[Finding] = []
    for name, domain in domains.items():
        if domain.train and (recipe.domains[name].reward is not None or domain.checker is not None):
            if written is None:
                title, answers = f"reward {name}", _simple_answers(domain)
            else:
                title = f"reward {name}, the base"
                answers = {repr(text[:20]): text for text in written.get(name, ())}
            findings += attempt(title, lambda d=domain, t=title, a=answers: _check_reward(recipe, d, t, a))
    return findings


def _simple_answers(domain: Domain) -> dict[str, str]:
    label = domain.train[0].label
    own = {"its label": str(label)} if isinstance(label, str | int | float) else {}
    return {"an empty answer": "", "'0'": "0"} | own


def _check_reward(recipe: Recipe, domain: Domain, title: str, answers: Mapping[str, str]) -> list[Finding]:
    from opd.rewards.execution import Job
    from opd.rewards.functions import checker_reward, load_reward

    config = recipe.domains[domain.name]
    if config.reward is not None:
        function = load_reward(config.reward)
    else:
        assert domain.checker is not None  # asked by the caller
        function = checker_reward(domain.checker, f"checker of domain {domain.name}")
    prompt = domain.train[0]
    samples = [_sample(title, prompt, text) for text in answers.values()]
    job = Job(function, samples, recipe.rollout.reward_timeout)
    job.start()
    said = ", ".join(f"{value:g} for {name}" for name, (value, _) in zip(answers, job.result(), strict=True))
    return [Finding("ok", title, said)]


def _sample(uid: str, prompt: Prompt, text: str) -> Any:
    """An answer to `prompt` as a reward function sees it; its tokens are its characters."""
    from opd.rewards.functions import RewardSample, Turn

    said = prompt.text if prompt.text is not None else str(prompt.messages)
    own = {"messages": prompt.messages} if prompt.messages is not None else {}
    return RewardSample(
        uid=uid,
        text=text,
        prompt=said,
        label=prompt.label,
        domain=prompt.domain,
        metadata=prompt.metadata | own,
        turns=(Turn("assistant", text),),
        token_ids=tuple(map(ord, text)),
        loss_mask=(True,) * len(text),
    )

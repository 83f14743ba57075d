"""Load the recipe's domains: encoded prompts in a reproducible order, held-out prompts, rewards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from opd.config import Recipe
from opd.data.load import load_domain
from opd.environments.registry import tools_of
from opd.errors import ConfigError, ModelError
from opd.models.hf_folder import positions_of, read_config, scratch_config
from opd.models.token_ids import special_texts
from opd.models.tokenizers import character_tokenizer, set_chat_template
from opd.pipelines.records.stage_names import of_round, split_round
from opd.pipelines.stages.group_prompts import GroupPrompts, fill_teacher_prompts
from opd.pipelines.stages.samples import StepSamples
from opd.pipelines.stages.student import load_own_tokenizer, model_stops, tokenizer_of
from opd.rewards.registry import reward_of
from opd.rollout.collect import EncodedPrompt
from opd.rollout.prompts import (
    Domain,
    Prompt,
    PromptCursor,
    TokenBudget,
    encode_prompts,
    encode_taught,
    fit_domain,
    teacher_prompt,
    truncate_prompt,
)
from opd.rollout.rewards import RewardRunner
from opd.types import no_ids

_log = logging.getLogger(__name__)


def load_domains(recipe: Recipe) -> dict[str, Domain]:
    """Return every domain of `recipe`. Raises `DataError` for a source that cannot be read or is empty."""
    held_out = recipe.evaluation.prompts_per_domain
    return {
        name: load_domain(name, config, seed=recipe.seed, held_out_prompts=held_out)
        for name, config in recipe.domains.items()
    }


def student_tokenizer(recipe: Recipe, domains: Iterable[Domain]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the run's start: the recipe's, the model's, or one over the domains'
    characters.

    Raises `ModelError` if none is given and no domain has an alphabet.
    """
    source = recipe.model.tokenizer or recipe.model.path
    if source is not None:
        return tokenizer_of(recipe, Path(source))
    domains = list(domains)
    alphabet = "".join(sorted({letter for domain in domains for letter in domain.alphabet}))
    if not alphabet:
        raise ModelError(
            "no domain has an alphabet to build a character tokenizer from; give model.tokenizer"
        )
    tokenizer = character_tokenizer(alphabet, list(dict.fromkeys(tag for d in domains for tag in d.tags)))
    if recipe.model.chat_template is not None:
        set_chat_template(tokenizer, recipe.model.chat_template)
    return tokenizer


def sequence_limit(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, limit: int, name: str
) -> tuple[int, str]:
    """Return the tokens of a sequence, and the source of that limit. It is `limit`, by the field `name`, or
    the model's positions if those are fewer. Positions reserved by servers are subtracted.
    """
    model, reserved = recipe.model, recipe.kept_by_servers
    config = read_config(Path(model.path)) if model.path else scratch_config(model.config or {}, tokenizer)
    positions = sequence_positions(config, recipe, limit)
    if positions < limit:
        longest = getattr(config.get_text_config(), "max_position_embeddings", None)
        is_original = longest != positions + reserved
        key = "original_max_position_embeddings" if is_original else "max_position_embeddings"
        less = f", less {reserved} that its servers keep:" if reserved else ""
        return positions, f"the model's {key}{less}"
    return limit, name


def sequence_positions(config: PreTrainedConfig, recipe: Recipe, limit: int) -> int:
    """Return the tokens of a sequence for a model's configuration. It is `limit`, or the positions without
    those reserved by servers.
    """
    positions = positions_of(config)
    return limit if positions is None else min(limit, positions - recipe.kept_by_servers)


def prompt_capacity(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, domain: str) -> TokenBudget:
    """Return the maximum length of prompts of `domain`, so that a response of `max_new_tokens` fits.

    Raises `ConfigError` if no prompt would fit.
    """
    rollout = recipe.rollout
    response = recipe.for_domain(domain).rollout.max_new_tokens
    is_general = response == rollout.max_new_tokens
    key = "rollout.max_new_tokens" if is_general else f"domains.{domain}.rollout.max_new_tokens"
    limit, name = sequence_limit(recipe, tokenizer, rollout.max_sequence, "rollout.max_sequence")
    if response >= limit:
        raise ConfigError(
            f"{key} {response} leaves no room for a prompt in {name} {limit};"
            " lower the former" + (" or raise the latter." if name.startswith("rollout") else ".")
        )
    return TokenBudget(limit - response, f"{name} {limit} leaves beside {key} {response}")


def template_arguments(recipe: Recipe, domain: str) -> dict[str, Any]:
    """Return the chat template's arguments for prompts of `domain`: the recipe's, and its environment's
    tools.
    """
    config = recipe.domains[domain].environment
    # An agent brings its own with each request.
    tools = [] if config is None or config.agent_path is not None else tools_of(config, domain)
    return {**recipe.model.chat_template_kwargs, **({"tools": tools} if tools else {})}


@dataclass(slots=True)
class DomainSet:
    """Domains with a tokenizer."""

    domains: dict[str, Domain]
    rewards: RewardRunner
    tokenizer: PreTrainedTokenizerBase
    _cursors: dict[str, PromptCursor[Prompt]]
    _encode: Callable[[Sequence[Prompt]], list[EncodedPrompt]]
    """Encodes prompts of one domain, for the student and for its teachers."""
    long: dict[str, str]
    """The treatment of too long prompts, as text by domain."""
    made_late: dict[str, GroupPrompts]
    """By domain: what makes its teachers' prompts, if they say what the step's answers were."""

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        loaded: Mapping[str, Domain] | None = None,
    ) -> DomainSet:
        """Load the reward functions and the sources, unless they are `loaded`. Too long prompts are treated
        as the recipe says, and logged.
        """
        budgets = {name: prompt_capacity(recipe, tokenizer, name) for name in recipe.domains}
        templates = {name: template_arguments(recipe, name) for name in recipe.domains}
        domains, long = {}, {}
        for name, domain in (load_domains(recipe) if loaded is None else loaded).items():
            policy = recipe.domains[name].long_prompts
            encoded = partial(encode_prompts, tokenizer=tokenizer, template=templates[name])
            read = recipe.domains[name].teacher_prompt
            domains[name], notes = fit_domain(domain, budgets[name], policy, encoded, read)
            if notes:
                long[name] = "; ".join(notes)
                _log.info("domain %s: %s", name, long[name])
        functions = {name: reward_of(config, domains[name]) for name, config in recipe.domains.items()}
        stops = [stop.token_id for stop in model_stops(recipe, tokenizer)]
        rewards = RewardRunner(functions, tokenizer, timeout=recipe.rollout.reward_timeout, stops=stops)
        cursors = {name: PromptCursor(d.train, recipe.seed, name) for name, d in domains.items() if d.train}
        bos: Any = tokenizer.bos_token_id  # one number, though its annotation allows more
        theirs = {name: recipe.domain_tokenizer(name) for name in recipe.domains}
        own = {path for path in theirs.values() if path is not None}
        tokenizers = {path: load_own_tokenizer(recipe, path) for path in own}

        def encode(prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
            if not prompts:
                return []
            domain, encoded = prompts[0].domain, []
            token_ids = encode_prompts(prompts, tokenizer, templates[domain])
            read: Sequence[np.ndarray | None] = [None] * len(prompts)
            config, path = recipe.domains[domain].teacher_prompt, theirs[domain]
            if config is not None and config.group_columns:
                config, read = None, [no_ids()] * len(prompts)
            asked = prompts if config is None else [teacher_prompt(prompt, config) for prompt in prompts]
            if path is not None:
                read = encode_taught(asked, tokenizers[path], templates[domain], path)
            elif config is not None:
                whole = encode_prompts(asked, tokenizer, templates[domain])
                read = [truncate_prompt(ids, budgets[domain].tokens, bos) for ids in whole]
            for prompt, ids, taught in zip(prompts, token_ids, read, strict=True):
                text = {"prompt": prompt.text} if prompt.text is not None else {}
                ids = truncate_prompt(ids, budgets[domain].tokens, bos)
                one = EncodedPrompt(prompt.key, domain, ids, prompt.label, prompt.metadata | text, taught)
                encoded.append(one)
            return encoded

        made_late = {}
        for name, config in recipe.domains.items():
            if name in domains and config.teacher_prompt is not None and config.teacher_prompt.group_columns:
                limit = budgets[name].tokens + recipe.for_domain(name).rollout.max_new_tokens
                given = (config.teacher_prompt, tokenizer, templates[name], limit, rewards, recipe.seed)
                in_order = recipe.rollout.schedule == "in_turn" and recipe.rollout.over_sample == 1
                made_late[name] = GroupPrompts(name, *given, special_texts(tokenizer, stops), in_order)
        return cls(domains, rewards, tokenizer, cursors, encode, long, made_late)

    def fill_teacher_prompts(self, samples: StepSamples) -> dict[str, float]:
        """Make the teachers' prompts that say what the step's answers were, which have their rewards. Return
        the shares of samples that were taught with what.
        """
        return fill_teacher_prompts([*self.made_late.values()], samples) if self.made_late else {}

    def next_prompts(self, domain: str, start: int, count: int, stage: str) -> list[EncodedPrompt]:
        """Return training prompts number `start ... start + count - 1` of the domain's endless sequence.

        Their uids are unique in the run: stage, domain and number. Each round has another order.
        """
        name = of_round(domain, split_round(stage)[1])
        if name not in self._cursors:
            self._cursors[name] = self._cursors[domain].renamed(name)
        prompts = self._cursors[name].next_prompts(start, count)
        return self._name_prompts(prompts, [f"{stage}/{domain}/{start + i}" for i in range(count)])

    def _name_prompts(self, prompts: Sequence[Prompt], uids: Sequence[str]) -> list[EncodedPrompt]:
        """Return prompts of one domain under `uids`."""
        if prompts and prompts[0].domain in self.made_late:
            self.made_late[prompts[0].domain].waiting |= dict(zip(uids, prompts, strict=True))
        pairs = zip(self._encode(prompts), uids, strict=True)
        return [replace(one, uid=uid) for one, uid in pairs]

    def training_prompt(self, domain: str, index: int, uid: str) -> EncodedPrompt:
        """Return the training prompt at `index`, under `uid`."""
        return self._name_prompts([self.domains[domain].train[index]], [uid])[0]

    def mixed_prompts(self, names: Sequence[str], start: int, count: int, stage: str) -> list[EncodedPrompt]:
        """Return `count` prompts spread evenly over `names`, from number `start` of the mixed sequence."""
        prompts: list[EncodedPrompt] = []
        for i, name in enumerate(names):
            # Prompt number n of the mixed sequence is number n // len(names) of domain n % len(names).
            first = -(-(start - i) // len(names))
            last = -(-(start + count - i) // len(names))
            prompts.extend(self.next_prompts(name, max(first, 0), max(last, 0) - max(first, 0), stage))
        return prompts

    def held_out(self, domain: str, count: int, purpose: str) -> list[EncodedPrompt]:
        """Return the first `count` held-out prompts (all of them, if there are fewer)."""
        prompts = self._encode(self.domains[domain].held_out[:count])
        return [replace(one, uid=f"{purpose}/{domain}/{i}") for i, one in enumerate(prompts)]

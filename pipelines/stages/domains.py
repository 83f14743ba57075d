"""Load the recipe's domains: encoded prompts in a reproducible order, held-out prompts, rewards.

`domains.NAME.teacher_prompt` may name `{sibling}`, `{attempt}` and `{feedback}`: self-distillation with
feedback (SDPO). Such a prompt is another one for each answer, and is made once the step has its rewards. It
depends on the group and the seed alone, so that each rank makes the same, and so does a resumed run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from opd.config import Recipe
from opd.config.teachers import TeacherPromptConfig
from opd.data.load import load_domain
from opd.environments.protocol import tools_of
from opd.errors import ConfigError, DataError, ModelError
from opd.models.hf_folder import positions_of, read_config, scratch_config
from opd.models.token_ids import HeldTexts, special_texts
from opd.models.tokenizers import character_tokenizer, set_chat_template
from opd.pipelines.records.stage_names import of_round, split_round
from opd.pipelines.stages.samples import StepSamples
from opd.pipelines.stages.student import load_own_tokenizer, model_stops, tokenizer_of
from opd.rewards.registry import reward_of
from opd.rollout.collect import EncodedPrompt
from opd.rollout.prompts import (
    Domain,
    Prompt,
    PromptCursor,
    TokenBudget,
    encode_prompt,
    encode_prompts,
    encode_taught,
    fit_domain,
    hash_fraction,
    teacher_prompt,
    truncate_prompt,
)
from opd.rollout.rewards import RewardRunner
from opd.types import Sample, SampleGroup, Status, no_ids

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
    """Return the tokens of a sequence: `limit`, or the positions of `config` without servers' own."""
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
    """Return the chat template's arguments for prompts of `domain`: the recipe's, an environment's tools."""
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
        the shares of samples that were taught with what, as metrics. Empty if no domain's teachers read such
        prompts.
        """
        if not self.made_late:
            return {}
        counts: Counter[str] = Counter()
        named = {"none", "long"}
        for one in self.made_late.values():
            one.fill_prompts(samples, counts)
            named |= one.config.group_columns | ({"fallback"} if one.config.fallback else set())
        total = counts["samples"]
        return {f"teacher_prompt/{name}": counts[name] / total for name in sorted(named) if total}

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


@dataclass(slots=True)
class GroupPrompts:
    """Makes the prompts of one domain's teachers."""

    domain: str
    config: TeacherPromptConfig
    tokenizer: PreTrainedTokenizerBase
    template: Mapping[str, Any]
    """Arguments of the chat template."""
    limit: int
    """Tokens of prompt and response together."""
    rewards: RewardRunner
    seed: int
    special: Sequence[str]
    """Texts of special tokens and stops."""
    in_order: bool = True
    """Groups are used in the order in which their prompts were taken."""
    waiting: dict[str, Prompt] = field(default_factory=dict)
    """By the uid of its group: the prompts that were taken and not yet used, in that order."""
    _edges: tuple[set[str], set[str]] = field(init=False)
    """The beginnings and the ends of special tokens."""
    _heard: bool = False

    def __post_init__(self) -> None:
        cuts = [(one[:cut], one[cut:]) for one in self.special for cut in range(1, len(one))]
        self._edges = {head for head, _ in cuts}, {tail for _, tail in cuts}

    def fill_prompts(self, samples: StepSamples, counts: Counter[str]) -> None:
        """Give each sample of the domain the prompt that its teachers read, or an empty one, and count."""
        groups = [group for group in samples.groups if group.domain == self.domain]
        prompts = self._take_prompts({group.uid for group in groups})
        for group in groups:
            with samples.with_tokens(group) as loaded:
                made = [self._fill_prompt(prompts[group.uid], loaded, one, counts) for one in loaded.samples]
            for sample, ids in zip(group.samples, made, strict=True):
                sample.teacher_prompt_ids = ids
        asked = "feedback" in self.config.group_columns and not self._heard and bool(groups)
        if asked and not any(sample.feedback for group in groups for sample in group.samples):
            _log.warning(
                "domain %s: the reward said nothing of any answer of this step, and teacher_prompt names"
                " {feedback}; return a dict with the entries reward and feedback",
                self.domain,
            )
        self._heard |= asked

    def _take_prompts(self, uids: set[str]) -> dict[str, Prompt]:
        """Return the prompts of `uids`, and forget them and, in order, what was taken before them."""
        prompts = {uid: self.waiting[uid] for uid in uids}
        if not self.in_order:
            for uid in uids:
                del self.waiting[uid]
            return prompts
        for uid in list(self.waiting):
            if not uids:
                break
            uids.discard(uid)
            del self.waiting[uid]
        return prompts

    def _fill_prompt(
        self, prompt: Prompt, group: SampleGroup, sample: Sample, counts: Counter[str]
    ) -> np.ndarray:
        """[C']: the first of the recipe's prompts that can be filled and leaves room, or nothing."""
        texts = {name: text for name, text in self._group_texts(group, sample).items() if text}
        counts["samples"] += 1
        made, long = no_ids(), False
        for place, config in enumerate(self.config.alternatives()):
            if not config.group_columns <= texts.keys():
                continue
            ids = self._encode(prompt, config, texts)
            if ids is None:
                continue
            if len(ids) + len(sample.response_ids) > self.limit:
                long = True
                continue
            counts.update(config.group_columns)
            counts["fallback"] += place > 0
            made = ids
            break
        counts["none"] += not len(made)
        counts["long"] += long
        return made

    def _group_texts(self, group: SampleGroup, sample: Sample) -> dict[str, str]:
        """Return what can be said to the teacher of `sample`. What cannot is empty."""
        named, is_right = self.config.group_columns, self._is_right(sample)
        others = [one for one in group.samples if one is not sample and self._is_right(one)]
        read: Callable[[Sample], str] = self.rewards.readable_text
        texts = {"feedback": sample.feedback}
        if "attempt" in named and not is_right and sample.reward is not None:
            texts["attempt"] = read(sample)
        if "sibling" in named and others:
            # Of equally good ones the draw is the sample's own, so that a group learns from several.
            best = max(
                others, key=lambda one: (one.reward, hash_fraction(f"{self.seed}/{sample.uid}/{one.uid}"))
            )
            texts["sibling"] = read(best)
        return texts

    def _is_right(self, sample: Sample) -> bool:
        ended = sample.status in (Status.COMPLETED, Status.TRUNCATED)
        return ended and sample.reward is not None and sample.reward >= self.config.success_threshold

    def _encode(
        self, prompt: Prompt, config: TeacherPromptConfig, texts: Mapping[str, str]
    ) -> np.ndarray | None:
        """[C'] int32. Text of the model's or of others is never read as a special token. `None` if it holds
        what the tokenizer cannot spell.
        """
        marks = {name: f"{_HELD}{name}_" for name, text in texts.items() if self._may_act(text)}
        held = {mark: texts[name] for name, mark in marks.items()}
        asked = teacher_prompt(prompt, config, {**texts, **marks})
        try:
            return encode_prompt(asked, self.tokenizer, self.template, HeldTexts(held, self.special))
        except DataError:
            if not config.group_columns:  # the prompt itself
                raise
            return None

    def _may_act(self, text: str) -> bool:
        """Return True if `text` holds a special token, or could be a part of one with its neighbours."""
        heads, tails = self._edges
        longest = max(map(len, self.special), default=0)
        at_edges = any(text[-n:] in heads or text[:n] in tails for n in range(1, longest))
        return at_edges or _HELD in text or any(one in text for one in self.special)


_HELD = "ToldToTheTeacher"
"""Stands for text that holds a special token, while a prompt is rendered."""

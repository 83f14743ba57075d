"""Checks that need answers: the KL of each existing teacher to the student, and rewards.

They use a few responses of the student. `opd doctor --pairs FILE` counts how often a reward prefers the
better of two answers. A row has `prompt` (text or messages), `chosen` and `rejected`, and `label` if the
reward needs one. Or `chosen` and `rejected` are full conversations, as in much preference data. By Bradley
and Terry's model (1952) the better one is preferred with probability sigmoid(r(chosen) - r(rejected)). The
accuracy of a reward model is the share of pairs above one half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from opd.config import Recipe
from opd.errors import ConfigError, DataError
from opd.models.token_ids import id_count
from opd.pipelines.check.checks import Finding, given_teachers, print_findings, run_check
from opd.pipelines.check.domains import answer_to, check_rewards
from opd.pipelines.check.tokenizers import alignment_findings
from opd.pipelines.evaluation.statistics import FEW, score_interval
from opd.progress import set_activity
from opd.rewards.registry import check_labels, own_reward, scored_by
from opd.rollout.prompts import Prompt, encode_prompt
from opd.rollout.rewards import Job
from opd.types import HiddenStates, RolloutRequest, Sample

if TYPE_CHECKING:
    from opd.models.causal_lm import CausalLM
    from opd.protocols import Teacher
    from opd.rollout.prompts import Domain
    from opd.teachers.kinds import Placement

FAR = 3.1
"""Nats per token: the farthest start of a measured merge. The quick start's base begins at 0.7 to 3.1 from
its teachers, and its merge keeps 99.8 % of their accuracy."""
_PROMPTS, _NEW_TOKENS, _ANSWERS = 8, 32, 3


def check_kl(recipe: Recipe, domains: Mapping[str, Domain], tokenizer: Any) -> list[Finding]:
    """Return KL(student || teacher) for every domain and existing teacher. Of a teacher with a tokenizer of
    its own return how the student's answers are aligned with it. Loads the models.
    """
    teachers = given_teachers(recipe)
    if recipe.model.path is None or not Path(recipe.model.path).is_dir() or not teachers:
        return []
    from opd.pipelines.stages.student import load_model
    from opd.pipelines.stages.teachers import open_translators, placement_of

    student = load_model(recipe, Path(recipe.model.path))
    taught, followed = recipe.teacher_domains(), recipe.opd_teachers()
    findings: list[Finding] = []
    placement = placement_of(recipe, id_count(tokenizer))
    translators = open_translators(recipe, [*teachers], tokenizer)
    for name, source in teachers.items():
        if name in translators:
            for domain in taught.get(name, ()):
                if next(iter(recipe.teacher_weights(domain))) != name:
                    continue  # its teachers share a tokenizer
                samples = sample_responses(recipe, domains[domain], student, tokenizer)
                ids = [sample.response_ids.tolist() for sample in samples]
                findings += alignment_findings(domain, translators[name], ids, "its own answers")
            continue
        with open_here(name, source, placement) as teacher:
            for domain in domains.values():
                if domain.name in (*taught.get(name, ()), *followed.get(name, ())):
                    title = f"KL to {name} on {domain.name}"
                    findings += run_check(
                        title, _kl_findings, recipe, domain, student, teacher, tokenizer, title
                    )
    return findings


def check_base(recipe: Recipe, domains: Mapping[str, Domain], tokenizer: Any) -> list[Finding]:
    """Score a few answers of an existing base with each reward. Loads the model."""
    if recipe.model.path is None or not Path(recipe.model.path).is_dir():
        return []
    from opd.pipelines.stages.student import load_model

    student = load_model(recipe, Path(recipe.model.path))
    written: dict[str, list[tuple[Prompt, str]]] = {}
    for name, domain in domains.items():
        samples = sample_responses(recipe, domain, student, tokenizer)[:_ANSWERS]
        written[name] = []
        for sample in samples:
            prompt = domain.held_out[int(sample.uid.rpartition("/")[2])]
            text = tokenizer.decode(sample.response_ids.tolist(), skip_special_tokens=True)
            written[name].append((prompt, text))
    return check_rewards(recipe, domains, written)


@contextmanager
def open_here(name: str, source: str, placement: Placement) -> Iterator[Teacher]:
    """Open the teacher in a folder or at a URL, in this process. Published weights are streamed."""
    from opd.teachers.local_teacher import LocalTeacher
    from opd.teachers.skeleton import is_published
    from opd.teachers.streamed_teacher import streamed_teachers

    if is_published(source):
        with closing(streamed_teachers({name: source}, placement)[name]) as teacher:
            yield teacher
    else:
        options = {"dtype": placement.dtype, "device": placement.device, "max_tokens": placement.max_tokens}
        yield LocalTeacher(name, source, vocabulary=placement.vocabulary, **options)


def _kl_findings(
    recipe: Recipe, domain: Domain, student: CausalLM, teacher: Teacher, tokenizer: Any, title: str
) -> list[Finding]:
    samples = sample_responses(recipe, domain, student, tokenizer)
    value = mean_kl(student, teacher, samples, id_count(tokenizer), recipe.rollout.temperature)
    text, numbers = f"{value:.3f} nats per token at the start", {"kl": value}
    if value > FAR:
        detail = (
            f"{text}; no merge was measured from beyond {FAR}: the student rarely writes what this teacher"
            " would; prefer a teacher trained from this student, or give the merge more steps"
        )
        return [Finding("warning", title, detail, numbers)]
    return [Finding("ok", title, text, numbers)]


def sample_responses(recipe: Recipe, domain: Domain, student: CausalLM, tokenizer: Any) -> list[Sample]:
    """Return the student's responses to a few held-out prompts. A uid ends with the index of its prompt."""
    from opd.pipelines.stages.domains import prompt_capacity, template_arguments
    from opd.pipelines.stages.student import sampling_params
    from opd.rollout.collect import responses
    from opd.rollout.prompts import encode_prompt, truncate_prompt
    from opd.rollout.torch_engine import TorchEngine

    recipe = recipe.for_domain(domain.name)
    capacity, kwargs = (
        prompt_capacity(recipe, tokenizer, domain.name),
        template_arguments(recipe, domain.name),
    )
    prompts = [
        truncate_prompt(encode_prompt(prompt, tokenizer, kwargs), capacity.tokens, tokenizer.bos_token_id)
        for prompt in domain.held_out[:_PROMPTS]
    ]
    sampling = sampling_params(recipe, tokenizer)
    sampling = replace(sampling, max_new_tokens=min(_NEW_TOKENS, sampling.max_new_tokens))
    requests = [
        RolloutRequest(f"doctor/{domain.name}/{number}", prompt, sampling, recipe.seed)
        for number, prompt in enumerate(prompts)
    ]
    engine = TorchEngine(
        student,
        max_running=_PROMPTS,
        max_sequence=recipe.rollout.max_sequence,
        vocab_size=id_count(tokenizer),
        settings=recipe.runtime.decode,
    )
    written = {uid: tokens.token_ids for uid, _, tokens in responses(engine, requests)}
    return [
        Sample(request.uid, request.uid, domain.name, request.prompt_ids, response_ids=ids)
        for request in requests
        if len(ids := written[request.uid])
    ]


def mean_kl(
    student: CausalLM, teacher: Teacher, samples: Sequence[Sample], vocabulary: int, temperature: float
) -> float:
    """Return the mean KL(student || teacher) over all response tokens, in nats, over `vocabulary` tokens."""
    import torch

    from opd.kernels.ops import linear_kl
    from opd.teachers.score_cache import check_finite
    from opd.train.packing import pack_tokens

    with torch.no_grad():
        ids, positions, cu_seqlens, rows = (t.to(student.device) for t in pack_tokens(samples))
        hidden = student.hidden(ids, positions, cu_seqlens)[rows]
        targets = teacher.score(samples)
        assert isinstance(targets, HiddenStates)  # a teacher in this process has them
        check_finite(hidden, "the student")
        check_finite(targets.rows, f"teacher {teacher.name}")
        divergence = linear_kl(
            hidden, student.head(vocabulary), targets.rows, teacher.load_head(), temperature=temperature
        )
    return float(divergence.mean())


class Pair(NamedTuple):
    """Two answers to one prompt."""

    prompt: Prompt
    chosen: str
    rejected: str


def check_pairs(recipe: Recipe, path: Path, domain: str | None, *, as_json: bool = False) -> int:
    """Print how the reward of `domain` orders the pairs in `path`. Returns the exit status."""
    if domain is None and len(recipe.domains) == 1:
        domain = next(iter(recipe.domains))
    if domain is None or domain not in recipe.domains:
        names = ", ".join(recipe.domains)
        raise ConfigError(f"--pairs needs --domain, one of {names}: whose reward is asked")
    findings = run_check(f"pairs {domain}", _pairs_findings, recipe, domain, path)
    return print_findings(f"opd doctor: {recipe.name}", findings, as_json=as_json)


def _pairs_findings(recipe: Recipe, domain: str, path: Path) -> list[Finding]:
    config, pairs = recipe.domains[domain], read_pairs(path, domain)
    function = own_reward(config)
    if function is None:
        raise ConfigError(
            f"domain {domain} is scored by its source's own checker; --pairs is for a `reward` of its own"
        )
    check_labels(config, domain, [pair.prompt for pair in pairs])
    context = _prompt_renderer(recipe, domain)
    samples = []
    for number, pair in enumerate(pairs):
        for name in ("chosen", "rejected"):
            uid, text = f"{name} {number + 1}", getattr(pair, name)
            samples.append(answer_to(uid, pair.prompt, text, context(pair.prompt)))
    job = Job(function, samples, recipe.rollout.reward_timeout, "answer")
    with set_activity(f"asking the reward of {domain} for {len(samples)} answers"):
        job.start()
        scores = [one.reward for one in job.result()]
    margins = [better - worse for better, worse in zip(scores[::2], scores[1::2], strict=True)]
    count, ties = len(margins), margins.count(0.0)
    right = (sum(margin > 0 for margin in margins) + ties / 2) / count
    accuracy = score_interval(right, count, recipe.evaluation.confidence)
    # log(1 + exp(-margin)), without overflow
    loss = sum(max(-margin, 0.0) + math.log1p(math.exp(-abs(margin))) for margin in margins) / count
    detail = (
        f"{scored_by(config)}: Bradley-Terry accuracy {accuracy.value:.3f} ({accuracy.low:.3f} to"
        f" {accuracy.high:.3f}) on {count:,} pairs, {ties:,} of them ties, which count half; loss"
        f" {loss:.3f} nats"
    )
    level = "ok"
    if accuracy.low <= 0.5:
        level, detail = "warning", f"{detail}; it is not shown to be better than chance"
        detail += ": give more pairs" if count < FEW and accuracy.high > 0.5 else ": mend the reward"
    numbers = accuracy._asdict() | {"pairs": count, "ties": ties, "loss": loss}
    return [Finding(level, f"pairs {domain}", detail, numbers)]


def _prompt_renderer(recipe: Recipe, domain: str) -> Callable[[Prompt], str]:
    """Return a function that renders a prompt as the student reads it. It uses the chat template if the
    student has a tokenizer before training.
    """
    source = recipe.model.tokenizer or recipe.model.path
    if source is None:
        return lambda prompt: prompt.text if prompt.text is not None else str(prompt.messages)
    from opd.pipelines.stages.domains import template_arguments
    from opd.pipelines.stages.student import tokenizer_of

    tokenizer: Any = tokenizer_of(recipe, Path(source))
    template = template_arguments(recipe, domain)
    return lambda prompt: str(
        tokenizer.decode(encode_prompt(prompt, tokenizer, template), skip_special_tokens=False)
    )


def read_pairs(path: Path, domain: str) -> list[Pair]:
    """Return the pairs of a `.jsonl` or `.parquet` file. Raises `DataError` naming file and line."""
    from opd.data.load import prompt_of, rows_of

    pairs = []
    for where, row in rows_of(path, domain, set()):
        answers = {}
        for column in ("chosen", "rejected"):
            answers[column], messages = _read_answer(where, column, row.get(column))
            if messages and row.get("prompt") is None:
                row = row | {"prompt": messages}
        pairs.append(Pair(prompt_of(where, row, domain), answers["chosen"], answers["rejected"]))
    if not pairs:
        raise DataError(f"{path} has no pairs; give rows with `prompt`, `chosen` and `rejected`.")
    return pairs


def _read_answer(where: str, column: str, value: Any) -> tuple[str, list[dict[str, Any]]]:
    """Return the text of an answer, and the messages before it if it is a conversation."""
    from opd.data.load import check_messages, check_text

    if isinstance(value, str):
        check_text(where, value, column)
        return value, []
    if isinstance(value, list) and value:
        read = check_messages(where, value, column)
        if read[-1]["role"] == "assistant":
            return read[-1]["content"], read[:-1]
    raise DataError(
        f"{where}: `{column}` is no text, and no messages that end with the assistant's; mend it."
    )

"""Print models' answers: `opd sample` as they come, and `opd compare` of two models concurrently."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from opd.config import Recipe
from opd.config.hub_names import hub_name
from opd.data.load import prompt_of
from opd.errors import ConfigError, DataError, ModelError
from opd.models.causal_lm import CausalLM
from opd.models.generation import sampling_of
from opd.models.hf_folder import check_folder, described_in, positions_of
from opd.models.token_ids import id_count
from opd.models.tokenizers import load_tokenizer, rows_fault, stops_of
from opd.pipelines.check.tokenizers import StopAdvice, template_findings
from opd.pipelines.stages.domains import DomainSet
from opd.pipelines.stages.precision import checkpoint_dtype
from opd.pipelines.stages.student import model_remarks, stop_strings, tokenizer_of, ways_of
from opd.progress import Progress, note_output, set_activity
from opd.rollout.collect import EncodedPrompt, Generate, collect
from opd.rollout.prompts import Prompt, encode_prompt
from opd.rollout.rewards import RewardRunner
from opd.rollout.torch_engine import TorchEngine
from opd.types import RolloutRequest, Sample, SamplingParams, Status, prompt_text
from opd.untrusted import escape_controls, safe_excerpt

MOST = 512
"""Default tokens of an answer."""
MANY = 8
"""Default number of held-out prompts of a domain."""
_COLDEST = 1e-30
"""Below it logits overflow float32, so the most probable token is taken."""
_WIDTH = 76
"""Characters of a prompt above its answers."""


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """The request of the command line."""

    prompts: tuple[str, ...] = ()
    system: str | None = None
    recipe: Recipe | None = None
    domain: str | None = None
    """Domain of `recipe`. Its held-out prompts are sampled as the recipe does."""
    count: int | None = None
    """Number of prompts. `None`: `MANY`."""
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises `ConfigError` if options exclude each other."""
        if (self.recipe is None) != (self.domain is None):
            raise ConfigError(
                "--recipe and --domain go together: a recipe, and which of its domains is asked"
            )
        if bool(self.prompts) == (self.recipe is not None):
            raise ConfigError("give what is asked: --prompt TEXT, or --recipe R --domain D (one of the two)")
        if self.recipe is None and self.count is not None:
            raise ConfigError("--prompts goes with --recipe and --domain; repeat --prompt to ask several")
        if self.recipe is not None and self.system is not None:
            raise ConfigError("--system goes with --prompt; a domain's prompts bring their own messages")
        if self.recipe is not None and self.domain not in self.recipe.domains:
            names = ", ".join(self.recipe.domains)
            raise ConfigError(f"--domain {self.domain}: the recipe has no such domain; it has {names}")


@dataclass(slots=True)
class Speaker:
    """A model with the questions in its own tokens."""

    engine: TorchEngine
    tokenizer: Any
    questions: list[EncodedPrompt]
    sampling: SamplingParams
    generate: Generate
    rewards: RewardRunner | None
    strings: Sequence[str]
    """Strings that end an answer."""

    @classmethod
    def load(cls, model: str, options: SampleOptions) -> Speaker:
        """Load `model`, a folder or a name on the Hub. Raises if it or its prompts are wrong."""
        folder = model_folder(model)
        tokenizer = load_tokenizer(folder)
        device, template = "auto", {}
        if options.recipe is not None and options.domain is not None:
            count = MANY if options.count is None else options.count
            recipe = _single_domain(options.recipe, options.domain, folder, count)
            device, template = recipe.model.device, recipe.model.chat_template_kwargs
            tokenizer = tokenizer_of(recipe, folder)
            data = DomainSet.open(recipe, tokenizer)
            questions = data.held_out(options.domain, count, "sample")
            generation = ways_of(recipe, tokenizer)[options.domain]
            sampling, generate, rewards = generation.sampling, generation.generate, data.rewards
            strings = recipe.rollout.stop if stop_strings(recipe, tokenizer) else []
        else:
            stops = tuple(stop.token_id for stop in stops_of(tokenizer, folder))
            settings: dict[str, Any] = sampling_of(folder)
            if settings:
                listed = ", ".join(f"{name} {value:g}" for name, value in settings.items())
                print(f"opd: {model}: sampled as its generation_config.json says: {listed}", file=sys.stderr)
            sampling, generate = SamplingParams(max_new_tokens=MOST, stop_ids=stops, **settings), collect
            questions, rewards, strings = _encode_questions(options, tokenizer), None, []
        for remark in model_remarks(folder, tokenizer):
            print(f"opd: warning: {model}: {remark}", file=sys.stderr)
        if tokenizer.chat_template:
            mends = StopAdvice() if options.recipe is not None else _stop_advice(folder)
            for finding in template_findings(tokenizer, template, sampling.stop_ids, strings, mends):
                print(f"opd: warning: {model}: {finding.title}: {finding.detail}", file=sys.stderr)
        if options.max_tokens is not None:
            sampling = replace(sampling, max_new_tokens=options.max_tokens)
        if options.temperature is not None:
            sampling = replace(sampling, temperature=options.temperature)
        if sampling.temperature < _COLDEST:
            sampling = replace(sampling, temperature=0.0)
        with set_activity(f"loading {model}"):
            loaded = CausalLM.from_pretrained(
                folder, dtype=checkpoint_dtype(described_in(folder)), device=device
            )
        fault = rows_fault(loaded.config, tokenizer)
        if fault is not None:
            raise ModelError(f"{model}: {fault}; give it the tokenizer that it was trained with.")
        loaded.vocabulary = min(id_count(tokenizer), loaded.vocab_size)
        if not questions:
            raise DataError("the domain has no held-out prompts; raise domains.NAME.held_out")
        longest, positions = max(len(one.token_ids) for one in questions), positions_of(loaded.config)
        if positions and longest >= positions:
            raise DataError(
                f"a prompt has {longest} tokens, and {model} has {positions} positions for prompt and answer;"
                " give a shorter one"
            )
        if positions:
            limit = min(sampling.max_new_tokens, positions - longest)
            sampling = replace(sampling, max_new_tokens=limit)
        length = max(2, longest + sampling.max_new_tokens)
        engine = TorchEngine(loaded, max_running=16, max_sequence=length, vocab_size=loaded.vocabulary)
        return cls(engine, tokenizer, questions, sampling, generate, rewards, strings)

    def stream_answer(self, number: int, seed: int, say: Callable[[str], None]) -> Sample:
        """Return the answer to question `number`. Each new text goes to `say` as soon as it is decoded."""
        question = self.questions[number]
        sample = question.empty_sample(0)
        decoder, printed = _TextDecoder(self.tokenizer), 0
        ids: list[int] = []
        request = RolloutRequest(sample.uid, question.token_ids, self.sampling, seed)
        for chunk in self.engine.generate(request):
            ids += chunk.token_ids.tolist()
            text = decoder.add_tokens(chunk.token_ids.tolist(), last=bool(chunk.finished))
            end = min((text.find(s) + len(s) for s in self.strings if s in text), default=None)
            say(text[printed:end])
            printed = len(text)
            sample.status = chunk.finished.get(sample.uid, sample.status)
            if end is not None and not chunk.finished:
                self.engine.abort([sample.uid])
                sample.status = Status.COMPLETED
                break
        sample.response_ids = np.array(ids, dtype=np.int32)
        sample.loss_mask = np.ones(len(ids), dtype=bool)
        return sample

    def answer_all(self, seed: int) -> list[Sample]:
        """Return one answer to every question, in their order, with rewards if the domain has one. A
        question's noise depends on the seed and its index alone, so two models get the same draws.
        """
        groups = self.generate(self.engine, self.questions, 1, self.sampling, seed)
        by_uid = {group.uid: group.samples[0] for group in groups}
        samples = [by_uid[question.uid] for question in self.questions]
        self.score_samples(samples)
        return samples

    def score_samples(self, samples: Sequence[Sample]) -> None:
        if self.rewards is not None:
            self.rewards.score(samples)

    def response_text(self, sample: Sample) -> str:
        """Return the response text, without the tokens that end it."""
        return str(
            self.tokenizer.decode(sample.response_ids[sample.loss_mask].tolist(), skip_special_tokens=True)
        )

    def question_text(self, number: int) -> str:
        """Return a question on one line."""
        text = " ".join(prompt_text(self.questions[number].metadata).split())
        return escape_controls(text if len(text) <= _WIDTH else f"{text[:_WIDTH]} ...", "")


class _TextDecoder:
    """Decode tokens to text as they come.

    An incomplete character waits for the rest of its bytes. New tokens are decoded behind the previous ones
    because the first of a text may lose its blank.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._text = tokenizer, ""
        self._previous: list[int] = []
        self._open: list[int] = []

    def add_tokens(self, ids: list[int], last: bool) -> str:
        """Return all text decoded so far."""
        self._open += ids
        text = self._decode_ids(self._previous + self._open)
        if self._open and (last or not text.endswith("\ufffd")):
            self._text += text[len(self._decode_ids(self._previous)) :]
            self._previous, self._open = self._open, []
        return self._text

    def _decode_ids(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def model_folder(model: str) -> Path:
    """Return the folder of `model`, fetched if it is a name on the Hub. Raises if it is wrong."""
    name = hub_name(model)
    if name is None or name.file is not None:
        folder = Path(model)
        check_folder(folder)
        return folder
    from opd.models.hub import fetch_from_hub

    with Progress() as progress:
        progress.begin_stage(model)
        return fetch_from_hub(
            name, report=lambda d, t: progress.update_stage(model, d >> 20, max(1, t >> 20), "MiB")
        ).path


def _stop_advice(folder: Path) -> StopAdvice:
    """Return the advice for a model that is sampled as it is, without a recipe."""
    return StopAdvice(
        stop=f"add {{id}} to `eos_token_id` of {described_in(folder) / 'generation_config.json'}, which says"
        " where it ends for every program, or ask by --recipe and --domain with rollout.stop_ids",
        endless="--max-tokens bounds its answers; give it a chat template that ends an answer with an"
        " end-of-sequence token, or ask by --recipe and --domain with rollout.stop",
        header="give it a chat template that heeds add_generation_prompt, or ask by --recipe and --domain"
        " with model.chat_template",
    )


def _single_domain(recipe: Recipe, domain: str, folder: Path, count: int) -> Recipe:
    """Return `recipe` with `domain` alone and `count` held-out prompts, for the model in `folder`."""
    model = recipe.model.model_copy(update={"path": str(folder), "config": None, "tokenizer": None})
    most = max(count, recipe.evaluation.prompts_per_domain)  # the recipe's own, if it has enough
    held_out = recipe.evaluation.model_copy(update={"prompts_per_domain": most})
    of_domain = recipe.for_domain(domain)
    domains = {domain: of_domain.domains[domain]}
    return of_domain.model_copy(update={"model": model, "domains": domains, "evaluation": held_out})


def _encode_questions(options: SampleOptions, tokenizer: Any) -> list[EncodedPrompt]:
    """Encode each `--prompt`, read as a row of a data file. With a chat template a text is the user's
    message. Raises `DataError`.
    """
    chat, system = bool(tokenizer.chat_template), options.system
    if system is not None and not chat:
        raise DataError("--system needs a model with a chat template, and this one has none; leave it out")
    questions = []
    for number, text in enumerate(options.prompts):
        messages = prompt_of("--prompt", {"prompt": text}, "sample").messages
        if messages is None and not chat:
            prompt = Prompt.from_content(text, None, "sample", where="--prompt")
        else:
            if messages is None:
                messages = [{"role": "user", "content": text}]
            prompt = prompt_of("--prompt", {"prompt": messages, "system": system}, "sample")
        ids = encode_prompt(prompt, tokenizer)
        if not len(ids):
            raise DataError(f"--prompt {safe_excerpt(text)!r} has no tokens; a model needs at least one")
        questions.append(EncodedPrompt(f"prompt/{number}", "sample", ids, None, {"prompt": text}))
    return questions


def run_sample(model: str, options: SampleOptions) -> int:
    """Print the answers, each as it comes. Returns the exit status."""
    speaker = Speaker.load(model, options)
    several = len(speaker.questions) > 1 or speaker.rewards is not None
    written = None if speaker.generate is collect else speaker.answer_all(options.seed)
    for number in range(len(speaker.questions)):
        if several:
            print(f"{'' if number == 0 else chr(10)}> {speaker.question_text(number)}", flush=True)
        if written is None:
            sample = speaker.stream_answer(number, options.seed, _print_text)
            speaker.score_samples([sample])
        else:
            sample = written[number]
            _print_text(speaker.response_text(sample))
        print(flush=True)
        if sample.status is Status.TRUNCATED:
            print(
                f"opd: cut after {len(sample.response_ids)} tokens; --max-tokens gives more", file=sys.stderr
            )
        if sample.reward is not None:
            print(f"[reward {sample.reward:g}, label {safe_excerpt(sample.label)}]", flush=True)
    return 0


def run_compare(models: Sequence[str], options: SampleOptions, console: Console | None = None) -> int:
    """Print two models' answers to the same questions in two columns. Returns the exit status."""
    from rich.console import Console

    console = console or Console()
    written: list[list[tuple[str, Sample]]] = []
    questions: list[str] = []
    for model in models:
        speaker = Speaker.load(model, options)
        with set_activity(f"{model} answers {len(speaker.questions)} prompts"):
            answers = speaker.answer_all(options.seed)
        written.append(
            [(escape_controls(speaker.response_text(sample)).strip("\n"), sample) for sample in answers]
        )
        questions = [speaker.question_text(number) for number in range(len(speaker.questions))]
        del speaker  # one model in memory
    if any(len(rows) != len(questions) for rows in written):
        raise DataError(
            "the two models are asked different prompts: one has no room for some of the domain's; lower"
            " --max-tokens, or rollout.max_new_tokens"
        )
    names = [safe_excerpt(model) for model in models]
    for question, *pair in zip(questions, *written, strict=True):
        _print_pair(console, question, names, pair)
    rewards = [[s.reward for _, s in rows if s.reward is not None] for rows in written]
    if all(rewards) and all(len(rows) == len(questions) for rows in rewards):
        for name, rows in zip(names, rewards, strict=True):
            console.print(
                f"{name}: mean reward {np.mean(rows):.3g} over {len(rows)} prompts",
                markup=False,
                highlight=False,
            )
    return 0


def _print_pair(
    console: Console, question: str, names: Sequence[str], pair: Sequence[tuple[str, Sample]]
) -> None:
    from rich.table import Table
    from rich.text import Text

    heads = []
    for name, (_, sample) in zip(names, pair, strict=True):
        notes = [] if sample.reward is None else [f"reward {sample.reward:g}"]
        notes += ["cut"] if sample.status is Status.TRUNCATED else []
        heads.append(f"{name} [{', '.join(notes)}]" if notes else name)
    console.print(Text(f"> {question}"), soft_wrap=True)
    if console.is_terminal:
        table = Table(show_lines=False, expand=True)
        for head in heads:
            table.add_column(Text(head), ratio=1, overflow="fold")
        table.add_row(*(Text(text) for text, _ in pair))
        console.print(table)
        return
    for head, (text, _) in zip(heads, pair, strict=True):
        console.print(Text(f"{head}\n{text}"), soft_wrap=True)
    console.print()


def _print_text(text: str) -> None:
    sys.stdout.write(escape_controls(text))
    sys.stdout.flush()
    if text:
        note_output()  # else a progress message would stand in the middle of an answer

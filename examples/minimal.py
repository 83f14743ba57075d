"""Multi-teacher on-policy distillation on one page: what every merge computes, and nothing else.

    python examples/minimal.py STUDENT TEACHER_A TEACHER_B [--a PROMPT ...] [--b PROMPT ...]

The three are Hugging Face folders with one tokenizer; prompts of your own take the place of English ones.

Each domain has prompts and a teacher. One step of a merge:

1. The student samples a response to each prompt, at temperature 1 (`sample_response`).
2. Samples are sorted by teacher, so that each teacher is needed once (`merge_step`).
3. A teacher reads each sample in one forward pass and leaves its last hidden states [R, D]
   (`response_states`).
4. The loss is the exact reverse KL(student || teacher) over the whole vocabulary at each token of the
   responses (`merge_loss`). Each teacher's tokens are averaged first, so that a domain of short answers
   keeps its share of the gradient.
5. Backward, clip, AdamW.

`opd run` adds what real models need: a token log and resume, engines that decode many responses together,
teachers streamed layer by layer, packing, several ranks, rewards, evaluation. None of that changes the loss:
tests/examples/test_minimal.py holds that loss and gradient are those of the training loop, bit for bit.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from opd.kernels.head import Head
from opd.kernels.ops import linear_kl

PROMPTS = {
    "a": ["What is 12 + 30? Answer:", "What is 7 + 15? Answer:"],
    "b": ["Sort 4 1 3. Answer:", "Sort 9 2 5. Answer:"],
}
"""By domain; a domain is taught by the teacher of its name."""


@dataclass
class Sample:
    """A prompt [P] and the student's response [R], both int64."""

    domain: str
    prompt: Tensor
    response: Tensor

    @property
    def ids(self) -> Tensor:
        """[1, P + R]: prompt and response."""
        return torch.cat([self.prompt, self.response])[None]


@torch.no_grad()
def sample_response(student: PreTrainedModel, domain: str, prompt: Tensor, most: int, stop: int) -> Sample:
    """Draw up to `most` tokens after `prompt` [P] from the student's distribution, up to the `stop` token.

    Each token reads all before it again. An engine keeps their keys and values, which changes no token.
    """
    ids = prompt
    while len(ids) < len(prompt) + most and (len(ids) == len(prompt) or int(ids[-1]) != stop):
        probabilities = student(input_ids=ids[None], use_cache=False).logits[0, -1].float().softmax(dim=-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1)])
    return Sample(domain, prompt, ids[len(prompt) :])


def response_states(model: PreTrainedModel, sample: Sample) -> Tensor:
    """Return the last hidden states [R, D] at the positions that predict the response."""
    hidden = model.get_decoder()(input_ids=sample.ids, use_cache=False).last_hidden_state[0]
    return hidden[len(sample.prompt) - 1 : -1]


def head_of(model: PreTrainedModel) -> Head:
    """Return what makes logits of the last hidden states."""
    return Head(model.get_output_embeddings().weight)


def merge_loss(
    student: PreTrainedModel, teacher: PreTrainedModel, states: Tensor, sample: Sample, weight: float
) -> Tensor:
    """Return `weight` times the sum of KL(student || teacher), in nats, over the response.

    `states` [R, D] are the teacher's. `linear_kl` makes the logits of some tokens at a time from both hidden
    states, and leaves the exact gradient: [R, V] never exists.
    """
    weights = torch.full((len(sample.response),), weight)
    own = response_states(student, sample)
    kl = linear_kl(own, head_of(student), states, head_of(teacher), weight=weights)
    return (weights * kl).sum()


def accumulate(
    student: PreTrainedModel, teachers: dict[str, PreTrainedModel], samples: list[Sample]
) -> float:
    """Add the gradient of a step to the student's; returns the loss, in nats."""
    tokens = {name: sum(len(one.response) for one in samples if one.domain == name) for name in teachers}
    asked = sum(count > 0 for count in tokens.values())
    total = 0.0
    for sample in sorted(samples, key=lambda one: one.domain):
        teacher = teachers[sample.domain]
        with torch.no_grad():
            states = response_states(teacher, sample)
        loss = merge_loss(student, teacher, states, sample, 1.0 / (asked * tokens[sample.domain]))
        loss.backward()
        total += float(loss.detach())
    return total


def merge_step(
    student: PreTrainedModel,
    teachers: dict[str, PreTrainedModel],
    optimizer: torch.optim.Optimizer,
    samples: list[Sample],
) -> float:
    """Learn from `samples` once; returns the loss before the update, in nats."""
    optimizer.zero_grad()
    loss = accumulate(student, teachers, samples)
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    return loss


def main() -> None:
    """Merge two teachers into the student, and print the KL of each step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("student")
    parser.add_argument("teachers", nargs=2, metavar="TEACHER")
    parser.add_argument("--a", nargs="+", default=PROMPTS["a"], help="prompts of the first domain")
    parser.add_argument("--b", nargs="+", default=PROMPTS["b"], help="prompts of the second domain")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of a response")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for path in (options.student, *options.teachers):
        if not (Path(path) / "config.json").is_file():
            parser.error(f"{path} is no Hugging Face folder: it has no config.json")
    if options.tokens < 1:
        parser.error("--tokens is at least 1")
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.student, trust_remote_code=False)
    student, *others = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False).eval()
        for path in (options.student, *options.teachers)
    )
    rows = {model.get_output_embeddings().weight.shape[0] for model in (student, *others)}
    if len(rows) > 1:
        parser.error(f"the models have heads of {sorted(rows)} tokens; give three with one tokenizer")
    teachers = dict(zip("ab", others, strict=True))
    prompts = {"a": options.a, "b": options.b}
    optimizer = torch.optim.AdamW(student.parameters(), lr=options.lr, weight_decay=0.0)
    for step in range(options.steps):
        samples = [
            sample_response(student, domain, torch.tensor(ids), options.tokens, tokenizer.eos_token_id)
            for domain, texts in prompts.items()
            for ids in tokenizer(texts)["input_ids"]
        ]
        kl = merge_step(student, teachers, optimizer, samples)
        tokens = sum(len(sample.response) for sample in samples)
        print(f"step {step + 1}: KL {kl:.4f} nats a token, {tokens} tokens")


if __name__ == "__main__":
    main()

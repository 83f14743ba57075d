"""One rank of the vocabulary-parallel tests: `python vocab_parallel_worker.py RANK WORLD STORE`.

Compares every operation on the parts of a head with the same operation on the whole head and prints one JSON
object: case -> largest difference relative to the largest magnitude (at least 1). Cases of two ranks run in
two groups at once.
"""

import json
import sys
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from opd.kernels import ops
from opd.kernels.head import Head
from opd.kernels.vocab_parallel import HeadShard

TOKENS, VOCABULARY, WIDTH, TEACHER_WIDTH = 13, 103, 6, 5
FORMS = {
    "plain": {},
    "scaled, with padding": {"scale": 0.7, "vocab_size": VOCABULARY - 4},
    "softcap": {"softcap": 3.0},
}


def difference(got: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the expected tensor's largest magnitude (at least 1)."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    largest = max(1.0, float(expected.detach().abs().max()))
    return float((got - expected).detach().abs().max()) / largest


class Problem:
    """Inputs that are the same on every rank."""

    def __init__(self, dtype: torch.dtype, form: dict) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.dtype = dtype
        rows = form.get("vocab_size", VOCABULARY)
        self.hidden = self.normal(TOKENS, WIDTH).requires_grad_()
        self.head = Head(
            self.normal(VOCABULARY, WIDTH).requires_grad_(), self.normal(VOCABULARY).requires_grad_(), **form
        )
        self.teacher_hidden = self.normal(TOKENS, TEACHER_WIDTH)
        self.teacher_head = Head(self.normal(rows, TEACHER_WIDTH))
        self.other_hidden, self.other_head = self.normal(TOKENS, 3), Head(self.normal(rows, 3))
        self.weight = torch.rand(TOKENS, generator=self.generator) + 0.1
        self.weight[4] = 0
        self.upstream = torch.randn(TOKENS, generator=self.generator)
        self.ids = torch.randint(0, rows, (TOKENS, 3), generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, (self.hidden, self.head.weight, self.head.bias)))


def whole_gradients(problem: Problem, loss: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The gradients of a loss on parts of the head, the parts put together."""
    hidden, weight, bias = problem.gradients(loss)
    for part in (weight, bias):
        dist.all_reduce(part, group=group)  # outside a rank's own rows its gradient is zero
    return [hidden, weight, bias]


def kl_cases(problem: Problem, group: dist.ProcessGroup) -> dict[str, float]:
    """Values and gradients of every divergence, with and without a declared weight."""
    shards = [HeadShard.split_head(head, group) for head in (problem.head, problem.teacher_head)]
    found = {}
    for kind, proportional in product(
        ("reverse", "forward", "jsd", "skew_reverse", "skew_forward"), (True, False)
    ):
        options = {"kind": kind, "beta": 0.3, "temperature": 1.3, "weight": problem.weight, "chunk": 5}
        upstream = problem.weight if proportional else problem.upstream
        expected = ops.linear_kl(
            problem.hidden, problem.head, problem.teacher_hidden, problem.teacher_head, **options
        )
        got = ops.linear_kl(problem.hidden, shards[0], problem.teacher_hidden, shards[1], **options)
        expected_gradients = problem.gradients((expected * upstream).sum())
        gradients = whole_gradients(problem, (got * upstream).sum(), group)
        pairs = zip([got, *gradients], [expected, *expected_gradients], strict=True)
        found[f"{kind}, {'declared' if proportional else 'other'} weight"] = max(
            difference(a, b) for a, b in pairs
        )
    return found


def mixture_cases(problem: Problem, group: dist.ProcessGroup) -> dict[str, float]:
    """The mixture of two teachers and the floor of their geometric pool."""
    hiddens, heads = (
        [problem.teacher_hidden, problem.other_hidden],
        [problem.teacher_head, problem.other_head],
    )
    shards = [HeadShard.split_head(head, group) for head in heads]
    student = HeadShard.split_head(problem.head, group)
    shares = [0.3, 0.7]
    expected = ops.linear_mixture_kl(problem.hidden, problem.head, hiddens, heads, shares, chunk=5)
    got = ops.linear_mixture_kl(problem.hidden, student, hiddens, shards, shares, chunk=5)
    expected_gradients = problem.gradients(expected.sum())
    gradients = whole_gradients(problem, got.sum(), group)
    pairs = zip([got, *gradients], [expected, *expected_gradients], strict=True)
    floor = ops.geometric_floor(hiddens, shards, shares, chunk=5)
    return {
        "mixture": max(difference(a, b) for a, b in pairs),
        "geometric floor": difference(floor, ops.geometric_floor(hiddens, heads, shares, chunk=5)),
    }


def logprob_cases(problem: Problem, group: dist.ProcessGroup) -> dict[str, float]:
    """Log-probabilities, entropy and top-k."""
    shard = HeadShard.split_head(problem.head, group)
    found = {}
    for name in ("linear_logprobs", "linear_logprobs_entropy"):
        expected = getattr(ops, name)(problem.hidden, problem.head, problem.ids, temperature=0.8, chunk=5)
        got = getattr(ops, name)(problem.hidden, shard, problem.ids, temperature=0.8, chunk=5)
        expected, got = ((x,) if isinstance(x, Tensor) else x for x in (expected, got))
        upstream = [torch.randn(x.shape, generator=problem.generator).to(x.dtype) for x in expected]
        losses = [sum((x * u).sum() for x, u in zip(r, upstream, strict=True)) for r in (expected, got)]
        pairs = [
            *zip(got, expected, strict=True),
            *zip(whole_gradients(problem, losses[1], group), problem.gradients(losses[0]), strict=True),
        ]
        found[name] = max(difference(a, b) for a, b in pairs)
    for k in (1, 30, problem.head.vocabulary):
        expected = ops.linear_topk(problem.hidden.detach(), problem.head, k, chunk=5)
        got = ops.linear_topk(problem.hidden.detach(), shard, k, chunk=5)
        same_ids = float(not torch.equal(got[0], expected[0]))
        found[f"top {k}"] = max(
            same_ids, *(difference(a, b) for a, b in zip(got[1:], expected[1:], strict=True))
        )
    return found


def refusals(problem: Problem, group: dist.ProcessGroup) -> dict[str, str]:
    """What is refused, and with which sentence: on every rank, so that none waits for another."""
    size = dist.get_world_size(group)
    found = {}

    def attempt(name: str, call) -> None:
        try:
            call()
            found[name] = "nothing was raised"
        except (ValueError, FloatingPointError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    def kl(hidden: Tensor, student: HeadShard, teacher: HeadShard) -> None:
        ops.linear_kl(hidden, student, problem.teacher_hidden, teacher)

    student, teacher = (HeadShard.split_head(head, group) for head in (problem.head, problem.teacher_head))
    uneven = list(teacher.sizes)
    uneven[0], uneven[1] = uneven[0] - 1, uneven[1] + 1
    bounds = [sum(uneven[:i]) for i in range(size + 1)]
    rank = dist.get_rank(group)
    part = Head(problem.teacher_head.weight[bounds[rank] : bounds[rank + 1]])
    other_cut = HeadShard(part, tuple(uneven), group)
    attempt("other cut", lambda: kl(problem.hidden, student, other_cut))
    smaller = HeadShard.split_head(Head(problem.teacher_head.weight[:-1]), group)
    attempt("other vocabulary", lambda: kl(problem.hidden, student, smaller))
    spoiled = problem.hidden.detach().clone()
    spoiled[7] = torch.nan
    attempt("nan hidden", lambda: kl(spoiled, student, teacher))
    broken = problem.head.weight.detach().clone()
    broken[-1] = torch.nan  # held by the last rank alone
    attempt("nan head", lambda: kl(problem.hidden, HeadShard.split_head(Head(broken), group), teacher))
    attempt("too many parts", lambda: HeadShard.split_head(Head(torch.ones(1, 3)), group))
    return found


def same_on_every_rank(problem: Problem, group: dist.ProcessGroup) -> bool:
    """Values and the hidden states' gradient have the same bits on every rank and twice in a row."""
    shards = [HeadShard.split_head(head, group) for head in (problem.head, problem.teacher_head)]
    results = []
    for _ in range(2):
        values = ops.linear_kl(problem.hidden, shards[0], problem.teacher_hidden, shards[1])
        (gradient,) = torch.autograd.grad(values.sum(), problem.hidden)
        results.append(torch.cat([values.detach().flatten(), gradient.flatten()]))
    everyone = [torch.empty_like(results[0]) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, results[0], group=group)
    return all(torch.equal(results[0], other) for other in [results[1], *everyone])


def cases_of(dtype: torch.dtype, form: str, group: dist.ProcessGroup) -> dict[str, float]:
    """Every operation on parts of a head of this form."""
    cases = {}
    for run in (kl_cases, mixture_cases, logprob_cases):
        cases.update(run(Problem(dtype, FORMS[form]), group))
    return cases


def main() -> None:
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    pairs = [dist.new_group([start, start + 1]) for start in range(0, world, 2)]
    results: dict = {"differences": {}, "refusals": {}, "same": {}}
    for group in (pairs[rank // 2], dist.group.WORLD):
        size = dist.get_world_size(group)
        for form, dtype in (*product(FORMS, (torch.float64, torch.float32)), ("plain", torch.bfloat16)):
            for case, value in cases_of(dtype, form, group).items():
                name = f"{size} ranks, {str(dtype).removeprefix('torch.')}, {form}, {case}"
                results["differences"][name] = value
        problem = Problem(torch.float32, {})
        results["refusals"][str(size)] = refusals(problem, group)
        results["same"][str(size)] = same_on_every_rank(problem, group)
    dist.destroy_process_group()
    print(json.dumps(results))


if __name__ == "__main__":
    main()

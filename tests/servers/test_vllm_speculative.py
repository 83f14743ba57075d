"""A vLLM server with a draft that proposes tokens: what it writes is drawn as without it."""

import json
import re
import urllib.request

import numpy as np
import pytest
import torch
from served_models import PADDED
from served_writing import prompts, rescored, update
from sglang_server import install, running
from test_vllm_engine import ALL_ROWS, QUICK, TOLD
from vllm_server import CPU_SERVER, VLLMServer, write_vllm_models

from opd.kernels.ops import linear_logprobs
from opd.models.causal_lm import CausalLM
from opd.rollout.collect import collect
from opd.rollout.vllm_engine import VLLMEngine
from opd.rollout.vllm_workers import FolderPush, Outputs
from opd.rollout.weight_sync import WeightFolder
from opd.served.http_pool import PoolOptions
from opd.types import SamplingParams

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]
TOKENS = 8


def every_logprob(model, sample, temperature):
    """[TOKENS, V] of each position's whole distribution."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    with torch.no_grad():
        rows = model.hidden(ids, torch.arange(len(ids)), [0, len(ids)])[-1 - TOKENS : -1]
        every = torch.arange(model.vocab_size).expand(len(rows), -1)
        return linear_logprobs(rows, model.head(), every, temperature=temperature).double().numpy()


def places(model, samples, temperature):
    """Where each token lies in its distribution, tokens in order: uniform in [0, 1) if it was drawn of it."""
    rng, found = np.random.default_rng(0), []
    for sample in samples:
        chances = np.exp(every_logprob(model, sample, temperature))
        at = np.arange(TOKENS), sample.response_ids
        found.append(chances.cumsum(1)[at] - rng.random(TOKENS) * chances[at])
    return np.concatenate(found)


def apart(found):
    """Kolmogorov's distance of `found` from a uniform distribution, times the root of its length: 1.95 is met
    by chance once in a thousand times.
    """
    ordered, count = np.sort(found), len(found)
    steps = np.arange(count + 1) / count
    return float(np.sqrt(count) * max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))


def accepted(url):
    """Tokens of its draft that the server has kept so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        said = answer.read().decode()
    return sum(
        float(n) for n in re.findall(r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)", said, re.M)
    )


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_what_is_drawn_does_not_depend_on_the_draft(tmp_path, method):
    reason = install(CPU_SERVER)
    if reason is not None:
        pytest.skip(f"no vLLM server: {reason}")
    folders = write_vllm_models(tmp_path, vocab_size=PADDED)
    model, other = (CausalLM.from_pretrained(path) for path in folders.values())
    own = (
        {"model": str(folders["b"])}
        if method == "draft_model"
        else {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    )
    draft = {"speculative-config": json.dumps({"method": method, "num_speculative_tokens": 3} | own)}
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    with running(
        VLLMServer(folders["b"], tmp_path / "log", environment, **{"max-num-seqs": 12}, **TOLD, **draft)
    ) as server:
        push = FolderPush(WeightFolder(tmp_path / "weights", folders["a"]))
        options = PoolOptions([server.url], patience=QUICK)
        engine = VLLMEngine(options, ALL_ROWS, push, version=-1, outputs=Outputs(folders["a"], "float32"))
        try:
            update(engine, model, 0)
            sampling = SamplingParams(temperature=0.7, max_new_tokens=TOKENS)
            groups = collect(engine, prompts(), 100, sampling, seed=1)
        finally:
            engine.close()
        assert accepted(server.url) > 0
    samples = [sample for group in groups for sample in group.samples]
    for sample, due in zip(samples, rescored(model, samples, 0.7), strict=True):
        np.testing.assert_allclose(sample.rollout_logprobs, due, atol=1e-4)
        assert (sample.policy_versions == 0).all()
    assert apart(places(model, samples, 0.7)) < 1.95
    assert apart(places(other, samples, 0.7)) > 4, "this many would show another distribution"

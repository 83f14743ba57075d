"""A merge whose teachers' servers fail again and again learns from the same numbers as one without any."""

import json
from contextlib import ExitStack

import pytest
import served_models as models
import tiny
from attempts import run_only
from fault_proxy import fault_proxy
from recipes import tiny_recipe
from safetensors.torch import load_file


def merge(out, served_models, servers=None):
    """The metrics of a merge of four steps, and the student's weights at its end."""
    entry = {"path": str(served_models["a"])}
    if servers:
        patience = {"attempts": 40, "timeout": 120.0}  # one request may meet all faults that there are
        entry |= {"type": "sglang", "urls": [server.endpoint for server in servers], **patience}
    recipe = tiny_recipe(
        model={"path": str(served_models["b"])},
        base=None,
        teachers={"sort": entry, "add3": entry},
        rollout={"max_new_tokens": 8, "max_sequence": 32},
        distill={"steps": 4, "prompts_per_domain": 6, "teachers": "local", "to_batch": models.STOPS_AT},
        baselines={"methods": []},
    )
    run_only(recipe, out, "merge")
    lines = (out / "stages/merge/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], load_file(out / "merged/model.safetensors")


@pytest.mark.slow
def test_every_sample_is_scored_once_and_rightly_whatever_the_servers_do(
    sglang, served_models, tmp_path, monkeypatch
):
    """Errors, broken and cut answers at every step; one of three replicas is away for two steps. Three
    proxies of one server stand for three servers, which `check_distinct` would rightly refuse.
    """
    monkeypatch.setattr("opd.teachers.served_teacher.check_distinct", lambda *_: None)
    models.stop_at(0)
    right, student = merge(tmp_path / "right", served_models)
    with ExitStack() as stack:
        servers = [stack.enter_context(fault_proxy(("127.0.0.1", sglang.port))) for _ in range(3)]

        def trouble():
            for server in servers:
                server.inject("status", times=2, status=500, method="POST", path="/generate")
                server.inject("reset", after=40, method="POST", path="/generate")
                server.inject("short", after=60, method="POST", path="/generate")

        def away():
            trouble()
            servers[1].stop()

        def back():
            trouble()
            servers[1].start()

        trouble()
        models.stop_at(0, {1: away, 2: trouble, 3: back})
        found, other = merge(tmp_path / "faults", served_models, servers)
        models.stop_at(0)
        met = sum(fault.times == 0 for server in servers for fault in server.faults)
        assert met >= 12
    assert len(found) == len(right) == 4
    before = 0
    for ours, due in zip(found, right, strict=True):
        assert ours["teacher_tokens"] == ours["tokens/student"] - before
        before = ours["tokens/student"]
        assert before == due["tokens/student"]
        assert ours["kl/mean"] == pytest.approx(due["kl/mean"], abs=1e-4)
        assert ours["grad_norm"] == pytest.approx(due["grad_norm"], rel=1e-3)
    tiny.assert_learnt_alike(other, student, load_file(served_models["b"] / "model.safetensors"))

"""How many tokens an SGLang worker has to take."""

import asyncio
import logging

import pytest

from opd.errors import RolloutError
from opd.rollout.served_engine import ServedModel
from opd.rollout.sglang_workers import SGLangVerbs
from opd.served.http_client import Server


class Pool:
    def __init__(self, told) -> None:
        self.told = told

    async def ask(self, server, method, path, body=None):
        assert (method, path) == ("GET", "/server_info")
        return self.told


def check(longest, times=1, **told):
    verbs = SGLangVerbs(ServedModel(10, longest))
    verbs.use(Pool(told))
    for _ in range(times):
        asyncio.run(verbs.check_settings(Server("http://worker")))


def test_a_worker_that_takes_too_few_tokens_is_refused():
    with pytest.raises(RolloutError, match="takes 16 tokens a request, and responses may need 32"):
        check(32, context_length=16, max_total_num_tokens=8192)
    with pytest.raises(RolloutError, match="takes 31 tokens a request"):
        check(32, context_length=None, max_total_num_tokens=31)
    with pytest.raises(RolloutError, match="/server_info answered"):
        check(32, context_length="many")


def test_a_worker_without_room_for_the_end_is_a_warning(caplog):
    caplog.set_level(logging.WARNING)
    check(32, times=2, context_length=37)
    [warning] = caplog.messages
    assert "context-length of 38 or more" in warning


def test_a_worker_with_room_or_that_says_nothing_will_do(caplog):
    caplog.set_level(logging.WARNING)
    check(32, context_length=38, max_total_num_tokens=8192)
    check(32)
    assert not caplog.messages

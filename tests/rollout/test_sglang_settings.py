"""How many tokens an SGLang worker has to take."""

import asyncio

import pytest

from opd.errors import RolloutError
from opd.rollout.served_engine import ServedModel
from opd.rollout.sglang_engine import SGLangVerbs
from opd.served.http_client import Server


class Pool:
    def __init__(self, told) -> None:
        self.told = told

    async def request_json(self, server, method, path, body=None):
        assert (method, path) == ("GET", "/server_info")
        return self.told


def check(longest, **told):
    verbs = SGLangVerbs(ServedModel(10, longest))
    verbs.use_pool(Pool(told))
    asyncio.run(verbs.check_settings(Server("http://worker")))


def test_a_worker_that_takes_too_few_tokens_is_refused():
    with pytest.raises(RolloutError, match="takes 16 tokens a request, and responses may need 32"):
        check(32, context_length=16, max_total_num_tokens=8192)
    with pytest.raises(RolloutError, match="takes 31 tokens a request"):
        check(32, context_length=None, max_total_num_tokens=31)
    with pytest.raises(RolloutError, match="/server_info answered"):
        check(32, context_length="many")


def test_a_worker_keeps_some_tokens_for_itself():
    with pytest.raises(RolloutError, match=r"32 beside 6 that it keeps.* context-length of 38 or more"):
        check(32, context_length=37)


def test_a_worker_with_room_or_that_says_nothing_will_do():
    check(32, context_length=38, max_total_num_tokens=8192)
    check(32)

"""One cache, several processes: shared leases, forks, a stress with a tight quota, and `kill -9` anywhere."""

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from cached_rows import BLOCK, disk_bytes, holds, key_of, keys, put, unfinished
from child_python import child_python
from full import FULL

from opd.storage.node_cache import NodeCache

_KILLS = int(os.environ.get("OPD_CACHE_KILLS", "30" if FULL else "10"))
_python = partial(child_python, "cached_rows")


_HOLDS_A_LEASE = """
cache = NodeCache(folder, quota_bytes=2 * BLOCK)
lease = cache.get(key_of(1))
print("held", flush=True)
sys.stdin.readline()
assert np.array_equal(lease.rows, rows_of(1))
lease.release()
print("released", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("ending", ["release", "kill"])
def test_another_processs_lease_protects_until_it_ends(tmp_path: Path, ending: str) -> None:
    cache = NodeCache(tmp_path, quota_bytes=2 * BLOCK)
    assert put(cache, 1)
    with _python(_HOLDS_A_LEASE, tmp_path) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert put(cache, 2)
        assert put(cache, 3)  # 1 is older, but it is 2 that goes
        assert [holds(cache, n) for n in (2, 3)] == [False, True]
        lease = cache.get(key_of(3))
        assert not put(cache, 4)
        if ending == "release":
            other.stdin.write("\n")
            other.stdin.flush()
            assert other.stdout.readline() == "released\n"
        else:
            other.kill()
            other.wait()
        assert put(cache, 4)
        assert [holds(cache, n) for n in (1, 3, 4)] == [False, True, True]
        assert lease is not None


def test_a_forked_child_leases_for_itself(tmp_path: Path) -> None:
    script = """
cache = NodeCache(folder, quota_bytes=2 * BLOCK)
assert put(cache, 1) and put(cache, 2)
inherited, kept = cache.get(key_of(1)), cache.get(key_of(1))
told, tell = os.pipe()
child = os.fork()
if child == 0:
    os.close(tell)
    inherited.release()          # the parent's: stays held
    own = cache.get(key_of(2))
    print("held", flush=True)
    os.read(told, 1)
    os._exit(0 if np.array_equal(own.rows, rows_of(2)) else 1)
inherited.release()
print(sys.stdin.readline().strip(), flush=True)
assert not put(cache, 3)         # 1 is held here, 2 by the child
print("refused", flush=True)
os.close(tell)
_, status = os.waitpid(child, 0)
assert status == 0
assert put(cache, 3)
assert [holds(cache, n) for n in (1, 2, 3)] == [True, False, True]
print("ok", flush=True)
"""
    with _python(script, tmp_path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        assert [process.stdout.readline() for _ in range(3)] == ["go\n", "refused\n", "ok\n"]
        assert process.wait() == 0


_STRESS = """
quota, seed, seconds = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
cache = NodeCache(folder, quota_bytes=quota)
chooser = np.random.default_rng(seed)
leases, end = [], time.monotonic() + seconds
counters = cache.counters
while time.monotonic() < end or not (counters.hits and counters.evictions):
    counters = cache.counters
    number = int(chooser.integers(0, 14))
    if chooser.random() < 0.5:
        put(cache, number, rows=5 + 40 * (number % 3))
    elif holds(cache, number, rows=5 + 40 * (number % 3)) and chooser.random() < 0.3:
        lease = cache.get(key_of(number))
        if lease is not None:
            leases.append((number, lease))
    if len(leases) > 2:
        number, lease = leases.pop(0)
        assert np.array_equal(lease.rows, rows_of(number, 5 + 40 * (number % 3)))
        assert cache._files.has_blob(key_of(number)), "evicted under a lease"
        lease.release()
counters = cache.counters
assert counters.corrupt == 0
print(counters.hits, counters.evictions, flush=True)
"""


@pytest.mark.slow
def test_processes_share_a_tight_quota_without_a_wrong_row(tmp_path: Path) -> None:
    quota = 14 * BLOCK
    NodeCache(tmp_path, quota_bytes=quota).close()
    running = [_python(_STRESS, tmp_path, str(quota), str(seed), "2.0") for seed in range(4)]
    processes = [context.__enter__() for context in running]
    try:
        while any(process.poll() is None for process in processes):
            assert disk_bytes(tmp_path) <= quota
            time.sleep(0.01)
        results = [process.communicate()[0].split() for process in processes]
    finally:
        for context in running:
            context.__exit__(None, None, None)
    assert all(process.returncode == 0 for process in processes)
    assert all(int(hits) > 0 and int(evictions) > 0 for hits, evictions in results)
    assert unfinished(tmp_path) == []
    cache = NodeCache(tmp_path, quota_bytes=quota)
    assert cache.used_bytes() == disk_bytes(tmp_path) <= quota


# One process; for every line on stdin (seconds, groups, first number) it forks a user of the cache, kills it
# that long after so many groups were acknowledged, and prints the numbers whose put had been acknowledged.
_KILLS_USERS = """
import signal

def use_for_ever(first, acknowledge):
    cache = NodeCache(folder, quota_bytes=int(sys.argv[2]))
    os.write(acknowledge, b"ready\\n")
    leases = []
    while True:
        group = range(first, first + 3)
        items = [(key_of(n), rows_of(n), CacheRecord(f"s{n}", "t", n)) for n in group]
        kept = cache.put_many(items)
        os.write(acknowledge, b"".join(b"%d\\n" % n for n, k in zip(group, kept) if k))
        leases = [cache.get(key_of(first)), *leases[:1]]
        first += 3

for line in sys.stdin:
    seconds, groups, first = line.split()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            use_for_ever(int(first), writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as acknowledged:
        assert acknowledged.readline() == "ready\\n"
        numbers = [int(acknowledged.readline()) for _ in range(3 * int(groups))]
        time.sleep(float(seconds))
        os.kill(child, signal.SIGKILL)
        numbers += [int(number) for number in acknowledged]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    print(*numbers, flush=True)
"""


@pytest.mark.some(1)
@pytest.mark.parametrize("quota", [1 << 30, 8 * BLOCK], ids=["putting", "evicting"])
def test_kill_9_loses_nothing_acknowledged_and_leaves_nothing(tmp_path: Path, quota: int) -> None:
    """Kills (`OPD_CACHE_KILLS`) at random times in writing, renaming, evicting and leasing."""
    chooser = random.Random(0)
    acknowledged: list[int] = []
    first = 0
    with _python(_KILLS_USERS, tmp_path, str(quota)) as killer:
        assert killer.stdin is not None
        assert killer.stdout is not None
        for _ in range(_KILLS):
            print(chooser.uniform(0.0, 0.02), chooser.randrange(3), first, file=killer.stdin, flush=True)
            numbers = [int(number) for number in killer.stdout.readline().split()]
            acknowledged += numbers
            first += len(numbers) + 3
            _check_after_a_kill(tmp_path, quota, numbers)
        killer.stdin.close()
        assert killer.wait() == 0
    assert len(acknowledged) > 2 * _KILLS
    if quota == 1 << 30:
        with NodeCache(tmp_path, quota_bytes=quota) as cache:
            assert all(holds(cache, number) for number in acknowledged)


def _check_after_a_kill(folder: Path, quota: int, acknowledged: list[int]) -> None:
    with NodeCache(folder, quota_bytes=quota) as cache:
        assert unfinished(folder) == []
        assert cache.used_bytes() == disk_bytes(folder) <= quota
        # At most three unacknowledged blobs and two leases can have pushed out others than these.
        assert all(holds(cache, number) for number in acknowledged[-3:])
        for name in keys(folder):
            lease = cache.get(bytes.fromhex(name))
            assert lease is not None
            number = int(lease.record.version)
            assert key_of(number).hex() == name
            assert holds(cache, number)
        assert cache.counters.corrupt == 0


def test_a_stopped_holder_of_the_lock_is_waited_for(tmp_path: Path) -> None:
    script = """
with NodeCache(folder, quota_bytes=1 << 20)._files.open_index():
    print("locked", flush=True)
    time.sleep(60)
"""
    cache = NodeCache(tmp_path, quota_bytes=1 << 20)
    assert put(cache, 1)
    with _python(script, tmp_path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        assert holds(cache, 1)  # a hit needs no lock
        os.kill(holder.pid, signal.SIGKILL)
        assert put(cache, 2)

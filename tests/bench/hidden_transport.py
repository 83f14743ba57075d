"""What it costs to fetch hidden states from an SGLang server: as JSON numbers, and as bytes by the plug-in.

    PYTHONPATH=.:tests:tests/servers:tests/pipelines python tests/bench/hidden_transport.py [--json FILE]

Real servers of one model with bfloat16 weights, asked in turn: without the plug-in, with it, and with it over
HTTP as from another machine. The model is as wide as a small one and hardly computes, so that what is seen is
the way of its hidden states; `nothing` is the same prefill without them. A quarter of each sample is its
prompt. Counted are bytes that reach the client, its seconds and the processor's on both sides, and the most
memory that the server's processes had meanwhile.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from real_servers import SGLangServer
from served_models import recipe_tokenizer, write_model

from opd.config.teachers import SGLangTeacherConfig
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.served import hidden_segments
from opd.teachers.kinds import Placement
from opd.teachers.served_teacher import SignalNeeds
from opd.teachers.sglang_teacher import SGLangTeacher
from opd.types import Sample

LENGTHS = (512, 4096, 16384)
WIDTH = 1024
MODEL = {
    "model_type": "qwen3",
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 20000,
    "tie_word_embeddings": False,
    "vocab_size": 64,
}
WAYS = ("JSON", "bytes", "bytes over HTTP", "nothing")
SGLangServer.start_seconds = 1800


class Counted(SGLangTeacher):
    """Counts the bytes that reach this process, over HTTP and through shared memory."""

    received, way = 0, ""
    server: SGLangServer

    def rows(self, one: Sample) -> None:
        """Score `one`, or only let the server compute it."""
        if self.way == "nothing":
            body = {"input_ids": one.token_ids[:-1].tolist(), "sampling_params": {"max_new_tokens": 1}}
            self._loop.run(self.pool.request_json(self.pool.servers[0], "POST", "/generate", body))
        else:
            assert self.score([one]).rows.shape == (len(one.response_ids), WIDTH)

    def watch(self) -> None:
        fetch, content = self.pool.request_bytes, hidden_segments._read_content

        async def fetching(*asked):
            where, found = await fetch(*asked)
            self.received += len(found)
            return where, found

        def reading(*asked):
            found = content(*asked)
            self.received += len(found)
            return found

        self.pool.request_bytes, hidden_segments._read_content = fetching, reading


def sample(number: int, length: int) -> Sample:
    """Of `length` tokens, unlike any other."""
    ids = np.random.default_rng(number).integers(0, len(recipe_tokenizer()), length + 1).astype(np.int32)
    prompt = length // 4 + 1
    uid = f"s{number}"
    return Sample(uid, uid, "a", ids[:prompt], response_ids=ids[prompt:])


def of_processes(server: SGLangServer, field: str) -> int:
    """Sum of a field of /proc/PID/status over the server's processes, in kB."""
    found = 0
    for pid in server.processes():
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            found += int(line.split()[1]) if line.startswith(f"{field}:") else 0
    return found


def processor_seconds(server: SGLangServer) -> float:
    """Of the server's processes so far."""
    ticks = 0
    for pid in server.processes():
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(stat[11]) + int(stat[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def opened(published: Path, server: SGLangServer, way: str) -> Counted:
    """A teacher on `server` whose hidden states come by `way`."""
    settings = SGLangTeacherConfig(path=str(published), urls=[server.url], timeout=900)
    place = Placement(vocabulary=len(recipe_tokenizer()))
    teacher = Counted("a", str(published), settings, needs=SignalNeeds(), placement=place)
    teacher.way, teacher.server = way, server
    teacher.watch()
    shared = hidden_segments.SHARED
    hidden_segments.SHARED = "/nowhere" if way == "bytes over HTTP" else shared
    try:
        teacher.connect_server()
    finally:
        hidden_segments.SHARED = shared
    return teacher


def measured(teacher: Counted, one: Sample) -> dict[str, float]:
    """One sample, scored."""
    server = teacher.server
    for pid in server.processes():
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the most from now on
    before = of_processes(server, "VmRSS")
    teacher.received, spent = 0, processor_seconds(server) + time.process_time()
    begun = time.monotonic()
    teacher.rows(one)
    seconds = time.monotonic() - begun
    return {
        "seconds": seconds,
        "processor_seconds": processor_seconds(server) + time.process_time() - spent,
        "bytes": teacher.received,
        "more_memory_mb": (of_processes(server, "VmHWM") - before) / 1024,
        "memory_mb": before / 1024,
    }


def rounds(folder: Path, count: int) -> dict[str, dict[int, list[dict[str, float]]]]:
    """Every measurement, by way and length."""
    write_model(folder / "model", seed=0, **MODEL)
    publish_checkpoint(folder / "model", folder / "published")
    found = {way: {length: [] for length in LENGTHS} for way in WAYS}
    common = {
        "context-length": 17000,
        "max-total-tokens": 40000,
        "dtype": "bfloat16",
        "chunked-prefill-size": -1,
    }
    with ExitStack() as stack:
        servers = {}
        for plugins in ("none", "opd_hidden_states"):
            log = folder / f"{plugins}.log"
            servers[plugins] = server = SGLangServer(folder / "model", log, plugins, **common)
            stack.callback(server.end)
            server.launch()
            server.wait()
        teachers = {}
        for way in WAYS:
            server = servers["none" if way == "JSON" else "opd_hidden_states"]
            teachers[way] = teacher = opened(folder / "published", server, way)
            stack.callback(teacher.close)
            teacher.rows(sample(10_000, 300))
        for number in range(count):
            for length in LENGTHS:
                for which, way in enumerate(WAYS):
                    # None of them is in a prefix cache.
                    one = sample((number * 100_000 + length) * len(WAYS) + which, length)
                    found[way][length].append(measured(teachers[way], one))
                    print(number, length, way, found[way][length][-1], flush=True)
    return found


def table(found: dict[str, dict[int, list[dict[str, float]]]]) -> str:
    """Markdown, medians."""
    lines = ["| tokens | way | bytes a scored token | tokens/s | processor-ms a token | memory beyond idle |"]
    lines.append("|---" * 6 + "|")
    for length in LENGTHS:
        scored = length - length // 4
        for way in WAYS:
            mid = {k: statistics.median(one[k] for one in found[way][length]) for k in found[way][length][0]}
            lines.append(
                f"| {length:,} | {way} | {mid['bytes'] / scored:,.0f} | {scored / mid['seconds']:,.0f}"
                f" | {1000 * mid['processor_seconds'] / scored:.2f} | {mid['more_memory_mb']:,.0f} MB |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="opd-hidden-bench-") as folder:
        found = rounds(Path(folder), options.rounds)
    if options.json:
        options.json.write_text(json.dumps({"width": WIDTH, "ways": found}, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()

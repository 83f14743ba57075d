"""Does reading a teacher hide behind its compute? A real S3 server behind a link of limited speed.

    export PYTHONPATH=tests:tests/servers
    python tests/bench/streamed_teacher.py [--tokens 3000] [--prefetch-mib 16] [--rounds 2] [--json FILE]

Compute is one pass of the loaded model over the tokens; the link is set so that reading alone takes 0.5, 1
and 2 times as long. "streamed" does both, through the link; "streamed / max" divides it by the longer one of
reading and computing. Its lower bound is 1; the first unit can never be hidden. "beside" is the loaded
model's pass while another process reads the same units over the same link for nothing: what server, link,
reader and model take from one another where they share cores, without any overlap of ours. Best of rounds.
"""

import argparse
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tiny
import torch
from fault_proxy import FaultProxy, fault_proxy
from seaweedfs import BUCKET, aws_environment, seaweedfs

from opd.models.checkpoint import save_checkpoint
from opd.pipelines.stages.publishing import publish_checkpoint
from opd.storage.published import PublishedModel
from opd.teachers.kinds import Placement
from opd.teachers.layer_stream import LayerStream
from opd.teachers.local_teacher import LocalTeacher
from opd.teachers.streamed_teacher import StreamedTeacher
from opd.types import Sample

SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 24,
    "max_position_embeddings": 512,
}
MAX_TOKENS = 1024


def seconds(call: Callable[[], object], rounds: int) -> float:
    """The fastest of `rounds` calls."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def read_alone(url: str, prefetch_bytes: int) -> None:
    """Take every unit of the layers and do nothing with it."""
    with PublishedModel.open(url) as model:
        stream = LayerStream(prefetch_bytes=prefetch_bytes)
        units = [name for name in model.manifest.units if name != "head"]
        for _ in stream.iterate_pass(stream.request_pass(model, units)):
            pass
        stream.close()


def compute_beside_a_reader(url: str, prefetch_bytes: int, score: Callable[[], object], rounds: int) -> float:
    """Seconds for reading all units and scoring with a loaded model, one process for each: from their start
    to the last end.
    """
    context = multiprocessing.get_context("spawn")
    times = []
    for _ in range(rounds):
        ready, go = context.Event(), context.Event()
        reader = context.Process(target=_read_when_told, args=(url, prefetch_bytes, ready, go))
        reader.start()
        ready.wait()
        begin = time.perf_counter()
        go.set()
        score()
        reader.join()
        times.append(time.perf_counter() - begin)
        if reader.exitcode:
            raise SystemExit("the reader failed")
    return min(times)


def _read_when_told(url: str, prefetch_bytes: int, ready: Event, go: Event) -> None:
    PublishedModel.open(url).close()  # imports what reading needs
    ready.set()
    go.wait()
    read_alone(url, prefetch_bytes)


def stream_and_score(url: str, samples: list[Sample], prefetch_bytes: int) -> torch.Tensor:
    """A new teacher's first and only pass."""
    stream = LayerStream(prefetch_bytes=prefetch_bytes)
    teacher = StreamedTeacher("t", url, placement=Placement(max_tokens=MAX_TOKENS), stream=stream)
    rows = teacher.score(samples).rows
    teacher.close()
    return rows


def measure(options: argparse.Namespace, folder: Path, proxy: FaultProxy) -> list[dict[str, float]]:
    """One row for each speed of the link."""
    url, window = f"s3://{BUCKET}/teacher", options.prefetch_mib * 2**20
    samples = tiny.samples([(40, 60)] * (options.tokens // 100))
    loaded = LocalTeacher("t", folder / "checkpoint", max_tokens=MAX_TOKENS)
    expected = loaded.score(samples).rows
    compute = seconds(lambda: loaded.score(samples), options.rounds)
    with PublishedModel.open(url) as model:
        nbytes = model.manifest.nbytes - model.manifest.units["head"].nbytes
    rows = []
    for ratio in (0.5, 1.0, 2.0):
        proxy.bytes_per_second = nbytes / (ratio * compute)
        load = seconds(lambda: read_alone(url, window), options.rounds)
        streamed = seconds(lambda: stream_and_score(url, samples, window), options.rounds)
        if not torch.equal(stream_and_score(url, samples, window), expected):
            raise SystemExit("the streamed rows differ from the loaded model's")
        beside = compute_beside_a_reader(url, window, lambda: loaded.score(samples), options.rounds)
        both = {"read": load, "compute": compute, "beside": beside, "streamed": streamed}
        rows.append({"MiB": nbytes / 2**20, "MB/s": proxy.bytes_per_second / 1e6, **both})
        rows[-1]["streamed / max"] = streamed / max(load, compute)
        rows[-1]["streamed / beside"] = streamed / beside
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--prefetch-mib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with seaweedfs(folder / "weed") as server, fault_proxy((server.host, server.port)) as proxy:
            os.environ.update(aws_environment(proxy.endpoint))
            save_checkpoint(tiny.model(**SHAPE), tiny.tokenizer(), folder / "checkpoint", {})
            publish_checkpoint(folder / "checkpoint", f"s3://{BUCKET}/teacher", shards=1)
            rows = measure(options, folder, proxy)
    print(" ".join(f"{name:>17}" for name in rows[0]))
    for row in rows:
        print(" ".join(f"{value:17.2f}" for value in row.values()))
    if options.json:
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""How fast a rank reads its share of a published model from a real S3 server on this machine.

    export PYTHONPATH=tests/servers
    python tests/bench/weights.py [--mib 600] [--ranks 8] [--rounds 5] [--json FILE]

Side by side in every round, best round reported: plain sockets into a preallocated buffer (the bound), a
published model (all units at once, and unit by unit as a streamed teacher asks), s3fs `cat_ranges` over the
same bytes and over the rank's share of every tensor of the unsharded file, and, of the whole model, the same
and runai-model-streamer where it is installed. Server and client share the machine's cores.
"""

import argparse
import json
import os
import platform
import resource
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from safetensors.numpy import save_file
from seaweedfs import BUCKET, aws_environment, seaweedfs

from opd.storage.object_store import ObjectStore
from opd.storage.publish import ModelForm, publish
from opd.storage.published import PublishedModel
from opd.storage.weight_folder import read_headers

MIB = 2**20
CHUNK = 16 * MIB
THREADS = 4


def checkpoint(folder: Path, mib: int, layers: int = 16) -> None:
    """`mib` MiB of float16 in `layers` layers of seven matrices, an embedding and a head."""
    rng = np.random.default_rng(0)
    width = 512
    rows = mib * MIB // 2 // width // (layers * 7 + 4)

    def draw(count: int) -> np.ndarray:
        return rng.integers(0, 2**15, (count, width), dtype=np.uint16).view(np.float16)

    tensors = {
        "model.embed_tokens.weight": draw(2 * rows),
        "lm_head.weight": draw(2 * rows),
        "model.norm.weight": draw(1),
    }
    for layer in range(layers):
        tensors |= {f"model.layers.{layer}.w{i}": draw(rows) for i in range(7)}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": layers}))


def raw_reader(endpoint: str, key: str, nbytes: int, chunk: int) -> Callable[[], int]:
    """Plain sockets, `recv_into` a buffer, as many connections and as large ranges as ours."""
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    credentials = Credentials(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
    address = urlsplit(endpoint)
    buffer = memoryview(bytearray(nbytes))

    def fetch(start: int) -> None:
        stop = min(start + chunk, nbytes)
        request = AWSRequest("GET", f"{endpoint}/{BUCKET}/{key}", {"Range": f"bytes={start}-{stop - 1}"})
        S3SigV4Auth(credentials, "s3", "us-east-1").add_auth(request)
        lines = [f"GET /{BUCKET}/{key} HTTP/1.1", f"Host: {address.netloc}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in request.headers.items()]
        with socket.create_connection((str(address.hostname), int(address.port or 80))) as connection:
            connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(4096)
            if b" 206 " not in head.split(b"\r\n", 1)[0]:
                raise RuntimeError(head.split(b"\r\n", 1)[0].decode())
            rest = head.split(b"\r\n\r\n", 1)[1]
            buffer[start : start + len(rest)] = rest
            at = start + len(rest)
            while at < stop:
                at += connection.recv_into(buffer[at:stop])

    def read() -> int:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(fetch, range(0, nbytes, chunk)))
        return nbytes

    return read


def our_readers(model: PublishedModel, rank: int, world: int) -> dict[str, Callable[[], int]]:
    names = list(model.manifest.units)
    buffers = [memoryview(bytearray(model.part_bytes(name, world))) for name in names]

    def at_once() -> int:
        before = model.bytes_read
        model.read_parts(names, rank, world, buffers)
        return model.bytes_read - before

    def unit_by_unit() -> int:
        before = model.bytes_read
        for name, buffer in zip(names, buffers, strict=True):
            model.read_part(name, rank, world, buffer)
        return model.bytes_read - before

    return {"opd read_parts": at_once, "opd read_part, unit by unit": unit_by_unit}


def s3fs_reader(endpoint: str, path: str, ranges: list[tuple[int, int]]) -> Callable[[], int]:
    import s3fs

    store = s3fs.S3FileSystem(endpoint_url=endpoint, skip_instance_cache=True)
    starts, stops = ([one[i] for one in ranges] for i in range(2))

    def read() -> int:
        return sum(map(len, store.cat_ranges([path] * len(starts), starts, stops)))

    return read


def pieces(nbytes: int) -> list[tuple[int, int]]:
    """`nbytes` as ranges of `CHUNK`."""
    return [(start, min(start + CHUNK, nbytes)) for start in range(0, nbytes, CHUNK)]


def first_of_each(folder: Path, ranks: int) -> list[tuple[int, int]]:
    """The first rank's part of every tensor of a checkpoint in one file: what it reads of it unpublished."""
    sources = read_headers(folder).values()
    return [(source.start, source.start + source.nbytes // ranks) for source in sources]


def runai_reader(path: str) -> Callable[[], int] | None:
    """Reads a whole safetensors file: it has no notion of ranks."""
    try:
        from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found]
    except ImportError:
        return None
    os.environ["RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"] = "0"
    os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(THREADS)

    def read() -> int:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(path)
            return sum(tensor.numel() * tensor.element_size() for _, tensor in streamer.get_tensors())

    return read


def measure(readers: dict[str, Callable[[], int]], rounds: int) -> dict[str, dict[str, float]]:
    """Best rate (MB/s) and least client CPU (s/GiB) of each, the readers taking turns."""
    best: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for name, read in readers.items():
            used, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            nbytes = read()
            seconds, now = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
            cpu = (now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime) * 2**30 / nbytes
            row = best.setdefault(name, {"bytes": nbytes, "mb_per_s": 0.0, "cpu_s_per_gib": cpu})
            row["mb_per_s"] = max(row["mb_per_s"], nbytes / seconds / 1e6)
            row["cpu_s_per_gib"] = min(row["cpu_s_per_gib"], cpu)
    return best


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    checkpoint(folder / "model", options.mib)
    with seaweedfs(folder / "weed") as server:
        os.environ.update(aws_environment(server.endpoint))
        with ObjectStore.open(f"s3://{BUCKET}/bench") as store:
            begin = time.perf_counter()
            manifest = publish(folder / "model", store, shards=options.ranks, form=ModelForm()).manifest
            publishing = manifest.nbytes / (time.perf_counter() - begin) / 1e6
            weights = folder / "model" / "model.safetensors"
            with weights.open("rb") as file:
                store.put("model.safetensors", lambda: iter(lambda: file.read(MIB), b""))
            shard = manifest.shard_path(0)
            model = PublishedModel(store, manifest, manifest.version_name)
            size, step = manifest.sizes[0], store.request_bytes(manifest.sizes[0])
            readers = {"raw sockets": raw_reader(server.endpoint, f"bench/{shard}", size, step)}
            readers |= our_readers(model, 0, options.ranks)
            path, single = f"{BUCKET}/bench/{shard}", f"{BUCKET}/bench/model.safetensors"
            readers["s3fs cat_ranges"] = s3fs_reader(server.endpoint, path, pieces(size))
            shares = first_of_each(folder / "model", options.ranks)
            readers["s3fs cat_ranges, unsharded file"] = s3fs_reader(server.endpoint, single, shares)
            size = weights.stat().st_size
            whole = {"raw sockets": raw_reader(server.endpoint, "bench/model.safetensors", size, CHUNK)}
            whole["opd read_parts"] = our_readers(model, 0, 1)["opd read_parts"]
            whole["s3fs cat_ranges"] = s3fs_reader(server.endpoint, single, pieces(size))
            runai = runai_reader(f"s3://{single}")
            if runai is not None:
                whole["runai-model-streamer"] = runai
            rows = measure(
                readers | {f"{name} (whole)": read for name, read in whole.items()}, options.rounds
            )
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "model_bytes": manifest.nbytes,
        "ranks": options.ranks,
        "publish_mb_per_s": publishing,
        "share_of_bytes": rows["opd read_parts"]["bytes"] * options.ranks / manifest.nbytes,
        "readers": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=600, help="size of the model")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(options, Path(folder))
    bound, whole_bound = (
        found["readers"][name]["mb_per_s"] for name in ("raw sockets", "raw sockets (whole)")
    )
    print(f"{found['model_bytes'] / MIB:.0f} MiB for {options.ranks} ranks; {found['machine']}")
    print(f"{'reader':32} {'MB/s':>7} {'of raw':>7} {'CPU s/GiB':>10}")
    for name, row in found["readers"].items():
        rate = row["mb_per_s"]
        of_bound = rate / (whole_bound if name.endswith("(whole)") else bound)
        print(f"{name:32} {rate:7.0f} {of_bound:7.2f} {row['cpu_s_per_gib']:10.2f}")
    print(f"bytes of a rank: {found['share_of_bytes']:.4f} / {options.ranks} of the model")
    print(f"publishing: {found['publish_mb_per_s']:.0f} MB/s")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

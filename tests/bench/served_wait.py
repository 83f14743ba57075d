"""Which share of a merge's step waits for a teacher on a server: hidden states as JSON, and as bytes.

    PYTHONPATH=.:tests:tests/servers:tests/pipelines python tests/bench/served_wait.py [--json FILE]

Two real SGLang servers of one model, one with the plug-in for hidden states and one without, teach the same
student in the same merge, in turn, with responses of one length: no token ends one. The models are as wide as
small ones and have few layers, and all of it shares one machine's processors, where a server that serialises
takes the student's too. The first step, in which servers are proved and kernels are chosen, is left out.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from real_servers import SGLangServer
from recipes import tiny_recipe
from served_models import write_model

from opd.metrics import read_metrics
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import run_stage
from opd.pipelines.stages.publishing import publish_checkpoint

STEPS = 5
PROMPTS = 4
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "vocab_size": 64,
}
WAYS = {"JSON": "none", "bytes": "opd_hidden_states"}
"""How hidden states come -> the server's plug-ins."""
SGLangServer.start_seconds = 1800


def merge(out: Path, student: Path, published: Path, url: str, length: int) -> dict[str, float]:
    """Medians over the steps after the first: seconds of a step, and the share of it that waits."""
    recipe = tiny_recipe(
        model={"path": str(student)},
        base=None,
        domains={"sort": {"source": "procedural:sort", "params": {"digits": 3}, "prompts": 100}},
        teachers={"sort": {"type": "sglang", "path": str(published), "urls": [url], "timeout": 900}},
        rollout={
            "max_new_tokens": length - 8,
            "max_sequence": length + 8,
            "model_stop_ids": False,
            "stop": ["=1029384756==01928="],  # which nobody writes
        },
        distill={"steps": STEPS, "prompts_per_domain": PROMPTS, "checkpoint_every": STEPS},
        baselines={"methods": []},
        evaluation={"prompts_per_domain": 4, "every": 0},
        runtime={"threads": 1},
    )
    with RunFolder.create(out, recipe) as folder:
        run_stage(recipe, folder, "merge")
    rows = list(read_metrics(out / "stages" / "merge" / "metrics.jsonl"))[1:]
    found = {key: [row[key] for row in rows] for key in ("teacher/sort/wait_share", "length/mean")}
    seconds = [sum(value for key, value in row.items() if key.startswith("time/")) for row in rows]
    return {
        "wait_share": statistics.median(found["teacher/sort/wait_share"]),
        "seconds": statistics.median(seconds),
        "length": statistics.median(found["length/mean"]),
    }


def measured(folder: Path, lengths: Sequence[int]) -> dict[int, dict[str, dict[str, float]]]:
    """By length and way."""
    student, teacher, published = (folder / name for name in ("student", "teacher", "published"))
    write_model(student, seed=0, **MODEL)
    write_model(teacher, seed=1, **MODEL)
    publish_checkpoint(teacher, published)
    found: dict[int, dict[str, dict[str, float]]] = {}
    with ExitStack() as stack:
        servers = {}
        for way, plugins in WAYS.items():
            log = folder / f"{way}.log"
            common = {"context-length": 8192, "max-total-tokens": 40000, "dtype": "bfloat16"}
            server = SGLangServer(teacher, log, plugins, **common, **{"chunked-prefill-size": -1})
            servers[way] = server
            stack.callback(server.end)
            server.launch()
            server.wait()
        for length in lengths:
            found[length] = {}
            for way, server in servers.items():
                out = folder / f"{length}-{way}"
                found[length][way] = merge(out, student, published, server.url, length)
                print(length, way, found[length][way], flush=True)
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="tokens of a sample")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="opd-wait-bench-") as folder:
        found = measured(Path(folder), options.lengths)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print("| tokens | hidden states as | seconds a step | share of it that waits |\n|---|---|---|---|")
    for length, ways in found.items():
        for way, own in ways.items():
            print(f"| {length:,} | {way} | {own['seconds']:.1f} | {100 * own['wait_share']:.0f} % |")


if __name__ == "__main__":
    main()

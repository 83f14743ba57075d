"""512 episodes at once whose environments take from 0.01 to 5 s for an answer, on the embedded engine.

    .venv/bin/python tests/bench/episodes.py [--open 512] [--running 256] [--episodes 1536] [--size 25M]
        [--json FILE]

Four arms write the same number of tokens with the same model: `slow` environments, environments that answer
at `once`, the turns' tokens as `single` answers, as many together, without environments, and `fewer` such
answers, as many together as were written on average while others waited for slow environments: what the
decoder gives at that size is what is left of environments that cost nothing but their time. The engine writes
`--running` of them together (`rollout.max_running` of a recipe; all that are open if it is not said): with
fewer slots than open episodes, a slot is taken by another while an environment is at work. Every episode has
the same number of turns of the same length, so that none is longer for being interrupted. However fast the
decoder, an episode waits for its environment at least as long as that takes, so no system has more tokens a
second than `delays_allow` (Little's law): the smaller model is bound by that, the larger one by its decoder.
Prints tokens a second of the whole arm, of its middle (from a quarter of the tokens to three quarters, so
that neither the first reset nor the last answer counts), and the memory of the process at both ends of that
middle. Alone on the machine, or it measures others, too.
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opd.config.environments import EnvironmentConfig
from opd.environments.episodes import Episodes
from opd.environments.protocol import Action, Step, Task
from opd.models.causal_lm import CausalLM
from opd.models.tokenizers import character_tokenizer
from opd.rollout.collect import EncodedPrompt, collect
from opd.rollout.streams import More
from opd.rollout.torch_engine import TorchEngine
from opd.types import Chunk, SampleGroup, SamplingParams

SHORTEST, LONGEST = 0.01, 5.0
TURNS, TURN_TOKENS = 6, 32
TOKENIZER = character_tokenizer("0123456789abcdefghij", [])
SIZES = {"3M": (256, 768, 4), "25M": (512, 1536, 8)}
"""Widths of the hidden states and of the MLP, layers."""


def model_of(size: str) -> CausalLM:
    """A Llama of about as many parameters, random."""
    hidden, wide, layers = SIZES[size]
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    return CausalLM.from_config(config, tokenizer=TOKENIZER, seed=0)


class Late:
    """Says a few letters, some seconds later. As many as it was told to, if there are any."""

    def __init__(self, longest: float = 0.0) -> None:
        self._longest = longest

    async def reset(self, task: Task) -> str:
        self._random = random.Random(task.uid)
        return await self._answer()

    async def step(self, action: Action) -> Step:
        return Step(await self._answer())

    async def _answer(self) -> str:
        if self._longest:
            await asyncio.sleep(self._random.uniform(SHORTEST, self._longest))
        return "abcdefgh"


class Watched:
    """Stands before an engine and notes when how many tokens were there, and the memory then."""

    def __init__(self, engine: TorchEngine, expected: int) -> None:
        self._engine, self._expected, self._written = engine, expected, 0
        self.steps = 0
        self.marks: dict[float, tuple[float, int]] = {}
        """Share of the tokens -> seconds since the beginning, bytes."""
        self._began = time.monotonic()

    def generate(self, requests: Any, more: More | None = None) -> Iterator[Chunk]:
        for chunk in self._engine.generate(requests, more):
            self._written += len(chunk.uids)
            self.steps += 1
            for share in (0.25, 0.75, 1.0):
                if self._written >= share * self._expected and share not in self.marks:
                    self.marks[share] = (time.monotonic() - self._began, resident())
            yield chunk


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prompts_of(number: int) -> list[EncodedPrompt]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 20, (number, 16)).astype(np.int32)
    return [EncodedPrompt(f"{i}", "a", ids[i], i, {"prompt": "x"}) for i in range(number)]


def written(groups: list[SampleGroup]) -> int:
    return sum(sample.trainable_tokens for group in groups for sample in group.samples)


def arm(name: str, model: CausalLM, args: argparse.Namespace, running: int) -> dict[str, float]:
    """Write all episodes in one way, at most `running` together."""
    tokens = args.episodes * TURNS * TURN_TOKENS
    engine = TorchEngine(model, max_running=running, max_sequence=512)
    watched = Watched(engine, tokens)
    used = time.process_time()
    if name in ("single", "fewer"):
        sampling = SamplingParams(max_new_tokens=TURNS * TURN_TOKENS)
        groups = collect(watched, prompts_of(args.episodes), 1, sampling, 0)
    else:
        longest = LONGEST if name == "slow" else 0.0
        config = EnvironmentConfig(
            type="episodes:Late",
            params={"longest": longest},
            max_turns=TURNS,
            turn_tokens=TURN_TOKENS,
            concurrent=args.open,
        )
        episodes = Episodes(config, "a", TOKENIZER, {}, None)
        groups = episodes(watched, prompts_of(args.episodes), 1, SamplingParams(max_new_tokens=480), 0)
    assert written(groups) == tokens, "every arm writes the same number"
    (first, before), (last, after), (whole, _) = (watched.marks[share] for share in (0.25, 0.75, 1.0))
    return {
        "tokens": tokens,
        "written_together": tokens / watched.steps,
        "tokens_per_second": tokens / whole,
        "middle_tokens_per_second": tokens / 2 / (last - first),
        "processor_seconds": time.process_time() - used,
        "prefilled_tokens": engine.prefilled_tokens,
        "kept_tokens": engine.kept_tokens,
        "memory_mb_at_a_quarter": before / 1e6,
        "memory_mb_at_three_quarters": after / 1e6,
    }


def delays_allow(running: int) -> float:
    """Tokens a second of `running` episodes whose turns are written in no time: by Little's law the most."""
    waits = (1 + TURNS) * (SHORTEST + LONGEST) / 2  # the reset, and an answer to every turn
    return running / waits * TURNS * TURN_TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description="Episodes under load.")
    parser.add_argument("--open", type=int, default=512, help="episodes at once")
    parser.add_argument("--running", type=int, help="requests that are written together (default: --open)")
    parser.add_argument("--episodes", type=int, default=1536)
    parser.add_argument("--size", choices=SIZES, default="25M", help="parameters of the model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = model_of(args.size)
    found: dict[str, Any] = {"open": args.open, "episodes": args.episodes, "threads": torch.get_num_threads()}
    slots = args.running or args.open
    found |= {"size": args.size, "running": slots, "delays_allow": delays_allow(args.open)}
    for name in ("single", "once", "slow", "fewer"):
        running = round(found["slow"]["written_together"]) if name == "fewer" else slots
        found[name] = arm(name, model, args, running)
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    for name in ("single", "once", "fewer"):
        for rate in ("tokens_per_second", "middle_tokens_per_second"):
            found[f"slow/{name} {rate}"] = found["slow"][rate] / found[name][rate]
    print(json.dumps(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The files that one step enters, in order: what somebody reads who follows a step through the code.

    python -m tests.structure.walk [merge] [grpo]

A tiny run in this process; of its second step every file of the project is noted when a function in it is
first called.
"""

import argparse
import json
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from opd.config import Recipe
from opd.pipelines.records.run_folder import RunFolder
from opd.pipelines.run import execute_stage
from opd.pipelines.stages.pipeline_plan import plan_stages
from opd.pipelines.stages.supervised import new_base

ROOT = Path(__file__).resolve().parents[2]
TOP = ("opd", "teachers", "storage", "kernels", "pipelines")
STAGES = {"merge": "merge", "grpo": "specialist-sort"}


@dataclass
class Walk:
    """What one step enters."""

    files: list[str] = field(default_factory=list)
    """Relative to the project, in the order in which they are entered first."""
    functions: set[str] = field(default_factory=set)
    """`file:qualified name` of each function entered; comprehensions and lambdas apart."""
    stacks: dict[str, list[str]] = field(default_factory=dict)
    """The deepest stack of the project's own functions, by the name of the last one."""
    _known: dict[str, str | None] = field(default_factory=dict)

    @property
    def changes(self) -> int:
        """How often the next new file is in another folder."""
        places = list(map(folder_of, self.files))
        return sum(a != b for a, b in pairwise(places))

    @property
    def folders(self) -> list[str]:
        """In the order in which they are entered first."""
        return list(dict.fromkeys(map(folder_of, self.files)))

    def begin(self) -> None:
        """Note what is entered from now on, in threads that begin later too."""
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def end(self) -> None:
        """Note no more."""
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _enter(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if name not in self._known:
            self._known[name] = _relative(name)
        file = self._known[name]
        if file is None:
            return
        if file not in self.files:
            self.files.append(file)
        code = frame.f_code
        if "<" not in code.co_name:
            self.functions.add(f"{file}:{code.co_qualname}")
        own = self._own_stack(frame)
        if len(own) > len(self.stacks.get(code.co_name, ())):
            self.stacks[code.co_name] = own

    def _own_stack(self, frame: FrameType | None) -> list[str]:
        """The project's own functions from the outermost to `frame`."""
        found = []
        while frame is not None:
            name = frame.f_code.co_filename
            if name not in self._known:
                self._known[name] = _relative(name)
            if self._known[name] is not None:
                found.append(f"{self._known[name]}:{frame.f_code.co_qualname}")
            frame = frame.f_back
        return found[::-1]

    @property
    def classes(self) -> set[str]:
        """`file:class` of each class of which a method is entered."""
        methods = (name for name in self.functions if "." in name.rpartition(":")[2])
        return {name.rsplit(".", 1)[0] for name in methods if "<locals>" not in name}

    @property
    def deepest(self) -> list[str]:
        """The deepest stack of all."""
        return max(self.stacks.values(), key=len)


def folder_of(file: str) -> str:
    """Where a file lies."""
    return str(Path(file).parent)


def _relative(name: str) -> str | None:
    with suppress(ValueError):
        path = Path(name).resolve().relative_to(ROOT)
        if path.parts[0] in TOP:
            return str(path)
    return None


def variety(sample: Any) -> float:
    """A reward in which the answers of an untrained model differ."""
    return sum(map(ord, sample.text)) / 100


def walk(kind: str, **changes: Any) -> Walk:
    """One step of `kind` (`merge`, `grpo`), with `changes` of the recipe."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        taught = ("sort", "add3") if kind == "merge" else ("add3",)
        recipe = recipe_of(Path(scratch), taught, **changes)
        for model in ("base", "teacher"):
            new_base(recipe_of(Path(scratch), seed=len(model)), Path(scratch) / model)
        walked = Walk()

        def step(done: int, total: int, headline: str) -> None:
            walked.end()
            if done == 1:
                walked.begin()

        with RunFolder.create(Path(scratch) / "run", recipe) as folder:
            execute_stage(recipe, folder, plan_stages(recipe)[STAGES[kind]], step)
    return walked


def recipe_of(root: Path, taught: tuple[str, ...] = (), **changes: Any) -> Recipe:
    """Two domains, of which those in `taught` have a teacher; two steps. Without teachers: the recipe that
    makes the models.
    """
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "max_position_embeddings": 32, "tie_word_embeddings": True}
    path = f"{__spec__.name if __spec__ else __name__}:variety"
    domain = {"params": {"digits": 3}, "prompts": 64, "reward": path}
    settings: dict[str, Any] = {
        "name": "walk",
        "model": {"config": config | shape} if not taught else {"path": str(root / "base")},
        "domains": {name: domain | {"source": f"procedural:{name}"} for name in ("sort", "add3")},
        "rollout": {"max_new_tokens": 5, "max_sequence": 16},
        "specialist": {"steps": 2, "prompts_per_step": 2, "group_size": 2},
        "distill": {"steps": 2, "prompts_per_domain": 2},
        "baselines": {"methods": []},
        "evaluation": {"prompts_per_domain": 4, "every": 0},
    }
    if taught:
        settings["teachers"] = {name: {"path": str(root / "teacher")} for name in taught}
    return Recipe.model_validate(settings | changes)


def main() -> None:
    """Print what the steps enter."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(STAGES)}; all by default")
    parser.add_argument("--json", action="store_true", help="for a program")
    options = parser.parse_args()
    found = {}
    for kind in options.kinds or STAGES:
        walked = walk(kind)
        found[kind] = {
            "files": walked.files,
            "changes": walked.changes,
            "functions": len(walked.functions),
            "classes": len(walked.classes),
            "deepest": walked.deepest,
        }
        if options.json:
            continue
        files, folders = len(walked.files), len(walked.folders)
        print(f"{kind}: {files} files in {folders} folders, {walked.changes} changes of folder")
        print(f"  {len(walked.functions)} functions, {len(walked.classes)} classes with methods that run")
        print(f"  deepest stack: {len(walked.deepest)} of the project's own frames")
        last = ""
        for file in walked.files:
            if folder_of(file) != last:
                last = folder_of(file)
                print(f"  {last}/")
            print(f"    {Path(file).name}")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Run by a test in its own process: kills a publisher at every system call that matters, and looks.

A child of this process publishes and kills itself with SIGKILL at its n-th write, flush or rename. Then the
store must hold either the old model, whole, or the new one, whole, or none; and publishing again must leave
the new one and not a file more than an undisturbed publisher.
"""

import json
import os
import signal
import sys
from pathlib import Path

from checkpoints import copy_of

from opd.errors import StorageError
from opd.storage.object_store import ObjectStore, StoreOptions
from opd.storage.publish import ModelForm, publish
from opd.storage.published import PublishedModel

OPTIONS = StoreOptions(threads=1)
EVENTS = ("fsync", "replace", "fdopen", "unlink")


def put(checkpoint: Path, target: Path) -> None:
    with ObjectStore.open(target, options=OPTIONS) as store:
        publish(checkpoint, store, shards=2, form=ModelForm(layers=2))


def put_until(checkpoint: Path, target: Path, event: int) -> bool:
    """Publish in a child that dies at its n-th event; True if it died."""
    child = os.fork()
    if child == 0:
        left = [event]
        for name in EVENTS:
            setattr(os, name, _counting(getattr(os, name), left))
        put(checkpoint, target)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise RuntimeError(f"the publisher failed with status {os.WEXITSTATUS(status)}")
    return os.WIFSIGNALED(status)


def _counting(call, left):
    def counted(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    return counted


def contents(target: Path) -> dict[str, bytes] | None:
    try:
        with PublishedModel.open(target) as model:
            return copy_of(model) | model.tokenizer_files()
    except StorageError as error:
        if "holds no published model" not in str(error):
            raise
        return None


def files(target: Path) -> set[str]:
    return {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}


def main(folder: Path) -> None:
    old, new = folder / "old", folder / "new"
    put(old, folder / "clean")
    first = contents(folder / "clean")
    put(new, folder / "clean")
    second, clean = contents(folder / "clean"), files(folder / "clean")
    seen = {"killed": 0, "none": 0, "old": 0, "new": 0}
    for before in (False, True):
        event, died = 0, True
        while died:
            event += 1
            target = folder / f"store-{before}-{event}"
            if before:
                put(old, target)
            died = put_until(new, target, event)
            found = contents(target)
            kind = "none" if found is None else {True: "old", False: "new"}[found == first]
            if found not in (None, first, second) or (before and found is None):
                raise RuntimeError(f"event {event}: {kind} of a wrong kind was found")
            seen[kind] += 1
            seen["killed"] += died
            put(new, target)
            if contents(target) != second or (before and files(target) != clean):
                raise RuntimeError(f"event {event}: publishing again left {sorted(files(target))}")
            if not before and not files(target) <= clean:
                raise RuntimeError(f"event {event}: {sorted(files(target) - clean)} leaked")
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Publish a model for ranks that stream it (`opd publish`), or push it to the Hub (`opd push`)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from opd.config.hub_names import HubName, hub_name
from opd.errors import CheckpointError, ConfigError, StorageError
from opd.models.hf_folder import (
    CARD,
    CHECKSUMS,
    LOADED,
    adapter_base,
    check_folder,
    quantisation_in,
    read_checksums,
    refuse_code,
    weight_files,
)
from opd.models.hf_weights import check_weights
from opd.models.hub import RETRY, UnreachableError, hub_error, is_transient, listing_of, short_reason
from opd.pipelines.check.checks import refuse_place
from opd.pipelines.stages.publishing import checked_form, left_out_sentences, whole_folder
from opd.progress import set_activity, suppress_heartbeats
from opd.redact import hide_secret
from opd.storage.files import file_digest
from opd.storage.object_store import ObjectStore
from opd.storage.publish import PublishResult, publish
from opd.storage.weight_folder import check_numbers
from opd.untrusted import safe_excerpt


def run_publish(checkpoint: Path, url: str, shards: int, dtype: str | None = None) -> int:
    """Publish the checkpoint, print the result, and return the exit status. `dtype`: of `whole_folder`."""
    refuse_place(url, [str(checkpoint)])
    with whole_folder(checkpoint, dtype, lambda text: print(f"opd: {text}", file=sys.stderr)) as folder:
        published, where = _publish_model(folder, url, shards)
    manifest = published.manifest
    merged = " merged with its base" if adapter_base(checkpoint) is not None else ""
    verb = "published" if published.written else "was published already"
    print(f"{checkpoint} {verb}{merged}: {where}")
    print(f"{manifest.nbytes} bytes, {len(manifest.units)} units, {shards} shards, digest {manifest.digest}")
    return 0


def _publish_model(checkpoint: Path, url: str, shards: int) -> tuple[PublishResult, str]:
    """Publish a full model with a progress bar. Returns the model and its place."""
    from rich.console import Console
    from rich.progress import Progress

    form, fault = checked_form(checkpoint)
    if fault is not None:
        others = "or have it as a teacher on servers or Megatron-Core"
        print(f"opd: warning: {str(fault).rstrip('.')}, {others}", file=sys.stderr)
    quantised = quantisation_in(checkpoint)
    if quantised is not None:
        print(f"opd: its weights stay in {quantised.title}; a teacher reads them as numbers", file=sys.stderr)
    for sentence in left_out_sentences(checkpoint, form):
        print(f"opd: {sentence}", file=sys.stderr)
    console = Console(stderr=True)
    bars = Progress(console=console, transient=True, disable=not console.is_terminal)
    quieter = suppress_heartbeats() if console.is_terminal else nullcontext()
    reached = [""]
    with ObjectStore.open(url) as store, bars, quieter, set_activity(lambda: reached[0]):
        tasks = {stage: bars.add_task(stage, total=None) for stage in ("checksums", "upload")}

        def report_progress(stage: str, done: int, total: int) -> None:
            bars.update(tasks[stage], completed=done, total=total)
            reached[0] = f"{stage} {done / max(total, 1):.0%}"

        published = publish(checkpoint, store, shards=shards, form=form, progress=report_progress)
        return published, store.object_address(published.manifest.version_name)


T = TypeVar("T")
_SECONDS = 60.0
"""Timeout of a request without any answer."""
_BASE = re.compile(r"^base_model: *(.*)\n", re.MULTILINE)


def run_push(model: Path, repo: str, *, revision: str | None = None, public: bool = False) -> int:
    """Push the folder `model` to `repo`, which is created if needed, and print the result.

    Raises `ConfigError` for an impossible name, the errors of the folder, and `StorageError`.
    """
    name = _repository_name(repo, revision)
    files = _pushed_files(model)
    from huggingface_hub import HfApi, get_session, get_token
    from huggingface_hub.utils import disable_progress_bars

    if get_token() is None:
        raise ConfigError("pushing needs a token that may write: set HF_TOKEN, or run `hf auth login`")
    hide_secret(get_token())
    get_session().timeout = _SECONDS
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi()
    with set_activity(f"pushing {model} to {name}"):
        call_hub(name, lambda: api.create_repo(name.repo, private=not public, exist_ok=True))
        if name.revision != "main":
            call_hub(name, lambda: api.create_branch(name.repo, branch=name.revision, exist_ok=True))
        commit = call_hub(name, lambda: _commit_files(api, model, files, name)).oid
    pushed = name.at_revision(commit)
    try:
        listing = listing_of(pushed)
    except UnreachableError as error:
        raise hub_error(pushed, error) from error
    for file in files:
        digest = listing.digests.get(file, "")
        if file not in listing.sizes or (len(digest) == 64 and digest != file_digest(model / file)):
            raise StorageError(f"{file} is not in {pushed} as it is in {model}; push it again.")
    print(f"{model} pushed: {api.endpoint}/{name.repo} (commit {commit})")
    print(f"{len(files)} files, {sum((model / file).stat().st_size for file in files)} bytes; in a recipe:")
    print(f"model: {{path: {name.repo}@{commit}}}")
    return 0


def _repository_name(repo: str, revision: str | None) -> HubName:
    name = hub_name(f"hf://models/{repo}")
    if name is None or (revision is not None and "@" in repo):
        raise ConfigError(
            f"{safe_excerpt(repo)!r} cannot be a repository: write org/name, a branch with --revision"
        )
    wanted = name if revision is None else hub_name(f"hf://models/{repo}@{revision}")
    if wanted is None or wanted.commit is not None:
        raise ConfigError(f"--revision {safe_excerpt(revision)}: give the name of a branch")
    return wanted


def _pushed_files(model: Path) -> list[str]:
    """Return the files of a full model that loading reads, and its card."""
    check_folder(model)
    base = adapter_base(model)
    if base is not None:
        raise CheckpointError(
            f"{model} is an adapter on {base}, and only whole models are pushed; merge it first."
        )
    refuse_code(model)
    check_weights(model)
    check_numbers(model)
    names = {*LOADED, CHECKSUMS, CARD, *weight_files(model), *read_checksums(model)}
    return sorted(name for name in names if (model / name).is_file())


def _commit_files(api: Any, model: Path, files: list[str], name: HubName) -> Any:
    """Return the commit of `files`. The Hub takes no card whose base is a folder, so it goes without."""
    from huggingface_hub import CommitOperationAdd

    operations = [CommitOperationAdd(file, str(model / file)) for file in files if file != CARD]
    if CARD in files:
        text = (model / CARD).read_text("utf-8")
        head, mark, body = text.partition("\n---\n") if text.startswith("---\n") else ("", "", text)
        base = _BASE.search(head + "\n")
        if base is not None and hub_name(f"hf://models/{base[1].strip()}") is None:
            fault = f"base_model {safe_excerpt(base[1])} is no name on the Hub"
            print(f"opd: {fault}; the card is pushed without it", file=sys.stderr)
            head = _BASE.sub("", head + "\n", count=1).removesuffix("\n")
        operations.insert(files.index(CARD), CommitOperationAdd(CARD, f"{head}{mark}{body}".encode()))
    return api.create_commit(
        name.repo, operations, commit_message=f"Upload {model.name}", revision=name.revision
    )


def call_hub(name: HubName, call: Callable[[], T]) -> T:
    """Return the Hub's answer. A passing failure is retried for a while. Raises the error of `refusal`."""

    def call_once() -> T:
        try:
            return call()
        except Exception as error:
            inner = error.__cause__ if isinstance(error, RuntimeError) else None  # the error inside an upload
            error = inner if isinstance(inner, Exception) else error
            if is_transient(error):
                raise UnreachableError(short_reason(error)) from error
            raise error from None

    try:
        return RETRY.call(call_once, UnreachableError, lambda error, _: error)
    except Exception as error:
        raise hub_error(name, error) from error

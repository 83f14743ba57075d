"""Publish a checkpoint as a teacher that ranks can stream from an object store: `opd publish`."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

from opd.models.hf_folder import adapter_base, quantisation_in
from opd.pipelines.check.checks import refuse_place
from opd.pipelines.stages.publishing import checked_form, left_out_sentences, whole_folder
from opd.progress import set_activity, suppress_heartbeats
from opd.storage.object_store import ObjectStore
from opd.storage.publish import PublishResult, publish


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

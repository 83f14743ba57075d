"""`opd publish`: a checkpoint becomes a teacher that ranks can stream from an object store."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

from opd.errors import CheckpointError, ModelError, OpdError
from opd.models.architecture import head_form
from opd.models.hf_folder import adapter_base, check_folder, read_config
from opd.models.hf_weights import check_weights, quiet
from opd.models.tokenizers import fingerprint, has_tokenizer, load_tokenizer, rows_fault
from opd.pipelines.check.checks import refuse_place
from opd.progress import doing, hushed
from opd.storage.object_store import ObjectStore, StoreOptions
from opd.storage.publish import ModelForm, Published, publish
from opd.teachers.unpublished import folder_units, stream_fault


def model_form(checkpoint: Path) -> ModelForm:
    """Head and tokenizer of a checkpoint, from its small files alone.

    Raises `CheckpointError` or `ModelError` if the configuration or the tokenizer cannot be read, or if there
    are more tokens than rows. A folder without any tokenizer file has no fingerprint.
    """
    with quiet():
        config = read_config(checkpoint).get_text_config()
        tokenizer = load_tokenizer(checkpoint) if has_tokenizer(checkpoint) else None
    fault = rows_fault(config, tokenizer) if tokenizer is not None else None
    if fault is not None:
        raise CheckpointError(f"{checkpoint}: {fault}; put the tokenizer there that it was trained with.")
    scale, softcap = head_form(config)
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        raise ModelError(f"{checkpoint} says no num_hidden_layers, without which no layer of it can be read.")
    return ModelForm(
        scale=scale,
        softcap=softcap,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        layers=layers,
        fingerprint=asdict(fingerprint(tokenizer)) if tokenizer is not None else None,
    )


def publish_checkpoint(
    checkpoint: str | Path, url: str | Path, *, shards: int = 1, options: StoreOptions | None = None
) -> Published:
    """Publish the Hugging Face folder `checkpoint`, or the model that an adapter there makes of its base,
    below `url` for `shards` ranks.

    A model that cannot be streamed is published if its tensors are those of a decoder: servers can have it
    as a teacher. Raises `CheckpointError`, `ModelError`, `StorageError` or `TeacherError`, one sentence each.
    """
    with _whole(Path(checkpoint)) as folder:
        form, _ = _checked_form(folder)
        with ObjectStore.open(url, options=options) as store:
            return publish(folder, store, shards=shards, form=form)


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """`folder`, or for an adapter a temporary one with its base and the adapter merged."""
    check_folder(folder)
    if adapter_base(folder) is None:
        yield folder
        return
    from opd.pipelines.stages.teachers import whole_model

    with tempfile.TemporaryDirectory(prefix="opd-merged-") as room:
        with doing(f"merging {folder} with its base"):
            merged = whole_model(folder, Path(room) / "model")
        yield merged


def _checked_form(folder: Path) -> tuple[ModelForm, OpdError | None]:
    """The form of a folder that can be published, and why what is published cannot be streamed, if so."""
    check_folder(folder)
    fault = stream_fault(folder)
    try:
        check_weights(folder)
        form = model_form(folder)
    except (CheckpointError, ModelError) as error:
        raise fault if isinstance(fault, ModelError) else error from None
    folder_units(folder, form)
    return form, fault


def run_publish(checkpoint: Path, url: str, shards: int) -> int:
    """The command: publish, and say what is there now. Returns the exit status."""
    refuse_place(url, [str(checkpoint)])
    with _whole(checkpoint) as folder:
        published, where = _published(folder, url, shards)
    manifest = published.manifest
    merged = "" if folder == checkpoint else " merged with its base"
    verb = "published" if published.written else "was published already"
    print(f"{checkpoint} {verb}{merged}: {where}")
    print(f"{manifest.nbytes} bytes, {len(manifest.units)} units, {shards} shards, digest {manifest.digest}")
    return 0


def _published(checkpoint: Path, url: str, shards: int) -> tuple[Published, str]:
    """What is there now of a whole model, and where, with a progress bar."""
    from rich.console import Console
    from rich.progress import Progress

    form, fault = _checked_form(checkpoint)
    if fault is not None:
        others = "or have it as a teacher on servers or Megatron-Core"
        print(f"opd: warning: {str(fault).rstrip('.')}, {others}", file=sys.stderr)
    console = Console(stderr=True)
    bars = Progress(console=console, transient=True, disable=not console.is_terminal)
    shown = hushed() if console.is_terminal else nullcontext()
    reached = [""]
    with ObjectStore.open(url) as store, bars, shown, doing(lambda: reached[0]):
        tasks = {stage: bars.add_task(stage, total=None) for stage in ("checksums", "upload")}

        def report(stage: str, done: int, total: int) -> None:
            bars.update(tasks[stage], completed=done, total=total)
            reached[0] = f"{stage} {done / max(total, 1):.0%}"

        published = publish(checkpoint, store, shards=shards, form=form, progress=report)
        return published, store.name(published.manifest.version)

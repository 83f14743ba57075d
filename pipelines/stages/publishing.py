"""Publish a Hugging Face folder, or an adapter with its base, so that ranks can stream it from a store."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from opd.errors import CheckpointError, ModelError, OpdError
from opd.models.architecture import head_form
from opd.models.causal_lm import CausalLM
from opd.models.checkpoint import save_checkpoint
from opd.models.hf_folder import adapter_base, check_folder, made_once, quantisation_in, read_config
from opd.models.hf_weights import check_weights, quiet_loading
from opd.models.tokenizers import fingerprint, has_tokenizer, load_tokenizer, rows_fault
from opd.pipelines.records.inputs import model_digests
from opd.pipelines.stages.precision import checkpoint_dtype
from opd.progress import set_activity
from opd.storage.files import digest_of
from opd.storage.object_store import ObjectStore, StoreOptions
from opd.storage.publish import ModelForm, PublishResult, publish
from opd.teachers.hf_reader import folder_units, stream_fault, tensors_left_out
from opd.untrusted import safe_excerpt


def whole_model(
    source: Path, out: Path, tokenizer: PreTrainedTokenizerBase | None = None, plain: str | None = None
) -> Path:
    """Return `source`, or for an adapter of peft's the model merged with its base, written to `out`.

    `plain`: a quantised model is written there, too, in the dtype of this name. Files of the same source are
    reused, unless a byte of them has changed.
    """
    base, told = adapter_base(source), {}
    if base is not None:
        dtype, card = checkpoint_dtype(base), {"base": str(base), "adapter": str(source)}
    elif plain is not None and (form := quantisation_in(source)) is not None:
        dtype, card = plain, {"base": str(source), "about": f"Its base holds its weights in {form.title}."}
        told = {"dtype": plain}
    else:
        return source

    def write() -> None:
        model = CausalLM.from_pretrained(source, dtype=dtype)
        save_checkpoint(model, tokenizer or load_tokenizer(source), out, card)

    return made_once(out, digest_of(model_digests(source) | told), write)


def model_form(checkpoint: Path) -> ModelForm:
    """Return head and tokenizer of a checkpoint, from its small files alone.

    Raises `CheckpointError` or `ModelError` if the configuration or the tokenizer cannot be read, or if there
    are more tokens than rows. A folder without any tokenizer file has no fingerprint.
    """
    with quiet_loading():
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
    checkpoint: str | Path,
    url: str | Path,
    *,
    shards: int = 1,
    options: StoreOptions | None = None,
    dtype: str | None = None,
) -> PublishResult:
    """Publish the Hugging Face folder `checkpoint`, or its adapter merged with the base, below `url`.

    The weights are written for `shards` ranks, in `dtype` as `whole_folder` says. A model that cannot be
    streamed is published if its tensors are those of a decoder, because servers can have it as a teacher.
    Raises `CheckpointError`, `ModelError`, `StorageError` or `TeacherError`, one sentence each.
    """
    with whole_folder(Path(checkpoint), dtype) as folder:
        form, _ = checked_form(folder)
        with ObjectStore.open(url, options=options) as store:
            return publish(folder, store, shards=shards, form=form)


@contextmanager
def whole_folder(
    folder: Path, dtype: str | None = None, tell: Callable[[str], None] | None = None
) -> Iterator[Path]:
    """Yield `folder`, or for an adapter a temporary one with the adapter merged into its base.

    With `dtype`, one of `FORMS`, a temporary one with the weights in it. `tell` gets sentences about what is
    left out, and about FP8.
    """
    check_folder(folder)
    if adapter_base(folder) is None and dtype is None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="opd-publish-") as scratch:
        whole, out = folder, Path(scratch) / "converted"
        if adapter_base(folder) is not None:
            with set_activity(f"merging {folder} with its base"):
                whole = whole_model(folder, Path(scratch) / "model")
        if dtype is not None:
            from opd.models.converted_folder import convert_folder

            form, _ = checked_form(whole)
            if tell is not None:
                for sentence in left_out_sentences(whole, form):
                    tell(sentence)
            out.mkdir()
            reached = [""]
            with set_activity(lambda: f"converting {reached[0]}"):
                done = convert_folder(whole, out, dtype, lambda name: reached.__setitem__(0, name))
            if tell is not None and done.numbers:
                kept = f"{done.rounded:,} of {done.numbers:,} numbers were rounded to FP8"
                tell(kept if done.rounded else f"{done.numbers:,} numbers became FP8, none of them changed")
            whole = out
        yield whole


def left_out_sentences(folder: Path, form: ModelForm) -> list[str]:
    """Return a sentence for each kind of stored tensors that publishing `folder` in `form` leaves out."""
    quantised = quantisation_in(folder)
    scales = frozenset() if quantised is None else quantised.activation_scales(form.left_out)
    reasons = {
        "they predict tokens further ahead, which a teacher has no use for": form.left_out - scales,
        "activations are not quantised, so that their scales are not used": scales,
    }
    return [
        f"{len(names)} tensors are left out, among them {safe_excerpt(min(names))}: {reason}"
        for reason, names in reasons.items()
        if names
    ]


def checked_form(folder: Path) -> tuple[ModelForm, OpdError | None]:
    """Return the form of a folder to publish, and the reason if it cannot be streamed."""
    check_folder(folder)
    fault = stream_fault(folder)
    try:
        check_weights(folder)
        form = model_form(folder)
    except (CheckpointError, ModelError) as error:
        raise fault if isinstance(fault, ModelError) else error from None
    form = replace(form, left_out=tensors_left_out(folder))
    folder_units(folder, form)
    return form, fault

"""Check that a Hugging Face folder is complete and holds only data, before loading. Errors name the file.

Its configuration is read here, or built from a recipe's dictionary, with strict keys.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from opd.config.hub_names import hub_name
from opd.errors import CheckpointError, ModelError, OpdError, reason_of
from opd.models.config_values import refuse_values
from opd.models.quantisation import Quantisation, quantisation_of
from opd.models.token_ids import id_count
from opd.storage import files, weight_folder
from opd.storage.files import check_files, digests_of, file_digest, file_state, read_sealed, write_sealed
from opd.storage.manifest import TOKENIZER_FILES
from opd.storage.weight_folder import INDEX, SINGLE, read_headers
from opd.untrusted import safe_excerpt

if TYPE_CHECKING:  # run folders are opened, and refused, without it
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

CHECKSUMS = "checksums.json"
"""`{file name: sha256}` of every file that is read, written by `save_checkpoint`. Folders from elsewhere may
lack it."""
ORIGIN = "origin.json"
"""Written by `made_once`: the digest of the folder's source, and that of its `CHECKSUMS`."""
CARD = "README.md"
"""The only other file that `save_checkpoint` writes. Nothing reads it, and people may add to it."""
LOADED = frozenset(
    {"config.json", "generation_config.json", "adapter_config.json", SINGLE, INDEX, *TOKENIZER_FILES}
)
"""File names that loaders find by themselves."""
MEND = f"copy it again, or delete {CHECKSUMS} if you changed it on purpose."
_DESCRIPTIONS = (
    "config.json", "generation_config.json", "tokenizer_config.json", "processor_config.json",
    "preprocessor_config.json",
)  # fmt: skip
_OWN_CODE = "auto_map"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def check_folder(folder: Path, *, digests: bool = True) -> None:
    """Raise `CheckpointError` naming the first file that is missing, truncated, corrupt or a pickle. Without
    `digests` only the headers of weights are read.
    """
    require_folder(folder)
    base = adapter_base(folder)
    if base is not None:
        check_adapter_file(folder)
        check_folder(base, digests=digests)
        return
    checksums = read_checksums(folder) if digests else {}
    for name in weight_files(folder):
        check_shard(folder / name, checksums.get(name))
    read_headers(folder)  # refuses duplicate tensors, and a wrong index
    check_small_files(folder)


def require_folder(folder: Path) -> None:
    """Raise `CheckpointError` if there is no folder at `folder`."""
    fault = folder_fault(folder)
    if fault is not None:
        raise CheckpointError(f"{fault}.")


def folder_fault(folder: Path, kind: str = "model") -> str | None:
    """Return why no `kind` can be read at `folder`, with the fix. `None` for a folder."""
    if folder.is_dir():
        return None
    if any(part.endswith(":") for part in folder.parts[:1]):
        return f"{folder} is not a folder but a URL; give a folder of this machine"
    if hub_name(str(folder)) is not None:
        return f"{folder} is not a folder; download the {kind} first and give its path"
    existing = next(path for path in (folder, *folder.parents, Path()) if path.exists())
    if existing == folder or not existing.is_dir():
        return f"{folder} is not a folder: {existing} is a file; give the folder that holds the {kind}"
    missing = next((path for path in reversed(folder.parents) if not path.exists()), folder)
    what_is = "nothing is there" if missing == folder else f"there is no {missing}"
    hint = "; names on the Hub are written org/name" if folder.absolute().parent == Path.cwd() else ""
    return f"{folder} is not a folder: {what_is}; check the path{hint}"


def check_small_files(folder: Path) -> None:
    """Raise `CheckpointError` naming the first file other than weights that differs from `CHECKSUMS`."""
    checksums = read_checksums(folder)
    large = {name for name in checksums if name.endswith(".safetensors")}
    check_files(folder, {name: checksums[name] for name in checksums.keys() - large}, MEND, CheckpointError)
    for name in sorted(large):
        refuse_absent(folder / name)
    if "config.json" in checksums:  # else only its weights were listed
        for name in sorted(LOADED - checksums.keys()):
            if (folder / name).exists():
                raise CheckpointError(
                    f"{folder / name} is not among the files that {CHECKSUMS} lists; remove it, or delete"
                    f" {CHECKSUMS} if you added it on purpose."
                )


def adapter_base(folder: Path) -> Path | None:
    """Return the base folder of the adapter in `folder`, or `None` if `folder` is no peft adapter.

    Raises `CheckpointError` if the base is no model's folder, or if `folder` is both a model and an adapter,
    because transformers would load the adapter's base then.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return None
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        raise CheckpointError(
            f"{folder} holds a model and an adapter ({ADAPTER_CONFIG}); move one elsewhere."
        )
    base_name = read_object(path).get("base_model_name_or_path")
    if not isinstance(base_name, str) or not base_name:
        raise CheckpointError(f"{path} does not name its base; write its folder as base_model_name_or_path.")
    candidates = (Path(base_name), folder / base_name)
    base = next((candidate for candidate in candidates if _is_model(candidate)), None)
    if base is None:
        is_hub = hub_name(base_name) is not None
        fetch = f"download it (hf download {base_name} --local-dir DIR) and " if is_hub else ""
        raise CheckpointError(
            f"{folder} is an adapter on {safe_excerpt(base_name)}, which is no model folder here;"
            f" {fetch}write the base's folder as base_model_name_or_path in {path}."
        )
    return base


def check_adapter_file(folder: Path) -> None:
    """Raise `CheckpointError` if the weights of the adapter in `folder` are missing, damaged or a pickle."""
    pickle = folder / "adapter_model.bin"
    if pickle.is_file() and not os.path.lexists(folder / ADAPTER_WEIGHTS):
        raise CheckpointError(
            f"{pickle} is a pickle, which is never read; load the adapter with peft and save it again, which"
            f" writes {ADAPTER_WEIGHTS}."
        )
    check_shard(folder / ADAPTER_WEIGHTS, None)


def _is_model(folder: Path) -> bool:
    """Return True if `folder`, which may be any text, is a model's folder and no adapter's."""
    try:
        return (folder / "config.json").is_file() and not (folder / ADAPTER_CONFIG).is_file()
    except (OSError, ValueError):
        return False


def described_in(folder: Path) -> Path:
    """Return the folder that describes the model in `folder`: its base's for an adapter, else itself."""
    return adapter_base(folder) or folder


def refuse_code(folder: Path) -> None:
    """Raise `ModelError` if a description in `folder` names Python code of the folder's own.

    transformers would import such code, or ask the terminal. So call this before transformers reads anything
    of a folder.
    """
    for name in _DESCRIPTIONS:
        path = folder / name
        if path.is_file() and names_code(read_object(path)):
            raise ModelError(
                f"{path} names Python code of its own ({_OWN_CODE}), which is never run; take {_OWN_CODE} out"
                " of the file if transformers knows this kind of model without it, else choose another model."
            )


def names_code(described: object) -> bool:
    """Return True if a configuration, or one inside it, names classes outside transformers."""
    if not isinstance(described, dict):
        return False
    return bool(described.get(_OWN_CODE)) or any(map(names_code, described.values()))


def weight_files(folder: Path) -> list[str]:
    """Return names of the safetensors files with the weights in `folder`, in order, at least one.

    Raises `CheckpointError` if there are none, or if programs would read different ones.
    """
    names = weight_folder.weight_files(folder)
    if names:
        index = folder / INDEX  # transformers reads its metadata
        if index.is_file() and not isinstance(read_object(index).get("metadata"), dict):
            raise CheckpointError(
                f'{index} has no object `metadata`; write `"metadata": {{}}` into it, or copy it again from'
                " the model's source."
            )
        return names
    for name in (SINGLE, INDEX):
        if os.path.lexists(folder / name):
            refuse_absent(folder / name)
    if any(folder.glob("*.gguf")):
        raise CheckpointError(
            f"{folder} holds GGUF files, whose weights are quantised or laid out for another program, and not"
            " safetensors; give the model that they were made from, or convert one: see docs/recipes/hub.md."
        )
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder / pickles[0]} is a pickle, which is never read; convert the model to safetensors."
        )
    raise CheckpointError(_no_weights(folder))


def _round_number(merged: Path) -> int:
    name = merged.parent.name
    return int(name) if name.isdecimal() and len(name) < 4 else 0


def _no_weights(folder: Path) -> str:
    """Return an error that says which kind of folder without weights this is."""
    if (fault := misplaced_fault(folder)) is not None:
        return fault
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        return (
            f"{folder} holds {safe_excerpt(others[0])} and neither {SINGLE} nor {INDEX}, by which weights"
            " are found;"
            f" copy the index as well, or name a single file of weights {SINGLE}."
        )
    return f"{folder} holds neither {SINGLE} nor {INDEX}; copy the model's weights there."


def _half_adapter(folder: Path) -> str | None:
    """Return the fault of a folder that has an adapter's weights without its settings; `None` for others."""
    weights = next(folder.glob("adapter_model.*"), None)
    if weights is None or (folder / ADAPTER_CONFIG).is_file():
        return None
    return (
        f"{folder} holds {weights.name} without the {ADAPTER_CONFIG} that says how it is applied; copy both."
    )


def misplaced_fault(folder: Path) -> str | None:
    """Return why a folder is no model's: a run's, a published model's, one above models, half an adapter's.
    `None` for any other.
    """
    if (folder / "inputs.json").is_file():
        models = sorted(
            {file.parent for at in ("*", "*/*", "rounds/*/*") for file in folder.glob(f"{at}/config.json")}
        )
        if not models:
            return f"{folder} is a run's folder, and no model's; it holds no model yet."
        merged = max(folder.glob("rounds/*/merged"), key=_round_number, default=folder / "merged")
        return (
            f"{folder} is a run's folder, and no model's; give one of its models, such as"
            f" {merged if merged in models else models[0]}."
        )
    if (folder / "latest").is_file():
        return (
            f"{folder} is a published model, which only teachers are read from (`type: streamed`); give the"
            " folder that was published."
        )
    below = [path.parent for path in folder.glob("*/*.safetensors")]
    if below and not (folder / "config.json").is_file():
        return f"{folder} is the folder above models, and no model's; give one of them, such as {max(below)}."
    return _half_adapter(folder)


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link that leads nowhere",
}


def refuse_absent(path: Path, again: str = "copy it again from the model's source") -> None:
    """Raise `CheckpointError` if there is no file at `path`, naming the object there. `again` is the fix."""
    if path.is_file():
        return
    try:
        mode = path.stat().st_mode if path.exists() else path.lstat().st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; {again}.") from None
    kind = _KINDS.get(stat.S_IFMT(mode), "no file")
    raise CheckpointError(f"{path} is {kind} in the place of a file; remove it, and {again}.")


def check_shard(path: Path, expected: str | None) -> None:
    """Raise `CheckpointError` if the shard at `path` is missing, truncated, or has another sha256 than
    `expected`. Raise `OSError` if it may not be read.
    """
    refuse_absent(path)
    path.open("rb").close()  # the system's refusal is no damage, and safetensors names no reason
    try:
        with safe_open(path, framework="pt") as shard:
            shard.keys()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated or corrupt ({reason_of(error)}); {files.file_fix(path)}."
        ) from error
    if expected is not None and file_digest(path) != expected:
        raise CheckpointError(f"{path} does not have the sha256 that {CHECKSUMS} gives; copy it again.")


def write_checksums(folder: Path) -> None:
    """Write `CHECKSUMS` of all files below `folder` except its card."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / CARD]
    checksums = digests_of(folder, files)
    (folder / CHECKSUMS).write_text(json.dumps(checksums, indent=2) + "\n", "utf-8")


def made_once(folder: Path, origin: str, make: Callable[[], object]) -> Path:
    """Return `folder` if it was made from the digest `origin` and every byte is unchanged. Else `make` makes
    or replaces it, with `CHECKSUMS`. There may be one writer per `folder`.
    """
    mend = "it is made again."
    try:
        document = read_sealed(folder / ORIGIN, mend, CheckpointError)
        check_files(folder, {CHECKSUMS: str(document.get(CHECKSUMS))}, mend, CheckpointError)
        check_folder(folder)
        is_current = document.get("origin") == origin
    except OSError:  # as every `CheckpointError` is
        is_current = False
    if not is_current:
        make()
        document = {"origin": origin, CHECKSUMS: file_digest(folder / CHECKSUMS)}
        write_sealed(folder / ORIGIN, document)  # last: without it a folder is made again
    return folder


def weight_states(folder: Path) -> list[tuple[int, ...]]:
    """Return the states of the weight files in `folder` and of what says their digests, which change with
    them. Empty if it holds none.
    """
    try:
        return [file_state(folder / name) for name in (*weight_files(folder), CHECKSUMS)]
    except (OpdError, OSError):
        return []


def read_checksums(folder: Path) -> dict[str, str]:
    """Read the folder's `checksums.json`; empty without one."""
    path = folder / CHECKSUMS
    checksums = read_object(path) if path.exists() else {}
    if not all(isinstance(digest, str) for digest in checksums.values()):
        raise CheckpointError(f"{path} holds something other than digests; copy it again.")
    return checksums


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in the file `path`. Raises `CheckpointError` if there is none."""
    return files.read_description(path, "copy it again from its source.", CheckpointError)


def config_of(described: dict[str, Any]) -> PreTrainedConfig:
    """Build the configuration that a config.json describes, as transformers reads it from the file.

    Raises `KeyError` for an unknown `model_type`, and any error of its constructor.
    """
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[described["model_type"]].from_dict(_with_floats(described))


def _with_floats(value: object) -> Any:
    """Replace stand-ins in `value` by the numbers that JSON lacks."""
    if isinstance(value, list):
        return [_with_floats(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {files.FLOAT} and value[files.FLOAT] in ("Infinity", "-Infinity", "NaN"):
        return float(value[files.FLOAT])
    return {key: _with_floats(part) for key, part in value.items()}


# Read by transformers though not every configuration declares them.
_UNDECLARED_KEYS = ("rope_theta", "rope_scaling", "head_dim")
_BY_LAYER = {"head_dim", "num_key_value_heads"}
_OF_FULL_LAYERS = ("global_head_dim", "num_global_key_value_heads", "per_layer_config")
"""Arguments of configurations whose layers differ (Gemma 4)."""


_NO_FACTOR = "This model config has set a `rope_parameters['original_max_position_embeddings']` field"
logging.getLogger("transformers.modeling_rope_utils").addFilter(
    lambda record: not record.getMessage().startswith(_NO_FACTOR)
)  # advice to writers of a configuration; the result is the same


def read_config(folder: Path) -> PreTrainedConfig:
    """Read the configuration in `folder/config.json`, or an adapter's base's.

    Raises `CheckpointError` if it is missing or not JSON, `ModelError` if its `model_type` is unknown, if it
    names code of its own, or if its weights are quantised in a format that is not read.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers import __version__ as transformers_version

    folder = described_in(folder)
    path = folder / "config.json"
    instead = None if path.is_file() else misplaced_fault(folder)
    if instead is not None:
        raise CheckpointError(instead)
    refuse_absent(path, "give a folder written by Hugging Face's save_pretrained")
    refuse_code(folder)
    check_small_files(folder)
    described = read_object(path)
    refuse_values(described, path)
    kind = described.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ModelError(
            f"{path} says model_type {safe_excerpt(kind)}, which transformers {transformers_version} does"
            " not know;"
            " upgrade transformers (pip install -U transformers), or choose a model that it knows."
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON; copy the folder again ({reason_of(error)})."
        ) from error
    except (
        *(ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError),
        StrictDataclassError,
    ) as error:
        raise ModelError(
            f"{path} is not a configuration this transformers release knows: {reason_of(error)}"
        ) from error
    _refuse_unusable(config, path)
    return config


def quantisation_in(folder: Path) -> Quantisation | None:
    """Return the format in which a model's folder, or an adapter's base, holds its weights; `None` for plain
    ones. Raises `ModelError` for a format that is not read.
    """
    config = described_in(folder) / "config.json"
    return quantisation_of(read_object(config), config)


def is_whole(folder: Path) -> bool:
    """Return whether a run can use the model in `folder` as it is: no adapter, and not quantised."""
    if adapter_base(folder) is not None:
        return False
    return not (folder / "config.json").is_file() or quantisation_in(folder) is None


def plain_form_of(folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return shapes and safetensors' types of the tensors in a model's folder, by name: of quantised ones
    those of the matrices that they stand for. Raises the errors of `read_headers`, and `CheckpointError` for
    codes and scales that do not belong together.
    """
    sources, form = read_headers(folder), quantisation_in(folder)
    shapes = {name: source.shape for name, source in sources.items()}
    formats = {name: source.dtype for name, source in sources.items()}
    return (shapes, formats) if form is None else form.plain_form(shapes, formats, folder)


_MOST_WIDTH = 1_000_000
"""Most numbers of a hidden state."""


def _refuse_unusable(config: PreTrainedConfig, path: str | Path) -> None:
    """Raise for a configuration that opd cannot read."""
    text = config.get_text_config()
    differing = {name for one in (text.to_dict().get("per_layer_config") or {}).values() for name in one}
    if odd := sorted(differing - _BY_LAYER):
        raise ModelError(
            f"{path} describes layers that differ in {odd[0]} (per_layer_config, as {config.model_type} has);"
            f" only models whose layers differ in {' and '.join(sorted(_BY_LAYER))} alone are computed here."
        )
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise ModelError(f"{path} says num_hidden_layers {layers}; a model has one or more: mend it.")
    width = getattr(config.get_text_config(), "hidden_size", None)
    if isinstance(width, int) and width > _MOST_WIDTH:
        raise ModelError(f"{path} says hidden_size {width:,}; no model has so many: mend it.")


def layer_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Return each layer's attention window in tokens; `None` for full attention."""
    text = config.get_text_config()
    windows = {
        "sliding_attention": getattr(text, "sliding_window", None),
        "chunked_attention": getattr(text, "attention_chunk_size", None),
    }
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    return tuple(windows.get(kind) for kind in kinds)


_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "n_ctx")
"""Names of the number of positions, by family."""


def positions_of(config: PreTrainedConfig) -> int | None:
    """Return the maximum tokens of a sequence, or `None` if the configuration does not say."""
    text = config.get_text_config()
    values = [getattr(text, name, None) for name in _POSITIONS]
    stated = next((number for number in values if isinstance(number, int) and number > 0), None)
    bounds = [number for number in (stated, angles_change_at(config)) if number]
    return min(bounds, default=None)


def angles_change_at(config: PreTrainedConfig) -> int | None:
    """Return the number of tokens beyond which all angles of a batch depend on its longest sequence
    ("longrope" of Phi 3 and 4, "dynamic"). `None` if angles depend on positions only.

    A short sequence beside a longer one, and cached keys, would be wrong.
    """
    text = config.get_text_config()
    longest, bounds = getattr(text, "max_position_embeddings", None), []
    turned = getattr(text, "rope_parameters", None) or {}
    for rope in (turned, *turned.values()):  # or by kind of layer
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind in ("longrope", "dynamic"):
            first = rope.get("original_max_position_embeddings") if kind == "longrope" else None
            bounds.append(first or longest)
    return min((number for number in bounds if number), default=None)


def scratch_config(config: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Build a configuration from `model_type` and its arguments, with the tokenizer's vocabulary and special
    ids.

    Raises `ModelError` for an unknown `model_type` or argument (with the nearest known one), a value of the
    wrong type, or a `vocab_size` smaller than the tokenizer's.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    options = _with_floats(config)
    model_type = options.pop("model_type", None)
    refuse_values(options, "model.config")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"model.config.model_type is {model_type!r}, which transformers does not know"
            f"{_nearest_hint(str(model_type), list(CONFIG_MAPPING.keys()))}."
        )
    try:
        default = AutoConfig.for_model(model_type)
        _refuse_unusable(default, "model.config")
    except StrictDataclassError as error:
        raise ModelError(f"model_type {model_type!r} has no plain model: {reason_of(error)}") from error
    for key in options:
        if not _knows(default, key):
            raise ModelError(
                f"model.config.{key} is not an argument of {type(default).__name__}"
                f"{_nearest_hint(key, list(default.to_dict()))}."
            )
    tokens = id_count(tokenizer)
    rows = options.setdefault("vocab_size", tokens)
    if not isinstance(rows, int) or rows < tokens:
        raise ModelError(
            f"model.config.vocab_size is {options['vocab_size']}, fewer than the tokenizer's {tokens} ids;"
            " leave it out."
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        options[name] = getattr(tokenizer, name)
    try:
        made = AutoConfig.for_model(model_type, **options)
    except (ValueError, TypeError, LookupError, ArithmeticError, StrictDataclassError) as error:
        raise ModelError(
            f"model.config cannot be used for model_type {model_type!r}: {reason_of(error)}"
        ) from error
    _refuse_unusable(made, "model.config")
    return made


def _knows(default: PreTrainedConfig, key: str) -> bool:
    """Return True if `key` is an argument of configurations like `default`."""
    try:
        declared = hasattr(default, key)
    except RuntimeError:  # of what differs by layer there is no one value
        return True
    return declared or key in _UNDECLARED_KEYS or (default.is_heterogeneous and key in _OF_FULL_LAYERS)


def _nearest_hint(word: str, words: list[str]) -> str:
    matches = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""

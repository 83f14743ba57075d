"""Check that student and teachers can be read and fit together. Loads no weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config import Recipe, RolloutConfig
from opd.config.cross_field_checks import parts_in_pieces
from opd.config.recipe import ModelConfig
from opd.config.teachers import ServedEngineConfig
from opd.config.train import LoRAConfig
from opd.errors import CheckpointError, ModelError, OpdError
from opd.models.token_ids import id_count
from opd.pipelines.check.checks import Finding, given_teachers, number_of, run_check
from opd.pipelines.check.memory import on_cuda
from opd.pipelines.check.shapes import (
    ModelShape,
    absent_shape,
    has_weights,
    origin_of,
    shape_of,
    stored_of,
)
from opd.pipelines.check.tokenizers import (
    SAME_TOKENS,
    check_alignment,
    check_bos,
    check_own_prompts,
    check_own_tokenizer,
    check_prompts,
    check_rows,
    check_stops,
    check_tokenizer,
)
from opd.pipelines.stages.precision import model_dtype
from opd.progress import set_activity

if TYPE_CHECKING:
    from opd.megatron.form import MegatronForm
    from opd.models.token_alignment import TokenTranslator
    from opd.rollout.prompts import Domain

DEVICE = "device"
_PEEK = 64
"""Prompts of a domain that are looked at for messages."""
_LOOKED_AT = 8 << 30
"""Bytes of a model's weights that are checked. Of a larger model the beginning of each tensor is."""
_NAMES = (
    "architectures", "dtype", "torch_dtype", "transformers_version", "name_or_path", "use_cache",
    "quantization_config",
)  # fmt: skip
"""Keys of a configuration that do not change the function of its weights."""


@dataclass(slots=True)
class Models:
    """Results of the checks, for the estimate and the KL check."""

    tokenizer: Any = None
    config: Any = None
    """The student's Hugging Face configuration."""
    chat: bool = False
    """Some prompts are messages, so the chat template counts."""
    stops: tuple[int, ...] = ()
    """Ids that end every response."""
    student: ModelShape | None = None
    teachers: dict[str, ModelShape] = field(default_factory=dict)
    weights: bool = True
    """Weights are checked. If not, only models in local folders are checked."""
    may_lack_weights: bool = False
    """A folder of a model may hold its small files alone: a plan reckons with what its configuration says."""
    _translators: dict[str, TokenTranslator] = field(default_factory=dict)

    def is_checked(self, *places: str | None) -> bool:
        """Return whether the models at `places` are checked."""
        paths = [place for place in places if place is not None]
        return self.weights or (bool(paths) and all(Path(path).is_dir() for path in paths))

    def lacks_weights(self, folder: str | None) -> bool:
        """Return whether `folder` holds no weights and need not."""
        return self.may_lack_weights and folder is not None and not has_weights(Path(folder))

    def translator(self, recipe: Recipe, path: str) -> TokenTranslator:
        """Return the translator for teachers with the tokenizer in `path`, made once."""
        if path not in self._translators:
            from opd.pipelines.stages.teachers import open_translator

            self._translators[path] = open_translator(recipe, path, self.tokenizer)
        return self._translators[path]


def check_models(recipe: Recipe, domains: Mapping[str, Domain], models: Models) -> list[Finding]:
    """Check student, teachers and prompts, and fill `models`."""
    findings = []
    if models.is_checked(recipe.model.path, recipe.model.tokenizer):
        findings = run_check("student", _check_student, recipe, domains, models)
        if models.student is None:
            return findings  # the rest is compared with the student
    models.chat = any(prompt.messages is not None for d in domains.values() for prompt in d.train[:_PEEK])
    if models.tokenizer is not None:
        findings += run_check("stop ids", check_stops, recipe, models)
    sources = given_teachers(recipe)
    teachers = {name: path for name, path in sources.items() if models.is_checked(path)}
    lost = unreadable_teachers(teachers, read_published)
    findings += group_errors(teachers, lost)
    faulty = {*lost, *(sources.keys() - teachers.keys())}
    for name, path in teachers.items():
        if name not in lost:
            of_teacher = run_check(f"teacher {name}", _check_teacher, recipe, name, path, models, domains)
            findings += of_teacher
            if any(finding.level == "error" for finding in of_teacher):
                faulty.add(name)  # its other checks are skipped
    findings += _check_streams(recipe, models, faulty)
    for name, domain in domains.items():
        findings += run_check(f"prompts {name}", check_prompts, recipe, domain, models.tokenizer)
        own = recipe.domain_tokenizer(name)
        if models.tokenizer is not None and own is not None and models.is_checked(own):
            title = f"tokens {name}"
            findings += run_check(title, check_alignment, recipe, domain, models)
    return findings


def check_device(recipe: Recipe) -> None:
    """Raise `ModelError` for a device that is not there."""
    from opd.models.causal_lm import torch_device

    torch_device(recipe.model.device)


def _check_student(recipe: Recipe, domains: Mapping[str, Domain], models: Models) -> list[Finding]:
    from opd.megatron.form import MegatronForm
    from opd.models.architecture import cached_layers, check_architecture, empty_model
    from opd.models.causal_lm import torch_dtype
    from opd.models.expert_parallel import shares_experts
    from opd.models.hf_folder import check_folder, read_config, scratch_config
    from opd.models.hf_weights import check_weights
    from opd.models.recurrence import mixers_of
    from opd.pipelines.stages.domains import student_tokenizer
    from opd.pipelines.stages.student import student_remarks

    model = recipe.model
    require_folders(model)
    models.tokenizer = student_tokenizer(recipe, domains.values())
    if model.path is not None:
        if not models.lacks_weights(model.path):
            check_folder(Path(model.path), digests=models.weights)
        config = read_config(Path(model.path))
    else:
        config = scratch_config(model.config or {}, models.tokenizer)
    where = model.path or "model.config"
    check_architecture(config, where)
    module = empty_model(config, where)
    if model.path is not None and not models.lacks_weights(model.path):
        check_weights(Path(model.path))
        _look_at_values(Path(model.path), models)
    models.config = config
    form, train = None, recipe.train
    if train.backend == "megatron":
        form = MegatronForm.from_config(config)
        form.check_student(train.tensor_parallel, train.pipeline_parallel)
        form.sharing_size(train.expert_parallel, 1)
        here = recipe.launch.type == "local" and not models.may_lack_weights  # it trains on this machine
        if train.distributed_optimizer and here and not on_cuda(recipe.model.device):
            raise ModelError(
                "train.distributed_optimizer needs a GPU; leave it out, or set model.device to cuda."
            )
    elif train.expert_parallel != "auto":
        shares_experts(module, train.expert_parallel, train.expert_parallel)
    _check_routing(recipe, module, form)
    _check_pieces(recipe, config, module)
    recurrent = state_bytes = 0
    if mixers_of(module):
        attending, state_bytes = cached_layers(config, torch_dtype(model_dtype(recipe)))
        recurrent = config.get_text_config().num_hidden_layers - attending
    absent = models.lacks_weights(model.path)
    origin = origin_of(Path(model.path)) if model.path is not None and not absent else frozenset[str]()
    shape = shape_of(config, module, model.lora)
    models.student = replace(
        shape, origin=origin, absent=absent, recurrent=recurrent, state_bytes=state_bytes
    )
    size = f"{models.student.size_text}, vocabulary {id_count(models.tokenizer)}"
    return [
        Finding("ok", "student", f"{config.model_type}, {size}"),
        *check_rows(
            "student", config, models.tokenizer, "set model.tokenizer to the one the model was trained with"
        ),
        *check_bos("student", config, models.tokenizer),
        *(Finding("warning", "student", one) for one in student_remarks(recipe, models.tokenizer)),
        *_check_sampling("student", model.path, recipe.rollout),
        *_check_adapters(model.lora, models.student),
        *_check_sent(recipe, module),
    ]


def _check_pieces(recipe: Recipe, config: Any, module: Any) -> None:
    """Raise `ModelError` if sequences go in pieces, or ranks share them, and the student cannot do that."""
    from opd.models.attention import refuse_pieces
    from opd.models.recurrence import IN_PIECES, mixers_of

    if not (pieces := parts_in_pieces(recipe)) and recipe.train.context_parallel == 1:
        return
    refuse_pieces(config.get_text_config(), shared=not pieces)
    if mixers_of(module):
        where = f"{pieces[0]}.batch.sequence_chunk" if pieces else "train.context_parallel"
        raise ModelError(f"{where} is set, and the student carries states from token to token, {IN_PIECES}.")


def _check_routing(recipe: Recipe, module: Any, form: MegatronForm | None) -> None:
    """Raise `ModelError` for settings of experts that the student's layers do not have, as its trainer will:
    on Megatron-Core of this `form`.
    """
    from opd.models.routing import balancing_fault, empty_routing_fault, find_routers, find_routing

    train, asked = recipe.train, recipe.rollout.replay_experts
    routing = find_routing(module) or "has no experts"
    recorded = asked is not False and (asked is True or recipe.rollout.engine.type == "torch")
    if form is not None:
        fault = form.replay_fault
    else:
        fault = routing if isinstance(routing, str) else empty_routing_fault(module, routing)
    if asked is True and fault is not None:
        raise ModelError(f"rollout.replay_experts is true, and the student {fault}; set it to auto or false.")
    replays = recorded and fault is None
    if train.balance_rate:
        corrects = not isinstance(routing, str) and routing.corrections is not None
        why = "has no e_score_correction_bias" if replays else "learns without replayed choices"
        if not replays or not (corrects if form is None else form.sigmoid):
            raise ModelError(f"train.balance_rate is set, and the student {why}; leave it out.")
    if train.compile is True and replays:
        raise ModelError(
            "train.compile is true, and layers with replayed choices of experts are not compiled; set it to"
            " auto, or rollout.replay_experts to false."
        )
    if train.router_losses:
        if form is not None:
            routers = balancing_fault(module)
        else:
            routers = routing if isinstance(routing, str) else fault or find_routers(module, routing)
        if isinstance(routers, str):
            name = train.router_losses[0]
            raise ModelError(f"train.{name} is set, and the student {routers}; leave it out.")


def require_folders(model: ModelConfig) -> None:
    """Raise `ModelError` if a path of `model` is not a folder."""
    from opd.models.hf_folder import folder_fault

    for key, subject, folder in (("path", "model", model.path), ("tokenizer", "tokenizer", model.tokenizer)):
        fault = None if folder is None else folder_fault(Path(folder), subject)
        if fault is not None:
            raise ModelError(f"model.{key}: {fault}.")


def _look_at_values(folder: Path, models: Models) -> None:
    """Raise `CheckpointError` for weights that are not numbers, in the bytes that are read here."""
    from opd.models.hf_folder import described_in
    from opd.storage.weight_folder import check_numbers

    if not models.weights:
        return
    with set_activity(f"reading {folder}"):
        check_numbers(described_in(folder), _LOOKED_AT)


def _check_sent(recipe: Recipe, module: Any) -> list[Finding]:
    """Check that the student's servers know its tensors by the names under which they are sent."""
    from opd.models.stored_form import StoredForm
    from opd.pipelines.stages.served_engine import merged_because

    merged_because(recipe, lambda: module)
    served = isinstance(recipe.rollout.engine, ServedEngineConfig)
    mismatch = StoredForm(module).unserved() if served else None
    if mismatch is None:
        return []
    mine, theirs = mismatch
    detail = (
        f"its {mine} is one tensor where servers, as its files, have others ({theirs}), so that"
        if mine != theirs
        else f"its files stack experts ({theirs}), whose form on servers is not known, so that"
    )
    detail += " they cannot be given its weights; set rollout.engine to {type: torch}"
    return [Finding("error", "student", detail)]


def _check_adapters(lora: LoRAConfig | None, student: ModelShape) -> list[Finding]:
    if lora is None or lora.rank < student.narrowest:
        return []
    detail = (
        f"{lora.rank} is at least the smallest width of a layer with adapters ({student.narrowest}), where an"
        " adapter is larger than the weight that it changes; lower it"
    )
    return [Finding("warning", "model.lora.rank", detail)]


def _check_teacher(
    recipe: Recipe, name: str, source: str, models: Models, domains: Mapping[str, Domain]
) -> list[Finding]:
    from opd.models.architecture import check_architecture, empty_model
    from opd.models.hf_folder import check_folder, read_config
    from opd.models.hf_weights import check_weights
    from opd.teachers.skeleton import is_published, small_files

    title, absent = f"teacher {name}", not is_published(source) and models.lacks_weights(source)
    is_folder = not is_published(source) and not absent
    if is_folder:
        check_folder(Path(source), digests=models.weights)
    with small_files(source) as folder:
        config = read_config(folder)
        if recipe.teacher_settings(name).needs_architecture:
            check_architecture(config, source)
        module = empty_model(config, source)
        if is_folder:
            check_weights(Path(source))
            _look_at_values(Path(source), models)
        shape = shape_of(config, module)
        shape = absent_shape(shape, config) if absent else replace(shape, **stored_of(source))
        models.teachers[name] = shape
        findings = [Finding("ok", title, f"{config.model_type}, {shape.size_text}")]
        if models.student is not None:
            findings += _check_positions(title, config, recipe, models)
            own = recipe.teacher_tokenizer(name)
            if own is not None and models.is_checked(own):
                findings += check_own_tokenizer(title, own, folder, config, recipe, models)
                if all(finding.level != "error" for finding in findings):
                    findings += check_own_prompts(recipe, name, folder, domains, models)
            elif own is None:
                findings += check_rows(title, config, models.tokenizer, SAME_TOKENS)
                findings += check_tokenizer(title, folder, recipe, models)
            findings += _check_sampling(title, str(folder), recipe.rollout)
            findings += _check_weight_merges(title, recipe, config, models)
        return findings


def _check_streams(recipe: Recipe, models: Models, lost: Collection[str]) -> list[Finding]:
    """Check that streamed teachers can be streamed, before those that this run trains are trained."""
    by_source: dict[str | None, list[str]] = {}
    sources = recipe.given_teachers()
    for name in recipe.used_teachers():
        has_config = name in sources or models.student is not None
        if recipe.teacher_settings(name).type == "streamed" and name not in lost and has_config:
            by_source.setdefault(sources.get(name), []).append(name)
    findings = []
    for source, names in by_source.items():
        keys = [f"teachers.{name}.type" for name in names if name in recipe.teachers]
        keys = keys or ["distill.teachers"]
        faults = run_check(f"teacher {', '.join(names)}", _stream_names, recipe, source, models)
        advice = (
            f"set {', '.join(keys)} to local, which keeps whole models in memory, if `opd sample` answers"
            " from this one, else choose another"
        )
        findings += [replace(one, detail=f"{one.detail.partition(';')[0]}; {advice}") for one in faults]
    return findings


def _stream_names(recipe: Recipe, source: str | None, models: Models) -> None:
    """Raise as `check_streams`. `source` is `None` for the student's checkpoint."""
    from opd.models.hf_folder import read_config
    from opd.storage.published import PublishedModel
    from opd.teachers.hf_reader import stream_fault
    from opd.teachers.published_adapter import PublishedAdapter, is_adapter
    from opd.teachers.skeleton import check_streams, is_published, small_files

    path = source or recipe.model.path
    if path is None:
        check_streams(models.config, "model.config")
    elif is_published(path):
        url = PublishedAdapter.open(path).base if is_adapter(path) else path
        with PublishedModel.open(url) as published, small_files(path) as folder:
            manifest = published.manifest
            check_streams(read_config(folder), path, manifest.tensor_shapes, manifest.tensor_formats)
    elif models.lacks_weights(path):
        check_streams(read_config(Path(path)), path)
    elif (fault := stream_fault(Path(path))) is not None:
        raise fault


def _check_weight_merges(title: str, recipe: Recipe, config: Any, models: Models) -> list[Finding]:
    """Check that teachers have the student's configuration if the run does arithmetic on weights."""
    methods = recipe.weight_merges
    ours, theirs = _function_keys(models.config), _function_keys(config)
    apart = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if not methods or not apart:
        return []
    detail = f"its configuration differs from the student's in {', '.join(apart)}"
    return [
        Finding(
            "error", title, f"{detail}; take {', '.join(methods)} out of baselines.methods and distill.start"
        )
    ]


def _function_keys(config: Any) -> dict[str, Any]:
    """Return the keys of a configuration that change the function of its weights."""
    form = config.get_text_config().to_dict()
    return {key: value for key, value in form.items() if not key.startswith("_") and key not in _NAMES}


def _check_positions(title: str, config: Any, recipe: Recipe, models: Models) -> list[Finding]:
    """Check that a teacher has positions for the student's samples, and for its own when it is measured."""
    from opd.models.hf_folder import angles_change_at
    from opd.pipelines.stages.domains import sequence_positions

    limit, limit_key = recipe.rollout.max_sequence, "rollout.max_sequence"
    spare = recipe.kept_by_servers  # tokens
    theirs, ours = (sequence_positions(each, recipe, limit) for each in (config, models.config))
    if theirs >= ours:
        return []
    reserved = f" of which servers keep {spare}" if spare else ""
    detail = (
        f"it has {theirs + spare} positions{reserved}, but a prompt and its response may take {ours} tokens"
    )
    if theirs + spare == angles_change_at(config):
        mend = f"beyond them its angles change (rope_type), for short texts beside it too: set {limit_key}"
        return [Finding("error", title, f"{detail}; {mend} to {theirs}")]
    return [Finding("warning", title, f"{detail}; set {limit_key} to {theirs} if they do")]


def _check_sampling(title: str, path: str | None, rollout: RolloutConfig) -> list[Finding]:
    """Warn if a model was tuned for other sampling parameters than the recipe's."""
    from opd.models.hf_folder import read_object

    file = Path(path) / "generation_config.json" if path is not None else None
    if file is None or not file.is_file():
        return []
    try:
        generation = read_object(file)
    except CheckpointError:
        return [Finding("warning", title, f"{file} is not readable JSON; it is not used")]
    findings = []
    for name in ("temperature", "top_p", "top_k"):
        theirs, ours = generation.get(name), getattr(rollout, name)
        if theirs is not None and theirs != ours:
            detail = f"its generation_config.json says {name} {theirs}, rollout.{name} is {ours:g}"
            advice = "both models are sampled and scored at the recipe's"
            findings.append(Finding("warning", title, f"{detail}; {advice}"))
    return findings


def read_published(source: str) -> None:
    """Read the description of a published teacher. Raises `StorageError` if it cannot."""
    from opd.storage.published import PublishedModel
    from opd.teachers.published_adapter import PublishedAdapter, is_adapter

    with PublishedModel.open(PublishedAdapter.open(source).base if is_adapter(source) else source):
        pass


def unreadable_teachers(teachers: Mapping[str, str], look: Callable[[str], None]) -> dict[str, OpdError]:
    """Return the errors of unreadable published teachers. All are tried at once: each may take a while."""
    from opd.teachers.skeleton import is_published

    published = {name: source for name, source in teachers.items() if is_published(source)}
    lost: dict[str, OpdError] = {}
    if published:
        with set_activity(f"reading {number_of(len(published), 'published teacher')}"):
            with ThreadPoolExecutor(len(published)) as pool:
                futures = {name: pool.submit(look, source) for name, source in published.items()}
            for name, future in futures.items():
                error = future.exception()
                if isinstance(error, OpdError):
                    lost[name] = error
                elif error is not None:
                    raise error
    return lost


def group_errors(teachers: Mapping[str, str], lost: Mapping[str, OpdError]) -> list[Finding]:
    """Return one finding for all teachers that fail in the same way."""
    alike: dict[str, list[str]] = {}
    for name, error in lost.items():
        alike.setdefault(str(error).replace(teachers[name], "URL"), []).append(name)
    findings = []
    for names in alike.values():
        detail = str(lost[names[0]])
        if len(names) > 1:
            detail = f"{detail.rstrip('.')}; the same for {', '.join(names[1:])}"
        findings.append(Finding("error", f"teacher {', '.join(names)}", detail))
    return findings

"""Whether student, teachers and tokenizers can be read and fit together; no weights are loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config import Recipe, RolloutConfig
from opd.config.recipe import WEIGHT_MERGES, ModelConfig
from opd.config.teachers import ServedEngineConfig
from opd.config.train import LoRAConfig
from opd.errors import CheckpointError, ModelError
from opd.models.token_ids import id_count
from opd.pipelines.doctor.checks import Finding, attempt, given_teachers
from opd.pipelines.doctor.published import look, told_together, unreachable
from opd.pipelines.doctor.templates import check_sameness, template_findings, written
from opd.progress import doing

if TYPE_CHECKING:
    from opd.rollout.prompts import Domain


DEVICE = "device"
_PEEK = 64
"""Prompts of a domain that are asked whether they are messages."""
_MEASURED = 256
"""Prompts of a domain that are encoded to see how long they are."""
_LOOKED_AT = 8 << 30
"""Bytes of a model's weights that are looked at: of a larger one the beginning of each tensor."""
_SAME_TOKENS = "use a teacher with the student's tokens"
_NAMES = ("architectures", "dtype", "torch_dtype", "transformers_version", "name_or_path", "use_cache")
"""Keys of a configuration that change nothing in what its weights compute."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What an estimate needs to know of a model."""

    parameters: int
    hidden_size: int
    windows: tuple[int | None, ...]
    """How far each layer's attention sees; `None`: to the beginning."""
    vocabulary: int
    kv_width: int
    """Key-value heads times head size: values per token, layer and side of the cache."""
    adapters: int = 0
    """Parameters of the adapters that `model.lora` puts on it."""
    adapted: int = 0
    """Parameters of the layers they belong to."""
    narrowest: int = 0
    """The smallest width of one of these."""
    fused: int = 0
    """Parameters of the layers that decode multiplies together with others, from a copy: queries, keys and
    values; gate and up. None of a model whose own code decodes."""
    linear: int = 0
    """Those of the other linear layers that decode multiplies."""
    stored: int = 0
    """Bytes of its weights where they lie."""
    published: bool = False
    """Whether they lie where `opd publish` writes."""
    digest: str = ""
    """Of what is read of it from an object store: adapters on one base have one digest."""

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)


@dataclass(slots=True)
class Models:
    """What the checks found out, for the estimate and the KL check."""

    tokenizer: Any = None
    config: Any = None
    """The student's Hugging Face configuration."""
    chat: bool = False
    """Whether some prompts are messages, so that the chat template counts."""
    stops: tuple[int, ...] = ()
    """Ids at which every response ends."""
    student: ModelShape | None = None
    teachers: dict[str, ModelShape] = field(default_factory=dict)
    weights: bool = True
    """Whether weights are looked at. If not, no model is that does not lie in a folder here."""

    def sees(self, *places: str | None) -> bool:
        """Whether what lies in `places` is looked at."""
        given = [place for place in places if place is not None]
        return self.weights or (bool(given) and all(Path(place).is_dir() for place in given))


def check_models(recipe: Recipe, domains: Mapping[str, Domain], models: Models) -> list[Finding]:
    """Checks student, teachers and prompts; fills `models`."""
    findings = []
    if models.sees(recipe.model.path, recipe.model.tokenizer):
        findings = attempt("student", lambda: _check_student(recipe, domains, models))
        if models.student is None:
            return findings  # what the rest is compared with
    models.chat = any(prompt.messages is not None for d in domains.values() for prompt in d.train[:_PEEK])
    if models.tokenizer is not None:
        findings += attempt("stop ids", lambda: _check_stops(recipe, models))
    findings += _check_teachers(recipe, models)
    for name, domain in domains.items():
        findings += attempt(f"prompts {name}", lambda d=domain: check_prompts(recipe, d, models.tokenizer))
    return findings


def _check_teachers(recipe: Recipe, models: Models) -> list[Finding]:
    given = given_teachers(recipe)
    teachers = {name: path for name, path in given.items() if models.sees(path)}
    lost = unreachable(teachers, look)
    findings = told_together(teachers, lost)
    faulty = {*lost, *(given.keys() - teachers.keys())}
    for name, path in teachers.items():
        if name not in lost:
            found = attempt(f"teacher {name}", lambda n=name, p=path: _check_teacher(recipe, n, p, models))
            findings += found
            if any(one.level == "error" for one in found):
                faulty.add(name)  # of which nothing more is said
    return findings + _check_streams(recipe, models, faulty)


def check_device(recipe: Recipe) -> list[Finding]:
    """Whether the device that the recipe names is there."""
    import torch

    device = recipe.model.device
    if device == "auto":
        return []
    try:
        torch.empty(1, device=device)
        sound = torch.device(device).type != "meta"
    except (
        RuntimeError,
        AssertionError,
        NotImplementedError,
    ):  # what torch says of one that is not there
        sound = False
    if sound:
        return []
    here = f"{torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else "no CUDA device"
    detail = f"model.device is {device!r}, and this process sees {here}; set it to auto or cpu"
    return [Finding("error", DEVICE, detail)]


def _check_student(recipe: Recipe, domains: Mapping[str, Domain], models: Models) -> list[Finding]:
    from opd.megatron.form import MegatronForm
    from opd.models.architecture import check_architecture, empty_model
    from opd.models.hf_folder import check_folder, read_config, scratch_config
    from opd.models.hf_weights import check_weights
    from opd.pipelines.stages.domains import student_tokenizer
    from opd.pipelines.stages.student import student_remarks

    model = recipe.model
    require_folders(model)
    models.tokenizer = student_tokenizer(recipe, domains.values())
    if model.path is not None:
        check_folder(Path(model.path), digests=models.weights)
        config = read_config(Path(model.path))
    else:
        config = scratch_config(model.config or {}, models.tokenizer)
    where = model.path or "model.config"
    check_architecture(config, where)
    module = empty_model(config, where)
    if model.path is not None:
        check_weights(Path(model.path))
        _look_at_values(Path(model.path), models)
    models.config = config
    if recipe.train.backend == "megatron":
        train = recipe.train
        MegatronForm.from_config(config).check_student(train.tensor_parallel, train.pipeline_parallel)
    models.student = _shape(config, module, model.lora)
    size = f"{models.student.parameters:,} parameters, vocabulary {id_count(models.tokenizer)}"
    return [
        Finding("ok", "student", f"{config.model_type}, {size}"),
        *_check_rows(
            "student", config, models.tokenizer, "set model.tokenizer to the one the model was trained with"
        ),
        *_check_bos("student", config, models.tokenizer),
        *(Finding("warning", "student", one) for one in student_remarks(recipe, models.tokenizer)),
        *_check_sampling("student", model.path, recipe.rollout),
        *_check_adapters(model.lora, models.student),
        *_check_sent(recipe, module),
    ]


def require_folders(model: ModelConfig) -> None:
    """Raise `ModelError` for a folder that `model` names and that is none."""
    from opd.models.hf_folder import folder_fault

    for key, what in (("path", "model"), ("tokenizer", "tokenizer")):
        folder = getattr(model, key)
        fault = None if folder is None else folder_fault(Path(folder), what)
        if fault is not None:
            raise ModelError(f"model.{key}: {fault}.")


def _look_at_values(folder: Path, models: Models) -> None:
    """Raise `CheckpointError` for weights that are no numbers, in as much of them as is read here."""
    from opd.models.hf_folder import described_in
    from opd.storage.weight_folder import check_numbers

    if not models.weights:
        return
    with doing(f"reading {folder}"):
        check_numbers(described_in(folder), _LOOKED_AT)


def _check_sent(recipe: Recipe, module: Any) -> list[Finding]:
    """Whether servers on which the student writes know its tensors by the names under which they are sent."""
    from opd.models.architecture import kept_otherwise
    from opd.pipelines.stages.served_engine import merged_because

    merged_because(recipe, lambda: module)
    found = kept_otherwise(module) if isinstance(recipe.rollout.engine, ServedEngineConfig) else None
    if found is None:
        return []
    detail = (
        f"its {found[0]} is one tensor where servers, as its files, have others ({found[1]}), so that they"
        " cannot be given its weights; set rollout.engine to {type: torch}"
    )
    return [Finding("error", "student", detail)]


def _check_adapters(lora: LoRAConfig | None, student: ModelShape) -> list[Finding]:
    if lora is None or lora.rank < student.narrowest:
        return []
    detail = (
        f"{lora.rank} is at least the smallest width of a layer with adapters ({student.narrowest}), where an"
        " adapter is larger than the weight that it changes; lower it"
    )
    return [Finding("warning", "model.lora.rank", detail)]


def _check_teacher(recipe: Recipe, name: str, source: str, models: Models) -> list[Finding]:
    from opd.models.architecture import check_architecture, empty_model
    from opd.models.hf_folder import check_folder, read_config
    from opd.models.hf_weights import check_weights
    from opd.teachers.skeleton import is_published, small_files

    here = recipe.teacher(name).type in ("local", "streamed")  # not in a server's own code
    whole = not is_published(source)
    if whole:
        check_folder(Path(source), digests=models.weights)
    with small_files(source) as folder:
        config = read_config(folder)
        if here:
            check_architecture(config, source)
        module = empty_model(config, source)
        if whole:
            check_weights(Path(source))
            _look_at_values(Path(source), models)
        models.teachers[name] = replace(_shape(config, module), **_stored(source))
        return _check_teacher_files(recipe, name, folder, config, models)


def _check_streams(recipe: Recipe, models: Models, lost: Collection[str]) -> list[Finding]:
    """Whether teachers that are to be streamed can be; of those that this run trains it would else be known
    once they are trained.
    """
    together: dict[str | None, list[str]] = {}
    given = recipe.given_teachers()
    for name in recipe.used_teachers():
        seen = name in given or models.student is not None  # what it is, or is to become
        if recipe.teacher(name).type == "streamed" and name not in lost and seen:
            together.setdefault(given.get(name), []).append(name)
    findings = []
    for source, names in together.items():
        own = [f"teachers.{name}.type" for name in names if name in recipe.teachers]
        keys = [*own, "distill.teachers"][: max(len(own), 1)]
        found = attempt(f"teacher {', '.join(names)}", lambda s=source: _stream_names(recipe, s, models))
        advice = (
            f"set {', '.join(keys)} to local, which keeps whole models in memory, if `opd sample` answers"
            " from this one, else choose another"
        )
        findings += [replace(one, detail=f"{one.detail.partition(';')[0]}; {advice}") for one in found]
    return findings


def _stream_names(recipe: Recipe, source: str | None, models: Models) -> list[Finding]:
    """Nothing, or what `check_streams` raises; `source` is `None` for what the student becomes."""
    from opd.models.hf_folder import read_config
    from opd.storage.published import PublishedModel
    from opd.teachers.published_adapter import PublishedAdapter, is_adapter
    from opd.teachers.skeleton import check_streams, is_published, small_files
    from opd.teachers.unpublished import stream_fault

    place = source or recipe.model.path
    if place is None:
        check_streams(models.config, "model.config")
    elif is_published(place):
        url = PublishedAdapter.open(place).base if is_adapter(place) else place
        with PublishedModel.open(url) as published, small_files(place) as folder:
            check_streams(read_config(folder), place, published.manifest.shapes)
    elif (fault := stream_fault(Path(place))) is not None:
        raise fault
    return []


def _check_teacher_files(recipe: Recipe, name: str, path: Path, config: Any, models: Models) -> list[Finding]:
    title, shape = f"teacher {name}", models.teachers[name]
    told = Finding("ok", title, f"{config.model_type}, {shape.parameters:,} parameters")
    if models.student is None:
        return [told]  # nothing to compare it with
    return [
        told,
        *_check_rows(title, config, models.tokenizer, _SAME_TOKENS),
        *_check_positions(title, config, recipe, models),
        *_check_tokenizer(title, path, recipe, models),
        *_check_sampling(title, str(path), recipe.rollout),
        *_check_weight_merges(title, recipe, config, models),
    ]


def _check_tokenizer(title: str, path: Path, recipe: Recipe, models: Models) -> list[Finding]:
    """Whether the teacher's scores are of the student's tokens: what differs, one sentence each."""
    from opd.models.tokenizers import compare, has_tokenizer, load_tokenizer

    if not has_tokenizer(path):
        detail = "its folder has no tokenizer, so nothing shows that its tokens are the student's"
        return [Finding("warning", title, f"{detail}; copy the tokenizer it was trained with there")]
    tokenizer = load_tokenizer(path)
    found = compare(models.tokenizer, tokenizer, models.stops)
    advice = _advice(recipe, tokenizer, models) if found.wrong else ""
    wrong = [Finding("error", title, f"{sentence}; {advice}") for sentence in found.wrong]
    harmless = [Finding("warning", title, sentence) for sentence in found.harmless]
    return wrong + harmless + _check_turns(title, path, tokenizer, recipe, models)


def _advice(recipe: Recipe, theirs: Any, models: Models) -> str:
    """What mends tokens that are not the teacher's. A student's weights know one tokenizer: only one that was
    named in its place, or a student that has learnt nothing yet, may get another.
    """
    from opd.models.tokenizers import compare, has_tokenizer, load_tokenizer

    model = recipe.model
    if model.path is None:
        if len(given_teachers(recipe)) == 1:
            return f"set model.tokenizer to the teacher's, which a new student can have, or {_SAME_TOKENS}"
    elif model.tokenizer is not None and has_tokenizer(Path(model.path)):
        own = compare(load_tokenizer(model.path), theirs, models.stops)
        if not own.wrong:
            return "leave out model.tokenizer: the tokenizer in model.path has the teacher's tokens"
    return _SAME_TOKENS


def _check_turns(title: str, path: Path, tokenizer: Any, recipe: Recipe, models: Models) -> list[Finding]:
    """Whether the teacher ends its responses, and writes prompts, as the student does."""
    from opd.models.tokenizers import stops_of

    findings, model = [], recipe.model
    ends = [stop for stop in stops_of(tokenizer, path) if stop.token_id not in models.stops]
    if ends:
        detail = f"it also ends its responses at {', '.join(map(str, ends))}, where the student's go on"
        findings.append(Finding("warning", title, f"{detail}; consider rollout.stop_ids"))
    if not models.chat:
        return findings
    theirs, ours = (written(each, model.chat_template_kwargs) for each in (tokenizer, models.tokenizer))
    if theirs != ours and ours is not None:
        what = "has no chat template" if theirs is None else "has another chat template"
        detail = f"it {what}: prompts are written with the student's; model.chat_template can name another"
        findings.append(Finding("warning", title, detail))
    return findings


def _check_stops(recipe: Recipe, models: Models) -> list[Finding]:
    """Where responses end, and whether that is where the chat template ends a turn."""
    from opd.pipelines.stages.student import model_stops

    tokenizer, title = models.tokenizer, "stop ids"
    stops = model_stops(recipe, tokenizer)
    models.stops = tuple(stop.token_id for stop in stops)
    ids = id_count(tokenizer)
    outside = [str(token) for token in models.stops if not 0 <= token < ids]
    if outside:
        detail = f"rollout.stop_ids {', '.join(outside)} lie outside of the tokenizer's {ids} tokens"
        return [Finding("error", title, f"{detail}; give ids that it has")]
    if recipe.base is not None and tokenizer.eos_token_id is None:
        detail = "the tokenizer has no end-of-sequence token, which the warm-up's demonstrations end with"
        return [Finding("error", title, f"{detail}; set its eos_token")]
    if not stops and not recipe.rollout.stop:
        detail = "neither tokenizer nor model has an end-of-sequence token, so no response could end"
        return [Finding("error", title, f"{detail}; set eos_token, or give rollout.stop_ids")]
    findings = [Finding("ok", title, "a response ends at " + ", ".join(map(str, stops)))] if stops else []
    if not models.chat or not tokenizer.chat_template:
        return findings
    template, strings = recipe.model.chat_template_kwargs, recipe.rollout.stop
    found = template_findings(tokenizer, template, models.stops, strings)
    return findings + found + check_sameness(tokenizer, template)


def _check_weight_merges(title: str, recipe: Recipe, config: Any, models: Models) -> list[Finding]:
    """Arithmetic on weights needs models of one configuration; distillation does not."""
    asked = [method for method in recipe.baselines.methods if method in WEIGHT_MERGES]
    ours, theirs = _form(models.config), _form(config)
    apart = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if not asked or not apart:
        return []
    detail = f"its configuration differs from the student's in {', '.join(apart)}"
    return [Finding("error", title, f"{detail}; take {', '.join(asked)} out of baselines.methods")]


def _form(config: Any) -> dict[str, Any]:
    """What of a configuration changes the function its weights compute."""
    form = config.get_text_config().to_dict()
    return {key: value for key, value in form.items() if not key.startswith("_") and key not in _NAMES}


def _stored(source: str) -> dict[str, Any]:
    """How much disk the weights of a teacher take where they are, and whether they were published."""
    from opd.models.hf_folder import described_in
    from opd.storage.object_store import folder_of
    from opd.storage.published import PublishedModel
    from opd.storage.weight_folder import read_headers
    from opd.teachers.published_adapter import PublishedAdapter, is_adapter
    from opd.teachers.skeleton import is_published

    if is_published(source):
        url = PublishedAdapter.open(source).base if is_adapter(source) else source
        with PublishedModel.open(url) as model:
            digest = model.manifest.digest if folder_of(url) is None else ""
            return {"stored": sum(model.manifest.sizes), "published": True, "digest": digest}
    folder = described_in(Path(source))  # of an adapter, its base: what it adds is small
    return {"stored": sum(tensor.nbytes for tensor in read_headers(folder).values())}


_FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def _shape(config: Any, module: Any, lora: LoRAConfig | None = None) -> ModelShape:
    """Counts the parameters of `module`, the model of `config` on the meta device."""
    import torch

    from opd.models.adapters import target_layers
    from opd.models.hf_folder import layer_windows
    from opd.models.long_sequence import layers_of
    from opd.rollout.forward import supports

    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    adapted = target_layers(module, lora.targets) if lora is not None else []
    linear = [module.get_submodule(name) for name in adapted]
    rank = lora.rank if lora is not None else 0
    layers = layers_of(module.get_decoder())
    decoded = [
        (name.rpartition(".")[2], part.weight.numel())
        for layer in (layers if supports(text, layers) else ())
        for name, part in layer.named_modules()
        if isinstance(part, torch.nn.Linear)
    ]
    return ModelShape(
        fused=sum(size for name, size in decoded if name in _FUSED),
        linear=sum(size for name, size in decoded if name not in _FUSED),
        adapters=sum(rank * (layer.in_features + layer.out_features) for layer in linear),
        adapted=sum(layer.weight.numel() for layer in linear),
        narrowest=min((min(layer.weight.shape) for layer in linear), default=0),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        hidden_size=text.hidden_size,
        windows=layer_windows(config),
        vocabulary=text.vocab_size,
        kv_width=heads * width,
    )


def _check_rows(title: str, config: Any, tokenizer: Any, advice: str) -> list[Finding]:
    """Whether a model has a row for every token of the student's tokenizer; more are cut off."""
    from opd.models.tokenizers import rows_fault

    fault = rows_fault(config, tokenizer)
    return [] if fault is None else [Finding("error", title, f"{fault}; {advice}")]


def _check_positions(title: str, config: Any, recipe: Recipe, models: Models) -> list[Finding]:
    """Whether a teacher can read, and when it is measured write, what the student may write."""
    from opd.models.hf_folder import angles_change_at, positions_of

    own, limit = [positions_of(each) for each in (config, models.config)], recipe.rollout.max_sequence
    limit_key, kept = "rollout.max_sequence", recipe.kept_by_servers
    theirs, ours = (limit if positions is None else min(positions - kept, limit) for positions in own)
    if theirs >= ours:
        return []
    beside = f" of which servers keep {kept}" if kept else ""
    detail = f"it has {own[0]} positions{beside}, but a prompt and its response may take {ours} tokens"
    if own[0] == angles_change_at(config):
        mend = f"beyond them its angles change (rope_type), for short texts beside it too: set {limit_key}"
        return [Finding("error", title, f"{detail}; {mend} to {theirs}")]
    return [Finding("warning", title, f"{detail}; set {limit_key} to {theirs} if they do")]


def _check_bos(title: str, config: Any, tokenizer: Any) -> list[Finding]:
    there, here = getattr(config.get_text_config(), "bos_token_id", None), tokenizer.bos_token_id
    if here is None or there is None or here == there:
        return []
    detail = f"config.json says bos_token_id {there}, the tokenizer {here}; the latter is used"
    return [Finding("warning", title, detail)]


def _check_sampling(title: str, path: str | None, rollout: RolloutConfig) -> list[Finding]:
    """A model tuned to be sampled in another way than the recipe's is another policy."""
    from opd.models.hf_folder import read_object

    file = Path(path) / "generation_config.json" if path is not None else None
    if file is None or not file.is_file():
        return []
    try:
        said = read_object(file)
    except CheckpointError:
        return [Finding("warning", title, f"{file} is not readable JSON; it is not used")]
    findings = []
    for name in ("temperature", "top_p", "top_k"):
        theirs, ours = said.get(name), getattr(rollout, name)
        if theirs is not None and theirs != ours:
            detail = f"its generation_config.json says {name} {theirs}, rollout.{name} is {ours:g}"
            advice = "both models are sampled and scored at the recipe's"
            findings.append(Finding("warning", title, f"{detail}; {advice}"))
    return findings


def check_prompts(recipe: Recipe, domain: Domain, tokenizer: Any) -> list[Finding]:
    """All prompts: do they need a chat template, do they fit? Of some, how long are they?"""
    from opd.pipelines.doctor.environments import check_tools_shown
    from opd.pipelines.stages.domains import prompt_room, template_arguments
    from opd.rollout.prompts import encode_prompt, fit

    title, policy = f"prompts {domain.name}", recipe.domains[domain.name].long_prompts
    prompts = [*domain.train, *domain.held_out]
    if any(prompt.messages is not None for prompt in prompts) and not tokenizer.chat_template:
        detail = (
            "prompts are messages but the tokenizer has no chat template; set model.chat_template to a file"
            " or a folder that has one, or model.tokenizer"
        )
        return [Finding("error", title, detail)]
    kwargs, room = template_arguments(recipe, domain.name), prompt_room(recipe, tokenizer, domain.name)
    fitted = fit(domain, room, policy, lambda prompt: encode_prompt(prompt, tokenizer, kwargs))
    prompts = [*fitted.domain.train, *fitted.domain.held_out]
    some = prompts[:: -(-len(prompts) // _MEASURED)]
    lengths = [len(encode_prompt(prompt, tokenizer, kwargs)) for prompt in some]
    if min(lengths, default=0) == 0:
        return [Finding("error", title, "a prompt has no tokens; every prompt needs at least one")]
    spread = f"{min(lengths)} to {max(lengths)} tokens" + (
        f" in {len(some)} of them" if len(some) < len(prompts) else ""
    )
    findings = [Finding("ok", title, f"{len(prompts)} prompts looked at, {spread}")]
    if fitted.long:
        findings.append(Finding("warning", title, fitted.sentence(room, policy)))
    return findings + check_tools_shown(recipe, domain, tokenizer)

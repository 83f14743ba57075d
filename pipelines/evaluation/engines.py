"""Choose each model's engine in an evaluation: the recipe's if it can load the model, else one here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from opd.models.causal_lm import CausalLM
from opd.models.hf_folder import check_folder, read_config
from opd.models.sharded import stored_weights
from opd.pipelines.stages.context import StageContext
from opd.pipelines.stages.student import (
    Writer,
    load_model,
    make_writer,
    open_engine,
    stop_strings,
    with_stop_strings,
)
from opd.rollout.fault_tolerant import FaultTolerantRollout
from opd.rollout.weight_sync import Weights, sync_weights

HERE = "embedded"
_TELLS_NOTHING = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "quantization_config",
    "dtype",
    "torch_dtype",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Keys of a configuration that do not change the function of the weights."""


@dataclass(slots=True)
class EvaluationEngines:
    """Engines for one model after the other.

    Args:
        context: The stage, whose helpers hold the recipe's engine if it is elsewhere.
        tokenizer: The run's.
        student: Folder of a model of the student's form, which engines elsewhere begin with.
    """

    context: StageContext
    tokenizer: PreTrainedTokenizerBase
    student: Path
    _elsewhere: FaultTolerantRollout | None = None
    _form: dict[str, Any] = field(default_factory=dict)
    _version: int = 0
    _with_weights: Writer | None = None
    """The engine of `engine_with`."""

    @property
    def engine_name(self) -> str:
        """Name of the recipe's engine in the results."""
        recipe = self.context.recipe
        if self.context.helpers is None:
            return HERE
        kind = recipe.rollout.engine.type
        return "ray" if kind == "torch" else kind

    def engine_for(self, path: Path) -> tuple[Writer, dict[str, str]]:
        """Return an engine with the model in `path`, and its entry in the results.

        The entry has the `engine`, and the reason if that is not the recipe's. Raises `RolloutError` if the
        recipe's engine does not hold the weights it got.
        """
        recipe = self.context.recipe
        if self.context.helpers is None:
            return self._open_embedded(path), {"engine": HERE}
        model = load_model(recipe, path, tokenizer=self.tokenizer, empty=True)
        if not self._form:
            student = model if path == self.student else load_model(recipe, self.student, empty=True)
            self._form = _weight_form(self.student, student)
        form = _weight_form(path, model)
        other = next((key for key in {**self._form, **form} if self._form.get(key) != form.get(key)), None)
        if other is not None:
            why = f"{other} is not the student's, so {self.engine_name} cannot hold it"
            return self._open_embedded(path), {"engine": HERE, "engine_why": why}
        if self._elsewhere is None:
            stops = stop_strings(recipe, self.tokenizer)
            self._elsewhere = FaultTolerantRollout(
                self.context.helpers.open_engines(self.student), stops=stops
            )
        self._version = max(self._version, self._elsewhere.policy_version) + 1
        check_folder(path)  # the weights must match their digests
        sync_weights(self._elsewhere, stored_weights(model), self._version)
        return self._elsewhere, {"engine": self.engine_name}

    def engine_with(self, weights: Weights) -> Writer:
        """Return an engine with `weights`, of the student's form, in place of the previous ones. It is the
        recipe's or one here. Raises `RolloutError` if it does not hold the weights it got.
        """
        recipe, helpers, engine = self.context.recipe, self.context.helpers, self._with_weights
        if engine is None and helpers is None:
            model = load_model(recipe, self.student, tokenizer=self.tokenizer)
            engine = make_writer(recipe, model, self.tokenizer)
        elif engine is None and helpers is not None:
            stops = stop_strings(recipe, self.tokenizer)
            engine = FaultTolerantRollout(helpers.open_engines(self.student), stops=stops)
        assert engine is not None
        self._with_weights = engine
        self._version = max(self._version, engine.policy_version) + 1
        sync_weights(engine, weights, self._version)
        return engine

    def _open_embedded(self, path: Path) -> Writer:
        """Open an engine in this process, shared with the other ranks."""
        recipe = self.context.recipe
        engine = open_engine(recipe, path, self.context.ranks, self.tokenizer)
        return with_stop_strings(recipe, engine, self.tokenizer)


def _weight_form(path: Path, model: CausalLM) -> dict[str, Any]:
    """Return the common form of models with exchangeable weights: setting or tensor -> value."""
    config = read_config(path).to_dict()
    settings = {f"its {key}": value for key, value in config.items() if key not in _TELLS_NOTHING}
    return settings | {f"its tensor {name}": tuple(tensor.shape) for name, tensor in model.weights()}

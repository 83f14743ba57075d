"""Recipes: YAML -> strict pydantic models. Importable without torch."""

from opd.config.distill import DistillConfig
from opd.config.recipe import BaselinesConfig, DomainConfig, EvaluationConfig, ModelConfig, Recipe
from opd.config.rl import (
    FullVocabularyKL,
    PolicyLossConfig,
    ReferenceKLConfig,
    SampledTokenK1,
    SampledTokenK2,
    TopKKL,
)
from opd.config.sft import SFTConfig, WarmupConfig
from opd.config.specialist import SpecialistConfig
from opd.config.teachers import TeacherConfig
from opd.config.train import (
    ActorResources,
    BatchConfig,
    LaunchConfig,
    LocalLaunch,
    OptimConfig,
    RayLaunch,
    RuntimeConfig,
    TrainConfig,
)
from opd.config.writing import RolloutConfig

__all__ = [
    "ActorResources",
    "BaselinesConfig",
    "BatchConfig",
    "DistillConfig",
    "DomainConfig",
    "EvaluationConfig",
    "FullVocabularyKL",
    "LaunchConfig",
    "LocalLaunch",
    "ModelConfig",
    "OptimConfig",
    "PolicyLossConfig",
    "RayLaunch",
    "Recipe",
    "ReferenceKLConfig",
    "RolloutConfig",
    "RuntimeConfig",
    "SFTConfig",
    "SampledTokenK1",
    "SampledTokenK2",
    "SpecialistConfig",
    "TeacherConfig",
    "TopKKL",
    "TrainConfig",
    "WarmupConfig",
]

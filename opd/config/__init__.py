"""Recipes: YAML -> strict pydantic models. Importable without torch."""

from opd.config.distill import DistillConfig
from opd.config.recipe import (
    ActorResources,
    BaselinesConfig,
    DomainConfig,
    EvaluationConfig,
    LaunchConfig,
    LocalLaunch,
    ModelConfig,
    RayLaunch,
    Recipe,
    RolloutConfig,
    RuntimeConfig,
    WarmupConfig,
)
from opd.config.rl import (
    FullVocabularyKL,
    PolicyLossConfig,
    ReferenceKLConfig,
    SampledTokenK1,
    SampledTokenK2,
    SpecialistConfig,
    TopKKL,
)
from opd.config.sft import SFTConfig
from opd.config.teachers import TeacherConfig
from opd.config.train import BatchConfig, OptimConfig, TrainConfig

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

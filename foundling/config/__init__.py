"""THE vocabulary: sections, presets, how a TARGET is resolved, the Manifest and the mixture."""

from foundling.config.errors import CheckpointError, ConfigError, DataError, RunError, UserError
from foundling.config.manifest import Manifest, ShardInfo
from foundling.config.sections import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    GuardConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TokenizerConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "ConfigError",
    "DataConfig",
    "DataError",
    "EvalConfig",
    "GuardConfig",
    "LogConfig",
    "Manifest",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RunConfig",
    "RunError",
    "ShardInfo",
    "TokenizerConfig",
    "TrainConfig",
    "UserError",
]

"""The run's config: the rooms' sections, nested; defaults < YAML < command line."""

from __future__ import annotations

from distrag.config.limits import check_config, check_ks, check_number
from distrag.config.read import build_parser, known_keys, read_config
from distrag.config.sections import (
    EncoderSection,
    LossSection,
    OptimConfig,
    RunConfig,
    TrainConfig,
    choose,
    choose_encoder,
    choose_loss,
    to_dict,
)

__all__ = [
    "EncoderSection",
    "LossSection",
    "OptimConfig",
    "RunConfig",
    "TrainConfig",
    "build_parser",
    "check_config",
    "check_ks",
    "check_number",
    "choose",
    "choose_encoder",
    "choose_loss",
    "known_keys",
    "read_config",
    "to_dict",
]

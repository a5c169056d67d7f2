"""Errors a user can cause. Each message is one sentence that names the value, the place and the remedy.

The command line prints the sentence and exits with status 2; library callers catch :class:`SagcError`.
"""

from __future__ import annotations


class SagcError(Exception):
    """Base of every error that bad input or a full machine can cause."""


class ConfigError(SagcError, ValueError):
    """A configuration value, key or option that cannot be used."""


class PromptError(SagcError, ValueError):
    """A prompt or its sampling parameters that the engine cannot serve."""


class ModelLoadError(SagcError, ValueError):
    """A model folder or file that is unknown, incomplete or damaged."""


class KVBudgetError(SagcError, ValueError):
    """A KV-cache budget that cannot hold even one of the requested sequences."""


class DivergenceError(SagcError, RuntimeError):
    """A policy whose logits are NaN or infinite, because its weights are or because it overflows."""


class DatasetError(SagcError, ValueError):
    """A prompt source that is missing or malformed; the message names file and line."""


class RewardError(SagcError, RuntimeError):
    """A reward function that cannot be loaded or used at all (a single failing completion is not an error)."""


class CheckpointError(SagcError, RuntimeError):
    """A run directory or checkpoint that cannot be written, read or continued."""


class BackendError(SagcError, RuntimeError):
    """A backend that was asked for by name and is not there."""

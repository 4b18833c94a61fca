"""What several cases share."""

from __future__ import annotations

from model.conftest import cache, tiny_models, worker

__all__ = ["cache", "tiny_models", "worker"]  # the model layer's fixtures, for the cases that need a model

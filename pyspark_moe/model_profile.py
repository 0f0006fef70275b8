"""The profile file of a model on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from .fingerprint import model_fingerprint
from .model_info import ModelInfo
from .routing_profile import ProfileFile, profile_path


def user_cache_folder() -> Path:
    """$XDG_CACHE_HOME when it is an absolute path, else ~/.cache."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path("~/.cache").expanduser()


def model_profile(model: ModelInfo, cache_folder: Path | None = None, path: str | os.PathLike[str] | None = None) -> ProfileFile:
    """The profile file of a model; nothing is read of it yet. `cache_folder`: for models in read-only folders; default None:
    user_cache_folder(). `path`: another file, default None: the model's own. Reads the model's headers and samples. Raises
    ModelNotFoundError, ModelFileError."""
    own = profile_path(model.path, cache_folder or user_cache_folder()) if path is None else Path(path).expanduser()
    return ProfileFile(own, model_fingerprint(model), {layer.layer: layer.n_expert for layer in model.layers})

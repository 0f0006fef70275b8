"""The small model that comes with the package."""

from __future__ import annotations

import math
from pathlib import Path

from .config import GIB
from .errors import BuildError
from .model_info import read_model_info

_MODEL, _DRAFT = "target-Q4_K_M.gguf", "draft-q8_0.gguf"


def _find(name: str) -> Path:
    import pyspark_moe

    for folder in pyspark_moe.__path__:
        path = Path(folder) / "data" / name
        if path.is_file():
            return path
    raise BuildError(f"The demo model '{name}' is missing from the package: install the package again.")


def path() -> Path:
    """The model file. Raises BuildError."""
    return _find(_MODEL)


def draft_path() -> Path:
    """Its draft model. Raises BuildError."""
    return _find(_DRAFT)


def half_of_experts_gib() -> float:
    """A budget of half of the bytes of its experts, GiB."""
    half = read_model_info(path()).expert_bytes // 2
    return math.floor(half / GIB * 1e6) / 1e6  # six digits make a flag one can read, and write again

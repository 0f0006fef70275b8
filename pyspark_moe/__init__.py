"""Expert residency for mixture-of-experts models that are bigger than the memory they should run from.

`dflash_server` is llama-server with `--spark`; `SparkLlama` is llama_cpp.Llama with `spark=`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config import SparkConfig
from .errors import SparkError

if TYPE_CHECKING:
    from .llm import SparkLlama
    from .store import Store

__version__ = "0.1.0"
__all__ = ["ResidencyPlan", "LayerPlan", "SparkConfig", "SparkError", "SparkLlama", "Store", "read_model_info"]

# Imported when first used: `import pyspark_moe` must load no library.
_LAZY = {
    "LayerPlan": "placement",
    "ResidencyPlan": "placement",
    "SparkLlama": "llm",
    "Store": "store",
    "read_model_info": "model_info",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

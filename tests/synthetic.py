"""Tiny models for tests, made once per session by scripts/make_synthetic_moe.py's library."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from synthetic_moe.shape import PRESETS, TINY, Shape  # noqa: E402
from synthetic_moe.writer import write_adapter, write_model  # noqa: E402

DEMO = ROOT / "pyspark_moe" / "data" / "target-Q4_K_M.gguf"

__all__ = ["DEMO", "PRESETS", "TINY", "ModelFolder", "Shape", "models"]


class ModelFolder:
    """Makes models in one folder, each at its first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, preset: str, *, split_tensors: int = 0, **changes: object) -> Path:
        """The file of a preset; "demo" is the trained model in the package. split_tensors: tensors of a shard."""
        if preset == "demo":
            return DEMO
        name = "-".join([preset, *(f"{k}{v}" for k, v in sorted(changes.items()))])
        name += f"-by{split_tensors}" if split_tensors else ""
        path = self.folder / f"{name}.gguf"
        made = sorted(self.folder.glob(f"{name}-00001-of-*.gguf")) if split_tensors else [path] * path.exists()
        if made:
            return made[0]
        return write_model(path, PRESETS[preset].with_changes(**changes), DEMO, split_max_tensors=split_tensors).path

    def adapter(self, preset: str) -> Path:
        """A LoRA adapter on the experts of a preset."""
        path = self.folder / f"{preset}-lora.gguf"
        return path if path.exists() else write_adapter(path, self.get(preset))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """The session's tiny models; modules that import this fixture share the files."""
    folder = tmp_path_factory.getbasetemp() / "synthetic-models"
    folder.mkdir(exist_ok=True)
    return ModelFolder(folder)

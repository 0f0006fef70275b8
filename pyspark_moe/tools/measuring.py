"""Options that calibrate, validate and bench share."""

from __future__ import annotations

import functools
import hashlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..config import SparkConfig
from ..errors import ProfileError
from ..measure.limits import Limits
from ..model_info import ModelInfo
from ..model_profile import model_profile
from ..routing_profile import read_profile


def residency_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--spark-ram, --spark-vram, --spark-slots, --spark-force, checked as the server checks them; given as `spark`."""

    @click.option("--spark-ram", type=float, metavar="GiB", help="RAM that expert weights may occupy.")
    @click.option("--spark-vram", type=float, metavar="GiB", help="GPU memory that the process may use.")
    @click.option("--spark-slots", type=int, metavar="N", help="Fast slots in every layer instead of a budget.")
    @click.option("--spark-force", is_flag=True, help="Start although the machine seems to have too little memory.")
    @functools.wraps(command)
    def wrapped(*args: Any, spark_ram: float | None, spark_vram: float | None, spark_slots: int | None, spark_force: bool, **kwargs: Any) -> Any:
        spark = SparkConfig(mode="on", ram_gib=spark_ram, vram_gib=spark_vram, slots=spark_slots, force=spark_force, profile="none")
        return command(*args, spark=spark, **kwargs)

    return wrapped


def limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--timeout, --stall, given as `limits`; --json, given as `json_file`."""

    @click.option("--timeout", type=float, metavar="S", help="End all of it after so long, with exit code 124. [default: no limit]")
    @click.option("--stall", default=600.0, show_default=True, type=float, metavar="S", help="End it, with exit code 124, after so long without a sign of life.")
    @click.option("--json", "json_file", metavar="FILE", type=click.Path(path_type=Path), help="Write the result there after every step, partial ones too.")
    @functools.wraps(command)
    def wrapped(*args: Any, timeout: float | None, stall: float, **kwargs: Any) -> Any:
        return command(*args, limits=Limits(timeout, stall), **kwargs)

    return wrapped


def gpu_layers_default(asked: int | None) -> int:
    """Layers on a GPU: as asked, else all where this build and machine have a GPU, else none."""
    if asked is not None:
        return asked
    from .._native import build_info, devices

    return -1 if build_info().get("cuda_enabled") and devices() else 0


def words(text: str | tuple[str, ...]) -> tuple[str, ...]:
    """A command or flags as typed in a shell."""
    return text if isinstance(text, tuple) else tuple(shlex.split(text))


def file_digest(path: Path) -> str:
    """SHA-256 of a file, 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def given_profile(info: ModelInfo, given: str) -> Path:
    """The file that --profile names, "auto" the model's own. Raises ProfileError unless it is one of this model."""
    file = model_profile(info, path=None if given == "auto" else given)
    try:
        found = read_profile(file.path)
        if found is None:
            raise ProfileError("there is no such file; `pyspark-moe calibrate` makes one")
        if found.fingerprint != file.fingerprint:
            raise ProfileError("it is of another model, or of another version of this one")
    except ProfileError as e:
        raise ProfileError(f"--profile '{file.path}' cannot be used: {e}.") from None
    except OSError as e:
        raise ProfileError(f"--profile '{file.path}' cannot be read: {e.strerror or e}.") from None
    return file.path

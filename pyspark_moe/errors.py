"""What can go wrong, one class per thing a person can do something about. Every message is a sentence with the value
that was wrong and what to do. Imports nothing from the package."""

from __future__ import annotations


class SparkError(Exception):
    """Base of every error of this package. `exit_code`: what our programs end with after it."""

    exit_code = 1


class ConfigError(SparkError, ValueError):
    """A flag or argument has a value that cannot be used."""


class ModelFileError(SparkError, ValueError):
    """A model file is not the GGUF it claims to be: damaged, cut off, or something else. Also a ValueError, which is what
    llama_cpp.Llama raises."""


class ModelNotFoundError(ModelFileError):
    """A model file does not exist or may not be read."""


class ModelLoadError(SparkError, ValueError):
    """llama.cpp could not load a model or make a context for it; the text ends with the reason from its log. Also a
    ValueError, which is what llama_cpp.Llama raises."""


class NoExpertsError(SparkError):
    """The model has no routed experts (it is dense), so there is nothing to place."""


class BudgetError(SparkError):
    """A memory budget cannot be met.

    `smallest_bytes` is the smallest budget that works for this model, or None when no budget would.
    """

    def __init__(self, message: str, smallest_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class MachineMemoryError(SparkError):
    """The machine or its control group has less memory available than the configuration needs."""


class DraftError(SparkError):
    """A draft model cannot serve the target model."""


class ProfileError(SparkError, ValueError):
    """A routing profile is damaged, is of another model or of a newer format, or has values that cannot be."""


class ProfileWriteError(SparkError, OSError):
    """A routing profile could not be saved; the file on disk, if there is one, is the old one."""


class HistoryError(SparkError):
    """Agent history was asked for, and there is none where it was looked for."""


class CorpusError(SparkError, ValueError):
    """A corpus of conversations cannot be written, or not be read: it is damaged, cut off, or something else."""


class TraceError(SparkError, ValueError):
    """A routing trace cannot be written, or not be read: it is damaged, cut off, too large, or something else."""


class MeasurementError(SparkError):
    """What was measured cannot be used: texts that should be the same differ, or nothing was measured."""


class EngineError(SparkError):
    """A program under measurement ended, or answered something else than it should; the text ends with its last log lines."""


class RefusedError(EngineError):
    """dflash_server refused to start, with a sentence of its own, for example since a budget cannot be kept."""


class StalledError(SparkError):
    """A time-out: a program under measurement did nothing for too long, or the time for all of it is over."""

    exit_code = 124  # as timeout(1) has it


class BuildError(SparkError):
    """The native libraries are missing, or do not belong to this version of the package or of llama-cpp-python."""


class NativeError(SparkError):
    """Base of failures that libspark_moe reports; `status` is the value of enum spark_status."""

    status = 0


class InvalidArgumentError(NativeError, ValueError):
    """A value given to libspark_moe is out of range; nothing changed."""

    status = 1


class ReadError(NativeError, OSError):
    """The operating system refused to read a model file."""

    status = 5


class OutOfMemoryError(NativeError, MemoryError):
    """Memory or address space was refused."""

    status = 6


class StateError(NativeError, RuntimeError):
    """The call does not fit the life cycle, for example a plan after loading or a closed store; nothing changed."""

    status = 7


class InternalError(NativeError):
    """A bug in libspark_moe: please report it with the message."""

    status = 8


# enum spark_status -> class. The first four are the same facts that the Python layer reports under these names.
BY_STATUS: dict[int, type[SparkError]] = {
    1: InvalidArgumentError,
    2: ModelNotFoundError,
    3: ModelFileError,
    4: NoExpertsError,
    5: ReadError,
    6: OutOfMemoryError,
    7: StateError,
    8: InternalError,
}

"""Reads the header of a GGUF file: scalar metadata, short numeric arrays, and the list of tensors.

Why not gguf.GGUFReader: it turns every token of the vocabulary into Python objects (seconds for 250,000 tokens), maps the
whole file, and meets a damaged file with whatever exception comes first. Here long arrays are stepped over, every size is
checked against the bytes that are left before it is used, and every fault is a ModelFileError. Quantisation block sizes
still come from the gguf package.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from gguf.constants import GGML_QUANT_SIZES

from .errors import ModelFileError, ModelNotFoundError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_KEPT = 4096  # elements of a numeric array that are kept; per-layer arrays are far shorter, vocabularies far longer
_SIZES = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}

Value = int | float | bool | str | tuple


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: name, shape as GGUF writes it (fastest dimension first), ggml type number, bytes, place in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    n_bytes: int
    offset: int  # from the start of the file


@dataclass(frozen=True)
class GgufHeader:
    path: Path
    file_bytes: int
    metadata: dict[str, Value] = field(repr=False)
    tensors: tuple[TensorEntry, ...] = field(repr=False)


class _Cursor:
    """Reads from a file and never past what is there."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.file, self.path, self.size, self.at = file, path, size, 0

    def fail(self, what: str) -> ModelFileError:
        return ModelFileError(f"'{self.path}' is not a usable GGUF file: {what}. Download it again.")

    def take(self, n: int) -> bytes:
        if n > self.size - self.at:
            raise self.fail(f"its header is cut off or damaged ({n} bytes expected at byte {self.at}, the file has {self.size})")
        data = self.file.read(n)
        if len(data) != n:
            raise self.fail(f"it became shorter while it was read (at byte {self.at})")
        self.at += n
        return data

    def skip(self, n: int) -> None:
        if n > self.size - self.at:
            raise self.fail(f"its header is cut off or damaged ({n} bytes expected at byte {self.at}, the file has {self.size})")
        self.at += n
        self.file.seek(self.at)

    def number(self, fmt: str) -> int | float | bool:
        return struct.unpack(fmt, self.take(struct.calcsize(fmt)))[0]

    def count(self, smallest: int, what: str) -> int:
        """A count of things that take at least `smallest` bytes each."""
        n = int(self.number("<Q"))
        if n * smallest > self.size - self.at:
            raise self.fail(f"it claims {n} {what}, more than the file can hold")
        return n

    def string(self) -> str:
        return self.take(int(self.number("<Q"))).decode("utf-8", errors="replace")

    def value(self, kind: int, keep: bool = False) -> Value | None:
        """A metadata value; None for an array that is stepped over, which `keep` prevents. Strings in arrays stay bytes."""
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.fail(f"metadata of unknown type {kind} at byte {self.at}")
        element = int(self.number("<I"))
        if element == _STRING:
            n_strings = self.count(8, "strings")
            if keep:
                return tuple(self.take(int(self.number("<Q"))) for _ in range(n_strings))
            for _ in range(n_strings):
                self.skip(int(self.number("<Q")))
            return None
        if element not in _SCALARS:
            raise self.fail(f"an array of unknown type {element} at byte {self.at}")
        width = struct.calcsize(_SCALARS[element])
        n = self.count(width, "array elements")
        if n > _MAX_KEPT and not keep:
            self.skip(n * width)
            return None
        return struct.unpack(f"<{n}{_SCALARS[element][1:]}", self.take(n * width))


def _tensor_bytes(cursor: _Cursor, name: str, shape: tuple[int, ...], type_id: int) -> int | None:
    """Bytes of a tensor; None for a type that the gguf package does not know yet."""
    n_elements = 1
    for n in shape:
        n_elements *= n
    if type_id not in _SIZES:
        return None
    block, block_bytes = _SIZES[type_id]
    if not shape or shape[0] % block:
        raise cursor.fail(f"tensor '{name}' has {shape[:1]} elements in a row, not a multiple of its block of {block}")
    return n_elements // block * block_bytes


def read_gguf_header(path: str | Path, keep: frozenset[str] = frozenset()) -> GgufHeader:
    """Reads one file (one shard of a split model). `keep`: keys whose long arrays are wanted, e.g. the vocabulary.

    Raises ModelNotFoundError, ModelFileError.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise ModelNotFoundError(f"'{path}' {'is not a file' if path.exists() else 'does not exist'}.")
        size = path.stat().st_size
        with path.open("rb") as file:
            return _read(_Cursor(file, path, size), keep)
    except OSError as e:
        raise ModelNotFoundError(f"'{path}' cannot be read: {e.strerror or e}.") from e


def _read(cursor: _Cursor, keep: frozenset[str] = frozenset()) -> GgufHeader:
    if cursor.size < 24 or cursor.take(4) != b"GGUF":
        raise cursor.fail("it does not begin with the GGUF mark")
    version = int(cursor.number("<I"))
    if not 2 <= version <= 3:
        raise cursor.fail(f"GGUF version {version} is not supported (2 and 3 are)")
    n_tensors = cursor.count(24, "tensors")
    n_metadata = cursor.count(12, "metadata entries")
    metadata: dict[str, Value] = {}
    for _ in range(n_metadata):
        key = cursor.string()
        value = cursor.value(int(cursor.number("<I")), key in keep)
        if value is not None:
            metadata[key] = value
    raw = []
    for _ in range(n_tensors):
        name = cursor.string()
        n_dims = int(cursor.number("<I"))
        if not 1 <= n_dims <= _MAX_DIMS:
            raise cursor.fail(f"tensor '{name[:64]}' has {n_dims} dimensions")
        shape = tuple(int(cursor.number("<Q")) for _ in range(n_dims))
        raw.append((name, shape, int(cursor.number("<I")), int(cursor.number("<Q"))))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}")
    data_at = -(-cursor.at // alignment) * alignment
    ends = sorted({offset for _, _, _, offset in raw} | {max(0, cursor.size - data_at)})
    next_offset = dict(zip(ends, ends[1:]))
    tensors = []
    for name, shape, type_id, offset in raw:
        n_bytes = _tensor_bytes(cursor, name, shape, type_id)
        if n_bytes is None:
            n_bytes = next_offset.get(offset, offset) - offset  # up to the next tensor: exact but for the padding
        if data_at + offset + n_bytes > cursor.size:
            raise ModelFileError(
                f"'{cursor.path}' is cut off: tensor '{name[:64]}' ends at byte {data_at + offset + n_bytes}, "
                f"the file at {cursor.size}. Download it again."
            )
        tensors.append(TensorEntry(name, shape, type_id, n_bytes, data_at + offset))
    return GgufHeader(cursor.path, cursor.size, metadata, tuple(tensors))

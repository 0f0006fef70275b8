"""Routing traces: which experts every token selected, layer by layer, as a file that describes itself.

    8 bytes   magic
    4, n      length of the header, and the header: JSON, everything a reader has to know about the model
    records   one for each layer of each step: step, layer, tokens, bytes that follow, their CRC-32; then the expert ids,
              uint16 [n_tokens, n_used], and, when they were recorded, the router's inputs [n_tokens, n_embd]
    footer    steps, records, whether the size cap ended it, CRC-32 of all before: a file without it is not complete

All numbers are little endian. A step is one computation of the model (a micro-batch); its layers come in rising order. The
reader computes what every record must have from the header and refuses what differs, so no size in a file is trusted.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from .errors import TraceError

MAGIC = b"SPKTRACE"
VERSION = 1
GIB = 1024**3
_RECORD = struct.Struct("<4sIIIQI")  # tag, step, index of the layer, tokens, bytes, CRC-32
_FOOTER = struct.Struct("<4sIQII")  # tag, steps, records, is_capped, CRC-32 of the file before
_RECORD_TAG, _FOOTER_TAG = b"STEP", b"DONE"
_MAX_HEADER = 4 << 20
_MAX_LAYERS = 4096
_MAX_EXPERTS = 1 << 15  # ids are kept as int16
_MAX_STEP_TOKENS = 1 << 20
_HIDDEN_BYTES = {"": 0, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class TraceHeader:
    """What a trace says about its model.

    layers    block numbers of the layers with experts
    n_expert  experts of each of them; n_used: experts a token selects; n_embd: length of a router's input
    strides   bytes of one expert in each tensor of each layer, () when unknown: what a slot costs
    hidden    dtype of the recorded router inputs, "float16" or "float32"; "": none were
    model     its name; fingerprint: as fingerprint.py makes it, "" when unknown
    """

    layers: tuple[int, ...]
    n_expert: tuple[int, ...]
    n_used: int
    n_embd: int
    strides: tuple[tuple[int, ...], ...] = ()
    hidden: str = ""
    model: str = ""
    fingerprint: str = ""

    @property
    def bytes_per_token(self) -> int:
        """Of one layer."""
        return 2 * self.n_used + self.n_embd * _HIDDEN_BYTES[self.hidden]

    def check(self) -> None:
        """Raises ValueError, with the end of a sentence, for a header that no model can have."""
        integers = (*self.layers, *self.n_expert, self.n_used, self.n_embd, *(s for strides in self.strides for s in strides))
        if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 48 for n in integers):
            raise ValueError("its header has a number that cannot be")
        if not 1 <= len(self.layers) <= _MAX_LAYERS or len(self.n_expert) != len(self.layers) or len(self.strides) not in (0, len(self.layers)):
            raise ValueError("its header does not describe its layers")
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError("its layers are not in rising order")
        if not 1 <= self.n_used <= min(self.n_expert) or max(self.n_expert) > _MAX_EXPERTS:
            raise ValueError(f"a token cannot use {self.n_used} of {min(self.n_expert)} experts")
        if self.hidden not in _HIDDEN_BYTES:
            raise ValueError(f"router inputs of type '{self.hidden[:32]}' are not known")


@dataclass(frozen=True)
class Routing:
    """Selections in memory.

    experts  int16 [n_tokens, n_layers, n_used]; -1 where a layer did not compute a token (the last layer of a prompt
             computes only the tokens whose logits are wanted)
    steps    int64 [n_steps + 1]: tokens steps[i] to steps[i + 1] were computed together
    n_expert experts of each layer
    """

    experts: np.ndarray
    steps: np.ndarray
    n_expert: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        return self.experts.shape[0]

    @property
    def n_layers(self) -> int:
        return self.experts.shape[1]

    @property
    def n_used(self) -> int:
        return self.experts.shape[2]

    def counts(self) -> np.ndarray:
        """Uses of each expert, int64 [n_layers, n_expert of the largest layer]."""
        width = max(self.n_expert)
        result = np.zeros((self.n_layers, width), dtype=np.int64)
        for i in range(self.n_layers):
            ids = self.experts[:, i].ravel()
            result[i] = np.bincount(ids[ids >= 0], minlength=width)
        return result

    def part(self, first: int, last: int) -> Routing:
        """Tokens first to last - 1, with the steps cut there."""
        inside = self.steps[(self.steps > first) & (self.steps < last)]
        steps = np.concatenate([[first], inside, [last]]) - first
        return Routing(self.experts[first:last], steps.astype(np.int64), self.n_expert)

    def in_steps_of(self, n_tokens: int) -> Routing:
        """The same tokens computed n_tokens at a time: 1 is decoding."""
        steps = np.append(np.arange(0, self.n_tokens, n_tokens, dtype=np.int64), self.n_tokens)
        return replace(self, steps=steps)


@dataclass(frozen=True)
class Trace:
    """A trace that was read: everything but the router inputs, which stay in the file. is_capped: the size cap ended it."""

    path: Path
    header: TraceHeader
    routing: Routing
    is_capped: bool
    _hidden: Mapping[int, list[tuple[int, int, int]]] = field(default_factory=dict, repr=False)  # layer: (token, tokens, byte)

    def hidden(self, index: int) -> np.ndarray:
        """Inputs of the router of the layer with this index in header.layers, [n_tokens, n_embd] of the recorded dtype; NaN
        where the layer did not compute a token. Raises TraceError when none were recorded, or the file has changed."""
        if not self.header.hidden:
            raise TraceError(f"'{self.path}' has no router inputs: record it again with --hidden.")
        dtype, n_embd = np.dtype(self.header.hidden).newbyteorder("<"), self.header.n_embd
        result = np.full((self.routing.n_tokens, n_embd), np.nan, dtype=dtype)
        with _opened(self.path) as file:
            for first, n_tokens, at in self._hidden.get(index, []):
                file.seek(at)
                data = file.read(n_tokens * n_embd * dtype.itemsize)
                if len(data) != n_tokens * n_embd * dtype.itemsize:
                    raise TraceError(f"'{self.path}' became shorter since it was read: record it again.")
                result[first : first + n_tokens] = np.frombuffer(data, dtype=dtype).reshape(n_tokens, n_embd)
        return result


class TraceWriter:
    """Writes a trace that appears under its name, whole, when `with` ends without an error; otherwise nothing is left.

    max_bytes  the file ends before the step that would pass it, and says so (is_capped); what comes after is dropped.
    A trace of that name is replaced, and nothing else is. Raises TraceError when the file cannot be written.
    """

    def __init__(self, path: str | Path, header: TraceHeader, max_bytes: int = 4 * GIB) -> None:
        header.check()
        self.path, self.header, self.max_bytes = Path(path), header, max_bytes
        self.is_capped = False
        self.n_tokens = self.n_steps = self.n_records = self.n_bytes = 0
        self._step: list[bytes] = []
        self._step_tokens = 0
        self._last_index = -1
        self._crc = 0
        self._check_place()
        self._temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.tmp")
        self._file: IO[bytes] | None = None

    def _check_place(self) -> None:
        if not self.path.name:
            raise TraceError("A trace needs the name of a file.")
        try:
            is_trace = stat.S_ISREG(os.stat(self.path).st_mode)
            if is_trace:
                with open(self.path, "rb") as file:
                    is_trace = file.read(len(MAGIC)) in (b"", MAGIC)
        except FileNotFoundError:
            return
        except OSError as e:
            raise self._unwritable(e) from None
        if not is_trace:
            raise TraceError(f"'{self.path}' is in the way and is left as it is: it is no trace. Name another file.")

    def __enter__(self) -> TraceWriter:
        try:
            self._file = open(self._temporary, "xb")
        except OSError as e:
            raise self._unwritable(e) from None
        text = json.dumps({"format": "pyspark_moe routing trace", "version": VERSION, **asdict(self.header)}, ensure_ascii=False).encode()
        self._write(MAGIC + struct.pack("<I", len(text)) + text)
        return self

    def add(self, index: int, experts: np.ndarray, hidden: np.ndarray | None = None) -> None:
        """Selections of the layer with this index in header.layers: integers [n_tokens, n_used]; hidden: the router's inputs
        [n_tokens, n_embd], when the header says so. A layer that is not above the one before begins a new step."""
        n_tokens = len(experts)
        if experts.shape != (n_tokens, self.header.n_used) or not 0 < n_tokens <= _MAX_STEP_TOKENS or not 0 <= index < len(self.header.layers):
            raise ValueError(f"selections of shape {experts.shape} for layer index {index}")
        if experts.min() < 0 or experts.max() >= self.header.n_expert[index]:
            raise ValueError(f"an expert that block {self.header.layers[index]} does not have")
        payload = experts.astype("<u2").tobytes()
        if self.header.hidden:
            if hidden is None or hidden.shape != (n_tokens, self.header.n_embd):
                raise ValueError("no router inputs of the shape in the header")
            with np.errstate(over="ignore"):  # beyond half precision: infinite, and said so by its reader
                payload += hidden.astype(np.dtype(self.header.hidden).newbyteorder("<")).tobytes()
        if index <= self._last_index:
            self._end_step()
        if self.is_capped:
            return
        self._last_index = index
        self._step_tokens = max(self._step_tokens, n_tokens)
        self._step.append(_RECORD.pack(_RECORD_TAG, self.n_steps, index, n_tokens, len(payload), zlib.crc32(payload)) + payload)

    def _end_step(self) -> None:
        data, n_records = b"".join(self._step), len(self._step)
        self._step, self._last_index = [], -1
        if not data or self.is_capped:
            return
        if self.n_bytes + len(data) + _FOOTER.size > self.max_bytes:
            self.is_capped = True
            return
        self._write(data)
        self.n_records += n_records
        self.n_tokens += self._step_tokens
        self.n_steps += 1
        self._step_tokens = 0

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        try:
            self._file.write(data)
        except OSError as e:
            raise self._unwritable(e) from None
        self._crc = zlib.crc32(data, self._crc)
        self.n_bytes += len(data)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        file = self._file
        assert file is not None
        try:
            with file:
                if kind is None:
                    self._end_step()
                    self._write(_FOOTER.pack(_FOOTER_TAG, self.n_steps, self.n_records, self.is_capped, self._crc))
                    file.flush()
                    os.fsync(file.fileno())
            if kind is None:
                os.replace(self._temporary, self.path)
        except OSError as e:
            raise self._unwritable(e) from None
        finally:
            self._file = None
            with suppress(OSError):
                os.unlink(self._temporary)

    def _unwritable(self, error: OSError) -> TraceError:
        return TraceError(f"'{self.path}' cannot be written: {error.strerror or error}.")


def _opened(path: Path) -> IO[bytes]:
    try:
        return open(path, "rb")
    except OSError as e:
        raise TraceError(f"'{path}' cannot be read: {e.strerror or e}.") from None


def read_trace(path: str | Path, max_bytes: int = 16 * GIB) -> Trace:
    """Reads a trace and checks all of it. Raises TraceError for what is no trace, is damaged or not complete, is of a newer
    format, or has more than `max_bytes`, on disk or in memory."""
    path = Path(path)
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise TraceError(f"'{path}' is not a regular file: give a trace that `pyspark-moe trace` wrote.")
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise TraceError(f"'{path}' has {size} bytes, and {max_bytes} is the most that is read: record less, for example without --hidden.")
        try:
            return _Reader(file, path, size, max_bytes).read()
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            raise TraceError(f"'{path}' is not a usable routing trace: {e}. Record it again with `pyspark-moe trace`.") from None
        except OSError as e:
            raise TraceError(f"'{path}' cannot be read: {e.strerror or e}.") from None


class _Reader:
    """Reads a file in order and never past what is there. Every fault is a ValueError with the end of a sentence."""

    def __init__(self, file: IO[bytes], path: Path, size: int, max_bytes: int) -> None:
        self.file, self.path, self.size, self.max_bytes = file, path, size, max_bytes
        self.at = self.crc = 0

    def take(self, n: int) -> bytes:
        if n > self.size - self.at:
            raise ValueError(f"it is cut off ({n} bytes expected at byte {self.at}, the file has {self.size})")
        data = self.file.read(n)
        if len(data) != n:
            raise ValueError("it became shorter while it was read")
        self.at += n
        return data

    def take_counted(self, n: int) -> bytes:
        data = self.take(n)
        self.crc = zlib.crc32(data, self.crc)
        return data

    def header(self) -> TraceHeader:
        if self.take_counted(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin like one")
        (n,) = struct.unpack("<I", self.take_counted(4))
        if n > _MAX_HEADER:
            raise ValueError(f"its header claims {n} bytes")
        try:
            value: dict[str, Any] = json.loads(self.take_counted(n).decode("utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError):
            raise ValueError("its header is damaged") from None
        if not isinstance(value, dict) or value.get("format") != "pyspark_moe routing trace":
            raise ValueError("its header does not say that it is one")
        if value.get("version") != VERSION:
            raise ValueError(f"its format version is {value.get('version')!r:.32}, and this program reads {VERSION}")
        texts = {key: value[key] for key in ("hidden", "model", "fingerprint")}
        lists = {key: value[key] for key in ("layers", "n_expert", "strides")}
        if not all(isinstance(t, str) for t in texts.values()) or not all(isinstance(l, list) for l in lists.values()):
            raise ValueError("its header has a value of the wrong kind")
        strides = tuple(tuple(s) for s in lists["strides"])
        header = TraceHeader(tuple(lists["layers"]), tuple(lists["n_expert"]), value["n_used"], value["n_embd"], strides, **texts)
        header.check()
        return header

    def read(self) -> Trace:
        header = self.header()
        ids: list[tuple[int, int, np.ndarray]] = []  # first token, layer, experts
        hidden: dict[int, list[tuple[int, int, int]]] = {}
        starts, step_records, last_index = [0], [], -1  # step_records: layer, experts, place of the hidden states
        while True:
            tag = self.take(4)
            if tag == _FOOTER_TAG:
                break
            if tag != _RECORD_TAG:
                raise ValueError(f"there is no record at byte {self.at - 4}")
            _, step, index, n_tokens, n_bytes, crc = _RECORD.unpack(tag + self.take(_RECORD.size - 4))
            n_steps = len(starts) - 1
            if step == n_steps + 1 and step_records:
                self._close_step(starts, step_records, ids, hidden)
                last_index, n_steps = -1, n_steps + 1
            if step != n_steps or not last_index < index < len(header.layers):
                raise ValueError(f"its records are out of order before byte {self.at}")
            if not 0 < n_tokens <= _MAX_STEP_TOKENS or n_bytes != n_tokens * header.bytes_per_token:
                raise ValueError(f"the record before byte {self.at} claims {n_tokens} tokens in {n_bytes} bytes")
            if (starts[-1] + n_tokens) * len(header.layers) * header.n_used * 2 > self.max_bytes:
                raise ValueError(f"its selections need more than {self.max_bytes} bytes of memory")
            place = self.at + 2 * n_tokens * header.n_used
            payload = self.take(n_bytes)
            if zlib.crc32(payload) != crc:
                raise ValueError(f"the record before byte {self.at} is damaged")
            self.crc = zlib.crc32(payload, zlib.crc32(_RECORD.pack(tag, step, index, n_tokens, n_bytes, crc), self.crc))
            experts = np.frombuffer(payload, dtype="<u2", count=n_tokens * header.n_used).reshape(n_tokens, header.n_used)
            if experts.max() >= header.n_expert[index]:
                raise ValueError(f"the record before byte {self.at} names an expert that block {header.layers[index]} does not have")
            step_records.append((index, experts.astype(np.int16), place))
            last_index = index
        if step_records:
            self._close_step(starts, step_records, ids, hidden)
        _, n_steps, n_records, is_capped, crc = _FOOTER.unpack(_FOOTER_TAG + self.take(_FOOTER.size - 4))
        if self.at != self.size:
            raise ValueError(f"something follows its end at byte {self.at}")
        if (n_steps, n_records, crc) != (len(starts) - 1, len(ids), self.crc) or is_capped > 1:
            raise ValueError("its end does not belong to it")
        table = np.full((starts[-1], len(header.layers), header.n_used), -1, dtype=np.int16)
        for first, index, experts in ids:
            table[first : first + len(experts), index] = experts
        routing = Routing(table, np.array(starts, dtype=np.int64), header.n_expert)
        return Trace(self.path, header, routing, bool(is_capped), hidden if header.hidden else {})

    @staticmethod
    def _close_step(
        starts: list[int], records: list[tuple[int, np.ndarray, int]], ids: list[tuple[int, int, np.ndarray]], hidden: dict[int, list[tuple[int, int, int]]]
    ) -> None:
        """Places a step's records. A layer with fewer tokens than others has the last ones: those whose logits are wanted."""
        end = starts[-1] + max(len(experts) for _, experts, _ in records)
        for index, experts, place in records:
            ids.append((end - len(experts), index, experts))
            hidden.setdefault(index, []).append((end - len(experts), len(experts), place))
        starts.append(end)
        records.clear()

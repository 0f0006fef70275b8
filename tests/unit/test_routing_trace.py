"""Traces: what is written is read, and nothing else is."""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_moe.errors import TraceError
from pyspark_moe.routing_trace import MAGIC, Routing, TraceHeader, TraceWriter, read_trace

HEADER = TraceHeader(layers=(1, 2, 5), n_expert=(8, 8, 6), n_used=2, n_embd=4, strides=((10, 12),) * 3, hidden="float16", model="tiny – ü", fingerprint="ab" * 32)


def write(path: Path, header: TraceHeader = HEADER, n_steps: int = 3, seed: int = 0, **options: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """A trace whose steps have 1 to 5 tokens; the last layer has fewer. Returns what was added."""
    rng = np.random.default_rng(seed)
    added = []
    with TraceWriter(path, header, **options) as writer:
        for _ in range(n_steps):
            n = int(rng.integers(1, 6))
            for index in range(len(header.layers)):
                tokens = 1 if index == len(header.layers) - 1 else n
                experts = np.array([rng.choice(header.n_expert[index], header.n_used, replace=False) for _ in range(tokens)])
                hidden = rng.standard_normal((tokens, header.n_embd)).astype(np.float32)
                writer.add(index, experts, hidden if header.hidden else None)
                added.append((index, experts, hidden))
    return added


@settings(max_examples=25)
@given(st.integers(0, 6), st.integers(0, 1000), st.sampled_from(["", "float16", "float32"]))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, n_steps: int, seed: int, hidden: str) -> None:
    path = tmp_path_factory.mktemp("trace") / "a.trace"
    header = replace(HEADER, hidden=hidden)
    added = write(path, header, n_steps, seed)
    trace = read_trace(path)
    assert trace.header == header and not trace.is_capped and len(trace.routing.steps) == n_steps + 1
    assert [p.name for p in path.parent.iterdir()] == ["a.trace"]
    for index in range(3):
        mine = [(experts, states) for i, experts, states in added if i == index]
        ids = trace.routing.experts[:, index]
        assert np.array_equal(ids[ids[:, 0] >= 0], np.concatenate([e for e, _ in mine]) if mine else np.empty((0, 2)))
        if hidden:
            states = trace.hidden(index)
            assert np.array_equal(np.isnan(states[:, 0]), ids[:, 0] < 0)
            expected = np.concatenate([s for _, s in mine]) if mine else np.empty((0, 4))
            assert np.allclose(states[ids[:, 0] >= 0], expected, atol=2e-3 if hidden == "float16" else 0)
    if not hidden:
        with pytest.raises(TraceError, match="--hidden"):
            trace.hidden(0)


def test_a_layer_with_fewer_tokens_has_the_last_ones(tmp_path: Path) -> None:
    added = write(tmp_path / "a", n_steps=1, seed=3)
    routing = read_trace(tmp_path / "a").routing
    assert routing.n_tokens == len(added[0][1]) > 1
    assert (routing.experts[:-1, 2] == -1).all() and routing.experts[-1, 2].tolist() == added[2][1][0].tolist()


def test_every_cut_and_every_changed_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write(path, n_steps=2)
    data = path.read_bytes()
    for n in range(len(data)):
        path.write_bytes(data[:n])
        with pytest.raises(TraceError, match="Record it again"):
            read_trace(path)
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        with pytest.raises(TraceError):
            read_trace(path)
    path.write_bytes(data + b"x")
    with pytest.raises(TraceError, match="something follows"):
        read_trace(path)


@settings(max_examples=60)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("trace") / "a"
    for content in (data, MAGIC + data):
        path.write_bytes(content)
        with pytest.raises(TraceError):
            read_trace(path)


def header_file(**changes: object) -> bytes:
    """A whole file without steps whose header was changed; a value of None leaves the key out."""
    value = {"format": "pyspark_moe routing trace", "version": 1, "layers": [1], "n_expert": [4], "n_used": 2, "n_embd": 4, "strides": [],
             "hidden": "", "model": "", "fingerprint": "", **changes}  # fmt: skip
    text = json.dumps({k: v for k, v in value.items() if v is not None}).encode()
    data = MAGIC + struct.pack("<I", len(text)) + text
    return data + struct.pack("<4sIQII", b"DONE", 0, 0, 0, zlib.crc32(data))


@pytest.mark.parametrize(
    "changes, error",
    [
        ({}, None),
        ({"version": 2}, "format version is 2"),
        ({"version": "x" * 1000}, "format version"),
        ({"format": "other"}, "does not say"),
        ({"layers": []}, "layers"),
        ({"layers": [1, 2]}, "layers"),
        ({"layers": [2, 1], "n_expert": [4, 4]}, "rising"),
        ({"layers": [True]}, "cannot be"),
        ({"layers": "1"}, "wrong kind"),
        ({"n_expert": [-4]}, "cannot be"),
        ({"n_expert": [4.5]}, "cannot be"),
        ({"n_expert": [1 << 40]}, "cannot use"),
        ({"n_used": 0}, "cannot use"),
        ({"n_used": 5}, "cannot use"),
        ({"n_used": None}, "n_used"),
        ({"n_embd": 1 << 60}, "cannot be"),
        ({"strides": [3]}, "usable"),
        ({"strides": [[1], [2]]}, "layers"),
        ({"hidden": "float128"}, "float128"),
        ({"model": 7}, "wrong kind"),
    ],
)
def test_headers_that_cannot_be(tmp_path: Path, changes: dict[str, object], error: str | None) -> None:
    path = tmp_path / "a"
    path.write_bytes(header_file(**changes))
    if error is None:
        assert read_trace(path).routing.n_tokens == 0
        return
    with pytest.raises(TraceError, match=error):
        read_trace(path)


@pytest.mark.parametrize("n_tokens, n_bytes", [(0, 0), (1, 1 << 60), (1 << 31, (1 << 31) * 4), (1, 8), (4_000_000_000, 4)])
def test_sizes_in_records_are_not_trusted(tmp_path: Path, n_tokens: int, n_bytes: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(header_file()[:-24] + struct.pack("<4sIIIQI", b"STEP", 0, 0, n_tokens, n_bytes, 0) + bytes(64))
    with pytest.raises(TraceError, match="claims"):
        read_trace(path)


def test_a_large_header_or_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(MAGIC + struct.pack("<I", 1 << 30) + bytes(100))
    with pytest.raises(TraceError, match="claims 1073741824 bytes"):
        read_trace(path)
    write(path)
    with pytest.raises(TraceError, match="is the most"):
        read_trace(path, max_bytes=path.stat().st_size - 1)
    with pytest.raises(TraceError, match="of memory"):  # small on disk, large in memory: one layer of very many
        many = TraceHeader(tuple(range(4000)), (8,) * 4000, 2, 4)
        with TraceWriter(path, many) as writer:
            writer.add(0, np.tile([0, 1], (50, 1)))
        read_trace(path, max_bytes=path.stat().st_size)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, error in (("pipe", "regular"), ("missing", "cannot be read"), (".", "regular")):
        with pytest.raises(TraceError, match=error):
            read_trace(tmp_path / name)


def test_the_cap_ends_after_a_whole_step(tmp_path: Path) -> None:
    write(tmp_path / "a", n_steps=20)
    whole = (tmp_path / "a").stat().st_size
    write(tmp_path / "b", n_steps=20, max_bytes=whole // 2)
    a, b = read_trace(tmp_path / "a").routing, read_trace(tmp_path / "b")
    assert (tmp_path / "b").stat().st_size <= whole // 2 and b.is_capped
    n = b.routing.n_tokens
    assert 0 < n < a.n_tokens and n in a.steps and np.array_equal(b.routing.experts, a.experts[:n])


def test_a_failed_recording_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        with TraceWriter(tmp_path / "a", HEADER) as writer:
            writer.add(0, np.array([[0, 1]]), np.zeros((1, 4)))
            raise KeyError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TraceError, match="cannot be written"):
        with TraceWriter(tmp_path / "no" / "a", HEADER):
            pass


@pytest.mark.parametrize("content", [b"GGUF\3\0\0\0", b"SPK", b"text"])
def test_a_trace_replaces_no_other_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="is no trace"):
        TraceWriter(path, HEADER)
    assert path.read_bytes() == content
    os.mkfifo(tmp_path / "pipe")
    for place, error in ((tmp_path, "is no trace"), (tmp_path / "pipe", "is no trace"), (Path(""), "name of a file"), (path / "a", "cannot be written")):
        with pytest.raises(TraceError, match=error):
            TraceWriter(place, HEADER)
    write(tmp_path / "a")
    write(tmp_path / "a", seed=1)


@pytest.mark.parametrize("index, experts", [(0, [[0, 8]]), (0, [[-1, 2]]), (2, [[0, 6]]), (3, [[0, 1]]), (0, [[0, 1, 2]]), (0, np.empty((0, 2), int))])
def test_the_writer_refuses_what_the_reader_would(tmp_path: Path, index: int, experts: object) -> None:
    with pytest.raises(ValueError):
        with TraceWriter(tmp_path / "a", replace(HEADER, hidden="")) as writer:
            writer.add(index, np.asarray(experts))
    assert list(tmp_path.iterdir()) == []


def test_parts_and_steps_of_routing() -> None:
    experts = np.arange(10)[:, None, None] % 4 + np.zeros((1, 1, 1), int)
    routing = Routing(experts.astype(np.int16), np.array([0, 4, 8, 10]), (4,))
    part = routing.part(2, 9)
    assert part.steps.tolist() == [0, 2, 6, 7] and part.experts.ravel().tolist() == [2, 3, 0, 1, 2, 3, 0]
    assert routing.in_steps_of(4).steps.tolist() == [0, 4, 8, 10] and routing.in_steps_of(1).steps.tolist() == list(range(11))
    assert routing.counts().tolist() == [[3, 3, 2, 2]]

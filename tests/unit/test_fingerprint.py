"""Fingerprints of models: what changes them, what does not, and where a model's profile is."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_files import F32, MOE_METADATA, MOE_TENSORS, string, string_array, u16, u32, write_gguf

from pyspark_moe.errors import ModelFileError
from pyspark_moe.fingerprint import model_fingerprint
from pyspark_moe.gguf_header import read_gguf_header
from pyspark_moe.model_info import read_model_info
from pyspark_moe.model_profile import model_profile, user_cache_folder

ROUTERS = [(f"blk.{block}.ffn_gate_inp.weight", (32, 4), F32, 32 * 4 * 4) for block in (1, 2)]
TENSORS = MOE_TENSORS + ROUTERS


def fingerprint(path: Path) -> str:
    return model_fingerprint(read_model_info(path))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", MOE_METADATA, TENSORS)


def test_it_is_hexadecimal_and_does_not_change(model: Path) -> None:
    first = fingerprint(model)
    assert len(first) == 64 and int(first, 16) and first == fingerprint(model)
    # Of this very file. It changes when the rule changes: then every profile of every user is set aside, so think twice.
    assert first == "b9cb0029640e8254e182f7ec147b642ad0d36b60bde56f2d3143d23a63646011"


@pytest.mark.parametrize("name", [tensor[0] for tensor in TENSORS])
def test_changed_weights_change_it(name: str, model: Path) -> None:
    """Small tensors are looked at as a whole; of larger ones 4 KiB are."""
    before = fingerprint(model)
    tensor = next(t for t in read_gguf_header(model).tensors if t.name == name)
    data = bytearray(model.read_bytes())
    data[tensor.offset : tensor.offset + tensor.n_bytes : 2048] = b"\x01" * -(-tensor.n_bytes // 2048)
    model.write_bytes(data)
    assert fingerprint(model) != before


@pytest.mark.parametrize("key", ["testarch.expert_used_count", "testarch.attention.key_length"])
def test_changed_numbers_of_the_architecture_change_it(key: str, tmp_path: Path, model: Path) -> None:
    changed = write_gguf(tmp_path / "changed.gguf", {**MOE_METADATA, key: u32(3)}, TENSORS)
    assert fingerprint(changed) != fingerprint(model)


def test_changed_types_and_shapes_change_it(tmp_path: Path, model: Path) -> None:
    renamed = [(name.replace("gate_inp", "gate_other"), *rest) for name, *rest in TENSORS]
    transposed = [(name, (16, 32) if name == "blk.0.ffn_up.weight" else shape, *rest) for name, shape, *rest in TENSORS]
    for tensors in (renamed, transposed, TENSORS[1:], MOE_TENSORS):
        assert fingerprint(write_gguf(tmp_path / "changed.gguf", MOE_METADATA, tensors)) != fingerprint(model)


def test_name_template_vocabulary_text_and_place_do_not_change_it(tmp_path: Path, model: Path) -> None:
    metadata = {**MOE_METADATA, "general.name": string("other"), "tokenizer.chat_template": string("{{ x }}")}
    metadata["tokenizer.ggml.tokens"] = string_array(["b"] * 100)
    (tmp_path / "folder").mkdir()
    assert fingerprint(write_gguf(tmp_path / "folder" / "other.gguf", metadata, TENSORS)) == fingerprint(model)


def test_a_split_model_has_that_of_the_whole(tmp_path: Path, model: Path) -> None:
    data = model.read_bytes()
    for number, tensors in enumerate((TENSORS[:4], TENSORS[4:])):
        metadata = {**(MOE_METADATA if number == 0 else {}), "split.count": u16(2), "split.no": u16(number)}
        write_gguf(tmp_path / f"m-0000{number + 1}-of-00002.gguf", metadata, tensors)
    assert data == model.read_bytes()
    assert fingerprint(tmp_path / "m-00001-of-00002.gguf") == fingerprint(model)
    second = tmp_path / "m-00002-of-00002.gguf"
    second.write_bytes(second.read_bytes()[:-64] + b"\x01" * 64)  # the end of the last router
    assert fingerprint(tmp_path / "m-00001-of-00002.gguf") != fingerprint(model)


def test_a_model_that_shrinks_or_goes_meanwhile_is_an_error(model: Path) -> None:
    info = read_model_info(model)
    whole = model.read_bytes()
    model.write_bytes(whole[:-4096])
    with pytest.raises(ModelFileError, match="cut off"):
        model_fingerprint(info)
    model.unlink()
    with pytest.raises(ModelFileError, match="does not exist"):
        model_fingerprint(info)


def test_the_profile_of_a_model(model: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = model_profile(read_model_info(model))
    assert profile.path == model.with_name("model.gguf.spark.csv") and profile.shape == {1: 4, 2: 4}
    assert profile.fingerprint == fingerprint(model) and not profile.path.exists()
    assert user_cache_folder() == own_home / ".cache"
    for value in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert user_cache_folder() == own_home / ".cache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache_folder() == own_home / ".cache"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_cache_folder() == Path("/elsewhere")

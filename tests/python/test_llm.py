"""SparkLlama against the parent class and against itself at other residencies."""
from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pyspark_moe
from pyspark_moe import SparkConfig, SparkLlama, errors
from pyspark_moe._native import prepare_llama_cpp
from pyspark_moe.routing_profile import read_profile
from transcripts import write_history

llama_cpp = prepare_llama_cpp()
DATA = Path(pyspark_moe.__file__).parent / "data"
TARGET = DATA / "target-Q4_K_M.gguf"
PROMPT = "def add(a, b):\n"
COMMON = {"n_ctx": 512, "n_threads": 2, "verbose": False}


def make(**kwargs: object) -> SparkLlama:
    return SparkLlama(kwargs.pop("path", TARGET), **(COMMON | kwargs))


def write(llm: SparkLlama, n: int = 24) -> str:
    return llm(PROMPT, max_tokens=n, temperature=0)["choices"][0]["text"]


@pytest.fixture(scope="module")
def reference() -> str:
    """Greedy text with every expert resident in the same layout."""
    with make(spark=True) as llm:
        return write(llm)


@pytest.mark.parametrize("config", [SparkConfig(slots=0), SparkConfig(slots=8), SparkConfig(ram_gib=0.015), SparkConfig(slots=6, policy="chaos")])
def test_same_text_at_any_residency(config: SparkConfig, reference: str) -> None:
    with make(spark=config) as llm:
        assert write(llm) == reference
        stats = llm.spark.stats()
        assert llm.spark.is_active and stats.misses > 0 and stats.uses == stats.hits + stats.misses


def test_logits_are_those_of_the_all_resident_run() -> None:
    def logits(spark: object) -> np.ndarray:
        with make(spark=spark, logits_all=True) as llm:
            llm.eval(llm.tokenize(PROMPT.encode()))
            return llm._scores.copy()

    whole, partly = logits(True), logits(SparkConfig(slots=5))
    assert np.isfinite(whole).all() and whole.std() > 0.1
    assert np.array_equal(whole.view(np.uint32), partly.view(np.uint32))


def test_off_is_the_parent_class() -> None:
    with make(spark=False) as llm:
        parent = llama_cpp.Llama(str(TARGET), **COMMON)
        assert write(llm) == write(parent)
        parent.close()
        assert not llm.spark.is_active and llm.spark.stats().uses == 0 and llm.spark.layers == ()
        with pytest.raises(errors.StateError, match="spark=True"):
            llm.spark.residency(1)


def test_auto_leaves_a_model_that_fits_alone() -> None:
    with make() as llm:
        assert not llm.spark.is_active and "fits" in llm.spark.why


def test_figures() -> None:
    with make(spark=SparkConfig(slots=8)) as llm:
        write(llm)
        assert llm.spark.wait_idle(10)
        assert llm.spark.layers == tuple(range(1, 8))
        slots = llm.spark.residency(3)
        assert slots.shape == (32,) and slots.dtype == np.int32
        used = slots[slots >= 0]
        assert len(set(used)) == len(used) <= 8 and used.max() < 8
        total, layers = llm.spark.stats(), llm.spark.layer_stats()
        assert sum(s.hits for s in layers) == total.hits and total.n_fast == 7 * 8
        assert sum(int(llm.spark.counts(layer).sum()) for layer in llm.spark.layers) == total.uses
        llm.spark.reset_stats()
        assert llm.spark.stats().uses == 0
        with pytest.raises(errors.ConfigError, match="Block 0 has no experts; .* 1, 2"):
            llm.spark.residency(0)


def test_streaming_chat_and_embeddings(reference: str) -> None:
    with make(spark=SparkConfig(slots=8)) as llm:
        parts = [c["choices"][0]["text"] for c in llm(PROMPT, max_tokens=24, temperature=0, stream=True)]
        assert len(parts) > 2 and "".join(parts) == reference
        messages = [{"role": "user", "content": "hello"}]
        whole = llm.create_chat_completion(messages, max_tokens=8, temperature=0)["choices"][0]["message"]["content"]
        streamed = llm.create_chat_completion(messages, max_tokens=8, temperature=0, stream=True)
        assert whole and "".join(c["choices"][0]["delta"].get("content") or "" for c in streamed) == whole
    vectors = []
    for spark in (True, SparkConfig(slots=5)):
        with make(spark=spark, embedding=True) as llm:
            vectors.append(np.asarray(llm.create_embedding("hello world")["data"][0]["embedding"]))
    assert vectors[0].size and np.isfinite(vectors[0]).all() and np.array_equal(*vectors)


def test_close_in_any_order() -> None:
    first, second = make(spark=SparkConfig(slots=4)), make(spark=SparkConfig(slots=9))
    text, view = write(second, 4), first.spark
    first.close()
    first.close()
    assert write(second, 4) == text
    with pytest.raises(errors.StateError, match="closed"):
        first("x")
    with pytest.raises(errors.StateError, match="closed"):
        view.stats()
    second.close()
    del first, second
    gc.collect()


def test_close_under_an_exception() -> None:
    with pytest.raises(KeyError), make(spark=SparkConfig(slots=4)) as llm:
        for _ in llm(PROMPT, max_tokens=8, stream=True):
            raise KeyError("in the middle")
    with pytest.raises(errors.StateError):
        llm("x")


def test_collected_without_close() -> None:
    llm = make(spark=SparkConfig(slots=4))
    store = llm._store
    del llm
    gc.collect()
    assert store is not None and store.is_closed


def test_two_threads_two_models(reference: str) -> None:
    texts: dict[int, str] = {}

    def run(slots: int) -> None:
        with make(spark=SparkConfig(slots=slots), n_threads=1) as llm:
            texts[slots] = write(llm)

    threads = [threading.Thread(target=run, args=(slots,)) for slots in (3, 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {3: reference, 12: reference}


def test_pickled_copy_loads_again(reference: str) -> None:
    with make(spark=SparkConfig(slots=8)) as llm:
        with pickle.loads(pickle.dumps(llm)) as copy:
            assert copy.spark.is_active and copy.spark.stats().n_fast == 56
            assert write(copy) == reference


def broken(folder: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
    path = folder / name
    path.write_bytes(change(TARGET.read_bytes()))
    return path


def test_failures_say_why(tmp_path: Path) -> None:
    cut = broken(tmp_path, "cut.gguf", lambda data: data[: len(data) // 2])
    unknown = broken(tmp_path, "unknown.gguf", lambda data: data.replace(b"laguna", b"lagune"))
    cases: list[tuple[dict, type[Exception], str]] = [
        ({"path": tmp_path / "absent.gguf"}, errors.ModelNotFoundError, "does not exist"),
        ({"path": cut, "spark": True}, errors.ModelFileError, "cut off"),
        ({"path": cut, "spark": False}, errors.ModelLoadError, "llama.cpp says:\n.*(corrupted|bounds)"),
        ({"path": unknown, "spark": False}, errors.ModelLoadError, "unknown model architecture: 'lagune'"),
        ({"type_v": 8, "spark": True}, errors.ModelLoadError, "quantized V cache"),
        ({"lora_path": str(tmp_path / "absent.lora")}, errors.ModelLoadError, "No such file"),
        ({"spark": SparkConfig(ram_gib=0.001)}, errors.BudgetError, "smallest budget that works"),
        ({"spark": "yes"}, errors.ConfigError, "'yes'"),
    ]
    for kwargs, kind, text in cases:
        with pytest.raises(kind, match=f"(?s){text}") as caught:
            make(**kwargs)
        assert isinstance(caught.value, errors.SparkError)
    for kwargs in ({"path": tmp_path / "absent.gguf"}, {"path": cut, "spark": False}, {"path": cut}):
        with pytest.raises(ValueError):  # what code written for llama_cpp.Llama catches
            make(**kwargs)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    def callback() -> int | None:
        function, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
        llama_cpp.llama_log_get(ctypes.byref(function), ctypes.byref(data))
        return ctypes.cast(function, ctypes.c_void_p).value

    def state() -> tuple:
        return callback(), llama_cpp.llama_model_default_params().tensor_buft_overrides, len(os.listdir("/proc/self/fd"))

    make(spark=SparkConfig(slots=4)).close()
    before = state()
    make(spark=SparkConfig(slots=4)).close()
    with pytest.raises(errors.ModelLoadError):
        make(spark=False, path=broken(tmp_path, "unknown.gguf", lambda data: data.replace(b"laguna", b"lagune")))
    gc.collect()
    assert state() == before


def test_a_model_learns_from_its_traffic(tmp_path: Path) -> None:
    model = shutil.copy(TARGET, tmp_path / "model.gguf")
    config = SparkConfig(slots=12)
    with SparkLlama(model, spark=config, n_ctx=512, verbose=False) as llm:
        text = llm("def f(x):", max_tokens=16, temperature=0)["choices"][0]["text"]
        assert llm.spark.save_profile()
        llm.spark.reset_stats()
        llm("class A:", max_tokens=16, temperature=0)
    first = read_profile(tmp_path / "model.gguf.spark.csv")
    assert first is not None and first.tokens >= 32 and first.starts == 1
    with SparkLlama(model, spark=config, n_ctx=512, verbose=False) as llm:
        hottest = {layer: set(np.argsort(-uses, kind="stable")[:12]) for layer, uses in first.counts.items()}
        assert {layer: set(np.flatnonzero(llm.spark.residency(layer) >= 0)) for layer in llm.spark.layers} == hottest
        assert llm("def f(x):", max_tokens=16, temperature=0)["choices"][0]["text"] == text
    second = read_profile(tmp_path / "model.gguf.spark.csv")
    assert second is not None and second.tokens > first.tokens and second.starts == 2


def test_a_model_reads_history_where_it_is_told_to(tmp_path: Path) -> None:
    model = shutil.copy(TARGET, tmp_path / "model.gguf")
    write_history(tmp_path, n_projects=1, n_sessions=2)
    config = SparkConfig(slots=12, history=str(tmp_path / ".claude"), history_tokens=500, history_seconds=120)
    with SparkLlama(model, spark=config, n_ctx=1024, verbose=False) as llm:
        assert llm.spark.stats().uses == 0
        assert all((llm.spark.residency(layer) >= 0).sum() == 12 for layer in llm.spark.layers)
        assert llm("def f(x):", max_tokens=4, temperature=0)["choices"][0]["text"]
    profile = read_profile(tmp_path / "model.gguf.spark.csv")
    assert profile is not None and profile.sources["history"] == 500


def test_a_profile_can_be_turned_off(tmp_path: Path) -> None:
    model = shutil.copy(TARGET, tmp_path / "model.gguf")
    with SparkLlama(model, spark=SparkConfig(slots=12, profile="none"), n_ctx=512, verbose=False) as llm:
        llm("def f(x):", max_tokens=4)
        assert not llm.spark.save_profile()
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_log_levels_are_ggmls(capfd: pytest.CaptureFixture[str]) -> None:
    """llama-cpp-python's own table is one off: it shows warnings and drops errors when verbose is False."""
    logger = importlib.import_module("llama_cpp._logger")
    logger.set_verbose(False)
    for level, text in ((1, b"debug\n"), (2, b"info\n"), (3, b"warning\n"), (4, b"error\n")):
        logger.llama_log_callback(level, text, None)
    assert capfd.readouterr().err == "error\n"

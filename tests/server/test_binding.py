"""The binding to libspark_moe: what does not belong together is refused, and the life cycle of a store holds."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pyspark_moe import _native, errors
from pyspark_moe.placement import LayerPlan, ResidencyPlan
from pyspark_moe.store import Store

from harness import TARGET


def header() -> str:
    return (_native.library_directory() / "spark_moe.h").read_text()


def library() -> Path:
    return _native.library_directory() / "libspark_moe.so"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("uint64_t read_ns; ", "", "struct spark_stats has"),
        ("#define SPARK_API_VERSION 4", "#define SPARK_API_VERSION 5", "its API version is 4, the header's 5"),
        ("int32_t n_ctx; ", "uint64_t n_ctx; uint64_t more; ", "struct spark_server_model has"),
        ("uint64_t expert_bytes; //", "uint64_t expert_bytes; uint64_t more; //", "struct spark_layer_info has 24 bytes in the library and 32"),
        ("struct spark_draft_params", "struct spark_draft_parameters", "has no struct spark_draft_params"),
        ("/* cffi:end */", "", "lacks its markers"),
        ("size_t       spark_sizeof(int32_t which);", "size_t spark_sizeof(", "cannot be parsed"),
    ],
)
def test_a_header_of_another_library_is_refused(old: str, new: str, message: str) -> None:
    text = header()
    changed = text.replace(old, new)
    assert changed != text, "the header has changed: adapt this test"
    with pytest.raises(errors.BuildError, match=message):
        _native.open_library(changed, library())


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_text("no library")
    with pytest.raises(errors.BuildError, match="cannot be loaded"):
        _native.open_library(header(), tmp_path / "lib.so")


def test_every_structure_is_checked() -> None:
    body = _native.declarations(header())
    declared = [line.split()[1] for line in body.splitlines() if line.startswith("struct ") and line.endswith("{")]
    assert set(declared) == set(_native._STRUCTS)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_importing_the_package_loads_nothing() -> None:
    done = run_python(
        "import os, sys; before = dict(os.environ); import pyspark_moe; "
        "assert 'llama_cpp' not in sys.modules and 'cffi' not in sys.modules and dict(os.environ) == before"
    )
    assert done.returncode == 0, done.stderr


def test_llama_cpp_that_came_first_with_other_libraries_is_refused() -> None:
    done = run_python(
        "import sys, types; m = types.ModuleType('llama_cpp.llama_cpp'); m._base_path = '/elsewhere'; "
        "sys.modules['llama_cpp.llama_cpp'] = m\n"
        "from pyspark_moe import _native, errors\n"
        "try: _native.prepare_llama_cpp()\n"
        "except errors.BuildError as e: print(e)"
    )
    assert "Import pyspark_moe first" in done.stdout, done.stderr


def test_another_version_of_llama_cpp_python_is_refused() -> None:
    done = run_python(
        "from pyspark_moe import _native, errors\n"
        "_native.build_info = lambda: {'llama_cpp_python': '0.0.1'}\n"
        "try: _native.prepare_llama_cpp()\n"
        "except errors.BuildError as e: print(e)"
    )
    assert "pip install llama-cpp-python==0.0.1" in done.stdout, done.stderr


def test_a_store_before_loading() -> None:
    with Store(TARGET) as store:
        assert [layer.layer for layer in store.layers] == list(range(1, 8))
        assert {(layer.n_expert, layer.n_tensors) for layer in store.layers} == {(32, 3)}
        assert not store.is_loaded and store.overrides_address > 0
        store.set_plan(ResidencyPlan((LayerPlan(1, 4, 1, (3, 2)),)))
        assert [s.n_fast for s in store.layer_stats()] == [4, 0, 0, 0, 0, 0, 0]
        stats = store.stats()
        assert stats.layer == -1 and stats.uses == 0 and stats.hit_rate is None and stats.as_dict()["hit_rate"] is None
        assert store.counts(0).shape == (32,) and store.wait_idle(1)


@pytest.mark.parametrize(
    "plan",
    [
        ResidencyPlan((LayerPlan(1, 33),)),
        ResidencyPlan((LayerPlan(1, -1),)),
        ResidencyPlan((LayerPlan(0, 1),)),
        ResidencyPlan((LayerPlan(1, 2, 0, (5, 5)),)),
        ResidencyPlan((LayerPlan(1, 2, 0, (32,)),)),
        ResidencyPlan((LayerPlan(1, 2, 2, (1,)),)),
        ResidencyPlan((LayerPlan(1, 1, 0, (1, 2)),)),
    ],
    ids=str,
)
def test_a_bad_plan_is_refused_and_changes_nothing(plan: ResidencyPlan) -> None:
    with Store(TARGET) as store:
        store.set_plan(ResidencyPlan((LayerPlan(1, 7),)))
        with pytest.raises(errors.InvalidArgumentError):
            store.set_plan(plan)
        assert store.layer_stats()[0].n_fast == 7


def test_a_closed_store_says_so() -> None:
    store = Store(TARGET)
    store.close()
    store.close()
    assert store.is_closed and "closed" in repr(store)
    for call in (store.stats, store.layer_stats, store.reset_stats, lambda: store.residency(0), lambda: store.overrides_address):
        with pytest.raises(errors.StateError, match="is closed"):
            call()


def test_closing_while_others_read() -> None:
    store = Store(TARGET)
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while True:
                store.stats()
                store.counts(0)
        except errors.StateError:
            return
        except BaseException as e:  # handed to the main thread, which fails the test
            failures.append(e)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    store.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert not failures


def test_indices_out_of_range() -> None:
    with Store(TARGET) as store:
        for index in (-1, 7):
            with pytest.raises(errors.InvalidArgumentError, match="0 to 6"):
                store.residency(index)


def test_status_becomes_the_class_of_errors(tmp_path: Path) -> None:
    with pytest.raises(errors.ModelNotFoundError, match="cannot open"):
        Store(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(errors.ModelFileError):
        Store(tmp_path / "bad.gguf")
    with pytest.raises(errors.InvalidArgumentError):
        Store(TARGET, io_threads=65)

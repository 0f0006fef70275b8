"""What cannot work is refused at the start: a sentence that says what and what to do, an exit code, no traceback, no signal."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from harness import ONE_THREAD, TARGET, Server, ServerFailed, run_server
from synthetic import ModelFolder, models  # noqa: F401

Start = Callable[..., Server]
SMALL = ("-c", "512", "-np", "1", *ONE_THREAD, "--no-warmup")


def refused(*args: object, says: tuple[str, ...], **options: object) -> str:
    """Starts the server, which must end by itself with a message; returns what it printed."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    try:
        done = run_server([*map(str, args), *SMALL, "--port", str(port)], timeout_s=60, **options)
    except subprocess.TimeoutExpired as e:
        pytest.fail(f"the server started: {e.output}")
    text = done.stdout + done.stderr
    assert done.returncode > 0, f"exit code {done.returncode} (negative: a signal)\n{text[-3000:]}"
    assert "Traceback" not in text and "GGML_ASSERT" not in text and "Segmentation" not in text, text[-3000:]
    for part in says:
        assert re.search(part, text), f"no {part!r} in:\n{text[-3000:]}"
    return text


@pytest.mark.parametrize("spark", [["--spark"], [], ["--no-spark"]], ids=["on", "auto", "off"])
@pytest.mark.parametrize("keep", [0, 3, 24, 1000, 0.5, 0.98], ids=str)
def test_truncated_model(keep: float, spark: list[str], tmp_path: Path) -> None:
    data = TARGET.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    refused(path, *spark, says=(r"cut\.gguf",))


def rewrite(source: Path, target: Path, change: Callable[[str, np.ndarray], np.ndarray | None]) -> None:
    """A copy of a model with other tensors: change(name, data) returns the data, other data, or None to leave it out."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        data = change(tensor.name, tensor.data)
        if data is not None:
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


DAMAGED = "blk.1.ffn_up_exps.weight"


@pytest.mark.parametrize("spark", [["--spark"], [], ["--no-spark"]], ids=["on", "auto", "off"])
@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("missing", lambda data: None),
        ("fewer experts", lambda data: data[:-1]),
        ("fewer rows", lambda data: np.ascontiguousarray(data[:, :-32])),
        ("shorter rows", lambda data: np.ascontiguousarray(data[:, :, :-18])),
        ("not experts", lambda data: np.ascontiguousarray(data[0])),
    ],
)
def test_expert_tensor_is_wrong(case: str, change: Callable[[np.ndarray], np.ndarray | None], spark: list[str], models: ModelFolder,
                                tmp_path: Path) -> None:
    path = tmp_path / "wrong.gguf"
    rewrite(models.get("qwen3moe"), path, lambda name, data: change(data) if name == DAMAGED else data)
    refused(path, *spark, says=(re.escape(DAMAGED) + r"|block 1\b.*experts",))


def test_no_such_model(tmp_path: Path) -> None:
    refused(tmp_path / "nothing.gguf", "--spark", says=(r"nothing\.gguf",))


@pytest.mark.parametrize("spark", [["--spark"], []], ids=["on", "auto"])
def test_a_model_that_was_not_fetched(spark: list[str]) -> None:
    text = refused("-hf", "nobody/no-such-model", "--offline", *spark, says=("spark: .*did not arrive",))
    assert "'.'" not in text, "an empty path is no name for a user"


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    refused(folder, "--spark", says=(r"folder\.gguf",))


def test_unreadable_model(tmp_path: Path) -> None:
    options: dict[str, object] = {}
    if os.geteuid() == 0:  # root may read any file, so somebody else tries
        options = {"user": 65534, "group": 65534, "extra_groups": [], "env": os.environ | {"HOME": "/"}}
        try:
            subprocess.run([sys.executable, "-c", "import pyspark_moe"], capture_output=True, check=True, **options)
        except (PermissionError, subprocess.CalledProcessError):
            pytest.skip("runs as root, and no other user can run this Python")
        for folder in (tmp_path, *tmp_path.parents[:2]):
            folder.chmod(0o755)
    path = tmp_path / "secret.gguf"
    shutil.copy(TARGET, path)
    path.chmod(0)
    refused(path, "--spark", says=(r"secret\.gguf", r"[Pp]ermission"), **options)


def test_text_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "readme.gguf"
    path.write_text("# not a model\n" * 1000)
    refused(path, "--spark", says=(r"readme\.gguf",))


def test_missing_shard(models: ModelFolder, tmp_path: Path) -> None:
    first = models.get("qwen3moe", split_tensors=7)
    for shard in first.parent.glob(first.name.replace("-00001-of-", "-?????-of-")):
        shutil.copy(shard, tmp_path)
    (gone,) = tmp_path.glob("*-00003-of-*")
    gone.unlink()
    refused(tmp_path / first.name, "--spark", says=(re.escape(gone.name),))


def test_not_the_first_shard(models: ModelFolder) -> None:
    first = models.get("qwen3moe", split_tensors=7)
    second = Path(str(first).replace("-00001-of-", "-00002-of-"))
    refused(second, "--spark", says=(r"00001-of-|first|split",))


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "-inf", "abc", "", "1e300", "1000000"])
@pytest.mark.parametrize("spark", [["--spark"], []], ids=["on", "auto"])
def test_budget_that_means_nothing(value: str, spark: list[str]) -> None:
    refused(TARGET, *spark, f"--spark-ram={value}", says=("--spark-ram",))


@pytest.mark.parametrize("value", ["-1", "1.5", "many"])
def test_slots_that_mean_nothing(value: str) -> None:
    refused(TARGET, "--spark", f"--spark-slots={value}", says=("--spark-slots",))


def test_budget_without_its_off_switch() -> None:
    refused(TARGET, "--no-spark", "--spark-ram", "1", says=("--no-spark",))


def test_smallest_budget_is_named_and_works(start: Start) -> None:
    """Below the floor: refused with a number; with that number it runs."""
    text = refused(TARGET, "--spark", "--spark-ram", "0.0001", says=(r"--spark-ram",))
    named = re.findall(r"--spark-ram (\d+\.\d+)", text)
    smallest = [value for value in named if float(value) > 0.0001]
    assert smallest, text
    server = start(TARGET, "--spark", "--spark-ram", smallest[-1], *SMALL)
    assert server.complete("def f(", n=8)
    just_less = f"{float(smallest[-1]) * 0.8:.6f}"
    refused(TARGET, "--spark", "--spark-ram", just_less, says=(r"--spark-ram",))


def test_dense_model(models: ModelFolder, start: Start) -> None:
    """A budget for experts that do not exist is an error; --spark alone is a remark."""
    dense = models.get("dense")
    refused(dense, "--spark-ram", "1", says=("dense", "experts"))
    refused(dense, "--spark-slots", "4", says=("dense", "experts"))
    server = start(dense, "--spark", *SMALL)
    assert server.complete("a", n=4) is not None
    assert len(re.findall(r"^spark: .*dense.*nothing to do", server.log, re.MULTILINE)) == 1


def test_two_servers_on_one_port(start: Start) -> None:
    first = start(TARGET, "--spark", *SMALL)
    done = run_server([str(TARGET), "--spark", *SMALL, "--host", "127.0.0.1", "--port", str(first.port)], timeout_s=60)
    text = done.stdout + done.stderr
    assert done.returncode > 0 and "Traceback" not in text, text[-2000:]
    assert "couldn't bind" in text or str(first.port) in text
    assert first.complete("def f(", n=8), "the first server goes on"


@pytest.mark.parametrize("name", ["my model", "modèle-日本語", "it's 100% \"good\"", "-dash", "a,b=c;d"])
def test_strange_paths(name: str, start: Start, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    path = folder / f"{name}.gguf"
    path.symlink_to(TARGET)
    server = start("-m", path, "--spark", "--spark-slots", 8, *SMALL)
    assert server.complete("def f(", n=8)
    assert server.get("/spark/stats")["total"]["uses"] > 0


def test_read_only_folder(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir()
    shutil.copy(TARGET, folder / "model.gguf")
    (folder / "model.gguf").chmod(0o444)
    folder.chmod(0o555)
    try:
        server = start("-m", folder / "model.gguf", "--spark", "--spark-slots", 8, *SMALL)
        assert server.complete("def f(", n=8)
        assert server.stop() == 0
        assert [p.name for p in folder.iterdir()] == ["model.gguf"]
    finally:
        folder.chmod(0o755)


def test_file_that_is_replaced_while_it_serves(start: Start, tmp_path: Path) -> None:
    """Deleting or replacing the file is harmless: the open file stays."""
    path = tmp_path / "model.gguf"
    shutil.copy(TARGET, path)
    server = start("-m", path, "--spark", "--spark-slots", 4, *SMALL)
    before = server.complete("def f(", n=16)
    path.unlink()
    path.write_text("something else")
    assert server.complete("def f(", n=16) == before


def test_a_refusal_before_serving_leaves_no_server(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="ended with"):
        Server(["-m", str(tmp_path / "missing.gguf"), "--spark"], tmp_path / "log", timeout_s=60)

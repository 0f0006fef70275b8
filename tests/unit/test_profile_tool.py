"""`pyspark-moe profile`: what it shows, merges and resets, and what it refuses."""

from __future__ import annotations

import os
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from gguf_files import DENSE_TENSORS, MOE_METADATA, MOE_TENSORS, write_gguf

from pyspark_moe.command import run_command
from pyspark_moe.model_info import read_model_info
from pyspark_moe.model_profile import model_profile
from pyspark_moe.profile_plot import plot_profile, relative_uses
from pyspark_moe.routing_profile import ProfileFile, empty_profile, read_profile
from pyspark_moe.tools.cli import command
from pyspark_moe.tools.profile import _age

SHAPE = {1: 10, 4: 4}
USES = {1: np.array([50.0, 30, 10, 5, 5, 0, 0, 0, 0, 0]), 4: np.ones(4)}


@pytest.fixture
def pyspark_moe(capsys: pytest.CaptureFixture[str]):  # noqa: ANN201
    """Runs the program: exit code, what it printed, what it complained about."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            run_command(command, "pyspark-moe", [str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run


def make(path: Path, fingerprint: str = "0123456789abcdef", n_tokens: int = 1500, source: str = "traffic") -> Path:
    ProfileFile(path, fingerprint, SHAPE).add(USES, n_tokens, source)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make(tmp_path / "m.gguf.spark.csv")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", MOE_METADATA, MOE_TENSORS)


# -- show


def test_show(file: Path, pyspark_moe) -> None:  # noqa: ANN001
    make(file, n_tokens=200, source="history")
    before = file.read_bytes()
    code, out, err = pyspark_moe("profile", "show", file)
    assert (code, err) == (0, "") and file.read_bytes() == before
    assert "tokens    1,700 (history 200, traffic 1,500)" in out and "starts    1" in out and "(just now)" in out
    assert "uses      208, of which 208 still count" in out
    rows = [line.split() for line in out.splitlines()[-3:]]
    assert rows == [
        ["1", "10", "1", "10", "%", "3", "30", "%"],
        ["4", "4", "2", "50", "%", "4", "100", "%"],
        ["all", "14", "3", "21", "%", "7", "50", "%"],
    ]


def test_show_finds_the_profile_of_a_model(model: Path, pyspark_moe) -> None:  # noqa: ANN001
    code, out, err = pyspark_moe("profile", "show", model)
    assert code == 1 and "There is no profile yet" in err and "model.gguf.spark.csv' does not exist" in err
    model_profile(read_model_info(model)).add({2: np.array([1, 2, 3, 4])}, 7)
    code, out, err = pyspark_moe("profile", "show", model)
    assert code == 0 and "tokens    7 (traffic 7)" in out and str(model) in out


def test_show_of_a_replaced_model(model: Path, pyspark_moe) -> None:  # noqa: ANN001
    profile = make(model.with_name("model.gguf.spark.csv"))
    code, _, err = pyspark_moe("profile", "show", model)
    assert code == 1 and "of another model" in err and profile.exists(), "showing moves nothing"


def test_show_of_a_profile_without_uses_and_of_one_without_layers(tmp_path: Path, pyspark_moe) -> None:  # noqa: ANN001
    for shape in (SHAPE, {}):
        path = tmp_path / f"{len(shape)}.spark.csv"
        ProfileFile(path, "00", shape).add({}, 3)
        code, out, _ = pyspark_moe("profile", "show", path)
        assert code == 0 and "tokens    3" in out
        code, _, err = pyspark_moe("profile", "show", path, "--plot", tmp_path / "out.png")
        assert code == 1 and "no uses yet" in err and not (tmp_path / "out.png").exists()


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "bad", "empty", "dense model", "bad model"])
def test_show_of_what_is_no_profile(kind: str, tmp_path: Path, pyspark_moe) -> None:  # noqa: ANN001
    path = tmp_path / "x.spark.csv"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "bad":
        path.write_text("layer,expert,count\n1,1,nan\n")
    elif kind == "empty":
        path.touch()
    elif kind == "dense model":
        write_gguf(path, MOE_METADATA, DENSE_TENSORS)
    elif kind == "bad model":
        path.write_bytes(b"GGUF" + bytes(100))
    code, out, err = pyspark_moe("profile", "show", path)
    assert code == 1 and out == "" and str(path) in err and err.count("\n") == 1, err
    assert kind == "missing" or path.exists()


def test_age() -> None:
    now = datetime(2026, 12, 3, tzinfo=timezone.utc)
    ages = {0: "just now", 119: "just now", 120: "2 minutes ago", 7199: "120 minutes ago", 7200: "2 hours ago", 5 * 86400: "5 days ago"}
    assert {seconds: _age(now - timedelta(seconds=seconds), now) for seconds in ages} == ages
    assert "clock" in _age(now + timedelta(hours=1), now)


# -- plot


def test_relative_uses() -> None:
    profile = ProfileFile(Path("unused"), "00", SHAPE)
    table = relative_uses(empty_profile(profile.fingerprint, SHAPE))
    assert table.shape == (2, 10) and np.isnan(table).all()


def test_plot(file: Path, tmp_path: Path, pyspark_moe) -> None:  # noqa: ANN001
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    code, out, _ = pyspark_moe("profile", "show", file, "--plot", tmp_path / "out.png")
    assert code == 0 and out.endswith(f"heat map: {tmp_path / 'out.png'}\n")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    profile = read_profile(file)
    assert profile is not None
    table = relative_uses(profile)
    assert table[0, :3].tolist() == [5.0, 3.0, 1.0] and table[1, :4].tolist() == [1.0] * 4 and np.isnan(table[1, 4:]).all()
    for wrong in (tmp_path / "nowhere" / "out.png", tmp_path / "out.nothing", tmp_path / "out"):
        code, _, err = pyspark_moe("profile", "show", file, "--plot", wrong)
        assert code == 1 and "cannot be drawn" in err and not wrong.exists()


def test_plot_without_matplotlib(file: Path, tmp_path: Path, pyspark_moe, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN001
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    code, out, err = pyspark_moe("profile", "show", file, "--plot", tmp_path / "out.png")
    assert code == 1 and "pip install 'pyspark-moe[plot]'" in err and "tokens" in out
    profile = read_profile(file)
    assert profile is not None
    with pytest.raises(ImportError):
        plot_profile(profile, tmp_path / "out.png", "m")


# -- merge


def test_merge(tmp_path: Path, pyspark_moe) -> None:  # noqa: ANN001
    files = [make(tmp_path / f"{name}.spark.csv", n_tokens=n) for name, n in (("a", 10), ("b", 20), ("c", 30))]
    code, out, err = pyspark_moe("profile", "merge", *files, "-o", tmp_path / "out.spark.csv")
    merged = read_profile(tmp_path / "out.spark.csv")
    assert (code, err) == (0, "") and "60 tokens of 3 profiles" in out and merged is not None
    assert (merged.tokens, merged.starts, merged.uses) == (60, 3, 312) and merged.counts[1].tolist() == [3 * n for n in USES[1].tolist()]
    code, _, err = pyspark_moe("profile", "merge", *files[:2], "-o", tmp_path / "out.spark.csv")
    assert code == 1 and "--force" in err and read_profile(tmp_path / "out.spark.csv") == merged
    code, _, _ = pyspark_moe("profile", "merge", *files[:2], "-o", files[0], "--force")
    into_itself = read_profile(files[0])
    assert code == 0 and into_itself is not None and into_itself.tokens == 30


def test_merge_refuses_different_models_and_a_single_file(file: Path, tmp_path: Path, pyspark_moe) -> None:  # noqa: ANN001
    other, out = make(tmp_path / "other.spark.csv", "fedcba9876543210"), tmp_path / "out.spark.csv"
    code, _, err = pyspark_moe("profile", "merge", file, other, "-o", out)
    assert code == 1 and "different models (0123456789abcdef and fedcba9876543210)" in err and str(other) in err
    assert pyspark_moe("profile", "merge", file, "-o", out)[0] == 2
    assert pyspark_moe("profile", "merge", file, tmp_path / "missing", "-o", out)[0] == 1
    assert not out.exists()


def test_merge_into_a_place_that_cannot_be(file: Path, model: Path, tmp_path: Path, pyspark_moe) -> None:  # noqa: ANN001
    before = model.read_bytes()
    code, _, err = pyspark_moe("profile", "merge", file, file, "-o", model, "--force")
    assert code == 1 and "not a usable routing profile" in err and model.read_bytes() == before
    code, _, err = pyspark_moe("profile", "merge", file, file, "-o", tmp_path / "nowhere" / "x.spark.csv")
    assert code == 1 and "is not saved: No such file or directory" in err


# -- reset


def test_reset_keeps_the_old_file_and_asks(file: Path, pyspark_moe, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN001
    before = file.read_bytes()
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: "n")
    assert pyspark_moe("profile", "reset", file)[0] == 130 and file.read_bytes() == before
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: "y")
    code, out, _ = pyspark_moe("profile", "reset", file)
    aside = file.with_name(f"{file.name}.aside-1")
    assert code == 0 and str(aside) in out and aside.read_bytes() == before and not file.exists()
    make(file)
    assert pyspark_moe("profile", "reset", file, "--yes")[0] == 0 and aside.read_bytes() == before
    assert file.with_name(f"{file.name}.aside-2").exists()


def test_reset_of_a_model_and_of_a_damaged_profile(model: Path, pyspark_moe) -> None:  # noqa: ANN001
    code, out, _ = pyspark_moe("profile", "reset", model, "--yes")
    assert code == 0 and "There is no profile" in out
    profile = model.with_name("model.gguf.spark.csv")
    profile.write_text("damaged")
    assert pyspark_moe("profile", "reset", model, "--yes")[0] == 0
    assert not profile.exists() and model.exists()


def test_reset_moves_nothing_but_profiles(tmp_path: Path, pyspark_moe) -> None:  # noqa: ANN001
    diary = tmp_path / "diary.txt"
    diary.write_text("dear diary")
    code, _, err = pyspark_moe("profile", "reset", diary, "--yes")
    assert code == 1 and "not a usable routing profile" in err and diary.read_text() == "dear diary"
    renamed = make(tmp_path / "renamed.csv")
    assert pyspark_moe("profile", "reset", renamed, "--yes")[0] == 0 and not renamed.exists()

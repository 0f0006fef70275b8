"""--spark-profile with something that is no profile: it is left as it is, since a bad profile would be renamed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyspark_moe.config import SparkConfig
from pyspark_moe.errors import ConfigError
from pyspark_moe.profile_keeper import check_profile
from pyspark_moe.shared_file import set_aside


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "loop", "text", "model", "huge"])
def test_what_is_no_profile_is_refused_and_left(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "named"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/null")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "huge":
        path.touch()
        os.truncate(path, 2**30)
    else:
        path.write_bytes(b"my notes\n" if kind == "text" else b"GGUF\x03\0\0\0")
    with pytest.raises(ConfigError, match=r"--spark-profile '.*named' is left as it is: .*, or none\.$"):
        check_profile(SparkConfig(profile=str(path)))
    assert [entry.name for entry in tmp_path.iterdir()] == ["named"]


@pytest.mark.parametrize("content", [None, b"", b"# pyspark_moe rou", b"# pyspark_moe routing profile\n# version: 99\n"])
def test_new_empty_cut_off_and_newer_profiles_are_profiles(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "named"
    if content is not None:
        path.write_bytes(content)
    check_profile(SparkConfig(profile=str(path)))


@pytest.mark.parametrize("profile", ["auto", "none"])
def test_words_are_no_files(profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / profile).mkdir()
    check_profile(SparkConfig(profile=profile))


def test_a_device_is_never_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of defence: root may rename /dev/null, and then nothing on the machine works."""
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("renamed"))
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("took a place beside it"))
    with pytest.raises(OSError, match="it is a device"):
        set_aside(Path("/dev/null"))

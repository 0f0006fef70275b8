"""scripts/upstream.py: strict application, verification, staging that touches only what changed, the way back."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from patch_series import PatchError, apply_file, diff_file, parse_patch, reverse_file  # noqa: E402
from upstream_source import UpstreamError, fetch, read_pin, unpack  # noqa: E402

HEADER = "Subject: [PATCH] x : y\n\nWhy: because\n---\n"
BODY = "".join(f"line {i}\n" for i in range(1, 41))


def edited(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small 'upstream' sdist, its pin, and a series of two patches that share a file."""
    files = {
        "CMakeLists.txt": "project(x)\n",
        "ggml/CMakeLists.txt": "\n",
        "src/a.cpp": BODY,
        "src/b.cpp": "b\n",
        "docs/never.md": "not unpacked\n",
    }
    sdist = tmp_path / "llama_cpp_python-9.9.9.tar.gz"
    make_sdist(sdist, files)
    patches = tmp_path / "patches"
    patches.mkdir()
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    (patches / "UPSTREAM").write_text(f"version = 9.9.9\nsha256 = {digest}\ncommit = abc\n")
    first = edited(BODY, "line 10\n", "line ten\n")
    second = edited(first, "line 30\n", "line 30\nline 30 and a half\n")
    (patches / "0010-first.patch").write_text(HEADER + diff_file("src/a.cpp", BODY, first))
    (patches / "0020-second.patch").write_text(HEADER + diff_file("src/a.cpp", first, second) + diff_file("src/new.cpp", None, "new\n"))
    return tmp_path


def make_sdist(path: Path, files: dict[str, str], extra: list[tarfile.TarInfo] | None = None) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"llama_cpp_python-9.9.9/vendor/llama.cpp/{name}")
            info.size = len(text)
            info.mtime = 1_600_000_000
            archive.addfile(info, io.BytesIO(text.encode()))
        for info in extra or []:
            archive.addfile(info)


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "upstream.py"), "--patches", str(project / "patches"), "--cache", str(project / "cache")]
    command += ["--sdist", str(project / "llama_cpp_python-9.9.9.tar.gz"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_stage_applies_the_series(project: Path) -> None:
    done = run(project, "stage", "--into", str(project / "tree"))
    assert done.returncode == 0, done.stderr
    text = (project / "tree/src/a.cpp").read_text()
    assert "line ten\n" in text and "line 30 and a half\n" in text
    assert (project / "tree/src/new.cpp").read_text() == "new\n"
    assert not (project / "tree/docs").exists()


def test_stage_again_touches_only_what_a_changed_patch_touches(project: Path) -> None:
    tree = project / "tree"
    assert run(project, "stage", "--into", str(tree)).returncode == 0
    before = {path: path.stat().st_mtime_ns for path in tree.rglob("*.cpp")}
    assert run(project, "stage", "--into", str(tree)).returncode == 0
    assert before == {path: path.stat().st_mtime_ns for path in tree.rglob("*.cpp")}
    # without its second patch a file goes back to what the first one made of it, and gets a new time
    (project / "patches/0020-second.patch").unlink()
    assert run(project, "stage", "--into", str(tree)).returncode == 0
    assert not (tree / "src/new.cpp").exists()
    assert "line 30 and a half" not in (tree / "src/a.cpp").read_text()
    assert (tree / "src/a.cpp").stat().st_mtime_ns > before[tree / "src/a.cpp"]
    assert (tree / "src/b.cpp").stat().st_mtime_ns == before[tree / "src/b.cpp"]


def test_a_file_that_goes_back_to_pristine_is_newer_than_its_object(project: Path) -> None:
    tree = project / "tree"
    assert run(project, "stage", "--into", str(tree)).returncode == 0
    compiled = (tree / "src/a.cpp").stat().st_mtime_ns
    for patch in (project / "patches").glob("*.patch"):
        patch.unlink()
    assert run(project, "stage", "--into", str(tree)).returncode == 0
    assert (tree / "src/a.cpp").read_text() == BODY
    assert (tree / "src/a.cpp").stat().st_mtime_ns > compiled


def test_damage_in_the_staged_tree_is_repaired(project: Path) -> None:
    tree = project / "tree"
    assert run(project, "stage", "--into", str(tree)).returncode == 0
    (tree / "src/a.cpp").write_text("gone\n")
    (tree / "src/stray.cpp").write_text("stray\n")
    assert run(project, "stage", "--into", str(tree)).returncode == 0
    assert "line ten\n" in (tree / "src/a.cpp").read_text()
    assert not (tree / "src/stray.cpp").exists()


def test_stage_refuses_a_folder_it_did_not_make(project: Path) -> None:
    (project / "mine").mkdir()
    (project / "mine/thesis.txt").write_text("years of work")
    done = run(project, "stage", "--into", str(project / "mine"))
    assert done.returncode == 1 and "was not made by this tool" in done.stderr
    assert (project / "mine/thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("change, words", [
    (("-line 10\n", "-line X\n"), ("0010-first.patch", "src/a.cpp", "hunk 1 of 1", "line X", "line 10")),
    (("@@ -7,7 +7,7 @@", "@@ -9,7 +9,7 @@"), ("0010-first.patch", "src/a.cpp", "hunk 1 of 1")),
    (("@@ -7,7 +7,7 @@", "@@ -7,8 +7,7 @@"), ("0010-first.patch", "has 7 old and 7 new lines", "says 8 and 7")),
    (("a/src/a.cpp", "a/src/moved.cpp"), ("0010-first.patch", "moved.cpp", "no such file")),
    (("src/a.cpp", "../a.cpp"), ("0010-first.patch", "stay inside the tree")),
])
def test_a_patch_that_does_not_apply_names_itself_and_the_hunk(project: Path, change: tuple[str, str], words: tuple[str, ...]) -> None:
    path = project / "patches/0010-first.patch"
    text = edited(path.read_text(), *change)
    path.write_text(text.replace("b/src/a.cpp", "b/src/moved.cpp") if "moved" in change[1] else text)
    done = run(project, "stage", "--into", str(project / "tree"))
    assert done.returncode == 1
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / "tree/.spark-stamp").exists()


def test_a_wrong_hash_is_refused(project: Path) -> None:
    sdist = project / "llama_cpp_python-9.9.9.tar.gz"
    sdist.write_bytes(sdist.read_bytes() + b"x")
    done = run(project, "stage", "--into", str(project / "tree"))
    assert done.returncode == 1 and "SHA-256" in done.stderr and not (project / "tree").exists()


def test_a_missing_local_sdist_is_a_sentence(project: Path) -> None:
    (project / "llama_cpp_python-9.9.9.tar.gz").unlink()
    done = run(project, "stage", "--into", str(project / "tree"))
    assert done.returncode == 1 and "does not exist" in done.stderr and "Traceback" not in done.stderr


def test_a_local_source_tree_can_be_given(project: Path) -> None:
    assert run(project, "stage", "--into", str(project / "tree")).returncode == 0
    source = next((project / "cache/upstream").glob("9.9.9-*"))
    done = run(project, "--source", str(source), "stage", "--into", str(project / "other"))
    assert done.returncode == 0 and "line ten\n" in (project / "other/src/a.cpp").read_text()
    assert (source / "src/a.cpp").read_text() == BODY


def test_a_path_that_leaves_the_archive_is_refused(tmp_path: Path) -> None:
    evil = tarfile.TarInfo("x/vendor/llama.cpp/../../../evil.txt")
    make_sdist(tmp_path / "evil.tar.gz", {"CMakeLists.txt": "\n"}, [evil])
    with pytest.raises(UpstreamError, match="leaves its folder"):
        unpack(tmp_path / "evil.tar.gz", "9.9.9", "0" * 64, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache/upstream").iterdir()] == [".lock"]


def test_a_link_in_the_archive_is_not_created(tmp_path: Path) -> None:
    link = tarfile.TarInfo("x/vendor/llama.cpp/src/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    make_sdist(tmp_path / "link.tar.gz", {"CMakeLists.txt": "\n"}, [link])
    tree = unpack(tmp_path / "link.tar.gz", "9.9.9", "0" * 64, tmp_path / "cache")
    assert not os.path.lexists(tree / "src/link")


def test_a_truncated_archive_leaves_nothing_behind(project: Path) -> None:
    sdist = project / "llama_cpp_python-9.9.9.tar.gz"
    sdist.write_bytes(sdist.read_bytes()[:-40])
    with pytest.raises(UpstreamError, match="cannot be unpacked"):
        unpack(sdist, "9.9.9", "1" * 64, project / "cache")
    assert [path.name for path in (project / "cache/upstream").iterdir()] == [".lock"]


def test_without_network_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UpstreamError, match="--sdist FILE"):
        fetch("9.9.9", tmp_path / "cache")


def test_pin_lacks_a_key(tmp_path: Path) -> None:
    (tmp_path / "UPSTREAM").write_text("version = 1\n")
    with pytest.raises(UpstreamError, match="sha256, commit"):
        read_pin(tmp_path / "UPSTREAM")


def test_refresh_writes_an_edit_into_the_last_patch_applied(project: Path) -> None:
    tree, patch = project / "edit", project / "patches/0010-first.patch"
    second_before = (project / "patches/0020-second.patch").read_text()
    assert run(project, "apply", "--into", str(tree), "--upto", "0010").returncode == 0
    path = tree / "src/a.cpp"
    path.write_text(edited(path.read_text(), "line 1\n", "line 0\nline 1\n"))
    (tree / "src/b.cpp").write_text("b\nand more\n")
    done = run(project, "refresh", "--tree", str(tree))
    assert done.returncode == 0, done.stderr
    assert patch.read_text().startswith(HEADER)
    assert "+line 0\n" in patch.read_text() and "+and more\n" in patch.read_text() and "+line ten\n" in patch.read_text()
    # the patch after it moved by one line, and was rewritten so that it applies exactly
    assert "@@ -28,6 +28,7 @@" in second_before
    assert "@@ -29,6 +29,7 @@" in (project / "patches/0020-second.patch").read_text()
    assert run(project, "check").returncode == 0


def test_refresh_of_an_untouched_tree_changes_nothing(project: Path) -> None:
    before = {path.name: path.read_text() for path in (project / "patches").iterdir()}
    assert run(project, "apply", "--into", str(project / "edit")).returncode == 0
    assert run(project, "refresh", "--tree", str(project / "edit")).returncode == 0
    assert before == {path.name: path.read_text() for path in (project / "patches").iterdir()}


def test_check_of_another_version_reports_offsets_and_failures(project: Path) -> None:
    moved = project / "moved.tar.gz"
    text = edited("line 0\n" + BODY, "line 30\n", "line thirty\n")
    make_sdist(moved, {"CMakeLists.txt": "\n", "src/a.cpp": text})
    done = run(project, "--sdist", str(moved), "check", "--version", "9.9.10")
    assert done.returncode == 1
    assert "moved   0010-first.patch: src/a.cpp: 1 hunks +1" in done.stdout
    assert "FAILS   0020-second.patch: src/a.cpp: hunk 1 of 1" in done.stdout


def test_two_stages_at_once_agree(project: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "upstream.py"), "--patches", str(project / "patches"), "--cache", str(project / "cache")]
    command += ["--sdist", str(project / "llama_cpp_python-9.9.9.tar.gz"), "stage", "--into", str(project / "tree")]
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    for process in running:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert "line ten\n" in (project / "tree/src/a.cpp").read_text()


line = st.text(alphabet="ab{}\x0c\u2028 ", max_size=3)
document = st.lists(line, max_size=30).map(lambda lines: "".join(f"{text}\n" for text in lines))


@settings(max_examples=300, deadline=None)
@given(old=document, new=document, cut_old=st.booleans(), cut_new=st.booleans())
def test_diff_apply_and_reverse_are_inverse(old: str, new: str, cut_old: bool, cut_new: bool) -> None:
    old, new = old[:-1] if cut_old else old, new[:-1] if cut_new else new
    text = diff_file("f", old, new)
    if old == new:
        assert text == ""
        return
    patch = parse_patch("p", HEADER + text)
    (file,) = patch.files
    assert apply_file("p", file, old) == (new, [0] * len(file.hunks))
    assert apply_file("p", reverse_file(file), new) == (old, [0] * len(file.hunks))


@settings(max_examples=100, deadline=None)
@given(old=document, new=document, other=document)
def test_a_patch_never_applies_to_something_else_unnoticed(old: str, new: str, other: str) -> None:
    text = diff_file("f", old, new)
    if not text:
        return
    (file,) = parse_patch("p", text).files
    try:
        result, _ = apply_file("p", file, other)
    except PatchError:
        return
    assert apply_file("p", reverse_file(file), result)[0] == other

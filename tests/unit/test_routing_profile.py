"""Routing profiles: arithmetic, the text of the file, and the file among links, full disks and other processes."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_moe import routing_profile, shared_file
from pyspark_moe.errors import ProfileError, ProfileWriteError
from pyspark_moe.routing_profile import (
    MAX_COUNT,
    MAX_LINES,
    MAX_TOTAL,
    RESTART_DECAY,
    ProfileFile,
    RoutingProfile,
    add_counts,
    begin_start,
    decay,
    empty_profile,
    format_profile,
    merge_profiles,
    parse_profile,
    profile_path,
    read_profile,
    skew,
    write_profile,
)

DATA = Path(__file__).resolve().parents[1] / "data"
FINGERPRINT = "0123456789abcdef"
SHAPE = {1: 3, 2: 2}
NEW = {1: np.array([1.0, 2.0, 3.0]), 2: np.array([4.0, 5.0])}

# A part of what is said about each malformed file.
MALFORMED = {
    "additional_row": "6 rows where its layers have 5",
    "binary": "does not begin like",
    "binary_after_header": "is not text",
    "blank_before_count": "line 14",
    "blank_count": "line 14",
    "blank_line": "6 rows",
    "byte_order_mark": "does not begin like",
    "comment_among_rows": "line 13",
    "cut_between_rows": "3 rows where its layers have 5",
    "cut_in_header": "cut off",
    "cut_in_last_line": "cut off",
    "cut_without_newline": "cut off",
    "duplicate_row": "expert 0 of layer 1 again",
    "empty": "is empty",
    "endless_header": "more than 64 lines",
    "expert_out_of_range": "expert 3 of layer 1, which the model does not have",
    "fingerprint_not_one": "'../../etc/passwd' is not one",
    "first_line_only": "does not say 'version'",
    "foreign_digits": "is not text",
    "foreign_fingerprint": "of another model",
    "formula": "line 14",
    "fourth_column": "line 14",
    "fractional_total": "'2.5', not a whole number",
    "future_version": "newer version of pyspark_moe (format 2; this one reads 1)",
    "header_only": "line 11",
    "hexadecimal_count": "line 14",
    "huge_expert": "line 13",
    "huge_layers": "5 rows where its layers have 1999998",
    "huge_total": "not a total",
    "impossible_time": "not a time",
    "infinite_count": "'1,2,inf'",
    "last_start_after_now": "do not agree",
    "layer_out_of_range": "layer 7, which the model does not have",
    "layer_without_experts": "'2x0'",
    "layers_not_numbers": "'twoxtwo'",
    "layers_twice": "'1x2'",
    "missing_row": "4 rows",
    "model_in_its_place": "does not begin like",
    "nan_count": "'1,2,nan'",
    "negative_count": "'1,2,-300.5'",
    "negative_expert": "line 13",
    "negative_total": "'-1', not a whole number",
    "no_columns": "line 11",
    "no_fingerprint": "does not say 'fingerprint'",
    "no_header": "does not begin like",
    "no_time": "'yesterday' is not a time",
    "other_csv": "does not begin like",
    "other_shape": "not those of this model",
    "overflowing_count": "1e999",
    "source_twice": "'traffic=1000'",
    "source_without_tokens": "'history'",
    "tokens_disagree": "do not agree",
    "too_large_count": "1e19",
    "two_fingerprints": "'fingerprint' twice",
    "underscore_count": "line 14",
    "version_0": "unknown format",
    "version_not_a_number": "'one', not a whole number",
    "windows_lines": "line ends",
    "zeros_at_the_end": "cut off",
    "zeros_in_the_middle": "does not say 'tokens at last start'",
}

numbers = st.floats(0, 1e15)
whole_numbers = st.integers(0, 10**9)


@st.composite
def profiles(draw: st.DrawFn, shape: dict[int, int] | None = None, values: st.SearchStrategy = numbers) -> RoutingProfile:
    shape = draw(st.dictionaries(st.integers(0, 200), st.integers(1, 9), max_size=4)) if shape is None else shape
    counts = {layer: np.array(draw(st.lists(values, min_size=n, max_size=n)), dtype=float) for layer, n in shape.items()}
    sources = draw(st.dictionaries(st.sampled_from(["traffic", "history", "corpus"]), st.integers(0, 2**50)))
    tokens = sum(sources.values())
    return RoutingProfile(
        FINGERPRINT,
        counts,
        tokens,
        draw(st.integers(0, 2**60)),
        draw(st.integers(0, 1000)),
        f"20{draw(st.integers(20, 38))}-01-02T03:04:05Z",
        sources,
        draw(st.integers(0, tokens)),
    )


@pytest.fixture
def file(tmp_path: Path) -> ProfileFile:
    return ProfileFile(tmp_path / "model.gguf.spark.csv", FINGERPRINT, SHAPE)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


# -- arithmetic


@settings(max_examples=25, deadline=None)
@given(profile=profiles())
def test_text_gives_back_the_same_profile(profile: RoutingProfile) -> None:
    text = format_profile(profile)
    back = parse_profile(text)
    assert back == profile and format_profile(back) == text
    for layer, values in profile.counts.items():
        assert np.array_equal(back.counts[layer], values)


@settings(max_examples=25, deadline=None)
@given(a=profiles(SHAPE, whole_numbers), b=profiles(SHAPE, whole_numbers), c=profiles(SHAPE, whole_numbers))
def test_merging_is_commutative_and_associative(a: RoutingProfile, b: RoutingProfile, c: RoutingProfile) -> None:
    assert merge_profiles(a, b) == merge_profiles(b, a)
    assert merge_profiles(merge_profiles(a, b), c) == merge_profiles(a, merge_profiles(b, c))
    assert merge_profiles(a, b).tokens == a.tokens + b.tokens
    nothing = merge_profiles(a, empty_profile(FINGERPRINT, SHAPE))
    assert nothing == a


@settings(max_examples=25, deadline=None)
@given(profile=profiles(SHAPE), more=st.floats(0, 1), less=st.floats(0, 1))
def test_decay_is_monotone_and_leaves_totals_and_order(profile: RoutingProfile, more: float, less: float) -> None:
    less, more = sorted((less, more))
    low, high = decay(profile, less), decay(profile, more)
    for layer, values in profile.counts.items():
        assert np.all(low.counts[layer] <= high.counts[layer]) and np.all(high.counts[layer] <= values)
        assert np.all(np.diff(high.counts[layer][np.argsort(values)]) >= 0)
    assert (high.tokens, high.uses, high.starts, high.sources) == (profile.tokens, profile.uses, profile.starts, profile.sources)


@settings(max_examples=25, deadline=None)
@given(profile=profiles(SHAPE), n_tokens=st.integers(1, 2**40), uses=st.lists(whole_numbers, min_size=3, max_size=3))
def test_adding_grows_totals_and_exactly_those_counts(profile: RoutingProfile, n_tokens: int, uses: list[int]) -> None:
    grown = add_counts(profile, {1: np.array(uses)}, n_tokens, "traffic")
    assert grown.tokens == profile.tokens + n_tokens > profile.tokens
    assert grown.uses == profile.uses + sum(uses)
    assert np.array_equal(grown.counts[1], profile.counts[1] + uses) and np.array_equal(grown.counts[2], profile.counts[2])
    assert grown.sources.get("traffic") == profile.sources.get("traffic", 0) + n_tokens
    assert (grown.sources.get("history"), grown.starts) == (profile.sources.get("history"), profile.starts)


def test_a_profile_does_not_change_with_the_array_it_was_made_from() -> None:
    counts = np.array([1.0, 2.0])
    profile = RoutingProfile(FINGERPRINT, {0: counts})
    counts[0] = 7
    assert profile.counts[0][0] == 1
    with pytest.raises(ValueError, match="read-only"):
        profile.counts[0][0] = 3


@pytest.mark.parametrize(
    ("counts", "n_tokens", "source"),
    [
        ({1: np.array([1.0, math.nan, 0])}, 1, "traffic"),
        ({1: np.array([1.0, math.inf, 0])}, 1, "traffic"),
        ({1: np.array([1.0, -1, 0])}, 1, "traffic"),
        ({1: np.array([1.0, 2])}, 1, "traffic"),
        ({1: np.ones((3, 1))}, 1, "traffic"),
        ({5: np.ones(3)}, 1, "traffic"),
        (NEW, -1, "traffic"),
        (NEW, 1, "a=b"),
        (NEW, 1, ""),
        (NEW, 1, "two\nlines"),
    ],
)
def test_counts_that_are_not_this_models_are_refused(counts: dict, n_tokens: int, source: str, file: ProfileFile) -> None:
    with pytest.raises(ProfileError):
        file.add(counts, n_tokens, source)
    assert not file.path.exists()


def test_counts_at_the_largest_values_stay_readable(file: ProfileFile) -> None:
    for _ in range(3):
        file.add({1: np.full(3, 0.9 * MAX_COUNT)}, MAX_TOTAL, "traffic")
        file.add({}, MAX_TOTAL, "history")
    profile, warning = file.load()
    assert warning is None and profile is not None
    assert profile.tokens == profile.uses == MAX_TOTAL
    assert profile.counts[1].max() == MAX_COUNT
    assert merge_profiles(profile, profile).counts[1].max() == MAX_COUNT


@pytest.mark.parametrize("factor", [-0.1, 1.1, math.nan, math.inf])
def test_a_decay_that_is_none_is_refused(factor: float) -> None:
    with pytest.raises(ProfileError):
        decay(empty_profile(FINGERPRINT, SHAPE), factor)


def test_profiles_of_different_models_are_not_merged() -> None:
    for other in (empty_profile("00", SHAPE), empty_profile(FINGERPRINT, {1: 3, 2: 3}), empty_profile(FINGERPRINT, {1: 3})):
        with pytest.raises(ProfileError, match="different models"):
            merge_profiles(empty_profile(FINGERPRINT, SHAPE), other)


def test_skew_counts_the_experts_that_take_half_and_ninety_percent() -> None:
    counts = {0: np.full(10, 7.0), 1: np.array([0, 100.0, 0, 0]), 2: np.zeros(5), 3: np.array([1.0, 50, 30, 10, 9])}
    found = {layer.layer: (layer.half, layer.ninety) for layer in skew(RoutingProfile(FINGERPRINT, counts))}
    assert found == {0: (5, 9), 1: (1, 1), 2: (0, 0), 3: (1, 3)}


def test_empty_is_without_uses() -> None:
    assert empty_profile(FINGERPRINT, SHAPE).is_empty
    assert add_counts(empty_profile(FINGERPRINT, SHAPE), {}, 5).is_empty
    assert not add_counts(empty_profile(FINGERPRINT, SHAPE), NEW, 5).is_empty


# -- the text


def test_the_good_file_reads_as_it_always_did() -> None:
    """Format 1 as it was first written: files of users look like this one."""
    data = (DATA / "profile_good.csv").read_bytes()
    profile = parse_profile(data)
    assert profile.shape == SHAPE and profile.fingerprint == FINGERPRINT
    assert profile.counts[1].tolist() == [1200.0, 0.0, 300.5] and profile.counts[2].tolist() == [1e-07, 1500.0]
    assert (profile.tokens, profile.uses, profile.starts, profile.tokens_at_start) == (1500, 6000, 3, 1200)
    assert profile.updated == "2026-12-03T12:00:00Z" and profile.sources == {"history": 500, "traffic": 1000}
    assert format_profile(profile) == data


def test_comments_and_the_order_of_rows_do_not_matter() -> None:
    text = (DATA / "profile_good.csv").read_text()
    lines = text.splitlines()
    changed = "\n".join([lines[0], "# written by hand", *lines[1:11], *reversed(lines[11:])]) + "\n"
    assert parse_profile(changed.encode()) == parse_profile(text.encode())


def test_every_malformed_file_is_tried() -> None:
    assert {path.stem.removeprefix("profile_") for path in DATA.glob("profile_*.csv")} == {"good", *MALFORMED}


@pytest.mark.parametrize("name", sorted(MALFORMED))
def test_a_malformed_file_is_kept_aside_and_service_goes_on(name: str, file: ProfileFile) -> None:
    data = (DATA / f"profile_{name}.csv").read_bytes()
    file.path.write_bytes(data)
    profile, warning = file.load()
    aside = file.path.with_name(f"{file.path.name}.aside-1")
    assert profile is None and warning is not None and MALFORMED[name] in warning, warning
    assert str(file.path) in warning and str(aside) in warning
    assert aside.read_bytes() == data and names(file.path.parent) == [aside.name]
    assert file.load() == (None, None)
    assert file.add(NEW, 10).tokens == 10 and file.load()[1] is None


def test_a_file_of_endless_lines_is_not_taken_apart() -> None:
    with pytest.raises(ProfileError, match=f"more than {MAX_LINES} lines"):
        parse_profile((DATA / "profile_good.csv").read_bytes() + b"\n" * MAX_LINES)


# -- the file


def test_adding_accumulates_over_instances(file: ProfileFile) -> None:
    assert file.load() == (None, None) and file.begin() is None
    first = file.add(NEW, 10)
    second = ProfileFile(file.path, FINGERPRINT, SHAPE).add({2: np.array([1, 0])}, 3, "history")
    assert (first.tokens, second.tokens, second.uses, second.starts) == (10, 13, 16, 1)
    assert second.sources == {"history": 3, "traffic": 10}
    assert second.counts[2].tolist() == [5.0, 5.0]
    assert file.load() == (second, None)


def test_starts_fade_older_counts_only_when_there_was_traffic(file: ProfileFile) -> None:
    file.add(NEW, 10)
    second = file.begin()
    assert second is not None and (second.starts, second.tokens, second.uses) == (2, 10, 15)
    assert np.allclose(second.counts[1], RESTART_DECAY * NEW[1])
    assert file.load()[0] == second
    for _ in range(20):
        assert file.begin() == second  # twenty starts that did nothing
    third = file.add(NEW, 1)
    assert third.starts == 2 and np.allclose(third.counts[1], (1 + RESTART_DECAY) * NEW[1])
    assert (file.begin() or third).starts == 3


def test_three_starts_with_the_same_traffic_only_grow_totals(file: ProfileFile) -> None:
    seen = []
    for _ in range(3):
        file.begin()
        seen.append(file.add(NEW, 10))
    assert [p.tokens for p in seen] == [10, 20, 30] and [p.uses for p in seen] == [15, 30, 45] and [p.starts for p in seen] == [1, 2, 3]


def test_a_corpus_is_no_start(file: ProfileFile) -> None:
    assert file.add(NEW, 10, "corpus").starts == 0
    started = file.begin()
    assert started is not None and started.starts == 1 and begin_start(started) is started


def test_nothing_new_is_not_written(file: ProfileFile) -> None:
    assert file.add({}, 0).is_empty and not file.path.exists()
    file.add(NEW, 10)
    before = file.path.stat()
    file.add({1: np.zeros(3)}, 0)
    after = file.path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_files_set_aside_are_never_overwritten_and_not_endless(file: ProfileFile) -> None:
    for number in range(1, 4):
        file.path.write_text(f"bad {number}")
        file.load()
    assert [file.path.with_name(f"{file.path.name}.aside-{n}").read_text() for n in (1, 2, 3)] == ["bad 1", "bad 2", "bad 3"]
    for number in range(4, 101):
        file.path.with_name(f"{file.path.name}.aside-{number}").touch()
    file.path.write_text("bad 101")
    profile, warning = file.load()
    assert profile is None and warning is not None and "100 files were set aside before it" in warning and "stays" in warning
    with pytest.raises(ProfileWriteError, match="100 files"):
        file.add(NEW, 10)
    assert file.path.read_text() == "bad 101"


def test_a_bad_file_that_another_server_just_replaced_is_used(file: ProfileFile, monkeypatch: pytest.MonkeyPatch) -> None:
    good = file.add(NEW, 10)
    text = file.path.read_bytes()
    file.path.write_text("bad")
    original = routing_profile.locked

    def replaced_meanwhile(path: Path):  # noqa: ANN202
        file.path.write_bytes(text)
        return original(path)

    monkeypatch.setattr(routing_profile, "locked", replaced_meanwhile)
    assert file.load() == (good, None)


@pytest.mark.parametrize("kind", ["folder", "full folder", "pipe", "device", "loop", "link to bad", "huge"])
def test_what_is_not_a_file_is_moved_aside_unread(kind: str, file: ProfileFile, tmp_path: Path) -> None:
    path, elsewhere = file.path, tmp_path / "elsewhere"
    if kind == "folder":
        path.mkdir()
    elif kind == "full folder":
        path.mkdir()
        (path / "precious").write_text("kept")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "link to bad":
        elsewhere.write_text("bad")
        path.symlink_to(elsewhere)
    else:
        with path.open("wb") as f:
            f.write(b"# pyspark_moe routing profile\n")
            f.truncate(10**9)
    profile, warning = file.load()
    assert profile is None and warning is not None and "aside-1" in warning
    assert os.path.lexists(path.with_name(f"{path.name}.aside-1")) and not os.path.lexists(path)
    assert Path("/dev/zero").is_char_device()
    if kind == "link to bad":
        assert elsewhere.read_text() == "bad"
    if kind == "full folder":
        assert (path.with_name(f"{path.name}.aside-1") / "precious").read_text() == "kept"
    assert file.add(NEW, 10).tokens == 10 and file.load()[1] is None


def test_a_link_to_a_profile_is_followed_and_stays_a_link(file: ProfileFile, tmp_path: Path) -> None:
    real = tmp_path / "profiles" / "real.csv"
    real.parent.mkdir()
    file.path.symlink_to(real)
    assert file.load() == (None, None)
    file.add(NEW, 10)
    file.add(NEW, 10)
    profile = read_profile(real)
    assert file.path.is_symlink() and profile is not None and profile.tokens == 20


def test_the_mode_of_a_file_stays(file: ProfileFile) -> None:
    file.add(NEW, 10)
    file.path.chmod(0o664)
    file.add(NEW, 10)
    assert file.path.stat().st_mode & 0o777 == 0o664


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_a_full_disk_leaves_the_old_file(call: str, file: ProfileFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.add(NEW, 10)
    before = file.path.read_bytes()
    original = getattr(os, call)

    def full(*args, **kwargs):  # noqa: ANN002, ANN003, ANN202
        if call == "open" and not str(args[0]).endswith(".tmp"):
            return original(*args, **kwargs)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match=r"spark\.csv' is not saved: No space left on device\. What it had on disk is unchanged\.") as raised:
        file.add(NEW, 10)
    assert isinstance(raised.value, ProfileWriteError)
    started = file.begin()
    assert started is not None and started.starts == 2 and "No space left" in str(file.warning)
    monkeypatch.undo()
    assert file.path.read_bytes() == before and names(file.path.parent) == [file.path.name]
    assert file.add(NEW, 10).tokens == 20


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="there is no /dev/full here")
def test_a_disk_that_is_full_while_bytes_are_written(file: ProfileFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own ENOSPC, from the write rather than from a call that a test replaces."""
    file.add(NEW, 10)
    before = file.path.read_bytes()
    original = os.open

    def full(path, flags, *rest, **more):  # noqa: ANN001, ANN002, ANN003, ANN202
        return original("/dev/full", os.O_WRONLY) if str(path).endswith(".tmp") else original(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(ProfileWriteError, match="No space left"):
        file.add(NEW, 10)
    assert file.path.read_bytes() == before


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT])
def test_a_folder_that_cannot_be_written(error: int, file: ProfileFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests as root could write to a read-only folder, so the refusal comes from os itself."""
    good = file.add(NEW, 10)
    original = os.open

    def refuse(path, flags, *rest, **more):  # noqa: ANN001, ANN002, ANN003, ANN202
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(error, os.strerror(error))
        return original(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert file.load() == (good, None)
    with pytest.raises(ProfileWriteError, match="is not saved"):
        file.add(NEW, 10)
    file.path.write_text("bad")
    profile, warning = file.load()
    assert profile is None and warning is not None and "it stays and is ignored" in warning and os.strerror(error) in warning
    with pytest.raises(ProfileWriteError, match="cannot be used"):
        file.add(NEW, 10)
    assert file.begin() is None and file.path.read_text() == "bad"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to any folder")
def test_a_read_only_folder(file: ProfileFile) -> None:
    good = file.add(NEW, 10)
    file.path.parent.chmod(0o555)
    try:
        assert file.load() == (good, None)
        with pytest.raises(ProfileWriteError):
            file.add(NEW, 10)
    finally:
        file.path.parent.chmod(0o755)


def test_an_unreadable_file_is_neither_moved_nor_replaced(file: ProfileFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.add(NEW, 10)
    before = file.path.read_bytes()

    def refuse(path: Path, _: int) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(routing_profile, "read_regular_file", refuse)
    profile, warning = file.load()
    assert profile is None and warning is not None and "cannot be read" in warning and "Permission denied" in warning
    assert file.begin() is None and "Permission denied" in str(file.warning)
    with pytest.raises(ProfileWriteError, match="Permission denied"):
        file.add(NEW, 10)
    assert file.path.read_bytes() == before and names(file.path.parent) == [file.path.name]


def test_the_folder_is_made(tmp_path: Path) -> None:
    file = ProfileFile(tmp_path / "cache" / "profiles" / "m.spark.csv", FINGERPRINT, SHAPE)
    assert file.load() == (None, None)
    assert file.add(NEW, 10).tokens == 10 and file.path.exists()
    blocked = ProfileFile(file.path / "below" / "m.spark.csv", FINGERPRINT, SHAPE)
    assert blocked.load()[0] is None and blocked.begin() is None
    with pytest.raises(ProfileWriteError):
        blocked.add(NEW, 10)


def test_leftovers_of_killed_writers_go_and_no_other_file_does(file: ProfileFile) -> None:
    folder = file.path.parent
    leftover = folder / f".{file.path.name}.01234567.tmp"
    others = [folder / ".other.gguf.spark.csv.01234567.tmp", folder / f"{file.path.name}.tmp"]
    for path in (leftover, *others):
        path.write_text("x")
    file.add(NEW, 10)
    assert not leftover.exists() and all(path.exists() for path in others)


def test_writing_a_whole_profile(file: ProfileFile) -> None:
    profile = add_counts(empty_profile(FINGERPRINT, SHAPE), NEW, 4, "corpus")
    written = write_profile(file.path, profile)
    assert written.updated > profile.updated and file.load() == (written, None)
    with pytest.raises(ProfileWriteError):
        write_profile(file.path.parent / "nowhere" / "x.csv", profile)


# -- other processes

ADD = """
import sys, numpy as np
from pathlib import Path
from pyspark_moe.routing_profile import ProfileFile
file = ProfileFile(Path(sys.argv[1]), "0123456789abcdef", {1: 3, 2: 2})
print("ready", flush=True)
sys.stdin.readline()
for i in range(int(sys.argv[2])):
    file.add({1: np.array([1, 0, 2])}, 1)
    print(i, flush=True)
"""


def start_writer(file: ProfileFile, n: int) -> subprocess.Popen[str]:
    writer = subprocess.Popen([sys.executable, "-c", ADD, str(file.path), str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    return writer


def test_two_processes_merge_without_loss(file: ProfileFile) -> None:
    writers = [start_writer(file, 20) for _ in range(2)]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    profile, warning = file.load()
    assert warning is None and profile is not None
    assert (profile.tokens, profile.uses, profile.counts[1].tolist()) == (40, 120, [40.0, 0.0, 80.0])
    assert names(file.path.parent) == [file.path.name]


def test_killed_writers_leave_a_whole_file(file: ProfileFile) -> None:
    before = 0
    for n in (1, 4):
        writer = start_writer(file, 10**6)
        assert writer.stdin is not None and writer.stdout is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
        for _ in range(n):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        profile, warning = file.load()
        assert warning is None and profile is not None and profile.tokens >= before + n
        assert profile.uses == 3 * profile.tokens
        before = profile.tokens
    file.add(NEW, 1)
    assert names(file.path.parent) == [file.path.name]


def test_a_holder_that_hangs_stops_nobody(file: ProfileFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_file, "_LOCK_WAIT_SECONDS", 0.05)
    with shared_file.locked(file.path) as held:
        assert held
        with shared_file.locked(file.path) as also:
            assert not also
        leftover = file.path.with_name(f".{file.path.name}.01234567.tmp")
        leftover.write_text("being written by the holder")
        assert file.add(NEW, 10).tokens == 10
        assert leftover.exists()
    with shared_file.locked(file.path) as held:
        assert held


def test_without_locks_files_are_still_written(file: ProfileFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(shared_file.fcntl, "flock", no_locks)
    file.add(NEW, 10)
    assert file.add(NEW, 10).tokens == 20 and file.load()[1] is None


# -- where it is


def test_the_profile_is_beside_the_real_file(tmp_path: Path) -> None:
    cache, real = tmp_path / "cache", tmp_path / "models" / "m.gguf"
    real.parent.mkdir()
    real.touch()
    (tmp_path / "link.gguf").symlink_to(real)
    (tmp_path / "linked folder").symlink_to(real.parent)
    expected = real.with_name("m.gguf.spark.csv")
    for path in (real, tmp_path / "link.gguf", tmp_path / "linked folder" / "m.gguf", tmp_path / "models" / ".." / "models" / "m.gguf"):
        assert profile_path(path, cache) == expected


def test_all_parts_of_a_split_model_have_one_profile(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"m-0000{number}-of-00003.gguf").touch()
    found = {profile_path(tmp_path / f"m-0000{number}-of-00003.gguf", tmp_path / "cache") for number in (1, 2, 3)}
    assert found == {tmp_path / "m-00001-of-00003.gguf.spark.csv"}


def test_parts_that_are_links_to_blobs_have_one_profile(tmp_path: Path) -> None:
    """The layout of a download cache: names in one folder, content under digests in another."""
    blobs, names_folder = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    names_folder.mkdir()
    for number in (1, 2):
        (blobs / f"digest{number}").touch()
        (names_folder / f"m-0000{number}-of-00002.gguf").symlink_to(blobs / f"digest{number}")
    found = {profile_path(names_folder / f"m-0000{number}-of-00002.gguf", tmp_path / "cache") for number in (1, 2)}
    assert found == {blobs / "digest1.spark.csv"}


def test_a_folder_that_may_not_be_written_falls_back_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    paths = [tmp_path / folder / "m.gguf" for folder in ("a", "b")]
    found = [profile_path(path, tmp_path / "cache") for path in paths]
    assert found[0] != found[1] and found == [profile_path(path, tmp_path / "cache") for path in paths]
    for path in found:
        assert path.parent == tmp_path / "cache" / "pyspark_moe" / "profiles"
        assert path.name.startswith("m.gguf-") and path.name.endswith(".spark.csv")


def test_long_and_odd_names(tmp_path: Path) -> None:
    long = tmp_path / ("m" * 245 + ".gguf")
    found = profile_path(long, tmp_path / "cache")
    assert ProfileFile(found, FINGERPRINT, SHAPE).add(NEW, 1).tokens == 1
    odd = tmp_path / os.fsdecode(b"\xff\xfe \n.gguf")
    assert ProfileFile(profile_path(odd, tmp_path / "cache"), FINGERPRINT, SHAPE).add(NEW, 1).tokens == 1
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    assert profile_path(loop, tmp_path / "cache").name == "loop.gguf.spark.csv"

"""Damaged routing profiles: each is either a profile whose every number is possible, or a sentence, and none stops a server.

A second's worth of examples in the ordinary run, always the same ones. Others, and more of them:
pytest tests/fuzz --hypothesis-profile fuzz
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark_moe.errors import ProfileError
from pyspark_moe.routing_profile import MAX_COUNT, MAX_TOTAL, ProfileFile, RoutingProfile, format_profile, parse_profile, skew

DATA = Path(__file__).resolve().parents[1] / "data"
GOOD = (DATA / "profile_good.csv").read_bytes()
SEEDS = [path.read_bytes() for path in sorted(DATA.glob("profile_*.csv"))]
FINGERPRINT, SHAPE = "0123456789abcdef", {1: 3, 2: 2}

IS_LONG = settings.default is not None and settings.default.max_examples > 100
LIMITS = settings(
    max_examples=settings.default.max_examples if IS_LONG else 300,
    derandomize=not IS_LONG,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

Damage = list[tuple[str, float, float, bytes]]
# What a format of numbers and lists is likely to trip over.
pieces = st.sampled_from(
    [b"nan", b"inf", b"-1", b"-0.0", b"1e308", b"1e999", b"1e-999", b"5e-324", b"0x1", b"1_0", b"9" * 30, b"9223372036854775807", b"1.", b".5", b"+1", b"1E5",
     b"", b",", b"\n", b"\r\n", b"\0", b"#", b"# ", b": ", b"=", b"x", b"\xef\xbb\xbf", b"\xff", "٣".encode(), b"layer,expert,count\n",
     b"# version: 1\n", b"# version: 99999999999999999999\n", b"1,0,1.0\n", b"1x3 2x2", b"1x999999", b"0x0", b"2026-12-03T12:00:00Z", b"0000-00-00T00:00:00Z"]
)  # fmt: skip
places = st.floats(0, 1)
damages = st.lists(
    st.tuples(st.sampled_from(["replace", "insert", "cut", "repeat", "swap lines", "byte", "field"]), places, places, st.one_of(pieces, st.binary(max_size=6))),
    min_size=1,
    max_size=4,
)


def apply(data: bytes, damage: Damage) -> bytes:
    """The damaged file; places are fractions of it."""
    for kind, first, second, piece in damage:
        a, b = sorted((int(first * len(data)), int(second * len(data))))
        lines = data.split(b"\n")
        row = int(first * (len(lines) - 1))
        if kind == "replace":
            data = data[:a] + piece + data[min(b, a + 12) :]
        elif kind == "insert":
            data = data[:a] + piece + data[a:]
        elif kind == "cut":
            data = data[:a] if first < second else data[:a] + data[b:]
        elif kind == "repeat":
            data = data[:b] + data[a:b][:2000] + data[b:]
        elif kind == "swap lines":
            other = int(second * (len(lines) - 1))
            lines[row], lines[other] = lines[other], lines[row]
            data = b"\n".join(lines)
        elif kind == "byte" and data:
            a = min(a, len(data) - 1)
            data = data[:a] + bytes([data[a] ^ (1 + (piece or b"\0")[0] % 255)]) + data[a + 1 :]
        elif kind == "field":  # a number or a word as a whole
            separator = next((s for s in (b": ", b",", b"=", b"x") if s in lines[row]), b" ")
            fields = lines[row].split(separator)
            fields[int(second * (len(fields) - 1))] = piece
            lines[row] = separator.join(fields)
            data = b"\n".join(lines)
    return data


def check_possible(profile: RoutingProfile) -> None:
    for layer, values in profile.counts.items():
        assert layer >= 0 and values.dtype == np.float64 and np.all((values >= 0) & (values <= MAX_COUNT)), layer
    assert profile.tokens == min(sum(profile.sources.values()), MAX_TOTAL)
    assert all(0 <= total <= MAX_TOTAL for total in (profile.tokens, profile.uses, profile.starts, *profile.sources.values()))
    assert all(0 <= layer.half <= layer.ninety <= layer.n_expert for layer in skew(profile))
    assert parse_profile(format_profile(profile)) == profile


def parse(data: bytes) -> RoutingProfile | None:
    try:
        return parse_profile(data)
    except ProfileError as e:
        assert str(e) and "\n" not in str(e) and len(str(e)) < 400, "the end of a sentence for the user"
        return None


@LIMITS
@given(seed=st.sampled_from(SEEDS), damage=damages)
def test_damaged_text(seed: bytes, damage: Damage) -> None:
    profile = parse(apply(seed, damage))
    if profile is not None:
        check_possible(profile)


@LIMITS
@given(damage=damages)
def test_damaged_text_of_a_good_file(damage: Damage) -> None:
    profile = parse(apply(GOOD, damage))
    if profile is not None:
        check_possible(profile)


@LIMITS
@given(data=st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    for start in (b"", GOOD[: GOOD.index(b"layer,")], GOOD[: GOOD.index(b"1,0")], GOOD):
        profile = parse(start + data)
        if profile is not None:
            check_possible(profile)


@LIMITS
@given(damage=damages)
def test_a_server_with_a_damaged_file_goes_on_and_loses_nothing(damage: Damage, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    file = ProfileFile(folder / "m.spark.csv", FINGERPRINT, SHAPE)
    data = apply(GOOD, damage)
    file.path.write_bytes(data)
    profile, warning = file.load()
    aside = folder / "m.spark.csv.aside-1"
    if profile is None:
        assert warning is not None and warning.count("\n") == 0
        assert aside.read_bytes() == data and not file.path.exists()
    else:
        assert warning is None and file.path.read_bytes() == data and not aside.exists()
        assert profile.fingerprint == FINGERPRINT and profile.shape == SHAPE
        check_possible(profile)
    before = 0 if profile is None else profile.tokens
    assert file.add({1: np.array([1, 2, 3])}, 5).tokens == min(before + 5, MAX_TOTAL)
    assert file.begin() is not None and file.warning is None


def test_good_files_are_accepted_after_damage_that_is_none() -> None:
    """The damage above must not be so heavy that nothing is ever accepted: then half of the checks would never run."""
    assert parse(GOOD) is not None
    assert parse(apply(GOOD, [("insert", 0.05, 0, b"")])) is not None
    assert parse(apply(GOOD, [("swap lines", 0.8, 0.9, b"")])) is not None
    assert parse(apply(GOOD, [("field", 0.8, 1.0, b"7.5")])) is not None

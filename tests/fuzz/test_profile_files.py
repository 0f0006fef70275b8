"""Damaged routing profiles: each is either a profile whose every number is possible, or a sentence, and none stops a server.

A second's worth of examples in the ordinary run, always the same ones. Others, and more of them:
pytest tests/fuzz --hypothesis-profile fuzz. fuzz_profile.py looks for the same failures, guided by coverage.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profile_checks import check_bytes, check_file, parse

DATA = Path(__file__).resolve().parents[1] / "data"
GOOD = (DATA / "profile_good.csv").read_bytes()
SEEDS = [path.read_bytes() for path in sorted(DATA.glob("profile_*.csv"))]

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


@LIMITS
@given(seed=st.sampled_from(SEEDS), damage=damages)
def test_damaged_text(seed: bytes, damage: Damage) -> None:
    check_bytes(apply(seed, damage))


@LIMITS
@given(damage=damages)
def test_damaged_text_of_a_good_file(damage: Damage) -> None:
    check_bytes(apply(GOOD, damage))


@LIMITS
@given(data=st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    for start in (b"", GOOD[: GOOD.index(b"layer,")], GOOD[: GOOD.index(b"1,0")], GOOD):
        check_bytes(start + data)


@LIMITS
@given(damage=damages)
def test_a_server_with_a_damaged_file_goes_on_and_loses_nothing(damage: Damage, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    check_file(apply(GOOD, damage), folder)


def test_good_files_are_accepted_after_damage_that_is_none() -> None:
    """The damage above must not be so heavy that nothing is ever accepted: then half of the checks would never run."""
    assert parse(GOOD) is not None
    assert parse(apply(GOOD, [("insert", 0.05, 0, b"")])) is not None
    assert parse(apply(GOOD, [("swap lines", 0.8, 0.9, b"")])) is not None
    assert parse(apply(GOOD, [("field", 0.8, 1.0, b"7.5")])) is not None

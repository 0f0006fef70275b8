"""What must hold for a routing profile of any content: shared by the property tests and by the coverage-guided fuzzer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pyspark_moe.errors import ProfileError
from pyspark_moe.routing_profile import MAX_COUNT, MAX_TOTAL, ProfileFile, RoutingProfile, format_profile, parse_profile, skew

FINGERPRINT, SHAPE = "0123456789abcdef", {1: 3, 2: 2}  # of tests/data/profile_good.csv


def check_possible(profile: RoutingProfile) -> None:
    """Every number is possible, and writing and reading it changes nothing."""
    for layer, values in profile.counts.items():
        assert layer >= 0 and values.dtype == np.float64 and np.all((values >= 0) & (values <= MAX_COUNT)), layer
    assert profile.tokens == min(sum(profile.sources.values()), MAX_TOTAL)
    assert all(0 <= total <= MAX_TOTAL for total in (profile.tokens, profile.uses, profile.starts, *profile.sources.values()))
    assert all(0 <= layer.half <= layer.ninety <= layer.n_expert for layer in skew(profile))
    assert parse_profile(format_profile(profile)) == profile


def parse(data: bytes) -> RoutingProfile | None:
    """The profile, or None where the parser says why it is none."""
    try:
        return parse_profile(data)
    except ProfileError as e:
        assert str(e) and "\n" not in str(e) and len(str(e)) < 400, "the end of a sentence for the user"
        return None


def check_bytes(data: bytes) -> None:
    """The parser alone."""
    profile = parse(data)
    if profile is not None:
        check_possible(profile)


def check_file(data: bytes, folder: Path) -> None:
    """A server whose profile has this content goes on, loses nothing, and keeps what it could not read. `folder` holds nothing else."""
    file = ProfileFile(folder / "m.spark.csv", FINGERPRINT, SHAPE)
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

#!/usr/bin/env python3
"""Coverage-guided fuzzing of the routing profile's parser and file, with Atheris (libFuzzer for Python).

    python tests/fuzz/fuzz_profile.py --seconds 60

Starts from the good and damaged profiles in tests/data, replaces, moves and repeats whole fields and lines as well as bytes, and
checks what tests/profile_checks.py promises for any content; one input in eight also as the file of a server. The input that
breaks it is kept in build/fuzz/ and the exit code is not 0; give that file as an argument to see the failure again. Needs
`pip install atheris` (the extra `fuzz`).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import atheris  # noqa: E402

with atheris.instrument_imports(include=["pyspark_moe.routing_profile", "pyspark_moe.shared_file"]):
    import pyspark_moe.routing_profile  # noqa: F401

import profile_checks  # noqa: E402

# What a format of numbers and lists is likely to trip over.
ODD = (
    b"nan", b"inf", b"-1", b"-0.0", b"1e308", b"1e999", b"5e-324", b"0x1", b"1_0", b"9" * 30, b"9223372036854775807", b"1.", b"+1", b"", b",", b"\0", b"#",
    b"# ", b": ", b"=", b"\r", b"\xef\xbb\xbf", b"\xff", "٣".encode(), b"layer,expert,count", b"# version: 1", b"1,0,1.0", b"1x3 2x2", b"1x999999",
    b"2026-12-03T12:00:00Z", b"0000-00-00T00:00:00Z",
)  # fmt: skip
SEPARATORS = (b": ", b",", b"=", b"x", b" ")


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Half of the time a field is replaced by an odd one, or lines change places, repeat or go; else bytes change as usual."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        return bytes(atheris.Mutate(data, max_size))
    lines = data.split(b"\n")
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(5)
    if kind == 0:
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == 1:
        lines.insert(other, lines[at])
    elif kind == 2:
        del lines[at]
    else:
        separator = next((s for s in rng.sample(SEPARATORS, len(SEPARATORS)) if s in lines[at]), b" ")
        fields = lines[at].split(separator)
        fields[rng.randrange(len(fields))] = rng.choice(ODD)
        lines[at] = separator.join(fields)
    return b"\n".join(lines)[:max_size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="how long, default 60")
    parser.add_argument("inputs", nargs="*", help="inputs to run once instead")
    options = parser.parse_args()
    kept = ROOT / "build/fuzz"
    kept.mkdir(parents=True, exist_ok=True)
    work = tempfile.TemporaryDirectory(prefix="fuzz-")
    folder = Path(work.name)
    seeds = folder / "seeds"
    seeds.mkdir()
    for path in (ROOT / "tests/data").glob("profile_*.csv"):
        (seeds / path.name).write_bytes(path.read_bytes())
    (folder / "files").mkdir()

    def one_input(data: bytes) -> None:
        profile_checks.check_bytes(data)
        if options.inputs or sum(data) % 8 == 0:  # files are slow, and mostly show what the parser does
            for old in (folder / "files").iterdir():
                old.unlink()
            profile_checks.check_file(data, folder / "files")

    flags = [f"-max_total_time={options.seconds}", "-max_len=4096", "-timeout=20", "-rss_limit_mb=2048", f"-artifact_prefix={kept}/", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *flags, *(options.inputs or [str(seeds)])], one_input, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

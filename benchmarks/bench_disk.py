#!/usr/bin/env python3
"""What the disk gives to reads of an expert's size: parallel pread past the page cache, through it, and page faults.

Method: disk_probe.c, compiled here: random, aligned pieces of a large file, its cached pages dropped before each case, a few
seconds a case. It says what a miss can cost at best, and why experts are not read by page faults.
"""
from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

import common
from bench_limit import MODEL


def probe(file: Path, seconds: float) -> dict[str, dict[str, dict[str, float]]]:
    """mode -> piece in KiB -> threads -> MB/s."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "disk_probe"
        subprocess.run(["cc", "-O2", "-pthread", Path(__file__).with_name("disk_probe.c"), "-o", program], check=True)
        done = subprocess.run([program, file, str(seconds)], check=True, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        mode, piece, threads, rate, _ = line.split()
        found.setdefault(mode, {}).setdefault(f"{int(piece) // 1024} KiB", {})[f"{threads} threads"] = float(rate)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=MODEL, help="a file of several GiB; default: the model of bench_limit.py")
    parser.add_argument("--seconds", type=float, default=2.0, help="per case; there are 48")
    args = parser.parse_args()
    load_before = common.load_average()
    results = {"mb_per_s": probe(args.file, args.seconds)}
    settings = {"file": args.file, "file_gib": round(args.file.stat().st_size / 2**30, 2), "seconds": args.seconds}
    common.save("disk", method=(__doc__ or "").strip(), settings=settings, results=results, rounds={}, load_before=load_before)


if __name__ == "__main__":
    main()

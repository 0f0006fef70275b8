#!/usr/bin/env python3
"""Compares two results of the same benchmark; refuses when their machine or settings differ.

    python benchmarks/compare.py OLD.json NEW.json

Prints, per group of rounds, arm and metric, both medians and new / old.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Properties that must be equal and are not, one sentence each."""
    found = []
    for key in ("benchmark", "method", "machine"):
        if old.get(key) != new.get(key):
            found.append(f"{key}: {old.get(key)} and {new.get(key)}")
    for key in sorted({*old["settings"], *new["settings"]}):
        a, b = old["settings"].get(key), new["settings"].get(key)
        if a != b:
            found.append(f"settings.{key}: {a} and {b}")
    return found


def rows(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str, str, float, float]]:
    """(group, arm, metric, old median, new median) for what both have."""
    result = []
    for group, rounds in old["rounds"].items():
        for arm, metrics in rounds[0].items():
            for metric in metrics:
                pair = [[r[arm][metric] for r in value["rounds"].get(group, []) if metric in r.get(arm, {})] for value in (old, new)]
                if all(pair):
                    result.append((group, arm, metric, statistics.median(pair[0]), statistics.median(pair[1])))
    return result


def main() -> int:
    """0: compared, 1: refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    args = parser.parse_args()
    old, new = (json.loads(path.read_text()) for path in (args.old, args.new))
    found = differences(old, new)
    if found:
        print("these results cannot be compared:\n  " + "\n  ".join(found), file=sys.stderr)
        return 1
    print(f"{old['commit']} -> {new['commit']}")
    for group, arm, metric, a, b in rows(old, new):
        print(f"{group:12} {arm:16} {metric:18} {a:10.4g} {b:10.4g} {b / a if a else float('nan'):7.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Lists which target architectures a draft model can read from, and writes pyspark_moe/data/draft_targets.json.

Some drafts (DFlash, DSpark, EAGLE-3, MTP) compute from the target's inner activations. llama.cpp exposes these per
architecture, by assignments in its graph builders; a graph without them aborts the process at the first request. So
the fact is read from the sources that are built, and never kept by hand:

    layer_inputs  graphs that set res->t_layer_inp[il]       (inputs of inner layers)
    last_output   graphs that set res->t_layer_inp[n_layer]  (output of the last layer, as "layer n_layer")
    nextn         graphs that set res->t_h_nextn             (hidden state for the next-token head)

    python scripts/draft_targets.py --source build/native/upstream          # write
    python scripts/draft_targets.py --source build/native/upstream --check  # exit 1 when the file is stale
"""
from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

OUTPUT = Path(__file__).resolve().parent.parent / "pyspark_moe" / "data" / "draft_targets.json"

ARCH_NAME = re.compile(r'\{\s*(LLM_ARCH_\w+)\s*,\s*"([^"]+)"\s*\}')
ARCH_CLASS = re.compile(r"((?:case LLM_ARCH_\w+:\s*)+)return new llama_model_(\w+)\(")
STRUCT = re.compile(r"^struct llama_model_(\w+) : public llama_model_(\w+) \{(.*?)^\};", re.M | re.S)
GRAPH_ALIAS = re.compile(r"using graph = llama_model_(\w+)::graph\b")
CONSTRUCTOR = re.compile(r"^llama_model_(\w+)::graph(?:<\w+>)?::graph\(.*?^\}", re.M | re.S)

FACTS = {
    "layer_inputs": re.compile(r"t_layer_inp\[il\]\s*="),
    "last_output": re.compile(r"t_layer_inp\[n_layer\]\s*="),
    "nextn": re.compile(r"t_h_nextn\s*="),
}


def scan(source: Path) -> dict[str, list[str]]:
    """Facts of the llama.cpp tree at `source`: fact -> sorted architecture names. ValueError when the tree has changed
    its shape so that nothing would be found."""
    names = dict(ARCH_NAME.findall((source / "src" / "llama-arch.cpp").read_text()))
    arch_class: dict[str, str] = {}
    for cases, cls in ARCH_CLASS.findall((source / "src" / "llama-model.cpp").read_text()):
        for arch in re.findall(r"LLM_ARCH_\w+", cases):
            arch_class[arch] = cls

    graph_of: dict[str, str] = {}  # class -> class whose graph it builds
    for cls, parent, body in STRUCT.findall((source / "src" / "models" / "models.h").read_text()):
        alias = GRAPH_ALIAS.search(body)
        if alias:
            graph_of[cls] = alias.group(1)
        elif not re.search(r"struct graph\b", body) and parent != "base":
            graph_of[cls] = parent

    facts_of: dict[str, set[str]] = {}
    for path in sorted((source / "src" / "models").glob("*.cpp")):
        for match in CONSTRUCTOR.finditer(path.read_text()):
            found = {fact for fact, pattern in FACTS.items() if pattern.search(match.group(0))}
            facts_of.setdefault(match.group(1), set()).update(found)

    result: dict[str, list[str]] = {fact: [] for fact in FACTS}
    for arch, cls in arch_class.items():
        while cls in graph_of and graph_of[cls] != cls:
            cls = graph_of[cls]
        for fact in facts_of.get(cls, ()):
            result[fact].append(names[arch])
    for fact, archs in result.items():
        if not archs:
            raise ValueError(f"no architecture with '{fact}' in {source}: llama.cpp has changed, adapt the patterns of this script")
        archs.sort()
    return result


def render(source: Path) -> str:
    """The text of the data file for a source tree."""
    return json.dumps(scan(source), indent=1) + "\n"


def main() -> int:
    """Command line. 0: written or up to date, 1: stale (--check)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="patched llama.cpp source tree")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when the data file is stale")
    args = parser.parse_args()
    text = render(args.source)
    if args.check:
        if OUTPUT.read_text() == text:
            return 0
        print(f"{OUTPUT} is stale: run {Path(__file__).name} --source {args.source}", file=sys.stderr)
        return 1
    OUTPUT.write_text(text)
    print(f"wrote {OUTPUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

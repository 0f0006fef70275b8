"""A quantised draft drafts about as well as its source, and one without Markov and confidence heads serves as plain DFlash."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

from harness import DRAFT, ONE_THREAD, TARGET, Server
from pyspark_moe.draft_quantization import quantize_draft

PROMPTS = (
    "import os\n\n\ndef read_file(path):\n    with open(path",
    "class Point:\n    def __init__(self, x, y):\n        self.x",
    "The purpose of this section is to describe the",
    "function add(a, b) {\n  return",
)


def rewrite(target: Path, keep: Callable[[str], bool]) -> Path:
    """The demo draft with its Q8_0 tensors in F16, without the tensors that are not kept."""
    reader = GGUFReader(DRAFT)
    writer = GGUFWriter(target, "dflash")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(field.name, field.contents(), kind, sub_type=field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        if keep(tensor.name):
            data = tensor.data
            if tensor.tensor_type == GGMLQuantizationType.Q8_0:
                data = dequantize(data, tensor.tensor_type).astype(np.float16)
            writer.add_tensor(tensor.name, np.asarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def run(start: Callable[..., Server], draft: Path | None) -> tuple[list[str], float]:
    """Greedy texts, and tokens accepted for each draft."""
    args = () if draft is None else ("--draft", draft, "--verify-width", "7")
    server = start("-m", TARGET, "--no-spark", "-c", "1024", "-np", "1", *ONE_THREAD, *args)
    texts = [server.complete(prompt, 128, ignore_eos=True) for prompt in PROMPTS]
    stats = server.get("/spark/stats").get("draft")
    return texts, stats["accepted"] / stats["drafts"] if stats else 0.0


@pytest.mark.parametrize(("scheme", "least"), [("q8_0", 0.95), ("q4-mix", 0.85)])
def test_quantised_drafts_are_accepted_about_as_often(start: Callable[..., Server], tmp_path: Path, scheme: str, least: float) -> None:
    """`least`: 170 drafts are few; over 6,000 drafts the difference is far smaller (docs/guide/server.md)."""
    source = rewrite(tmp_path / "f16.gguf", lambda name: True)
    quantize_draft(source, tmp_path / "small.gguf", scheme)
    assert (tmp_path / "small.gguf").stat().st_size < source.stat().st_size * 0.6
    expected, full = run(start, source)
    texts, quantised = run(start, tmp_path / "small.gguf")
    assert texts == expected and full > 1 and quantised > least * full


def test_a_draft_without_markov_head_is_plain_dflash(start: Callable[..., Server], tmp_path: Path) -> None:
    """The demo draft was trained to begin at its anchor, which plain DFlash does not, so hardly a token is accepted: only the text counts."""
    expected, _ = run(start, None)
    draft = rewrite(tmp_path / "plain.gguf", lambda name: not name.startswith(("markov", "conf")))
    texts, _ = run(start, draft)
    assert texts == expected

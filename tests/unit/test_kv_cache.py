"""Pairs of cache types: what works together, and the sentence for what does not."""
from __future__ import annotations

import pytest

from pyspark_moe.errors import ConfigError
from pyspark_moe.kv_cache import TYPES, check_pair, supported_pairs

FLAGS = ("-ctk", "-ctv")


def test_every_pair_works_with_flash_attention_on_the_cpu() -> None:
    assert len(supported_pairs(is_on_gpu=False, has_flash_attention=True)) == len(TYPES) ** 2


@pytest.mark.parametrize(
    ("k", "v", "where", "works"),
    [
        ("q8_0", "q4_0", {"is_on_gpu": True}, True),
        ("iq4_nl", "f16", {"is_on_gpu": True}, False),
        ("q8_0", "f16", {"has_flash_attention": False}, True),
        ("f16", "q8_0", {"has_flash_attention": False}, False),
        ("q3_0", "f16", {}, False),
    ],
)
def test_pairs(k: str, v: str, where: dict, works: bool) -> None:
    pairs = supported_pairs(**({"is_on_gpu": False, "has_flash_attention": True} | where))
    if works:
        check_pair(k, v, FLAGS, pairs)
    else:
        with pytest.raises(ConfigError, match=rf"-ctk {k} with -ctv {v} does not work here. Supported: K any of f32, f16, bf16") as e:
            check_pair(k, v, FLAGS, pairs)
        assert "with V any of f32, f16, bf16" in str(e.value)

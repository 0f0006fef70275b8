"""A decision made real: its store, and on a GPU the slots that measured use leaves. The server and SparkLlama both act here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ._native import device_memory
from .config import SparkConfig
from .decision import Decision
from .decision_gpu import settle
from .gpu import used_bytes
from .store import Store


def open_store(path: str | Path, decision: Decision, config: SparkConfig) -> Store | None:
    """The store to load the model with, its plan set; None when residency is off. Raises SparkError."""
    if decision.plan is None:
        return None
    device = decision.gpu.gpu.name if decision.gpu else ""
    store = Store(path, io_threads=config.io_threads, direct_io=config.direct_io, lock_fast=config.lock_fast, device=device)
    try:
        store.set_plan(decision.plan)
    except BaseException:
        store.close()
        raise
    return store


def needs_placing(decision: Decision | None) -> bool:
    """Whether fast slots wait for the model and its contexts to be on the GPU."""
    return decision is not None and decision.gpu is not None and not decision.gpu.is_settled


def place(store: Store, decision: Decision, config: SparkConfig, hotness: Mapping[int, np.ndarray] | None = None) -> Decision:
    """Gives the fast slots what the model, its contexts and their buffers have left of the GPU, and returns the decision
    with them. Only where needs_placing. Raises SparkError."""
    assert decision.gpu is not None
    gpu = decision.gpu.gpu
    settled = settle(decision, config, used_bytes(gpu), device_memory(gpu.name)[1], hotness)
    assert settled.plan is not None
    store.place(settled.plan)
    return settled

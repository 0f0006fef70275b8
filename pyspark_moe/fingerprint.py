"""What tells one model from another without reading all of it: its architecture's numbers, its tensors, samples of its weights.

A replaced, re-quantised or fine-tuned model gets another fingerprint. A model that was moved, renamed, split into other
parts or given another chat template keeps it, since none of that changes which experts a token uses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from .errors import ModelFileError, ModelNotFoundError
from .gguf_header import TensorEntry, read_gguf_header
from .model_info import ModelInfo

_SAMPLE_BYTES = 4096
_N_SAMPLES = 32  # of routers, and as many of other tensors: 64 reads take well under a second from any disk
_ROUTER = ".ffn_gate_inp."

Placed = tuple[TensorEntry, Path]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).digest()


def _sampled(tensors: Sequence[Placed]) -> list[Placed]:
    """The tensors whose content is looked at: routers first, since they decide which experts are used, then others. The
    order by digest of the name is arbitrary but fixed, so that no period of the layers is favoured."""
    ordered = sorted(tensors, key=lambda placed: _digest(placed[0].name))
    routers = [placed for placed in ordered if _ROUTER in placed[0].name]
    others = [placed for placed in ordered if _ROUTER not in placed[0].name]
    return routers[:_N_SAMPLES] + others[: 2 * _N_SAMPLES - min(len(routers), _N_SAMPLES)]


def _sample(tensor: TensorEntry, path: Path) -> bytes:
    """Up to 4 KiB of a tensor, from a place that depends on its name alone."""
    n = min(_SAMPLE_BYTES, tensor.n_bytes)
    start = int.from_bytes(_digest(tensor.name)[:8], "little") % (tensor.n_bytes - n + 1)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(tensor.offset + start)
            data = file.read(n)
    except OSError as e:
        raise ModelNotFoundError(f"'{path}' cannot be read: {e.strerror or e}.") from e
    if len(data) != n:
        raise ModelFileError(f"'{path}' became shorter while it was read (tensor '{tensor.name[:64]}'). Download it again.")
    return data


def model_fingerprint(model: ModelInfo) -> str:
    """The fingerprint of a model over all its shards: 64 hexadecimal digits.

    It depends on the architecture and its numbers (experts per token, rope ...), on name, shape, type and size of every
    tensor, and on 4 KiB of each of 64 tensors. Reads headers and 256 KiB. Raises ModelNotFoundError, ModelFileError.
    """
    prefix = f"{model.architecture}."
    fingerprint = hashlib.sha256()
    for key, value in sorted(model.metadata.items()):
        if key.startswith(prefix):
            fingerprint.update(_digest(f"{key}={value!r}"))
    tensors = [(tensor, path) for path in model.shards for tensor in read_gguf_header(path).tensors]
    tensors.sort(key=lambda placed: placed[0].name)
    for tensor, _ in tensors:
        fingerprint.update(_digest(f"{tensor.name} {tensor.shape} {tensor.type_id} {tensor.n_bytes}"))
    for tensor, path in _sampled(tensors):
        fingerprint.update(hashlib.sha256(_sample(tensor, path)).digest())
    return fingerprint.hexdigest()

"""SparkLlama: llama_cpp.Llama with expert residency. Same constructor, same methods, and `.spark` for the figures.

How the store gets in: Llama.__init__ assigns `self.model_params`, fills the structure and loads the model. Here
`model_params` is a property whose setter adds the store's buffer type overrides to the structure that passes by. Nothing
outside the object is changed.
"""
from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import gguf
import numpy as np

from ._native import build_info, prepare_llama_cpp, set_fused_qkv
from .bootstrap import find_history, read_history
from .budget import Serving
from .config import SparkConfig
from .decision import Decision, decide, replan
from .errors import ConfigError, ModelLoadError, SparkError, StateError
from .gpu import read_gpus
from .load_log import LoadLog
from .memory import read_machine_memory
from .model_info import read_model_info
from .placement import prior_uses
from .prefill import Prefill
from .profile_keeper import ProfileKeeper, check_profile, hotness_of, open_profile
from .residency import needs_placing, open_store, place
from .standard_streams import say
from .store import Stats, Store

llama_cpp = prepare_llama_cpp()

from .speculative.handle import resolve  # noqa: E402  (as above)
from .speculative.llama_draft import LlamaDraft  # noqa: E402
from .speculative.statistics import SpeculationStats  # noqa: E402

T = TypeVar("T")

# llama-cpp-python redirects the process's stdout and stderr while it loads quietly; two threads doing that at once would
# restore each other's redirection.
_loading = threading.Lock()


class Residency:
    """The experts of one SparkLlama: `llm.spark`. Off is an object too: `is_active` is False and `why` says why.

    decision   the effective configuration: mode, reason, slots per layer, bytes by term. Thread safe.
    """

    def __init__(self, decision: Decision | None, store: Store | None, why: str, keeper: ProfileKeeper | None = None) -> None:
        self.decision = decision
        self.why = why
        self._store = store
        self._keeper = keeper

    @property
    def is_active(self) -> bool:
        """True when a store keeps the experts."""
        return self._store is not None

    @property
    def layers(self) -> tuple[int, ...]:
        """Block numbers of the layers with experts; () when off."""
        return tuple(info.layer for info in self._store.layers) if self._store else ()

    def stats(self) -> Stats:
        """Counters over all layers since loading: hits, misses, bytes read, promotions ...; all zero when off.

        Raises StateError after close().
        """
        return self._store.stats() if self._store else Stats(-1, *[0] * (len(Stats.__dataclass_fields__) - 1))

    def layer_stats(self) -> tuple[Stats, ...]:
        """The same for each layer of `layers`."""
        return self._store.layer_stats() if self._store else ()

    def residency(self, layer: int) -> np.ndarray:
        """int32 [n_expert]: fast slot of each expert of block `layer`, -1 when it is read from its home.

        Raises ConfigError for a block without experts, StateError when residency is off or the model is closed.
        """
        store, index = self._index(layer)
        return store.residency(index)

    def counts(self, layer: int) -> np.ndarray:
        """uint64 [n_expert]: uses of each expert of block `layer` since loading. Raises as residency()."""
        store, index = self._index(layer)
        return store.counts(index)

    def reset_stats(self) -> None:
        """Puts the counters back to zero, after the profile has got them; residency stays."""
        if self._store:
            self.save_profile()
            self._store.reset_stats()
            if self._keeper:
                self._keeper.ignore()

    def save_profile(self) -> bool:
        """Adds what the model's traffic has used since the last time to its profile, as close() does; False where there is no
        profile, or it could not be saved (a line on stderr says why)."""
        return self._keeper.save() if self._keeper else False

    def wait_idle(self, timeout_s: float = 10.0) -> bool:
        """Waits until no expert is being moved; False when that takes longer than `timeout_s` seconds."""
        return self._store.wait_idle(timeout_s) if self._store else True

    def _index(self, layer: int) -> tuple[Store, int]:
        if self._store is None:
            raise StateError(f"Expert residency is off ({self.why}), so no expert has a slot. Pass spark=True to turn it on.")
        if layer not in self.layers:
            raise ConfigError(f"Block {layer} has no experts; the blocks with experts are {', '.join(map(str, self.layers))}.")
        return self._store, self.layers.index(layer)

    def __repr__(self) -> str:
        return f"<Residency {'on' if self.is_active else 'off'}: {self.why}>"


class _Closed:
    """Stands for llama.cpp's objects after close(), where a NULL would crash the process."""

    def __init__(self, model_path: str) -> None:
        self._path = model_path

    def __getattr__(self, name: str) -> Any:
        raise StateError(f"The model '{self._path}' is closed; make a new SparkLlama.")


class SparkLlama(llama_cpp.Llama):
    """llama_cpp.Llama whose experts may be larger than memory.

    All arguments of llama_cpp.Llama, and:

    spark         None (default): residency when the model is a mixture of experts that does not fit the memory available.
                  True: residency always. False: never. SparkConfig: as it says, e.g. SparkConfig(ram_gib=8).
    draft         a model that proposes tokens for this one, of any kind that `dflash_server --draft` takes: a small model with the same
                  vocabulary, or a DFlash, DSpark, EAGLE-3 or MTP draft made for this one; default None.
    draft_tokens  tokens it proposes at a time, 1 or more; default 4.
    exact_verify  round tokens that are verified together as single ones, so that greedy text is the text without a draft; default True.
    fused_qkv     read Q, K and V of a layer as one matrix for up to eight tokens where they lie next to each other; default True.

    `.spark` has the figures (class Residency). close() frees everything and may be called again; `with` does it too.
    Loading is serialised over threads; one object belongs to one thread at a time, as in llama_cpp.

    Raises ModelLoadError (with llama.cpp's own reason), ModelFileError, ConfigError, BudgetError, MachineMemoryError,
    NoExpertsError, DraftError, BuildError: all are SparkError.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        spark: SparkConfig | bool | None = None,
        draft: str | os.PathLike[str] | None = None,
        draft_tokens: int = 4,
        exact_verify: bool = True,
        fused_qkv: bool = True,
        **kwargs: Any,
    ) -> None:
        self._spark_arguments = {
            "spark": spark,
            "draft": draft,
            "draft_tokens": draft_tokens,
            "exact_verify": exact_verify,
            "fused_qkv": fused_qkv,
            "use_mmap": kwargs.get("use_mmap", True),
        }
        self._store: Store | None = None
        self._keeper: ProfileKeeper | None = None
        self._draft: LlamaDraft | None = None
        path = os.fspath(model_path)
        try:
            config = _make_config(spark)
            drafting = self._check_draft(draft, path, kwargs)
            self.spark = self._open_residency(path, config, kwargs)
            if self._store is not None:
                kwargs["use_mmap"] = False  # a mapping of the whole file would be read ahead and stay resident, experts included
            _load(path, lambda: self._load_model(path, kwargs))
            if drafting:
                options = {"n_draft": draft_tokens, "n_gpu_layers": kwargs.get("n_gpu_layers", 0), "exact_verify": exact_verify}
                self._draft = self.draft_model = _load(draft, lambda: LlamaDraft(self, drafting, **options))
            self._place(config)
            self._learn(config)
        except BaseException:
            self._keeper = None  # whatever was counted is no traffic
            self.close()
            raise

    def _load_model(self, path: str, kwargs: dict[str, Any]) -> None:
        set_fused_qkv(self._spark_arguments["fused_qkv"])
        super().__init__(path, **kwargs)
        if self._lora_adapter is not None and not self._lora_adapter:  # llama_cpp takes a null pointer for an adapter
            raise RuntimeError(f"Failed to initialize LoRA adapter from lora path: {self.lora_path}")

    def _open_residency(self, path: str, config: SparkConfig, kwargs: dict[str, Any]) -> Residency:
        if config.mode == "off" or kwargs.get("vocab_only"):
            return Residency(None, None, "spark=False" if config.mode == "off" else "vocab_only=True loads no experts")
        check_profile(config)
        info = build_info()
        serving = Serving(
            n_ctx=kwargs.get("n_ctx", 512),
            n_batch=kwargs.get("n_batch", 512),
            n_ubatch=kwargs.get("n_ubatch", 512),
            cache_type_k=_cache_type(kwargs.get("type_k")),
            cache_type_v=_cache_type(kwargs.get("type_v")),
            n_gpu_layers=kwargs.get("n_gpu_layers", 0),
            device=f"CUDA{kwargs.get('main_gpu', 0)}",
        )
        model = read_model_info(path)
        file = open_profile(model, config)
        profile = file.begin() if file is not None else None
        decision = decide(
            model,
            read_machine_memory(),
            config,
            serving,
            has_cuda=bool(info.get("cuda_enabled")),
            cuda_reason=str(info.get("cuda", "")),
            gpus=read_gpus(serving.n_gpu_layers),
            hotness=hotness_of(profile, model),
        )
        self._store = open_store(path, decision, config)
        if self._store is not None and file is not None:
            self._keeper = ProfileKeeper(file, self._store, model.n_expert_used, _say, profile)
            if file.warning:
                _say(file.warning)
        if decision.gpu is not None and not serving.n_ctx:
            kwargs["n_ctx"] = decision.serving.n_ctx
        return Residency(decision, self._store, decision.why, self._keeper)

    def _place(self, config: SparkConfig) -> None:
        """Gives the fast slots what the model and its context left of the GPU."""
        decision, store = self.spark.decision, self._store
        if store is None or decision is None or not needs_placing(decision):
            return
        # a full micro-batch first, so that backends have allocated what they allocate at first use
        self.eval([(31 * i) % self.n_vocab() for i in range(max(1, min(self.n_batch, self.n_ctx() - 1)))])
        self.reset()
        self._ctx.kv_cache_clear()
        self.spark.decision = place(store, decision, config, self._keeper.hotness if self._keeper else None)

    def _learn(self, config: SparkConfig) -> None:
        """Where no profile says which experts are hot, and the configuration wants that, agent history is read first."""
        decision, store, keeper = self.spark.decision, self._store, self._keeper
        if store is None or decision is None:
            return
        if store.stats().uses > 0:
            store.reset_stats()  # a warm-up is no traffic
        if keeper is not None:
            keeper.ignore()
        history = None if decision.has_all_fast or (keeper is not None and keeper.hotness is not None) else find_history(config)
        if history is None:
            return
        with Prefill(ctypes.cast(self._ctx.ctx, ctypes.c_void_p).value, self.context_params.n_outputs_max or self.n_batch) as reader:
            done = read_history(history, config, reader, _say)
        if done is None or done.n_tokens == 0:
            return
        uses = {layer.layer: store.counts(i) for i, layer in enumerate(store.layers)}
        if keeper is not None:
            keeper.save("history")
        store.reset_stats()
        if keeper is not None:
            keeper.ignore()
        self.spark.decision = replan(decision, config, prior_uses(uses, decision.model.n_expert_used))
        assert self.spark.decision.plan is not None
        store.place(self.spark.decision.plan)

    @staticmethod
    def _check_draft(draft: str | os.PathLike[str] | None, path: str, kwargs: dict[str, Any]) -> list[str]:
        """Checks a draft against its target before either is loaded; which kind it is, as arguments of llama-server, [] without one."""
        if draft is None:
            return []
        if kwargs.get("draft_model") is not None:
            raise ConfigError("draft= and draft_model= both name a draft: give one of them.")
        return resolve(draft, path)

    def eval(self, tokens: Sequence[int]) -> None:
        """Computes tokens at the end of the text, as llama_cpp.Llama.eval()."""
        if self._draft is None:
            super().eval(tokens)
        else:
            self._draft.eval(self, list(tokens))

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """Samples a token, as llama_cpp.Llama.sample()."""
        token = super().sample(*args, **kwargs)
        if self._draft is not None:
            self._draft.sampled(kwargs.get("idx"))
        return token

    def generate(self, *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """Tokens after a prompt, as llama_cpp.Llama.generate()."""
        try:
            yield from super().generate(*args, **kwargs)
        finally:
            if self._draft is not None:
                self._draft.end_text(self)

    def load_state(self, state: Any) -> None:
        """Goes back to a state of save_state(); a draft begins anew there."""
        super().load_state(state)
        if self._draft is not None:
            self._draft.adopt(self)

    def draft_stats(self) -> SpeculationStats:
        """What the draft proposed, what of it was kept, and where the time of these steps went. Raises StateError without a draft."""
        if self._draft is None:
            raise StateError("This model has no draft. Pass draft=FILE to load one.")
        return self._draft.stats()

    @property
    def model_params(self) -> Any:
        """llama_model_params of this model, as llama_cpp.Llama fills them."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        if self._store is not None:
            params.tensor_buft_overrides = self._store.overrides_address
            decision = self.spark.decision
            if decision is not None and decision.gpu is not None:  # one device holds all experts
                params.split_mode, params.main_gpu = llama_cpp.LLAMA_SPLIT_MODE_NONE, int(decision.gpu.gpu.name.removeprefix("CUDA"))
        self._model_params = params

    def close(self) -> None:
        """Frees the model, its experts and the draft. May be called again, and after a failed constructor."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()  # while the counters can be read
        if "_stack" in self.__dict__:
            super().close()
            self._ctx = self._model = self._batch = _Closed(self.model_path if "model_path" in self.__dict__ else "")
        store, self._store = self._store, None
        if store is not None:
            store.close()
        draft, self._draft = self._draft, None
        if draft is not None:
            draft.close()  # already, where the context was there to be closed

    def __del__(self) -> None:
        if "_store" in self.__dict__:  # else the constructor did not begin
            self.close()

    def __enter__(self) -> SparkLlama:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Constructor arguments, for pickling: the copy loads the model again."""
        state = super().__getstate__() | self._spark_arguments
        if self._spark_arguments["draft"] is not None:
            state["draft_model"] = None  # the copy opens its own
        return state


def _say(text: str) -> None:
    say(f"spark: {text}")


def _make_config(spark: SparkConfig | bool | None) -> SparkConfig:
    if spark is None:
        return SparkConfig(mode="auto")
    if isinstance(spark, bool):
        return SparkConfig(mode="on" if spark else "off")
    if isinstance(spark, SparkConfig):
        return spark
    raise ConfigError(f"spark is {spark!r}: give True, False, None or a SparkConfig.")


def _cache_type(value: int | None) -> str:
    """Name of a ggml type, f16 (llama.cpp's default) when not given; "" for a number ggml does not know."""
    if value is None:
        return "f16"
    known = {int(t): t.name.lower() for t in gguf.GGMLQuantizationType}
    return known.get(int(value), "")


def _load(path: str | os.PathLike[str], load: Callable[[], T]) -> T:
    """Calls `load`; a failure of llama.cpp becomes a ModelLoadError with the reason from its log."""
    with _loading, LoadLog(llama_cpp) as log:
        try:
            return load()
        except SparkError:
            raise
        except (ValueError, RuntimeError) as e:
            tail = log.tail()
            reason = f" llama.cpp says:\n{tail}" if tail else " llama.cpp logged no reason."
            raise ModelLoadError(f"'{os.fspath(path)}' cannot be used: {str(e).rstrip('.')}.{reason}") from e

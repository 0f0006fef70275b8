"""Runs llama-server in this process, with a Session behind its callbacks.

No exception crosses into C: each callback catches at the boundary, prints one sentence and returns a status. cffi
callbacks may be called from any thread; they take the GIL, which the serving thread gives up while it is in C.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import errors
from .._native import check, native
from ..budget import Serving
from ..draft_config import DraftConfig
from .session import ROUTES, LoadingModel, Session, say


def _guarded(what: str, call: Callable[[], None]) -> int:
    """0, or 1 after printing why `call` failed."""
    try:
        call()
        return 0
    except (errors.SparkError, OSError) as e:
        say(f"error: {e}")
    except Exception as e:  # the boundary: a bug of ours must not end the server's process without a word
        say(f"error: {what} failed, please report this: {type(e).__name__}: {e}")
        say(traceback.format_exc())
    return 1


class Callbacks:
    """struct spark_server_callbacks for a session. Keep it alive while the server runs: C holds pointers into it."""

    def __init__(self, session: Session, serving: Serving, drafting: DraftConfig, n_drafted: int | None, child_program: str | None, child_args: Sequence[str]) -> None:
        ffi, lib = native()
        self._ffi, self._lib, self._session, self._serving = ffi, lib, session, serving
        self._routes = [ffi.new("char[]", route.encode()) for route in ROUTES]
        self._child_args = [ffi.new("char[]", os.fsencode(arg)) for arg in child_args]
        self._arrays = [ffi.new("char *[]", self._routes), ffi.new("char *[]", self._child_args or [ffi.NULL])]
        self._child_program = ffi.new("char[]", os.fsencode(child_program)) if child_program else ffi.NULL
        self._functions = {
            name: ffi.callback(signature, function, error=error)
            for name, signature, function, error in (
                ("model_loading", "int32_t(void *, struct spark_server_model *, struct spark_store **)", self._model_loading, 1),
                ("contexts_created", "int32_t(void *, struct llama_context *)", self._contexts_created, 1),
                ("model_loaded", "void(void *)", self._model_loaded, None),
                ("request_finished", "void(void *, int32_t, int32_t, int32_t, double, double)", self._request_finished, None),
                ("http_get", "int32_t(void *, const char *, struct spark_http_reply *)", self._http_get, 1),
                ("props", "int32_t(void *, struct spark_http_reply *)", self._props, 1),
                ("shutdown", "void(void *)", self._shutdown, None),
            )
        }
        self.struct = ffi.new("struct spark_server_callbacks *")
        for name, function in self._functions.items():
            setattr(self.struct, name, function)
        self.struct.routes, self.struct.n_routes = self._arrays[0], len(self._routes)
        self.struct.child_args, self.struct.n_child_args = self._arrays[1], len(self._child_args)
        self.struct.child_program = self._child_program
        self.struct.drafting.exact_verify = drafting.exact_verify
        self.struct.drafting.verify_width, self.struct.drafting.inexact_width = drafting.widths(n_drafted)

    def _text(self, pointer: Any) -> str:
        return os.fsdecode(self._ffi.string(pointer))

    def _reply(self, reply: Any, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self._lib.spark_http_reply_set(reply, 200, b"application/json; charset=utf-8", body, len(body))

    def _model_loading(self, _user: Any, model: Any, out: Any) -> int:
        def call() -> None:
            # what llama-server has parsed wins over what was read from the arguments
            serving = replace(
                self._serving,
                n_ctx=model.n_ctx,
                n_batch=model.n_batch,
                n_ubatch=model.n_ubatch,
                n_parallel=model.n_parallel,
                n_gpu_layers=model.n_gpu_layers,
                device=self._text(model.device),
            )
            store = self._session.model_loading(LoadingModel(self._text(model.path), serving, model.has_overrides))
            if store is not None:
                out[0] = store.handle
                model.n_ctx = self._session.n_ctx(model.n_ctx)

        return _guarded("deciding about the model", call)

    def _contexts_created(self, _user: Any, context: Any) -> int:
        return _guarded("placing experts", lambda: self._session.contexts_created(context))

    def _model_loaded(self, _user: Any) -> None:
        _guarded("the report after loading", self._session.model_loaded)

    def _request_finished(self, _user: Any, _slot: int, n_prompt: int, n_decoded: int, prompt_ms: float, decode_ms: float) -> None:
        _guarded("counting a request", lambda: self._session.request_finished(n_prompt, n_decoded, prompt_ms, decode_ms))

    def _http_get(self, _user: Any, path: Any, reply: Any) -> int:
        return _guarded("answering a request", lambda: self._reply(reply, self._session.answer(self._text(path))))

    def _props(self, _user: Any, reply: Any) -> int:
        return _guarded("answering /props", lambda: self._reply(reply, self._session.props()))

    def _shutdown(self, _user: Any) -> None:
        _guarded("the report at the end", self._session.shutdown)


def find_program() -> str | None:
    """The installed dflash_server script, which a router starts its children with; None when there is none."""
    own = Path(sys.argv[0])
    for candidate in (own, Path(sys.executable).with_name("dflash_server")):
        if candidate.name == "dflash_server" and candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate.absolute())
    return shutil.which("dflash_server")


def run_server(
    session: Session | None,
    args: Sequence[str],
    serving: Serving = Serving(),
    child_args: Sequence[str] = (),
    drafting: DraftConfig = DraftConfig(),
    n_drafted: int | None = None,
) -> int:
    """Serves until the end; llama-server's exit code. `args` without argv[0]. Without a session: exactly llama-server. n_drafted: see
    DraftConfig.widths.

    In the main thread: signal handlers are set. May end the process inside C, as `--help` does. Raises SparkError.
    """
    ffi, lib = native()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Python's handler would only set a flag that nobody looks at while C runs; llama-server sets its own after loading.
        signal.signal(number, signal.SIG_DFL)
    argv = [ffi.new("char[]", os.fsencode(arg)) for arg in (sys.argv[0], *args)]
    callbacks = Callbacks(session, serving, drafting, n_drafted, find_program(), child_args) if session else None
    exit_code = ffi.new("int32_t *")
    sys.stdout.flush()
    with contextlib.suppress(OSError):  # a full disk under the log ends no server
        sys.stderr.flush()
    try:
        check(lib.spark_server_run(len(argv), ffi.new("char *[]", argv), callbacks.struct if callbacks else ffi.NULL, exit_code))
    finally:
        if session:
            session.close()
    return int(exit_code[0])

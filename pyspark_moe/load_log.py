"""Keeps the last lines that llama.cpp logs while a model is loaded, so that a failure can say why.

llama-cpp-python mutes stderr and raises "Failed to load model from file"; the reason is in llama.cpp's log alone. The
log callback of llama.cpp is one per process, so it is replaced only while somebody listens, passes every line on to
the callback that was there, and is put back afterwards.
"""
from __future__ import annotations

import ctypes
import threading
from collections import deque
from types import ModuleType, TracebackType
from typing import Any

_INFO, _WARN, _ERROR, _CONTINUED = 2, 3, 4, 5  # enum ggml_log_level of this version
_MAX_LINES = 200
_MAX_SHOWN = 8


class _Tap:
    """The replaced callback, shared by all listeners of the process. Each listener hears its own thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.listeners: dict[int, LoadLog] = {}
        self.previous: Any = None
        self.callback: Any = None

    def add(self, llama_cpp: ModuleType, listener: LoadLog) -> None:
        with self.lock:
            if not self.listeners:
                function, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
                llama_cpp.llama_log_get(ctypes.byref(function), ctypes.byref(data))
                self.previous = (function, data)
                if self.callback is None:
                    self.callback = llama_cpp.llama_log_callback(self.on_line)
                llama_cpp.llama_log_set(self.callback, ctypes.c_void_p(0))
            self.listeners[threading.get_ident()] = listener

    def remove(self, llama_cpp: ModuleType) -> None:
        with self.lock:
            self.listeners.pop(threading.get_ident(), None)
            if self.listeners:
                return
            function, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
            llama_cpp.llama_log_get(ctypes.byref(function), ctypes.byref(data))
            ours = ctypes.cast(self.callback, ctypes.c_void_p).value
            if ctypes.cast(function, ctypes.c_void_p).value == ours:  # else somebody set another one meanwhile: theirs stays
                llama_cpp.llama_log_set(*self.previous)

    def on_line(self, level: int, text: bytes | None, _: Any) -> None:
        listener = self.listeners.get(threading.get_ident())
        if listener is not None and text:
            listener.note(level, text)
        previous = self.previous
        if previous is not None and previous[0]:
            previous[0](level, text, previous[1])


_tap = _Tap()


class LoadLog:
    """Context manager: listens to what llama.cpp logs on this thread. Not to be nested on one thread."""

    def __init__(self, llama_cpp: ModuleType) -> None:
        self._llama_cpp = llama_cpp
        self._lines: deque[tuple[int, str]] = deque(maxlen=_MAX_LINES)

    def note(self, level: int, text: bytes) -> None:
        """One call of llama.cpp's logger: a line, or a part of one."""
        decoded = text.decode("utf-8", errors="replace").rstrip("\n")
        if level == _CONTINUED and self._lines:
            level, begun = self._lines.pop()
            decoded = begun + decoded
        self._lines.append((level, decoded))

    def tail(self) -> str:
        """The last errors, or else warnings, or else lines, each once and on its own line; "" when nothing was logged."""
        for wanted in (_ERROR, _WARN, _INFO):
            told = dict.fromkeys(text for level, text in self._lines if level >= wanted and text.strip(" ."))
            if told:
                return "\n".join(list(told)[-_MAX_SHOWN:])
        return ""

    def __enter__(self) -> LoadLog:
        _tap.add(self._llama_cpp, self)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        _tap.remove(self._llama_cpp)

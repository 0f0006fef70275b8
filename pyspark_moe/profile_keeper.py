"""Keeps the profile of a loaded model: what its traffic has used since the last save goes into the file, off the request path."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from . import demo_model
from .config import SparkConfig
from .errors import ConfigError, ProfileError, ProfileWriteError, StateError
from .model_info import ModelInfo
from .model_profile import model_profile
from .placement import prior_uses
from .routing_profile import MAX_BYTES, SUFFIX, ProfileFile, RoutingProfile, begins_like_profile
from .shared_file import read_regular_file
from .store import Store


def check_profile(config: SparkConfig) -> None:
    """A bad profile is set aside, that is renamed, and another written in its place. Where somebody names a folder, a device or a file
    of another kind instead, nobody wants that: raises ConfigError. What cannot be read is said when the profile is opened."""
    if config.profile in ("auto", "none"):
        return
    try:
        data = read_regular_file(Path(config.profile).expanduser(), MAX_BYTES)
        if data is None or begins_like_profile(data):
            return
        reason = "it does not begin like a routing profile"
    except ValueError as e:
        reason = str(e)
    except OSError:
        return
    raise ConfigError(f"--spark-profile '{config.profile}' is left as it is: {reason}. Name a profile or a new file, for example model{SUFFIX}, or none.")


def open_profile(model: ModelInfo, config: SparkConfig) -> ProfileFile | None:
    """The profile file that the configuration names. None for "none", for a model without experts, and with "auto" for the
    model of the package, whose folder is not the user's. Raises ModelFileError."""
    if config.profile == "none" or not model.is_moe:
        return None
    if config.profile == "auto" and model.path.resolve() == demo_model.path().resolve():
        return None
    return model_profile(model, path=None if config.profile == "auto" else config.profile)


def hotness_of(profile: RoutingProfile | None, model: ModelInfo) -> dict[int, np.ndarray] | None:
    """What placement takes: expected uses of each expert by block; None when the profile knows nothing."""
    if profile is None or profile.is_empty:
        return None
    return prior_uses(profile.counts, model.n_expert_used)


class ProfileKeeper:
    """Feeds the profile of `store`'s model. request_finished() returns at once; a thread saves. Thread safe.

    file     where the profile is; profile: what it held when it was opened, or None
    say      gets a sentence for the user, at most once for each new reason
    """

    def __init__(self, file: ProfileFile, store: Store, n_expert_used: int, say: Callable[[str], None], profile: RoutingProfile | None = None) -> None:
        self.file = file
        self.profile = profile
        self._store, self._n_expert_used, self._say = store, n_expert_used, say
        self._blocks = [layer.layer for layer in store.layers]
        self._saved = {layer.layer: np.zeros(layer.n_expert, dtype=np.uint64) for layer in store.layers}
        self._last_failure = ""
        self._lock = threading.Lock()
        self._has_news = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    @property
    def hotness(self) -> dict[int, np.ndarray] | None:
        """Expected uses by what the profile holds now."""
        if self.profile is None or self.profile.is_empty:
            return None
        return prior_uses(self.profile.counts, self._n_expert_used)

    def new_uses(self) -> tuple[dict[int, np.ndarray], int]:
        """(uses of each expert by block, tokens) that the store has counted and the profile has not got. Raises StateError."""
        with self._lock:
            return self._new_uses()[1:]

    def _new_uses(self) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray], int]:
        now = {block: self._store.counts(i) for i, block in enumerate(self._blocks)}
        if any((now[block] < self._saved[block]).any() for block in self._blocks):  # somebody has put the counters back to zero
            self._saved = {block: np.zeros_like(uses) for block, uses in now.items()}
        new = {block: now[block] - self._saved[block] for block in self._blocks}
        n_tokens = max((int(uses.sum()) // self._n_expert_used for uses in new.values()), default=0)
        return now, new, n_tokens

    def ignore(self) -> None:
        """What was counted until now is no traffic: a warm-up, a self-test. Raises StateError."""
        with self._lock:
            self._saved = self._new_uses()[0]

    def save(self, source: str = "traffic") -> bool:
        """Adds what is new to the file; True when the file has all of it. A failure is said once and kept for the next time."""
        with self._lock:
            try:
                now, new, n_tokens = self._new_uses()
                if n_tokens == 0:
                    return True
                self.profile = self.file.add(new, n_tokens, source)
                self._saved = now
            except StateError:
                return False  # the store is closed
            except (ProfileError, ProfileWriteError) as e:
                if str(e) != self._last_failure:
                    self._last_failure = str(e)
                    self._say(str(e))
                return False
            if self.file.warning and self.file.warning != self._last_failure:
                self._last_failure = self.file.warning
                self._say(self.file.warning)
            return True

    def request_finished(self) -> None:
        """There may be something to save; returns at once."""
        if self._thread is None and not self._is_closing:
            self._thread = threading.Thread(target=self._work, name="spark-profile", daemon=True)
            self._thread.start()
        self._has_news.set()

    def _work(self) -> None:
        while True:
            self._has_news.wait()
            self._has_news.clear()
            if self._is_closing:
                return
            self.save()

    def close(self) -> None:
        """Ends the thread and saves what is left; again is allowed. Before the store is closed."""
        self._is_closing = True
        self._has_news.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        self.save()


def drifted(uses: Mapping[int, np.ndarray], hotness: Mapping[int, np.ndarray] | None, n_expert_used: int) -> dict[int, np.ndarray]:
    """What to place by after `uses` of recent traffic: its own shares and the profile's, in equal parts."""
    recent = prior_uses(uses, n_expert_used)
    if hotness is None:
        return recent
    return {block: (recent[block] + hotness[block]) / 2 if block in recent and block in hotness else recent.get(block, hotness.get(block))
            for block in {*recent, *hotness}}

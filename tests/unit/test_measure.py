"""What measurements stand on: time-outs, children that die or stall, results that say how they ended, corpora in a seeded order."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpora import conversation
from pyspark_moe.command import run_command
from pyspark_moe.errors import ConfigError, CorpusError, EngineError, MeasurementError, StalledError
from pyspark_moe.history.corpus import ShuffledCorpus, read_corpus, write_corpus
from pyspark_moe.measure.calibrate import Counted, check_place, fair_share, partial_path, read_in_child, save_profile, session_tokens
from pyspark_moe.measure.child import Child
from pyspark_moe.measure.limits import Limits
from pyspark_moe.measure.reading_child import ReadingJob
from pyspark_moe.measure.results import ResultFile
from pyspark_moe.routing_profile import ProfileFile, read_profile

JOB = ReadingJob("c", "m", 0, 10, 1.0, 10, 64, 0, None, {})
COUNTS = '{"share": 0.5, "tokens": 7, "pieces": 1, "plain": 0, "counts": {"1": [3, 4]}}'


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":  # ended; whoever inherited it has not looked yet
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} is still there")


# ---- time


def test_time_in_all_and_without_a_sign_of_life() -> None:
    now = [100.0]
    limits = Limits(10, 3, clock=lambda: now[0])
    assert limits.step_s(100.0) == 3
    now[0] = 108.0
    assert limits.step_s(108.0) == 2 and "3 s" in str(limits.stalled("it"))
    now[0] = 111.0
    assert limits.step_s(111.0) < 0 and "--timeout 10 s" in str(limits.stalled("it"))


@pytest.mark.parametrize("times", [(0, 1), (-1, 1), (float("nan"), 1), (float("inf"), 1), (None, 0), (None, float("inf"))])
def test_what_is_no_time_is_refused(times: tuple[float | None, float]) -> None:
    with pytest.raises(ConfigError, match="seconds, more than 0"):
        Limits(*times)


# ---- children


def test_a_child_ends_with_all_it_started() -> None:
    code = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)"
    with Child("it", python(code), stdout=subprocess.PIPE) as child:
        grandchild = int(child.process.stdout.readline())
    assert child.process.returncode == -signal.SIGTERM
    wait_gone(grandchild)


def test_a_child_that_ignores_being_asked_is_killed() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    child = Child("it", python(code), stdout=subprocess.PIPE)
    child.process.stdout.readline()
    child.close(grace_s=0.2)
    assert child.process.returncode == -signal.SIGKILL
    child.close()


def test_a_child_ends_when_its_parent_is_killed() -> None:
    code = "from pyspark_moe.measure.child import Child; c = Child('it', ['sleep', '600']); print(c.process.pid, flush=True); import time; time.sleep(600)"
    parent = subprocess.Popen(python(code), stdout=subprocess.PIPE)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_gone(pid)


def test_how_a_child_ended_is_said() -> None:
    with Child("the server", python("import sys; print('first'); sys.exit('no such model')")) as child:
        error = child.died("loading")
    assert str(error).startswith("the server ended with exit code 1 while it was loading.") and str(error).endswith("no such model")
    with Child("the server", ["sleep", "600"]) as child:
        os.kill(child.process.pid, signal.SIGKILL)
        assert "was ended by SIGKILL" in str(child.died("serving"))


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot be started as the server: No such file"):
        Child("the server", ["/nowhere/llama-server"])


# ---- the reading process


def read(code: str, counted: Counted | None = None, **limits: float) -> None:
    read_in_child(JOB, Limits(**limits), counted or Counted(), command=python(code))


def test_a_stalled_reading_process_is_ended_and_what_it_counted_stays() -> None:
    counted = Counted()
    with pytest.raises(StalledError, match="no sign of life for 0.5 s"):
        read(f"import time; print('{COUNTS}', flush=True); time.sleep(600)", counted, stall_s=0.5)
    assert counted.tokens == 7 and counted.counts[1].tolist() == [3, 4] and not counted.ended


def test_time_for_all_of_it_ends_a_process_that_reports() -> None:
    with pytest.raises(StalledError, match="The time is up"):
        read(f"import time\nwhile True: print('{COUNTS}', flush=True); time.sleep(0.05)", timeout_s=0.5)


def test_lines_in_the_log_are_signs_of_life() -> None:
    code = f"import sys, time\nfor i in range(8): print(i, file=sys.stderr, flush=True); time.sleep(0.25)\nprint('{COUNTS}', flush=True)"
    with pytest.raises(EngineError):  # it lived to report, and then ended without a last report
        read(code, stall_s=1.2)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import sys; sys.exit('no memory')", "ended with exit code 1 while it was loading the model.*no memory"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("print('Traceback', flush=True)", "none of its reports"),
        ("print('[1]', flush=True)", "none of its reports"),
    ],
)
def test_a_dying_reading_process(code: str, text: str) -> None:
    with pytest.raises(EngineError, match=f"(?s){text}"):
        read(code, stall_s=20)


def test_a_reading_process_that_says_why() -> None:
    with pytest.raises(MeasurementError, match="too little memory"):
        read("""print('{"error": "too little memory"}', flush=True)""", stall_s=20)


# ---- results


def test_a_result_says_how_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with ResultFile("bench", path, {"model": Path("m")}) as result:
        assert json.loads(path.read_text())["partial"] is True
        result.results["a"] = 1
        result.write()
    value = json.loads(path.read_text())
    assert value["partial"] is False and value["ended"] == "complete" and value["results"] == {"a": 1} and value["settings"] == {"model": "m"}
    for error, how in ((StalledError("slow"), "time-out: slow"), (EngineError("dead"), "engine died: dead"), (KeyboardInterrupt(), "interrupted"), (SystemExit(143), "interrupted by SIGTERM")):
        with pytest.raises(type(error)):
            with ResultFile("bench", path, {}) as result:
                result.results["a"] = 2
                raise error
        value = json.loads(path.read_text())
        assert value["partial"] is True and value["ended"] == how and value["results"] == {"a": 2}
    assert sorted(os.listdir(tmp_path)) == ["r.json"]


@pytest.mark.parametrize("place", ["missing/r.json", "file/r.json", "."])
def test_a_result_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--json .* cannot be written"):
        ResultFile("bench", tmp_path / place, {})


@pytest.mark.parametrize("content", [b"GGUF\3\0\0\0", b'{"messages": []}\n{"messages": []}\n', b'{"messages": []}\n', b"[" * 100_000, b"\xff", b"1"])
def test_a_result_replaces_no_model_and_no_corpus(tmp_path: Path, content: bytes) -> None:
    path, link = tmp_path / "precious", tmp_path / "link"
    path.write_bytes(content)
    link.symlink_to(path)
    for place in (path, link):
        with pytest.raises(ConfigError, match="--json .* cannot be written: it exists and is no earlier result"):
            ResultFile("bench", place, {})
    assert path.read_bytes() == content


def test_a_result_replaces_no_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # stands for /dev/null: root could replace that
    with pytest.raises(ConfigError, match="not a regular file"):
        ResultFile("bench", tmp_path / "pipe", {})
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


# ---- corpora


def test_a_corpus_in_seeded_order(tmp_path: Path) -> None:
    texts = [f"text {i} " * (i + 1) for i in range(50)]
    path = tmp_path / "c.jsonl"
    write_corpus(path, [conversation(f"s{i // 2}", text) for i, text in enumerate(texts)])
    first = [c.messages[0].text for c in ShuffledCorpus(path, 1)]
    assert sorted(first) == sorted(texts) and first != texts
    assert first == [c.messages[0].text for c in ShuffledCorpus(path, 1)] != [c.messages[0].text for c in ShuffledCorpus(path, 2)]
    corpus = ShuffledCorpus(path)
    assert corpus.n_conversations == 50 and len(corpus.session_bytes) == 25 and sum(corpus.session_bytes.values()) == sum(map(len, texts))
    assert list(ShuffledCorpus(path)) != list(read_corpus(path))


def test_an_empty_damaged_or_changed_corpus(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.touch()
    with pytest.raises(CorpusError, match="has no conversations"):
        ShuffledCorpus(path)
    write_corpus(path, [conversation("a", "one"), conversation("b", "two")], replace=True)
    corpus = ShuffledCorpus(path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CorpusError, match="line 2: cut off"):
        ShuffledCorpus(path)
    with pytest.raises(CorpusError, match="has changed while it was read"):
        list(corpus)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.integers(0, 20_000))
def test_a_fair_share_is_the_largest_that_fits(sizes: list[int], total: int) -> None:
    cap = fair_share(sizes, total)
    if sum(sizes) <= total:
        assert cap == max(sizes)
    else:
        assert sum(min(s, cap) for s in sizes) <= total < sum(min(s, cap + 1) for s in sizes)


def test_tokens_of_a_session() -> None:
    assert session_tokens([400, 4000], 10_000) == 10_000
    assert session_tokens([4_000_000] * 10, 50_000) == 5_000
    assert session_tokens([4_000_000] * 1000, 50_000) == 512
    assert session_tokens([4_000_000], 100) == 100


# ---- the place of a profile


def test_what_may_be_replaced(tmp_path: Path) -> None:
    file = ProfileFile(tmp_path / "m.spark.csv", "f" * 64, {1: 2})
    assert check_place(file, add=False, replace=False) is None
    counted = Counted(tokens=7, counts={1: np.array([3.0, 4.0])})
    save_profile(file, counted, add=False)
    with pytest.raises(ConfigError, match="exists: --add"):
        check_place(file, add=False, replace=False)
    with pytest.raises(ConfigError, match="give one of them"):
        check_place(file, add=True, replace=True)
    assert check_place(file, add=True, replace=False).tokens == 7
    assert save_profile(file, counted, add=True).tokens == 14
    assert save_profile(file, counted, add=False).tokens == 7
    saved = read_profile(file.path)
    assert saved.starts == 0 and saved.sources == {"corpus": 7} and saved.counts[1].tolist() == [3, 4]
    for other in (ProfileFile(file.path, "e" * 64, {1: 2}), ProfileFile(file.path, "f" * 64, {1: 3})):
        for flags in ({"add": True, "replace": False}, {"add": False, "replace": True}):
            with pytest.raises(ConfigError, match="in the way and is left as it is: it is of another model"):
                check_place(other, **flags)
    file.path.write_text("notes")
    with pytest.raises(ConfigError, match="in the way"):
        check_place(file, add=False, replace=True)
    assert file.path.read_text() == "notes"
    with pytest.raises(ConfigError, match="is no folder"):
        check_place(ProfileFile(tmp_path / "none" / "m.spark.csv", "f" * 64, {1: 2}), add=False, replace=False)


def test_a_partial_profile_has_another_name() -> None:
    assert partial_path(Path("/a/m.gguf.spark.csv")) == Path("/a/m.gguf.partial.spark.csv")
    assert partial_path(Path("/a/mine.csv")) == Path("/a/mine.csv.partial.spark.csv")


def test_exit_codes() -> None:
    import click

    def code(error: BaseException) -> object:
        @click.command()
        def fail() -> None:
            raise error

        with pytest.raises(SystemExit) as ended:
            run_command(fail, "x", [])
        return ended.value.code

    assert [code(e) for e in (StalledError("s"), EngineError("e"), MeasurementError("m"), KeyboardInterrupt())] == [124, 1, 1, 130]


def test_results_are_replaced_as_a_whole_and_keep_their_mode(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with ResultFile("bench", path, {}):
        os.chmod(path, 0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

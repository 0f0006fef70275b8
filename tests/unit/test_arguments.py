"""How the command line is divided between us and llama-server."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from pyspark_moe.config import SparkConfig
from pyspark_moe.draft_config import DraftConfig
from pyspark_moe.errors import ConfigError, SparkError
from pyspark_moe.server import cli
from pyspark_moe.server.arguments import has_overrides, read_serving, take_model, value_of

PASSED_ON = [
    ["-m", "m.gguf", "-c", "4096", "-np", "4", "-fa", "on", "--jinja", "--metrics"],
    ["-hf", "user/repo:Q4_K_M", "--host", "0.0.0.0", "--port", "8080"],
    ["--temp", "-1", "--seed", "-1", "-ngl", "99", "-t", "2"],
    ["--rpc", "10.0.0.1:50052,10.0.0.2:50052", "--api-key", "secret"],
    ["--unknown-flag", "--another=value", "-x"],
    ["-ot", ".*=CPU", "-sm", "none", "-v"],
    ["--chat-template-kwargs", '{"enable_thinking": false}', "-md", "d.gguf", "--mmproj", "p.gguf"],
    ["--models-dir", "folder", "--no-warmup", "-h1"],
    ["--spec-draft-n-max", "7", "--draft-p-min", "0.1"],
    [],
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    made: list[tuple] = []

    def run_server(session, args, serving=None, child_args=(), drafting=None, n_drafted=None):  # noqa: ANN001, ANN202
        made.append((session, list(args), serving, list(child_args)))
        return 0

    monkeypatch.setattr(cli, "run_server", run_server)
    monkeypatch.setattr(cli, "build_info", lambda: {"llama_cpp_python": "0", "llama_cpp_commit": "0" * 40, "cuda": "off: test", "cuda_enabled": False})
    return made


def run(args: list[str]) -> int:
    result = CliRunner().invoke(cli.command, args, standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.return_value


@pytest.mark.parametrize("args", PASSED_ON, ids=" ".join)
@pytest.mark.parametrize("ours", [[], ["--spark", "--spark-ram", "2"]], ids=["", "with-ours"])
def test_llama_server_flags_pass_unchanged(calls: list[tuple], args: list[str], ours: list[str]) -> None:
    assert run([*ours, *args]) == 0
    assert calls[-1][1] == args
    half = len(args) // 2 * 1
    if half and not args[half - 1].startswith("-"):
        run([*args[:half], *ours, *args[half:]])
        assert calls[-1][1] == args


def test_flags_of_drafting_reach_the_children_of_a_router(calls: list[tuple]) -> None:
    run(["--spark"])
    assert calls[-1][3] == ["--spark"]
    run(["--no-exact-verify"])
    assert calls[-1][3] == ["--no-exact-verify"]


def test_our_flags_reach_the_session(calls: list[tuple]) -> None:
    run(["-m", "m.gguf", "--spark", "--spark-ram", "2.5", "--spark-policy", "static", "--spark-io-threads", "3", "--spark-force"])
    session, args, _, child = calls[-1]
    assert session.config == SparkConfig(mode="on", ram_gib=2.5, policy="static", io_threads=3, force=True, history="auto")
    assert args == ["-m", "m.gguf"]
    run([*child])
    assert calls[-1][0].config == session.config  # what a router's child is told is the same


@pytest.mark.parametrize(("flags", "mode"), [([], "auto"), (["--spark"], "on"), (["--no-spark"], "off")])
def test_three_states(calls: list[tuple], flags: list[str], mode: str) -> None:
    run(flags)
    assert calls[-1][0].config.mode == mode


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--draft", "16"], "--draft takes a draft model file now.*--spec-draft-n-max 16"),
        (["--draft", "d.gguf"], "needs a model file"),
        (["--spark-ram", "0"], "greater than 0"),
        (["--spark-ram", "-3"], "greater than 0"),
        (["--spark-ram", "nan"], "nan"),
        (["--spark-ram", "1000000"], "more than this machine has"),
        (["--spark-vram", "8"], "needs a CUDA build"),
        (["--spark-slots", "-2"], "0 or more"),
        (["--no-spark", "--spark-slots", "2"], "--no-spark"),
        (["--verify-width", "0"], "--verify-width is 0: .* 1 to 63, or auto"),
        (["--verify-width", "64"], "--verify-width is 64"),
        (["--spark-plan"], "needs a model file"),
        (["a.gguf", "b.gguf"], "Two models"),
        (["a.gguf", "-m", "b.gguf"], "Two models"),
        (["--demo", "-m", "b.gguf"], "--demo serves the model of the package"),
    ],
)
def test_refusals(calls: list[tuple], args: list[str], message: str) -> None:
    with pytest.raises(SparkError, match=message):
        run(args)
    assert not calls


def test_not_a_number_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(["--spark-ram", "lots"])
    assert e.value.code == 2
    assert "'lots' is not a number of GiB" in capsys.readouterr().err


def test_a_width_that_is_no_width_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(["--verify-width", "wide"])
    assert e.value.code == 2
    assert "'wide' is neither a number of drafted tokens nor auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("width", "n_drafted", "expected"),
    [(None, None, (2**31 - 1, 0)), (None, 3, (0, 3)), ("auto", 3, (0, 0)), ("auto", None, (0, 0)), (5, 3, (5, 0)), (5, None, (5, 0))],
)
def test_widths_by_what_may_depend_on_them(width: int | str | None, n_drafted: int | None, expected: tuple[int, int]) -> None:
    assert DraftConfig(verify_width=width).widths(n_drafted) == expected


def test_a_routers_children_get_the_drafting_flags() -> None:
    assert DraftConfig().as_args() == []
    assert DraftConfig(exact_verify=False, verify_width="auto").as_args() == ["--no-exact-verify", "--verify-width", "auto"]


def test_refusals_are_one_line_and_status_1(capsys: pytest.CaptureFixture[str], calls: list[tuple]) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(["--draft", "16"])
    err = capsys.readouterr().err
    assert e.value.code == 1 and err.startswith("dflash_server: error: --draft 16") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "model", "passed"),
    [
        (["m.gguf"], "m.gguf", ["-m", "m.gguf"]),
        (["-c", "4096", "m.gguf", "--jinja"], "m.gguf", ["-c", "4096", "-m", "m.gguf", "--jinja"]),
        (["--jinja", "M.GGUF"], "M.GGUF", ["--jinja", "-m", "M.GGUF"]),
        (["-m", "m.gguf", "-md", "d.gguf", "--lora", "l.gguf"], "m.gguf", ["-m", "m.gguf", "-md", "d.gguf", "--lora", "l.gguf"]),
        (["-hf", "user/repo", "-hff", "file.gguf"], None, ["-hf", "user/repo", "-hff", "file.gguf"]),
        (["blob"], "blob", ["-m", "blob"]),
        (["typo", "--port", "1"], None, ["typo", "--port", "1"]),
    ],
)
def test_the_model_by_position(args: list[str], model: str | None, passed: list[str]) -> None:
    taken = take_model(args, is_file=lambda name: name == "blob")
    assert taken.model == model and list(taken.args) == passed


def test_reading_single_values() -> None:
    assert value_of(["-c", "1", "--ctx-size", "2"], ("-c", "--ctx-size")) == "2"
    assert value_of(["-c"], ("-c",)) is None
    serving = read_serving(["-c", "8192", "-np", "2", "-ctk", "q8_0", "-ub", "x"])
    assert (serving.n_ctx, serving.n_parallel, serving.cache_type_k, serving.n_ubatch) == (8192, 2, "q8_0", 512)
    assert has_overrides(["--cpu-moe"]) and not has_overrides(["-m", "m.gguf"])


def test_help_shows_ours_first_then_how_to_see_the_rest() -> None:
    for flag in ("--help", "-h"):
        text = CliRunner().invoke(cli.command, [flag]).output
        assert text.index("Expert residency:") < text.index("Drafting:") < text.index("--help-llama")
        assert "Every other flag goes to llama-server" in text


def test_help_does_not_depend_on_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> None:
        raise AssertionError("the library was loaded")

    monkeypatch.setattr("pyspark_moe.server.launch.native", no_library)
    assert CliRunner().invoke(cli.command, ["--help"]).exit_code == 0


def test_two_values_of_one_option_take_the_last() -> None:
    with pytest.raises(ConfigError, match="Two models"):
        take_model(["x.gguf", "-m", "y.gguf"])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-m", "m.gguf", "-ctk", "q3_0"], "--cache-type-k q3_0 with --cache-type-v f16"),
        (["-m", "m.gguf", "-ctv", "q8_0", "-fa", "off"], "with --cache-type-v q8_0"),
        (["-m", "m.gguf", "-ctkd", "q8_0", "--spec-draft-type-v", "q4_9"], "--cache-type-k-draft q8_0 with --cache-type-v-draft q4_9"),
    ],
)
def test_cache_types_are_checked_before_the_start(calls: list[tuple], args: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(args)
    assert not calls
    run(["-m", "m.gguf", "-ctk", "q8_0", "-ctv", "q4_0", "-ctkd", "q8_0"])
    assert len(calls) == 1

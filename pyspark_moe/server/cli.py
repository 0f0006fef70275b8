"""dflash_server: llama-server with expert residency. Our flags are read here; every other goes on unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import click

from .. import __version__, demo_model, draft, errors
from .._native import build_info, set_fused_qkv
from ..bootstrap import check_history
from ..command import run_command
from ..config import POLICIES, SparkConfig
from ..decision import check_budgets, decide
from ..decision_gpu import estimate
from ..draft_config import AUTO, USUAL_WIDTH, DraftConfig
from ..gpu import read_gpus
from ..kv_cache import check_pair, supported_pairs
from ..memory import read_machine_memory
from ..model_info import read_model_info
from ..profile_keeper import check_profile
from .arguments import LlamaArguments, cache_pairs, draft_tokens, has_flash_attention, has_overrides, read_serving, take_model
from .launch import run_server
from .report import PREFIX, block
from .session import Session

EPILOG = (
    "Every other flag goes to llama-server unchanged: -m, -c, -np, --host, --port, --api-key, -hf and so on; "
    "`dflash_server --help-llama` shows them all. MODEL is a .gguf file, the same as -m MODEL; without a model the server is "
    "llama-server's router, whose children understand the flags above too."
)


class GroupedOption(click.Option):
    """An option that --help shows under a heading."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class ServerCommand(click.Command):
    """Passes on what it does not know, and shows its options by group."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # -h must not be a click option: click would then read -hf as -h and -f.
        return super().parse_args(ctx, ["--help" if arg == "-h" else arg for arg in args])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record:
                groups.setdefault(getattr(param, "group", "This program"), []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[MODEL] [OPTIONS] [LLAMA-SERVER OPTIONS]")


def option(*names: str, group: str, **kwargs: Any) -> Any:
    return click.option(*names, cls=GroupedOption, group=group, **kwargs)


class Gib(click.ParamType):
    """A number of GiB; SparkConfig checks the value, so that scripts get the same sentences."""

    name = "GiB"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of GiB, for example {param.opts[0] if param else '--spark-ram'} 8.", param, ctx)


class VerifyWidth(click.ParamType):
    """A number of tokens, or auto; DraftConfig checks the number."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == AUTO:
            return AUTO
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number of drafted tokens nor {AUTO}.", param, ctx)


@click.command(
    "dflash_server",
    cls=ServerCommand,
    epilog=EPILOG,
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"], "max_content_width": 110},
)
@option(
    "--spark/--no-spark",
    "spark",
    group="Expert residency",
    default=None,
    help="Keep hot experts in fast slots and read the others when they are needed, with the same tokens. "
    "Default: automatic, only for a mixture-of-experts model that does not fit the memory available.",
)
@option("--spark-ram", group="Expert residency", type=Gib(), metavar="GiB", help="RAM that expert weights may occupy; a promise, refused when it cannot be kept.")
@option("--spark-vram", group="Expert residency", type=Gib(), metavar="GiB", help="GPU memory the whole process may use; a promise, refused when it cannot be kept.")
@option("--spark-slots", group="Expert residency", type=int, metavar="N", help="Fast slots in every layer instead of a budget, 0 or more.")
@option("--spark-force", group="Expert residency", is_flag=True, help="Start although the machine seems to have too little memory.")
@option("--spark-plan", group="Expert residency", is_flag=True, help="Print what would be in effect for MODEL and exit; no weights are loaded.")
@option("--spark-policy", group="Expert residency", type=click.Choice(POLICIES), default="frequency", show_default=True,
        help="What chooses the expert that leaves a fast slot. static: none ever does. chaos: for tests.")
@option("--spark-profile", group="Expert residency", metavar="FILE", default="auto", show_default=True,
        help="Where to remember which experts the traffic uses. auto: beside the model, or in the cache folder. none: nowhere.")
@option("--spark-history", group="Expert residency", metavar="FOLDER", default="auto", show_default=True,
        help="What a model without a profile reads first, to learn which experts are hot: a folder of agent sessions, auto (Claude Code's and Codex's), or none. No text is kept.")
@option("--spark-history-tokens", group="Expert residency", type=int, metavar="N", default=100_000, show_default=True, help="At most this many tokens of it.")
@option("--spark-history-seconds", group="Expert residency", type=float, metavar="S", default=45.0, show_default=True, help="At most this long.")
@option("--spark-io-threads", group="Expert residency", type=int, default=0, metavar="N", help="Threads that read missed experts, 1 to 64.  [default: chosen]")
@option("--draft", "draft_file", group="Drafting", metavar="FILE", help="Draft model; the kind of drafting is read from the file and checked against the model.")
@option("--exact-verify/--no-exact-verify", group="Drafting", default=True, show_default=True,
        help="Round drafted tokens that are verified together as single ones: greedy text is the text without a draft. The cost is printed at start.")
@option("--verify-width", group="Drafting", type=VerifyWidth(), metavar="N|auto",
        help="Drafted tokens of a sequence that are verified at once. auto: as many as pay, by what steps cost here and how many of the sequence's are accepted.  [default: auto with --draft where that cannot change the text]")
@option("--fused-qkv/--no-fused-qkv", group="Computing", default=True, show_default=True,
        help="Read Q, K and V of a layer as one matrix for up to eight tokens, where they are of one type and lie next to each other, as on a GPU. Every row rounds as before.")
@option("--demo", group="This program", is_flag=True, help="Serve the small model that comes with the package; --spark then keeps half of its experts.")
@option("--help-llama", group="This program", is_flag=True, help="Show llama-server's own flags and exit.")
@option("--version", group="This program", is_flag=True, help="Show the versions of this program and of llama-server and exit.")
@click.argument("llama_args", nargs=-1, type=click.UNPROCESSED, metavar="[LLAMA-SERVER OPTIONS]")
def command(**flags: Any) -> int:
    """llama-server for mixture-of-experts models that are bigger than the memory they should run from."""
    return serve(**flags)


def serve(
    *,
    spark: bool | None,
    spark_ram: float | None,
    spark_vram: float | None,
    spark_slots: int | None,
    spark_force: bool,
    spark_plan: bool,
    spark_policy: str,
    spark_profile: str,
    spark_history: str,
    spark_history_tokens: int,
    spark_history_seconds: float,
    spark_io_threads: int,
    draft_file: str | None,
    exact_verify: bool,
    verify_width: int | str | None,
    fused_qkv: bool,
    demo: bool,
    help_llama: bool,
    version: bool,
    llama_args: Sequence[str],
) -> int:
    """What the command does; the exit code. Raises SparkError."""
    if help_llama:
        return run_server(None, ["--help"])
    if version:
        info = build_info()
        click.echo(
            f"dflash_server {__version__} (llama-cpp-python {info['llama_cpp_python']}, llama.cpp {info['llama_cpp_commit'][:9]}, CUDA {info['cuda']})"
        )
        return run_server(None, ["--version"])

    arguments = take_model(llama_args)
    if demo:
        arguments = _use_demo(arguments)
        if spark and spark_ram is None and spark_slots is None and spark_vram is None:
            spark_ram = demo_model.half_of_experts_gib()
    config = SparkConfig(
        mode="auto" if spark is None else "on" if spark else "off",
        vram_gib=spark_vram,
        ram_gib=spark_ram,
        slots=spark_slots,
        force=spark_force,
        policy=spark_policy,
        profile=spark_profile,
        history=spark_history,
        history_tokens=spark_history_tokens,
        history_seconds=spark_history_seconds,
        io_threads=spark_io_threads,
    )
    drafting = DraftConfig(exact_verify=exact_verify, verify_width=verify_width)
    info = build_info()
    cuda = (bool(info.get("cuda_enabled")), str(info.get("cuda", "")))
    if spark_plan:
        return _print_plan(config, arguments, cuda)
    check_budgets(config, read_machine_memory(), *cuda)  # before a model is downloaded
    check_history(config)
    check_profile(config)
    args = list(arguments.args)
    set_fused_qkv(fused_qkv)
    more = drafting.as_args() + ([] if fused_qkv else ["--no-fused-qkv"])
    n_drafted = None
    if draft_file is not None:
        n_drafted = draft_tokens(args) or USUAL_WIDTH
        args += _draft_args(draft_file, arguments, drafting)
    _check_cache_types(args, cuda[0])
    return run_server(Session(config, cuda), args, read_serving(args), child_args(config) + more, drafting, n_drafted)


def _use_demo(arguments: LlamaArguments) -> LlamaArguments:
    if arguments.model is not None:
        raise errors.ConfigError(f"--demo serves the model of the package, but '{arguments.model}' is given too: remove one of them.")
    path = str(demo_model.path())
    return LlamaArguments((*arguments.args, "-m", path), path)


def _draft_args(draft_file: str, arguments: LlamaArguments, drafting: DraftConfig) -> list[str]:
    if draft_file.lstrip("-").isdigit():
        raise errors.ConfigError(
            f"--draft {draft_file}: --draft takes a draft model file now. The number of tokens to draft is --spec-draft-n-max {draft_file}."
        )
    if arguments.model is None:
        raise errors.ConfigError(f"--draft {draft_file} is checked against the model, so it needs a model file: MODEL, -m or --demo.")
    args = draft.resolve(draft_file, arguments.model)
    if draft_tokens(arguments.args) is None:  # what is drafted bounds what can be verified
        width = drafting.verify_width
        args += ["--spec-draft-n-max", str(draft.most_drafted(draft_file, width if isinstance(width, int) else None))]
    return args


def _check_cache_types(args: Sequence[str], has_cuda: bool) -> None:
    n_gpu_layers = read_serving(args).n_gpu_layers
    is_on_gpu = has_cuda and n_gpu_layers != 0 and bool(read_gpus(n_gpu_layers))
    pairs = supported_pairs(is_on_gpu=is_on_gpu, has_flash_attention=has_flash_attention(args))
    for pair in cache_pairs(args):
        check_pair(pair.k, pair.v, pair.flags, pairs)


def _print_plan(config: SparkConfig, arguments: LlamaArguments, cuda: tuple[bool, str]) -> int:
    if arguments.model is None:
        raise errors.ConfigError("--spark-plan needs a model file: MODEL, -m or --demo.")
    serving = read_serving(arguments.args)
    decision = decide(
        read_model_info(arguments.model),
        read_machine_memory(),
        config,
        serving,
        has_cuda=cuda[0],
        cuda_reason=cuda[1],
        has_overrides=has_overrides(arguments.args),
        gpus=read_gpus(serving.n_gpu_layers),
    )
    for line in block(estimate(decision, config)):
        click.echo(f"{PREFIX} {line}")
    return 0


def child_args(config: SparkConfig) -> list[str]:
    """The configuration as flags, for the children of a router."""
    args = {"on": ["--spark"], "off": ["--no-spark"], "auto": []}[config.mode]
    for flag, value in (("--spark-ram", config.ram_gib), ("--spark-vram", config.vram_gib), ("--spark-slots", config.slots)):
        if value is not None:
            args += [flag, repr(value)]
    if config.force:
        args.append("--spark-force")
    if config.policy != "frequency":
        args += ["--spark-policy", config.policy]
    for flag, value, default in (
        ("--spark-profile", config.profile, "auto"),
        ("--spark-history", config.history, "auto"),
        ("--spark-history-tokens", config.history_tokens, 100_000),
        ("--spark-history-seconds", config.history_seconds, 45.0),
    ):
        if value != default:
            args += [flag, str(value)]
    if config.io_threads:
        args += ["--spark-io-threads", str(config.io_threads)]
    return args


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the `dflash_server` script."""
    run_command(command, "dflash_server", argv)


if __name__ == "__main__":
    main()

"""`shoal run --config run.toml`: options of a job from a file.

Keys are the options of `shoal run` without their dashes, `script` and `args` among
them. The command line beats the file, the file beats the default; where each value
came from goes into config.json and `shoal status`.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.verb import did_you_mean, fail
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.config.launch import GivenOption

LARGEST_BYTES = 1 << 20
"""A file of options is a page; a device or a data file given by mistake is not read to its end."""


def read_options(ctx: typer.Context, file: Path | None) -> Path | None:
    """Defaults of the command from the file: an eager callback, so before any other option is looked at."""
    if file is not None:
        try:
            ctx.default_map = _options(ctx, file)
        except ConfigError as error:
            fail(error)
    return file


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=read_options,
        help='Options from a TOML file: `workers = 4`, `script = "train.py"`, `args = ["--lr", "0.1"]`. The command line beats it.',
    ),
]


def script_args(ctx: typer.Context, script: str, args: list[str] | None) -> list[str]:
    """The script's arguments: those of the file, unless the command line has some or names another script."""
    source = ctx.get_parameter_source("args")
    if source is None or source.name != "DEFAULT_MAP":
        return list(args or ())
    return list(args or ()) if (ctx.default_map or {}).get("script", script) == script else []


def given_options(ctx: typer.Context) -> dict[str, GivenOption]:
    """Every option with its value and its origin."""
    from shoal.config.launch import GivenOption

    file = ctx.params.get("config") or ctx.params.get("plan")
    origins = {"COMMANDLINE": "command line", "DEFAULT_MAP": str(file), "ENVIRONMENT": "environment"}
    found = {}
    for name, value in ctx.params.items():
        if name == "config":
            continue
        if name == "args":
            value = shlex.join(script_args(ctx, ctx.params["script"], value)) or None
        source = ctx.get_parameter_source(name)
        origin = origins.get(source.name if source else "", "default")
        if name == "args" and value is None:
            origin = "default"  # those of the file belong to another script
        is_plain = value is None or isinstance(value, bool | int | float | str)
        shown = value if is_plain else str(value)
        # An address of etcd may hold a password.
        found[name] = GivenOption(value="given" if name == "journal" and value else shown, origin=origin)
    return found


def _options(ctx: typer.Context, file: Path) -> dict[str, Any]:
    """Values by parameter, each of them one that its option would take."""
    params = {param.name: param for param in ctx.command.params if param.name not in ("config", "help")}
    found = {}
    for key, value in _read(file).items():
        name = key.replace("-", "_")
        if name not in params:
            short = [each for each, param in params.items() if f"-{key}" in param.opts]
            hint = f" Did you mean '{short[0]}'?" if short else did_you_mean(name, list(params))
            raise ConfigError(
                f"{file} has '{key}', which is no option of `shoal run`.{hint} Nothing was started."
            )
        if name in found:
            raise ConfigError(
                f"{file} has '{key}' twice, with - and with _. Nothing was started; keep one of them."
            )
        if isinstance(value, bool) and name != "args" and not getattr(params[name], "is_flag", False):
            raise ConfigError(
                f"{file} has {key} = {str(value).lower()}, and --{name.replace('_', '-')} takes a value. Nothing was started; "
                "write the value, or leave the line out for the default."
            )
        found[name] = _value(file, key, value, is_args=name == "args")
        try:
            if name != "args":
                params[name].process_value(ctx, found[name])
        except typer.BadParameter as error:
            reason = error.message.rstrip(".")
            raise ConfigError(f"{file} has {key} = {value!r}: {reason}. Nothing was started.") from None
    return found


def _read(file: Path) -> dict[str, Any]:
    import tomllib

    try:
        with file.open("rb") as opened:
            text = opened.read(LARGEST_BYTES + 1)
        if len(text) > LARGEST_BYTES:
            raise ConfigError(
                f"{file} is larger than {LARGEST_BYTES:,} bytes: no file of options. Nothing was started."
            )
        return tomllib.loads(text.decode())
    except OSError as error:
        raise ConfigError(
            f"the file {file} of --config cannot be read: {error.strerror or error}. Nothing was started; `shoal init` writes one to "
            "start from."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no TOML: {error}. Nothing was started.") from None


def _value(file: Path, key: str, value: Any, *, is_args: bool) -> Any:
    """Command-line form of a value: names in a list become `a,b,c`, resources in a table `worker:cpus=2,memory=4`."""
    if is_args:
        if not isinstance(value, list) or any(isinstance(each, list | dict) for each in value):
            raise ConfigError(
                f"{file} has {key} = {value!r}: the script's arguments are a list of words. Nothing was started; write "
                'args = ["--lr", "0.1"].'
            )
        return [str(each) for each in value]
    if isinstance(value, list):
        return ",".join(str(each) for each in value)
    if isinstance(value, dict):
        if key != "resources" or not all(isinstance(each, dict) for each in value.values()):
            raise ConfigError(
                f"{file} has a table [{key}], and --{key.replace('_', '-')} is one value. Nothing was started; the one table there "
                "is, [resources], has a line for worker and one for server: worker = { cpus = 2, memory = 8 }."
            )
        return " ".join(
            f"{role}:{','.join(f'{name}={amount}' for name, amount in amounts.items())}"
            for role, amounts in value.items()
        )
    return value

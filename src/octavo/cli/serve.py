"""`octavo serve`: the model behind OpenAI's HTTP API, on this machine alone unless asked otherwise.

Owns the flags of the server; those of the engine are made from `Config`. The socket is bound before
the model loads, so that a port in use is told at once.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo import __version__
from octavo.cli.options import with_engine_options
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.engine.engine import Engine
    from octavo.server.settings import ServerSettings

SERVER = "Server"
LIMITS = "Limits of the server"
FAKE = "Paced fake server"


def _option(*flags: str, panel: str = SERVER, **more: Any) -> Any:
    return typer.Option(*flags, rich_help_panel=panel, **more)


Model = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="The same as --model, for those who are used to it.")
]
Host = Annotated[str, _option(help="address to listen on; 0.0.0.0 is every one of this machine")]
Port = Annotated[int, _option(help="0 takes a free one")]
ApiKey = Annotated[
    list[str] | None,
    _option(
        "--api-key", envvar="OCTAVO_API_KEY", help="key that requests must bring; may be repeated", show_default=False
    ),
]
IsolateApiKeys = Annotated[
    bool,
    _option("--isolate-api-keys", help="share kept blocks only between requests of the same API key"),
]
ServedModelName = Annotated[
    list[str] | None,
    _option(
        "--served-model-name",
        help="name of the model in requests and answers; may be repeated, the first is that of answers",
        show_default=False,
    ),
]
ChatTemplate = Annotated[
    str | None, _option(help="chat template: a Jinja file, or the template itself; the model's own if not given")
]
RootPath = Annotated[str, _option(help="path under which a proxy, which strips it, shows this server, such as /octavo")]
AllowedOrigins = Annotated[
    list[str] | None,
    _option("--allowed-origins", help="origin whose pages may call this server; may be repeated", show_default=False),
]
LogRequests = Annotated[
    bool, _option("--enable-log-requests/--no-enable-log-requests", help="one line of JSON on stderr for each request")
]
MaxLogLen = Annotated[int, _option(help="characters of a prompt in its log line")]
WaitingRequests = Annotated[int, _option(panel=LIMITS, help="sequences that may wait to be admitted; more get 429")]
WaitingTokens = Annotated[int, _option(panel=LIMITS, help="prompt tokens that may wait to be admitted; more get 429")]
MaxBodyBytes = Annotated[int, _option(panel=LIMITS, help="bytes of a request's body; more get 413")]
ReceiveTimeout = Annotated[
    float,
    _option(panel=LIMITS, help="seconds for a request's head to arrive, and without any of its body; later gets 408"),
]
SendTimeout = Annotated[
    float,
    _option(panel=LIMITS, help="seconds for which a client may read nothing of a stream before it counts as gone"),
]
ShutdownTimeout = Annotated[
    float | None,
    _option(panel=LIMITS, help="seconds that a drain may take; until the last answer is sent if not given"),
]
Executor = Annotated[
    str, _option(panel=FAKE, help="torch runs the model; sim computes nothing and takes the time that it would take")
]
SimDevice = Annotated[
    str | None, _option("--sim-device", panel=FAKE, help="accelerator, for example h100-sxm", show_default=False)
]
SimTp = Annotated[int, _option("--sim-tp", panel=FAKE, help="tensor-parallel ranks")]
SimCost = Annotated[str, _option("--sim-cost", panel=FAKE, help="as --cost of octavo simulate")]
SimAnswer = Annotated[
    str | None,
    _option(
        "--sim-answer", panel=FAKE, help="lengths of answers that end by themselves, as --output-tokens of simulate",
        show_default=False,
    ),
]  # fmt: skip


@with_engine_options
def serve(  # noqa: PLR0913 - one for each flag
    *,
    engine: dict[str, Any],
    model_name: Model = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    isolate_api_keys: IsolateApiKeys = False,
    served_model_name: ServedModelName = None,
    chat_template: ChatTemplate = None,
    root_path: RootPath = "",
    allowed_origins: AllowedOrigins = None,
    enable_log_requests: LogRequests = True,
    max_log_len: MaxLogLen = 0,
    max_waiting_requests: WaitingRequests = 1024,
    max_waiting_tokens: WaitingTokens = 2**20,
    max_body_bytes: MaxBodyBytes = 8 * 2**20,
    receive_timeout: ReceiveTimeout = 60.0,
    send_timeout: SendTimeout = 120.0,
    shutdown_timeout: ShutdownTimeout = None,
    executor: Executor = "torch",
    sim_device: SimDevice = None,
    sim_tp: SimTp = 1,
    sim_cost: SimCost = "roofline",
    sim_answer: SimAnswer = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does: completions, chats, streams; a page at /.

    Ends on SIGTERM or SIGINT once what runs is finished; a second one ends it at once.
    """
    from octavo.server.bound import bind
    from octavo.server.descriptors import raise_limit
    from octavo.server.host import Host as EngineHost
    from octavo.server.settings import ServerSettings, read_template

    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        isolate_api_keys=isolate_api_keys,
        served_model_names=tuple(served_model_name or ()),
        chat_template=read_template(chat_template),
        root_path=root_path.rstrip("/"),
        allowed_origins=tuple(allowed_origins or ()),
        max_waiting_requests=max_waiting_requests,
        max_waiting_tokens=max_waiting_tokens,
        max_body_bytes=max_body_bytes,
        receive_timeout_s=receive_timeout,
        send_timeout_s=send_timeout,
        shutdown_timeout_s=shutdown_timeout,
        enable_log_requests=enable_log_requests,
        max_log_len=max_log_len,
    )
    fake = {"device": sim_device, "tp": sim_tp, "cost": sim_cost, "answer": sim_answer}
    if executor not in ("torch", "sim"):
        raise ConfigError("executor", executor, "use torch or sim")
    asked = _with_model(engine, model_name)
    raise_limit()
    with bind(settings) as bound:
        thread = EngineHost()
        if executor == "sim":
            from octavo.cli.serve_simulated import start_simulated

            built = thread.call(lambda: start_simulated(asked, fake))
        else:
            from octavo.cli.loading import start_engine

            built = start_engine(asked, quiet=False, host=thread, meanwhile=_import_server)
        gc.freeze()  # all of this stays: collections that come later need not look at it
        _show(built, settings)
        from octavo.server.running import serve_engine

        code = serve_engine(built, settings, bound, lambda text: typer.echo(text, err=True), thread)
    if code:
        raise typer.Exit(code)


def _import_server() -> None:
    importlib.import_module("octavo.server.running")
    importlib.import_module("octavo.cli.start_table")


def _with_model(engine: dict[str, Any], model_name: str | None) -> dict[str, Any]:
    """The model may be named as vLLM's users do, without a flag."""
    if model_name is None:
        return engine
    if "model" in engine:
        raise typer.BadParameter(f"both {model_name!r} and --model {engine['model']!r} are given; name the model once")
    return engine | {"model": model_name}


def _show(built: Engine, settings: ServerSettings) -> None:
    from octavo.cli.start_table import print_start, stderr_console
    from octavo.runtime.measure import measured_ledger

    title = f"octavo {__version__} serves {built.model_name or 'a model'}"
    if built.deployment is not None:
        print_start(stderr_console(), built.deployment, measured_ledger(built), title=title, notes=built.notes)
    else:
        typer.echo("\n".join([title, *built.notes]), err=True)
    if not settings.is_loopback and not settings.api_keys:
        typer.echo(
            f"warning: everybody who reaches {settings.host} may use this server; --api-key asks for a key", err=True
        )

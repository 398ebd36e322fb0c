"""`foundling serve`: models behind OpenAI's API, and a page to talk to them."""

import argparse
from pathlib import Path

from foundling.cli.options import DEVICES, Options, Settings, Verb, above_zero, positive
from foundling.config.errors import ConfigError

MOST_MODELS = 2


def _serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", nargs="+", help="run, RUN@STEP, or a model from elsewhere; two at most"
    )
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--follow", action="store_true", help="take each newer checkpoint of a run")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where to compute")
    parser.add_argument(
        "--weights",
        choices=("fp32", "bf16", "int8"),
        help="their precision (default: bf16 on CUDA, fp32 elsewhere)",
    )
    parser.add_argument(
        "--cache-gb", type=above_zero, help="keys and values (default: what is free)"
    )
    parser.add_argument(
        "--max-length",
        type=positive,
        help="tokens of a request, prompt and answer (default: the rows of its training)",
    )
    parser.add_argument(
        "--max-running", type=positive, help="answers written at a time (default: 64, on CUDA 256)"
    )
    parser.add_argument(
        "--max-waiting", type=positive, default=256, help="answers on their way; more get 429"
    )
    parser.add_argument(
        "--timeout", type=above_zero, default=600.0, help="seconds that an answer may take"
    )
    parser.add_argument(
        "--max-body-mb", type=above_zero, default=4.0, help="largest body of a request, MB"
    )
    parser.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="keys, one a line (or FOUNDLING_API_KEYS); without, none is asked for",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that the server is reached by",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="URL",
        help="pages of this origin may ask (CORS)",
    )
    parser.add_argument("--log-prompts", action="store_true", help="print what is asked")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument("--quiet", action="store_true", help="no line for each request")


def _serve(options: Options, settings: Settings) -> None:
    if len(options.source) > MOST_MODELS:
        raise ConfigError(
            f"{len(options.source)} models are given; {MOST_MODELS} are served at most."
        )
    if not 0 <= options.port < 1 << 16:
        raise ConfigError(f"--port {options.port} is none; give one from 0 to 65,535.")
    for origin in options.allow_origin:
        if not origin.startswith(("http://", "https://")) or origin.count("/") != 2:
            raise ConfigError(f"--allow-origin {origin} is no origin, such as https://example.org.")
    try:
        from foundling.serve.server import ServeOptions, read_keys, serve
    except ImportError as error:
        raise ConfigError(f"the server needs {error.name}; install it with pip.") from None
    from foundling.runtime.device import choose_device
    from foundling.serve.access import Admission, Limits
    from foundling.serve.served_model import EngineLimits

    engine = EngineLimits(
        device=choose_device(options.device, "fp32").device,
        weights=options.weights,
        cache_bytes=round((options.cache_gb or 0) * 1e9),
        max_running=options.max_running or 0,
        max_length=options.max_length or 0,
    )
    hosts = frozenset(name.lower() for name in (*options.allow_host, options.host))
    admission = Admission(
        keys=read_keys(options.api_keys), hosts=hosts, origins=frozenset(options.allow_origin)
    )
    limits = Limits(
        body_bytes=round(options.max_body_mb * 1e6),
        answer_s=options.timeout,
        sequences=options.max_waiting,
    )
    serve(
        options.source,
        ServeOptions(
            engine=engine,
            host=options.host,
            port=options.port,
            follow=options.follow,
            admission=admission,
            limits=limits,
            logs=not options.quiet,
            logs_prompts=options.log_prompts,
            when_ready=lambda address: _ready(address, opens=options.open),
        ),
    )


def _ready(address: str, *, opens: bool) -> None:
    print(
        f"open {address} in a browser, or point a client at {address}/v1; Ctrl-C ends", flush=True
    )
    if opens:
        import threading
        import webbrowser

        # It may wait for the browser, and the server's loop must not.
        threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()


VERBS = {
    "serve": Verb(
        "answer over HTTP as OpenAI's API does, with a page",
        _serve_options,
        _serve,
        duration_hint="the models are loaded first, 5 s to a minute by their size",
    ),
}

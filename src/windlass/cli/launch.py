"""`windlass launch`: a script in many processes."""

from __future__ import annotations

import argparse
import os

from windlass.config.launch import LaunchPlan
from windlass.core.optional import require


def launch_command(words: list[str]) -> int:
    """Launch what `words` say; returns the exit code."""
    options = _parser().parse_args(words)
    # Torch's store warns in C++ stack traces when another machine has gone; the report says it in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    require("torch", "launch")
    options.engine_options = dict(word.split("=", 1) for word in options.engine_options)
    from windlass.cli.launching.engines import engine

    if options.__dict__.pop("print"):
        print(engine(options.engine).show(LaunchPlan(**vars(options))))
        return 0
    return engine(options.engine).run(LaunchPlan(**vars(options)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="windlass launch", allow_abbrev=False)
    parser.add_argument("--num_processes", dest="processes", type=int, default=1)
    parser.add_argument("--num_machines", dest="machines", type=int, default=1)
    parser.add_argument("--machine_rank", type=int, default=0)
    parser.add_argument("--main_process_ip", dest="main_address")
    parser.add_argument("--main_process_port", dest="main_port", type=int)
    parser.add_argument("--rdzv_backend", dest="rendezvous", default="static")
    parser.add_argument("--max_restarts", type=int, default=0)
    parser.add_argument("--monitor_interval", type=float, default=0.1)
    parser.add_argument("--stall_timeout", type=float)
    parser.add_argument("--log_dir")
    parser.add_argument("--tee", default="0")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("--no_python", action="store_true")
    parser.add_argument("--engine", default="local")
    parser.add_argument("--engine_options", action="append", default=[])
    parser.add_argument("--print", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser

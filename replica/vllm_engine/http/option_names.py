"""Replaces the names of vLLM's options in error messages by kvroute's.

vLLM's messages name options of `vllm serve`, such as --enable-mm-embeds. Users of kvroute set them
with --engine-arg, or with an option of kvroute that has another name.
"""

import json
import re
from argparse import ArgumentParser

from kvroute.settings.owned_engine_args import FIXED, OWNED

OPTION = re.compile(rb"--[a-z][a-z0-9-]*[a-z0-9](?:\.[a-z_]+)?")


_arguments: dict[str, str] = {}  # option of `vllm serve` -> name of the engine argument


def learn(parser: ArgumentParser) -> None:
    """Learn the options of `vllm serve` from its parser. Call this before `replaced`."""
    for action in parser._actions:
        _arguments.update(dict.fromkeys(action.option_strings, action.dest))


def replaced(data: bytes) -> bytes:
    """Return the JSON body of an error of vLLM with kvroute's names of all options."""
    return OPTION.sub(lambda found: json.dumps(_ours(found[0].decode()))[1:-1].encode(), data)


def _ours(option: str) -> str:
    """Return what users of kvroute set in place of an option of vLLM; others stay unchanged."""
    name, _, member = option.partition(".")
    argument = _arguments.get(name)
    if argument is None or argument in FIXED:
        return option
    if argument in OWNED:
        return OWNED[argument]
    if member:
        return f'--engine-arg \'{argument}={{"{member}": "VALUE"}}\''
    is_switch = name.startswith(("--enable-", "--trust-"))
    return f"--engine-arg {argument}={'true' if is_switch else 'VALUE'}"

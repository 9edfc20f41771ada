"""A program that adds an option to kvroute with one line, and prints where the option arrives."""

import sys
import types
from pathlib import Path

import kvroute.settings.options

ABOVE = '    """The options for every replica."""\n'
DEFINITION = '    lookahead: Annotated[int, Positive, Option(CACHE, "Tokens to guess.")] = 3\n'


def main() -> None:
    define()
    from typer.testing import CliRunner

    from kvroute.cli import app
    from kvroute.settings.replica import ReplicaSettings
    from kvroute.settings.serve import load
    from tests.support.settings_table import settings_table

    (settings,) = load({"redis_url": "redis://r"}).resolve()
    received = ReplicaSettings.model_validate(settings.for_replicas())
    (own,) = load({"models": [{"lookahead": 9}]}).per_model
    print(received.lookahead, own.lookahead)  # type: ignore[attr-defined]
    print("lookahead" in settings.for_routers())
    print("--lookahead" in CliRunner().invoke(app, ["serve", "--help-all"]).output)
    print("| `--lookahead` | `KVROUTE_LOOKAHEAD` | `3` | Tokens to guess. |" in settings_table())


def define() -> None:
    """Define the module of the replicas' options with an additional option."""
    (folder,) = kvroute.settings.options.__path__
    file = Path(folder) / "replica.py"
    above, docstring, below = file.read_text().partition(ABOVE)
    module = types.ModuleType("kvroute.settings.options.replica")
    sys.modules[module.__name__] = module
    exec(compile(above + docstring + DEFINITION + below, file, "exec"), vars(module))


if __name__ == "__main__":
    main()

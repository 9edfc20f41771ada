"""The names of kvroute's application and deployments in Ray Serve, and Serve's messages."""

from urllib.parse import quote, unquote

from rich.text import Text

from kvroute.contract.generation import CannotRunError

APPLICATION = "kvroute"

ROUTERS = "Router"  # the deployment's name
REPLICAS = "Replica"  # the deployment's name; with several models the beginning of it


def deployment(model: str | None) -> str:
    """Serve's name for the replicas of a model; None: of the only one. Serve uses the name in file
    names and in log formats, so it must not contain a slash or a percent sign."""
    if model is None:
        return REPLICAS
    return f"{REPLICAS}:{quote(model, safe='').replace('%', '=')}"


def model_of(deployment: str) -> str | None:
    """The model of a deployment's name; None: the only one."""
    _, _, quoted = deployment.partition(":")
    return unquote(quoted.replace("=", "%")) or None


def plain(message: str) -> str:
    """The message without terminal colours, which Ray's tracebacks have."""
    return Text.from_ansi(message).plain


def final_error(message: str) -> str:
    """Why no replica can ever start, in the engine's words; empty unless that is so."""
    last = last_line(message) if message else ""
    return last.partition(f"{CannotRunError.__name__}: ")[2]


def last_line(message: str) -> str:
    """The last line of an error of Ray, which says what is wrong."""
    return plain(message).strip().splitlines()[-1]

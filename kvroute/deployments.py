"""Names of kvroute's application and deployments in Ray Serve, and parsers of Ray's messages."""

import re
from urllib.parse import quote, unquote

from rich.text import Text

from kvroute.contract.generation import CannotRunError

APPLICATION = "kvroute"

ROUTERS = "Router"  # name of the routers' deployment
REPLICAS = "Replica"  # name of the replicas' deployment; its prefix if there are several models
OWN_REPLICAS = "OwnReplica"  # deployment of kvroute's own replicas beside attached servers

PROGRESS = {  # part of a message of Ray Serve -> what it means
    "health check failed": "Ray Serve replaces one that has ended or hangs",
    "to be scheduled": "some wait for a process, or for free GPUs or CPUs",
    "to initialize": "some take long to start",
}
SHORT_CHARS = 200  # the most characters of a message from Ray that are shown as one line


def deployment(model: str | None) -> str:
    """Return the name of the deployment of a model; None means the only model.

    Serve uses the name in file names and in log formats, so it contains no slash and no percent
    sign.
    """
    if model is None:
        return REPLICAS
    return f"{REPLICAS}:{quote(model, safe='').replace('%', '=')}"


def model_of(deployment: str) -> str | None:
    """Return the model in a deployment's name, or None if there is only one model."""
    _, _, quoted = deployment.partition(":")
    return unquote(quoted.replace("=", "%")) or None


def kind_of(deployment: str) -> str:
    """Return what a deployment's processes are called in messages, such as "replica"."""
    name = deployment.partition(":")[0]
    return "own replica" if name == OWN_REPLICAS else name.lower()


def of_model(deployment: str) -> str:
    """Return " of MODEL" for messages, or "" if there is only one model."""
    model = model_of(deployment)
    return f" of {model}" if model else ""


def plain(message: str) -> str:
    """Remove the terminal colours of Ray's tracebacks from a message."""
    return Text.from_ansi(message).plain


def final_error(message: str) -> str:
    """Return the engine's error in a message from Ray if no replica can ever start, else ""."""
    last = last_line(message) if message else ""
    return last.partition(f"{CannotRunError.__name__}: ")[2]


def short(message: str) -> str:
    """Return one line for a message in which Ray reports a problem of its processes."""
    lines = plain(message).strip().splitlines() or [""]
    return f"Ray: {lines[0][:SHORT_CHARS]}"


def ended_pid(message: str) -> int | None:
    """Return the id of the process whose end Ray reports in a message; None: it is another one."""
    pid = re.search(r"Worker PID: (\d+)", message)
    return int(pid[1]) if pid else None


def is_retry(message: str) -> bool:
    """Return whether Ray says in a message that it repeats a call, which nobody has to know."""
    return "so the task will be retried" in message


def start_error(message: str) -> str:
    """Return the error in Ray Serve's message about a deployment, or "" if it has none."""
    return last_line(message) if "Error:" in message else ""


def progress_in(message: str) -> str:
    """Return in kvroute's words what Ray Serve's message says about processes that start."""
    return next((said for part, said in PROGRESS.items() if part in message), "")


def traceback_in(message: str) -> str:
    """Return the traceback of a process that cannot start, without Ray Serve's words before it."""
    return re.sub(r".*?\bError:\s*\n", "", plain(message), count=1, flags=re.DOTALL).strip()


def last_line(message: str) -> str:
    """Return the last line of a message from Ray, which has the error itself."""
    return plain(message).strip().splitlines()[-1]

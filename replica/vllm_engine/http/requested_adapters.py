"""The LoRA adapters by name, as vLLM's application finds the one that a body asks for.

The router has checked the name of an adapter that was added later, and sends its key along
(HttpCall.variant). So the application accepts the name in this request only: it is known to no
other request, since another tenant may have another adapter with this name.
"""

from typing import Any

from vllm.lora.request import LoRARequest

from kvroute.blocks.variants import name_of
from kvroute.replica.vllm_engine.http.request_run import CURRENT


class RequestedAdapters(dict[str, LoRARequest]):
    """The adapters of --lora, and that of the current request.

    Args:
        served_name: the model's name. Bodies can name an adapter as MODEL:ADAPTER, too.
    """

    def __init__(self, served_name: str) -> None:
        super().__init__()
        self._served_name = served_name

    def __contains__(self, model: object) -> bool:
        return super().__contains__(model) or self._requested(model) is not None

    def __missing__(self, model: str) -> LoRARequest:
        if (requested := self._requested(model)) is None:
            raise KeyError(model)
        return requested

    def get(self, model: str, default: Any = None) -> Any:
        return self[model] if model in self else default  # noqa: SIM401  # it would call itself

    def _requested(self, model: object) -> LoRARequest | None:
        """Return the current request's adapter if the body asks for it by this name.

        The application only uses the result's name: the path is not one. The engine gets the
        request of core/lora.py.
        """
        run = CURRENT.get()
        if run is None or not run.call.variant:
            return None
        name = name_of(run.call.variant)
        if model not in (name, f"{self._served_name}:{name}"):
            return None
        return LoRARequest(name, 1, name)

"""Routes of vLLM's server that kvroute does not have, each with the reason.

tests/vllm/test_routes.py fails when vLLM has a route that is neither here nor among kvroute's own.
"""

from collections.abc import Mapping

_COHERE = "kvroute does not have Cohere's form of chats; use {} instead"
_ONE_ENGINE = "it concerns one engine, and routers send each request to any replica; {}"
_APART = "it is for servers that render prompts apart from engines, which routers do already; {}"
_WEIGHTS = (
    "it changes the weights of one engine, and the caches of the fleet would still have blocks of "
    "the old weights; roll the new weights out as docs/operations/rollouts.md describes"
)
_ANY_METHOD = "it lets clients run any method inside an engine"
_STATE = _ONE_ENGINE.format("GET /v1/cluster has the state of all replicas")
_PARALLEL = _ONE_ENGINE.format("kvroute scale changes the number of replicas")
_SLEEP = _ONE_ENGINE.format("kvroute scale stops and starts replicas")
_CACHE = _ONE_ENGINE.format("a replica that is started again has an empty cache")
_PROFILE = _ONE_ENGINE.format("docs/operations/logs.md says how to trace requests")

MISSING: Mapping[str, str] = {  # path -> why kvroute does not have it, and what to do instead
    "/abort_requests": _APART.format("close the connection to end a request"),
    "/cohere/v2/chat": _COHERE.format("/v1/chat/completions"),
    "/cohere/v2/chat/render": _COHERE.format("/tokenize"),
    "/collective_rpc": _ANY_METHOD,
    "/fault_tolerance/apply": _PARALLEL,
    "/fault_tolerance/status": _STATE,
    "/finish_weight_update": _WEIGHTS,
    "/get_world_size": _STATE,
    "/inference/v1/abort_requests": _APART.format("close the connection to end a request"),
    "/inference/v1/generate": _APART.format("/v1/completions takes token ids, too"),
    "/init_weight_transfer_engine": _WEIGHTS,
    "/is_paused": _STATE,
    "/is_scaling_elastic_ep": _PARALLEL,
    "/is_sleeping": _STATE,
    "/kv_event_sources": _STATE,
    "/load": _STATE,
    "/pause": _SLEEP,
    "/release_kv_cache_memory": _SLEEP,
    "/reset_encoder_cache": _CACHE,
    "/reset_mm_cache": _CACHE,
    "/reset_prefix_cache": _CACHE,
    "/resume": _SLEEP,
    "/scale_elastic_ep": _PARALLEL,
    "/server_info": _STATE,
    "/shutdown_weight_transfer_engine": _WEIGHTS,
    "/sleep": _SLEEP,
    "/start_draft_weight_update": _WEIGHTS,
    "/start_profile": _PROFILE,
    "/start_weight_update": _WEIGHTS,
    "/stop_profile": _PROFILE,
    "/tokenizer_info": "the tokenizer's files belong to the model, and /tokenize uses them",
    "/update_weight_version": _WEIGHTS,
    "/update_weights": _WEIGHTS,
    "/v1/chat/completions/derender": _APART.format("/detokenize returns the text of tokens"),
    "/v1/chat/completions/render": _APART.format("/tokenize returns the tokens of a chat"),
    "/v1/completions/derender": _APART.format("/detokenize returns the text of tokens"),
    "/v1/completions/render": _APART.format("/tokenize returns the tokens of a text"),
    "/v1/messages/render": _APART.format("/tokenize returns the tokens of a chat"),
    "/v1/realtime": "its sessions stay on one engine, so that the router could not place requests",
    "/v1/responses/render": _APART.format("/tokenize returns the tokens of a chat"),
    "/v1/systemone": "kvroute does not have it yet; use a chat with a JSON schema",
    "/wake_up": _SLEEP,
    "/weight_checker": _WEIGHTS,
    "/weight_info": _STATE,
}

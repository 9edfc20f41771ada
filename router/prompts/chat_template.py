"""Renders chats to the same text as vLLM does, with the tokenizer's chat template.

A router renders a body only if the result is known to be the same as in vLLM 0.32. A replica
renders all other bodies. Most functions here name the function of vLLM that they imitate. Replicas
render some of the chats again and count the differences.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvroute.contract.http_call import NO_RECORD
from kvroute.router.api.errors import invalid

Message = dict[str, Any]

# Start of a line that Claude Code puts into its system message, and that differs in each request.
BILLING_HEADER = "x-anthropic-billing-header"
TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # type of a part -> name of its text field
ROLES = {"system", "developer", "user", "assistant", "tool"}
# A replica renders bodies with these fields, because they change how a body is rendered.
ONLY_REPLICAS = (
    "add_special_tokens",
    "chat_template",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "truncate_prompt_tokens",
)
# Arguments of the template that a client may not set in chat_template_kwargs.
RESERVED_ARGS = {"chat_template", "messages", "tokenize", "tools"}


class OnlyReplicaError(Exception):
    """The router cannot render this body, so a replica has to."""


class ChatTemplate:
    """The chat template of one model, rendered as vLLM renders it.

    Args:
        tokenizer: transformers' tokenizer of the model, which has the model's own template.
        template: a template to use instead; None: the model's own.
        defaults: chat_template_kwargs for requests that do not set them.
        with_unused_tools: whether tools are in the prompt even if tool_choice is "none".
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        with_unused_tools: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._defaults = defaults or {}
        self._with_unused_tools = with_unused_tools
        # Whether the body has tools -> facts about the template for such bodies.
        self._facts: dict[bool, _Facts] = {}

    @property
    def source(self) -> str:
        """Return the source of all templates that the model may use, joined."""
        own = self._template or self._tokenizer.chat_template or ""
        return "".join(own.values()) if isinstance(own, dict) else own

    def text(
        self,
        body: Mapping[str, Any],
        content_format: str | None,
        *,
        before: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the prompt of a body of /v1/chat/completions.

        Args:
            content_format: how the template expects the content of a message, "string" or "openai",
                as a replica reported it. Empty if replicas do not use the template. None: no
                replica has reported it yet.
            before: messages of a prefix, which come before those of the body.

        Raises:
            OnlyReplicaError: only a replica can render the body.
            TemplateError: the template refuses the body.
        """
        if content_format is None:
            raise OnlyReplicaError(NO_RECORD)
        if not content_format:
            raise OnlyReplicaError("this model's chats are not rendered by a template")
        if any(body.get(name) is not None for name in ONLY_REPLICAS):
            raise OnlyReplicaError("the body has options that only replicas can render")
        if self._template is None and self._tokenizer.chat_template is None:
            raise OnlyReplicaError("the model has no chat template")
        tools = self._tools(body)
        facts = self._facts_of(tools)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise OnlyReplicaError("there are no messages")
        prefix = [_message(_of_prefix(message), content_format) for message in before]
        chat = [_message(message, content_format) for message in messages]
        if not facts.knows_developer and any(message["role"] == "developer" for message in chat):
            chat = _one_system(chat)  # the messages of the prefix stay as they were declared
        return str(
            self._tokenizer.apply_chat_template(
                [*prefix, *chat],
                tools=tools,
                chat_template=self._template,
                tokenize=False,
                **self._options(body, facts),
            )
        )

    def _tools(self, body: Mapping[str, Any]) -> list[Any] | None:
        tools = body.get("tools")
        if tools is None:
            return None
        if not isinstance(tools, list) or not tools:
            raise OnlyReplicaError("tools is not a list, or is empty")
        if body.get("tool_choice") == "none" and not self._with_unused_tools:
            return None
        return [_tool(tool) for tool in tools]

    def _facts_of(self, tools: list[Any] | None) -> "_Facts":
        facts = self._facts.get(bool(tools))
        if facts is None:
            template = self._template or self._tokenizer.get_chat_template(tools=tools)
            facts = self._facts[bool(tools)] = _Facts(template)
        return facts

    def _options(self, body: Mapping[str, Any], facts: "_Facts") -> dict[str, Any]:
        """Return the template's arguments, as vLLM's build_chat_params does."""
        own = body.get("chat_template_kwargs") or {}
        if not isinstance(own, dict):
            raise OnlyReplicaError("chat_template_kwargs is not an object")
        effort = body.get("reasoning_effort")
        requested = {
            "add_generation_prompt": body.get("add_generation_prompt", True),
            "continue_final_message": body.get("continue_final_message", False),
            "documents": body.get("documents"),
            "reasoning_effort": effort,
        }
        if effort is not None and "enable_thinking" not in own:
            requested["enable_thinking"] = effort != "none"
        options = dict(self._defaults)
        for given in (own, requested):
            options |= {name: value for name, value in given.items() if value not in (None, "auto")}
        if RESERVED_ARGS & options.keys():
            raise OnlyReplicaError("chat_template_kwargs has names that clients may not set")
        for name in ("add_generation_prompt", "continue_final_message"):
            _flag(options, name)
        return {name: value for name, value in options.items() if name in facts.variables}


class _Facts:
    """Facts about a template, found in its source as vLLM does."""

    def __init__(self, template: str) -> None:
        import jinja2.meta
        from transformers.utils.chat_template_utils import _compile_jinja_template

        tree = _compile_jinja_template(template).environment.parse(template)
        variables = jinja2.meta.find_undeclared_variables(tree) | _parameters()
        self.variables = variables - RESERVED_ARGS
        # Whether the template handles the role `developer`. If not, vLLM changes it to `system`.
        self.knows_developer = '"developer"' in template or "'developer'" in template


def _parameters() -> set[str]:
    """Return the parameters of transformers' apply_chat_template, as vLLM lists them."""
    from transformers import PreTrainedTokenizerBase

    return set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def _message(given: Any, content_format: str) -> Message:
    """Return a message in the form in which vLLM gives it to the template.

    In vLLM this is _parse_chat_message_content.
    """
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise OnlyReplicaError("a message has an unknown role")
    role = given["role"]
    parts = _parts(given.get("content"), strip_header=role == "system")
    texts = [part["text"] for part in parts]
    if content_format != "openai":
        message: Message = {"role": role, "content": "\n".join(filter(None, texts))}
    elif role == "tool":
        message = {"role": role, "content": "\n".join(texts)}
    else:
        message = {"role": role, "content": parts}
    if role == "assistant":
        _add_assistant_fields(message, given)
    elif role == "tool" and "tool_call_id" in given:
        message["tool_call_id"] = given["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(given.get(name), str):
            message[name] = given[name]
    if role == "developer":
        if given.get("tools") is not None:
            raise OnlyReplicaError("a developer message has tools")
        message["tools"] = None  # as vLLM does
    return message


def _add_assistant_fields(message: Message, given: Mapping[str, Any]) -> None:
    if given.get("tool_calls"):
        if not isinstance(given["tool_calls"], list):
            raise OnlyReplicaError("tool_calls is not a list")
        message["tool_calls"] = [_tool_call(call) for call in given["tool_calls"]]
    reasoning = given.get("reasoning")
    if reasoning is None:
        reasoning = given.get("reasoning_content")
    if reasoning is not None:
        message["reasoning"] = message["reasoning_content"] = reasoning


def _parts(content: Any, *, strip_header: bool) -> list[dict[str, Any]]:
    """Return the text parts of a message's content.

    In vLLM this is _parse_chat_message_content_part.

    Args:
        strip_header: whether to remove Claude Code's billing header.
    """
    if content is None:
        return []
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise OnlyReplicaError("a message's content is neither text nor a list of parts")
    if strip_header:
        content = [part for part in map(without_header, content) if part is not None]
    return [_part(part) for part in content]


def _part(given: dict[str, Any]) -> dict[str, Any]:
    field = TEXT_PARTS.get(str(given.get("type")))
    if field is None or not isinstance(given.get(field), str):
        raise OnlyReplicaError("a message has parts that are not text")
    rest = {name: value for name, value in given.items() if name not in ("type", field)}
    if rest.keys() - {"cache_control"}:
        raise OnlyReplicaError("a part of text has unknown fields")  # vLLM drops some of them
    return {"type": "text", "text": given[field], **rest}


def without_header(part: dict[str, Any]) -> dict[str, Any] | None:
    """Return a part of a message without Claude Code's billing header; None: nothing is left.

    In vLLM this is _strip_claude_code_billing_header.
    """
    text = part.get("text") if part.get("type") == "text" else None
    if not isinstance(text, str) or not text.startswith(BILLING_HEADER):
        return part
    rest = text.partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _tool_call(given: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, and the known fields in vLLM's order.

    Some templates write the fields in the order in which they get them. In vLLM this is
    ChatCompletionMessageFunctionToolCallParam.
    """
    if not isinstance(given, dict) or not isinstance(given.get("function"), dict):
        raise OnlyReplicaError("a tool call is not a function call")
    if given.get("type", "function") != "function":
        raise OnlyReplicaError("a tool call is not a function call")
    arguments = given["function"].get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {}
        except RecursionError:
            raise invalid("messages", "a tool call's arguments are nested too deep") from None
    as_object = arguments if isinstance(arguments, dict) else {}
    function = _in_order(given["function"] | {"arguments": as_object}, "arguments", "name")
    return _in_order(given | {"function": function}, "id", "function", "type")


def _in_order(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return all fields, with those in `names` first."""
    return {**{name: given[name] for name in names if name in given}, **given}


def _tool(given: Any) -> dict[str, Any]:
    """Return a tool's known fields in vLLM's order.

    In vLLM this is ChatCompletionToolsParam.
    """
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise OnlyReplicaError("a tool is not a function with a name")
    strict, deferred = _flag(function, "strict"), _flag(given, "defer_loading")
    own_deferred = _flag(function, "defer_loading")
    fields = {name: function.get(name) for name in ("name", "description", "parameters")}
    if strict is not None:
        fields["strict"] = strict
    if own_deferred is not None or deferred is not None:
        fields["defer_loading"] = deferred if own_deferred is None else own_deferred
    tool = {"type": "function", "function": fields}
    return tool if deferred is None else {**tool, "defer_loading": deferred}


def _flag(given: Mapping[str, Any], name: str) -> bool | None:
    """Return a boolean field, or None if it is not set.

    Raises:
        OnlyReplicaError: the value is not a boolean. vLLM accepts some such values, as "yes" or 1.
    """
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise OnlyReplicaError(f"{name} is neither true nor false")
    return value


def _one_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, with all system and developer messages merged into one at the start.

    In vLLM this is done by _convert_developer_to_system and _consolidate_system_messages.
    """
    converted = [
        _as_system(message) if message["role"] == "developer" else message for message in messages
    ]
    systems = [n for n, message in enumerate(converted) if message["role"] == "system"]
    if systems == [0]:
        return converted
    texts = [_text(converted[number]["content"]) for number in systems]
    merged = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [merged, *(message for message in converted if message["role"] != "system")]


def _of_prefix(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message of a prefix. Prefixes are rendered with `system` instead of `developer`."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _as_system(message: Message) -> Message:
    rest = {name: value for name, value in message.items() if name != "tools"}
    return {**rest, "role": "system"}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join([part["text"] for part in content])
    return str(content)

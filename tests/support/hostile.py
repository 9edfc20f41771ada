"""Bodies of chats with schemas, grammars, tools and lists that take long to process."""

from collections.abc import Iterator
from typing import Any

Body = dict[str, Any]
BIG = 99_000  # number of JSON values; routers reject bodies with more
FEW = 512  # number of tools or similar parts; routers reject bodies with more


def optional(properties: int, **more: Any) -> Body:
    """Return a schema with optional properties; some compilers enumerate all subsets of them."""
    names = {f"property_{number}": {"type": "string"} for number in range(properties)}
    return {"type": "object", "properties": names, "additionalProperties": False, **more}


def nested(levels: int) -> Body:
    schema: Body = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def tools(count: int) -> list[Body]:
    functions = [{"name": f"f{n}", "strict": True, "parameters": optional(3)} for n in range(count)]
    return [{"type": "function", "function": function} for function in functions]


def tags(count: int) -> Body:
    begins = [{"begin": f"<f{n}>", "schema": optional(3), "end": "</f>"} for n in range(count)]
    return {"type": "structural_tag", "structures": begins, "triggers": ["<f"]}


NODE = {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}, "r": {"$ref": "#/$defs/n"}}}
SCHEMAS: dict[str, Body] = {
    "optional": optional(3000, minProperties=1500),
    "nested": nested(30),
    "too_nested": nested(90),
    "recursive": {"$ref": "#/$defs/n", "$defs": {"n": NODE}},
    "refers_to_itself": {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}},
    "enum": {"enum": [f"value-{number}" for number in range(16_000)]},
    "large_enum": {"enum": [f"value-{number}" for number in range(BIG)]},
    "pattern": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"},
    "long_string": {"type": "string", "maxLength": 1_000_000},
}
GRAMMARS: dict[str, Body] = {
    "regex": {"regex": "(a|b)?" * 20_000},
    "repeated": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "brackets": {"regex": "(" * 50_000 + "a" + ")" * 50_000},
    "alternatives": {"grammar": "root ::= " + " | ".join(f'"v{n}"' for n in range(12_000))},
    "large": {"grammar": "root ::= " + " | ".join(f'"v{n}"' for n in range(100_000))},
    "ambiguous": {"grammar": 'root ::= root root | "a" | ""'},
    "choices": {"choice": [f"choice {number}" for number in range(8_000)]},
}
FIELDS: dict[str, Body] = {
    "tags": {"response_format": tags(FEW)},
    "many_tags": {"response_format": tags(1000)},
    "tools": {"tools": tools(FEW)},
    "required_tools": {"tools": tools(FEW), "tool_choice": "required"},
    "many_tools": {"tools": tools(10_000)},
    "large_tool": {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
    "stop": {"stop": [f"s{number}" for number in range(BIG)]},
    "long_stop": {"stop": ["x" * 5_000_000]},
    "bad_words": {"bad_words": [f"w{number}" for number in range(BIG)]},
    "some_bad_words": {"bad_words": [f"word {number} " * 8 for number in range(128)]},
    "logit_bias": {"logit_bias": {str(number): 1 for number in range(BIG)}},
    "some_logit_bias": {"logit_bias": {str(number): 1 for number in range(1000)}},
    "template": {"chat_template": "{% for _ in range(1000000000) %}x{% endfor %}"},
}
FIELDS["large_tool"]["tools"][0]["function"]["parameters"] = SCHEMAS["optional"]


def bodies() -> Iterator[tuple[str, Body]]:
    """Yield the name and the fields of each hostile body."""
    for name, schema in SCHEMAS.items():
        response_format = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
        yield name, {"response_format": response_format}
    for name, grammar in GRAMMARS.items():
        yield name, {"structured_outputs": grammar}
    yield from FIELDS.items()

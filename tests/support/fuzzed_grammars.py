"""Random schemas, regexes and grammars, in the fields that engines compile."""

from typing import Any

from hypothesis import strategies as st

regexes = st.text("ab(|)[]{}*+?^$.\\d09,", max_size=30)
schemas = st.recursive(
    st.sampled_from(["string", "integer", "number", "boolean", "null", "else"]).map(
        lambda name: {"type": name}
    )
    | st.builds(
        lambda pattern, most: {"type": "string", "pattern": pattern, "maxLength": most},
        regexes,
        st.integers(-1, 10**9),
    )
    | st.lists(st.none() | st.integers() | st.text(max_size=9), max_size=4).map(
        lambda values: {"enum": values}
    ),
    lambda inner: (
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            inner,
            st.integers(-1, 10**6),
        )
        | st.lists(inner, max_size=3).map(
            lambda options: {"anyOf": options, "$defs": {"a": options}}
        )
        | st.dictionaries(st.text(max_size=9), inner, max_size=4).map(
            lambda fields: {"type": "object", "properties": fields, "required": [*fields][:1]}
        )
        | inner.map(lambda schema: {"$ref": "#/$defs/a", "$defs": {"a": schema}})
    ),
    max_leaves=6,
)
grammars = (
    schemas.map(lambda schema: {"json": schema})
    | regexes.map(lambda text: {"regex": text})
    | st.text('rot a|"():=*+?\n[]{}19,-', max_size=40).map(
        lambda text: {"grammar": f"root ::= {text}"}
    )
    | st.lists(st.text(max_size=9), max_size=5).map(lambda choices: {"choice": choices})
)
GRAMMARS: dict[str, st.SearchStrategy[Any]] = {  # fields that are compiled
    "structured_outputs": grammars,
    "response_format": schemas.map(
        lambda schema: {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    ),
    "tools": schemas.map(
        lambda schema: [
            {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
        ]
    ),
}

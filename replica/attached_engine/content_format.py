"""In which form a chat template expects the content of messages: as a text, or as a list of parts.

Servers choose the form by the template, unless they have --chat-template-content-format. A template
that loops over the content of a message expects a list.
"""

from collections.abc import Iterator

import jinja2
import jinja2.nodes as nodes

STRING, PARTS = "string", "openai"  # vLLM's names


def content_format(template: str) -> str:
    """Return the form that the template expects; empty: there is no template."""
    if not template:
        return ""
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateSyntaxError:
        return STRING
    contents = set(_content_names(tree))
    loops = any(_is_content(loop.iter, contents) for loop in tree.find_all(nodes.For))
    return PARTS if loops else STRING


def _content_names(tree: nodes.Template) -> Iterator[str]:
    """Yield the variables that have the content of a message."""
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, set()):
            yield assignment.target.name
    calls = [call for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Name)]
    for macro in tree.find_all(nodes.Macro):
        for call in calls:
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                for parameter, given in zip(macro.args, call.args, strict=False):
                    if _is_content(given, set()):
                        yield parameter.name


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    """Return whether an expression is the content of a message, or one of these variables."""
    match node:
        case nodes.Filter() | nodes.Test():
            return _is_content(node.node, names)
        case nodes.Getitem(arg=nodes.Slice()):
            return _is_content(node.node, names)
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return isinstance(node.node, nodes.Name)
        case nodes.Getattr(attr="content"):
            return isinstance(node.node, nodes.Name)
        case nodes.Name():
            return node.name in names
    return False

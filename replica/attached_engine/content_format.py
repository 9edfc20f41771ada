"""In which form a chat template expects the content of messages: as a text, or as a list of parts.

Servers choose the form by the template, unless they have --chat-template-content-format. A template
that loops over the content of a message expects a list. As in vLLM, a variable of the name
"content" counts as the content, and so does a parameter of a macro if a call passes the content.
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
    in_macros = {id(loop): macro for macro in tree.find_all(nodes.Macro) for loop in _loops(macro)}
    for loop in _loops(tree):
        macro = in_macros.get(id(loop))
        names = {"content"} if macro is None else _content_parameters(tree, macro)
        if _is_content(loop.iter, names):
            return PARTS
    return STRING


def _loops(node: nodes.Node) -> Iterator[nodes.For]:
    return node.find_all(nodes.For)


def _content_parameters(tree: nodes.Template, macro: nodes.Macro) -> set[str]:
    """Return the parameters of a macro that get the content of a message."""
    names = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            given = dict(zip([each.name for each in macro.args], call.args, strict=False))
            given |= {keyword.key: keyword.value for keyword in call.kwargs}
            names |= {name for name, value in given.items() if _is_content(value, set())}
    return names


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

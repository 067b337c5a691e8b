"""Does a chat template look at the messages behind the one that it writes?

Where it does not, what it wrote of a conversation is the beginning of what it writes of a longer one, so that an answer
needs no rendering of its own to be seen as it was when it was the last. The syntax tree tells for templates as they are
mostly written: one loop over the messages, which asks them and the loop for nothing but what came before. Any other
template is taken to look ahead, which costs renderings and nothing else.
"""

import re
from functools import cache

from jinja2 import Environment, TemplateSyntaxError, nodes

ANY_MARK = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")  # a tag that only transformers knows
PAST = {"index", "index0", "first", "previtem", "depth", "depth0", "cycle", "changed"}  # of what a loop knows
COMPOSED = (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Block)


def parsed(template: str) -> nodes.Template:
    """The syntax tree. Raises ValueError where the text is no template."""
    try:
        return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(ANY_MARK.sub("", template))
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template cannot be read: {error}") from error


@cache
def looks_ahead(template: str, roles: frozenset[str]) -> bool:
    """May it, in a conversation of these roles? Raises ValueError where the text is no template."""
    return not _Walk(roles).knows_the_past_alone(parsed(template))


class _Walk:
    """One pass over a template, in its order.

    names: those of the messages; speaker: of the message in the loop over them; loop_inside: does `loop` mean another
    loop there; looped: that loop lies behind.
    """

    def __init__(self, roles: frozenset[str]) -> None:
        self.roles, self.names = roles, {"messages"}
        self.speaker: str | None = None
        self.loop_inside = self.looped = False

    def knows_the_past_alone(self, node: nodes.Node, top: bool = True) -> bool:
        """top: is the node always reached, or by branches alone?"""
        match node:
            case nodes.Template():
                return self._all(node.body, top)
            case nodes.Assign(target=nodes.Name(name=name), node=value):
                if self._messages(value):
                    self.names.add(name)
                    return True
                return name != self.speaker and self._children(node)
            case nodes.For() if self._messages(node.iter):
                return self._loop(node, top)
            case nodes.For():
                around = [node.iter, *([node.test] if node.test else []), *node.else_]
                return self._all(around, False) and self._inner(node)
            case nodes.If():
                return self._branches(node, top)
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=asked) if self._in_loop:
                return asked in PAST
            case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value=0)) if name in self.names:
                return True
            case nodes.Compare(
                expr=nodes.Filter(name="length", node=found), ops=[nodes.Operand(expr=nodes.Const(value=0))]
            ):
                return self._messages(found) or self._children(node)  # is there any message?
            case nodes.Name(name=name, ctx="load"):
                return name not in self.names and not (name == "loop" and self._in_loop)
            case nodes.Output() if self._behind:
                return all(isinstance(part, nodes.TemplateData) and not part.data.strip() for part in node.nodes)
        return not isinstance(node, COMPOSED) and self._children(node)

    @property
    def _in_loop(self) -> bool:
        return self.speaker is not None and not self.loop_inside

    @property
    def _behind(self) -> bool:
        return self.looped and self.speaker is None

    def _all(self, found: list[nodes.Node], top: bool) -> bool:
        return all(self.knows_the_past_alone(node, top) for node in found)

    def _children(self, node: nodes.Node) -> bool:
        return all(self.knows_the_past_alone(child, False) for child in node.iter_child_nodes())

    def _messages(self, node: nodes.Node | None) -> bool:
        """Is it all messages, or those from some place on?"""
        match node:
            case nodes.Name(name=name):
                return name in self.names
            case nodes.Getitem(
                node=nodes.Name(name=name), arg=nodes.Slice(start=nodes.Const(value=0 | 1), stop=None, step=None)
            ):
                return name in self.names
        return False

    def _loop(self, node: nodes.For, top: bool) -> bool:
        """The loop over the messages: one, whose text goes nowhere but into the rendering."""
        if not top or self.looped or node.recursive or not isinstance(node.target, nodes.Name):
            return False
        self.looped, self.speaker = True, node.target.name
        parts = [*([node.test] if node.test else []), *node.body, *node.else_]
        found = self._all(parts, False)
        self.speaker = None
        return found

    def _inner(self, node: nodes.For) -> bool:
        """What another loop does again and again."""
        names = (
            {node.target.name}
            if isinstance(node.target, nodes.Name)
            else {n.name for n in node.target.find_all(nodes.Name)}
        )
        outer, self.loop_inside = self.loop_inside, True
        found = self.speaker not in names and self._all(node.body, False)
        self.loop_inside = outer
        return found

    def _branches(self, node: nodes.If, top: bool) -> bool:
        if self._behind:  # the next prompt alone
            match node.test:
                case (
                    nodes.Name(name="add_generation_prompt") | nodes.And(left=nodes.Name(name="add_generation_prompt"))
                ):
                    return not node.elif_ and not node.else_
            return False
        body = [] if self._is_of_no_one(node.test) else node.body
        return self.knows_the_past_alone(node.test, False) and self._all([*body, *node.elif_, *node.else_], top)

    def _is_of_no_one(self, test: nodes.Node) -> bool:
        """Does it ask for a message of a role that none has?"""
        match test:
            case nodes.And():
                return self._is_of_no_one(test.left) or self._is_of_no_one(test.right)
            case nodes.Compare(expr=asked, ops=[nodes.Operand(op="eq", expr=nodes.Const(value=str(role)))]):
                match asked:
                    case nodes.Getattr(node=nodes.Name(name=name), attr="role"):
                        return name == self.speaker and role not in self.roles
                    case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value="role")):
                        return name == self.speaker and role not in self.roles
        return False

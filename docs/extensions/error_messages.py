"""Every message that our code can end with, read from its source: the directive `error-messages`.

A message is the first argument of an exception's class, of a warning, or of TensorFlow's checks,
wherever it is written; `…` stands where a message has a value. What is raised again as it came
(`UserError(str(error))`) has its words where it was raised first.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("plugins", "models", "workflows")
VALUE = "…"
SAID = "error: "  # before what a command says, not raises
SIGNALS = ("Stopped", "Interrupted")  # named otherwise than errors
CHECK = "Assert"  # TensorFlow's, of which the message is the first of its data
SECTIONS = (  # title, its guide, and beginnings of its modules' paths, the first that fits
    ("The command line", "api/command-line", ("workflows/commands/", "workflows/launched")),
    ("Data", "data", ("workflows/data/",)),
    ("Training, evaluation, prediction", "training", ("workflows/training/",)),
    ("Serving", "serving", ("workflows/serving/",)),
    ("Studies and tune", "studies", ("workflows/study/",)),
    ("Files and folders", "data", ("workflows/",)),
    ("Networks and tables", "models", ("models/",)),
    ("The optimizer", "optimizer", ("plugins/",)),
)


Bound: TypeAlias = dict[str, list[str]]
"""What names of a function can be."""


@dataclass(frozen=True, order=True)
class Message:
    """One message.

    Attributes:
      text: its words, `…` for each value.
      kind: the class of the exception, "warning", "check" where TensorFlow raises it, or
        "command" where the command line says it.
      module: the path of its module, from the floor on, without the ending.
    """

    text: str
    kind: str
    module: str


def messages(root: Path = ROOT) -> list[Message]:
    """All messages, in the order of their words."""
    trees = {}
    for floor in FLOORS:
        home = root / floor / "merlin_cowclip"
        for path in sorted(home.rglob("*.py")):
            module = path.relative_to(home).with_suffix("").as_posix()
            trees[module] = ast.parse(path.read_text(encoding="utf-8"))
    called = Called(list(trees.values()))
    found = {
        Message(text, kind, module)
        for module, tree in trees.items()
        for text, kind in within(tree, called)
    }
    return sorted(found, key=lambda message: (message.text.strip(f"{VALUE} ").lower(), message))


class Called:
    """Who calls a function by its name, with what text: functions that put a message together.

    Args:
      trees: of all modules. A function's callers are known where no other has its name.
    """

    def __init__(self, trees: list[ast.Module]) -> None:
        self._named: dict[str, int] = {}
        self._calls: dict[str, list[tuple[ast.Call, ast.AST, Bound]]] = {}
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    self._named[node.name] = self._named.get(node.name, 0) + 1
            known = constants(tree)
            for call, scope in calls(tree, tree):
                self._calls.setdefault(name_of(call), []).append((call, scope, known))

    def bound(self, function: ast.AST, tree: ast.Module) -> list[Bound]:
        """What names of a function are, in each way that it is called or that it loops."""
        known = constants(tree)
        if not isinstance(function, ast.FunctionDef):
            return [known]
        arguments: list[Bound] = []
        names = [argument.arg for argument in function.args.args]
        if self._named.get(function.name, 0) == 1:
            for call, scope, theirs in self._calls.get(function.name, []):
                given = dict(zip(names[names[:1] == ["self"] :], call.args, strict=False))
                given |= {word.arg: word.value for word in call.keywords if word.arg}
                arguments.append({n: variants(value, scope, theirs) for n, value in given.items()})
        looped = list(loops(function, tree)) or [{}]
        return [known | one | other for one in arguments or [{}] for other in looped]


def constants(tree: ast.Module) -> Bound:
    """The texts that a module gives names to."""
    return {
        target.id: variants(node.value, tree, {})
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, (ast.Constant, ast.JoinedStr))
    }


def loops(function: ast.FunctionDef, tree: ast.Module) -> Iterator[Bound]:
    """The texts that a loop over a dict of the module gives its names."""
    dicts = {
        name.id: node.value
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict)
        for name in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(name, ast.Name)
    }
    for loop in ast.walk(function):
        if not (isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call)):
            continue
        of = loop.iter.func
        if isinstance(of, ast.Attribute) and getattr(of.value, "id", None) in dicts:
            for value in dicts[of.value.id].values:  # type: ignore[attr-defined]
                targets = loop.target.elts[1] if isinstance(loop.target, ast.Tuple) else None
                if isinstance(targets, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = zip(targets.elts, value.elts, strict=True)
                    yield {name.id: variants(one, tree, {}) for name, one in pairs}  # type: ignore[attr-defined]


def within(tree: ast.Module, called: Called | None = None) -> Iterator[tuple[str, str]]:
    """The messages of a module, each with its kind."""
    called = called or Called([tree])
    for call, scope in calls(tree, tree):
        kind = kind_of(call)
        written = message_of(call, scope) if kind else None
        if kind is None or written is None:
            continue
        ways = called.bound(scope, tree)
        texts = [text for bound in ways for text in variants(written, scope, bound)]
        for text in dict.fromkeys(texts):
            text = text.rpartition(SAID)[2]
            if any(letter.isalpha() for letter in text):
                yield re.sub(f"{VALUE}{{2,}}", VALUE, " ".join(text.split())), kind


def calls(node: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.Call, ast.AST]]:
    """Every call beneath, with the innermost function around it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, scope
        function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield from calls(child, child if function else scope)


def name_of(call: ast.Call) -> str:
    """The name of what is called, without what it is an attribute of."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def kind_of(call: ast.Call) -> str | None:
    """The exception's class, "warning", "check" or "command"; None for any other call."""
    name = name_of(call)
    if name == "warn":
        return "warning"
    if name == CHECK:
        return "check"
    if name.lstrip("_").endswith("Error") or name in SIGNALS:
        return name
    words = [
        node.value for argument in call.args[:1] for node in ast.walk(argument) if is_text(node)
    ]
    return "command" if any(SAID in word for word in words) else None


def is_text(node: ast.AST) -> TypeGuard[Any]:
    """Whether a part of an expression is text that is written there."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def message_of(call: ast.Call, scope: ast.AST) -> ast.expr | None:
    """The argument that is the message: the first, of a check the first of its data."""
    if kind_of(call) != "check":
        return call.args[0] if call.args else None
    named = [word.value for word in call.keywords if word.arg == "data"]
    data = (named or call.args[1:])[0]
    found = set_to(data.id, scope) if isinstance(data, ast.Name) else [data]
    return next((one.elts[0] for one in found if isinstance(one, ast.List)), None)


def variants(node: ast.expr, scope: ast.AST, bound: Bound) -> list[str]:
    """What an expression of text can be, with `…` for what only a run knows."""
    if isinstance(node, ast.Constant):
        return [node.value if isinstance(node.value, str) else VALUE]
    if isinstance(node, ast.JoinedStr):
        return joined([variants(part, scope, bound) for part in node.values])
    if isinstance(node, ast.FormattedValue):
        return variants(node.value, scope, bound) if node.conversion == -1 else [VALUE]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return joined([variants(node.left, scope, bound), variants(node.right, scope, bound)])
    if isinstance(node, ast.IfExp):
        both = variants(node.body, scope, bound) + variants(node.orelse, scope, bound)
        return list(dict.fromkeys(both))
    if isinstance(node, ast.Name):
        return bound[node.id] if node.id in bound else assigned(node.id, scope)
    return [VALUE]


def joined(parts: list[list[str]]) -> list[str]:
    """All ways to put one of each part after the other; the first of each where they are many."""
    ways = 1
    for part in parts:
        ways *= len(part)
    chosen = parts if ways <= 8 else [part[:1] for part in parts]
    return ["".join(way) for way in itertools.product(*chosen)]


def assigned(name: str, scope: ast.AST) -> list[str]:
    """What a name of the function is, if all that it is ever set to is text written there."""
    values = set_to(name, scope)
    texts = [variants(value, scope, {}) for value in values if not refers_to(value, name)]
    together = [text for some in texts for text in some]
    plain = len(texts) == len(values) > 0 and not any(VALUE in text for text in together)
    return together if plain else [VALUE]


def set_to(name: str, scope: ast.AST) -> list[ast.expr]:
    """Every value that a name of a function is set to."""
    return [
        node.value
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    ]


def refers_to(value: ast.expr, name: str) -> bool:
    """Whether a name is part of an expression."""
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(value))


def by_section(found: list[Message]) -> dict[tuple[str, str], list[Message]]:
    """The messages of each section, by its title and guide."""
    sections: dict[tuple[str, str], list[Message]] = {}
    for title, guide, beginnings in SECTIONS:
        own = [message for message in found if message.module.startswith(beginnings)]
        found = [message for message in found if message not in own]
        sections[title, guide] = own
    assert not found, found
    return sections


class ErrorMessages(SphinxDirective):
    """A section of the page for each part of the code, an entry for each of its messages."""

    def run(self) -> list[nodes.Node]:
        """The sections."""
        for floor in FLOORS:
            for path in (ROOT / floor / "merlin_cowclip").rglob("*.py"):
                self.env.note_dependency(str(path))
        return [
            self.section(title, guide, own)
            for (title, guide), own in by_section(messages()).items()
        ]

    def section(self, title: str, guide: str, own: list[Message]) -> nodes.section:
        """One of them, with a link to its guide."""
        section = nodes.section(ids=[nodes.make_id(title)], names=[title.lower()])
        section += nodes.title("", title)
        entries = nodes.definition_list(classes=["messages"])
        for message in own:
            term = nodes.term("", "", nodes.Text(message.text))
            said = nodes.paragraph("", "", nodes.literal("", message.kind))
            said += nodes.Text(", from ")
            said += nodes.literal("", f"{message.module}.py")
            entries += nodes.definition_list_item("", term, nodes.definition("", said))
        uri = self.env.app.builder.get_relative_uri(self.env.docname, guide)
        more = nodes.reference("", "The guide", refuri=uri, internal=True)
        section += nodes.paragraph("", "", more, nodes.Text(" says how it is meant."))
        section += entries
        return section


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.add_directive("error-messages", ErrorMessages)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    for one in messages():
        print(f"{one.text}\n    {one.kind}, {one.module}.py")

"""Which keys of the configuration the source reads, by following values of its sections through
annotations and assignments.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from msrl.config.schema import Config

SOURCE = Path(__file__).resolve().parents[1] / "src" / "msrl"
# Of config/ only what computes with values: its checks and importers look at every key by name.
OF_CONFIG = {"derived.py", "plugins.py", "general.py", "algo.py"}
Types = frozenset[type[BaseModel]]
NONE: Types = frozenset()


def sections(model: type[BaseModel] = Config) -> Iterator[type[BaseModel]]:
    """A section's class and those of all sections in it, items of lists too."""
    yield model
    for field in model.model_fields.values():
        for inner in _models(field.annotation):
            yield from sections(inner)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


CLASSES = {model.__name__: model for model in sections()}


def leaves(
    model: type[BaseModel] = Config, prefix: str = ""
) -> Iterator[tuple[str, type[BaseModel], str]]:
    """Every key that has more than one value: dotted, the class of its section, its name there."""
    for name, field in model.model_fields.items():
        inner = _models(field.annotation)
        if inner:
            yield from (found for one in inner for found in leaves(one, f"{prefix}{name}."))
        elif not (get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1):
            yield f"{prefix}{name}", model, name


class Reads(ast.NodeVisitor):
    """Walks modules twice: what functions return and attributes hold is known at the second walk."""

    def __init__(self) -> None:
        self.found: set[tuple[type[BaseModel], str]] = set()
        self.returned: dict[str, Types] = defaultdict(lambda: NONE)
        self.held: dict[str, Types] = defaultdict(
            lambda: NONE
        )  # by an attribute of this name, of whatever object
        self.local: dict[str, Types] = {}
        self.owner: Types = NONE

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self.owner = (
            self.owner,
            frozenset({CLASSES[node.name]} if node.name in CLASSES else ()),
        )
        self.generic_visit(node)
        self.owner = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before, self.local = self.local, dict(self.local)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self.local[argument.arg] = (
                self.owner if argument.arg == "self" else annotated(argument.annotation)
            )
        self.returned[node.name] |= annotated(node.returns)
        for _ in range(2):  # a name may be used above its last assignment, in a loop
            self.generic_visit(node)
        self.local = before

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.held[node.target.id] |= annotated(node.annotation)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._bind(target, node.value)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._bind(node.target, node.iter)
        if isinstance(node.target, ast.Tuple):  # names and values of a section
            self.found |= {
                (model, key) for model in self.types(node.iter) for key in model.model_fields
            }
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, node.iter)
        self.generic_visit(node)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            for one, given in zip(target.elts, value.elts, strict=True):
                self._bind(one, given)
        elif isinstance(target, ast.Name):
            self.local[target.id] = self.types(value)
        elif isinstance(target, ast.Attribute):
            self.held[target.attr] |= self.types(value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        for model in self.types(node.value):
            self.found |= {(model, name) for name in model.model_fields if name == node.attr}

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Name) and function.id == "getattr":
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            self.found |= {
                (model, key)
                for model in self.types(node.args[0])
                for key in model.model_fields
                if name in (None, key)
            }
        if isinstance(function, ast.Attribute) and function.attr == "model_dump":
            self.found |= {
                (model, key)
                for model in self.types(function.value) - {Config}
                for key in model.model_fields
            }

    def types(self, node: ast.expr) -> Types:
        """The sections that an expression may be."""
        if isinstance(node, ast.Name):
            return self.local.get(node.id, NONE)
        if isinstance(node, ast.Attribute):
            fields = [model.model_fields.get(node.attr) for model in self.types(node.value)]
            inside = [_models(field.annotation) for field in fields if field is not None]
            return frozenset(model for models in inside for model in models) or self.held[node.attr]
        if isinstance(node, ast.Call):
            name = (
                node.func.id
                if isinstance(node.func, ast.Name)
                else node.func.attr
                if isinstance(node.func, ast.Attribute)
                else ""
            )
            return self.returned[name]
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else node.values
            return frozenset(model for part in parts for model in self.types(part))
        return NONE


def annotated(node: ast.expr | None) -> Types:
    """The sections that an annotation names."""
    names = (
        {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        if node is not None
        else set()
    )
    return frozenset(CLASSES[name] for name in names & set(CLASSES))


def reads() -> set[tuple[type[BaseModel], str]]:
    """Every field of a section's class that the source reads."""
    files = [
        file
        for file in SOURCE.rglob("*.py")
        if "config" not in file.relative_to(SOURCE).parts or file.name in OF_CONFIG
    ]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    walker = Reads()
    for _ in range(2):
        for tree in trees:
            walker.local = {}
            walker.visit(tree)
    return walker.found

"""Search for the configuration keys that the source code reads.

It follows values of sections through annotations and assignments.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from msrl.config.schema import Config, Section
from support import ROOT

SOURCE = ROOT / "src" / "msrl"
# Modules of config/ that compute with values. Checks and importers name every key.
OF_CONFIG = {"plugins.py", "general.py", "algo.py", "rollout.py"}
NOT_READERS = {"config", "checks", "importers"}
Types = frozenset[type[BaseModel]]
NONE: Types = frozenset()


def sections(model: type[BaseModel] = Config) -> Iterator[type[BaseModel]]:
    """Yield the class of a section and of all sections in it, including items of lists."""
    yield model
    for field in model.model_fields.values():
        for inner in _models(field.annotation):
            yield from sections(inner)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


CLASSES = {model.__name__: model for model in sections()}
# Sections by the name of their class, or of a class that they inherit keys from.
FAMILIES: dict[str, Types] = defaultdict(lambda: NONE)
for _section in CLASSES.values():
    for _base in _section.__mro__:
        if _base not in (BaseModel, Section, object):
            FAMILIES[_base.__name__] |= {_section}


def leaves(
    model: type[BaseModel] = Config, prefix: str = ""
) -> Iterator[tuple[str, type[BaseModel], str]]:
    """Yield every key that has more than one value, with the class of its section and its name."""
    for name, field in model.model_fields.items():
        inner = _models(field.annotation)
        if inner:
            for section in inner:
                yield from leaves(section, f"{prefix}{name}.")
        elif not (get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1):
            yield f"{prefix}{name}", model, name


class Reads(ast.NodeVisitor):
    """Visitor of modules.

    Two passes are needed: return values and attributes are known in the second pass.
    """

    def __init__(self) -> None:
        self.keys: set[tuple[type[BaseModel], str]] = set()
        self.returned: dict[str, Types] = defaultdict(lambda: NONE)
        # Types by name of an attribute of any object.
        self.held: dict[str, Types] = defaultdict(lambda: NONE)
        self.local: dict[str, Types] = {}
        self.owner: Types = NONE

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before = self.owner
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        for base in bases:
            if base in FAMILIES:  # a section with methods, outside of the configuration
                FAMILIES[node.name] |= FAMILIES[base]
        self.owner = FAMILIES.get(node.name, NONE)
        self.generic_visit(node)
        self.owner = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before, self.local = self.local, dict(self.local)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self.local[argument.arg] = (
                self.owner if argument.arg == "self" else sections_in(argument.annotation)
            )
        self.returned[node.name] |= sections_in(node.returns)
        if any(
            isinstance(name, ast.Name) and name.id == "property" for name in node.decorator_list
        ):
            self.held[node.name] |= sections_in(node.returns)
        for _ in range(2):  # a name may be used above its last assignment, in a loop
            self.generic_visit(node)
        self.local = before

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.held[node.target.id] |= sections_in(node.annotation)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._bind(target, node.value)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._bind(node.target, node.iter)
        if isinstance(node.target, ast.Tuple):  # names and values of a section
            self.keys |= {
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
            for element, item in zip(target.elts, value.elts, strict=True):
                self._bind(element, item)
        elif isinstance(target, ast.Name):
            self.local[target.id] = self.types(value)
        elif isinstance(target, ast.Attribute):
            self.held[target.attr] |= self.types(value)

    def visit_Name(self, node: ast.Name) -> None:
        """Visit nothing below a name."""

    def visit_Constant(self, node: ast.Constant) -> None:
        """Visit nothing below a constant."""

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        for model in self.types(node.value):
            self.keys |= {(model, name) for name in model.model_fields if name == node.attr}

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Name) and function.id == "getattr":
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            self.keys |= {
                (model, key)
                for model in self.types(node.args[0])
                for key in model.model_fields
                if name in (None, key)
            }
        if isinstance(function, ast.Attribute) and function.attr == "model_dump":
            self.keys |= {
                (model, key)
                for model in self.types(function.value) - {Config}
                for key in model.model_fields
            }

    def types(self, node: ast.expr) -> Types:
        """Return the sections that an expression may be."""
        if isinstance(node, ast.Name):
            return self.local.get(node.id, NONE)
        if isinstance(node, ast.Attribute):
            fields = [model.model_fields.get(node.attr) for model in self.types(node.value)]
            inside = [_models(field.annotation) for field in fields if field is not None]
            return frozenset(model for models in inside for model in models) or self.held[node.attr]
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                return self.returned[node.func.id]
            return self.returned[node.func.attr] if isinstance(node.func, ast.Attribute) else NONE
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            choices = [node.body, node.orelse] if isinstance(node, ast.IfExp) else node.values
            return frozenset(model for choice in choices for model in self.types(choice))
        return NONE


def sections_in(node: ast.expr | None) -> Types:
    """Return the sections that an annotation names."""
    if node is None:
        return NONE
    names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    names |= {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}
    return frozenset(model for name in names & set(FAMILIES) for model in FAMILIES[name])


def reads() -> set[tuple[type[BaseModel], str]]:
    """Return every field of a section's class that the source reads."""
    files = [
        file
        for file in SOURCE.rglob("*.py")
        if NOT_READERS.isdisjoint(file.relative_to(SOURCE).parts)
        or (file.is_relative_to(SOURCE / "config") and file.name in OF_CONFIG)
    ]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    walker = Reads()
    for _ in range(2):
        for tree in trees:
            walker.local = {}
            walker.visit(tree)
    return walker.keys

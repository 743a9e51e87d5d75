"""User functions as reward sources, configured as `path/file.py:function`.

They run only in the worker processes of `pool.py`. This module parses their files without executing
them. A function is called by the names of its parameters: the names of msrl (`response`, `answer`),
of verl (`data_source`, `solution_str`, `ground_truth`, `extra_info`) and of TRL (`completions` and
columns). `images` are files of the images of the prompt. Only names without a meaning, as in
(a, b), are called by position. Everything else is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from msrl.errors import nearest
from msrl.registry import own

RESPONSE = ("response", "solution_str", "completion")
ANSWER = ("answer", "ground_truth")
COLUMNS = ("extra", "extra_info", "data_source")
IMAGES = "images"
BATCH, BATCH_ANSWER = "completions", ("answer", "ground_truth", "solution")  # of TRL
_NEVER_SET = frozenset(("prompts", "completion_ids", "trainer_state"))
ACCEPTED = (
    "(response, answer, extra=None, **options), "
    "(data_source, solution_str, ground_truth, extra_info=None, **options) of verl, "
    "and (completions, **columns) of TRL"
)


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters of a function.

    Attributes:
        positional: Names in order, without keyword-only ones.
        named: Names that a call can pass.
        required: Names without a default.
        has_more: True if it takes further names, as in **kwargs.
    """

    positional: tuple[str, ...]
    named: frozenset[str]
    required: frozenset[str]
    has_more: bool = False

    @property
    def is_batch(self) -> bool:
        """True for a reward function of TRL, which scores lists of completions."""
        return BATCH in self.named

    @property
    def by_position(self) -> bool:
        """True if response and answer are passed by position.

        Their names must then be the names of msrl or verl in this order, as in
        (response, answer, /), or have no meaning: one letter, or a leading underscore.
        """
        first = self.positional[:2]
        if len(first) < 2 or self.named & {*RESPONSE, *ANSWER, BATCH}:
            return False
        is_ordered = first[0] in RESPONSE and first[1] in ANSWER
        return is_ordered or all(len(name) == 1 or name.startswith("_") for name in first)

    @property
    def response(self) -> str | None:
        """Name of the parameter for the response; None if there is not exactly one."""
        names = [name for name in RESPONSE if name in self.named]
        return names[0] if len(names) == 1 else None

    @property
    def answer(self) -> str | None:
        """Name of the parameter for the ground truth; None if the function does not take it."""
        names = [name for name in ANSWER if name in self.named]
        if not names and self.has_more:
            return "ground_truth" if self.response == "solution_str" else "answer"
        return names[0] if names else None

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of `COLUMNS` that a call passes. Functions of verl take all of theirs."""
        of_verl = COLUMNS[1:] if self.has_more and self.response == "solution_str" else ()
        return tuple(name for name in COLUMNS if name in self.named or name in of_verl)

    @property
    def own(self) -> frozenset[str]:
        """Names that a call sets by itself."""
        if self.is_batch:
            return frozenset((BATCH, *BATCH_ANSWER))
        roles = self.positional[:2] if self.by_position else (self.response, self.answer)
        return frozenset((*filter(None, roles), *self.columns))

    def takes_images(self, options: Mapping[str, object]) -> bool:
        """Return True if a call passes the images of the prompt: no option has their name."""
        return IMAGES in self.named and IMAGES not in options

    def __str__(self) -> str:
        names = [*self.positional, *sorted(self.named - set(self.positional))]
        return f"({', '.join([*names, *(['**kwargs'] if self.has_more else [])])})"


def mistake(function: str, options: Mapping[str, object]) -> str | None:
    """Return the reason why a function cannot be called with these options.

    Returns None if the source text shows no problem.
    """
    problem = own.mistake(function)
    if problem is not None:
        return problem
    signature = _defined(function)
    if signature is None:
        return None  # imported or assigned; its process checks it before the first call
    return signature_mistake(own.split(function)[1], signature, options)


def reads_images(function: str, options: Mapping[str, object]) -> bool:
    """Return True if a function that its file defines has a parameter for images."""
    if own.mistake(function) is not None:
        return False
    signature = _defined(function)
    return signature is not None and signature.takes_images(options)


def _defined(function: str) -> Signature | None:
    """Return the parameters of a function; None if its file imports or assigns it."""
    file, name = own.split(function)
    definition = own.definitions(own.parse(file))[name]
    return None if definition is None else _signature(definition.args)


def signature_mistake(name: str, signature: Signature, options: Mapping[str, object]) -> str | None:
    """Return the reason why a call of a function with this signature would be wrong, or None."""
    answers = [answer for answer in ANSWER if answer in signature.named]
    is_known = (
        signature.is_batch or signature.by_position or (signature.response and len(answers) < 2)
    )
    if not is_known:
        return f"{name}{signature} cannot be called by its names. Accepted are {ACCEPTED}"
    known = signature.named - signature.own
    unknown = [option for option in options if option not in known]
    if unknown and (not signature.has_more or unknown[0] in signature.own):
        hint = nearest(unknown[0], known) if known else "it takes no options"
        return f"{name} takes no option {unknown[0]}; {hint}"
    missing = signature.required - signature.own - set(options) - {IMAGES}
    if signature.is_batch:
        missing &= _NEVER_SET  # others are columns of the rows
    if missing:
        return (
            f"{name}{signature}: nothing sets {sorted(missing)[0]}. Set it in options, give it a "
            f"default, or use an accepted signature: {ACCEPTED}"
        )
    return None


def _signature(parameters: ast.arguments) -> Signature:
    """Return the parameters of a definition."""
    positional = [argument.arg for argument in (*parameters.posonlyargs, *parameters.args)]
    keywords = [argument.arg for argument in parameters.kwonlyargs]
    required = positional[: len(positional) - len(parameters.defaults)]
    defaults = zip(keywords, parameters.kw_defaults, strict=True)
    required += [name for name, default in defaults if default is None]
    named = {*positional, *keywords} - {argument.arg for argument in parameters.posonlyargs}
    has_more = parameters.kwarg is not None
    return Signature(tuple(positional), frozenset(named), frozenset(required), has_more)

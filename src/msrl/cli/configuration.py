"""Loading of the configuration with importers of other systems and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from msrl.checks.validate import check
from msrl.config.loader import Flag, Importers, Resolved, load
from msrl.importers.systems import foreign, refuse_foreign_key
from msrl.plan.run_plan import resolve

IMPORTERS = Importers(translate=foreign, refuse_key=refuse_foreign_key)


def load_configuration(
    files: Sequence[str] = (),
    sets: Sequence[str] = (),
    flags: Sequence[Flag] = (),
    command: str | None = None,
    *,
    approximate: bool = False,
) -> Resolved:
    """Merge files, `--set` and flags into one configuration, and check it for `command`.

    Without a command, only the schema is checked. With `approximate`, keys of other systems take
    the nearest setting where msrl has no equal one.

    Raises:
        ManyErrors: one message per error.
    """
    importers = replace(IMPORTERS, translate=partial(foreign, approximate=approximate))
    resolved = load(files, sets, flags, importers)
    if command is not None:
        check(resolved, resolve(resolved.config, command))
    return resolved

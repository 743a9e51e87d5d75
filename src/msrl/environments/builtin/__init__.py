"""Built-in environments, one file each.

Each file defines `environment(*, option=default, ...)`, which returns a new `Environment`.
"""

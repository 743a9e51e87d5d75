"""Packages that generate rows of tasks, one file each: `FILE:TASK?KEY=VALUE&KEY=VALUE` is an input.

A file defines:

- `complete(task, parameters) -> parameters`, which adds `size`, the number of rows, and `seed`. It
  raises MsrlError if the package, the task or a parameter does not exist.
- `package_version() -> str`
- `open_task(task, parameters) -> Callable[[int], JsonObject]`, which returns the function that
  generates a row by its number, from 0. The row is a function of the arguments.

The handler of the same name reads the rows.
"""

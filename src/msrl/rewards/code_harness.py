"""Source text of the program that runs a response's program and then the assertions of its row.

The harness prints a secret word after all assertions pass. It reads the word before the program
starts and then empties standard input, so a program cannot pass by printing what it reads. The
assertions run with the original `exec`, and `==` in them does not trust classes that claim to be
equal to numbers or text. A program that searches the frames and objects of the process for the word
can still find it.
"""

from __future__ import annotations

_HARNESS = """
def _start(_source):
    import ast, os, sys, types
    compile_, exec_, dup, write = compile, exec, os.dup, os.write
    kind, isinstance_, all_, len_, tuple_ = type, isinstance, all, len, tuple
    word, tests = sys.stdin.read().split("\\n", 1)
    out = dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin = open(0, closefd=False)
    slots = (types.WrapperDescriptorType, types.MethodDescriptorType)
    trusted = {
        "fractions", "decimal", "collections", "datetime", "pathlib", "enum",
        "numpy", "pandas", "sympy", "torch",
    }
    plain_types = (int, float, complex, str, bytes, bool, kind(None))

    def is_plain(value, depth=0):
        if kind(value) in plain_types or depth > 50:
            return True
        method = kind(value).__eq__
        module = str(getattr(method, "__module__", "")).partition(".")[0]
        if not isinstance_(method, slots) and module not in trusted:
            return False
        if isinstance_(value, (list, tuple_, set, frozenset)):
            return all_([is_plain(item, depth + 1) for item in value])
        if isinstance_(value, dict):
            items = [*dict.keys(value), *dict.values(value)]
            return all_([is_plain(item, depth + 1) for item in items])
        return True

    def same(left, right):
        if is_plain(left) != is_plain(right):
            return False
        return left == right

    class Equalities(ast.NodeTransformer):
        def visit_Compare(self, node):
            self.generic_visit(node)
            if len_(node.ops) != 1 or not isinstance_(node.ops[0], ast.Eq):
                return node
            operands = [node.left, node.comparators[0]]
            call = ast.Call(ast.Name("_same_" + word, ast.Load()), operands, [])
            return ast.copy_location(call, node)

    tree = ast.fix_missing_locations(Equalities().visit(ast.parse(tests, "tests")))
    code = compile_(tree, "tests", "exec")
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec_(compile_(_source, "program.py", "exec"), module.__dict__)
    module.__dict__["_same_" + word] = same
    exec_(code, module.__dict__)
    sys.stdout.flush()
    write(out, word.encode())

_start(SOURCE)
"""


def harness(program: str) -> str:
    """Return a program that reads a word and tests and prints the word if `program` passes."""
    return _HARNESS.replace("SOURCE", repr(program))

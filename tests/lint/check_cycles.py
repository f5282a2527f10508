"""Files do not include each other in circles, nor do Python modules import each other.

In C++ a header and the source of the same name are one; so they may not use something that uses them. In Python an import in a
function counts, one for type checkers alone does not.
"""

import argparse
import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from check_includes import includes_of, resolve
from sources import C_SUFFIXES, project_files, report

FOLDERS = ("capi", "core", "cuda", "transports")
PACKAGES = "bindings/python/src"
# Includes that close a circle: they may go, and their row with them. A row is a unit and the beginning of what it includes.
KNOWN = set()


def unit_of(path):
    return path.with_suffix("").as_posix()


def cpp_uses(root, files):
    """{unit: units that it includes}"""
    uses = {}
    for path in files:
        found = uses.setdefault(unit_of(path), set())
        for _, quote, name in includes_of((root / path).read_text(encoding="utf-8", errors="replace")):
            target = resolve(root, path, quote, name)
            if target is not None:
                found.add(unit_of(target))
        found.discard(unit_of(path))
    return uses


def module_of(path):
    parts = path.relative_to(PACKAGES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(node):
    """Import statements below a node, without those for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield from _imports(child)


def _named(statement, package):
    """Full names of what an import statement may mean, the longer ones first."""
    if isinstance(statement, ast.Import):
        return [[alias.name] for alias in statement.names]
    parts = package.split(".")
    above = parts[:len(parts) - statement.level + 1] if statement.level else []
    base = ".".join([*above, *filter(None, [statement.module])])
    return [[f"{base}.{alias.name}", base] for alias in statement.names]


def python_uses(root, files):
    """{module: modules that it imports}"""
    modules = {module_of(path): path for path in files}
    uses = {}
    for module, path in modules.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        tree = ast.parse((root / path).read_text(encoding="utf-8"))
        named = [names for statement in _imports(tree) for names in _named(statement, package)]
        uses[module] = {next((name for name in names if name in modules), module) for names in named} - {module}
    return uses


def cycle_in(uses):
    """One circle as text, or None."""
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return None


def check(root, known=None):
    root = Path(root)
    known = KNOWN if known is None else known
    sources = [path for path in project_files(root, C_SUFFIXES) if path.parts[0] in FOLDERS]
    modules = [path for path in project_files(root, {".py"}) if path.is_relative_to(PACKAGES)]
    cpp, problems = cpp_uses(root, sources), []
    for unit, begin in sorted(known):
        closing = {used for used in cpp.get(unit, ()) if used.startswith(begin)}
        if not closing:
            problems.append(f"check_cycles.py: {unit} does not include {begin}*: take it out of KNOWN")
        cpp[unit] = cpp.get(unit, set()) - closing
    for kind, uses in (("includes", cpp), ("imports", python_uses(root, modules))):
        cycle = cycle_in(uses)
        if cycle:
            problems.append(f"circle of {kind}: {cycle}: what they share belongs in a file of its own")
    return problems, len(sources) + len(modules)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default=Path(__file__).resolve().parents[2])
    return report(*check(parser.parse_args().root))


if __name__ == "__main__":
    sys.exit(main())

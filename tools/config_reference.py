"""Writes docs/configuration.md: every setting, from the configuration classes themselves.

``python tools/config_reference.py`` writes the page; with ``--check`` it fails where the page says
something else than the classes.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import sys
import textwrap
import typing
from pathlib import Path
from typing import Any

import msgspec

from cloverinfer.config.load import PREFIX, SECTIONS

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration

Every setting is a key of a section. Flags win over environment variables, which win over the file
(`--config FILE`, YAML), which wins over the defaults. A variable is named `CLOVER_<SECTION>_<KEY>`;
lists are separated by commas there; one of that prefix that is no setting is told and changes
nothing. A topology that is set over a file's counts of nodes leaves out those that it has none of,
and says so. `cloverinfer serve --help` names the flags.

```yaml
model: {model_path: smollm2-135m, dtype: bfloat16}
cluster: {topology: pda, executor: process}
cache: {memory_gib: 4}
```

This page is made by `tools/config_reference.py` from the classes in `src/cloverinfer/config`.
"""


def page() -> str:
    return HEAD + "".join(_section(name, record) for name, record in SECTIONS.items())


def _section(name: str, record: type[msgspec.Struct]) -> str:
    texts = _docstrings(record)
    intro = " ".join((inspect.getdoc(record) or "").split())
    lines = [
        f"\n## {name}\n",
        f"{intro}\n",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for field in msgspec.structs.fields(record):
        if field.name not in SECTIONS:
            text = texts.get(field.name, "").replace("|", "\\|").replace("``", "`")
            cells = (f"`{field.name}`", _type(field.type), _default(field), text)
            lines.append(f"| {' | '.join(cells)} |")
    first = next(f.name for f in msgspec.structs.fields(record) if f.name not in SECTIONS)
    lines.append(f"\nVariables: `{PREFIX}{name.upper()}_{first.upper()}` and so on.\n")
    return "\n".join(lines)


def _docstrings(record: type[msgspec.Struct]) -> dict[str, str]:
    """The string that follows each field in the class's source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(record)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    found = {}
    for field, after in itertools.pairwise(body):
        named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if named and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            name = typing.cast(ast.Name, typing.cast(ast.AnnAssign, field).target).id
            found[name] = " ".join(str(after.value.value).split())
    return found


def _type(kind: Any) -> str:
    names = {
        str: "text",
        int: "integer",
        float: "number",
        bool: "true or false",
        type(None): "none",
    }
    if typing.get_origin(kind) is tuple:
        return "list of texts"
    parts = [kind] if kind in names else list(typing.get_args(kind))
    return " or ".join(names[part] for part in parts)


def _default(field: Any) -> str:
    if field.default is msgspec.NODEFAULT:
        return "`[]`"
    if field.default is None:
        return "none"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where the page is out of date")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE} is out of date: run python tools/config_reference.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

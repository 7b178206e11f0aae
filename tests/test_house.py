"""How the source is laid out: small files, and imports that never lead back. `make lint` checks the layers."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

import fedveil

SOURCE = Path(fedveil.__file__).parent
LONGEST = 350  # lines


def test_no_module_imports_itself_over_others_not_even_late_or_for_types():
    graph = grimp.build_graph("fedveil", exclude_type_checking_imports=False, cache_dir=None)
    sorter = TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_file_is_long():
    lines = {path.relative_to(SOURCE): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert not {path: many for path, many in lines.items() if many > LONGEST}

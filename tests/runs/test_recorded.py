"""Recorded results stay readable: each has a recipe that this version takes."""

import tomllib
from pathlib import Path

import pytest

from fedveil.runs import recipe

RESULTS = Path(__file__).parents[2] / "results"
FOLDERS = sorted(path.parent for path in RESULTS.rglob("recipe.toml"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(RESULTS)))
def test_a_recorded_recipe_or_its_migration_can_be_read(folder: Path) -> None:
    migrated = folder / "recipe.migrated.toml"
    read = recipe.read(str(migrated if migrated.is_file() else folder / "recipe.toml"))
    assert recipe.parse(tomllib.loads(read.toml())) == read

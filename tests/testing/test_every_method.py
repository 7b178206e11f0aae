"""Every registered method passes `check_method`: a new one is covered as soon as it has a name."""

import pytest

import fedveil as fv
from fedveil.testing import check_method
from testing.settings import METHODS, ROUGH, VARIANTS

NAMES = [name for name, method in fv.METHODS.items() if method.__module__.startswith("fedveil.")]


@pytest.mark.parametrize("name", NAMES)
def test_a_method_passes(name: str) -> None:
    check_method(METHODS.get(name) or fv.METHODS[name](), ROUGH.get(name, 1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_combination_of_options_passes(name: str) -> None:
    check_method(VARIANTS[name], ROUGH.get(name, 1e-5))


def test_the_settings_are_of_registered_methods() -> None:
    assert set(METHODS) <= set(NAMES)
    assert all(method.name == name for name, method in METHODS.items())

"""The names that `diloco_jax` offers: few, complete, and the moved ones with a warning."""

import warnings

import pytest

import diloco_jax
from diloco_jax import runs


def test_every_public_name_can_be_imported_without_a_warning() -> None:
    assert len(diloco_jax.__all__) == 18
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(getattr(diloco_jax, name) is not None for name in diloco_jax.__all__)


@pytest.mark.parametrize("name", runs.__all__)
def test_a_moved_name_still_works_and_says_where_it_is(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"import {name} from diloco_jax.runs"):
        assert getattr(diloco_jax, name) is getattr(runs, name)

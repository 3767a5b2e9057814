"""The table of trainers that resolve beside this package, without a package index."""

import pytest

from releasing import neighbours
from releasing.neighbours import BEGIN, END, refused, replaced, row_of, table_of


def test_a_neighbour_is_resolved_alone_where_it_does_not_resolve_beside_us(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(python: str, *sources: str, requirement: str) -> dict[str, str]:
        if python == "3.11" or (sources and python == "3.12"):
            return {}
        assert requirement == ("trainer[tpu]==2.0" if sources or python == "3.12" else "trainer[tpu]")
        return {"trainer": "2.0", "jax": "0.12.0", "flax": "0.12.8", "numpy": "2.5.5"}

    monkeypatch.setattr(neighbours, "resolve", resolve)
    row = row_of("trainer[tpu]")
    assert row == ("trainer[tpu]", "2.0", ("not made for it", "**no**", "jax 0.12.0, flax 0.12.8"))
    table = "\n".join(table_of([row], "2026-11-24"))
    assert table.splitlines()[0] == "| 2026-11-24 | version | Python 3.11 | Python 3.12 | Python 3.13 |"
    assert refused(table) == {("trainer[tpu]", "3.12")}


def test_only_the_text_between_the_marks_is_replaced() -> None:
    page = f"above\n{BEGIN}\nold\n{END}\nbelow\n"
    assert replaced(page, "new") == f"above\n{BEGIN}\n\nnew\n\n{END}\nbelow\n"
    assert replaced(replaced(page, "new"), "new") == replaced(page, "new")
    with pytest.raises(ValueError, match="lacks the marks"):
        replaced("no marks", "new")

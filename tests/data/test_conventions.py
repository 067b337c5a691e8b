"""A slice of `make conventions`; and that it sees a value that was lost."""

import conventions
import pytest

from ctcdraft.data import records, template, unshown


def test_no_value_of_eighty_rows_in_any_convention_is_lost_in_silence():
    outcomes, formats, losses = conventions.explore(80, 5, conventions.templates_of(None))
    assert losses == []
    assert len(formats) == 2
    assert len(outcomes) >= 14
    for name, found in outcomes.items():
        assert found.total() == 80
        assert found["whole"] > 2, name
        assert found["counted"] > 8, name


@pytest.mark.parametrize(
    ("place", "broken"),
    [
        ((template, "unshown"), lambda *_: []),
        ((unshown, "_values"), lambda found, name: [(f"{name}.content", found["content"])] if name == "turn" else []),
        ((records, "_unread"), lambda left: ()),
    ],
)
def test_it_sees_what_is_lost(place, broken, monkeypatch):
    monkeypatch.setattr(*place, broken)
    tokenizers = {"qwen-3": conventions.templates_of(None)["qwen-3"]}
    _, _, losses = conventions.explore(80, 5, tokenizers)
    assert losses

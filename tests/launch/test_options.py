from dataclasses import dataclass
from pathlib import Path

import options
import pytest


@dataclass
class Silent:
    fresh: int = 0


def test_the_page_of_options_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "options.md"
    assert page.read_text() == options.page(), "python tests/helpers/options.py > docs/options.md"


def test_every_option_has_a_default_and_a_meaning():
    rows = [line for line in options.page().splitlines() if line.startswith(("| `", "| **`"))]
    assert len(rows) > 150
    for row in rows:
        assert all(cell.strip(" `") for cell in row.replace("\\|", "/").split("|")[1:-1]), row


def test_an_option_without_a_meaning_is_an_error():
    with pytest.raises(KeyError, match="fresh"):
        [*options.rows(Silent, {})]

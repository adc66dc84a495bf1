"""The reference is in step with the code, and explains every setting."""

from __future__ import annotations

import re

from docs.site import configuration, families, gateway_fields, metrics, placements
from flows import api
from tests.docs.pages import DOCS
from tests.families.registry import FAMILIES


def test_every_setting_is_explained() -> None:
    tables = [*configuration.sections(), *configuration.parameters()]
    unexplained = [
        f"{where} {key.name}"
        for where, _, keys in tables
        for key in keys
        if len(key.description.split()) < 2
    ]
    assert unexplained == []
    assert len(tables) > 40


def test_explanations_stand_by_themselves() -> None:
    """They are read beside a key, in an editor or a form, without those around them."""
    tables = [*configuration.sections(), *configuration.parameters()]
    texts = {f"{where} {key.name}": key.description for where, _, keys in tables for key in keys}
    bare = ("Of ", "Its ", "None:", "As ", "Passed ", "Given ")
    assert [name for name, text in texts.items() if text.startswith(bare)] == []


def test_the_page_is_in_step() -> None:
    told = "run `python docs/site/configuration.py`"
    assert configuration.PAGE.read_text() == configuration.page(), told


def test_the_page_of_requests_is_in_step() -> None:
    told = "run `python docs/site/gateway_fields.py`"
    assert gateway_fields.PAGE.read_text() == gateway_fields.page(), told


def test_the_page_of_metrics_is_in_step() -> None:
    assert metrics.PAGE.read_text() == metrics.page(), "run `python docs/site/metrics.py`"


def test_the_tables_of_families_are_in_step() -> None:
    assert families.PAGE.read_text() == families.page(), "run `python docs/site/families.py`"


def test_the_table_of_placements_is_in_step() -> None:
    told = "run `python docs/site/placements.py`"
    assert placements.PAGE.read_text() == placements.page(), told


def test_every_family_has_been_run() -> None:
    """At least packed; a new one is run by `tests/families/test_table.py`."""
    ran = {title for title, cells in families.record()["families"].items() if "packing" in cells}
    assert ran == {family.title for family in FAMILIES.values()}


def test_the_public_names_are_those_of_the_page() -> None:
    page = (DOCS / "reference" / "python.md").read_text()
    section = page.partition("## What is public")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sorted(api.__all__)
    assert all(hasattr(api, name) for name in api.__all__)

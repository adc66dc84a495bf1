"""The reference is in step with the code, and explains every setting."""

from __future__ import annotations

from docs.site import configuration


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


def test_the_page_is_in_step() -> None:
    told = "run `python docs/site/configuration.py`"
    assert configuration.PAGE.read_text() == configuration.page(), told

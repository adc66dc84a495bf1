"""The environments that tests keep between sessions."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.foreign import CACHE, locked_python, newest_python


def publish(index: Path, version: str) -> None:
    """A package `thing`, in a folder that is an index."""
    about = f"thing-{version}.dist-info"
    files = {
        "thing.py": "",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: thing\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{about}/RECORD"))
    folder = index / "thing"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"thing-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    links = (f'<a href="{each.name}">{each.name}</a>' for each in folder.glob("*.whl"))
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")


def test_an_environment_outlives_its_index_and_goes_when_nobody_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, cache, lock = tmp_path / "index", tmp_path / "cache", tmp_path / "thing.txt"
    others = cache / "others"
    others.mkdir(parents=True)
    settings = {
        CACHE: cache,
        "UV_CACHE_DIR": tmp_path / "uv",
        "UV_FIND_LINKS": others,
        "UV_HTTP_RETRIES": 0,
        "UV_DEFAULT_INDEX": f"file://{index}",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    publish(index, "1.0")
    first = newest_python("thing")
    assert first[1] == "1.0"
    lock.write_text("thing==1.0\n")
    assert locked_python(lock) == first
    publish(index, "2.0")
    second = newest_python("thing")
    assert second[1] == "2.0"
    assert second == newest_python("thing")
    # The lock wants it still.
    assert Path(first[0]).exists()

    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    assert newest_python("thing") == second
    assert locked_python(lock) == first
    with pytest.raises(pytest.skip.Exception, match="does not answer"):
        newest_python("other")

    lock.write_text("thing==2.0\n")
    assert locked_python(lock) == second
    kept = {each.name for each in cache.iterdir()}
    assert kept == {
        "others",
        Path(second[0]).parents[1].name,
        f"{Path(second[0]).parents[1].name}.lock",
    }

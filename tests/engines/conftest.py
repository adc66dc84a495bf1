"""The engines that each module's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.driver import Driver
from tests.engines.models import make
from tests.engines.starting import ENGINES, start
from tests.rollout.chat_models import CHATML, char_tokenizer


@pytest.fixture(scope="module", params=ENGINES)
def driver(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    directory = tmp_path_factory.mktemp("tied")
    make("llama_tied", directory)
    char_tokenizer(CHATML).save_pretrained(directory)
    driver = start(request.param, directory, tmp_path_factory.mktemp("rpc"), masked=True)
    yield driver
    driver.close()

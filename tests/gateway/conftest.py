from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gateway.house import Held, House, held_stream, open_house


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with open_house(tmp_path) as opened:
        yield opened


@pytest.fixture
async def held(house: House) -> AsyncIterator[Held]:
    async with held_stream(house) as stream:
        yield stream

import pytest

from tests.scheduler.core.house import House


@pytest.fixture
def build():
    """Builds houses; in the end all is run to its end, unpinned, and every block is free."""
    houses = []

    def build_house(*args, **kwargs):
        houses.append(House(*args, **kwargs))
        return houses[-1]

    yield build_house
    for house in houses:
        if house.executor is not None:
            house.run()
        for prefix in list(house.core.book.pins):
            house.unpin(prefix.pin.pin_id, key_hash=prefix.pin.key_hash)
        assert house.core.num_running == 0
        assert house.free == house.core.usage().num_blocks


@pytest.fixture
def house(build):
    """Sixteen blocks of four tokens, and an executor that is ready."""
    return build()

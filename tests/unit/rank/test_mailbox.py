"""A bounded queue that a failure opens."""

from __future__ import annotations

import asyncio

import pytest

from k3.rank.mailbox import Mailbox


async def settled() -> None:
    """Let every task run as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_items_come_out_in_order():
    box: Mailbox[int] = Mailbox(3)
    for item in (1, 2, 3):
        await box.put(item)
    assert [await box.get() for _ in range(3)] == [1, 2, 3]


async def test_a_full_box_holds_its_writer_until_there_is_room():
    box: Mailbox[int] = Mailbox(1)
    await box.put(1)
    writing = asyncio.create_task(box.put(2))
    await settled()
    assert not writing.done()
    assert await box.get() == 1
    await writing
    assert await box.get() == 2


async def test_an_empty_box_holds_its_reader_until_there_is_an_item():
    box: Mailbox[int] = Mailbox(1)
    reading = asyncio.create_task(box.get())
    await settled()
    assert not reading.done()
    await box.put(5)
    assert await reading == 5


async def test_a_failure_releases_everybody_with_the_first_reason():
    full, empty = Mailbox[int](1), Mailbox[int](1)
    await full.put(1)
    waiting = [asyncio.create_task(full.put(2)), asyncio.create_task(empty.get())]
    await settled()
    for box in (full, empty):
        box.fail(ValueError("first"))
        box.fail(ValueError("second"))
    for task in waiting:
        with pytest.raises(ValueError, match="first"):
            await task
    with pytest.raises(ValueError, match="first"):
        await full.get()

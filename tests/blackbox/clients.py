"""What the Python client aetcd does with a member; run by clients.rs with HOST:PORT."""

import asyncio
import sys

import aetcd


async def main(host, port):
    async with aetcd.Client(host=host, port=int(port)) as client:
        watch = await client.watch(b"a", range_end=b"c")
        lease = await client.lease(60)
        await client.put(b"a", b"1", lease=lease)
        await client.put(b"b", b"2")
        got = await client.get(b"a")
        assert (got.value, got.version, got.lease) == (b"1", 1, lease.id), got
        assert [kv.key for kv in await client.get_range(b"a", b"c")] == [b"a", b"b"]

        succeeded, _ = await client.transaction(
            compare=[client.transactions.value(b"a") == b"1"],
            success=[client.transactions.put(b"a", b"3"), client.transactions.delete(b"b")],
            failure=[client.transactions.put(b"a", b"wrong")],
        )
        assert succeeded
        assert (await client.get(b"a")).value == b"3"
        assert await client.get(b"b") is None
        assert (await lease.remaining_ttl()) > 50

        seen = []
        async for event in watch:
            seen.append((event.kind, event.kv.key))
            if len(seen) == 4:
                break
        assert seen == [("PUT", b"a"), ("PUT", b"b"), ("PUT", b"a"), ("DELETE", b"b")], seen
        await lease.revoke()

        revision = got.header.revision
        await client.compact(revision + 1)
        try:
            await client.compact(revision)
            raise AssertionError("compacted twice")
        except aetcd.ClientError as error:
            assert "compacted" in str(error), error
    print("put get range txn watch lease compact: as expected")


asyncio.run(main(*sys.argv[1].split(":")))

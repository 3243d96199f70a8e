from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import msgspec
import pytest

from core.request import Request, SamplingParams
from core.step import SequenceOutput, StepResult, StepStats, TokenLogprob
from deployments.rank_channel import (
    Add,
    Cancel,
    ChannelError,
    Down,
    Heartbeat,
    RankSocket,
    Rejected,
    Step,
    Stop,
    Up,
    frame,
    read_messages,
)

REQUEST = Request(
    request_id="r",
    prompt_ids=tuple(range(1000)),
    params=SamplingParams(max_tokens=5, logit_bias=((3, -1.5),), stop_token_ids=(9,), seed=-4),
    n=3,
)
OUTPUT = SequenceOutput(
    request_id="r", index=2, token_ids=(1, 2), logprobs=(TokenLogprob(-1.0, ((3, -2.0),)),)
)
UP: list[Up] = [
    Heartbeat(1.5),
    Step(StepResult(outputs=(OUTPUT,), stats=StepStats(step=4, step_s=0.1, kv_blocks_used=7))),
    Rejected("r", "RequestError", "no", "prompt"),
]


def listen(folder: Path) -> tuple[socket.socket, str]:
    path = str(folder / "s")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(path)
    server.listen(1)
    return server, path


def test_messages_arrive_as_they_were_sent(tmp_path: Path) -> None:
    async def supervisor() -> tuple[list[Up], list[Down]]:
        arrived: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        path = str(tmp_path / "s")
        server = await asyncio.start_unix_server(lambda r, w: arrived.put_nowait((r, w)), path)
        got: list[Down] = []

        def rank() -> None:
            with RankSocket(path) as link:
                for message in UP:
                    link.send(message)
                while not isinstance(got[-1] if got else None, Stop):
                    message = link.receive()
                    assert message is not None
                    got.append(message)

        thread = threading.Thread(target=rank)
        thread.start()
        reader, writer = await arrived.get()
        for down in (Add(REQUEST), Cancel("r"), Cancel("r", 1), Stop()):
            writer.write(frame(down))
        seen = [message async for message in read_messages(reader)]
        await asyncio.to_thread(thread.join)
        writer.close()
        server.close()
        return seen, got

    seen, got = asyncio.run(supervisor())
    assert seen == UP
    assert got == [Add(REQUEST), Cancel("r"), Cancel("r", 1), Stop()]


def test_an_end_in_the_middle_of_a_frame_is_an_end(tmp_path: Path) -> None:
    server, path = listen(tmp_path)
    with RankSocket(path) as link:
        peer, _ = server.accept()
        peer.sendall(frame(Cancel("r"))[:-1])
        peer.close()
        assert link.receive() is None
        with pytest.raises(ChannelError, match="gone"):
            for _ in range(100):
                link.send(UP[1])
    server.close()


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x02\x00\x00\x00\xc1\xc1"])
def test_bytes_that_are_no_message_are_an_error(data: bytes) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        async for _ in read_messages(reader):
            pass

    with pytest.raises(ChannelError):
        asyncio.run(read())


def test_a_decoded_request_is_validated_again() -> None:
    raw = msgspec.msgpack.encode(["Cancel"])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=Down)

"""Reads the history rows of an offline .wandb file: LevelDB log framing around protobuf records."""

import json
import struct
import time

from wandb.proto import wandb_internal_pb2 as pb

BLOCK = 32 * 1024


def records(path):
    data = path.read_bytes()
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            return  # still being written
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last piece of one
            record = pb.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history(path, seconds=120):
    """One dict per logged row of a finished run. wandb's own process may go on writing after `finish` has returned."""
    end = time.monotonic() + seconds
    while not any(record.WhichOneof("record_type") == "exit" for record in records(path)):
        assert time.monotonic() < end, f"{path} has no end after {seconds} seconds"
        time.sleep(0.05)
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}

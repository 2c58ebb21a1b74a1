"""Run by the launcher: five rounds of one collective call, and rank 1 fails in the third as its arguments say."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from windlass.dist.beacon import beacon


def round_of(step: int, how: str, rank: int) -> None:
    beacon().call("sum", step)
    dist.all_reduce(torch.ones(1))
    beacon().call("data")
    if step != 2 or rank != 1:
        return
    if how == "raises":
        raise ValueError("row 17 is damaged")
    if how == "leaves":
        os._exit(0)
    if how == "stalls":
        sleep_in_the_data_pipeline()


def sleep_in_the_data_pipeline() -> None:
    time.sleep(1000)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for step in range(5):
        round_of(step, sys.argv[1], dist.get_rank())
    print("ended well", flush=True)
    dist.destroy_process_group()

"""An engine's process: loads one player, then plays what it is told until its input ends.

Owns no figures: a player times itself, from the first submission to the last token. Runs in the
engine's own environment, so it imports nothing but the protocol until it knows which player to load.

    python worker.py play_vllm
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from protocol import Channel, Job, Setup


def main(player_module: str) -> None:
    channel = Channel()
    player: Any = None
    for command in channel.commands():
        what = command.pop("do")
        if what == "load":
            player = importlib.import_module(player_module).Player(Setup(**command))
            channel.answer({"settings": player.settings})
            continue
        jobs = [Job(**job) for job in command["jobs"]]
        if what == "prepare":
            player.prepare(jobs)
            channel.answer({})
        else:
            channel.answer(player.play(jobs))
    if player is not None:
        player.close()


if __name__ == "__main__":
    main(sys.argv[1])

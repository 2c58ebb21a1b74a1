"""A worker process of the preparation: receives an encoder and its part of a dataset, and sends encoded batches."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection

from windlass.text.worker_pool import Failure, UnreadPart


def serve(incoming: Connection, outgoing: Connection) -> None:
    """Encode one part, and send its batches, then None; `UnreadPart` if the part cannot be read. Another exception is
    sent as a `Failure`.
    """
    try:
        sys.path[:] = incoming.recv()
        try:
            encoder, part = incoming.recv()
        except (AttributeError, ImportError) as error:
            # Of a class in the user's script, which is not imported here.
            outgoing.send(UnreadPart(str(error)))
            return
        for batch in part.encoded(encoder):
            outgoing.send(batch)
        outgoing.send(None)
    except (EOFError, BrokenPipeError):
        return  # the process that started this one has ended, or wants no more
    # Whatever the tokenizer or the template raises: the process that waits for these rows raises it.
    except Exception:
        outgoing.send(Failure(-1, f"a worker process of the preparation failed:\n{traceback.format_exc()}"))


def main() -> None:
    """Serve the process that started this one, over the standard streams."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; that process ends this one
    outgoing = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # what a library prints must not get between the batches
    serve(Connection(os.dup(0), writable=False), outgoing)


if __name__ == "__main__":
    main()

from __future__ import annotations

import subprocess
import sys

# Collections begin all the time and destroy what releases the GIL, while threads come and go.
BUSY = """
import gc, sys, threading, time
from ft_wrapper.monitor.frames import current_frames

class Slow:
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(0.0005)

def start_threads():
    while True:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

threading.Thread(target=start_threads, daemon=True).start()
gc.set_threshold(1)
for _ in range(300):
    Slow()
    assert threading.get_ident() in current_frames()
    assert gc.isenabled()
gc.disable()
current_frames()
assert not gc.isenabled()
"""


def test_frames_can_be_asked_for_while_threads_start_and_garbage_is_collected() -> None:
    subprocess.run([sys.executable, "-c", BUSY], check=True, timeout=60)

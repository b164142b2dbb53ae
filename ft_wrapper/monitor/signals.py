"""Which signals a process uses."""

import signal


def free_signal() -> int:
    """Returns a real-time signal that neither Python nor a C library uses in this process.

    Raises:
        RuntimeError: there is none.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handled = handled_signals()
    for signum in range(signal.SIGRTMIN + 1, signal.SIGRTMAX + 1):
        is_default = signal.getsignal(signum) is signal.SIG_DFL
        if signum not in blocked and is_default and signum not in handled:
            return signum
    raise RuntimeError(
        "every real-time signal is in use, ignored or blocked in this process; "
        "ft_wrapper needs one to interrupt the function, and one to ask where it hangs"
    )


def handled_signals(pid: int | None = None) -> list[int]:
    """Returns the signals with a handler. It sees a C library's handlers too, which Python does not know.

    Args:
        pid: a process that was not reaped yet; None for this one.
    """
    with open(f"/proc/{pid or 'self'}/status", encoding="ascii", errors="replace") as status:
        fields = dict(line.split(":", 1) for line in status if ":" in line)
    bits = int(fields.get("SigCgt", "0"), 16)
    return [int(signum) for signum in signal.valid_signals() if bits >> (signum - 1) & 1]

"""The digest LANES of payloads in device memory: one launch, and eight bytes read back.

The kernel adds to a total that is never set to zero: what it added is the difference to what the total was before. So
no launch clears it and no second kernel brings programs' parts together.
"""

from collections import defaultdict, deque

import torch

from kvrail.codec.core.gpu_digest_kernel import sum_words_kernel

BLOCK_WORDS = 2048
"""Of 64 bits, that a program mixes at once."""
WARPS = 8
MOST_PROGRAMS = 1024
"""Programs of a launch; those of a large payload take several blocks. Some eight a multiprocessor of an H200."""


class _Summer:
    """A stream of its own, a total on the device and the value that it had last. Belongs to one caller at a time."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if on_cuda else None  # type: ignore[no-untyped-call]
        self._host = torch.zeros(1, dtype=torch.int64, pin_memory=on_cuda)
        self._before = 0
        with torch.cuda.stream(self._stream):
            self._total = torch.zeros(1, dtype=torch.int64, device=device)

    def sum(self, payload: torch.Tensor) -> int:
        """Sum over the words of a complete payload, uint8 [n], contiguous, modulo 2^64."""
        with torch.cuda.stream(self._stream):
            if payload.data_ptr() % 8:
                payload = payload.clone()  # of a region that begins elsewhere, which no pool has
            whole = payload.numel() // 8 * 8
            words, tail = payload[:whole].view(torch.int64), payload[whole:]
            programs = max(1, min(MOST_PROGRAMS, -(-words.numel() // BLOCK_WORDS)))
            sum_words_kernel[(programs,)](
                words, tail, self._total, words.numel(), tail.numel(), programs, BLOCK=BLOCK_WORDS, num_warps=WARPS
            )
            self._host.copy_(self._total, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        before, self._before = self._before, int(self._host[0])
        return self._before - before & (1 << 64) - 1


_idle: defaultdict[torch.device, deque[_Summer]] = defaultdict(deque)


def sum_of_words(payload: torch.Tensor) -> int:
    """The sum of digest.py over the words of a payload, uint8 [n], contiguous and complete, modulo 2^64.

    Any thread may call it; other streams are not waited for.
    """
    idle = _idle[payload.device]
    try:
        summer = idle.pop()
    except IndexError:
        summer = _Summer(payload.device)
    found = summer.sum(payload)  # where it raises, what the total holds is unknown, and the summer goes
    idle.append(summer)
    return found

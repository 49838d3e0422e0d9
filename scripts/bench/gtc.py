"""Compares encoding and decoding of GTC messages on one core with copying the dense gradient in memory.

    python scripts/bench/gtc.py [--parameters 24.3e6] [--densities 0.001 0.01] [--messages 1 8] [--rounds 9]

Encoding adds the gradient to the residual, compares, packs, subtracts what is sent, and clears the gradient, in buckets
as in conf/strategy/gtc.yaml. Decoding adds `messages` messages to the gradient. The copy is of the same gradient in the
same rounds. All times are CPU time of this thread. Prints a table of medians. The last line is the ratio copy / (encode
+ decode) for the paper's compression ("a couple of orders of magnitude", a density of 1 %) and one message. Exits with
1 if it is below 0.5.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from torch import Tensor

from asr_am.distributed.strategies.threshold_codec import decode, encode

BUCKET = 1 << 22
TARGET = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=24.3e6, help="the paper's model")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.001, 0.01])
    parser.add_argument("--messages", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = torch.randn(int(options.parameters), generator=torch.Generator().manual_seed(1))
    print("density  messages   copy ms  encode ms  decode ms  copy / both")
    ratios = {}
    for density in options.densities:
        threshold = float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(1 - density / 2)))
        for messages in options.messages:
            copy, make, read = measure(source, threshold, messages, options.rounds)
            ratios[density, messages] = copy / (make + read)
            times = f"{1e3 * copy:9.1f} {1e3 * make:10.1f} {1e3 * read:10.1f}"
            print(f"{density:7.2%} {messages:9} {times} {ratios[density, messages]:12.2f}", flush=True)
    headline = ratios[max(options.densities), min(options.messages)]
    print(f"ratio {headline:.3f} (target: at least {TARGET})")
    sys.exit(headline < TARGET)


def measure(source: Tensor, threshold: float, messages: int, rounds: int) -> tuple[float, float, float]:
    """Returns median seconds of a copy, of encoding, and of decoding."""
    residual, gradient, copied = torch.zeros_like(source), torch.zeros_like(source), torch.zeros_like(source)
    seconds = []
    for _ in range(rounds):
        gradient.copy_(source)
        residual.zero_()  # the same messages in each round
        begin = time.thread_time()
        copied.copy_(source)
        copy_done = time.thread_time()
        words = [encode(r, threshold, g) for r, g in zip(residual.split(BUCKET), gradient.split(BUCKET), strict=True)]
        encoded = time.thread_time()
        for part, g in zip(words, gradient.split(BUCKET), strict=True):
            decode(torch.cat([part] * messages), g, 1.0)
        seconds.append((copy_done - begin, encoded - copy_done, time.thread_time() - encoded))
    copy, make, read = (statistics.median(column) for column in zip(*seconds, strict=True))
    return copy, make, read


if __name__ == "__main__":
    main()

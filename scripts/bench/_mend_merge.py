"""Merge a round with tsugi-mend for each line of standard input, and print the seconds of round and merge."""

import sys
import time

import torch
from tsugi_mend.compression import Quant4State, quant4_compress_delta, quant4_decode, quant4_encode
from tsugi_mend.reducer import LearnerFragment, token_weighted_merge


def main() -> None:
    size, tensors, learners, threads = (int(word) for word in sys.argv[1:])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    values = [torch.nn.Parameter(torch.randn(size)) for _ in range(tensors)]
    outer = torch.optim.SGD(values, lr=0.7, momentum=0.9, nesterov=True, foreach=True)
    payloads = [
        [quant4_encode(1e-3 * torch.randn(size), block_size=256) for _ in range(tensors)] for _ in range(learners)
    ]
    feedback = Quant4State(block_size=256)
    for _ in sys.stdin:
        began_s = time.perf_counter()
        decoded = [[quant4_decode(payload) for payload in of] for of in payloads]
        fragments = [LearnerFragment(str(m), 0, deltas, 1000) for m, deltas in enumerate(decoded)]
        merging_s = time.perf_counter()
        merged = token_weighted_merge(fragments)
        merged_s = time.perf_counter()
        before = [value.detach().clone() for value in values]
        for value, delta in zip(values, merged, strict=True):
            value.grad = delta
        outer.step()
        with torch.no_grad():
            for number, (value, old) in enumerate(zip(values, before, strict=True)):
                step = quant4_compress_delta(value - old, state=feedback, key=str(number))
                torch.add(old, step, out=value)
        done_s = time.perf_counter()
        sys.stdout.write(f"{done_s - began_s} {merged_s - merging_s}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

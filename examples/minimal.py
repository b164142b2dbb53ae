"""The shortest program that survives a fault: ftrun --nproc-per-node 2 examples/minimal.py.

Rank 1 fails once, at step 5. Both ranks leave ``train``, and enter it again.
"""

import torch
import torch.distributed as dist

from ft_wrapper import CallWrapper, Wrapper


@Wrapper
def train(call_wrapper: CallWrapper, steps):
    dist.init_process_group("gloo")
    for step in range(steps):
        total = torch.ones(1) * step
        dist.all_reduce(total)
        if step == 5 and dist.get_rank() == 1 and call_wrapper.iteration == 0:
            raise RuntimeError("something broke")
        call_wrapper.ping()
    return total.item()


if __name__ == "__main__":
    print(f"the last sum is {train(10)}")

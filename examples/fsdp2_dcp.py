"""Trains an FSDP2 model through faults, with torch.distributed.checkpoint (DCP).

ftrun --nproc-per-node 4 --active-world-size 3 examples/fsdp2_dcp.py checkpoints
ftrun --nproc-per-node 4 --active-world-size 3 examples/fsdp2_dcp.py checkpoints --async
"""

import argparse
import hashlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import fully_shard

from ft_wrapper import CallWrapper, Wrapper
from ft_wrapper.checkpoints import Checkpoints


def batch(step):
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    return torch.randn(16, 32, generator=generator)


def state_of(model, optimizer, step):
    weights, moments = states.get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


@Wrapper
def train(call_wrapper: CallWrapper, args):
    dist.init_process_group("gloo")
    # An asynchronous save talks while training does: in a group of its own, never in the default one.
    saver = dist.new_group(backend="gloo") if args.asynchronous else None
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 63), torch.nn.ReLU(), torch.nn.Linear(63, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    checkpoints = Checkpoints(call_wrapper, args.folder)
    state = state_of(model, optimizer, 0)
    if (newest := checkpoints.newest()) is not None:
        dcp.load(state, checkpoint_id=newest)
        states.set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    saving = []
    for step in range(state["step"], args.steps):
        call_wrapper.ping()
        (model(batch(step)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        done = step + 1
        if done % args.every == 0 or done == args.steps:
            state, folder = state_of(model, optimizer, done), checkpoints.path(done)
            finish(saving, checkpoints)
            if args.asynchronous:
                saving = [(done, dcp.async_save(state, checkpoint_id=folder, process_group=saver))]
            else:
                dcp.save(state, checkpoint_id=folder)
                checkpoints.seal(done)
    finish(saving, checkpoints)
    whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = states.get_model_state_dict(model, options=whole)  # empty but on rank 0
    digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in weights.values()))
    return digest.hexdigest() if weights else None


def finish(saving, checkpoints):
    for step, save in saving:
        save.result()
        checkpoints.seal(step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="of the checkpoints; all ranks share it")
    parser.add_argument("--steps", type=int, default=40, help="to train in all")
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--async", dest="asynchronous", action="store_true", help="train on while saving")
    digest = train(parser.parse_args())
    if digest is not None:
        print(f"final weights sha256 {digest}")

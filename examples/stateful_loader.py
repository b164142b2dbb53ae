"""Resumes in the middle of an epoch: each rank's position in its data is in the checkpoint.

ftrun --nproc-per-node 2 examples/stateful_loader.py checkpoints

Needs ``pip install torchdata``. Rank 1 fails once, in the second epoch; with ``--clean`` after the folder
it does not, and the final weights are the same.
"""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

from ft_wrapper import CallWrapper, Wrapper

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    sys.exit("this needs torchdata (pip install torchdata): a plain DataLoader would begin the epoch again")

EPOCHS = 3


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return index, torch.randn(8, generator=torch.Generator().manual_seed(index))


def make_loader():
    sampler = DistributedSampler(Rows(), shuffle=True, seed=0)
    return StatefulDataLoader(Rows(), batch_size=4, sampler=sampler, num_workers=2, persistent_workers=True)


def newest(folder):
    steps = [int(name[4:]) for name in os.listdir(folder) if name.startswith("step")]
    return os.path.join(folder, f"step{max(steps)}") if steps else None


def save(folder, step, epoch, loader, model, optimizer):
    """Each rank's position, and once what all have in common, in one file: whole or not there."""
    positions = [None] * dist.get_world_size()
    dist.all_gather_object(positions, loader.state_dict())
    if dist.get_rank() == 0:
        path = os.path.join(folder, f"step{step}")
        state = {"step": step, "epoch": epoch, "positions": positions}
        state.update(model=model.state_dict(), optimizer=optimizer.state_dict())
        torch.save(state, os.path.join(folder, "part"))
        os.replace(os.path.join(folder, "part"), path)


@Wrapper
def train(call_wrapper: CallWrapper, folder, fails):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader, step, first, seen = make_loader(), 0, 0, []
    path = newest(folder)
    if path is not None:
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["positions"][dist.get_rank()])
        step, first = state["step"], state["epoch"]
    ddp = DistributedDataParallel(model)
    for epoch in range(first, EPOCHS):
        loader.sampler.set_epoch(epoch)
        for indices, rows in loader:
            call_wrapper.ping()
            optimizer.zero_grad()
            (ddp(rows) - 1).square().mean().backward()
            optimizer.step()
            step += 1
            seen.append((epoch, step, indices.tolist()))
            if step % 3 == 0:
                save(folder, step, epoch, loader, model, optimizer)
            if fails and step == 13 and dist.get_rank() == 1 and call_wrapper.iteration == 0:
                raise RuntimeError("something broke, in the second epoch")
    return model, seen


if __name__ == "__main__":
    os.makedirs(sys.argv[1], exist_ok=True)
    model, seen = train(sys.argv[1], "--clean" not in sys.argv)
    for epoch, step, rows in seen:  # since the last checkpoint before the fault
        print(f"rank {os.environ['RANK']} epoch {epoch} step {step} rows {rows}")
    if os.environ["RANK"] == "0":
        print("final weights sha256", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())

"""Trains a small language model through faults: a byte-level transformer under DistributedDataParallel.

    ftrun --nproc-per-node 4 examples/train_lm.py --active 3
    ftrun --nproc-per-node 4 examples/train_lm.py --active 3 --live

With ``--live`` the surviving processes keep the state, and no step is repeated; a checkpoint is read only if
no process has the state any more.

The text is what every machine with Python has: the sources of the standard library. Three things make a
run end with the same weights, bit for bit, whatever happened on the way:

- A checkpoint exists completely or not at all, and every entry of ``train`` resumes from the newest one, or,
  with ``--live``, from the last committed step.
- Which data a step sees, and every random number in it, depends on the seed, the step and the rank only.
- As many ranks train after a fault as before it (``--active``); a spare takes a lost rank's place, or else
  the others wait until there are enough again (``--min-ranks``): for a process that is started again.
"""

import argparse
import hashlib
import logging
import os
import random
import re
import sysconfig
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ft_wrapper import CallWrapper, LiveState, Wrapper, events

TEXT_BYTES = 2_000_000
CONTEXT = 64  # bytes that the model sees
WIDTH = 64
HEADS = 4
LAYERS = 2


def load_text() -> Tensor:
    """Returns the first bytes of Python's own sources: the same on every rank."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    if len(text) <= CONTEXT:
        raise SystemExit(f"there are no Python sources in {folder} to train on")
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)


class Block(nn.Module):
    """Attention over the bytes so far, then a two-layer network, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class LanguageModel(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.bytes(x) + self.positions)))


def loss_of(model: nn.Module, text: Tensor, batch_size: int, device: torch.device) -> Tensor:
    """Returns the loss on a batch drawn from the text with torch's global random numbers."""
    starts = torch.randint(len(text) - CONTEXT, (batch_size, 1))
    batch = text[starts + torch.arange(CONTEXT + 1)].to(device, torch.long)
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def seed_everything(*parts: object) -> None:
    """Makes all random numbers that follow depend on these parts alone, and not on what came before."""
    torch.manual_seed(random.Random(repr(parts)).getrandbits(63))


# A process that was paused for minutes may have been declared dead, and still wake up and write. Its writes
# must neither count nor replace anything. Nothing can keep it from writing, but the number of the global
# iteration is a fencing token: it is used once, and later iterations have higher numbers. So
#
# - a checkpoint's name says which iteration wrote it, and the newest one of the highest iteration counts;
# - before any rank trains, an iteration puts the checkpoint that it begins with under its own number: what an
#   earlier iteration still writes after that has a lower number.
#
# Numbers are unique in the life of one store. A folder may outlive it: hence the number of the run.
CHECKPOINT = re.compile(r"run-(\d+)-iteration-(\d+)-step-(\d+)\.(pt|tmp)")
KEEP = 3

Token = tuple[int, int]  # run, iteration


def run_number(folder: Path, run_id: str) -> int:
    """Returns the run's number among all that ever used the folder; a new run takes the next one."""
    while True:
        runs = {
            int(path.name[4:]): path.read_text() for path in folder.glob("run-*") if path.name[4:].isdecimal()
        }
        for number, name in runs.items():
            if name == run_id:
                return number
        whole = folder / f"{uuid.uuid4()}.tmp"
        whole.write_text(run_id)
        try:
            os.link(whole, folder / f"run-{max(runs, default=0) + 1}")  # fails if somebody else was faster
        except FileExistsError:
            pass
        finally:
            whole.unlink()


def checkpoint_path(folder: Path, token: Token, step: int) -> Path:
    """Returns where the checkpoint of a step is put by an iteration."""
    return folder / f"run-{token[0]}-iteration-{token[1]}-step-{step}.pt"


def written(folder: Path, suffix: str) -> dict[Path, tuple[int, int, int]]:
    """Returns the checkpoints of a folder with their run, iteration and step, the one that counts first."""
    found = {path: CHECKPOINT.fullmatch(path.name) for path in folder.iterdir()}
    numbers = {
        path: (int(match[1]), int(match[2]), int(match[3]))
        for path, match in found.items()
        if match and match[4] == suffix
    }
    return dict(sorted(numbers.items(), key=lambda item: item[1], reverse=True))


def newest_token(folder: Path) -> Token:
    """Returns the run and iteration that came last to the folder; (-1, -1) if there was none."""
    run, iteration, _ = next(iter(written(folder, "pt").values()), (-1, -1, -1))
    return run, iteration


def save_checkpoint(folder: Path, token: Token, step: int, checkpoint: dict) -> None:
    """Writes a checkpoint that is either there as a whole or not at all, then removes old ones.

    Raises:
        SystemExit: a later iteration has begun in the folder. It may begin a moment after the check, but
            what is written then does not count. The check keeps an evicted rank from leaving files behind.
    """
    path = checkpoint_path(folder, token, step)
    unfinished = path.with_suffix(".tmp")
    with open(unfinished, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())  # the data first,
    try:
        if (newest := newest_token(folder)) > token:
            raise SystemExit(f"(run, iteration) {token} is over: {newest} has begun in {folder}")
        os.replace(unfinished, path)  # then the name
    finally:
        unfinished.unlink(missing_ok=True)
    for old in list(written(folder, "pt"))[KEEP:]:
        old.unlink(missing_ok=True)
    for left, numbers in written(folder, "tmp").items():  # by writers that were killed
        if numbers[:2] < token:
            left.unlink(missing_ok=True)


def newest_readable(folder: Path) -> Path | None:
    """Returns the checkpoint that counts: the newest one of the highest iteration that can be read."""
    for path in written(folder, "pt"):
        try:
            torch.load(path, weights_only=True)
        except Exception as error:  # whatever a damaged file leads to: take the one before
            print(f"{path} cannot be read: {error}", flush=True)
        else:
            return path
    return None


def begin_with(folder: Path, token: Token) -> str | None:
    """Puts the checkpoint that counts, if there is one, under this iteration's number; returns its new name.

    Raises:
        SystemExit: this iteration's number, or a higher one, has been used in the folder.
    """
    if (newest := newest_token(folder)) >= token:
        raise SystemExit(
            f"(run, iteration) {token} cannot begin in {folder}: {newest} has begun there before; if no "
            "other job uses the folder, give --run-id a name that was not used before"
        )
    chosen = newest_readable(folder)
    if chosen is None:
        return None
    own = checkpoint_path(folder, token, written(folder, "pt")[chosen][2])
    os.link(chosen, own)  # a copy, on storage that has no links
    return own.name


def rank_0_sees(path: Path, device: torch.device) -> bool:
    """Tells all ranks whether rank 0 sees a file: so all of them stop after the same step."""
    seen = torch.tensor([path.exists()], dtype=torch.uint8, device=device)
    dist.broadcast(seen, 0)
    return bool(seen.item())


def steps_from(first: int, args: argparse.Namespace, rank: int, ping: Callable[[int], None]) -> Iterator[int]:
    """Goes through the steps that are left; what a step draws at random depends on seed, step and rank."""
    for step in range(first, args.steps):
        ping(step)
        seed_everything(args.seed, step, rank)
        yield step


def no_fault(where: str, **place: int) -> None:
    """What happens where a fault could be injected, as long as no one asks for one."""


def train(call_wrapper: CallWrapper, args: argparse.Namespace, inject=no_fault):
    """Trains from the newest checkpoint on. Entered again, with the same arguments, after every fault.

    Args:
        args: the command line's.
        inject: called where a fault can be injected.
        call_wrapper: filled in by the wrapper.

    Returns:
        On rank 0 the checksum of the final weights, their loss and the number of steps; elsewhere None.
    """
    device = call_wrapper.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, iteration = dist.get_rank(), call_wrapper.iteration
    place = {"rank": rank, "slot": call_wrapper.state.initial_rank, "iteration": iteration}
    text = load_text()
    folder, token = args.checkpoint_dir, (0, iteration)
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        token = (run_number(folder, args.run_id), iteration)

    def build() -> dict:
        model = LanguageModel().to(device)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}

    def save(objects: dict, step: int) -> None:
        state = {name: value.state_dict() for name, value in objects.items()}
        with call_wrapper.atomic():
            if step > 0:
                inject("atomic", step=step - 1, **place)
            save_checkpoint(folder, token, step, {"step": step, **state})

    def restore(objects: dict) -> int:
        choice = [None]
        if rank == 0:  # chooses for all
            choice = [begin_with(folder, token)]
            if choice[0] is None:
                save(objects, 0)
        dist.broadcast_object_list(choice)
        if choice[0] is None:
            return 0
        checkpoint = torch.load(folder / choice[0], weights_only=True)
        for name, value in objects.items():
            value.load_state_dict(checkpoint[name])
        return checkpoint["step"]

    # DDP orders its buckets by the first backward pass, and the order of a sum decides its last bit. So the
    # first step of each entry has to be summed like every other.
    if args.live:
        live = LiveState(call_wrapper, build, restore=restore, seed=args.seed)
        objects = {name: live[name] for name in ("model", "optimizer")}
        first, saved = live.step, -1
        steps, commit = live.steps(args.steps), live.commit
        # Looking for unused parameters, DDP keeps the order that it begins with.
        ddp = live.data_parallel(find_unused_parameters=True)
    else:
        seed_everything(args.seed)
        objects = build()
        first = saved = restore(objects)
        steps, commit = steps_from(first, args, rank, call_wrapper.ping), objects["optimizer"].step
        ddp = DistributedDataParallel(objects["model"])
        loss_of(ddp, text, args.batch_size, device).backward()  # or with a pass that does not count

    done = first
    for step in steps:
        inject("step", step=step, **place)
        objects["optimizer"].zero_grad()
        loss = loss_of(ddp, text, args.batch_size, device)
        loss.backward()
        commit()
        if step == first:
            events.emit("first_step", **place)
        if rank == 0 and step % 10 == 0:
            print(f"step {step:4}  loss {loss.item():.4f}", flush=True)

        done = step + 1
        if done % args.checkpoint_every == 0:
            if rank == 0:
                save(objects, done)
            saved = done
            if args.stop_file and rank_0_sees(args.stop_file, device):
                break
    if rank == 0 and saved != done:  # also when a fault came between the last commit and its checkpoint
        save(objects, done)

    if rank != 0:
        return None
    digest = hashlib.sha256()
    model = objects["model"]
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    seed_everything(args.seed, "evaluation")
    with torch.no_grad():
        loss = loss_of(model.eval(), text, 64, device)
    return digest.hexdigest(), loss.item(), done


def default_run_id() -> str:
    """Returns what the launcher calls this run; torchrun restarts all ranks under the same name."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "") + "-" + os.environ.get("TORCHELASTIC_RESTART_COUNT", "")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=60, help="steps to train in all, those before a restart included")
    add("--batch-size", type=int, default=8, help="sequences per rank and step")
    add("--seed", type=int, default=0, help="decides the weights, the data and all random numbers")
    add("--checkpoint-dir", type=Path, default=Path("checkpoints"), help="folder that all ranks share")
    add("--checkpoint-every", type=int, default=5, help="steps from one checkpoint to the next")
    add("--live", action="store_true", help="keep the state in the processes that survive")
    add("--active", type=int, help="ranks that train; the others are hot spares (default: all train)")
    add("--min-ranks", type=int, default=1, help="with fewer ranks than this the others wait for more")
    add("--soft-timeout", type=float, help="seconds without progress until all restart (default: auto)")
    add("--hard-timeout", type=float, help="the same until a rank is killed (default: auto)")
    add("--heartbeat-timeout", type=float, default=30, help="seconds of silence until a rank counts as lost")
    add("--stop-file", type=Path, help="end at the next checkpoint once this file is there")
    add("--run-id", default=default_run_id(), help="name of this run, new whenever all ranks restart")
    add("--faults", default=os.environ.get("FT_WRAPPER_FAULTS"), help="such as exception:rank=1:step=10")
    return parser.parse_args(argv)


def main() -> None:
    """Trains under the wrapper, and prints what came out on one rank."""
    args = parse_args()
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO)
    # The same sums in the same order on every run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)

    inject, plugins = no_fault, {}
    if args.faults:
        from ft_wrapper.testing.inject_fault import InjectFinalize, InjectInitialize, Injector, parse_faults

        injector = Injector(parse_faults(args.faults), fired_dir=args.checkpoint_dir / "faults")
        inject = injector.check
        plugins = {"initialize": InjectInitialize(injector), "finalize": InjectFinalize(injector)}

    wrapped = Wrapper(
        active_world_size=args.active,
        soft_timeout=args.soft_timeout or "auto",
        hard_timeout=args.hard_timeout or "auto",
        heartbeat_timeout=args.heartbeat_timeout,
        min_world_size=args.min_ranks,
        rejoin=True,
        **plugins,
    )(train)
    result = wrapped(args, inject)
    if result:
        print(f"final weights sha256 {result[0]}  loss {result[1]:.6f}  steps {result[2]}", flush=True)


if __name__ == "__main__":
    main()

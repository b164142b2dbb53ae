"""The fault runs' training under DistributedDataParallel; fault_runs.py starts it by ftrun."""

from __future__ import annotations

from typing import Any

from live_job import Model, Run, loss_of, main

from ft_wrapper import CallWrapper, LiveState


def train(run: Run, call_wrapper: CallWrapper = None) -> None:
    """One run."""
    run.begin(call_wrapper)

    def build() -> dict[str, Any]:
        model = Model(run.variant.batch_norm)
        return {"model": model, **run.optimizers(model)}

    def restore(objects: dict[str, Any]) -> int:
        return run.restore(objects, 0, 1)

    live = LiveState(call_wrapper, build, restore=restore, seed=0)
    run.recovered(live)
    # Buckets in the same order in each iteration, or the sums of the first step have other bits.
    in_order = not run.variant.warm_up
    ddp = live.data_parallel("model", find_unused_parameters=in_order)
    if run.variant.warm_up:
        loss_of(ddp).backward()
        live["optimizer"].zero_grad()
    is_writer = call_wrapper.state.active_rank == 0
    run.train(live, ddp, ddp.no_sync, lambda: is_writer and run.save(call_wrapper, live, 0))
    run.end(live)


if __name__ == "__main__":
    main(train)

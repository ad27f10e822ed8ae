"""A plain torch loop, sharded (FSDP2) or not: saves in the background and resumes from the newest step."""

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import wherry


def train(model, optimizer, batches, root, every=2):
    """Train; a restarted run resumes after the newest committed step."""
    store = wherry.Store(root, to="dcp", options={"join": "."})
    begun = store.latest() or 0
    if begun:
        state = store.restore(into=state_of(model, optimizer)).state
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for step, batch in enumerate(batches[begun:], begun + 1):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % every == 0:
            store.save(state_of(model, optimizer), step, metrics={"loss": loss.item()})
    store.wait()
    return store


def state_of(model, optimizer):
    """Weights and moments by parameter name, regardless of the sharding."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments}

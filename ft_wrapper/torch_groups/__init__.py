"""Process groups of ``torch.distributed``, which last for one iteration."""

"""What programs find that were written for torch's own agents."""

"""What programs written for torch's own agents find."""

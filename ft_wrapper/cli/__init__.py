"""The commands of ``ftrun`` beside starting a job."""

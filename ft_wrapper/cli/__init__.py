"""The commands of ``ftrun`` other than starting a job."""

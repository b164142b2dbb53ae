"""Every schedule within a bound: of simulated jobs, and of whatever else runs on a `Scheduler`."""

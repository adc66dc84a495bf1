"""The operating system: processes, memory, hosts, files, locks, seeds, fault points."""

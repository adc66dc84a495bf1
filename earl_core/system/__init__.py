"""What the operating system knows: processes, memory, hosts, files, locks, seeds, fault points."""

"""What a step will take, in memory, bytes and time, before a machine is rented."""

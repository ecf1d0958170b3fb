"""The files of a checkpoint: the index, shards, and what to read of them. It knows no rank and no optimizer."""
